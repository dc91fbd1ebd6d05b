"""``Connection``: an ssh that runs the part of a job on one machine, with what it says and what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.launch.lifeline import MARK

__all__ = ["Connection", "Line", "node_script"]

# Never a question: nobody is there to answer. Its server is asked for a sign of life every 15 s, four times.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4")
_KEPT = 200  # lines of standard error that are kept
_LEAVING = 2.0  # seconds that ssh has to end when its part is over
_CHUNK = 65536

# bash reads all of it before it does any of it, and no byte more, so that what comes after it is for Python (dash reads on).
# Until Python is there, a second process waits for the end of the input, which means that the starter has gone, and ends what
# the set-up is at.
_SCRIPT = """\
{{
exec 3<&0 </dev/null
cd -- {folder} || exit
{exports}{{ read -r line <&3; kill -9 0; }} >/dev/null 2>&1 &
trainkit_guard=$!
trap 'kill $trainkit_guard 2>/dev/null' EXIT
{setup}kill $trainkit_guard
exec "${{TRAINKIT_PYTHON:-{python}}}" -u -m trainkit.cli.launch_child {arguments} <&3 3<&-
exit
}}
"""


class Line(NamedTuple):
    """A line of output: of which connection, on which stream (1 or 2); ``None`` as the text: the stream has ended."""

    connection: Connection
    stream: int
    text: bytes | None


def node_script(python: str, folder: str, setup: str, exports: Mapping[str, str], arguments: Sequence[str]) -> str:
    """What a machine is to do, for bash.

    Args:
        python: the interpreter, unless the set-up names another in ``TRAINKIT_PYTHON``.
        folder: to work in.
        setup: shell text that goes before; its exit code must be 0.
        exports: variables and their values.
        arguments: of ``trainkit launch``.
    """
    return _SCRIPT.format(
        folder=shlex.quote(folder),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items()),
        setup=f"eval {shlex.quote(setup)} || exit\n" if setup else "",
        python=re.sub(r'(["$`\\])', r"\\\1", python),
        arguments=shlex.join(arguments),
    )


class Connection:
    """Runs a shell script on a machine. The script comes by standard input: nothing of it can be seen in a list of processes.

    Args:
        name: of the machine.
        ssh: the command and options of the user.
        script: for bash.
        lines: gets what it says, as :class:`Line`.

    Attributes:
        versions: what the machine has; ``None``: it is not ready.
        code: the exit code of its part; ``None``: it has not ended.
        lost: it has ended without saying how; ``code`` is that of ssh.
        tail: the last lines of its standard error.
    """

    def __init__(self, name: str, ssh: Sequence[str], script: str, lines: queue.Queue[Line]) -> None:
        self.name = name
        self.versions: dict[str, str] | None = None
        self.code: int | None = None
        self.lost = False
        self.tail: deque[bytes] = deque(maxlen=_KEPT)
        options = [part for option in _OPTIONS for part in ("-o", option)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*ssh, "-T", *options, name, "exec bash -s"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C is for this process alone, which tells the machines
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._waiting, self._sending = b"", threading.Lock()
        self._threads = [
            threading.Thread(target=self._read, args=(stream, number, lines), daemon=True)
            for number, stream in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        self._open = len(self._threads)
        self._over: float | None = None
        for thread in self._threads:
            thread.start()
        self.tell(script)

    def _read(self, stream: Any, number: int, lines: queue.Queue[Line]) -> None:
        kept = b""
        with stream:
            while data := os.read(stream.fileno(), _CHUNK):
                *whole, kept = re.split(rb"\r?\n|\r", kept + data)
                for text in whole:
                    lines.put(Line(self, number, text))
        if kept:
            lines.put(Line(self, number, kept))
        lines.put(Line(self, number, None))

    def heard(self, stream: int, text: bytes | None) -> bytes | None:
        """Take note of a line; returns what of it is to be shown."""
        if text is None:
            self._open -= 1
            return None
        said, mark, message = text.partition(MARK.encode())
        if stream == 1 and mark:
            found = json.loads(message)
            if "code" in found:
                self.code, self._over = found["code"], time.monotonic()
            else:
                self.versions = found
            return said or None
        if stream == 2:
            self.tail.append(text)
        return text

    def tell(self, text: str) -> None:
        """Send what the machine is to know, as soon as the connection takes it; from any thread."""
        with self._sending:
            self._waiting += text.encode()
        self.flush()

    def flush(self) -> None:
        """Send what is still waiting, as far as it goes."""
        stdin = self._process.stdin
        assert stdin is not None
        with self._sending, contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._waiting and not stdin.closed:
                self._waiting = self._waiting[os.write(stdin.fileno(), self._waiting) :]

    def ended(self) -> bool:
        """Whether all is over and everything that it has said has come."""
        if self._open == 0 and self._process.poll() is not None:
            if self.code is None:
                self.code, self.lost = self._process.returncode, True
            return True
        return self._over is not None and time.monotonic() > self._over + _LEAVING  # something else holds it open

    def hang_up(self) -> None:
        """Close its input. What still runs on the machine sees that, and ends."""
        assert self._process.stdin is not None
        with self._sending:
            self._process.stdin.close()

    def close(self, deadline: float) -> None:
        """Be done with it, after :meth:`hang_up`; ssh has until ``deadline`` on the monotonic clock to end by itself."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:  # they end with the output, unless it waits for somebody to read it
            thread.join(_LEAVING)

    @property
    def last_words(self) -> str:
        """The last line of standard error that says anything."""
        return next((line.decode(errors="replace").strip() for line in reversed(self.tail) if line.strip()), "")
