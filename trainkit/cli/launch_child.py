"""The part of ``trainkit launch --hostfile`` on each host, in a terminal of ssh; see :mod:`trainkit.launch.remote`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib import metadata

from trainkit._version import __version__
from trainkit.launch.remote import LINE_END, MARK, SIGNAL, START

__all__ = ["main", "versions"]

_FAILED = 2
_HEARTBEAT_TIMEOUT = 90.0  # seconds without a line of the launcher; ssh gives up after 60 on its side
_CLOSE_TIMEOUT = 2.0  # seconds for the last output


def main(arguments: Sequence[str]) -> int:
    """Run the workers of this host when all hosts are ready; returns their exit code."""
    if list(arguments[2:3]) == ["--master-addr"]:  # several hosts
        try:
            socket.getaddrinfo(arguments[3], None)
        except OSError as error:
            print(
                f"{socket.gethostname()} cannot resolve {arguments[3]!r}, the address of the first host: "
                f"{error.strerror or error}. Set a name that all hosts know: --master-addr HOST",
                file=sys.stderr,
            )
            return _FAILED
    terminal = _Terminal()
    terminal.send(b"v", json.dumps(versions()).encode())
    terminal.started.wait()
    from trainkit.cli import main as command  # slow to import: heartbeats must be read meanwhile

    try:
        code = command.main(["launch", *arguments])
    finally:
        terminal.close()
    terminal.send(b"c", b"%d" % code)
    return code


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"trainkit": __version__, "Python": f"{sys.version_info[0]}.{sys.version_info[1]}", "torch": torch}


class _Terminal:
    """Takes over the terminal: workers have no input, and what they print comes through here.

    A worker that prints must not fail when the connection is lost, while it saves.
    """

    def __init__(self) -> None:
        self.started = threading.Event()
        self._lost, self._lock = threading.Event(), threading.Lock()
        self._input, self._output = os.dup(0), os.dup(1)
        os.set_blocking(self._output, False)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        self._copying = []
        for stream in (1, 2):
            reading, writing = os.pipe()
            os.dup2(writing, stream)
            os.close(writing)
            self._copying.append(threading.Thread(target=self._copy, args=(reading, b"%d" % stream), daemon=True))
        for thread in (*self._copying, threading.Thread(target=self._listen, daemon=True)):
            thread.start()

    def close(self) -> None:
        """Return the streams, when all output has gone."""
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(self._output, stream)
        for thread in self._copying:
            thread.join(_CLOSE_TIMEOUT)

    def send(self, kind: bytes, *lines: bytes) -> None:
        """Send lines, unless the connection is lost."""
        data = b"".join(MARK + kind + line + b"\n" for line in lines)
        with self._lock, contextlib.suppress(OSError):
            while data and not self._lost.is_set():
                if select.select([], [self._output], [], 0.2)[1]:
                    data = data[os.write(self._output, data) :]

    def _copy(self, pipe: int, kind: bytes) -> None:
        rest = b""
        while data := os.read(pipe, 65536):
            *lines, rest = LINE_END.split(rest + data)
            self.send(kind, *lines)
        self.send(kind, *filter(None, [rest]))

    def _listen(self) -> None:
        data = rest = b""
        while select.select([self._input], [], [], _HEARTBEAT_TIMEOUT)[0]:
            with contextlib.suppress(OSError):
                data = os.read(self._input, 4096)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == START:
                    self.started.set()
                elif line.startswith(SIGNAL):
                    os.kill(os.getpid(), int(line.removeprefix(SIGNAL)))
            data = b""
        self._lost.set()
        os.kill(os.getpid(), signal.SIGHUP)  # which the kernel has sent, if the terminal hung up


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
