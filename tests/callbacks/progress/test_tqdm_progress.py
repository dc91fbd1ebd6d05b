from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.launch.notebooks import run_cells
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.support import run_python
from tqdm import tqdm

from trainkit import Trainer
from trainkit.callbacks import TQDMProgressBar
from trainkit.callbacks.progress import _stages, tqdm_progress
from trainkit.errors import ConfigurationError, NotAvailableError


class Terminal:
    """What was written to standard output, which is treated as a terminal."""

    def __init__(self, capsys: Any) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().out
        return self._text


@pytest.fixture(autouse=True)
def _stopped_clock(clock, monkeypatch) -> None:
    monkeypatch.setattr(_stages, "time", clock)


@pytest.fixture
def terminal(capsys, monkeypatch) -> Terminal:
    monkeypatch.setattr(tqdm_progress, "_is_live", lambda: True)
    return Terminal(capsys)


def draws(terminal: Terminal) -> list[str]:
    """All bars that were drawn, one after the other, without the movements of the cursor."""
    parts = re.split(r"[\r\n]|\x1b\[A", terminal.getvalue())
    return [part.strip() for part in parts if part.strip()]


def train_epoch(callback: TQDMProgressBar, trainer: Any, module: Any, clock: Any, batches: int, seconds: float) -> None:
    callback.on_train_epoch_start(trainer, module)
    for batch_idx in range(batches):
        clock.now += seconds
        callback.on_train_batch_end(trainer, module, None, None, batch_idx)


def evaluate(callback: TQDMProgressBar, trainer: Any, module: Any, clock: Any, stage: str, loaders: list[int]) -> None:
    for loader, batches in enumerate(loaders):
        for batch_idx in range(batches):
            getattr(callback, f"on_{stage}_batch_start")(trainer, module, None, batch_idx, loader)
            clock.now += 1.0
            getattr(callback, f"on_{stage}_batch_end")(trainer, module, None, None, batch_idx, loader)
    getattr(callback, f"on_{stage}_end")(trainer, module)


@pytest.mark.parametrize("arguments", [{"refresh_rate": -1}, {"refresh_rate": 0.5}, {"process_position": -1}])
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"≥ 0.*For example: TQDMProgressBar"):
        TQDMProgressBar(**arguments)


def test_a_bar_on_a_terminal(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    trainer.progress_bar_metrics = {"train_loss": 0.123456}
    train_epoch(callback, trainer, module, clock, 10, seconds=1.0)
    assert draws(terminal)[-1].startswith("Epoch 0/1: 100%")
    assert "10/10" in draws(terminal)[-1]
    assert "train_loss=0.123" in draws(terminal)[-1]
    callback.on_train_end(trainer, module)
    assert terminal.getvalue().endswith("\n")  # the last bar stays
    callback.teardown(trainer, module, "fit")


def test_is_drawn_ten_times_a_second_at_most(trainer, module, clock, terminal) -> None:
    trainer.num_training_batches = 10_000
    trainer.progress_bar_metrics = {"train_loss": 0.5}
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 10_000, seconds=1 / 1024)
    assert 90 <= len(draws(terminal)) <= 100  # in 9.8 seconds
    callback.on_train_end(trainer, module)
    assert "10000/10000" in draws(terminal)[-1]  # the last bar is drawn in any case


def test_refresh_rate_counts_batches(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar(refresh_rate=4)
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 10, seconds=1.0)
    counts = [match.group(1) for text in draws(terminal) if (match := re.search(r"(\d+)/10 \[", text))]
    assert counts == ["0", "4", "8"]
    callback.on_train_end(trainer, module)


@pytest.mark.parametrize("rate, variable, expected", [(1, "5", 5), (7, "5", 7), (0, "1", 1), (2, "0", 2)])
def test_the_variable_of_tqdm(rate: int, variable: str, expected: int, monkeypatch) -> None:
    monkeypatch.setenv("TQDM_MINITERS", variable)
    assert TQDMProgressBar(refresh_rate=rate).refresh_rate == expected


def test_refresh_rate_0_and_other_processes_show_nothing(trainer, module, clock, terminal) -> None:
    for rate, is_main in [(0, True), (1, False)]:
        trainer.is_global_zero = is_main
        callback = TQDMProgressBar(refresh_rate=rate)
        callback.setup(trainer, module, "fit")
        train_epoch(callback, trainer, module, clock, 3, seconds=1.0)
        evaluate(callback, trainer, module, clock, "validation", [2])
        callback.on_train_end(trainer, module)
        callback.teardown(trainer, module, "fit")
    assert terminal.getvalue() == ""


def test_an_epoch_of_unknown_length(trainer, module, clock, terminal) -> None:
    trainer.num_training_batches, trainer.max_epochs = math.inf, -1
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 3, seconds=1.0)
    assert draws(terminal)[-1].startswith("Epoch 0: 3it")
    callback.on_train_end(trainer, module)


def test_a_resumed_epoch_begins_where_it_was(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    callback.on_train_epoch_start(trainer, module)
    clock.now += 1.0
    callback.on_train_batch_end(trainer, module, None, None, 7)
    assert "8/10" in draws(terminal)[-1]
    assert callback.train_progress_bar.initial == 7  # the rate does not count skipped batches
    callback.on_train_end(trainer, module)


def rates(terminal: Terminal) -> list[str]:
    return [match.group(1) for text in draws(terminal) if (match := re.search(r"([\d.]+(?:it/s|s/it))", text))]


def test_the_rate_is_that_of_the_last_interval(trainer, module, clock, terminal) -> None:
    """A mean since the start of the epoch would hide that a run has become slow."""
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    trainer.num_training_batches = 100
    callback.on_train_epoch_start(trainer, module)
    for batch_idx in range(100):
        clock.now += 0.25 if batch_idx < 80 else 4.0
        callback.on_train_batch_end(trainer, module, None, None, batch_idx)
    shown = rates(terminal)
    assert {*shown[5:70]} == {"4.00it/s"}
    assert shown[-1] == "4.00s/it"
    callback.on_train_end(trainer, module)


def test_a_rate_is_measured_over_a_second_at_least(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    trainer.num_training_batches = 1000
    callback.on_train_epoch_start(trainer, module)
    for batch_idx in range(1000):
        clock.now += 0.03125 if batch_idx % 2 else 0.09375  # batches of two durations: measured over one, it would jump
        callback.on_train_batch_end(trainer, module, None, None, batch_idx)
    assert {*rates(terminal)[20:]} == {"16.00it/s"}
    callback.on_train_end(trainer, module)


def test_a_validation_does_not_count_in_the_rate(trainer, module, clock, terminal) -> None:
    """The time from its first to its last hook does not count, with the start of DataLoader workers before the first batch."""
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    trainer.num_val_batches = [2, 2]
    train_epoch(callback, trainer, module, clock, 4, seconds=0.5)
    callback.on_validation_start(trainer, module)
    clock.now += 60.0
    evaluate(callback, trainer, module, clock, "validation", [2, 2])
    for batch_idx in range(4, 8):
        clock.now += 0.5
        callback.on_train_batch_end(trainer, module, None, None, batch_idx)
    assert {text for text in rates(terminal) if text not in ("1.00it/s",)} == {"2.00it/s"}  # 1.00: the rate of validation
    callback.on_train_end(trainer, module)


def test_the_search_for_the_position_of_a_resume_does_not_count_in_the_rate(trainer, module, clock, capsys) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    trainer.num_training_batches = 110
    callback.on_train_epoch_start(trainer, module)
    clock.now += 60.0  # meanwhile the loader skips 100 batches
    for batch_idx in range(100, 110):
        clock.now += 0.5
        callback.on_train_batch_end(trainer, module, None, None, batch_idx)
    callback.on_train_end(trainer, module)
    assert capsys.readouterr().out.splitlines()[-1] == "Epoch 0/1: 110/110 batches, 2.0 batches/s"


@pytest.mark.parametrize("leave", [False, True])
def test_leave_keeps_the_bar_of_every_epoch(trainer, module, clock, terminal, leave: bool) -> None:
    callback = TQDMProgressBar(leave=leave)
    callback.setup(trainer, module, "fit")
    for epoch in range(2):
        trainer.current_epoch = epoch
        train_epoch(callback, trainer, module, clock, 10, seconds=1.0)
    callback.on_train_end(trainer, module)
    lines = [text for text in terminal.getvalue().split("\n") if text.strip()]
    assert len(lines) == (2 if leave else 1)


def test_validation_in_fit_has_a_bar_below_that_goes_away(trainer, module, clock, terminal) -> None:
    trainer.num_val_batches = [2, 3]
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 10, seconds=1.0)
    trainer.progress_bar_metrics = {"val_loss": 2.0}
    evaluate(callback, trainer, module, clock, "validation", [2, 3])
    shown = draws(terminal)
    assert any(text.startswith("Validation 0: 100%") and "2/2" in text for text in shown)
    assert shown[-1].startswith("Epoch 0/1: 100%")
    assert "val_loss=2" in shown[-1]
    assert callback._evaluation is None
    callback.on_train_end(trainer, module)


@pytest.mark.parametrize(
    "stage, name",
    [("validation", "Validation"), ("test", "Test"), ("predict", "Prediction"), ("sanity", "Sanity check")],
)
def test_every_stage_has_a_bar(trainer, module, clock, terminal, stage: str, name: str) -> None:
    callback = TQDMProgressBar()
    trainer.stage = stage
    if stage == "sanity":
        trainer.sanity_checking, stage = True, "validation"
    callback.setup(trainer, module, stage)
    trainer.num_val_batches = trainer.num_sanity_val_batches = [3, 3]
    trainer.num_test_batches = trainer.num_predict_batches = [3, 3]
    evaluate(callback, trainer, module, clock, stage, [3, 3])
    shown = draws(terminal)
    for loader in range(2):
        assert any(text.startswith(f"{name} {loader}: 100%") and "3/3" in text for text in shown)
    callback.teardown(trainer, module, stage)


def test_plain_lines_where_there_is_no_terminal(trainer, module, clock, capsys) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    trainer.num_training_batches = 40
    trainer.progress_bar_metrics = {"train_loss": 0.123456, "lr": 3e-5}
    train_epoch(callback, trainer, module, clock, 40, seconds=0.5)
    trainer.num_val_batches = [2, 3]
    evaluate(callback, trainer, module, clock, "validation", [2, 3])  # not part of the training time
    trainer.progress_bar_metrics = {"train_loss": 0.1, "val_loss": 0.25}
    callback.on_train_end(trainer, module)
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 0/1: 30/40 batches, 2.0 batches/s, train_loss=0.1235, lr=3e-05",
        "Epoch 0/1: 40/40 batches, 2.0 batches/s, train_loss=0.1, val_loss=0.25",
    ]


def test_plain_lines_of_a_stage_of_its_own(trainer, module, clock, capsys) -> None:
    callback = TQDMProgressBar()
    trainer.stage, trainer.num_test_batches = "test", [math.inf]
    callback.setup(trainer, module, "test")
    evaluate(callback, trainer, module, clock, "test", [4])
    assert capsys.readouterr().out == "Test: 4/? batches, 1.0 batches/s\n"


def test_print_goes_above_the_bar(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar()
    callback.print("no bar", "yet")
    assert terminal.getvalue() == "no bar yet\n"
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 5, seconds=1.0)
    callback.print("a", 1, sep="-", flush=True)
    shown = draws(terminal)
    assert "a-1" in shown
    assert shown[-1].startswith("Epoch 0/1:  50%")  # the bar is drawn again below
    callback.on_train_end(trainer, module)


def test_print_where_there_is_no_terminal(trainer, module, clock, capsys) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 5, seconds=1.0)
    callback.print("a line")
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize("end", ["on_exception", "teardown"])
def test_bars_are_closed_when_a_run_ends_early(trainer, module, clock, terminal, end: str) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 5, seconds=1.0)
    callback.on_validation_batch_start(trainer, module, None, 0)
    getattr(callback, end)(trainer, module, KeyboardInterrupt() if end == "on_exception" else "fit")
    assert not tqdm_progress._Bar._instances
    assert terminal.getvalue().endswith("\n")
    written = terminal.getvalue()
    callback.on_train_batch_end(trainer, module, None, None, 5)
    callback.on_validation_end(trainer, module)
    assert terminal.getvalue() == written


def test_starts_no_thread(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 2, seconds=1.0)
    assert "monitor" not in vars(tqdm_progress._Bar)  # where tqdm keeps its monitor thread
    callback.teardown(trainer, module, "fit")


@pytest.mark.parametrize("position", [0, 3])
def test_bars_have_lines_of_their_own(trainer, module, clock, terminal, position: int) -> None:
    callback = TQDMProgressBar(process_position=position)
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 2, seconds=1.0)
    callback.on_validation_batch_start(trainer, module, None, 0)
    assert [-bar.pos for bar in (callback.train_progress_bar, callback.val_progress_bar)] == [position, position + 1]
    callback.teardown(trainer, module, "fit")
    trainer.stage = "validate"
    callback.setup(trainer, module, "validate")
    callback.on_validation_batch_start(trainer, module, None, 0)
    assert -callback.val_progress_bar.pos == position
    callback.teardown(trainer, module, "validate")


def test_a_trainer_can_recognise_it() -> None:
    assert TQDMProgressBar.is_progress_bar


def _stdout(monkeypatch, stream: Any) -> bool:
    monkeypatch.setattr(tqdm_progress, "sys", SimpleNamespace(stdout=stream))
    return tqdm_progress._is_live()


def test_what_passes_for_a_terminal(monkeypatch) -> None:
    assert not _stdout(monkeypatch, None)  # as in a program without a console
    assert not _stdout(monkeypatch, io.StringIO())
    assert _stdout(monkeypatch, SimpleNamespace(isatty=lambda: True, fileno=io.StringIO().fileno))  # a terminal of unknown size


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("lines, columns, live", [(24, 80, True), (24, 0, False), (0, 80, False)])
def test_a_terminal_without_size_does_not_pass(monkeypatch, lines: int, columns: int, live: bool) -> None:
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    with open(leader, "rb"), open(follower, "w") as stream:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        assert _stdout(monkeypatch, stream) is live


class Chatty(TinyModule):
    """Shows its losses in the bar, and prints a line in the second batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.print("a line of the module")
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx) -> None:
        self.log("val_loss", self.loss(batch) * 0 + self.current_epoch, prog_bar=True)


def test_a_fit_without_a_terminal(make_trainer, capsys) -> None:
    trainer = make_trainer(enable_progress_bar=True, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(Chatty(), tiny_loader(), tiny_loader())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0] == lines[2] == "a line of the module"
    for epoch in range(2):  # each line has the metrics of its own epoch
        pattern = rf"Epoch {epoch}/1: 4/4 batches, .* batches/s, .*val_loss={epoch}(,|$)"
        assert re.match(pattern, lines[2 * epoch + 1])
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar)


def test_a_fit_on_a_terminal(make_trainer, terminal, clock) -> None:
    class Timed(Chatty):
        def training_step(self, batch, batch_idx):
            clock.now += 1.0
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(enable_progress_bar=True, num_sanity_val_steps=1)
    trainer.fit(Timed(), tiny_loader(), tiny_loader())
    shown = draws(terminal)
    assert "a line of the module" in shown
    for start in ("Sanity check:", "Epoch 0/0:", "Validation:"):
        assert any(text.startswith(start) for text in shown)
    assert shown[-1].startswith("Epoch 0/0: 100%")
    assert "val_loss=0" in shown[-1]
    assert not tqdm_progress._Bar._instances


def test_a_fit_that_fails_closes_its_bars(make_trainer, terminal) -> None:
    class Failing(Chatty):
        def validation_step(self, batch, batch_idx) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(enable_progress_bar=True).fit(Failing(), tiny_loader(), tiny_loader())
    assert not tqdm_progress._Bar._instances


def test_the_other_stages_of_a_trainer(make_trainer, capsys) -> None:
    trainer = make_trainer(enable_progress_bar=True)
    trainer.validate(Chatty(), tiny_loader(), verbose=False)
    trainer.test(Chatty(), tiny_loader(), verbose=False)
    trainer.predict(Chatty(), tiny_loader())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" batches,")[0] for line in lines] == ["Validation: 4/4", "Test: 4/4", "Prediction: 4/4"]


class Silent(TinyModule):
    """Logs its loss, times 2, as `name`, or nothing if `name` is empty. Each step takes a second of the clock."""

    clock: Any = None
    name, options = "", {}

    def training_step(self, batch, batch_idx):
        if self.clock is not None:
            self.clock.now += 1.0
        loss = self.loss(batch)
        if self.name:
            self.log(self.name, loss * 2, **self.options)
        return loss


def shown_losses(drawn: list[str]) -> list[dict[str, str]]:
    """The values next to the training bar, each time it was drawn."""
    return [dict(re.findall(r"(\w+)=([\d.e+-]+)", text)) for text in drawn if text.startswith("Epoch")]


def test_the_current_loss_is_shown_from_the_first_step_on(make_trainer, terminal, clock) -> None:
    """This includes a module that logs nothing, and steps before the first log boundary."""
    losses = []

    class Noting(Silent):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            losses.append(outputs["loss"].item())

    module = Noting()
    module.clock = clock
    make_trainer(enable_progress_bar=True, log_every_n_steps=50).fit(module, tiny_loader())
    shown = shown_losses(draws(terminal))
    assert shown[0] == {}  # before the first step
    assert [float(values["loss"]) for values in shown[1:5]] == pytest.approx(losses, rel=5e-3)


@pytest.mark.parametrize("log_every", [1, 50])
def test_what_the_step_logs_is_shown_at_once_and_not_twice(make_trainer, terminal, clock, log_every: int) -> None:
    module = Silent()
    module.clock, module.name, module.options = clock, "train_loss", {"prog_bar": True}
    make_trainer(enable_progress_bar=True, log_every_n_steps=log_every).fit(module, tiny_loader())
    shown = shown_losses(draws(terminal))
    assert [*map(len, shown)] == [0, *[1] * (len(shown) - 1)]
    assert len({values["train_loss"] for values in shown[1:5]}) == 4  # a new value in each step
    assert shown[-1] == shown[4]  # also at the end of the epoch


def test_the_loss_stands_next_to_other_metrics(make_trainer, terminal, clock) -> None:
    module = Silent()
    module.clock, module.name, module.options = clock, "accuracy", {"prog_bar": True, "on_epoch": True}
    make_trainer(enable_progress_bar=True, log_every_n_steps=50).fit(module, tiny_loader())
    assert {"loss", "accuracy_step"} == {*shown_losses(draws(terminal))[1]}


def test_the_loss_in_lines(make_trainer, capsys) -> None:
    make_trainer(enable_progress_bar=True, log_every_n_steps=50).fit(Silent(), tiny_loader())
    assert re.search(r"^Epoch 0/0: 4/4 batches, .*, loss=\d", capsys.readouterr().out, re.MULTILINE)


def test_the_device_is_read_when_the_bar_is_drawn_only(make_trainer, terminal, clock, monkeypatch) -> None:
    reads = []
    monkeypatch.setattr(_stages, "read", lambda values: reads.append(1) or [0.0] * len(values))

    class Fast(Silent):
        def training_step(self, batch, batch_idx):
            clock.now += 1 / 1024
            return self.loss(batch)

    make_trainer(enable_progress_bar=True, max_epochs=1).fit(Fast(), tiny_loader(samples=2048, batch_size=2))
    assert len(reads) < 20  # in 1024 steps


def test_on_a_device_of_lazy_tensors_the_step_is_not_read(trainer, module, clock, terminal) -> None:
    """With lazy tensors, reading a value would run a part of the step by itself."""
    trainer.strategy.lazy_tensors = True
    trainer._run.train_metrics.in_bar = lambda: {"train_loss": 1.0}
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 3, seconds=1.0)
    assert "loss" not in terminal.getvalue()
    trainer.progress_bar_metrics = {"train_loss": 2.0}  # a value of a log boundary
    callback.on_train_end(trainer, module)
    assert "train_loss=2" in terminal.getvalue()


@pytest.mark.world_size(2)
def test_of_two_processes_the_main_one_shows_its_own_loss() -> None:
    class Ranked(TinyModule):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * 0 + 1.0 + self.global_rank

    printed = io.StringIO()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, seed=1,
    )  # fmt: skip
    with contextlib.redirect_stdout(printed):
        trainer.fit(Ranked(), tiny_loader())
    assert ("loss=1\n" in printed.getvalue()) is trainer.is_global_zero
    assert "loss=2" not in printed.getvalue()
    assert "loss=1.5" not in printed.getvalue()


# ------------------------------------------------------------------------------------------------- bars of a subclass


class Own(TQDMProgressBar):
    """Written for Lightning: bars, texts and values of its own."""

    BAR_FORMAT = "{desc} [{n_fmt}] {postfix}"

    def init_train_tqdm(self) -> Any:
        bar = super().init_train_tqdm()
        bar.set_description("my epoch", refresh=False)
        return bar

    def init_test_tqdm(self) -> Any:
        return tqdm(desc="my test", position=0, disable=self.is_disabled, leave=True, file=sys.stdout)

    @property
    def validation_description(self) -> str:
        return "my validation"

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return {**items, "phase": "warm"}


def test_a_bar_written_for_lightning(make_trainer, terminal) -> None:
    trainer = make_trainer(Own())
    trainer.fit(Chatty(), tiny_loader(), tiny_loader())
    trainer.test(Chatty(), tiny_loader(), verbose=False)
    shown = draws(terminal)
    assert any(re.match(r"my epoch: +\[4\].*phase=warm", text) for text in shown)
    assert any(re.match(r"my validation:? +\[4\]", text) for text in shown)
    assert any(text.startswith("my test: 100%") and "4/4" in text for text in shown)  # its length is added


def test_texts_of_a_subclass_in_lines(make_trainer, capsys) -> None:
    trainer = make_trainer(Own(), limit_val_batches=0)
    trainer.fit(Chatty(), tiny_loader(), tiny_loader())
    assert capsys.readouterr().out.splitlines()[-1].endswith("phase=warm")


def test_bars_that_can_be_asked_for(trainer, module, clock, terminal, monkeypatch) -> None:
    callback = TQDMProgressBar()
    with pytest.raises(NotAvailableError, match="not known before a run begins"):
        _ = callback.total_train_batches
    callback.setup(trainer, module, "fit")
    assert (callback.train_progress_bar.n, callback.train_progress_bar.total, callback.val_progress_bar.total) == (0, 10, 2)
    train_epoch(callback, trainer, module, clock, 3, seconds=1.0)
    assert (callback.train_progress_bar.n, callback.train_progress_bar.total) == (3, 10)
    for stage, of in [("test", "test"), ("predict", "predict"), ("validation", "val")]:
        getattr(callback, f"on_{stage}_batch_start")(trainer, module, None, 0, 0)
        assert getattr(callback, f"{of}_progress_bar").total == (2 if of == "val" else 3)
        getattr(callback, f"on_{stage}_end")(trainer, module)
    callback.teardown(trainer, module, "fit")
    assert (callback.train_progress_bar.n, callback.train_progress_bar.total, callback.train_progress_bar.disable) == (
        3,
        10,
        True,
    )
    lines = TQDMProgressBar()
    monkeypatch.setattr(tqdm_progress, "_is_live", lambda: False)
    lines.setup(trainer, module, "fit")
    lines.on_train_epoch_start(trainer, module)
    assert lines.train_progress_bar.disable


def test_disable_and_enable(trainer, module, clock, terminal) -> None:
    callback = TQDMProgressBar()
    callback.setup(trainer, module, "fit")
    train_epoch(callback, trainer, module, clock, 2, seconds=1.0)
    callback.disable()
    before = terminal.getvalue()
    train_epoch(callback, trainer, module, clock, 2, seconds=1.0)
    assert (terminal.getvalue(), callback.is_disabled) == (before, True)
    callback.enable()
    train_epoch(callback, trainer, module, clock, 2, seconds=1.0)
    assert "2/10" in terminal.getvalue()[len(before) :]
    callback.teardown(trainer, module, "fit")


# ------------------------------------------------------------------------------------------------------------- notebooks

CELL = """
from helpers.runs.tiny import TinyModule, tiny_loader
from trainkit import Trainer

class Validating(TinyModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

Trainer(max_epochs=2, accelerator="cpu", logger=False).fit(Validating(), tiny_loader(), tiny_loader())
"""
PATHS = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent.parent)!r})"


@pytest.mark.slow
def test_a_notebook_without_ipywidgets_has_lines(run_dir: Path) -> None:
    _, shown = run_cells(run_dir, [PATHS + "; sys.modules['ipywidgets'] = None", CELL])
    assert shown.error == ""
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "\r" not in shown.stdout
    assert [line[:10] for line in shown.stdout.splitlines() if line.startswith("Epoch")] == ["Epoch 0/1:", "Epoch 1/1:"]
    assert shown.stderr.count("For a bar: pip install ipywidgets") == 1


@pytest.mark.skipif(importlib.util.find_spec("ipywidgets") is None, reason="ipywidgets is not installed")
def test_a_notebook_with_ipywidgets_has_tqdms_widget(run_dir: Path) -> None:
    _, shown = run_cells(run_dir, [PATHS, CELL])
    assert shown.error == ""
    assert "\x1b" not in shown.stdout + shown.stderr + shown.value
    assert "Epoch" not in shown.stdout  # neither lines nor a text bar
    assert re.match(r"(Epoch 1/1|Validation): +0%\|", shown.value)  # the text of the widget where widgets are not shown


# ------------------------------------------------------------------------------------------------- other encodings


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
@pytest.mark.parametrize("live", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_name_that_the_output_cannot_show_ends_nothing(variables: dict[str, str], live: bool) -> None:
    program = f"""
from helpers.runs.tiny import TinyModule, tiny_loader
from trainkit import Trainer
from trainkit.callbacks.progress import tqdm_progress

class Naming(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("exactitude_\\u00e9", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("pr\\u00e9cision", self.loss(batch))

tqdm_progress._is_live = lambda: {live}
trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, log_every_n_steps=1)
trainer.fit(Naming(), tiny_loader(), tiny_loader())
trainer.explain()
trainer.validate(Naming(), tiny_loader())
"""
    done = run_python(program, env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "exactitude_e=" in done.stdout
    assert re.search(r"^precision +\d", done.stdout, re.MULTILINE)  # the results of validate()
    assert " -> ModelCheckpoint" in done.stdout  # the output of explain()
    assert "Error" not in done.stderr


def test_an_epoch_that_max_steps_will_cut_short(terminal: Any, trainer: Any, module: Any) -> None:
    trainer.max_steps, trainer.global_step, trainer.accumulate_grad_batches = 12, 10, 3
    bar = TQDMProgressBar()
    bar.setup(trainer, module, "fit")
    for start, total in ((0, 6), (3, 9)):  # start=3: the run has resumed in the middle of the epoch
        trainer._run.progress = SimpleNamespace(epoch_start=start)
        bar.on_train_epoch_start(trainer, module)
        assert bar._train is not None
        assert bar._train.total == total
    bar.teardown(trainer, module, "fit")
