"""`TransformersData`: datasets of rows, as the Trainer of transformers takes them, as a `DataModule`."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.checks import KnownKeywords, choice, function, switch, whole_number
from trainkit.console import notice
from trainkit.errors import ConfigurationError, DataError, MissingMethodError
from trainkit.integrations.transformers.model_columns import ModelColumns, RowCollator, find_model
from trainkit.integrations.transformers.packing import (
    LONG_ROWS,
    PackedRows,
    PackingCollator,
    RowPieces,
    check_packing,
    has_weights,
    is_flash,
    packed_stream,
    refuse_unpackable,
)
from trainkit.module.data_module import DataModule
from trainkit.rng import RandomState

__all__ = ["TransformersData", "default_collator"]

_STRATEGIES = ("random", "sequential", "group_by_length")
_CONTEXTS = tuple(multiprocessing.get_all_start_methods())
_ROWS_AT_A_TIME = 10_000
_NAMES = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}


class TransformersData(KnownKeywords, DataModule):
    """Datasets of rows (dicts of columns) in ordinary `DataLoader`s, with the arguments of transformers' Trainer.

    What differs: the loaders are sharded and resumed by trainkit, and evaluation always reads every row once, in order.

    Datasets are lists of dicts, `torch.utils.data.Dataset`, `datasets.Dataset` or iterable ones. `val` and `test` may be dicts
    of datasets, one loader each: then `val_names` and `test_names` have the names, in the order of the loaders.

    Columns that the forward of the model does not take are removed, which one notice tells. The model is the attribute `model`
    of the module that the trainer runs, if it is one of transformers, or of PEFT around one; otherwise nothing is removed.

    Args:
        train: The training dataset.
        val: The validation dataset, or a dict of them.
        processing_class: The tokenizer, or another processor. The default collator pads with it.
        test: The test dataset, or a dict of them.
        predict: The dataset to predict on.
        train_batch_size: Number of rows in a training batch, for each device; of sequences, if they are packed.
        eval_batch_size: The same for the other loaders.
        data_collator: Makes a batch of a list of rows. Default: `DataCollatorWithPadding(processing_class)` for a tokenizer or
            a feature extractor, otherwise `default_data_collator`. The `seed` of `DataCollatorForLanguageModeling` is not
            used: its masks follow from the seed of the run, in any number of workers and processes.
        num_workers: Number of worker processes of each loader.
        pin_memory: Fetch into page-locked memory; `None`: if there is an accelerator.
        persistent_workers: Keep the workers after an epoch. Needs `num_workers`.
        prefetch_factor: Number of batches that each worker fetches in advance; `None`: 2. Needs `num_workers`.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver"; `None`: Python's default. Needs
            `num_workers`.
        drop_last: Drop the last training batch if it is short.
        train_sampling_strategy: "random"; "sequential"; or "group_by_length": rows of similar lengths in a batch, by
            `LengthGroupedSampler` of transformers, over groups of 50 batches.
        length_column_name: The column with the lengths of rows, for "group_by_length". Without it, the length is that of the
            main input of the model, such as `input_ids`.
        packing: Put several rows in one sequence of `max_length` tokens, each attending to itself only, with position ids and
            labels of its own: the loss and the gradient are those of the rows one by one, but less is padded. For causal
            models. Rows without `labels` are labeled by their `input_ids`. Not for `predict`.
        max_length: Number of tokens in a packed sequence.
        long_rows: What to do with rows longer than `max_length`: "error"; "truncate" drops their ends; "split" makes several
            rows of each, so that the first token of a part is not predicted.
        remove_unused_columns: Remove the columns that the forward of the model does not take.
        label_names: Columns to keep in addition. Default: those that transformers knows of the model.

    Attributes:
        val_names: The names of the validation loaders if `val` is a dict, otherwise empty.
        test_names: The same for `test`.

    Raises:
        ConfigurationError: An argument is wrong, or contradicts another.

    Example:
        ```python
        data = TransformersData(train, val, tokenizer, train_batch_size=16, train_sampling_strategy="group_by_length")
        trainer.fit(module, data)
        ```
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        processing_class: Any = None,
        *,
        test: Any = None,
        predict: Any = None,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None,
        drop_last: bool = False,
        train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = "random",
        length_column_name: str = "length",
        packing: bool = False,
        max_length: int | None = None,
        long_rows: Literal["error", "truncate", "split"] = "error",
        remove_unused_columns: bool = True,
        label_names: Sequence[str] | None = None,
    ) -> None:
        self.datasets = {"train": train, "val": val, "test": test, "predict": predict}
        self.processing_class = processing_class
        self.train_batch_size = whole_number(train_batch_size, "train_batch_size", 1)
        self.eval_batch_size = whole_number(eval_batch_size, "eval_batch_size", 1)
        self.data_collator = function(data_collator, "data_collator", "DataCollatorWithPadding(tokenizer)")
        workers = whole_number(num_workers, "num_workers")
        given = (persistent_workers or None, prefetch_factor, multiprocessing_context)
        names = ("persistent_workers", "prefetch_factor", "multiprocessing_context")
        needing = [name for name, value in zip(names, given, strict=True) if value is not None]
        if workers == 0 and needing:
            raise ConfigurationError(f"{needing[0]} needs worker processes. For example: num_workers=2")
        self.loader_options = {
            "num_workers": workers,
            "pin_memory": torch.accelerator.is_available() if pin_memory is None else switch(pin_memory, "pin_memory"),
            "persistent_workers": switch(persistent_workers, "persistent_workers"),
            "prefetch_factor": whole_number(prefetch_factor, "prefetch_factor", 1, optional=True),
            "multiprocessing_context": choice(multiprocessing_context, "multiprocessing_context", _CONTEXTS, optional=True),
        }
        self.drop_last = switch(drop_last, "drop_last")
        self.train_sampling_strategy = choice(train_sampling_strategy, "train_sampling_strategy", _STRATEGIES)
        self.length_column_name = length_column_name
        self.packing = switch(packing, "packing")
        self.max_length = whole_number(max_length, "max_length", 2, optional=True)
        self.long_rows = choice(long_rows, "long_rows", LONG_ROWS)
        self.remove_unused_columns = switch(remove_unused_columns, "remove_unused_columns")
        self.label_names = None if label_names is None else list(label_names)
        self.val_names = tuple(val) if isinstance(val, Mapping) else ()
        self.test_names = tuple(test) if isinstance(test, Mapping) else ()
        self._told: set[str] = set()
        self._checked_packing = False
        self._check_datasets()
        if self.packing:
            self._check_packing_arguments()

    def setup(self, stage: str) -> None:
        """Check that the model computes packed rows as it does one by one, if rows are packed. Call it if you override it."""
        model = self._find_model()
        self._checked_packing = self.packing and stage != "predict" and model is not None and has_weights(model)
        if self._checked_packing:
            check_packing(model)

    def train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training dataset.

        Raises:
            MissingMethodError: There is none.
            DataError: The dataset cannot be used.
        """
        dataset = self._get("train")
        if self.packing:
            return self._packed_loader("train", _NAMES["train"], dataset)
        options: dict[str, Any] = {"batch_size": self.train_batch_size, "drop_last": self.drop_last}
        if not _is_stream(dataset):
            options |= self._order(dataset)
        return self._loader(_NAMES["train"], dataset, **options)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]] | None:
        """The loader of the validation dataset, or a list of them in the order of `val_names`; `None` without one."""
        trainer = self.trainer
        if self.datasets["val"] is None and (trainer is None or trainer.stage != "validate"):
            return None
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The loader of the test dataset, or a list of them in the order of `test_names`."""
        return self._evaluation("test")

    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The loader of the dataset to predict on."""
        return self._evaluation("predict")

    def _evaluation(self, stage: str) -> DataLoader[Any] | list[DataLoader[Any]]:
        dataset = self._get(stage)
        if isinstance(dataset, Mapping):
            return [self._evaluation_loader(stage, f"{_NAMES[stage]} ({name})", one) for name, one in dataset.items()]
        return self._evaluation_loader(stage, _NAMES[stage], dataset)

    def _evaluation_loader(self, stage: str, name: str, dataset: Any) -> DataLoader[Any]:
        if self.packing and stage != "predict":
            return self._packed_loader(stage, name, dataset)
        return self._loader(name, dataset, batch_size=self.eval_batch_size)

    # ------------------------------------------------------------------------------------------------ the parts of a loader

    def _loader(self, name: str, dataset: Any, **options: Any) -> DataLoader[Any]:
        columns = self._columns()
        dataset, removed = self._remove_columns(name, dataset, columns)
        collate = RowCollator(self._collator(), columns, removed, name, explains=self.data_collator is None)
        return DataLoader(dataset, collate_fn=collate, **options, **self.loader_options)

    def _collator(self) -> Callable[[list[Any]], Any]:
        from transformers import DataCollatorForLanguageModeling

        collate = self.data_collator
        if collate is None:
            return default_collator(self.processing_class)
        if isinstance(collate, DataCollatorForLanguageModeling) and collate.seed is not None:
            # Its generator would continue from batch to batch, in each worker and process.
            self._tell(
                f"{type(collate).__name__}(seed={collate.seed}) is not used: the masks of a batch follow from the seed of the "
                "run and the number of the batch alone, so that a resumed run has the same. To choose them: Trainer(seed=)"
            )
            collate = copy.copy(collate)
            collate.seed = collate.generator = None
        unseeded: Callable[[list[Any]], Any] = collate
        return unseeded

    def _packed_loader(self, stage: str, name: str, dataset: Any) -> DataLoader[Any]:
        model = self._find_model()
        assert self.max_length is not None
        if not self._checked_packing and model is not None:
            refuse_unpackable(model)
            self._tell(
                f"packing: {type(model).__name__} has no weights in setup, so it was not checked with a few tokens that packed "
                "rows do not see each other."
            )
        columns = self._columns()
        dataset, _ = self._remove_columns(name, dataset, columns)
        how = RowPieces(self.max_length, self.long_rows, columns, name)
        options: dict[str, Any] = {"batch_size": self.eval_batch_size}
        if stage == "train":
            options = {"batch_size": self.train_batch_size, "drop_last": self.drop_last}
        if _is_stream(dataset):
            packed: Any = packed_stream(dataset, how)
        else:
            packed = PackedRows(dataset, _lengths(dataset, "input_ids", None, "attention_mask"), how)
            options["shuffle"] = stage == "train" and self.train_sampling_strategy == "random"
        collate = PackingCollator(self.max_length, model is not None and is_flash(model))
        return DataLoader(packed, collate_fn=collate, **options, **self.loader_options)

    def _order(self, dataset: Any) -> dict[str, Any]:
        """The options of the training loader that decide its order."""
        if not len(dataset):
            return {}  # The samplers of torch and transformers fail; the error of the loop names the set.
        if self.train_sampling_strategy != "group_by_length":
            return {"shuffle": self.train_sampling_strategy == "random"}
        from transformers.trainer_pt_utils import LengthGroupedSampler

        model = self._find_model()
        names = getattr(self.processing_class, "model_input_names", None) or [getattr(model, "main_input_name", "input_ids")]
        lengths = _lengths(dataset, names[0], self.length_column_name)
        return {"sampler": LengthGroupedSampler(self.train_batch_size, lengths=lengths)}

    def _remove_columns(self, name: str, dataset: Any, columns: ModelColumns | None) -> tuple[Any, list[str]]:
        """The dataset, and which of its columns are removed: from its table, if it has one, otherwise by the collator."""
        if columns is None:
            return dataset, []
        known = _column_names(dataset)
        if known is None:
            self._tell(f"of each row only what {columns.model_name}.forward takes is kept.")
        if not known:
            return dataset, []
        unused = columns.unused(known, name)
        if unused:
            self._tell(
                f"removed from the rows, since {columns.model_name}.forward does not take it: {', '.join(unused)}. To keep all "
                "columns: TransformersData(remove_unused_columns=False)"
            )
        return (dataset.remove_columns(unused) if unused and _is_arrow(dataset) else dataset), unused

    def _columns(self) -> ModelColumns | None:
        """The columns to keep; `None`: all."""
        model = self._find_model() if self.remove_unused_columns else None
        return None if model is None else ModelColumns(model, self.label_names)

    def _find_model(self) -> Any:
        return None if self.trainer is None else find_model(self.trainer.model)

    def _get(self, stage: str) -> Any:
        dataset = self.datasets[stage]
        if dataset is None:
            raise MissingMethodError(
                f"this run needs a {_NAMES[stage]} dataset, which TransformersData has not. Pass it: "
                f"TransformersData({stage}=dataset)"
            )
        return dataset

    def _tell(self, text: str) -> None:
        """Print a notice once, however often loaders are made."""
        if text not in self._told:
            self._told.add(text)
            notice(text)

    # ------------------------------------------------------------------------------------------------------------- checks

    def _check_datasets(self) -> None:
        for stage, dataset in self.datasets.items():
            if isinstance(dataset, Mapping):
                if stage in ("train", "predict") or not dataset:
                    names = ", ".join(map(repr, dataset)) or "nothing"
                    raise DataError(
                        f"TransformersData({stage}=) must be a dataset, not a {type(dataset).__name__} of {names}. "
                        f"For example: TransformersData({stage}=datasets[{next(iter(dataset), 'train')!r}])"
                    )
                for name, one in dataset.items():
                    _check_dataset(f"{stage}[{name!r}]", one)
            elif dataset is not None:
                _check_dataset(stage, dataset)
        if self.train_sampling_strategy == "group_by_length" and _is_stream(self.datasets["train"]):
            raise ConfigurationError(
                "train_sampling_strategy='group_by_length' needs a training dataset with a length and items by number, but "
                f"it is {type(self.datasets['train']).__name__}. Remove the argument, or group the rows in the stream."
            )

    def _check_packing_arguments(self) -> None:
        if self.max_length is None:
            raise ConfigurationError("packing=True needs the length of a sequence. For example: max_length=1024")
        if self.data_collator is not None:
            raise ConfigurationError(
                "packing=True makes batches with a collator of its own, so that data_collator is not used. Remove one of them; "
                "labels of your own are a column of the rows: labels, -100 where nothing is learned"
            )
        if self.train_sampling_strategy == "group_by_length":
            raise ConfigurationError(
                "packing=True with train_sampling_strategy='group_by_length': packed sequences have one length. Remove one."
            )


def _check_dataset(name: str, dataset: Any) -> None:
    if hasattr(dataset, "iloc"):
        raise DataError(
            f"TransformersData({name}=) is a {type(dataset).__name__} of pandas, whose items are columns and not rows. "
            "Convert it: datasets.Dataset.from_pandas(frame)"
        )
    if _is_stream(dataset) or (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, str)
    ):
        return
    raise DataError(
        f"TransformersData({name}=) must be a list of dicts, a datasets.Dataset, or a Dataset or IterableDataset of "
        f"torch.utils.data, not {type(dataset).__name__}. A generator: a class of IterableDataset whose __iter__ makes it"
    )


def _is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable only."""
    return isinstance(dataset, IterableDataset)


def _is_arrow(dataset: Any) -> bool:
    """Whether a dataset is a `datasets.Dataset` whose rows are those of its table, without a transform of the user."""
    return hasattr(dataset, "column_names") and getattr(dataset, "format", {}).get("type", "custom") != "custom"


def _column_names(dataset: Any) -> list[str] | None:
    """The columns of the first row; none if it is no dict, or is missing; `None` if that is not known before iteration."""
    if _is_arrow(dataset):
        return list(dataset.column_names)
    if _is_stream(dataset):
        names = getattr(dataset, "column_names", None)
        return None if names is None else list(names)
    random_state = RandomState()
    row = dataset[0] if len(dataset) else None
    random_state.restore()
    return list(row) if isinstance(row, Mapping) else []


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """The collator that transformers' Trainer takes by default."""
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, SequenceFeatureExtractor, default_data_collator

    if isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        padding: Callable[[list[Any]], Any] = DataCollatorWithPadding(processing_class)
        return padding
    stacking: Callable[[list[Any]], Any] = default_data_collator
    return stacking


def _lengths(dataset: Any, main: str, column: str | None, mask: str = "") -> list[int]:
    """The lengths of the rows of a map-style dataset.

    Args:
        dataset: The dataset.
        main: The column with one item for each token.
        column: A column with the lengths, which is preferred; `None`: it is not used.
        mask: A column with 0 for the items that are padding, which do not count.

    Raises:
        DataError: A row has neither `main` nor `column`.
    """
    if _is_arrow(dataset):
        if column in dataset.column_names:
            return [int(length) for length in dataset.with_format(None)[column]]
        if main in dataset.column_names:
            return _lengths_of_lists(dataset, main, mask)
    random_state, lengths = RandomState(), []
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping) or not (column in row or hasattr(row.get(main), "__len__")):
            has = f"the columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"type {type(row).__name__}"
            raise DataError(
                f"the length of each row is needed, but row {index} has neither {main!r} nor a column of lengths; it has "
                f"{has}. Tokenize the texts: dataset.map(lambda row: tokenizer(row['text'])); or, for group_by_length, name "
                "the column with the lengths: TransformersData(length_column_name=...)"
            )
        counted = row[column] if column in row else np.count_nonzero(row[mask]) if mask in row else len(row[main])
        lengths.append(int(counted))
    random_state.restore()
    return lengths


def _lengths_of_lists(dataset: Any, main: str, mask: str) -> list[int]:
    """The lengths of the lists in a column of a `datasets.Dataset`, read from its table without making Python objects."""
    import pyarrow.compute as arrow

    columns = [main, *([mask] if mask in dataset.column_names else [])]
    lengths: list[int] = []
    for table in dataset.with_format("arrow").select_columns(columns).iter(_ROWS_AT_A_TIME):
        counts = arrow.list_value_length(table[main]).to_numpy()
        if mask in columns:
            kept = np.concatenate([[0], np.cumsum(arrow.list_flatten(table[mask]).to_numpy() != 0)])
            ends = np.cumsum(counts)
            counts = kept[ends] - kept[ends - counts]
        lengths += counts.tolist()
    return lengths
