from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import re
import sys
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from rich.progress import TextColumn

from trainkit.callbacks import RichProgressBar
from trainkit.callbacks.progress import RichProgressBarTheme, _stages
from trainkit.errors import ConfigurationError, MissingPackageError


@pytest.fixture(autouse=True)
def _stopped_clock(clock, monkeypatch) -> None:
    monkeypatch.setattr(_stages, "time", clock)
    monkeypatch.setenv("TERM", "xterm")


class Chatty(TinyModule):
    """Shows its losses in the bar, and prints a line in the second batch. Each step takes a second of the clock."""

    clock: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.clock is not None:
            self.clock.now += 1.0
        if batch_idx == 1:
            self.print("a [red]line[/red] of the module")
            print("a plain print")
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * 0 + self.current_epoch, prog_bar=True)


def on_terminal(kind: Any = RichProgressBar, **arguments: Any) -> tuple[Any, io.StringIO]:
    """A bar that draws to a buffer of 150 columns."""
    screen = io.StringIO()
    kwargs = {"file": screen, "force_terminal": True, "width": 150, "color_system": None, "legacy_windows": False}
    return kind(console_kwargs=kwargs, **arguments), screen


def draws(screen: io.StringIO) -> list[str]:
    """All lines that were drawn, one after the other, without the movements of the cursor."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", screen.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]", plain) if line.strip()]


def left(screen: io.StringIO) -> list[str]:
    """The lines that a terminal shows at the end."""
    lines, row = [""], 0
    for text, move in re.findall(r"([^\x1b\n\r]+)|(\x1b\[[0-9;?]*[A-Za-z]|[\n\r])", screen.getvalue()):
        if text:
            lines[row] = text
        elif move == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif move.endswith("A"):
            row -= int(move[2:-1] or 1)
        elif move.endswith("K"):
            lines[row] = ""
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    "arguments, words", [({"refresh_rate": -1}, "at least 0"), ({"refresh_rate": "1"}, "number"), ({"theme": "dark"}, "theme=")]
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{words}.*RichProgressBar\("):
        RichProgressBar(**arguments)


def test_without_rich(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else found(name))
    with pytest.raises(MissingPackageError, match=r"pip install 'trainkit-torch\[rich\]'"):
        RichProgressBar()


def test_a_fit_on_a_terminal(clock) -> None:
    bar, screen = on_terminal()
    module, stdout = Chatty(), sys.stdout
    module.clock = clock
    trainer = make_trainer(bar, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, tiny_loader(), tiny_loader(8))
    shown = draws(screen)
    for line in ("Sanity check", "a [red]line[/red] of the module", "a plain print", "Validation"):
        assert any(text.startswith(line) for text in shown), line
    assert any(re.match(r"Epoch 0/1 ━+ +2/4 0:00:02 < 0:00:02 1\.00 batches/s train_loss: \d+\.\d{3}$", text) for text in shown)
    kept = left(screen)
    assert re.match(r"Epoch 1/1 ━+ 4/4 .*val_loss: 1\.000", kept[-1])
    assert [line for line in kept if not line.startswith("Epoch")] == ["a [red]line[/red] of the module", "a plain print"] * 2
    assert len(kept) == 5  # one bar
    assert (bar.progress, sys.stdout) == (None, stdout)


def test_leave_keeps_the_bar_of_every_epoch() -> None:
    bar, screen = on_terminal(leave=True)
    make_trainer(bar, max_epochs=2).fit(TinyModule(), tiny_loader(), tiny_loader(8))
    assert [line[:9] for line in left(screen)] == ["Epoch 0/1", "Epoch 1/1"]


def test_the_other_stages() -> None:
    bar, screen = on_terminal()
    trainer = make_trainer(bar)
    trainer.test(TinyModule(), tiny_loader(), verbose=False)
    trainer.predict(TinyModule(), tiny_loader(12))
    assert [re.sub(" ━+", "", line)[:16].strip() for line in left(screen)] == ["Test 4/4 0:00:00", "Prediction 3/3 0"]


def test_a_terminal_that_cannot_move_the_cursor_has_lines(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TERM", "dumb")
    bar, screen = on_terminal()
    make_trainer(bar).fit(TinyModule(), tiny_loader())
    assert screen.getvalue() == ""
    assert capsys.readouterr().out.startswith("Epoch 0/0: 4/4 batches")


def test_without_a_terminal_it_prints_lines(capsys) -> None:
    trainer = make_trainer(RichProgressBar())
    trainer.fit(Chatty(), tiny_loader(), tiny_loader(8))
    trainer.test(TinyModule(), tiny_loader(), verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["a [red]line[/red] of the module", "a plain print"]
    assert re.match(r"Epoch 0/0: 4/4 batches, .*val_loss=0", lines[2])
    assert lines[3].startswith("Test: 4/4 batches")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_fit_that_fails_restores_the_terminal(error: type[BaseException]) -> None:
    class Failing(Chatty):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise error

    bar, screen = on_terminal()
    stdout = sys.stdout
    with pytest.raises(error):
        make_trainer(bar).fit(Failing(), tiny_loader(), tiny_loader())
    assert sys.stdout is stdout
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again


def test_how_many_times_it_draws(clock) -> None:
    class Fast(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 1 / 64
            return self.loss(batch)

    counts = []
    for rate in (0, 1, 8):
        bar, screen = on_terminal(refresh_rate=rate)
        make_trainer(bar).fit(Fast(), tiny_loader(samples=512, batch_size=4))  # 2 seconds
        counts.append(len({text for text in draws(screen) if "/128" in text}))
    assert counts == [0, 3, 17]


def test_themes_and_columns(clock) -> None:
    class Own(RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            return [TextColumn("{task.description}: {task.completed:.0f} of {task.total:.0f}")]

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            return {**super().get_metrics(trainer, pl_module), "phase": "warm"}

    _, screen = on_terminal()
    theme = RichProgressBarTheme(metrics_text_delimiter=" | ", metrics_format=".1e", metrics="bold")
    bar = Own(theme=theme, console_kwargs={"file": screen, "force_terminal": True, "width": 100, "color_system": "standard"})
    make_trainer(bar).fit(Chatty(), tiny_loader())
    assert re.search(r"Epoch 0/0: 4 of 4 .*\x1b\[1mtrain_loss: \d\.\de[+-]\d\d \| phase: warm", screen.getvalue())


def test_bars_that_can_be_asked_for(trainer, module, clock) -> None:
    bar, _ = on_terminal()
    assert (bar.train_progress_bar.completed, bar.train_progress_bar.total, bar.train_progress_bar_id) == (0, None, None)
    trainer.num_training_batches = 10
    bar.setup(trainer, module, "fit")
    bar.on_train_epoch_start(trainer, module)
    clock.now += 1.0
    bar.on_train_batch_end(trainer, module, None, None, 3)
    assert (bar.train_progress_bar.completed, bar.train_progress_bar.total) == (4, 10)
    assert bar.progress is not None
    assert bar.train_progress_bar is bar.progress.tasks[0]
    assert bar.train_progress_bar_id == bar.train_progress_bar.id
    assert (bar.predict_progress_bar_id, bar.test_progress_bar_id, bar.val_sanity_progress_bar_id) == (None, None, None)
    for stage, name in [("test", "test_progress_bar"), ("validation", "val_progress_bar")]:
        getattr(bar, f"on_{stage}_batch_start")(trainer, module, None, 0, 0)
        clock.now += 1.0
        getattr(bar, f"on_{stage}_batch_end")(trainer, module, None, None, 0, 0)
        assert getattr(bar, name).completed == 1
        assert getattr(bar, f"{name}_id") is not None
        getattr(bar, f"on_{stage}_end")(trainer, module)
        assert (getattr(bar, name).completed, getattr(bar, f"{name}_id")) == (1, None), "it has ended"
        bar.on_train_epoch_start(trainer, module)
    trainer.sanity_checking = True
    bar.on_validation_batch_start(trainer, module, None, 0, 0)
    assert bar.val_sanity_check_bar.completed == 0
    bar.refresh()
    bar.teardown(trainer, module, "fit")
    bar.refresh()
    copy.deepcopy(RichProgressBar())


class Asking(RichProgressBar):
    """Reads its bar after each batch, on all processes."""

    fraction = -1.0

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.fraction = self.train_progress_bar.completed / self.train_progress_bar.total
        if self.train_progress_bar_id is not None:
            self.progress.update(self.train_progress_bar_id, refresh=False)


def shown() -> tuple[str, bool, float]:
    bar, screen = on_terminal(Asking)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        make_trainer(bar, strategy="ddp").fit(TinyModule(), tiny_loader())
    return screen.getvalue() + printed.getvalue(), bar.is_enabled, bar.fraction


def test_the_main_process_shows_the_bar() -> None:
    (main, enabled, fraction), other = run_world(2, shown)
    assert "2/2" in main
    assert (enabled, fraction > 0) == (True, True)
    assert other == ("", False, 0.0), "a bar that it can ask for, and that shows nothing"


def test_each_style_is_used(clock) -> None:
    """Each part of a line has a background of its own."""
    styles = dict(zip(STYLES, ("red", "green", "blue", "cyan", "magenta", "yellow", "white", "black"), strict=True))
    theme = RichProgressBarTheme(**{name: f"on {color}" for name, color in styles.items()})
    screen = io.StringIO()
    kwargs = {"file": screen, "force_terminal": True, "width": 150, "color_system": "standard", "legacy_windows": False}
    bar = RichProgressBar(theme=theme, console_kwargs=kwargs)
    module = Chatty()
    module.clock = clock
    make_trainer(bar).fit(module, tiny_loader())
    used = set(re.findall(r"\x1b\[(4[0-7])m", screen.getvalue()))
    assert used == {"40", "41", "42", "43", "44", "45", "47"}
    assert bar.configure_columns(None)[1].pulse_style == "on cyan"  # type: ignore[arg-type, attr-defined]


def test_a_stage_without_a_length(clock) -> None:
    bar, screen = on_terminal()
    make_trainer(bar).predict(TinyModule(), Endless())
    assert re.match(r"Prediction ━+ 4/\? 0:00:00 < -:--:-- 0\.00 batches/s$", left(screen)[-1])


STYLES = (
    "description", "progress_bar", "progress_bar_finished", "progress_bar_pulse", "batch_progress", "time", "processing_speed",
    "metrics",
)  # fmt: skip


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Batches without a length."""

    def __iter__(self) -> Any:
        return iter(tiny_loader())


def test_on_a_narrow_terminal_metrics_are_wrapped() -> None:
    screen = io.StringIO()
    bar = RichProgressBar(console_kwargs={"file": screen, "force_terminal": True, "width": 90, "color_system": None})
    make_trainer(bar).fit(Chatty(), tiny_loader(), tiny_loader(8))
    text = " ".join(left(screen))
    assert re.search(r"Epoch 0/0 ━+ +4/4 0:00:00 < -:--:-- 0\.00 batches/s", text)
    assert "val_loss: 0.000" in text
    assert re.search(r"train_loss: \d+\.\d{3}", text)
