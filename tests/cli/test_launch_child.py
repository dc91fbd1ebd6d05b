"""The part of `trainkit launch --hostfile` that runs on each host: starts once all hosts are ready, stops with its terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.launch.agents import wait_until
from helpers.patience import PATIENCE, VAIN, within

from trainkit.cli.launch_child import main, versions
from trainkit.launch.remote import HEARTBEAT, MARK, SIGNAL, START

pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")

VERSIONS = MARK + b"v" + json.dumps(versions()).encode()
# Runs `work` as the job. Once the job has printed its first line, the heartbeat timeout is `silence` instead of `vain`.
PROGRAM = """\
import sys
from trainkit.cli import launch_child
launch_child._HEARTBEAT_TIMEOUT_S = {vain}
send = launch_child._Terminal.send
def at_work(terminal, kind, line):
    if kind == b"1":
        launch_child._HEARTBEAT_TIMEOUT_S = {silence}
    send(terminal, kind, line)
launch_child._Terminal.send = at_work
sys.exit(launch_child.run([sys.executable, "-c", {work!r}]))
"""
WORK = """\
import os, signal, subprocess, sys, time
received = []
for number in (signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(number))
print("at work", flush=True)
"""
SAVE = """\
while not received:
    time.sleep(0.01)
for _ in range(3):  # more than one write, because the first to a lost connection may succeed; more than a pipe holds
    print("saving" * 20000, flush=True)
    time.sleep(0.05)
with open("new", "w") as file:
    file.write(str(sorted(set(received))))
os.rename("new", "saved")
sys.exit(7)
"""
CHILD = """\
child = "import sys; print(repr(sys.stdin.read()), flush=True); sys.stderr.write('to stderr\\\\n1%\\\\r2%')"
subprocess.run([sys.executable, "-c", child])
print("over", end="", flush=True)
sys.exit(7)
"""


class Part:
    """A program on a pseudo-terminal, of which the test holds the other end."""

    def __init__(self, *command: str) -> None:
        self.end, terminal = os.openpty()
        tty.setraw(terminal)

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=take_terminal
        )
        os.close(terminal)
        self._received = b""

    def send(self, line: bytes) -> None:
        os.write(self.end, line + b"\n")

    def line(self) -> bytes:
        """The next line; `b""` after the program has ended."""
        while b"\n" not in self._received:
            try:
                self._received += os.read(self.end, 65536)
            except OSError:
                return b""
        line, _, self._received = self._received.partition(b"\n")
        return line

    def lines(self) -> list[bytes]:
        """All lines until the program has ended."""
        return list(iter(self.line, b""))

    def hang_up(self) -> None:
        os.close(self.end)
        self.end = -1


Start = Callable[..., Part]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(work, silence=…)` starts the program and returns it after its job has printed the first line."""
    parts: list[Part] = []

    def run(work: str, silence: float = VAIN) -> Part:
        parts.append(part := Part("-c", PROGRAM.format(work=WORK + work, silence=silence, vain=VAIN)))
        assert part.line() == VERSIONS
        part.send(START)
        assert part.line() == MARK + b"1at work"
        return part

    yield run
    for part in parts:
        part.process.kill()
        part.process.wait()
        if part.end >= 0:
            part.hang_up()


def test_host_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:]); sys.exit(3)")
    arguments = ["--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "1", "script.py", "--x"]
    part = Part("-m", "trainkit.cli.launch_child", *arguments)
    assert part.line() == VERSIONS
    part.send(START)
    assert part.lines() == [MARK + b"1rank 0 ['--x']", MARK + b"c3"]
    assert part.process.wait(PATIENCE) == 3
    part.hang_up()


def test_versions() -> None:
    found = versions()
    assert sorted(found) == ["Python", "torch", "trainkit"]
    assert re.fullmatch(r"3\.\d+", found["Python"])


def test_an_address_that_cannot_be_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as an alias that only ssh's configuration defines."""
    assert main(["--nnodes", "2", "--master-addr", "no.such.host.invalid", "script.py"]) == 2
    errors = capsys.readouterr().err
    assert "cannot resolve 'no.such.host.invalid', the address of the first host: " in errors
    assert errors.endswith("Pass a name that all hosts can resolve: --master-addr HOST\n")


def test_input_and_output_of_workers(start: Start) -> None:
    """Workers read no input from the terminal, and all their output arrives before the exit code."""
    lines = start(CHILD).lines()
    assert sorted(lines[:-1]) == [MARK + b"1''", MARK + b"1over", MARK + b"21%", MARK + b"22%", MARK + b"2to stderr"]
    assert lines[-1] == MARK + b"c7"


def test_signals(start: Start) -> None:
    part = start(SAVE)
    part.send(HEARTBEAT)
    part.send(SIGNAL + b"%d" % signal.SIGUSR1)
    assert [line[:8] for line in part.lines()] == [MARK + b"1saving"] * 3 + [MARK + b"c7"]
    assert part.process.wait(PATIENCE) == 7
    assert Path("saved").read_text() == str([int(signal.SIGUSR1)])


@pytest.mark.parametrize("how", ["the terminal hangs up", "nothing comes", "nothing comes, and nothing is read"])
def test_the_end_of_a_connection(start: Start, how: str) -> None:
    """The job receives SIGHUP, has time to save, and can still print."""
    part = start(SAVE, **({} if how.startswith("the terminal") else {"silence": 0.5}))
    if how.startswith("the terminal"):
        part.hang_up()
    else:
        part.send(HEARTBEAT)
    if how == "nothing comes":
        part.lines()
    wait_until(Path("saved").exists)
    assert part.process.wait(PATIENCE) == 7
    assert Path("saved").read_text() == str([int(signal.SIGHUP)])


@pytest.mark.prompt
def test_heartbeats(start: Start) -> None:
    """Each heartbeat restarts the timeout."""
    part = start(SAVE, silence=within(2.0))
    for _ in range(25):
        part.send(HEARTBEAT)
        with pytest.raises(subprocess.TimeoutExpired):
            part.process.wait(0.1)
    assert not Path("saved").exists()


def test_hangup_before_the_start(tmp_path: Path) -> None:
    part = Part("-c", PROGRAM.format(work=WORK + SAVE, silence=VAIN, vain=VAIN))
    assert part.line() == VERSIONS
    part.hang_up()
    assert part.process.wait(PATIENCE) == -signal.SIGHUP
    assert not Path("saved").exists()
