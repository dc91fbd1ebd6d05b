"""`ProcessIdentity`: lets another process find out later whether a process is still alive."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["ProcessIdentity"]


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process on any host at any time.

    Attributes:
        host: the name of the host, which need not be unique.
        boot: the boot id of the kernel; `None` if unknown.
        namespace: the namespace of the process ids, such as that of a container; `None` if unknown.
        pid: the process id, which may be used again after the process has exited.
        start: the start time, in a form that can only be compared; `None` if unknown.
    """

    host: str
    boot: str | None
    namespace: str | None
    pid: int
    start: str | None

    @classmethod
    def this(cls) -> ProcessIdentity:
        """The current process."""
        pid = os.getpid()
        boot, namespace = _text("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")
        return cls(socket.gethostname(), boot, namespace, pid, _start_and_state(pid)[0])

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProcessIdentity | None:
        """The process in the result of `dataclasses.asdict`, which may have more keys; `None` if it is invalid."""
        host, pid = values.get("host"), values.get("pid")
        texts = [values.get(name, 0) for name in ("boot", "namespace", "start")]
        if not isinstance(host, str) or type(pid) is not int or not 0 < pid < 2**31:
            return None
        boot, namespace, start = texts
        return cls(host, boot, namespace, pid, start) if all(isinstance(text, str | None) for text in texts) else None

    def state(self) -> Literal["live", "dying", "dead", "unknown"]:
        """Whether the process is alive. `"dying"`: killed but not exited yet; `"unknown"`: not visible from this host."""
        here = ProcessIdentity.this()
        if (self.host, self.boot, self.namespace) != (here.host, here.boot, here.namespace) or os.name != "posix":
            return "live" if self == here else "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "dead"
        except OSError:
            pass  # it belongs to another user
        start, state = _start_and_state(self.pid)
        if start is None or self.start is None:
            return "live"
        return state if start == self.start else "dead"


def _start_and_state(pid: int) -> tuple[str | None, Literal["live", "dying", "dead"]]:
    """The start time of a process, `None` if unknown, and its state."""
    here = _link("/proc/self")
    if here is None:
        return _start_from_ps(pid) if os.name == "posix" else None, "live"
    if here != str(os.getpid()):  # the /proc of another namespace, with other process ids
        return None, "live"
    # The second field is the name of the program in brackets, which may itself contain spaces and brackets.
    values = (_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    if len(values) < 20:
        return None, "live"
    start, ended = values[19], values[0] in ("Z", "X")
    if not ended:
        return start, "live"
    try:  # a thread of a killed process may still be inside a write
        return start, "dying" if len(os.listdir(f"/proc/{pid}/task")) > 1 else "dead"
    except OSError:
        return start, "dead"


def _start_from_ps(pid: int) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"})
        return done.stdout.strip() or None
    return None


def _text(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text(errors="replace").strip()
    return None


def _link(path: str) -> str | None:
    with suppress(OSError):
        return os.readlink(path)
    return None
