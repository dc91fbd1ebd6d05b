"""What a Trainer is doing: `trainer.state`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from trainkit.names import absent_attribute

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]


class TrainerStatus(str, Enum):
    """Whether a run has begun, and how it ended. Each value equals its text: `TrainerStatus.RUNNING == "running"`."""

    INITIALIZING = "initializing"
    """Nothing has been run yet."""
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """An exception ended the run, such as that of a signal."""

    @property
    def stopped(self) -> bool:
        """Whether a run has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(str, Enum):
    """The method of the Trainer that runs, or has run last; also the `stage` that `setup` and `teardown` receive.

    Each value equals and prints as its text: `stage == "fit"`.
    """

    __str__ = str.__str__

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(str, Enum):
    """What that method is doing: a fit trains, validates and checks validation before training."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is a validation, a test or the sanity check."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The prefix of its data loader: `"val"` in `val_dataloader`."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


@dataclass(frozen=True)
class TrainerState:
    """What a Trainer is doing at the moment when `trainer.state` is read.

    Attributes:
        status: Whether a run has begun, and how it ended.
        fn: The method that runs, or has run last; `None` before the first run.
        stage: What it is doing; `None` outside a run.

    Example:
        ```python
        if trainer.state.fn == TrainerFn.FITTING and trainer.state.stage == RunningStage.VALIDATING:
            ...  # a validation within a fit
        ```
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            raise absent_attribute(self, "trainer.state", "trainer.state", name)

    @property
    def finished(self) -> bool:
        """Whether the last run has ended without an exception."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether a run has ended."""
        return self.status.stopped
