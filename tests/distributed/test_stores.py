"""Connecting to a store succeeds or fails within a time limit, whatever the other side does."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from helpers.patience import within
from torch.distributed import TCPStore

from trainkit.distributed import stores
from trainkit.distributed.stores import connect_in_time

pytestmark = pytest.mark.prompt


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_the_connection_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keepalive, a client of the store would wait forever for an answer after the network cable is cut."""
    watched: list[tuple[int, float]] = []
    enable_keepalive = stores.enable_keepalive

    def watch(connection: socket.socket, patience: float) -> None:
        enable_keepalive(connection, patience)
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        watched.append((connection.getpeername()[1], limit / 1000))

    monkeypatch.setattr(stores, "enable_keepalive", watch)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files = len(os.listdir("/dev/fd"))
    store = connect_in_time(lambda: connect(server.port), server.port, 10.0)
    store.set("key", "value")
    assert (server.port, stores._SILENCE_S) in watched
    assert len(os.listdir("/dev/fd")) == files + 2  # the two ends of one connection


def test_a_silent_peer() -> None:
    """A peer that accepts the connection but never answers causes a TimeoutError.

    test_joining.py tests this with the TCPStore of torch.
    """
    released = threading.Event()

    def waits() -> Any:
        released.wait()

    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        connect_in_time(waits, 1, 0.3)
    assert time.monotonic() - start < within(4)
    released.set()


def test_errors_of_connect_are_raised() -> None:
    def fail() -> TCPStore:
        raise RuntimeError("of torch")

    with pytest.raises(RuntimeError, match="of torch"):
        connect_in_time(fail, 1, 10.0)
