"""`RichProgressBar`: the progress of a run, drawn by rich."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, cast

from trainkit.callbacks.progress._stages import Display, Kind, StageProgress, StageProgressBar
from trainkit.checks import real_number
from trainkit.console import OutputStream, printable
from trainkit.errors import ConfigurationError, missing_package

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task, TaskID
    from rich.style import Style

    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["RichProgressBar", "RichProgressBarTheme"]


@dataclass
class RichProgressBarTheme:
    """The styles of a `RichProgressBar`, as texts or `rich.style.Style`; an empty text is the terminal's own style.

    Attributes:
        description: Of the text before the bar.
        progress_bar: Of the part of the bar that is done.
        progress_bar_finished: Of a bar that is complete.
        progress_bar_pulse: Of a bar of unknown length.
        batch_progress: Of the number of batches.
        time: Of the time since the start and the time that is left.
        processing_speed: Of the number of batches per second.
        metrics: Of the metrics.
        metrics_text_delimiter: Text between two metrics.
        metrics_format: Format of a number.

    Example:
        ```python
        theme = RichProgressBarTheme(progress_bar="green", metrics_format=".4f")
        trainer = Trainer(callbacks=[RichProgressBar(theme=theme)])
        ```
    """

    description: str | Style = ""
    progress_bar: str | Style = "#6206E0"
    progress_bar_finished: str | Style = "#6206E0"
    progress_bar_pulse: str | Style = "#6206E0"
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim underline"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class _RichDisplay(Display):
    """A stage as a task of rich's `Progress`."""

    def __init__(self, bar: RichProgressBar, progress: Progress) -> None:
        self.bar = bar
        self.progress = progress
        self.task = progress.add_task("", total=None, visible=False, **_texts())

    def draw(self, stage: StageProgress, metrics: dict[str, Any]) -> None:
        texts = _texts(stage)
        if metrics:
            texts["metrics"] = self.bar._metrics_text(metrics)
        else:
            texts.pop("metrics")  # keep those that were drawn last
        self.progress.update(
            self.task,
            total=stage.total,
            completed=stage.done,
            description=printable(stage.description, self.progress.console.file),
            visible=True,
            **texts,
        )
        self.progress.refresh()

    def close(self, stage: StageProgress, leave: bool) -> None:
        if leave:
            self.bar._stop()
        else:
            self.progress.remove_task(self.task)
            self.progress.refresh()


class RichProgressBar(StageProgressBar):
    """Shows what `TQDMProgressBar` shows, drawn in color by the package rich: `pip install 'trainkit-torch[rich]'`.

    Where standard output is neither a terminal nor a notebook, it prints lines, as `TQDMProgressBar` does. While it shows bars,
    rich writes what is printed above them. It starts no thread, and draws in the hooks of batches. With it, the `Trainer`
    adds a `RichModelSummary` instead of a `ModelSummary`.

    Args:
        refresh_rate: Maximum number of refreshes per second; 0 shows nothing. In Lightning the default is 100, which costs time
            in each step.
        leave: Keep the training bar of each epoch on the screen, not only the last one.
        theme: Styles. Default: `RichProgressBarTheme()`.
        console_kwargs: Arguments of `rich.console.Console`, for example `{"force_terminal": True}`.

    Attributes:
        progress: The `rich.progress.Progress` that is shown now; None where lines are printed.
        summary_callback: The registered name of the summary that the `Trainer` adds.

    Raises:
        ConfigurationError: `refresh_rate` is not a number of at least 0, or `theme` is not a `RichProgressBarTheme`.
        MissingPackageError: Rich is not installed.

    Example:
        ```python
        trainer = Trainer(callbacks=[RichProgressBar(leave=True)])
        ```
    """

    summary_callback = "rich_model_summary"

    def __init__(
        self,
        refresh_rate: float = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("rich") is None:
            raise missing_package("rich", "rich", "RichProgressBar")
        super().__init__(leave)
        real_number(refresh_rate, "RichProgressBar(refresh_rate=)", fix="RichProgressBar(refresh_rate=10)")
        if refresh_rate < 0:
            raise ConfigurationError(
                f"RichProgressBar(refresh_rate=...) expected a number of refreshes per second of at least 0, got "
                f"{refresh_rate!r}. Fix: RichProgressBar(refresh_rate=10)"
            )
        if theme is not None and not isinstance(theme, RichProgressBarTheme):
            raise ConfigurationError(
                f"RichProgressBar(theme=...) expected a RichProgressBarTheme or None, got {theme!r}. "
                "Fix: RichProgressBar(theme=RichProgressBarTheme(progress_bar='green'))"
            )
        self.refresh_rate = refresh_rate
        self.theme = theme or RichProgressBarTheme()
        self.console_kwargs = console_kwargs or {}
        self.progress: Progress | None = None
        self._console: Console | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether it shows anything: it is not disabled, and `refresh_rate` is not 0."""
        return self._enabled and self.refresh_rate > 0

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """The columns of rich, without that of the metrics, which comes last. Override it to show others.

        The fields of a task are `batches`, `time`, `rate` and `metrics`, all texts.

        Args:
            trainer: The trainer.
        """
        from rich.progress import BarColumn, TextColumn

        theme = self.theme
        return [
            TextColumn("{task.description}", style=theme.description, markup=False),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            TextColumn("{task.fields[batches]}", style=theme.batch_progress, markup=False),
            TextColumn("{task.fields[time]}", style=theme.time, markup=False),
            TextColumn("{task.fields[rate]}", style=theme.processing_speed, markup=False),
        ]

    # ------------------------------------------------------------------------------------------------------------- its bars

    @property
    def train_progress_bar(self) -> Task:
        """rich's task of the training epoch.

        After the epoch, and where lines are printed or nothing is shown, it is a task of its own, with `total` and `completed`.
        """
        return self._task_of("train")

    @property
    def val_sanity_check_bar(self) -> Task:
        """rich's task of the sanity check, as `train_progress_bar`."""
        return self._task_of("sanity")

    @property
    def val_progress_bar(self) -> Task:
        """rich's task of the validation loader, as `train_progress_bar`."""
        return self._task_of("validation")

    @property
    def test_progress_bar(self) -> Task:
        """rich's task of the test loader, as `train_progress_bar`."""
        return self._task_of("test")

    @property
    def train_progress_bar_id(self) -> TaskID | None:
        """The number of the task of the training epoch in `progress`; None while it is not shown as a bar."""
        return self._id_of("train")

    @property
    def val_sanity_progress_bar_id(self) -> TaskID | None:
        """The number of the task of the sanity check, as `train_progress_bar_id`."""
        return self._id_of("sanity")

    @property
    def val_progress_bar_id(self) -> TaskID | None:
        """The number of the task of the validation loader, as `train_progress_bar_id`."""
        return self._id_of("validation")

    @property
    def test_progress_bar_id(self) -> TaskID | None:
        """The number of the task of the test loader, as `train_progress_bar_id`."""
        return self._id_of("test")

    @property
    def predict_progress_bar_id(self) -> TaskID | None:
        """The number of the task of the loader of prediction, as `train_progress_bar_id`."""
        return self._id_of("predict")

    def _id_of(self, kind: Kind) -> TaskID | None:
        display = self._stage_of(kind).display
        return display.task if isinstance(display, _RichDisplay) else None

    def _task_of(self, kind: Kind) -> Task:
        from rich.progress import Progress

        stage, number, progress = self._stage_of(kind), self._id_of(kind), self.progress
        if number is None or progress is None:
            progress = Progress(disable=True)
            number = progress.add_task(stage.description, total=stage.total, completed=stage.done)
        return next(task for task in progress.tasks if task.id == number)

    def refresh(self) -> None:
        """Draw the bars again now, for example after a change of a task."""
        if self.progress is not None:
            self.progress.refresh()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().teardown(trainer, module, stage)
        self._console = None

    def _can_draw(self) -> bool:
        from rich.console import Console

        self._console = Console(**self.console_kwargs)
        if self._console.file in (sys.stdout, sys.stderr):  # rich exits the program if a pipe is closed
            self._console.file = cast("IO[str]", OutputStream(self._console.file))
        return self._console.is_interactive or self._console.is_jupyter

    def _pace(self) -> tuple[int, float]:
        return 1, 1 / self.refresh_rate

    def _display(self, kind: Kind, nested: bool) -> Display:
        from rich.progress import Progress, TextColumn
        from rich.table import Column

        if self.progress is None:
            theme = self.theme
            # if the terminal is narrow, metrics are wrapped, and what counts the progress keeps its width
            wrapped = Column(no_wrap=False)
            metrics = TextColumn("{task.fields[metrics]}", style=theme.metrics, markup=False, table_column=wrapped)
            columns = [*self.configure_columns(self.trainer), metrics]
            # messages to a file stay there
            same = sys.stderr is not None and (sys.stderr.isatty() or self._console is None or self._console.is_jupyter)
            self.progress = Progress(*columns, console=self._console, auto_refresh=False, redirect_stderr=same)
            self.progress.start()
        return _RichDisplay(self, self.progress)

    def _metrics_text(self, metrics: dict[str, Any]) -> str:
        shown = []
        for name, value in metrics.items():
            number = isinstance(value, int | float)
            shown.append(f"{name}: {format(value, self.theme.metrics_format) if number else value}")
        text = self.theme.metrics_text_delimiter.join(shown)
        return text if self._console is None else printable(text, self._console.file)

    def _stop(self) -> None:
        """Leave the bars that are shown on the screen; later ones are drawn below."""
        progress, self.progress = self.progress, None
        if progress is not None:
            progress.stop()

    def _close(self) -> None:
        super()._close()
        self._stop()


def _texts(stage: StageProgress | None = None) -> dict[str, Any]:
    """The fields of the task of a stage."""
    if stage is None:
        return dict.fromkeys(("batches", "time", "rate", "metrics"), "")
    left = None if stage.total is None or not stage.rate else (stage.total - stage.done) / stage.rate
    remaining = "-:--:--" if left is None else str(timedelta(seconds=int(left)))
    return {
        "batches": f"{stage.done}/{'?' if stage.total is None else stage.total}",
        "time": f"{timedelta(seconds=int(stage.measure_seconds()))} < {remaining}",
        "rate": "" if stage.rate is None else f"{stage.rate:.2f} batches/s",
        "metrics": "",
    }
