"""`RunProgress`: the one place for the state of a run: its counters, the phase of its step, and requests to stop or save.

`Trainer` owns it and shows its values as properties. The loops, the due dates, saving, resume and the step flags read and
write it; this state is kept nowhere else. `DueDates` decides from it when a fit logs, validates and ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

if TYPE_CHECKING:
    from trainkit.trainer.arguments import TrainerArguments

__all__ = ["DueDates", "Phase", "RunProgress", "Stop", "ValidationStart"]


class Phase(str, Enum):
    """Which part of the current optimizer step is done, so that a resumed run does the rest of it and nothing twice."""

    STEP = "step"
    """All of it: the last accumulation window is complete, logged and validated."""
    UPDATED = "updated"
    """The parameters are updated; logging and validation come next."""
    VALIDATING = "validating"
    """A validation is running, its hooks included. A resumed run repeats it whole."""
    EPOCH_END = "epoch_end"
    """The hooks of the epoch's end are running. A resumed run runs them again."""


class Stop(Enum):
    """How far a stop request has come. Each transition has one writer, a method of `RunProgress`."""

    RUNNING = "running"
    REQUESTED = "requested"
    """Some rank had `should_stop` set when the last optimizer step ended, and all ranks know."""
    STOPPING = "stopping"
    """Training ends with the current step."""
    STOPPED = "stopped"
    """The training loop is over."""


_STAGES = {
    "fit": RunningStage.TRAINING,
    "validate": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}


@dataclass(frozen=True)
class ValidationStart:
    """The state of loggers and torchmetrics objects when the running validation began; checkpoints saved in it contain that.

    Attributes:
        loggers: the state of each logger.
        metric_updates: torchmetrics object → number of its updates.
    """

    loggers: list[dict[str, Any]]
    metric_updates: dict[str, int]


@dataclass
class RunProgress:
    """The state of one run. A fit begins with a new one; an evaluation keeps the counters of the fit before it.

    Attributes:
        stage: "fit", "validate", "test" or "predict"; `None` outside a run.
        last_stage: as `stage`, and after a run that of this run.
        status: whether a run has begun, and how it ended.
        sanity_checking: the few validation batches before training are running.
        validating: a validation is running.
        global_step: number of optimizer steps so far.
        current_epoch: number of completed epochs, which is the index of the running one.
        batch_idx: index of the micro-batch in the epoch; -1 between epochs.
        epoch_start: the micro-batch that the epoch begins with; not 0 in an epoch that was resumed.
        batches_done: micro-batches of the epoch whose accumulation windows are complete, logged and validated.
        steps_done: the accelerator's count of optimizer steps at that point.
        first_step: `global_step` when this fit began.
        phase: which part of the current optimizer step is done.
        epoch_complete: the epoch that is ending counts as complete: no stop request ended it.
        should_log: the open accumulation window ends in a log boundary.
        loss: the sum of the losses of such a window, on the device; `None` without one.
        should_stop: this rank requests a stop (`trainer.should_stop`).
        stop: how far a stop request has come.
        safe_point_due: a save or a signal waits for the next safe point.
        next_save_step: as `safe_point_due`, from this `global_step` on.
        validation_due: the time between validations is over: validate after the next step.
        validation_requested: a callback has requested a validation after the current step.
        validations: how many times the validation interval has been reached, in this epoch or, if it counts across epochs, in
            all.
        validated_step: `global_step` of the newest complete validation; 0 before the first.
        earlier_batches: micro-batches of earlier epochs.
        extra_batches: number of micro-batches that this epoch has more than others, because it was resumed on a different
            number of processes, at a position that is not a multiple of that number.
        validation_start: what a running validation began with; `None` outside one.
        computed: metric → `global_step` at which its value of an epoch or an evaluation was computed. For one that was
            logged by step in an epoch, but not in its last step: the step before that.
        advanced: number of a scheduler that follows a metric → `global_step` at which it was advanced last.
        tried_to_learn: `training_step` has returned a loss with a weight or, under manual optimization, stepped an optimizer.
        warned_of_no_step: the user was warned that a whole epoch made no optimizer step.
        largest_part: number of elements that a part of a micro-batch may have, see `MicroBatchParts`; `None`: nothing is split.
        overflows: number of optimizer steps that were skipped because a scaled gradient overflowed; set when training ends.
    """

    stage: str | None = None
    last_stage: str | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    sanity_checking: bool = False
    validating: bool = False
    global_step: int = 0
    current_epoch: int = 0
    batch_idx: int = -1
    epoch_start: int = 0
    batches_done: int = 0
    steps_done: int = 0
    first_step: int = 0
    phase: Phase = Phase.STEP
    epoch_complete: bool = True
    should_log: bool = False
    loss: Tensor | None = None
    should_stop: bool = False
    stop: Stop = Stop.RUNNING
    safe_point_due: bool = False
    next_save_step: float = math.inf
    validation_due: bool = False
    validation_requested: bool = False
    validations: int = 0
    validated_step: int = 0
    earlier_batches: int = 0
    extra_batches: int = 0
    validation_start: ValidationStart | None = None
    computed: dict[str, int] = field(default_factory=dict)
    advanced: dict[str, int] = field(default_factory=dict)
    tried_to_learn: bool = False
    warned_of_no_step: bool = False
    largest_part: int | None = None
    overflows: int = 0

    def begin(self, stage: str) -> None:
        """A run begins."""
        self.stage = self.last_stage = stage
        self.status = TrainerStatus.RUNNING
        self.should_stop = self.should_log = self.sanity_checking = self.validating = False
        self.batch_idx = -1

    def continued(self, across_epochs: bool) -> RunProgress:
        """The progress of a fit that counts from where this one has ended, at the beginning of an epoch.

        An epoch that this one has begun counts as over, so that the next one has another order of the data.

        Args:
            across_epochs: the validation interval counts across epochs.
        """
        of_run = ("global_step", "current_epoch", "validations", "validated_step")
        counters = (*of_run, "batches_done", "earlier_batches", "extra_batches")
        after = RunProgress(**{name: getattr(self, name) for name in counters}, largest_part=self.largest_part)
        if after.batches_done:
            after.begin_next_epoch(after.batches_done, across_epochs)
        return after

    def interrupt(self) -> None:
        """An exception ends the run."""
        self.status = TrainerStatus.INTERRUPTED

    def end(self) -> None:
        """The run is over."""
        self.stage = None
        self.validating = False
        if self.status is TrainerStatus.RUNNING:
            self.status = TrainerStatus.FINISHED

    @property
    def running_stage(self) -> RunningStage | None:
        """What the run is doing; `None` outside a run."""
        if self.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if self.stage is None:
            return None
        return RunningStage.VALIDATING if self.validating else _STAGES[self.stage]

    @property
    def state(self) -> TrainerState:
        """What the Trainer is doing now."""
        fn = None if self.last_stage is None else TrainerFn(self.last_stage)
        return TrainerState(self.status, fn, self.running_stage)

    @property
    def batches_consumed(self) -> int:
        """Micro-batches of the epoch whose accumulation windows have ended: where a checkpoint of this moment resumes."""
        return self.batches_done if self.phase in (Phase.STEP, Phase.EPOCH_END) else self.batch_idx + 1

    def note_loss(self, loss: Tensor) -> None:
        """A loss was computed in a window that ends in a log boundary, where it is read if it is on a device that can do so.

        Elsewhere, as on XLA, reading a value would compile and run a graph of its own.
        """
        if loss.device.type in ("cpu", "cuda", "mps"):
            loss = loss.detach().clone()  # a compiled step may use its memory again
            self.loss = loss if self.loss is None else self.loss + loss

    def limit_parts(self, elements: int) -> None:
        """From now on no part of a micro-batch has more elements than this, on this rank."""
        self.largest_part = elements if self.largest_part is None else min(self.largest_part, elements)

    def request_validation(self) -> None:
        """The time between validations is over, on all ranks after the same step."""
        self.validation_due = True

    def request_validation_now(self) -> None:
        """Validate after the current step; called on all ranks in the same step."""
        self.validation_requested = True

    def request_log(self) -> None:
        """The current step ends in a log boundary; called on all ranks in the same step."""
        self.should_log = True

    # ------------------------------------------------------------------------------------------------------- stopping

    def agree_on_stop(self, requested: bool) -> None:
        """All ranks know whether one of them requested a stop in the step before."""
        if self.stop in (Stop.RUNNING, Stop.REQUESTED):
            self.stop = Stop.REQUESTED if requested else Stop.RUNNING

    def begin_stopping(self) -> None:
        """Training ends with the current step."""
        self.stop = Stop.STOPPING

    def end_training(self) -> None:
        """The training loop is over."""
        self.stop = Stop.STOPPED

    # -------------------------------------------------------------------------------------------------- epochs, windows

    def end_window(self, batch_idx: int, steps: int) -> None:
        """The step is complete: its accumulation window is logged and validated.

        Args:
            batch_idx: the window's last micro-batch.
            steps: the accelerator's count of optimizer steps.
        """
        self.batches_done = batch_idx + 1
        self.steps_done = steps
        self.phase = Phase.STEP

    def begin_next_epoch(self, batches: int, across_epochs: bool) -> None:
        """The next epoch begins at its first micro-batch.

        Args:
            batches: micro-batches of the epoch that ends, in complete accumulation windows.
            across_epochs: the validation interval counts across epochs.
        """
        self.current_epoch += 1
        self.epoch_start = self.batches_done = 0
        self.earlier_batches += batches - self.extra_batches
        if not across_epochs:
            self.validations = 0
        self.extra_batches = 0


class DueDates:
    """Decides what is due at a point of a run, from the arguments and the progress.

    Args:
        arguments: the Trainer's.
        progress: of the run.
    """

    def __init__(self, arguments: TrainerArguments, progress: RunProgress) -> None:
        self._arguments = arguments
        self._progress = progress

    @property
    def max_steps_reached(self) -> bool:
        """Whether `max_steps` optimizer steps have been made."""
        return -1 < self._arguments.max_steps <= self._progress.global_step

    @property
    def may_stop(self) -> bool:
        """Whether `min_epochs` and `min_steps` are reached, so that a stop request counts."""
        return self._may_stop_after(self._progress.current_epoch)

    @property
    def training_ends(self) -> bool:
        """Whether training ends before the next epoch."""
        return self._ends_after(self._progress.current_epoch)

    def validates_last(self, complete: bool) -> bool:
        """Whether to validate at the end of an epoch because training ends with it and its last step was not validated.

        Args:
            complete: the epoch counts as complete.
        """
        arguments, progress = self._arguments, self._progress
        missing = arguments.validate_at_end and 0 < progress.global_step != progress.validated_step
        return missing and self._ends_after(progress.current_epoch + complete)

    def _ends_after(self, epochs: int) -> bool:
        """Whether training ends when this number of epochs is complete."""
        max_epochs = self._arguments.max_epochs
        assert max_epochs is not None
        if self.max_steps_reached or -1 < max_epochs <= epochs:
            return True
        return self._progress.should_stop and self._may_stop_after(epochs)

    def _may_stop_after(self, epochs: int) -> bool:
        arguments = self._arguments
        enough_epochs = arguments.min_epochs is None or epochs >= arguments.min_epochs
        return enough_epochs and (arguments.min_steps is None or self._progress.global_step >= arguments.min_steps)

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
        requested, self._progress.validation_requested = self._progress.validation_requested, False
        return self._validation_is_due(batch_idx, updated, every) or requested

    def _validation_is_due(self, batch_idx: int, updated: bool, every: int | None) -> bool:
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
