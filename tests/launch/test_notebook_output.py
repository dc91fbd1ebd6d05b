"""Output of the workers on `sys.stdout` and `sys.stderr`: that of rank 0 as it is printed, that of others line by line."""

from __future__ import annotations

import contextvars
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.launch.agents import wait_until
from helpers.support import ROOT, run_python

from trainkit.launch.notebook import WorkerOutput, is_redirected, shows_progress

Cells = Callable[[], "tuple[Cell, Cell]"]
WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("WHERE", default="nowhere")


class Cell(io.StringIO):
    """Stores what is written, and the notebook cells that it was written for."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: set[str] = set()

    def write(self, text: str) -> int:
        self.cells.add(WHERE.get())
        return super().write(text)


class Process:
    """A process as `WorkerOutput` sees it. The test writes its output."""

    def __init__(self) -> None:
        for name in ("stdout", "stderr"):
            reading, writing = os.pipe()
            setattr(self, name, os.fdopen(reading, "rb"))
            setattr(self, f"to_{name}", writing)

    def write(self, data: bytes, to: str = "stdout") -> None:
        os.write(getattr(self, f"to_{to}"), data)

    def end(self) -> None:
        for name in ("stdout", "stderr"):
            os.close(getattr(self, f"to_{name}"))


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Cell, Cell]]:
    """Returns a function that replaces the streams. Call it in the test, because pytest sets other streams during fixtures."""

    def make() -> tuple[Cell, Cell]:
        out, err = Cell(), Cell()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return make


def take(streams: WorkerOutput, count: int = 2) -> list[Process]:
    processes = [Process() for _ in range(count)]
    for rank, process in enumerate(processes):
        streams.take(rank, rank, process)  # type: ignore[arg-type]
    return processes


def end(streams: WorkerOutput, processes: list[Process]) -> None:
    for process in processes:
        process.end()
    streams.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainkit-std")]


def seen(cell: Cell, text: str) -> None:
    wait_until(lambda: cell.getvalue() == text)


def test_the_first_process_is_live_and_the_others_come_by_lines(cells: Cells) -> None:
    out, err = cells()
    WHERE.set("this cell")
    streams = WorkerOutput()
    first, second = processes = take(streams)
    first.write("\r 50%|█".encode()[:-1])
    seen(out, "\r 50%|")
    first.write("█".encode()[-1:])  # the bytes of one character in two writes
    seen(out, "\r 50%|█")
    second.write(b"not yet a line\r of the second")
    second.write(b"one\r\nof the second\npart", to="stderr")
    seen(err, "one\nof the second\n")
    second.write(b" process\n")
    seen(out, "\r 50%|█\n of the second process\n")  # starts a new line, because a progress bar is being drawn
    first.write(b"\r100%\n")
    second.write(b"\rrest\rend of it")
    seen(out, "\r 50%|█\n of the second process\n\r100%\n")
    end(streams, processes)
    assert out.getvalue() == "\r 50%|█\n of the second process\n\r100%\nend of it\n"
    assert err.getvalue() == "one\nof the second\npart\n"
    assert (out.cells, err.cells) == ({"this cell"}, {"this cell"})


def test_a_template_is_before_each_line_of_each_process(cells: Cells) -> None:
    out, _ = cells()
    streams = WorkerOutput("[${role_name} ${rank}/${local_rank} ${x}] ")
    first, second = processes = take(streams)
    first.write(b"\r1\r2\na\n")
    seen(out, "[trainkit 0/0 ${x}] 2\n[trainkit 0/0 ${x}] a\n")
    second.write(b"b\xff\n")
    seen(out, "[trainkit 0/0 ${x}] 2\n[trainkit 0/0 ${x}] a\n[trainkit 1/1 ${x}] b\ufffd\n")
    end(streams, processes)


def test_output_is_read_where_it_is_not_wanted(cells: Cells) -> None:
    """Output is read even if the stream is closed, because a process with a full pipe would wait or fail."""
    out, _ = cells()
    streams = WorkerOutput()
    out.close()
    command = [sys.executable, "-c", "print('x' * 1_000_000)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        streams.take(0, 0, process)
        assert process.wait() == 0
        streams.close()  # must happen before Popen closes the pipes


def test_what_a_process_leaves_running_is_not_waited_for(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait for background processes of a worker; their later output still appears."""
    monkeypatch.setattr("trainkit.launch.notebook._CLOSE_TIMEOUT_S", 0.0)
    out, _ = cells()
    streams = WorkerOutput()
    processes = take(streams, 1)
    streams.close()
    processes[0].write(b"later\n")
    seen(out, "later\n")
    processes[0].end()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("trainkit-std")])


def test_a_program_that_writes_to_its_own_files_needs_none() -> None:
    """Output must be copied only if `sys.stdout` is not the stream that worker processes inherit."""
    program = "import sys; from trainkit.launch.notebook import *; print(is_redirected(), shows_progress())"
    assert run_python(program).stdout == "False {'stdout': False, 'stderr': False}\n"
    other = f"import io, sys; said = sys.stdout; sys.stdout = io.StringIO(); {program.partition('; ')[2][:-1]}, file=said)"
    assert run_python(f"import sys; {other}", cwd=ROOT).stdout == "True {'stdout': False, 'stderr': False}\n"
    wrapped = f"import sys; sys.stdout = open(1, 'w'); {program.partition('; ')[2]}"  # a stream that must get all output
    assert run_python(wrapped).stdout == "True {'stdout': False, 'stderr': False}\n"


def test_what_a_notebook_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, output must be copied, and a stream of ipykernel shows progress bars."""
    stream: Any = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    assert is_redirected()
    assert shows_progress() == {"stdout": True, "stderr": False}
