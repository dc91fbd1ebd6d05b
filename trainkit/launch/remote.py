"""``run_nodes``: runs the parts of a job on several machines by ssh, and leaves with the exit code of what failed first."""

from __future__ import annotations

import math
import queue
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from trainkit.distributed.failure import names_another_failure
from trainkit.errors import ConfigurationError
from trainkit.launch.connection import Connection, Line
from trainkit.launch.lifeline import ALIVE, GO, SIGNAL, versions
from trainkit.launch.verdict import INTERRUPTED, PREEMPTED

__all__ = ["run_nodes"]

_ALIVE = 10.0  # seconds between two words to each machine
_LOOK = 0.1  # seconds between two looks at the connections
_LINES = 1000  # that wait to be shown; if nobody takes them, the machines wait too
_PATIENCE = 15.0  # seconds in which the other machines end by themselves when one has failed
_AGENT = 15.0  # seconds that an agent has beyond those of its workers
_LEAVING = 2.0  # seconds that ssh has to end by itself
_SSH_FAILED = 255
_NO_PROGRAM = (126, 127)
_FAILED = 1
_SAYS_LITTLE = (1, 134)  # what a process ends with, or is aborted with, when another one has gone
_TRACEBACK = b"Traceback (most recent call last)"


def run_nodes(scripts: Mapping[str, str], ssh: Sequence[str], grace: float, join_timeout: float) -> int:
    """Run a script on each machine, all at once when all are ready.

    What the machines print is printed here, with their names before each line if there are several. SIGINT, SIGTERM, SIGHUP
    and SIGUSR1 to this process go on to them. When one fails, the others have 15 seconds to end by themselves, and are told
    to end then.

    Args:
        scripts: by the names of the machines, for bash: :func:`trainkit.launch.connection.node_script`.
        ssh: the command, with options of the user.
        grace: seconds that workers have to save and end after a signal.
        join_timeout: seconds that machines have to become ready.

    Returns:
        0; 143 if the machines were told to end and have saved; 130 after Ctrl-C; else the code of the machine that failed
        first, or 1 if its connection was lost.

    Raises:
        ConfigurationError: ssh is missing; a machine cannot be reached, its set-up has failed, or it has other versions. No
            worker was started then.
    """
    if shutil.which(ssh[0]) is None:
        raise ConfigurationError(
            f"there is no program {ssh[0]!r} here, by which the machines are reached. Install it (Debian, Ubuntu: apt install "
            "openssh-client; Fedora, RHEL: dnf install openssh-clients), or name another one: --ssh '/path/to/ssh -p 2222'"
        )
    with _Signals() as signals, _Nodes(scripts, ssh, grace) as nodes:  # in this order: a machine that is called may answer
        if not nodes.meet(signals, join_timeout):
            return INTERRUPTED if signals.received[0] == signal.SIGINT else PREEMPTED
        return nodes.run(signals)


class _Signals:
    """Signals that come to this process while machines run, instead of ending it."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # ignored: by nohup, or a shell's &
                self._before[number] = signal.signal(number, self._note)
        if hasattr(signal, "SIGTSTP"):  # a stopped starter is a silent one, which the machines take to be gone
            self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        hang_up = number == getattr(signal, "SIGHUP", None)  # a terminal that is closed means an end
        self.received.append(int(signal.SIGTERM) if hang_up else number)


class _Nodes:
    """The connections to all machines; closed at the end of the ``with``, by which what still runs there ends."""

    def __init__(self, scripts: Mapping[str, str], ssh: Sequence[str], grace: float) -> None:
        self._scripts, self._ssh, self._grace = scripts, ssh, grace
        self._lines: queue.Queue[Line] = queue.Queue(_LINES)
        self._all: list[Connection] = []
        self._running: list[Connection] = []
        self._failed: list[Connection] = []  # by themselves, in the order in which they did
        self._speaker: Connection | None = None  # whose line on standard error was the last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="trainkit-alive", daemon=True)

    def __enter__(self) -> _Nodes:
        try:
            for name, script in self._scripts.items():
                self._all.append(Connection(name, self._ssh, script, self._lines))
        except BaseException:
            self.__exit__()
            raise
        self._running = list(self._all)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        for node in self._all:
            node.hang_up()
        deadline = time.monotonic() + _LEAVING
        for node in self._all:
            node.close(deadline)

    def meet(self, signals: _Signals, patience: float) -> bool:
        """Wait until all are ready, and let them begin; False: a signal came before that."""
        deadline = time.monotonic() + patience
        while not all(node.versions for node in self._all):
            ended = self._turn()
            if signals.received:
                return False
            if ended:
                raise ConfigurationError(_not_ready(ended[0], self._ssh))
            if time.monotonic() > deadline:
                late = ", ".join(node.name for node in self._all if not node.versions)
                raise ConfigurationError(
                    f"not ready within {patience:.0f} s: {late}. Is it the set-up that takes so long? Then give it more "
                    "seconds: export TRAINKIT_JOIN_TIMEOUT=1800"
                )
        _check_versions(self._all)
        self._tell(GO)
        return True

    def run(self, signals: _Signals) -> int:
        """Wait for the end of all; returns the exit code."""
        passed_on = 0
        until, told = math.inf, False  # when those that are left are told to end, or are left to themselves
        while self._running:
            ended = self._turn()
            while passed_on < len(signals.received):
                self._tell(f"{SIGNAL}{signals.received[passed_on]}")
                passed_on += 1
                until = min(until, self._until(signals.received[:passed_on]))
                told = True
            failed = [node for node in ended if node.code != 0]
            if failed and not told:
                self._failed += failed
                saving = any(node.code in (PREEMPTED, INTERRUPTED) for node in failed)
                until = min(until, time.monotonic() + _PATIENCE + (self._grace if saving else 0.0))
            if time.monotonic() > until:
                if told:
                    break
                self._tell(f"{SIGNAL}{int(signal.SIGTERM)}")
                until, told = time.monotonic() + self._grace + _AGENT, True
        return self._code(signals.received)

    def _until(self, received: Sequence[int]) -> float:
        """How long the machines have after signals: after one Ctrl-C, until the user presses it again."""
        if len(received) > 1:
            return time.monotonic() + _AGENT
        return math.inf if received[0] == signal.SIGINT else time.monotonic() + self._grace + _AGENT

    def _code(self, received: Sequence[int]) -> int:
        codes = [_exit_code(node) for node in self._all]
        lost = [node for node in self._all if node.lost]
        late = [node for node in self._all if node.code is None]
        for node in lost:
            words = f"; ssh says: {node.last_words}" if node.code == _SSH_FAILED and node.last_words else ""
            self._say(f"{node.name} has ended without an exit code: the connection is lost, or its agent was killed{words}")
        if late:
            names = ", ".join(node.name for node in late)
            self._say(f"not ended in time: {names}. What runs there is told to end, as the connection is closed.")
        if signal.SIGINT in received[:1]:
            return INTERRUPTED if any(codes) else 0
        if not self._failed:  # but for those that were told to end
            return PREEMPTED if PREEMPTED in codes else max(codes, default=0)
        first = min(self._failed, key=lambda node: (names_another_failure(_tail(node)), node.code in _SAYS_LITTLE))
        if not lost and not late:
            self._repeat(first)
        return _exit_code(first)

    def _repeat(self, first: Connection) -> None:
        """What failed first is to be read last."""
        tail = list(first.tail)
        begins = [at for at, line in enumerate(tail) if _TRACEBACK in line]
        if begins and self._speaker is not first:
            self._say(f"{first.name} failed first, with:")
            for line in tail[begins[-1] :]:
                self._show(first, 2, line)

    def _turn(self) -> list[Connection]:
        """Show what comes within a moment; returns the machines that have ended."""
        self._show_all(_LOOK)
        for node in self._running:
            node.flush()
        ended = [node for node in self._running if node.ended()]
        self._show_all(0.0)
        self._running = [node for node in self._running if node not in ended]
        return ended

    def _tell(self, text: str) -> None:
        """Tell those that are ready: to the others, what comes is part of their script."""
        for node in self._running:
            if node.versions:
                node.tell(f"{text}\n")

    def _keep_alive(self) -> None:
        """A thread, for the main one may be waiting for a terminal that takes no output."""
        while not self._over.wait(_ALIVE):
            self._tell(ALIVE)

    def _show_all(self, patience: float) -> None:
        try:
            for _ in range(_LINES):
                node, stream, text = self._lines.get(timeout=patience) if patience else self._lines.get_nowait()
                shown = node.heard(stream, text)
                if shown is not None:
                    self._show(node, stream, shown)
                patience = 0.0
        except queue.Empty:
            pass

    def _show(self, node: Connection, stream: int, text: bytes) -> None:
        name = f"{node.name}: ".encode() if len(self._all) > 1 else b""
        to = sys.stdout if stream == 1 else sys.stderr
        to.write((name + text).decode(errors="replace") + "\n")
        to.flush()
        if stream == 2:
            self._speaker = node

    def _say(self, text: str) -> None:
        print(f"trainkit: {text}", file=sys.stderr, flush=True)


def _exit_code(node: Connection) -> int:
    return _FAILED if node.lost or node.code is None else node.code


def _tail(node: Connection) -> str:
    return b"\n".join(list(node.tail)[-8:]).decode(errors="replace")


def _not_ready(node: Connection, ssh: Sequence[str]) -> str:
    """Why a machine has ended before it was ready."""
    words = node.last_words
    if node.code == _SSH_FAILED:
        return (
            f"{node.name} cannot be reached: {words or 'ssh says nothing of why'}. This must work without a question: "
            f"{shlex.join(ssh)} -o BatchMode=yes {node.name} true"
        )
    hint = ""
    if "No module named" in words or ": cd: " in words or node.code in _NO_PROGRAM:
        hint = (
            f" trainkit {versions()['trainkit']}, its Python and the working directory must be there under the same paths as "
            "here; for another Python: --setup 'TRAINKIT_PYTHON=/path/to/python'; for what is not installed: "
            "--export PYTHONPATH"
        )
    return f"the set-up of {node.name} has ended with exit code {node.code}: {words or 'it says nothing of why'}.{hint}"


def _check_versions(nodes: Iterable[Connection]) -> None:
    """Refuse machines that differ; of this one, which may have no GPU and another torch, trainkit alone counts."""
    first, *others = [("this machine", {"trainkit": versions()["trainkit"]}), *((n.name, n.versions or {}) for n in nodes)]
    expected = dict.fromkeys(others[0][1], others[0][0])
    for name, found in others:
        for what, theirs in found.items():
            against, ours = (first[0], first[1][what]) if what in first[1] else (expected[what], others[0][1][what])
            if theirs != ours:
                raise ConfigurationError(
                    f"{name} has {what} {theirs}, but {against} has {ours}. All must have the same; for another Python on a "
                    "machine: --setup 'TRAINKIT_PYTHON=/path/to/python'"
                )
