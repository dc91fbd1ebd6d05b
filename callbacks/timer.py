"""`Timer`: measures training, validation and testing, and stops training after a time limit."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.checks import choice
from trainkit.console import notice
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Interval", "Timer"]

__getattr__, _ = lazily(globals(), {})  # says what to use instead of other names of Lightning's file

_STAGES = ("train", "validate", "test", "predict", "sanity_check")
_FORMAT = re.compile(r"(\d+):(\d+):(\d+):(\d+)")


class Interval(str, Enum):
    """When a `Timer` checks the time: an argument `interval`, like the strings `"step"` and `"epoch"`."""

    step = "step"
    """After each batch."""

    epoch = "epoch"
    """At the end of each epoch."""


class Timer(Callback):
    """Measures the time of each stage and stops training after `duration`. `Trainer(max_time=...)` adds it.

    Times are seconds of a monotonic clock. The time of `"train"` is from `on_train_start` to `on_train_end`, including
    validation, and continues after a resume; the sanity check is a stage of its own. With several processes the main process's
    clock counts.

    Args:
        duration: `"DD:HH:MM:SS"`, a `timedelta`, a dict of `timedelta`'s arguments (`{"hours": 12}`), or None
            to measure only. With 0 it stops before the first step, or when `min_steps` and `min_epochs` are reached.
        interval: `"step"` checks after each batch, `"epoch"` at the end of each epoch.
        verbose: Print a line when the limit is reached.

    Raises:
        ConfigurationError: A duration that is malformed or negative, or an unknown interval.

    Example:
        ```python
        timer = Timer("00:12:00:00")
        Trainer(callbacks=[timer]).fit(module)
        print(timer.time_elapsed("train"), timer.time_elapsed("validate"))
        ```
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        super().__init__()
        choice(interval, "Timer(interval=)", ("step", "epoch"))
        self.duration = _seconds(duration)
        self.interval = interval
        self.verbose = verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._before: dict[str, float] = {}  # seconds of earlier runs of the stage
        self._stopped = False
        self.stopping_reason: str | None = None

    def start_time(self, stage: str = "train") -> float | None:
        """Last start of the stage, in seconds of `time.monotonic`; None if it has not started."""
        return self._start.get(_check_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Last end of the stage, in seconds of `time.monotonic`; None if it has not ended or is running."""
        return self._end.get(_check_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds in the stage: of `"train"` in this fit and those that it resumed, of others in all runs."""
        return self._before.get(_check_stage(stage), 0.0) + self._running(stage)

    def time_remaining(self, stage: str = "train") -> float | None:
        """`duration` minus the seconds in the stage; None without a duration."""
        return None if self.duration is None else self.duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES if self.time_elapsed(stage)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = {stage: float(seconds) for stage, seconds in state_dict["time_elapsed"].items()}
        self._start.clear()
        self._end.clear()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":  # each fit has the whole duration; a resumed one loads the time used so far after this
            for times in (self._before, self._start, self._end):
                times.pop("train", None)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._stopped = False
        self.stopping_reason = None
        self._check_together(trainer, module)  # a resumed run may have used up its time
        self._begin("train")
        if self._stopped and self._before.get("train"):
            notice(
                f"the resumed run has no time left: {self.stopping_reason}. It does not train further. To continue, raise "
                "max_time, or the duration of Timer."
            )

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("train")

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.interval == "step" and self.duration is not None:
            self._check(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.interval == "epoch":
            self._check_together(trainer, module)

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("sanity_check")

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._begin(_evaluation(trainer))

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._finish(_evaluation(trainer))

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def _begin(self, stage: str) -> None:
        if stage != "train":  # the runs of a stage add up
            self._before[stage] = self.time_elapsed(stage)
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def _finish(self, stage: str) -> None:
        self._end[stage] = time.monotonic()

    def _running(self, stage: str) -> float:
        """Seconds of the latest run of the stage."""
        if stage not in self._start:
            return 0.0
        return self._end.get(stage, time.monotonic()) - self._start[stage]

    def _check(self, trainer: Trainer, module: TrainModule) -> None:
        """On the main process, whose stop request reaches the others at the next safe point."""
        if trainer.is_global_zero and self._is_up():
            self._stop(trainer, module)

    def _check_together(self, trainer: Trainer, module: TrainModule) -> None:
        """Check on all processes. Collective."""
        if self.duration is not None and trainer.strategy.world.from_main(self._is_up()):
            self._stop(trainer, module)

    def _is_up(self) -> bool:
        return self.duration is not None and self.time_elapsed() >= self.duration

    def _stop(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.should_stop = True  # each time: EarlyStopping withdraws its stop request if its patience was raised
        said, self._stopped = self._stopped, True
        self.stopping_reason = f"the time limit of {timedelta(seconds=self.duration or 0)} is reached"
        if self.verbose and not said:
            assert self.duration is not None
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            module.print(f"Time limit of {timedelta(seconds=self.duration)} reached: training stops after {elapsed}.")


def _evaluation(trainer: Trainer) -> str:
    return "validate" if trainer.stage in (None, "fit") else trainer.stage


def _check_stage(stage: str) -> str:
    if stage not in _STAGES:
        raise UnknownNameError(f"unknown stage {stage!r}; known: {', '.join(_STAGES)}.{nearest(str(stage), _STAGES)}")
    return stage


def _seconds(duration: Any) -> float | None:
    if duration is None:
        return None
    fix = "Fix: Timer('00:12:00:00') (days:hours:minutes:seconds), Timer(timedelta(hours=12)) or Timer({'hours': 12})"
    if isinstance(duration, str):
        match = _FORMAT.fullmatch(duration.strip())
        if match is None:
            raise ConfigurationError(
                f"Timer(duration=...), or Trainer(max_time=...), expected 'DD:HH:MM:SS', got {duration!r}. {fix}"
            )
        days, hours, minutes, seconds = map(int, match.groups())
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(duration, Mapping):
        try:
            duration = timedelta(**duration)
        except TypeError as error:
            raise ConfigurationError(f"Timer(duration={duration!r}): {error}. {fix}") from error
    if not isinstance(duration, timedelta):
        raise ConfigurationError(
            f"Timer(duration=...) expected 'DD:HH:MM:SS', a timedelta, a dict or None, got {duration!r}. {fix}"
        )
    if duration < timedelta(0):
        raise ConfigurationError(f"Timer(duration=...) expected at least 0 seconds, got {duration!r}. {fix}")
    return duration.total_seconds()
