"""torch stores: `connect_in_time` has a time limit; `RestartStore` keeps a few short texts over a restart of the processes."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from trainkit.distributed.wire import enable_keepalive

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["RESTART_STORE", "RestartStore", "connect_in_time", "restarts"]

_SILENCE_S = 15.0  # seconds of silence after which a node counts as lost
_T = TypeVar("_T")

RESTART_STORE = "TRAINKIT_RESTART_STORE"  # "host:port" of the store of trainkit's launcher
_TIMEOUT = timedelta(seconds=30)


def connect_in_time(connect: Callable[[], _T], port: int, limit: float) -> _T:
    """Call `connect` in a thread, so that this thread can handle signals. Its connections end when the other node is lost.

    Args:
        connect: connects to a store.
        port: the port of the store.
        limit: seconds.

    Raises:
        TimeoutError: `connect` did not return in that time.
        RuntimeError: raised by `connect`; also `ValueError`.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(connect())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit:.0f} s")
    for number in map(int, os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ()):  # torch does not show its sockets
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as link:
                    if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == port:
                        enable_keepalive(link, _SILENCE_S)  # otherwise an operation without an answer waits forever
    return results[0]


class RestartStore:
    """Texts by key, in the store that the launcher keeps over all restarts.

    Args:
        host: the host of the store.
        port: the port of the store.
        run: an id that distinguishes jobs that use the same store.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        self._host = host
        self._port = port
        self._run = run

    def __repr__(self) -> str:
        return f"RestartStore({self._host!r}, {self._port}, {self._run!r})"

    @classmethod
    def of(cls, env: Mapping[str, str]) -> RestartStore | None:
        """The store in the environment variables; `None` if no launcher can restart this process."""
        host, _, port = env.get(RESTART_STORE, "").rpartition(":")
        if not host and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun keeps one store over all restarts
            host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        return cls(host, int(port), env.get("TORCHELASTIC_RUN_ID", "")) if host and port.isdigit() else None

    def set(self, key: str, text: str) -> None:
        """Store a text under a key."""
        self._store().set(self._name(key), text)

    def get(self, key: str) -> str | None:
        """The text of a key; `None` if there is none."""
        store = self._store()
        if not store.check([self._name(key)]):
            return None
        kept: bytes = store.get(self._name(key))
        return kept.decode()

    def _store(self) -> TCPStore:
        from torch.distributed import TCPStore  # Not every build of torch has it.

        def connect() -> TCPStore:
            return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)

        return connect_in_time(connect, self._port, _TIMEOUT.total_seconds())

    def _name(self, key: str) -> str:
        return f"trainkit/{self._run}/{key}"


def restarts(env: Mapping[str, str]) -> int:
    """How many times the launcher has restarted the processes; 0 if unknown."""
    count = env.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0
