"""Notices and warnings: where they go, and how a program takes them over."""

from __future__ import annotations

import warnings

import pytest
from support import run_python

from trainkit.console import TrainkitWarning, notice, speak, warn

# In a process of its own: what logging is configured to do is one thing for the whole process.
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
    def of_ours() -> None:
        warn("beware", everywhere=True)

    try:
        speak(False, 2)
        notice("one")
        notice("two", everywhere=True)
        warn("nobody hears it")
        with pytest.warns(TrainkitWarning, match=r"^\[rank 2\] beware$") as caught:
            of_ours()
        assert caught[0].filename == __file__
        speak(True, 0)
        notice("three")
        with pytest.warns(TrainkitWarning, match="^of all$"):
            warn("of all")
        with pytest.warns(TrainkitWarning, match=r"^\[rank 0\] of one$"):
            warn("of one", everywhere=True)
    finally:
        speak()
    notice("four", everywhere=True)  # alone again: there are no ranks
    assert [text for _, _, text in caplog.record_tuples] == ["[rank 2] two", "three", "four"]
