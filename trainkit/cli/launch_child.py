"""The part of `trainkit launch --hostfile` on each host, in a terminal of ssh; see `trainkit.launch.remote`.

It runs `trainkit launch` with pipes, so that workers read no input from the terminal and can still print when it is lost.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import IO

from trainkit._version import __version__
from trainkit.launch.remote import MARK, SIGNAL, START

__all__ = ["main", "run", "versions"]

_FAILED = 2
_HEARTBEAT_TIMEOUT_S = 90.0  # seconds without a line from the launcher; ssh on the launcher's side gives up after 60
_CLOSE_TIMEOUT_S = 2.0  # seconds for the last output


def main(arguments: Sequence[str]) -> int:
    """Run `trainkit launch` with these arguments when all hosts are ready; returns its exit code."""
    if list(arguments[2:3]) == ["--master-addr"]:  # several hosts
        try:
            socket.getaddrinfo(arguments[3], None)
        except OSError as error:
            print(
                f"{socket.gethostname()} cannot resolve {arguments[3]!r}, the address of the first host: "
                f"{error.strerror or error}. Pass a name that all hosts can resolve: --master-addr HOST",
                file=sys.stderr,
            )
            return _FAILED
    return run([sys.executable, "-m", "trainkit", "launch", *arguments])


def run(command: Sequence[str]) -> int:
    """Run a command when all hosts are ready; its output, signals and exit code are sent through the terminal."""
    terminal = _Terminal()
    terminal.send(b"v", json.dumps(versions()).encode())
    lines = terminal.lines()
    if START not in lines:
        signal.raise_signal(signal.SIGHUP)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))

    def pass_signals() -> None:
        for line in lines:
            if line.startswith(SIGNAL):
                process.send_signal(int(line.removeprefix(SIGNAL)))
        process.send_signal(signal.SIGHUP)  # the kernel also sends it if the terminal hangs up

    pipes = (process.stdout, b"1"), (process.stderr, b"2")
    copying = [threading.Thread(target=terminal.copy, args=each, daemon=True) for each in pipes]
    for thread in (*copying, threading.Thread(target=pass_signals, daemon=True)):
        thread.start()
    code = process.wait()
    for thread in copying:
        thread.join(_CLOSE_TIMEOUT_S)
    if code >= 0:  # If it was killed, the launcher reports that this host sent no exit code.
        terminal.send(b"c", b"%d" % code)
    return code


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {"trainkit": __version__, "Python": python, "torch": metadata.version("torch")}


class _Terminal:
    """Lines to and from the launcher, until the connection is lost."""

    def __init__(self) -> None:
        self._lost, self._lock = threading.Event(), threading.Lock()
        os.set_blocking(1, False)

    def send(self, kind: bytes, line: bytes) -> None:
        """Send a line, unless the connection is lost."""
        data = MARK + kind + line + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while data and not self._lost.is_set():
                if select.select([], [1], [], 0.2)[1]:
                    data = data[os.write(1, data) :]

    def copy(self, pipe: IO[bytes], kind: bytes) -> None:
        """Send the lines of a pipe until its end. A carriage return, as in a progress bar, ends a line too."""
        for line in io.TextIOWrapper(pipe, "utf-8", "surrogateescape"):
            self.send(kind, line.rstrip("\n").encode(errors="surrogateescape"))

    def lines(self) -> Iterator[bytes]:
        """The lines of the launcher, until the terminal hangs up or no line arrives within the timeout."""
        rest = b""
        with contextlib.suppress(OSError):
            while select.select([0], [], [], _HEARTBEAT_TIMEOUT_S)[0] and (data := os.read(0, 4096)):
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
        self._lost.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
