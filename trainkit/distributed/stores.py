"""`connected`: a connection to a store of torch within a time limit; torch has none where the other side is silent."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from typing import TypeVar

from trainkit.distributed.wire import enable_keepalive

__all__ = ["connected"]

_SILENCE = 15.0  # seconds after which a node that no longer answers is taken to be gone
_T = TypeVar("_T")


def connected(connect: Callable[[], _T], port: int, limit: float) -> _T:
    """Call `connect` in a thread, where it cannot keep signals from being handled; end its connections with the other node.

    Args:
        connect: connects to a store.
        port: of the store, at the other end.
        limit: seconds.

    Raises:
        TimeoutError: it has not returned in that time.
        RuntimeError: what it has raised; also `ValueError`.
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
                        enable_keepalive(link, _SILENCE)  # else an operation waits without limit if there is no answer
    return results[0]
