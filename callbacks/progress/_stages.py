"""`StageProgressBar`: the stages of a run, when to draw each, and with which values. How to draw: its subclasses."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from trainkit.callbacks.progress.progress_bar import ProgressBar
from trainkit.console import echo
from trainkit.metrics.values import read

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__: list[str] = []

_SECONDS_PLAIN = 15.0  # Seconds between two lines of output without a terminal.
_LOOKS = 20  # If batches are faster than this part of the time between two refreshes, the clock is not looked at after each.
_MOST_BATCHES = 8  # between two looks at the clock
_SECONDS_RATE = 1.0  # minimum interval for the rate of a bar

Kind = Literal["train", "sanity", "validation", "test", "predict"]

# The properties of a stage: its description, its number of batches, and the trainer's numbers of batches by loader.
_PROPERTIES: dict[Kind, tuple[str, str, str | None]] = {
    "train": ("train_description", "total_train_batches", None),
    "sanity": ("sanity_check_description", "total_val_batches_current_dataloader", "num_sanity_val_batches"),
    "validation": ("validation_description", "total_val_batches_current_dataloader", "num_val_batches"),
    "test": ("test_description", "total_test_batches_current_dataloader", "num_test_batches"),
    "predict": ("predict_description", "total_predict_batches_current_dataloader", "num_predict_batches"),
}


class Display:
    """Shows one stage on a terminal or in a notebook."""

    @abstractmethod
    def draw(self, stage: StageProgress, metrics: dict[str, Any]) -> None:
        """Draw the stage as it is now, and metrics if there are any."""

    @abstractmethod
    def close(self, stage: StageProgress, leave: bool) -> None:
        """Leave the last state of the stage on the screen, or remove it."""


class StageProgress:
    """How far a stage is.

    Args:
        kind: Which stage.
        description: Its name, for the user.
        total: Number of batches, infinite if unknown.
        display: What shows it; None: lines.
        leave: Keep its last state on the screen.
        every: Minimum number of batches between two refreshes.
        seconds: Minimum time between two refreshes.

    Attributes:
        total: Number of batches; None if unknown.
        done: Number of batches so far.
        first: Number of batches that a resumed epoch has skipped; None before the first batch.
        rate: Batches per second in the last interval; None before it is known.
        began: Time at which it began.
        since: Start of the interval of the rate.
    """

    def __init__(
        self, kind: Kind, description: str, total: float, display: Display | None, *, leave: bool, every: int, seconds: float
    ) -> None:
        self.kind = kind
        self.description = description
        self.total = int(total) if math.isfinite(total) else None
        self.display = display
        self.leave = leave
        self.done = 0
        self.first: int | None = None
        self.rate: float | None = None
        self.began = self.since = time.monotonic()
        self._counted = 0  # number of batches before `since`
        self._every = every
        self._looked, self._look_at, self._stride = self.since, 0, 1  # when the clock is looked at, in time and in batches
        self._seconds = _SECONDS_PLAIN if display is None else seconds
        self._next_look = self.since + (_SECONDS_PLAIN if display is None else 0.0)

    def advance(self, done: int) -> bool:
        """Set the number of batches; returns whether to show it now."""
        if self.first is None:
            self.first = self._counted = done - 1
            if self.first:  # a resumed epoch: the loader has skipped to its position
                self._counted, self.since = done, time.monotonic()
        self.done = done
        if done % self._every or done < self._look_at:
            return False
        now = time.monotonic()
        fast = now - self._looked < self._seconds / _LOOKS  # if batches slow down now, the bar is still drawn soon
        self._stride = min(_MOST_BATCHES, 2 * self._stride) if fast else 1
        self._looked, self._look_at = now, done + self._stride
        if now < self._next_look:
            return False
        self._next_look = now + self._seconds
        return True

    def show(self, metrics: dict[str, Any]) -> None:
        """Draw it, or print a line."""
        self._measure()
        if self.display is None:
            echo(self.line(metrics), flush=True)
        else:
            self.display.draw(self, metrics)

    def _measure(self) -> None:
        """Compute the rate since the last time."""
        now = time.monotonic()
        seconds, batches = now - self.since, self.done - self._counted
        long_enough = self.display is None or self.rate is None or seconds >= _SECONDS_RATE
        if batches > 0 and long_enough:
            self.rate = batches / seconds if seconds > 0 else 0.0
            self.since = now
            self._counted = self.done

    def measure_seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def line(self, metrics: dict[str, Any]) -> str:
        """A line for a log file instead of a bar."""
        total = "?" if self.total is None else str(self.total)
        rate = "" if self.rate is None else f", {self.rate:.1f} batches/s"
        shown = {name: f"{value:.4g}" if isinstance(value, int | float) else str(value) for name, value in metrics.items()}
        values = "".join(f", {name}={value}" for name, value in shown.items())
        return f"{self.description}: {self.done}/{total} batches{rate}{values}"

    def close(self) -> None:
        """Remove it from the terminal, or leave its last state there."""
        if self.display is not None:
            self.display.close(self, self.leave)
            self.display = None


class StageProgressBar(ProgressBar):
    """The hooks of progress bars. A subclass draws.

    Args:
        leave: Keep the training bar of each epoch on the screen, not only the last one.
    """

    def __init__(self, leave: bool) -> None:
        super().__init__()
        self.leave = leave
        self._live = False  # whether bars can be drawn; otherwise lines are printed
        self._in_run = False
        self._loss: Any = None
        self._logs_loss: bool | None = None  # Whether this epoch logs a loss; None before its first batch.
        self._paused: float | None = None  # time at which validation paused training
        self._train: StageProgress | None = None
        self._evaluation: StageProgress | None = None
        self._latest: dict[Kind, StageProgress] = {}  # Stages that have ended stay here; the newest is the last one.

    # ---------------------------------------------------------------------------------------------- what a subclass defines

    @abstractmethod
    def _can_draw(self) -> bool:
        """Whether standard output can show bars; called when a run begins."""

    @abstractmethod
    def _pace(self) -> tuple[int, float]:
        """Minimum number of batches and of seconds between two refreshes."""

    @abstractmethod
    def _display(self, kind: Kind, nested: bool) -> Display:
        """A new display; `nested` is validation inside training."""

    # ------------------------------------------------------------------------------------------------------------- its hooks

    def disable(self) -> None:
        super().disable()
        self._close()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._in_run = True
        self._live = self.is_enabled and self._can_draw()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._close()
        self._in_run = False

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._close()

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._is_shown:
            self._end_train_epoch(trainer, module, leave=self.leave)
            self._train = self._stage("train", nested=False, leave=True)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._train is None:
            return
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        due = self._train.advance(batch_idx + 1)
        if due or self._logs_loss is None:
            self._logs_loss = self._logs_loss or any("loss" in name.lower() for name in trainer._run.train_metrics.in_bar())
        if due:
            self._train.show(self.get_metrics(trainer, module))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_train_epoch(trainer, module, leave=True)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._train is not None:
            self._paused = time.monotonic()

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("sanity" if trainer.sanity_checking else "validation", dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._evaluation is not None and self._evaluation.advance(batch_idx + 1):
            self._evaluation.show({})

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        nested = trainer.stage == "fit"
        if self._evaluation is not None and (self._evaluation.display is not None or not nested):
            self._evaluation.show({})
        self._close_evaluation()
        if self._train is not None and self._paused is not None:  # validation does not count in its rate
            self._train.since += time.monotonic() - self._paused
        self._paused = None
        if nested and self._train is not None and self._train.display is not None:
            self._train.show(self.get_metrics(trainer, module))

    on_test_end = on_predict_end = on_validation_end

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("test", dataloader_idx)

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("predict", dataloader_idx)

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """The values next to the bar of training, as floats, by name. Reads the device, so it is called only to draw.

        Override it to show others; see `ProgressBar.get_metrics`.
        """
        values: dict[str, Any] = trainer.progress_bar_metrics
        shows_loss = not self._logs_loss and isinstance(self._loss, Tensor) and self._loss.numel() == 1
        if shows_loss and not trainer.strategy.lazy_tensors:  # reading it there would run a part of the step separately
            values = {"loss": self._loss, **values}
        return dict(zip(values, read(list(values.values())), strict=True))

    # ---------------------------------------------------------------------------------------------------------- its stages

    @property
    def _is_shown(self) -> bool:
        return self._in_run and self.is_enabled

    def _description_of(self, kind: Kind) -> str:
        """The text before the bar of a stage."""
        description, _, batches = _PROPERTIES[kind]
        has_more_loaders = batches is not None and len(getattr(self.trainer, batches)) > 1
        return f"{getattr(self, description)} {self._current_loader}" if has_more_loaders else str(getattr(self, description))

    def _total_of(self, kind: Kind) -> float:
        """Number of batches of a stage."""
        return float(getattr(self, _PROPERTIES[kind][1]))

    def _stage(self, kind: Kind, *, nested: bool, leave: bool) -> StageProgress:
        every, seconds = self._pace()
        display = self._display(kind, nested) if self._live else None
        description, total = self._description_of(kind), self._total_of(kind)
        stage = StageProgress(kind, description, total, display, leave=leave, every=every, seconds=seconds)
        self._latest.pop(kind, None)
        self._latest[kind] = stage
        return stage

    def _stage_of(self, *kinds: Kind) -> StageProgress:
        """The newest stage of these kinds; where nothing is shown, such as on other processes, one that has not begun."""
        for stage in reversed(self._latest.values()):
            if stage.kind in kinds:
                return stage
        try:
            total = math.inf if self._trainer is None else self._total_of(kinds[0])
        except IndexError:  # a run without such loaders
            total = math.inf
        return StageProgress(kinds[0], "", total, None, leave=False, every=1, seconds=0.0)

    def _end_train_epoch(self, trainer: Trainer, module: TrainModule, *, leave: bool) -> None:
        """Show the final state of the epoch; called when its metrics are known, at the start of the next or at the end."""
        stage, self._train = self._train, None
        if stage is None:
            return
        stage.leave = leave
        stage.show(self.get_metrics(trainer, module))
        stage.close()
        self._loss = self._logs_loss = None

    def _begin_loader(self, kind: Kind, loader: int) -> None:
        if not self._is_shown or not (self.has_dataloader_changed(loader) or self._evaluation is None):
            return
        if self._evaluation is not None:  # the loader before
            self._evaluation.close()
        nested = kind == "validation" and self.trainer.stage == "fit"
        if nested and self._paused is None:
            self._paused = time.monotonic()
        self._evaluation = self._stage(kind, nested=nested, leave=not nested and kind != "sanity")

    def _close_evaluation(self) -> None:
        self.reset_dataloader_idx_tracker()
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def _close(self) -> None:
        """Close all bars, for example of a run that ended early."""
        for stage in (self._evaluation, self._train):
            if stage is not None:
                stage.close()
        self.reset_dataloader_idx_tracker()
        self._evaluation = self._train = self._loss = self._logs_loss = self._paused = None
