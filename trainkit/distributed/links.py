"""How a process speaks to the hub: the main process in a thread of its own, each other one over TCP."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from trainkit.distributed.hub import Hub
from trainkit.distributed.hub_listener import Door, connect, opened
from trainkit.distributed.wire import LIMIT, Loop, Wire, encode
from trainkit.errors import ProcessFailedError

__all__ = ["Link", "MainLink"]

# What the system says of a connection on which nothing has come for too long.
_SILENT = {getattr(errno, name, None) for name in ("ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENETDOWN")}


class Link:
    """The connection of a process that is not the main one.

    Args:
        rank: of this process.
        size: the number of processes.
        told: called with each message of the hub, in the link's thread.
        lost: called with "died" or "lost" when there is no hub any more.
    """

    def __init__(self, rank: int, size: int, told: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        self.rank, self.size = rank, size
        self._told, self._lost = told, lost
        self._loop = Loop("trainkit-channel", lambda error: lost("died"))
        self._wire: Wire | None = None
        self._ready = threading.Event()
        self._refused = ""

    def open(self, master_addr: str | None, share: Callable[[Any], Any], limit: float, patience: float) -> None:
        """Connect; see :meth:`trainkit.distributed.channel.Channel.open`."""
        shared = share(None)
        if "error" in shared:
            raise ProcessFailedError(shared["error"])
        connection = connect(self.rank, shared, limit, patience)
        # What the hub sends is made of what all processes may send.
        self._wire = Wire(connection, self._hear, self._end, LIMIT * self.size)
        self._loop.add(self._wire)
        self._loop.start()
        if not self._ready.wait(2 * limit) or self._refused:
            raise ProcessFailedError(
                self._refused or f"rank {self.rank}: the main process does not answer within {2 * limit:g} s."
            )

    def say(self, line: bytes) -> None:
        """Send a line; from any thread."""
        if self._wire is not None:
            self._loop.call(partial(self._loop.send, self._wire, line))

    def close(self) -> None:
        """Send what is to be sent, and end."""
        self._loop.stop()

    def _hear(self, message: Any) -> None:
        if "ready" in message:
            self._refused = message["ready"]
            self._ready.set()
        else:
            self._told(message)

    def _end(self, why: Exception) -> None:
        if not self._ready.is_set():
            self._refused = "the main process has ended."
            self._ready.set()
        self._lost(_kind(why))


class MainLink:
    """The hub, on the main process; as :class:`Link`."""

    def __init__(self, rank: int, size: int, told: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        self.rank, self.size = rank, size
        self._told = told
        self._loop = Loop("trainkit-channel", lambda error: lost("died"))
        self._wires: dict[int, Wire] = {}
        self._all_there = threading.Event()
        self.hub = Hub(size, self._send)

    def open(self, master_addr: str | None, share: Callable[[Any], Any], limit: float, patience: float) -> None:
        """Let all connect; see :meth:`trainkit.distributed.channel.Channel.open`."""
        try:
            listener, shared = opened(master_addr)
        except OSError as error:
            text = f"the main process cannot listen for the others: {error}"
            share({"error": text})
            raise ProcessFailedError(text) from error
        door = Door(self._loop, listener, shared, self.size, patience, self._enter)
        door.open()
        self._loop.start()
        try:
            share(shared)
            there = self._all_there.wait(limit)
        finally:
            self._loop.call(door.close)
        if not there:
            text = f"ranks {sorted(door.absent)} have not connected to the main process within {limit:g} s; they say why."
            self._loop.call(lambda: self._send_all({"ready": text}))
            raise ProcessFailedError(text)
        self._loop.call(lambda: self._send_all({"ready": ""}))

    def say(self, line: bytes) -> None:
        """Tell the hub; from any thread."""
        self._loop.call(lambda: self.hub.heard(0, json.loads(line)))

    def close(self) -> None:
        """Send what is to be sent, and end."""
        self._loop.stop()

    def _enter(self, rank: int, wire: Wire) -> None:
        self._wires[rank] = wire
        wire.heard = partial(self.hub.heard, rank)
        wire.ended = partial(self._end, rank)
        if len(self._wires) == self.size - 1:
            self._all_there.set()

    def _end(self, rank: int, why: Exception) -> None:
        self.hub.gone(rank, _kind(why))

    def _send(self, rank: int, message: Any) -> None:
        if rank == 0:
            self._told(message)
        elif rank in self._wires:
            self._loop.send(self._wires[rank], encode(message))

    def _send_all(self, message: Any) -> None:
        line = encode(message)
        for wire in self._wires.values():
            self._loop.send(wire, line)


def _kind(why: Exception) -> str:
    return "lost" if isinstance(why, OSError) and why.errno in _SILENT else "died"
