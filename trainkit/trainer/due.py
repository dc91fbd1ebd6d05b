"""`DueDates`: when a fit logs, validates and ends."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.trainer.arguments import TrainerArguments
    from trainkit.trainer.progress import RunProgress

__all__ = ["DueDates"]


class DueDates:
    """Decides what is due at a point of a run, from the arguments and the progress.

    Args:
        arguments: the Trainer's.
        progress: of the run.
    """

    def __init__(self, arguments: TrainerArguments, progress: RunProgress) -> None:
        self._arguments, self._progress = arguments, progress

    @property
    def max_steps_reached(self) -> bool:
        """Whether `max_steps` optimizer steps have been made."""
        return -1 < self._arguments.max_steps <= self._progress.global_step

    @property
    def may_stop(self) -> bool:
        """Whether `min_epochs` and `min_steps` are reached, so that a stop request counts."""
        arguments, progress = self._arguments, self._progress
        enough_epochs = arguments.min_epochs is None or progress.current_epoch >= arguments.min_epochs
        return enough_epochs and (arguments.min_steps is None or progress.global_step >= arguments.min_steps)

    @property
    def training_ends(self) -> bool:
        """Whether training ends before the next epoch."""
        max_epochs = self._arguments.max_epochs
        assert max_epochs is not None
        if self.max_steps_reached or -1 < max_epochs <= self._progress.current_epoch:
            return True
        return self._progress.should_stop and self.may_stop

    def logs(self, step: int) -> bool:
        """Whether optimizer step number `step` ends in a log boundary."""
        every = self._arguments.log_every_n_steps
        return every is not None and every > 0 and step % every == 0

    def validates(self, batch_idx: int, updated: bool, every: int | None) -> bool:
        """Whether to validate after an accumulation window; counts the validation interval.

        Args:
            batch_idx: the last micro-batch of the window.
            updated: the window ended in an optimizer step.
            every: micro-batches between validations; `None`: they are not counted, but a timer may have fired.
        """
        arguments, progress = self._arguments, self._progress
        if arguments.val_every_n_steps is not None:
            return updated and progress.global_step % arguments.val_every_n_steps == 0
        if every is None:
            due = progress.validation_due and (arguments.check_val_every_n_epoch is None or self._epoch_validates())
            progress.validation_due = progress.validation_due and not due
            return due
        # an interval that ends inside a window is due when the window is full: the parameters are the same until then
        reached = self.intervals(batch_idx + 1, every)
        due = reached > progress.validations and (arguments.check_val_every_n_epoch is None or self._epoch_validates())
        progress.validations = reached
        return due

    def intervals(self, batches: int, every: int) -> int:
        """How many validation intervals are over after `batches` micro-batches of the epoch; `every` as in `validates`."""
        done = batches - self._progress.extra_batches
        if self._arguments.check_val_every_n_epoch is None:
            done += self._progress.earlier_batches
        return max(0, done) // every

    def validates_at_end(self, every: int | None) -> bool:
        """Whether to validate at the end of an epoch whose length was unknown; `every` as in `validates`."""
        arguments = self._arguments
        by_time = isinstance(arguments.val_check_interval, timedelta)
        return arguments.val_every_n_steps is None and every is None and not by_time and self._epoch_validates()

    def _epoch_validates(self) -> bool:
        every = self._arguments.check_val_every_n_epoch
        return every is not None and (self._progress.current_epoch + 1) % every == 0
