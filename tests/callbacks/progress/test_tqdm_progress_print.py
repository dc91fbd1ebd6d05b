"""`TQDMProgressBar.print` takes the arguments of Python's `print`."""

from __future__ import annotations

import io

import pytest

from trainkit.callbacks import TQDMProgressBar


class Stream(io.StringIO):
    """Counts how many times it is flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1


def test_the_arguments_of_pythons_print(capsys: pytest.CaptureFixture[str]) -> None:
    stream, progress_bar = Stream(), TQDMProgressBar()
    progress_bar.print("a", 1, sep="-", end="!", file=stream)
    assert (stream.getvalue(), stream.flushed) == ("a-1!", 0)
    progress_bar.print("b", file=stream, flush=True)
    assert (stream.getvalue(), stream.flushed) == ("a-1!b\n", 1)
    progress_bar.print("c", "d")
    assert capsys.readouterr().out == "c d\n"
