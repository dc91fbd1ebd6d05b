"""`Callback`: the contract of what a user attaches to a `Trainer`.

Hook names and arguments are Lightning's. A callback defines the hooks it needs; a hook that it does not define costs
nothing, because `trainkit.module.hook_table.HookTable` keeps only those that are overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.checks import KnownKeywords
from trainkit.errors import HookError

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Callback"]


class Callback(KnownKeywords):
    """Base class of callbacks: code that runs at certain points of a run, apart from the module.

    A subclass defines the hooks that it needs; a hook that it does not define costs nothing. For each hook, callbacks are
    called first, in the order of the list, then the module, then the callbacks with `runs_last`.

    Attributes:
        runs_last: Set it to `True` in a subclass whose hooks must run after those of the module: to read what the module
            has logged, or to be the last to change the gradients.

    Example:
        ```python
        class PrintLoss(Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if trainer.should_log:
                    trainer.print(trainer.global_step, float(outputs["loss"]))

        trainer = Trainer(callbacks=[PrintLoss()])
        ```
    """

    runs_last: bool = False
    _module: TrainModule | None = None

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint. Override it to tell several callbacks of one class apart."""
        return type(self).__qualname__

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a metric from a hook of this callback; the arguments are those of `TrainModule.log`."""
        self._get_module().log(name, value, **options)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several metrics from a hook of this callback; the arguments are those of `TrainModule.log_dict`."""
        self._get_module().log_dict(dictionary, **options)

    def _get_module(self) -> TrainModule:
        if self._module is None:
            raise HookError(
                f"{type(self).__name__}.log works only in a run of a Trainer: Trainer(callbacks=[...]).fit(module)."
            )
        return self._module

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called first, before the module is used. `stage` is `"fit"`, `"validate"`, `"test"` or `"predict"`."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called last, also after an error."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when the module is on its device and the optimizers exist."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after training, if there was no error."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the few validation batches that run ahead of training."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the few validation batches that run ahead of training; the metrics that they logged are discarded."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of an epoch and the validation at its end."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        """Called before a micro-batch. Return -1 to skip the rest of the epoch, on all processes at the same `batch_idx`."""

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch, and after the optimizer step if the accumulation window is full.

        `outputs` is what `training_step` returned, as a dict with the detached loss under `"loss"`; `None` if it returned
        `None`.
        """

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Called before the backward pass; `loss` is what `training_step` returned."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the backward pass of a micro-batch; under `16-mixed` the gradients are still scaled."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called when the gradients of the accumulation window are complete and unscaled, and not yet clipped."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called before the gradients are set to zero, at the start of each accumulation window."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before validation."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after validation; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of validation."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of validation; metrics can still be logged."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch; `outputs` is what `validation_step` returned."""

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the test."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the test; its metrics are in `trainer.callback_metrics`."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of the test."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of the test; metrics can still be logged."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch; `outputs` is what `test_step` returned."""

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before prediction."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch of prediction."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a batch of prediction; `outputs` is what `predict_step` returned."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Called when a run ends with an exception, including Ctrl-C; the exception is raised again afterwards."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; what you add to `checkpoint` is saved."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Called before the state of a checkpoint is restored; what was added in `on_save_checkpoint` is in `checkpoint`."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: numbers, text, tensors, lists and dicts."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `setup` and before `on_fit_start`."""
