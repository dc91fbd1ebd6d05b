"""The connection of a process to the hub: within the main process, or over TCP from any other process."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from trainkit.distributed.hub import Hub
from trainkit.distributed.hub_listener import PORT_VARIABLE, HubListener, connect, open_listener
from trainkit.distributed.wire import LIMIT, ConnectionLoop, JsonConnection, encode
from trainkit.errors import ProcessFailedError

__all__ = ["HubConnection", "LocalHubConnection"]

# Errors of a connection on which the other side was silent for too long.
_SILENT = {getattr(errno, name, None) for name in ("ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENETDOWN")}


class HubConnection:
    """The connection of a process other than the main process.

    Args:
        rank: of this process.
        size: the number of processes.
        on_message: called with each message of the hub, in the thread of the connection.
        on_lost: called with "died" or "lost" when the connection to the hub has ended.
    """

    def __init__(self, rank: int, size: int, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self.rank, self.size = rank, size
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = ConnectionLoop("trainkit-channel", lambda error: on_lost("died"))
        self._wire: JsonConnection | None = None
        self._ready = threading.Event()
        self._refused = ""

    def open(self, master_addr: str | None, from_main: Callable[[Any], Any], limit: float, silence_limit: float) -> None:
        """Connect; see `trainkit.distributed.channel.Channel.open`."""
        shared = from_main(None)
        if "error" in shared:
            raise ProcessFailedError(shared["error"])
        connection = connect(self.rank, shared, limit, silence_limit)
        # One message of the hub may contain the values of all ranks.
        self._wire = JsonConnection(connection, self._receive, self._end, LIMIT * self.size)
        self._loop.add(self._wire)
        self._loop.start()
        if not self._ready.wait(2 * limit) or self._refused:
            raise ProcessFailedError(
                self._refused or f"rank {self.rank}: the main process did not answer within {2 * limit:g} s."
            )

    def send(self, line: bytes) -> None:
        """Send a line; from any thread."""
        if self._wire is not None:
            self._loop.call(partial(self._loop.send, self._wire, line))

    def close(self) -> None:
        """Send what is pending, and close."""
        self._loop.stop()

    def _receive(self, message: Any) -> None:
        if "ready" in message:
            self._refused = message["ready"]
            self._ready.set()
        else:
            self._on_message(message)

    def _end(self, why: Exception) -> None:
        if not self._ready.is_set():
            self._refused = "the main process exited before all ranks were connected. Its own error message has the reason."
            self._ready.set()
        self._on_lost(_kind(why))


class LocalHubConnection:
    """The hub on the main process; the same methods as `HubConnection`."""

    def __init__(self, rank: int, size: int, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self.rank, self.size = rank, size
        self._on_message = on_message
        self._loop = ConnectionLoop("trainkit-channel", lambda error: on_lost("died"))
        self._wires: dict[int, JsonConnection] = {}
        self._all_connected = threading.Event()
        self.hub = Hub(size, self._send)

    def open(self, master_addr: str | None, from_main: Callable[[Any], Any], limit: float, silence_limit: float) -> None:
        """Accept the connections of all ranks; see `trainkit.distributed.channel.Channel.open`."""
        try:
            listener, shared = open_listener(master_addr)
        except OSError as error:
            text = f"the main process cannot listen for other ranks: {error}. Set a free port on the node of rank 0: "
            text += f"export {PORT_VARIABLE}=29501"
            from_main({"error": text})
            raise ProcessFailedError(text) from error
        hub_listener = HubListener(self._loop, listener, shared, self.size, silence_limit, self._on_connect)
        hub_listener.open()
        self._loop.start()
        try:
            from_main(shared)
            connected = self._all_connected.wait(limit)
        finally:
            self._loop.call(hub_listener.close)
        if not connected:
            ranks = sorted(hub_listener.missing)
            why = hub_listener.problem or "The reason is in their own error messages."
            text = f"ranks {ranks} did not connect within {limit:g} s. {why}"
            self._loop.call(lambda: self._send_all({"ready": text}))
            raise ProcessFailedError(text)
        self._loop.call(lambda: self._send_all({"ready": ""}))

    def send(self, line: bytes) -> None:
        """Send a message to the hub; from any thread."""
        self._loop.call(lambda: self.hub.receive(0, json.loads(line)))

    def close(self) -> None:
        """Send what is pending, and close."""
        self._loop.stop()

    def _on_connect(self, rank: int, wire: JsonConnection) -> None:
        self._wires[rank] = wire
        wire.on_message = partial(self.hub.receive, rank)
        wire.on_end = partial(self._end, rank)
        if len(self._wires) == self.size - 1:
            self._all_connected.set()

    def _end(self, rank: int, why: Exception) -> None:
        self.hub.on_exit(rank, _kind(why))

    def _send(self, rank: int, message: Any) -> None:
        if rank == 0:
            self._on_message(message)
        elif rank in self._wires:
            self._loop.send(self._wires[rank], encode(message))

    def _send_all(self, message: Any) -> None:
        line = encode(message)
        for wire in self._wires.values():
            self._loop.send(wire, line)


def _kind(why: Exception) -> str:
    return "lost" if isinstance(why, OSError) and why.errno in _SILENT else "died"
