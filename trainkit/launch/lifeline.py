"""``Lifeline``: what ties the agent of a machine to the ``trainkit launch --hostfile`` that has started it there by ssh.

The starter holds the agent's standard input. Through it come signals, and every few seconds a word that the starter is there.
When it ends, because the starter or the connection has, or when nothing comes any more, as when a cable is cut, the agent is
told to end, so that nothing is left on the machine. ssh itself tells a process without a terminal nothing of the kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import sys
import threading
from importlib import metadata
from types import TracebackType

from trainkit._version import __version__

__all__ = ["ALIVE", "GO", "MARK", "SIGNAL", "Lifeline", "versions"]

# From the starter, one a line.
GO, ALIVE, SIGNAL = "go", "alive", "signal "

# To the starter, on standard output, before JSON: the versions when the agent is ready, its exit code at the end.
MARK = "trainkit-node: "

_SILENCE = 90.0  # seconds without a word after which the starter is taken to be gone; ssh gives up after 60 on its side
_LAST = 2.0  # seconds that output has to get out at the end
_LOOK = 0.2  # seconds between two looks whether what is written is still wanted
_CHUNK = 4096  # bytes that a pipe takes at once if it takes any (PIPE_BUF)


def versions() -> dict[str, str]:
    """What must be the same on all machines."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"trainkit": __version__, "Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch}


class Lifeline:
    """Takes over standard input, standard output and standard error of this process; to be used in a ``with``.

    Its workers have no input, and their output goes through here: it must not fail them when the connection does, while they
    save what they have. Within the ``with``, from the main thread: :meth:`begin`, then the agent, then :meth:`end`.

    Args:
        silence: seconds without a word after which the starter is taken to be gone.
    """

    def __init__(self, silence: float = _SILENCE) -> None:
        self._silence = silence
        self._go, self._lost = threading.Event(), threading.Event()
        self._outputs: list[tuple[int, int, threading.Thread]] = []

    def __enter__(self) -> Lifeline:
        self._input = os.dup(0)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            reading, writing = os.pipe()
            outside = os.dup(stream)
            os.dup2(writing, stream)
            os.close(writing)
            thread = threading.Thread(target=self._pass_on, args=(reading, outside), name="trainkit-output", daemon=True)
            thread.start()
            self._outputs.append((stream, outside, thread))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, outside, thread in self._outputs:
            os.dup2(outside, number)  # by which the pipe ends
            thread.join(_LAST)

    def begin(self) -> bool:
        """Say that this machine is ready, and wait until all are; False: the starter is gone before that."""
        threading.Thread(target=self._listen, name="trainkit-lifeline", daemon=True).start()
        self._say(versions())
        while not self._go.is_set() and not self._lost.is_set():
            self._go.wait(_LOOK)
        return self._go.is_set()

    def end(self, code: int) -> None:
        """Say that all is over, so that nobody has to wait for what else may hold the connection open."""
        self._say({"code": code})

    def _say(self, what: dict[str, str] | dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, f"{MARK}{json.dumps(what)}\n".encode())

    def _listen(self) -> None:
        heard = b""
        while select.select([self._input], [], [], self._silence)[0]:
            data = os.read(self._input, _CHUNK)
            if not data:
                break
            *lines, heard = (heard + data).split(b"\n")
            for line in map(bytes.decode, lines):
                if line == GO:
                    self._go.set()
                elif line.startswith(SIGNAL):
                    os.kill(os.getpid(), int(line.removeprefix(SIGNAL)))
        self._lost.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def _pass_on(self, reading: int, outside: int) -> None:
        """Pass output on as long as anybody takes it."""
        taken = True
        while data := os.read(reading, _CHUNK):
            taken = taken and self._is_taken(outside)
            if taken:
                try:
                    os.write(outside, data)
                except OSError:
                    taken = False
        os.close(reading)

    def _is_taken(self, outside: int) -> bool:
        """Wait until there is room; not for a starter that is gone."""
        while not select.select([], [outside], [], _LOOK)[1]:
            if self._lost.is_set():
                return False
        return True
