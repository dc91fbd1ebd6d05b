"""JSON lines over TCP: connections that never block, and the one thread of a process that serves them."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any

__all__ = ["LIMIT", "ConnectionLoop", "JsonConnection", "decode", "enable_keepalive", "encode", "inherited"]

LIMIT = 16 << 20  # bytes of a line that one process may send
_CHUNK = 1 << 16  # bytes of one read; a larger buffer would be mapped and unmapped by each read
_FLUSH_S = 1.0  # seconds in which pending lines must be sent when the connections are closed

inherited: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose `abandon()` is called in a forked process."""


def encode(message: Any) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes | str) -> Any:
    """The message of a line that another process has sent.

    Raises:
        ValueError: it is not one line of JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("lists or objects that are nested too deeply") from None


def enable_keepalive(connection: socket.socket, silence_limit: float) -> None:
    """Let the operating system detect that the other side is lost: a cut cable, a host without power."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, round(silence_limit / 6))
    options = {
        "TCP_KEEPIDLE": 2 * pause,  # silence before the first probe
        "TCP_KEEPALIVE": 2 * pause,  # macOS has another name for it.
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": round(1000 * silence_limit),  # milliseconds until sent data must be acknowledged
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class JsonConnection:
    """One connection; only the thread of its `ConnectionLoop` uses it.

    Args:
        connection: the socket.
        on_message: called with each message that is received.
        on_end: called once, with the reason, when no more messages will be received.
        limit: maximum bytes of a received line.

    Attributes:
        full: the socket cannot take more data now.
        broken: the error after which nothing can be sent; what the other side sent before can still be read.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[Any], None],
        on_end: Callable[[Exception], None],
        limit: int = LIMIT,
    ) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.on_message = on_message
        self.on_end = on_end
        self.limit = limit
        self.full = False
        self.broken: OSError | None = None
        self._in, self._out = bytearray(), bytearray()

    def put(self, line: bytes) -> None:
        """Append a line to the send buffer."""
        self._out += line

    def flush(self) -> bool:
        """Send what can be sent now. Returns whether that was everything."""
        while self._out and self.broken is None:
            try:
                sent = self.connection.send(self._out)
            except BlockingIOError:
                return False
            except OSError as error:
                self.broken = error
                break
            del self._out[:sent]
        return True

    def finish(self) -> None:
        """Half-close. The other side then closes, and only after that may this side: otherwise sent data can be lost."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def get(self) -> list[bytes]:
        """The lines received since the last call, for `decode`.

        Raises:
            EOFError: the other side has closed the connection.
            OSError: the connection is broken.
            ValueError: a line is too long.
        """
        chunk = self.connection.recv(_CHUNK)
        if not chunk:
            raise EOFError("closed by the other side")
        self._in += chunk
        lines: list[bytes] = []
        if b"\n" in chunk:
            *lines, rest = bytes(self._in).split(b"\n")
            self._in = bytearray(rest)
        if max(map(len, lines), default=0) > self.limit or len(self._in) > self.limit:
            raise ValueError(f"a line of more than {self.limit} bytes")
        return lines


class ConnectionLoop:
    """The thread that reads and writes all connections of a process.

    Args:
        name: of the thread.
        broken: called in the thread if an error ends it.
    """

    def __init__(self, name: str, broken: Callable[[Exception], None]) -> None:
        self._broken = broken
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._wires: set[JsonConnection] = set()
        self._stop_at: float | None = None
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # a heap: when to call what
        self._numbers = count()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._clear_wakeup)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        inherited.add(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the loop's thread; may be called from any thread."""
        self._calls.append(function)
        with contextlib.suppress(OSError):  # enough wake-ups are pending already, or the loop has ended
            self._wake_sender.send(b"!")

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function in the loop's thread after some time, unless the loop has ended; only in that thread."""
        heapq.heappush(self._later, (monotonic() + seconds, next(self._numbers), function))

    def stop(self) -> None:
        """Send pending lines, close everything and end the thread. May be called again, from any other thread."""
        if self._thread.ident is None:  # never started
            self._close()
        elif self._thread.is_alive():
            self.call(self._stop)
            self._thread.join(2 * _FLUSH_S)

    def add(self, wire: JsonConnection) -> None:
        """Serve a connection."""
        self._wires.add(wire)
        self._selector.register(wire.connection, selectors.EVENT_READ, lambda events: self._serve(wire, events))

    def listen(self, listener: socket.socket, accept: Callable[[], None]) -> None:
        """Call `accept` when a connection is waiting."""
        self._selector.register(listener, selectors.EVENT_READ, lambda events: accept())

    def listen_later(self, seconds: float, listener: socket.socket, accept: Callable[[], None]) -> None:
        """Ignore a listening socket for some time: as long as a connection waits, each `select` returns at once."""
        self._selector.unregister(listener)
        self.call_later(seconds, lambda: self.listen(listener, accept) if listener.fileno() >= 0 else None)

    def forget(self, listener: socket.socket) -> None:
        """Close a socket that `listen` was called with."""
        if listener in self._selector.get_map():  # After `listen_later` the selector does not have it.
            self._selector.unregister(listener)
        listener.close()

    def send(self, wire: JsonConnection, line: bytes) -> None:
        """Send a line as soon as the connection takes it."""
        if wire in self._wires:
            wire.put(line)
            self._flush(wire)

    def drop(self, wire: JsonConnection) -> None:
        """Close a connection; its handlers are not called any more."""
        if wire in self._wires:
            self._wires.remove(wire)
            self._selector.unregister(wire.connection)
            wire.connection.close()

    def abandon(self) -> None:
        """In a forked process: close the inherited sockets, which the parent continues to use.

        Otherwise the other side would consider the parent alive as long as one of its children is.
        """
        self._selector.close()
        for end in (self._wake_receiver, self._wake_sender, *(wire.connection for wire in self._wires)):
            end.close()

    def _work(self) -> None:
        try:
            while not self._is_finished():
                for key, events in self._selector.select(self._pause()):
                    if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not closed by an earlier event
                        key.data(events)
                while self._calls:
                    self._calls.popleft()()
                while self._later and self._later[0][0] <= monotonic():
                    heapq.heappop(self._later)[2]()
        except Exception as error:
            self._broken(error)
        finally:
            self._close()

    def _pause(self) -> float | None:
        """Seconds until there is something to do without an event; `None`: unknown."""
        times = [when for when, _, _ in self._later[:1]] + ([] if self._stop_at is None else [self._stop_at])
        return max(0.0, min(times) - monotonic()) if times else None

    def _close(self) -> None:
        for wire in self._wires:
            wire.connection.close()
        self._wires.clear()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _is_finished(self) -> bool:
        return self._stop_at is not None and (not self._wires or monotonic() > self._stop_at)

    def _stop(self) -> None:
        self._stop_at = monotonic() + _FLUSH_S
        for wire in list(self._wires):
            self._flush(wire)

    def _clear_wakeup(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _serve(self, wire: JsonConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(wire)
        if events & selectors.EVENT_READ:
            try:
                for line in wire.get():
                    if wire in self._wires and self._stop_at is None:  # A handler may have dropped it.
                        wire.on_message(decode(line))
            except BlockingIOError:
                pass
            except Exception as why:  # whatever a peer sends ends its own connection, never the thread that serves all
                self._end(wire, wire.broken or why)

    def _flush(self, wire: JsonConnection) -> None:
        done = wire.flush()
        if done == wire.full:
            wire.full = not done
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.full else 0)
            self._selector.modify(wire.connection, events, lambda events: self._serve(wire, events))
        if done and self._stop_at is not None:
            wire.finish()

    def _end(self, wire: JsonConnection, why: Exception) -> None:
        if wire in self._wires:
            self.drop(wire)
            if self._stop_at is None:
                wire.on_end(why)


def _abandon_all() -> None:
    for each in list(inherited):
        each.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
