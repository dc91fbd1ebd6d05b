"""`TQDMProgressBar`: the progress of a run."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from tqdm import tqdm

from trainkit.callback import Callback
from trainkit.checks import whole_number
from trainkit.console import notice, printable
from trainkit.metrics.values import read

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["TQDMProgressBar"]

_SECONDS_LIVE = 0.1  # between two refreshes of a bar
_SECONDS_PLAIN = 15.0  # between two lines without a terminal
_SECONDS_RATE = 1.0  # minimum interval for the rate of a bar


class _LastRate:
    """Added to tqdm: the rate of the last interval; and no monitor thread, which would outlive the run."""

    monitor_interval = 0
    rate: float | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values that tqdm draws."""
        return {**super().format_dict, "rate": self.rate}  # type: ignore[misc]


class _Bar(_LastRate, tqdm):  # type: ignore[type-arg]
    """On a terminal."""


@lru_cache(maxsize=1)  # the notice once
def _widget_bar() -> type[tqdm[Any]] | None:
    """tqdm's widget for notebooks; `None` without ipywidgets: a saved notebook would contain cursor movements."""
    if importlib.util.find_spec("ipywidgets") is None:
        notice("the progress bar prints lines in this notebook. For a bar: pip install ipywidgets, then restart the kernel.")
        return None
    from tqdm.notebook import tqdm as widget

    class WidgetBar(_LastRate, widget):  # type: ignore[type-arg]
        """In a notebook."""

    return WidgetBar


class _StageBar:
    """The bar of one stage, or its lines without a terminal."""

    def __init__(self, description: str, total: float, *, kind: type[tqdm[Any]] | None, position: int, leave: bool) -> None:
        self.description = description
        self.total = int(total) if math.isfinite(total) else None
        self.done = 0
        self.since = time.monotonic()  # start of the interval of the rate, after `_counted` batches
        self._counted = 0
        self._rate: float | None = None
        self._first: int | None = None  # number of batches that a resumed epoch has skipped
        self.bar: Any = None
        self.next_look = self.since + (_SECONDS_PLAIN if kind is None else 0.0)
        if kind is not None:
            self.bar = kind(
                desc=description,
                total=self.total,
                position=position,
                leave=leave,
                dynamic_ncols=True,
                mininterval=0.0,  # advance decides
                miniters=1,
                file=sys.stdout,
            )

    def advance(self, done: int, refresh_rate: int) -> bool:
        """Set the number of batches; returns whether to show it now."""
        if self._first is None:
            self._first = self._counted = done - 1
            if self._first:  # a resumed epoch: the loader has skipped to its position
                self._counted, self.since = done, time.monotonic()
        self.done = done
        if done % refresh_rate:
            return False
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + (_SECONDS_PLAIN if self.bar is None else _SECONDS_LIVE)
        return True

    def show(self, metrics: dict[str, float]) -> None:
        """Draw the bar, or print a line."""
        self._measure()
        if self.bar is None:
            print(printable(self.line(metrics), sys.stdout), flush=True)
            return
        if metrics:
            self.bar.set_postfix({printable(name, sys.stdout): value for name, value in metrics.items()}, refresh=False)
        self.bar.rate = self._rate
        if self._first:
            self.bar.initial, self.bar.n = self._first, max(self.bar.n, self._first)
            self._first = 0
        if self.done > self.bar.n:
            self.bar.update(self.done - self.bar.n)
        else:
            self.bar.refresh()

    def _measure(self) -> None:
        """Compute the rate since the last time."""
        now = time.monotonic()
        seconds, batches = now - self.since, self.done - self._counted
        long_enough = self.bar is None or self._rate is None or seconds >= _SECONDS_RATE
        if batches > 0 and long_enough:
            self._rate = batches / seconds if seconds > 0 else 0.0
            self.since, self._counted = now, self.done

    def line(self, metrics: dict[str, float]) -> str:
        """A line for a log file instead of a bar."""
        total = "?" if self.total is None else str(self.total)
        rate = "" if self._rate is None else f", {self._rate:.1f} batches/s"
        values = "".join(f", {name}={value:.4g}" for name, value in metrics.items())
        return f"{self.description}: {self.done}/{total} batches{rate}{values}"

    def close(self) -> None:
        """Remove the bar from the terminal, or leave its last state there."""
        if self.bar is not None:
            self.bar.n = max(self.bar.n, self.done)
            self.bar.close()
            self.bar = None


class TQDMProgressBar(Callback):
    """Shows a bar for training, and one each for the sanity check, validation, test and prediction.

    On a terminal, and as widgets in a notebook with ipywidgets, bars are refreshed at most ten times a second. Elsewhere (a log
    file, CI, a notebook without ipywidgets) it prints a line at the end of each epoch and every 15 seconds.

    It shows the number of batches, the rate since the last refresh (of a bar over at least one second; without validation), and
    metrics: those logged by step with `prog_bar=True` in the last batch, others as of the last log boundary. If the training
    step logs none whose name contains "loss", `loss` is the value that it returned. The values are those of the main process,
    read from the device only when they are shown; on XLA they are as of the last log boundary.

    Only the main process shows bars. `module.print` and `print` write above them.

    Args:
        refresh_rate: Minimum number of batches between two refreshes; 0 shows nothing.
        process_position: Number of lines to leave free above, for bars of other programs on the same terminal.
        leave: Keep the training bar of each epoch on the screen, not only the last one.

    Attributes:
        is_progress_bar: True; marks the callback whose `print` the Trainer uses.

    Raises:
        ConfigurationError: An argument is not an integer of at least 0.

    Example:
        ```python
        trainer = Trainer(callbacks=[TQDMProgressBar(refresh_rate=10)])
        ```
    """

    is_progress_bar: bool = True

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        refresh_rate = whole_number(refresh_rate, "TQDMProgressBar(refresh_rate=)", 0)
        process_position = whole_number(process_position, "TQDMProgressBar(process_position=)", 0)
        self.refresh_rate = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self._shown = False
        self._kind: type[tqdm[Any]] | None = None
        self._loss: Any = None
        self._logs_loss: bool | None = None  # in this epoch; None before its first batch
        self._paused: float | None = None  # time at which validation paused training
        self._train: _StageBar | None = None
        self._evaluation: _StageBar | None = None
        self._evaluation_loader = 0

    def print(
        self, *values: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        """Python's `print`, above the bars."""
        if any(stage is not None and stage.bar is not None for stage in (self._train, self._evaluation)):
            assert self._kind is not None
            with self._kind.external_write_mode(file=file or sys.stdout):
                print(*values, sep=sep, end=end, file=file, flush=flush)
        else:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._shown = trainer.is_global_zero and self.refresh_rate > 0
        self._kind = _bar_kind() if self._shown else None

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._close()

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not self._shown:
            return
        self._end_train_epoch(trainer, leave=self.leave)
        of = "" if trainer.max_epochs < 0 else f"/{trainer.max_epochs - 1}"
        total: float = trainer.num_training_batches
        if trainer.max_steps >= 0:  # the run may end inside this epoch
            left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
            total = min(total, trainer._run.progress.epoch_start + left)
        self._train = self._stage(f"Epoch {trainer.current_epoch}{of}", total, 0, leave=True)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._train is None:
            return
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        due = self._train.advance(batch_idx + 1, self.refresh_rate)
        if due or self._logs_loss is None:
            self._logs_loss = self._logs_loss or any("loss" in name.lower() for name in trainer._run.train_metrics.in_bar())
        if due:
            self._train.show(self._train_values(trainer))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_train_epoch(trainer, leave=True)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._train is not None:
            self._paused = time.monotonic()

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            self._begin_loader("Sanity check", trainer.num_sanity_val_batches, dataloader_idx, nested=False)
        else:
            self._begin_loader("Validation", trainer.num_val_batches, dataloader_idx, nested=trainer.stage == "fit")

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._evaluation is not None and self._evaluation.advance(batch_idx + 1, self.refresh_rate):
            self._evaluation.show({})

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        nested = trainer.stage == "fit"
        if self._evaluation is not None and (self._evaluation.bar is not None or not nested):
            self._evaluation.show({})
        self._close_evaluation()
        if self._train is not None and self._paused is not None:  # validation does not count in its rate
            self._train.since += time.monotonic() - self._paused
        self._paused = None
        if nested and self._train is not None and self._train.bar is not None:
            self._train.show(self._train_values(trainer))

    on_test_end = on_predict_end = on_validation_end

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("Test", trainer.num_test_batches, dataloader_idx, nested=False)

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("Prediction", trainer.num_predict_batches, dataloader_idx, nested=False)

    def _stage(self, description: str, total: float, line: int, *, leave: bool) -> _StageBar:
        return _StageBar(description, total, kind=self._kind, position=self.process_position + line, leave=leave)

    def _train_values(self, trainer: Trainer) -> dict[str, float]:
        """The metrics next to the training bar; waits for the device once."""
        values: dict[str, Any] = trainer.progress_bar_metrics
        if not trainer.strategy.lazy_tensors:  # reading one there would run a part of the step separately
            values = {**values, **trainer._run.train_metrics.in_bar()}
            if not self._logs_loss and isinstance(self._loss, Tensor) and self._loss.numel() == 1:
                values = {"loss": self._loss, **values}
        return dict(zip(values, read(list(values.values())), strict=True))

    def _end_train_epoch(self, trainer: Trainer, *, leave: bool) -> None:
        """Show the final state of the epoch; called when its metrics are known, at the start of the next or at the end."""
        stage, self._train = self._train, None
        if stage is None:
            return
        if stage.bar is not None:
            stage.bar.leave = leave
        stage.show(self._train_values(trainer))
        stage.close()
        self._loss = self._logs_loss = None

    def _begin_loader(self, what: str, totals: list[int | float], loader: int, *, nested: bool) -> None:
        if not self._shown or (self._evaluation is not None and self._evaluation_loader == loader):
            return
        if self._evaluation is not None:  # the loader before
            self._close_evaluation()
        if nested and self._paused is None:
            self._paused = time.monotonic()
        number = f" {loader}" if len(totals) > 1 else ""
        keep = not nested and what != "Sanity check"
        self._evaluation = self._stage(f"{what}{number}", totals[loader], 1 if nested else 0, leave=keep)
        self._evaluation_loader = loader

    def _close_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def _close(self) -> None:
        """Close all bars, for example of a run that ended early."""
        for stage in (self._evaluation, self._train):
            if stage is not None:
                stage.close()
        self._evaluation = self._train = self._loss = self._logs_loss = self._paused = None


def _bar_kind() -> type[tqdm[Any]] | None:
    """The class of bars for standard output; `None`: lines."""
    if "ipykernel" in type(sys.stdout).__module__:
        return _widget_bar()
    return _Bar if _is_live() else None


def _is_live() -> bool:
    """Whether standard output is a terminal."""
    isatty = getattr(sys.stdout, "isatty", None)
    if isatty is None or not isatty():
        return False
    try:  # in some containers the terminal has no size, and tqdm would draw nothing
        return min(os.get_terminal_size(sys.stdout.fileno())) > 0
    except (OSError, ValueError):
        return True
