"""`Tuner`: finds a learning rate or a batch size before `fit` is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.checks import choice
from trainkit.errors import ConfigurationError
from trainkit.module.data_module import DataModule
from trainkit.tuner.batch_size import BatchSizeOptions, find_batch_size
from trainkit.tuner.range_test import RangeTest, RangeTestOptions, find_learning_rate

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Tuner"]

_METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Finds a learning rate or a batch size with short trials, before `fit` is called.

    A trial runs on a deep copy of the module. It logs and saves nothing, and changes neither the trainer nor the data: a
    `fit` afterwards is the same, bit for bit, as without it. Callbacks do not run in it, except `GradientClipping`;
    schedulers do not advance. It needs memory on the host for the copy, and a module for which `copy.deepcopy` works.

    The methods are collective: every process calls them, and gets the same result. `LearningRateFinder` and
    `BatchSizeFinder` do the same at the beginning of a run.

    Args:
        trainer: The `Trainer` that will train.

    Example:
        ```python
        trainer = Trainer(max_epochs=10)
        tuner = Tuner(trainer)
        tuner.scale_batch_size(module, datamodule=data, mode="binsearch")  # sets data.batch_size
        tuner.lr_find(module, datamodule=data)  # sets module.lr
        trainer.fit(module, datamodule=data)
        ```
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> RangeTest | None:
        """Run a learning-rate range test: train for a few steps with a learning rate that grows in each of them.

        The loss falls most steeply at a learning rate that is a good start (L. N. Smith: Cyclical learning rates for
        training neural networks, WACV 2017). The module must have exactly one optimizer. The learning rates are values of
        the attribute: each parameter group gets what `configure_optimizers` makes of them, which is called three times more
        for that. If it does not use the attribute, all groups get the same, with `update_attr=False`; otherwise it is an
        error. With accumulation, the loss of a step is the mean over its window.

        Args:
            model: The module.
            train_dataloaders: As in `fit`.
            val_dataloaders: No effect: a trial does not validate.
            dataloaders: Only `None`: the test trains.
            datamodule: As in `fit`.
            method: Only `"fit"`.
            min_lr: The first learning rate.
            max_lr: The last learning rate.
            num_training: Number of learning rates, one for each optimizer step, evenly spaced; as many epochs as needed.
            mode: `"exponential"` (spaced by logarithms) or `"linear"`.
            early_stop_threshold: Stop when the smoothed loss is more than this times its smallest value. `None`: never.
            update_attr: Set the attribute of the module to the suggestion.
            attr_name: The attribute, of the module, the data module or their `hparams`. Default: `lr` or `learning_rate`.

        Returns:
            The result; `None`, with a notice, in a `fast_dev_run`.

        Raises:
            ConfigurationError: An argument is wrong, the attribute does not exist, `configure_optimizers` does not use it
                or makes learning rates of it that do not grow evenly with it, or the trainer has a `LearningRateFinder`.
            DataError: The data is an iterator, which the trial would use up.
            ModuleError: The module cannot be copied.
            OptimizerError: There is not exactly one optimizer.
        """
        options = RangeTestOptions(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name, owner="lr_find"
        )
        if method != "fit" or dataloaders is not None:
            raise ConfigurationError(
                f"lr_find(method={method!r}): the range test trains, so it needs method='fit' and training data. For example: "
                "lr_find(module, train_dataloaders=train_loader)"
            )
        self._refuse("LearningRateFinder")
        train_dataloaders, datamodule = _separate_datamodule(train_dataloaders, datamodule)
        return find_learning_rate(self._trainer, _unwrap_compiled(model), options, train_dataloaders, datamodule)[0]

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits into the memory of the device, and set the attribute to it.

        Each trial runs a few steps with one size. The loader must come from the module or the data module, and use the
        attribute. Sizes beyond the number of samples of a process are not tried. On the CPU, where memory seldom runs out,
        the search ends there or at `max_val`.

        With several processes each one runs its trials alone on its device, without collectives, and reserves the memory of
        DDP's buckets. A size counts as too large if it is for one of them. Under ZeRO on several processes, and on XLA, the
        search is an error. `Trainer.plan` estimates the memory of parameters and optimizer without running anything.

        Args:
            model: The module.
            train_dataloaders: Only `None`: their batch size is fixed.
            val_dataloaders: Only `None`.
            dataloaders: Only `None`.
            datamodule: The data module, if the loader is not the module's.
            method: The stage to try: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            mode: `"power"`: double the size until it does not fit. `"binsearch"`: then search between the last two sizes.
            steps_per_trial: Optimizer steps, or batches of an evaluation, in each trial.
            init_val: The first size.
            max_trials: The maximum number of trials.
            batch_arg_name: The attribute, of the module, the data module or their `hparams`.
            margin: With `"binsearch"`, reduce the result by this fraction, rounded down.
            max_val: The largest size.

        Returns:
            The largest size that fitted, less the margin; `None`, with a notice, in a `fast_dev_run`.

        Raises:
            ConfigurationError: An argument is wrong, the attribute does not exist or the loader does not use it, the
                strategy is not supported, no size fits, or the trainer has a `BatchSizeFinder`.
            ModuleError: The module cannot be copied.
            ProcessFailedError: A trial failed on another process, for another reason than memory.
        """
        options = BatchSizeOptions(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, owner="scale_batch_size"
        )
        choice(method, "scale_batch_size(method=)", _METHODS)
        train_dataloaders, datamodule = _separate_datamodule(train_dataloaders, datamodule)
        if any(loaders is not None for loaders in (train_dataloaders, val_dataloaders, dataloaders)):
            raise ConfigurationError(
                "scale_batch_size received loaders, whose batch size is fixed. Expected loaders that the module or a data "
                f"module creates with self.{batch_arg_name}. Fix: scale_batch_size(module, datamodule=data)"
            )
        self._refuse("BatchSizeFinder")
        return find_batch_size(self._trainer, _unwrap_compiled(model), method, options, datamodule)

    def _refuse(self, name: str) -> None:
        """Refuse a trainer whose callback does the same."""
        if any(kind.__name__ == name for callback in self._trainer.callbacks for kind in type(callback).__mro__):
            raise ConfigurationError(
                f"the trainer has a {name}, which searches when fit is called. Expected one of them. Fix: remove the callback, "
                "or do not call the Tuner"
            )


def _separate_datamodule(train_dataloaders: Any, datamodule: DataModule | None) -> tuple[Any, DataModule | None]:
    """Loaders and data module; the latter may be passed instead of loaders."""
    if isinstance(train_dataloaders, DataModule) and datamodule is None:
        return None, train_dataloaders
    return train_dataloaders, datamodule


def _unwrap_compiled(module: Any) -> Any:
    """The module inside `torch.compile(module)`; trials run it without compiling."""
    return getattr(module, "_orig_mod", module)
