"""Connecting to a store of torch's, within limits that always hold: its own do not where the other side says nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainkit.distributed.wire import keep_watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["connected"]

_SILENCE = 15.0  # seconds after which a machine that no longer answers is taken to be gone


def connected(connect: Callable[[], TCPStore], port: int, limit: float) -> TCPStore:
    """What ``connect`` returns, with a connection that ends when the other machine is gone.

    It runs in a thread, as no signal would be heard meanwhile.

    Args:
        connect: makes the store.
        port: of the store, at the other end.
        limit: seconds.

    Raises:
        TimeoutError: it has not returned in that time.
        RuntimeError: what it has raised; also ``ValueError``.
    """
    stores: list[TCPStore] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            stores.append(connect())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if errors:
        raise errors[0]
    if not stores:
        raise TimeoutError(f"no answer within {limit:.0f} s")
    _watch(port)
    return stores[0]


def _watch(port: int) -> None:
    """Let the system end the connections to a port when nobody answers: a store waits for an answer without any limit.

    torch does not show its sockets, but they are files of this process.
    """
    if not os.path.isdir("/dev/fd"):
        return
    for number in filter(_is_socket, map(int, os.listdir("/dev/fd"))):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                keep_watch(connection, _SILENCE)


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # closed by now
        return False
