"""Notices and warnings: where they are printed, and how a program can redirect or silence them."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.support import run_python

from trainkit import TrainModule, callbacks
from trainkit.console import (
    _HANDLER,
    OutputStream,
    TrainkitWarning,
    echo,
    join_names,
    notice,
    only_printable,
    printable,
    quantity,
    set_printing,
    warn,
    with_article,
)

# Runs in a new process, because the configuration of logging holds for the whole process.
BEGIN = "import logging, sys\nfrom trainkit.console import notice\n"


def said(program: str) -> tuple[str, str]:
    done = run_python(BEGIN + program)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_notice_is_one_line_on_standard_error() -> None:
    assert said("notice('one')\nnotice('two')") == ("", "trainkit: one\ntrainkit: two\n")


def test_standard_error_may_be_replaced_at_any_time() -> None:
    program = "import io\nnotice('one')\nsys.stderr = caught = io.StringIO()\nnotice('two')\nprint(caught.getvalue(), end='')"
    assert said(program) == ("trainkit: two\n", "trainkit: one\n")


def test_a_program_that_configures_logging_gets_notices_its_way() -> None:
    program = (
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(name)s|%(levelname)s|%(message)s')\nnotice('one')"
    )
    assert said(program) == ("trainkit|INFO|one\n", "")


def test_a_program_may_configure_logging_later() -> None:
    program = "notice('one')\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\nnotice('two')"
    assert said(program) == ("two\n", "trainkit: one\n")


def test_a_program_may_silence_notices() -> None:
    assert said("logging.getLogger('trainkit').setLevel(logging.WARNING)\nnotice('one')") == ("", "")
    assert said("logging.getLogger('trainkit').addHandler(logging.NullHandler())\nnotice('one')") == ("", "")


def test_notices_can_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    notice("one")
    assert caplog.record_tuples == [("trainkit", 20, "one")]


def test_a_notice_comes_once_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """A notice about a loader appears once per run, although the run creates its loaders several times."""

    class Batches:
        def __iter__(self) -> Any:
            yield from tiny_loader()

    for _ in range(2):
        caplog.clear()
        trainer = make_trainer(max_epochs=2, num_sanity_val_steps=1, reload_dataloaders_every_n_epochs=1)
        trainer.fit(TinyModule(), Batches(), Batches())
        assert sum("Batches is iterated as it is" in text for text in caplog.messages) == 1


def test_a_warning_points_to_the_caller_of_what_warns() -> None:
    def of_ours() -> None:
        warn("beware")

    with pytest.warns(TrainkitWarning, match="beware") as caught:
        of_ours()
    assert caught[0].filename == __file__
    assert issubclass(TrainkitWarning, UserWarning)


def test_warnings_can_be_made_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainkitWarning)
        with pytest.raises(TrainkitWarning):
            warn("beware")


def test_of_several_processes_one_speaks_for_all(caplog: pytest.LogCaptureFixture) -> None:
    # Notices and warnings appear on the main process only; with `everywhere`, on each rank with its number.

    def of_ours() -> None:
        warn("beware", everywhere=True)

    try:
        set_printing(False, 2)
        notice("one")
        notice("two", everywhere=True)
        warn("no one hears it")
        with pytest.warns(TrainkitWarning, match=r"^\[rank 2\] beware$") as caught:
            of_ours()
        assert caught[0].filename == __file__
        set_printing(True, 0)
        notice("three")
        with pytest.warns(TrainkitWarning, match="^of all$"):
            warn("of all")
        with pytest.warns(TrainkitWarning, match=r"^\[rank 0\] of one$"):
            warn("of one", everywhere=True)
    finally:
        set_printing()
    notice("four", everywhere=True)  # one process again: no rank is shown
    assert [text for _, _, text in caplog.record_tuples] == ["[rank 2] two", "three", "four"]


# ------------------------------------------------------------------------------------------------- the user's own line


def test_a_warning_of_a_run_points_to_the_line_that_began_it() -> None:
    """A warning during `fit` points to the user's line that calls `fit`, not to a line of trainkit."""

    class Training(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.warns(TrainkitWarning, match="no validation_step") as caught:
        make_trainer().fit(Training(), tiny_loader(), tiny_loader())
    lines = Path(__file__).read_text("utf-8").splitlines()
    assert caught[0].filename == __file__
    assert "make_trainer().fit(Training(), tiny_loader(), tiny_loader())" in lines[caught[0].lineno - 1]


# ------------------------------------------------------------------------------------------------- singular and plural


def test_a_list_of_names_is_shortened() -> None:
    assert join_names(["a", "b"]) == "a, b"
    assert join_names(["a", "b", "c"], 3) == "a, b, c"
    assert join_names(["a", "b", "c", "d"], 3) == "a, b, c, …"
    assert join_names([]) == ""


@pytest.mark.parametrize("number, words, expected", [
    (0, ["epoch"], "0 epochs"),
    (1, ["epoch"], "1 epoch"),
    (2, ["epoch"], "2 epochs"),
    (2, ["batch"], "2 batches"),
    (1, ["process"], "1 process"),
    (3, ["process"], "3 processes"),
    (1, ["tensor was", "tensors were"], "1 tensor was"),
    (2, ["tensor was", "tensors were"], "2 tensors were"),
])  # fmt: skip
def test_what_is_counted(number: int, words: list[str], expected: str) -> None:
    assert quantity(number, *words) == expected


@pytest.mark.parametrize(
    "noun", ["an EarlyStopping", "an int", "an SGD", "an LBFGS", "a Timer", "a list", "a dict", "a str", "a UserDict"]
)
def test_articles(noun: str) -> None:
    assert with_article(noun.split()[1]) == noun


# ------------------------------------------------------------------------------------------------- other encodings

TEXT = "2 × 3 ≥ 5 → naïve … 中"


@pytest.mark.parametrize("encoding, expected", [
    ("ascii", "2 x 3 >= 5 -> naive ... ?"),
    ("latin-1", "2 × 3 >= 5 -> naïve ... ?"),
    ("utf-8", TEXT),
    (None, TEXT),  # a stream without an encoding takes any text
    ("no such encoding", TEXT),
])  # fmt: skip
def test_what_a_stream_cannot_show_is_replaced(encoding: str | None, expected: str) -> None:
    assert printable(TEXT, types.SimpleNamespace(encoding=encoding)) == expected


def test_notices_and_warnings_where_standard_error_has_no_unicode() -> None:
    program = f"import warnings\\nfrom trainkit.console import warn\\nnotice({TEXT!a})\\nwarn({TEXT!a})"
    done = run_python(BEGIN + program.replace("\\n", "\n"), env={"PYTHONIOENCODING": "ascii:strict"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 x 3 >= 5 -> naive ... ?") == 2


def test_streams_are_as_they_were_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`only_printable` restores the error handling of a stream, also after an error."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)

    def fail() -> None:
        with only_printable():
            print(TEXT)
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        fail()
    assert stream.errors == "strict"
    assert stream.buffer.getvalue() == b"2 x 3 >= 5 -> naive ... ?\n"


# ---------------------------------------------------------------------------------------------- output that cannot be written


class Dead(io.StringIO):
    """A stream that cannot be written at the moment."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def echo_often(stream: Any) -> None:
    for _ in range(3):
        echo("lost", file=stream, flush=True)


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.console._unwritable", set())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EFBIG, errno.EAGAIN])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_cannot_be_written_is_one_warning(name: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Dead(OSError(error, os.strerror(error)))
    monkeypatch.setattr(sys, name, dead)
    said = f"standard {name.replace('std', '').replace('out', 'output').replace('err', 'error')} cannot be written: .*Fix"
    with pytest.warns(TrainkitWarning, match=said) as warned:
        echo_often(getattr(sys, name))
    assert len(warned) == 1
    dead.error = None
    echo("there is space again", file=dead)
    assert dead.getvalue() == "there is space again\n"


def test_a_stream_that_is_closed_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.warns(TrainkitWarning, match="closed file"):
        echo("lost")
    monkeypatch.setattr(sys, "stdout", None)
    echo("a program without a console")


def test_an_error_of_the_users_own_file_is_raised() -> None:
    with pytest.raises(OSError, match="No space"):
        echo("a result", file=Dead(OSError(errno.ENOSPC, "No space left on device")))


def test_echo_prints_what_print_does(capsys: pytest.CaptureFixture[str]) -> None:
    for printing in (echo, print):
        printing("a", 1, None, sep="-", end=".")
        printing()
        printing("x", file=sys.stderr)
        with pytest.raises(TypeError, match="sep must be None or a string"):
            printing("a", sep=1)  # type: ignore[arg-type]
    printed = capsys.readouterr()
    half = len(printed.out) // 2
    assert printed.out[:half] == printed.out[half:] == "a-1-None.\n"
    assert printed.err == "x\nx\n"


def test_a_notice_and_a_warning_on_a_dead_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Dead(OSError(errno.EIO, "Input/output error")))
    with pytest.warns(TrainkitWarning, match="standard error cannot be written") as warned:
        _HANDLER.handle(logging.makeLogRecord({"msg": "lost"}))  # what `notice` uses without pytest's handlers
    assert len(warned) == 1

    def show(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)  # as a program may show them
        warn("lost as well")


def test_an_output_stream_is_the_stream_to_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    stream = OutputStream(sys.stdout)
    assert (stream == sys.stdout, stream in (sys.stderr, sys.stdout), stream == sys.stderr) == (True, True, False)
    assert (stream.encoding, stream.isatty(), hash(stream)) == (sys.stdout.encoding, False, hash(sys.stdout))
    assert stream.write("…") == 1
    stream.flush()
    assert capsys.readouterr().out == "…"


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_a_whole_run_on_a_terminal_of_a_full_disk(bar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars that are drawn, the summary, verbose callbacks, `print` of module and trainer, and the table of results."""

    class Talking(TinyModule):
        def on_train_epoch_end(self) -> None:
            self.print("an epoch")
            self.trainer.print("of many", flush=True)

    dead = Dead(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(dead, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", dead)
    more = [getattr(callbacks, bar)(), callbacks.ModelSummary(), callbacks.EarlyStopping("val_loss", verbose=True)]
    trainer = make_trainer(*more, max_epochs=2, enable_progress_bar=True)
    with pytest.warns(TrainkitWarning, match="standard output cannot be written: .*No space") as warned:
        trainer.fit(Talking(), tiny_loader(), tiny_loader())
    trainer.validate(dataloaders=tiny_loader())  # without another warning, which would be an error
    assert len(warned) == 1
    assert trainer.global_step == 8
