"""`LearningRateFinder`: a learning-rate range test at the beginning of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import warn
from trainkit.module.overridable_hooks import is_overridden
from trainkit.tuner.attributes import find_attribute, read_saved_state, starts_from_checkpoint
from trainkit.tuner.range_test import RangeTest, RangeTestOptions, find_learning_rate, rates_of, same_rate

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["LearningRateFinder"]


class LearningRateFinder(Callback):
    """Finds a learning rate with a range test before training, and sets the module's attribute to it.

    It does what `trainkit.tuner.Tuner.lr_find` does, in the hook `setup` of `fit`: `configure_optimizers` comes later, so
    optimizer and schedules start from the learning rate found. The test trains a copy of the module as it is in that hook,
    before the module's own `setup`; it logs and saves nothing, and changes nothing that the run uses. A warning says if
    `configure_optimizers` then makes other learning rates of the attribute than in the search.

    The result is in the checkpoint. A run that resumes uses it and does not search again.

    To search at the start of epochs, with one process, call `lr_find` in a subclass: see the second example. It searches at
    most once in each epoch, also if the run resumes in it.

    Args:
        min_lr: The first learning rate.
        max_lr: The last learning rate.
        num_training_steps: Number of learning rates, one for each optimizer step, evenly spaced.
        mode: `"exponential"` (spaced by logarithms) or `"linear"`.
        early_stop_threshold: Stop when the smoothed loss is more than this times its smallest value. `None`: never.
        update_attr: Set the attribute of the module to the suggestion.
        attr_name: The attribute, of the module, the data module or their `hparams`. Default: `lr` or `learning_rate`.

    Attributes:
        optimal_lr: The result, a `trainkit.tuner.RangeTest`; `None` before, and in a `fast_dev_run`.

    Raises:
        ConfigurationError: An argument is wrong; when `fit` is called, the attribute does not exist, or
            `configure_optimizers` does not use it.
        DataError: When `fit` is called: the data is an iterator, which the test would use up.
        ModuleError: When `fit` is called: the module cannot be copied.
        OptimizerError: When `fit` is called: there is not exactly one optimizer.

    Example:
        ```python
        finder = LearningRateFinder(num_training_steps=200)
        trainer = Trainer(callbacks=[finder])
        trainer.fit(module, train_loader)
        print(finder.optimal_lr.suggestion())
        ```

        ```python
        class FindInEpochs(LearningRateFinder):
            def on_fit_start(self, trainer, module):
                return  # no search before training

            def on_train_epoch_start(self, trainer, module):
                if trainer.current_epoch in (0, 5):
                    self.lr_find(trainer, module)
        ```
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        super().__init__()
        self._options = RangeTestOptions(
            min_lr,
            max_lr,
            num_training_steps,
            mode,
            early_stop_threshold,
            update_attr,
            attr_name,
            owner="LearningRateFinder",
            count="num_training_steps",
        )
        self.optimal_lr: RangeTest | None = None
        self._expected: list[float] = []  # the learning rates that the optimizer of the run should begin with
        self._epoch = -1  # the last epoch in which `lr_find` was called after `setup`

    def lr_find(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Search now. During training the optimizer gets the learning rate found, as well as the attribute.

        A schedule that computes from the initial learning rate, as `LambdaLR` does, overwrites that of the optimizer.
        """
        if trainer.optimizers and self._epoch == trainer.current_epoch:
            return
        self._epoch = trainer.current_epoch if trainer.optimizers else -1
        loader, datamodule = trainer._run.user_loaders[0], trainer.datamodule
        self.optimal_lr, self._expected = find_learning_rate(trainer, pl_module, self._options, loader, datamodule)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        self._epoch = -1
        self._expected = []
        if not starts_from_checkpoint(trainer):
            if not self._is_postponed:
                self.lr_find(trainer, module)
            return
        saved = read_saved_state(trainer, self)
        if saved is None:
            if not self._is_postponed:
                warn(
                    "LearningRateFinder does not search in a run that starts from a checkpoint, because parameters are "
                    "restored after it. To search for trained parameters: module = MyModule.load_from_checkpoint(path), then "
                    "fit without ckpt_path."
                )
            return
        self.load_state_dict(saved)
        rate = None if self.optimal_lr is None else self.optimal_lr.suggestion()
        if self._options.update_attr and rate is not None:
            find_attribute(self._options.names, module, trainer.datamodule, "").set(rate)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Search, if a subclass overrides this hook and calls it. Otherwise `setup` has done it: check the learning rates."""
        if self._is_postponed:
            if not starts_from_checkpoint(trainer):
                self.lr_find(trainer, module)
            return
        rates = rates_of(trainer.optimizers[0]) if trainer.optimizers else []
        if not all(map(same_rate, rates, self._expected)):
            shown = (", ".join(f"{rate:.4g}" for rate in values) for values in (self._expected, rates))
            warn(
                "LearningRateFinder: in the search configure_optimizers made the learning rates {} of the one found, but for "
                "this run it made {}. Expected the rates that were tested: something that it uses has changed since, such as "
                "the batch size. Fix: put BatchSizeFinder before LearningRateFinder, and compute learning rates in "
                "configure_optimizers, not in setup.".format(*shown)
            )

    @property
    def _is_postponed(self) -> bool:
        """Whether a subclass decides when to search, by overriding the hook that Lightning searches in."""
        return is_overridden(self, "on_fit_start", LearningRateFinder)

    def state_dict(self) -> dict[str, Any]:
        result = self.optimal_lr
        if result is None:
            return {}
        return {**vars(result), "results": {name: list(v) for name, v in result.results.items()}, "epoch": self._epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimal_lr = None
        if state_dict:
            state = dict(state_dict)
            results, self._epoch = state.pop("results"), state.pop("epoch", -1)
            self.optimal_lr = RangeTest(**state)
            self.optimal_lr.results = {name: list(values) for name, values in results.items()}
