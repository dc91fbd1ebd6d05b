"""When a fit logs, validates and ends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainkit.errors import ModuleError

if TYPE_CHECKING:
    from trainkit.trainer.arguments import TrainerArguments
    from trainkit.trainer.plans import EvaluationPlan, FitPlan

__all__ = ["Cadence"]


class Cadence:
    """The part of :class:`trainkit.Trainer` that counts."""

    _arguments: TrainerArguments
    accumulate_grad_batches: int
    global_step: int
    current_epoch: int
    should_stop: bool
    _fit_plan: FitPlan
    _val_plan: EvaluationPlan | None

    @property
    def max_epochs(self) -> int:
        """Epochs at most; -1: no limit."""
        assert self._arguments.max_epochs is not None
        return self._arguments.max_epochs

    @property
    def max_steps(self) -> int:
        """Updates at most; -1: no limit."""
        return self._arguments.max_steps

    @property
    def min_epochs(self) -> int | None:
        """Epochs at least, whoever asks for a stop."""
        return self._arguments.min_epochs

    @property
    def min_steps(self) -> int | None:
        """Updates at least, whoever asks for a stop."""
        return self._arguments.min_steps

    @property
    def log_every_n_steps(self) -> int:
        """Updates from one log boundary to the next; 0: only epochs are logged."""
        assert self._arguments.log_every_n_steps is not None
        return self._arguments.log_every_n_steps

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs from one validation to the next."""
        return self._arguments.check_val_every_n_epoch

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch, at most; infinity where only its end tells."""
        plan = getattr(self, "_fit_plan", None)
        if plan is None:
            return 0
        most = plan.loader.limit if plan.length is None else plan.length
        return math.inf if most is None else most

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of updates that a whole fit makes, for schedulers; infinity where that is not known.

        Raises:
            ModuleError: read before the training loader is known, which is when ``configure_optimizers`` is called.
        """
        if not hasattr(self, "_fit_plan"):
            raise ModuleError(
                "estimated_stepping_batches is not known yet: the training loader is asked for after setup. Read it in "
                "configure_optimizers: OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)"
            )
        length, epochs = self.num_training_batches, self.max_epochs
        if epochs == -1 or math.isinf(length):
            return self.max_steps if self.max_steps != -1 else math.inf
        updates = math.ceil(length / self.accumulate_grad_batches) * epochs
        return updates if self.max_steps == -1 else min(updates, self.max_steps)

    @property
    def _steps_done(self) -> bool:
        """Whether ``max_steps`` is reached."""
        return -1 < self._arguments.max_steps <= self.global_step

    @property
    def _may_stop(self) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are reached, so that ``should_stop`` counts."""
        enough_epochs = self.min_epochs is None or self.current_epoch >= self.min_epochs
        return enough_epochs and (self.min_steps is None or self.global_step >= self.min_steps)

    @property
    def _finished(self) -> bool:
        """Whether training ends before the next epoch."""
        if self._steps_done or -1 < self.max_epochs <= self.current_epoch:
            return True
        return self.should_stop and self._may_stop

    def _log_due(self, step: int) -> bool:
        """Whether update number ``step`` ends in a log boundary."""
        every = self._arguments.log_every_n_steps
        return every is not None and every > 0 and step % every == 0

    def _validation_due(self, batch_idx: int, updated: bool) -> bool:
        """Whether to validate after this window."""
        arguments, plan = self._arguments, self._fit_plan
        if self._val_plan is None:
            return False
        if arguments.val_every_n_steps is not None:
            return updated and self.global_step % arguments.val_every_n_steps == 0
        if plan.validate_every is None:
            return False
        done = batch_idx + 1 - plan.surplus
        if arguments.check_val_every_n_epoch is None:
            done += plan.earlier_batches
        elif not self._epoch_validates():
            return False
        # an interval that ends inside a window is due when the window is full: the parameters are the same until then
        reached = done // plan.validate_every
        due = reached > plan.validated
        plan.validated = reached
        return due

    def _validation_due_at_end(self) -> bool:
        """Whether to validate at the end of an epoch whose length was not known."""
        if self._val_plan is None or self._arguments.val_every_n_steps is not None:
            return False
        return self._fit_plan.validate_every is None and self._epoch_validates()

    def _epoch_validates(self) -> bool:
        every = self._arguments.check_val_every_n_epoch
        return every is not None and (self.current_epoch + 1) % every == 0
