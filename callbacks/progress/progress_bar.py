"""`ProgressBar`: the base class of progress bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import echo
from trainkit.errors import NotAvailableError
from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["ProgressBar"]

__getattr__, _ = lazily(globals(), {})  # says what to use instead of other names of Lightning's file


class ProgressBar(Callback):
    """Base class of progress bars: what a bar shows, and how long its stages are.

    A subclass defines hooks that draw. A `Trainer` with such a callback adds no other bar, and `trainer.print` calls its
    `print`. Only the main process shows a bar: on the others `setup` calls `disable`.

    Attributes:
        is_progress_bar: True; marks the callback whose `print` the Trainer uses.

    Example:
        ```python
        class Percent(ProgressBar):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if self.is_enabled:
                    print(f"{(batch_idx + 1) / self.total_train_batches:.0%}", end="\\r", flush=True)

        trainer = Trainer(callbacks=[Percent()])
        ```
    """

    is_progress_bar: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._enabled = True
        self._current_loader: int | None = None  # Index of the evaluation loader that is being read.

    @property
    def trainer(self) -> Trainer:
        """The trainer of the run.

        Raises:
            NotAvailableError: No run has begun.
        """
        if self._trainer is None:
            raise NotAvailableError(
                f"{type(self).__name__}.trainer is not known before a run begins. Fix: read it in a hook, after "
                "super().setup(trainer, module, stage)"
            )
        return self._trainer

    # ------------------------------------------------------------------------------------------------ what a bar is called

    @property
    def train_description(self) -> str:
        """The text before the bar of training: `"Epoch 0/9"`, with the last epoch; `"Epoch 0"` without a limit."""
        of = "" if self.trainer.max_epochs < 0 else f"/{self.trainer.max_epochs - 1}"
        return f"Epoch {self.trainer.current_epoch}{of}"

    @property
    def sanity_check_description(self) -> str:
        """The text before the bar of the sanity check."""
        return "Sanity check"

    @property
    def validation_description(self) -> str:
        """The text before the bar of validation; with several loaders, the index of the loader follows."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """The text before the bar of the test, as of validation."""
        return "Test"

    @property
    def predict_description(self) -> str:
        """The text before the bar of prediction, as of validation."""
        return "Prediction"

    # ------------------------------------------------------------------------------------------------- how long a stage is

    @property
    def total_train_batches(self) -> int | float:
        """Number of micro-batches of the training epoch, at most up to `max_steps`; infinite for a loader without a length."""
        trainer, total = self.trainer, self.trainer.num_training_batches
        if trainer.max_steps < 0:
            return total
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(total, trainer._run.progress.epoch_start + left)  # the run may end inside this epoch

    @property
    def total_val_batches(self) -> int | float:
        """Number of batches of all validation loaders; 0 if no validation runs at the end of this epoch."""
        every = self.trainer.check_val_every_n_epoch
        due = every is None or (self.trainer.current_epoch + 1) % every == 0
        return sum(self.trainer.num_val_batches) if due else 0

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current validation loader, also in the sanity check; infinite without a length."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current test loader; infinite for a loader without a length."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current loader of prediction; infinite for a loader without a length."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, batches: list[int | float]) -> int | float:
        return batches[self._current_loader or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Make a loader the current one of the evaluation; returns whether it was another before.

        Args:
            dataloader_idx: Its index, as the hooks of batches get it.
        """
        before, self._current_loader = self._current_loader, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the current loader: the evaluation has ended."""
        self._current_loader = None

    # ------------------------------------------------------------------------------------------- whether and what it shows

    @property
    def is_enabled(self) -> bool:
        """Whether it shows anything."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether it shows nothing."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on. Called on all processes except the main process."""
        self._enabled = False

    def enable(self) -> None:
        """Show bars again, from the next epoch or evaluation on."""
        self._enabled = True

    def print(self, *values: Any, **options: Any) -> None:
        """Python's `print`, above the bars; `trainer.print` calls it on the main process. A dead terminal ends nothing.

        Args:
            values: What to print.
            options: `sep`, `end`, `file` and `flush` of Python's `print`.
        """
        echo(*values, **options)

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """The values next to the bar of training, by name. Override it to show others.

        Unlike in Lightning, the version of the run (`v_num`) is not among them: the last line of a fit shows its folders.

        Args:
            trainer: The trainer.
            module: The module.

        Returns:
            Name → a number or a text: here `trainer.progress_bar_metrics`.

        Example:
            ```python
            class Bar(TQDMProgressBar):
                def get_metrics(self, trainer, module):
                    return {**super().get_metrics(trainer, module), "lr": trainer.optimizers[0].param_groups[0]["lr"]}
            ```
        """
        return dict(trainer.progress_bar_metrics)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()
