"""``TQDMProgressBar``: how far a run is."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from tqdm import tqdm

from trainkit.callback import Callback
from trainkit.callbacks._checks import check_int

if TYPE_CHECKING:
    from trainkit.module import TrainModule
    from trainkit.trainer import Trainer

__all__ = ["TQDMProgressBar"]

_SECONDS_LIVE = 0.1  # between two looks of a bar on a terminal
_SECONDS_PLAIN = 15.0  # between two lines where there is no terminal


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which would outlive the run."""

    monitor_interval = 0


class _Stage:
    """One stage's bar on a terminal, or its lines elsewhere; between two looks it costs one reading of the clock."""

    def __init__(self, description: str, total: float, *, live: bool, position: int, leave: bool) -> None:
        self.description = description
        self.total = int(total) if math.isfinite(total) else None
        self.done = 0
        self.began = time.monotonic()
        self._first: int | None = None  # what was done before the first look, of a resumed epoch
        self.bar: _Bar | None = None
        self.next_look = self.began if live else self.began + _SECONDS_PLAIN
        if live:
            self.bar = _Bar(
                desc=description,
                total=self.total,
                position=position,
                leave=leave,
                dynamic_ncols=True,
                mininterval=0.0,  # it is we who decide when to look
                miniters=1,
                file=sys.stdout,
            )

    def advance(self, done: int, refresh_rate: int) -> bool:
        """Note how many batches are done; True if it is time to show it."""
        if self._first is None:
            self._first = done - 1
        self.done = done
        if done % refresh_rate:
            return False
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + (_SECONDS_PLAIN if self.bar is None else _SECONDS_LIVE)
        return True

    def show(self, values: Mapping[str, Tensor]) -> None:
        """Draw the bar, or print a line."""
        metrics = {name: float(value) for name, value in values.items()}
        if self.bar is None:
            print(self.line(metrics), flush=True)
            return
        if metrics:
            self.bar.set_postfix(metrics, refresh=False)
        if self._first:
            self.bar.initial, self.bar.n = self._first, max(self.bar.n, self._first)
            self._first = 0
        if self.done > self.bar.n:
            self.bar.update(self.done - self.bar.n)
        else:
            self.bar.refresh()

    def line(self, metrics: dict[str, float]) -> str:
        """What a log file gets instead of a bar."""
        total = "?" if self.total is None else str(self.total)
        seconds = time.monotonic() - self.began
        rate = (self.done - (self._first or 0)) / seconds if seconds > 0 else 0.0
        values = "".join(f", {name}={_readable(value)}" for name, value in metrics.items())
        return f"{self.description}: {self.done}/{total} batches, {rate:.1f} batches/s{values}"

    def close(self) -> None:
        """Take the bar off the terminal, or leave its last state there."""
        if self.bar is not None:
            self.bar.n = max(self.bar.n, self.done)
            self.bar.close()
            self.bar = None


class TQDMProgressBar(Callback):
    """Shows a bar for training, and one each for the sanity check, validation, test and prediction.

    On a terminal or in a notebook the bars are drawn at most ten times a second. Elsewhere (a log file, CI) there are
    plain lines instead: one at the end of each epoch and one every 15 seconds within it. Metrics logged with
    ``prog_bar=True`` stand beside, as of the last log boundary; nothing is read from the device for them. Only the
    main process shows anything. ``module.print`` and :meth:`print` write above the bars.

    Args:
        refresh_rate: look at the clock only every that many batches; 0 shows nothing.
        process_position: leave that many lines free above, for bars of other programs on the same terminal.
        leave: keep each epoch's training bar on the screen, not the last one's only.

    Attributes:
        is_progress_bar: True; how a Trainer recognises the callback whose :meth:`print` goes with the bars.

    Raises:
        ConfigurationError: an argument is no integer of at least 0.

    Example::

        trainer = Trainer(callbacks=[TQDMProgressBar(refresh_rate=10)])
    """

    is_progress_bar: bool = True

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        check_int("TQDMProgressBar", "refresh_rate", refresh_rate, 0)
        check_int("TQDMProgressBar", "process_position", process_position, 0)
        self.refresh_rate = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self._shown = False
        self._live = False
        self._train: _Stage | None = None
        self._evaluation: _Stage | None = None
        self._evaluation_loader = 0

    def print(
        self, *values: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        """Python's ``print``, above the bars."""
        if any(stage is not None and stage.bar is not None for stage in (self._train, self._evaluation)):
            with _Bar.external_write_mode(file=file or sys.stdout):
                print(*values, sep=sep, end=end, file=file, flush=flush)
        else:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._shown = trainer.is_global_zero and self.refresh_rate > 0
        self._live = _is_live()

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
            total = min(total, trainer.fit_plan.start + left)
        self._train = self._stage(f"Epoch {trainer.current_epoch}{of}", total, 0, leave=True)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._train is not None and self._train.advance(batch_idx + 1, self.refresh_rate):
            self._train.show(trainer.progress_bar_metrics)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_train_epoch(trainer, leave=True)

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
        self._advance_loader(trainer, batch_idx)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_loader(trainer, nested=trainer.stage == "fit")

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("Test", trainer.num_test_batches, dataloader_idx, nested=False)

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance_loader(trainer, batch_idx)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_loader(trainer, nested=False)

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("Prediction", trainer.num_predict_batches, dataloader_idx, nested=False)

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance_loader(trainer, batch_idx)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_loader(trainer, nested=False)

    def _stage(self, description: str, total: float, line: int, *, leave: bool) -> _Stage:
        return _Stage(description, total, live=self._live, position=self.process_position + line, leave=leave)

    def _end_train_epoch(self, trainer: Trainer, *, leave: bool) -> None:
        """Show the epoch's last state; when its metrics are known: at the start of the next, or at the end."""
        stage, self._train = self._train, None
        if stage is None:
            return
        if stage.bar is not None:
            stage.bar.leave = leave
        stage.show(trainer.progress_bar_metrics)
        stage.close()

    def _begin_loader(self, what: str, totals: list[int | float], loader: int, *, nested: bool) -> None:
        if not self._shown or (self._evaluation is not None and self._evaluation_loader == loader):
            return
        if self._evaluation is not None:  # the loader before
            self._close_evaluation()
        number = f" {loader}" if len(totals) > 1 else ""
        keep = not nested and what != "Sanity check"
        self._evaluation = self._stage(f"{what}{number}", totals[loader], 1 if nested else 0, leave=keep)
        self._evaluation_loader = loader

    def _advance_loader(self, trainer: Trainer, batch_idx: int) -> None:
        if self._evaluation is not None and self._evaluation.advance(batch_idx + 1, self.refresh_rate):
            self._evaluation.show({})

    def _end_loader(self, trainer: Trainer, *, nested: bool) -> None:
        if self._evaluation is not None and (self._evaluation.bar is not None or not nested):
            self._evaluation.show({})
        self._close_evaluation()
        if nested and self._train is not None and self._train.bar is not None:
            self._train.show(trainer.progress_bar_metrics)

    def _close_evaluation(self) -> None:
        if self._evaluation is not None:
            if self._train is not None:  # its rate is that of training
                self._train.began += time.monotonic() - self._evaluation.began
            self._evaluation.close()
            self._evaluation = None

    def _close(self) -> None:
        """Close whatever is open; for a run that ended early."""
        for stage in (self._evaluation, self._train):
            if stage is not None:
                stage.close()
        self._evaluation = self._train = None


def _is_live() -> bool:
    """Whether what is drawn over itself will look like it: a terminal or a notebook, not a file."""
    if "ipykernel" in type(sys.stdout).__module__:
        return True
    isatty = getattr(sys.stdout, "isatty", None)
    if isatty is None or not isatty():
        return False
    try:  # a terminal of no size, as some containers have: tqdm would draw nothing at all
        return min(os.get_terminal_size(sys.stdout.fileno())) > 0
    except (OSError, ValueError):
        return True


def _readable(value: float) -> str:
    return f"{value:.4g}"
