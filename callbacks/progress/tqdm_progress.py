"""`TQDMProgressBar`: the progress of a run, drawn by tqdm."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from trainkit.callbacks.progress._stages import Display, Kind, StageProgress, StageProgressBar
from trainkit.checks import whole_number
from trainkit.console import OutputStream, echo, notice, printable
from trainkit.names import lazily

if TYPE_CHECKING:
    pass

__all__ = ["TQDMProgressBar"]

Tqdm = tqdm  # what packages return from the init_*_tqdm that they override

__getattr__, _ = lazily(globals(), {})  # says what to use instead of other names of Lightning's file

_SECONDS_LIVE = 0.1  # Seconds between two refreshes of a bar.


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


class _TQDMDisplay(Display):
    """A stage as a bar of tqdm."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self._started = False

    def draw(self, stage: StageProgress, metrics: dict[str, Any]) -> None:
        bar = self.bar
        if metrics:
            bar.set_postfix({printable(name, sys.stdout): value for name, value in metrics.items()}, refresh=False)
        bar.rate = stage.rate
        if stage.first and not self._started:
            bar.initial, bar.n = stage.first, max(bar.n, stage.first)
            self._started = True
        if stage.done > bar.n:
            bar.update(stage.done - bar.n)
        else:
            bar.refresh()

    def close(self, stage: StageProgress, leave: bool) -> None:
        self.bar.n = max(self.bar.n, stage.done)
        self.bar.leave = leave
        self.bar.close()


class TQDMProgressBar(StageProgressBar):
    """Shows a bar for training, and one each for the sanity check, validation, test and prediction.

    On a terminal, and as widgets in a notebook with ipywidgets, bars are refreshed at most ten times a second. Elsewhere (a log
    file, CI, a notebook without ipywidgets) it prints a line at the end of each epoch and every 15 seconds.

    It shows the number of batches, the rate since the last refresh (of a bar over at least one second; without validation), and
    metrics: those logged by step with `prog_bar=True` in the last batch, others as of the last log boundary. If the training
    step logs none whose name contains "loss", `loss` is the value that it returned. The values are those of the main process,
    read from the device only when they are shown; on XLA they are as of the last log boundary.

    Only the main process shows bars. `module.print` and `print` write above them.

    A subclass changes the texts (`train_description`, `validation_description`, …), the values (`get_metrics`), the format
    (`BAR_FORMAT`) or the bars themselves (`init_train_tqdm`, `init_validation_tqdm`, …). The last two have no effect on lines.

    Args:
        refresh_rate: Minimum number of batches between two refreshes; 0 shows nothing. The environment variable
            `TQDM_MINITERS` sets it where it is higher.
        process_position: Number of lines to leave free above, for bars of other programs on the same terminal.
        leave: Keep the training bar of each epoch on the screen, not only the last one.

    Attributes:
        BAR_FORMAT: Tqdm's `bar_format`; None for its default.

    Raises:
        ConfigurationError: An argument is not an integer of at least 0.

    Example:
        ```python
        trainer = Trainer(callbacks=[TQDMProgressBar(refresh_rate=10)])
        ```
    """

    BAR_FORMAT: str | None = None

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(leave)
        refresh_rate = whole_number(refresh_rate, "TQDMProgressBar(refresh_rate=)", 0)
        process_position = whole_number(process_position, "TQDMProgressBar(process_position=)", 0)
        least = os.environ.get("TQDM_MINITERS", "")  # tqdm's own variable, which tqdm checks
        self.refresh_rate = max(refresh_rate, int(least)) if least.isdecimal() else refresh_rate
        self.process_position = process_position
        self._kind: type[tqdm[Any]] | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether it shows anything: it is not disabled, and `refresh_rate` is not 0."""
        return self._enabled and self.refresh_rate > 0

    def print(
        self, *values: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        """Python's `print`, above the bars."""
        if any(stage is not None and stage.display is not None for stage in (self._train, self._evaluation)):
            with (self._kind or _Bar).external_write_mode(file=file or sys.stdout):
                echo(*values, sep=sep, end=end, file=file, flush=flush)
        else:
            echo(*values, sep=sep, end=end, file=file, flush=flush)

    # ------------------------------------------------------------------------------------------------------------- its bars

    @property
    def train_progress_bar(self) -> tqdm[Any]:
        """tqdm's bar of the training epoch.

        After the epoch, and where lines are printed or nothing is shown, it is a disabled one, with `total` and `n`.
        """
        return self._bar_of("train")

    @property
    def val_progress_bar(self) -> tqdm[Any]:
        """tqdm's bar of the validation or sanity check, as `train_progress_bar`."""
        return self._bar_of("validation", "sanity")

    @property
    def test_progress_bar(self) -> tqdm[Any]:
        """tqdm's bar of the test, as `train_progress_bar`."""
        return self._bar_of("test")

    @property
    def predict_progress_bar(self) -> tqdm[Any]:
        """tqdm's bar of the prediction, as `train_progress_bar`."""
        return self._bar_of("predict")

    def _bar_of(self, *kinds: Kind) -> tqdm[Any]:
        stage = self._stage_of(*kinds)
        bar: Any = getattr(stage.display, "bar", None)
        return _Bar(disable=True, total=stage.total, initial=stage.done, leave=stage.leave) if bar is None else bar

    def init_train_tqdm(self) -> tqdm[Any]:
        """The bar of a training epoch. Override this and the methods below to return a bar of your own.

        Example:
            ```python
            class Bar(TQDMProgressBar):
                def init_validation_tqdm(self):
                    bar = super().init_validation_tqdm()
                    bar.colour = "green"
                    return bar
            ```
        """
        return self._new_bar("train", 0)

    def init_sanity_tqdm(self) -> tqdm[Any]:
        """The bar of the sanity check."""
        return self._new_bar("sanity", 0)

    def init_validation_tqdm(self) -> tqdm[Any]:
        """The bar of a validation loader, in training one line below."""
        return self._new_bar("validation", 1 if self.trainer.stage == "fit" else 0)

    def init_test_tqdm(self) -> tqdm[Any]:
        """The bar of a test loader."""
        return self._new_bar("test", 0)

    def init_predict_tqdm(self) -> tqdm[Any]:
        """The bar of a loader of prediction."""
        return self._new_bar("predict", 0)

    def _new_bar(self, kind: Kind, line: int) -> tqdm[Any]:
        total = self._total_of(kind)
        return (self._kind or _Bar)(
            desc=self._description_of(kind),
            total=None if total == float("inf") else int(total),
            position=self.process_position + line,
            leave=line == 0 and kind != "sanity",
            dynamic_ncols=True,
            mininterval=0.0,  # the stage decides when to draw
            miniters=1,
            file=OutputStream(sys.stdout),
            bar_format=self.BAR_FORMAT,
        )

    def _can_draw(self) -> bool:
        self._kind = _bar_kind()
        return self._kind is not None

    def _pace(self) -> tuple[int, float]:
        return self.refresh_rate, _SECONDS_LIVE

    def _display(self, kind: Kind, nested: bool) -> Display:
        bar = getattr(self, f"init_{kind}_tqdm")()
        total = self._total_of(kind)
        if bar.total is None and total != float("inf"):  # a bar of a subclass need not know its length
            bar.total = int(total)
        return _TQDMDisplay(bar)


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
    try:  # In some containers the terminal has no size, and tqdm would draw nothing.
        return min(os.get_terminal_size(sys.stdout.fileno())) > 0
    except (OSError, ValueError):
        return True
