"""`BatchSizeFinder`: searches the largest batch size that fits into memory, at the beginning of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import warn
from trainkit.errors import ConfigurationError
from trainkit.module.overridable_hooks import is_overridden
from trainkit.tuner.attributes import find_attribute, read_saved_state, starts_from_checkpoint
from trainkit.tuner.batch_size import BatchSizeOptions, find_batch_size

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["BatchSizeFinder"]


class BatchSizeFinder(Callback):
    """Finds the largest batch size that fits into memory before a run, and sets the attribute to it.

    It does what `trainkit.tuner.Tuner.scale_batch_size` does, in the hook `setup` of `fit`, `validate`, `test` and
    `predict`. The loaders come later, so they have the size found.

    The size is in the checkpoint. A fit that resumes uses it and does not search again, so that its batches stay the same.

    A subclass that overrides `on_fit_start` does not search in `fit`, as in Lightning, and one that calls
    `scale_batch_size` in `on_validation_start` and the like has the size found in `setup`. During `fit` the size cannot
    change: the order of the samples, and what a checkpoint resumes from, depend on it.

    Args:
        mode: `"power"`: double the size until it does not fit. `"binsearch"`: then search between the last two sizes.
        steps_per_trial: Optimizer steps, or batches of an evaluation, in each trial.
        init_val: The first size.
        max_trials: The maximum number of trials.
        batch_arg_name: The attribute, of the module, the data module or their `hparams`, that the loader uses.
        margin: With `"binsearch"`, reduce the result by this fraction, rounded down.
        max_val: The largest size.

    Attributes:
        optimal_batch_size: The size found; before that `init_val`, and `None` in a `fast_dev_run`.

    Raises:
        ConfigurationError: An argument is wrong; when the run begins, the attribute does not exist, loaders were passed,
            the strategy is not supported, or no size fits.
        ModuleError: When the run begins: the module cannot be copied.
        ProcessFailedError: When the run begins: a trial failed on another process, for another reason than memory.

    Example:
        ```python
        trainer = Trainer(callbacks=[BatchSizeFinder(mode="binsearch")])
        trainer.fit(module, datamodule=data)  # whose loader has batch_size=self.batch_size
        ```
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        super().__init__()
        self._options = BatchSizeOptions(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, owner="BatchSizeFinder"
        )
        self.optimal_batch_size: int | None = self._options.init_val
        self._searches = False  # Whether `setup` is searching now.
        self._searched = False  # Whether `setup` of this run has searched.

    def scale_batch_size(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Search now, in `setup`; override it to do something before or after.

        Raises:
            ConfigurationError: The loaders of the run exist already.
        """
        if self._searches:
            self.optimal_batch_size = find_batch_size(trainer, pl_module, str(trainer.stage), self._options, trainer.datamodule)
            self._searched = True
        elif not self._searched:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name}: scale_batch_size was called after the loaders were created, and the batch size of a run is "
                f"fixed. Expected a search before that. Fix: remove on_fit_start from {name}, so that it searches in setup; or "
                "Tuner(trainer).scale_batch_size(module) before each fit"
            )

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        name, self._searched = self._options.batch_arg_name, False
        if stage == "fit" and is_overridden(self, "on_fit_start", Callback):
            return
        if trainer._run.user_loaders[0 if stage == "fit" else 1] is not None:
            raise ConfigurationError(
                f"BatchSizeFinder: {stage} received loaders, whose batch size is fixed. Expected loaders that the module or a "
                f"data module creates with self.{name}. Fix: trainer.{stage}(module, datamodule=data)"
            )
        if stage != "fit" or not starts_from_checkpoint(trainer):
            self._searches = True
            try:
                self.scale_batch_size(trainer, module)
            finally:
                self._searches = False
            return
        saved = read_saved_state(trainer, self)
        if saved is None:
            warn(
                "BatchSizeFinder does not search in a fit that starts from a checkpoint, because the size of the batches must "
                "stay the same. To search: call Tuner(trainer).scale_batch_size before fit."
            )
            return
        self.load_state_dict(saved)
        if self.optimal_batch_size is not None:
            find_attribute((name,), module, trainer.datamodule, "").set(self.optimal_batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimal_batch_size = state_dict["optimal_batch_size"]
