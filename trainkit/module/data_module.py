"""`DataModule`: a class for loaders and their preparation."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.module.hparams import HyperparametersMixin
from trainkit.module.overridable_hooks import DataHooks
from trainkit.nested import leaves

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["DataModule", "LightningDataModule"]

D = TypeVar("D", bound="DataModule")


class DataModule(HyperparametersMixin, DataHooks):
    """The loaders of a run and their preparation, in one class.

    Define the loaders that you need, and optionally `prepare_data` (one process: download, tokenize), `setup(stage)` (every
    process: open, split) and `teardown(stage)`. A transfer hook that it defines replaces that of the module.

    Attributes:
        name: A name of your own; not used.
        trainer: The trainer of the run; `None` before.
        CHECKPOINT_HYPER_PARAMS_KEY: Where a checkpoint has the hyperparameters of the data module.
        prepare_data_per_node: Call `prepare_data` in one process of each node; `False`: in one process of the run.

    Example:
        ```python
        class Digits(DataModule):
            def setup(self, stage):
                self.train, self.val = random_split(load(), [0.8, 0.2])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=32)

        trainer.fit(module, datamodule=Digits())
        ```
    """

    name: str | None = None
    trainer: Trainer | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"

    @classmethod
    def from_datasets(
        cls: type[D],
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> D:
        """Create a data module from datasets: a map-style training dataset is shuffled, the others are read in order.

        Args:
            train_dataset: The training dataset, or a list of datasets that are trained on together.
            val_dataset: The validation dataset, or a list of them.
            test_dataset: The test dataset, or a list of them.
            predict_dataset: The dataset to predict on, or a list of them.
            batch_size: Number of samples per batch and device. Passed to `__init__` too if it has this argument.
            num_workers: Number of worker processes of each loader. Passed to `__init__` too if it has this argument.
            **datamodule_kwargs: Arguments of `__init__`.

        Example:
            ```python
            trainer.fit(module, datamodule=DataModule.from_datasets(train, val, batch_size=32))
            ```
        """
        module = cls(**_select_accepted(cls, {"batch_size": batch_size, "num_workers": num_workers}), **datamodule_kwargs)
        load = partial(_loaders, batch_size=batch_size, num_workers=num_workers)
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, dataset in datasets.items():
            if dataset is not None:
                setattr(module, f"{stage}_dataloader", partial(load, dataset, shuffle=stage == "train"))
        return module

    @classmethod
    def load_from_checkpoint(
        cls: type[D],
        checkpoint_path: str | PathLike[str],
        map_location: Any = None,
        hparams_file: None = None,
        *,
        trust: Iterable[str] = (),
        **overrides: Any,
    ) -> D:
        """Build a data module with the hyper-parameters and the state that a checkpoint holds.

        Args:
            checkpoint_path: The folder of the checkpoint.
            map_location: No effect: it is for modules.
            hparams_file: Lightning's argument, which must be `None`: pass the hyper-parameters themselves.
            trust: Packages whose classes and functions the checkpoint may name, as for a module: `["mypackage."]`.
            **overrides: Arguments of `__init__` that differ from the saved ones, or were not saved.

        Raises:
            CheckpointError: It is missing or damaged, its run had no data module, or an argument of `__init__` is neither
                saved nor passed.
            UnknownNameError: `__init__` does not accept an override.
            ConfigurationError: `trust` is no list of packages.
        """
        from trainkit.module.from_checkpoint import Trust, build_data_module

        if hparams_file is not None:
            overrides["hparams_file"] = hparams_file
        return build_data_module(cls, checkpoint_path, Trust(trust), overrides)

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run ends by an error, a signal or Ctrl-C, after the callbacks' `on_exception` and before `teardown`."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `setup`; by `load_from_checkpoint`, without it."""

    def __str__(self) -> str:
        """The loaders and the sizes of their datasets, one stage in each line."""
        stages = {"Train": "train", "Validation": "val", "Test": "test", "Predict": "predict"}
        return "\n".join(f"{{{name} dataloader: {self._sizes(f'{stage}_dataloader')}}}" for name, stage in stages.items())

    def _sizes(self, name: str) -> str:
        """The sizes of the datasets of the loaders of a stage; "None" if they cannot be created yet."""
        try:
            loaders = list(leaves(getattr(self, name)()))
        except Exception:  # It is not defined, or setup(stage) has not run yet.
            return "None"
        sizes = [f"size={_size(getattr(loader, 'dataset', loader))}" for loader in loaders]
        return " ; ".join(sizes if len(sizes) == 1 else [f"{number}. {size}" for number, size in enumerate(sizes, 1)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}


def _select_accepted(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that `__init__` has as arguments, or all if it takes any."""
    known = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    return {name: value for name, value in options.items() if takes_any or name in known}


def _size(dataset: Any) -> int | str:
    """The length of a dataset, or "NA" if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return "NA"


def _loaders(dataset: Any, *, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    """The loader of a dataset, or the list of loaders of a list."""
    if isinstance(dataset, list | tuple):
        return [_loaders(one, shuffle=shuffle, batch_size=batch_size, num_workers=num_workers) for one in dataset]
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle and not isinstance(dataset, IterableDataset),
        num_workers=num_workers,
        pin_memory=torch.accelerator.is_available(),
    )


LightningDataModule = DataModule
