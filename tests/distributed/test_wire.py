"""`JsonConnection` and `ConnectionLoop`: lines that arrive in pieces, connections that end, and how the thread ends."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest
from helpers.patience import PATIENCE

from trainkit.distributed.wire import ConnectionLoop, JsonConnection, enable_keepalive, encode


class End:
    """One end of a socket pair, served by a loop. Its messages, and the error that ended it, are put into queues."""

    def __init__(self, connection: socket.socket, limit: int) -> None:
        self.received: Queue[Any] = Queue()
        self.ended: Queue[Exception] = Queue()
        self.wire = JsonConnection(connection, self.received.put, self.ended.put, limit)


@contextmanager
def served(limit: int = 1000) -> Iterator[tuple[ConnectionLoop, End, socket.socket]]:
    """Yield a loop, the `End` that it serves, and the socket at the other end."""
    broken: Queue[Exception] = Queue()
    loop = ConnectionLoop("test", broken.put)
    ours, theirs = socket.socketpair()
    end = End(ours, limit)
    loop.add(end.wire)
    loop.start()
    with theirs:
        theirs.settimeout(PATIENCE)
        yield loop, end, theirs
        loop.stop()
    assert broken.empty()
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_lines_in_pieces() -> None:
    with served() as (_, end, theirs):
        text = encode([1, "é\n"]) + encode({"a": None}) + encode(2)
        for byte in text[:-1]:
            theirs.send(bytes([byte]))
        assert [end.received.get(timeout=PATIENCE) for _ in range(2)] == [[1, "é\n"], {"a": None}]
        assert end.received.empty()
        theirs.send(text[-1:])
        assert end.received.get(timeout=PATIENCE) == 2


@pytest.mark.parametrize(
    "said, why",
    [
        (b"", EOFError),
        (b"half a li", EOFError),
        (b"no json\n", ValueError),
        (b"\xff\xfe\n", ValueError),
        (b"x" * 2000, ValueError),
        (encode("x" * 2000), ValueError),
        (b"[" * 1000 + b"\n", ValueError),
        (b'{"a":' * 200 + b"\n", ValueError),
        (b"[" * 990 + b"]" * 10 + b"\n", ValueError),
        (b"1" * 900 + b"e\n", ValueError),
    ],
    ids=["nothing", "half", "no json", "no text", "endless", "long", "deep", "deep objects", "deep, half", "no number"],
)
def test_a_connection_ends(said: bytes, why: type[Exception]) -> None:
    """A connection is closed if the peer closes it or sends data that is not a valid line; the error says which."""
    with served() as (_, end, theirs):
        theirs.sendall(said)
        if why is EOFError:
            theirs.shutdown(socket.SHUT_WR)
        assert isinstance(end.ended.get(timeout=PATIENCE), why)
        assert theirs.recv(100) == b""  # it was closed
        assert end.received.empty()


@pytest.mark.parametrize("error", [KeyError, TypeError, AttributeError, IndexError, RecursionError, AssertionError])
def test_a_message_that_no_handler_expects_ends_its_own_connection(error: type[Exception]) -> None:
    """The thread and the other connections continue."""

    def refuse(message: Any) -> None:
        raise error(message)

    with served() as (loop, end, theirs):
        ours, peer = socket.socketpair()
        other = JsonConnection(ours, refuse, end.ended.put)
        loop.call(lambda: loop.add(other))
        with peer:
            peer.settimeout(PATIENCE)
            peer.sendall(encode("odd"))
            assert isinstance(end.ended.get(timeout=PATIENCE), error)
            assert peer.recv(1) == b""
        theirs.sendall(encode("and this one?"))
        assert end.received.get(timeout=PATIENCE) == "and this one?"


def test_what_follows_a_dropped_connection_s_message_is_not_read() -> None:
    with served() as (loop, end, theirs):
        end.wire.on_message = lambda message: (end.received.put(message), loop.drop(end.wire))
        theirs.sendall(encode(1) + b"no json\n" + encode(2))
        assert theirs.recv(1) == b""
        assert end.received.get(timeout=PATIENCE) == 1
        assert end.received.empty()
        assert end.ended.empty()


def test_calls_at_a_later_time() -> None:
    called: Queue[str] = Queue()
    with served() as (loop, _, _):

        def begin() -> None:
            loop.call_later(0.02, lambda: called.put("second"))
            loop.call_later(0.0, lambda: called.put("first"))
            loop.call_later(3600, lambda: called.put("never"))

        loop.call(begin)
        assert [called.get(timeout=PATIENCE) for _ in range(2)] == ["first", "second"]
    assert called.empty()


def test_a_peer_that_does_not_read_blocks_no_process() -> None:
    line = encode("x" * 1_000_000)
    with served() as (loop, end, theirs):
        loop.call(lambda: [loop.send(end.wire, line) for _ in range(8)])  # more than the socket buffers hold
        theirs.sendall(encode("still there?"))
        assert end.received.get(timeout=PATIENCE) == "still there?"
        received = b""
        while len(received) < 8 * len(line):
            received += theirs.recv(1 << 20)
        assert received == 8 * line


def test_pending_lines_are_sent_before_the_end() -> None:
    line = encode("x" * 1_000_000)
    received = []

    def read(connection: socket.socket) -> None:
        while chunk := connection.recv(1 << 20):
            received.append(chunk)

    with served() as (loop, end, theirs):
        loop.call(lambda: loop.send(end.wire, line))
        reader = threading.Thread(target=read, args=(theirs,))
        reader.start()
        loop.stop()
        reader.join(PATIENCE)
    assert b"".join(received) == line


def test_a_peer_that_never_reads_does_not_delay_the_end() -> None:
    with served() as (loop, end, _):
        loop.call(lambda: loop.send(end.wire, encode("x" * 8_000_000)))


def test_an_error_in_the_thread_ends_it() -> None:
    """The error is passed to the callback of the loop, and the connections are closed."""
    broken: Queue[Exception] = Queue()
    loop = ConnectionLoop("test", broken.put)
    ours, theirs = socket.socketpair()
    loop.add(End(ours, 100).wire)
    loop.start()
    with theirs:
        loop.call(lambda: 1 // 0)
        assert isinstance(broken.get(timeout=PATIENCE), ZeroDivisionError)
        theirs.settimeout(PATIENCE)
        assert theirs.recv(1) == b""
    loop.stop()


def test_a_forked_child_closes_the_connection() -> None:
    """A connection that a DataLoader worker has inherited must not make a killed process look alive."""
    with served() as (loop, _, theirs):
        ready, release = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks in a process that has threads
            child = os.fork()
        if child == 0:
            os.write(ready[1], b"!")
            os.read(release[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        loop.stop()
        assert theirs.recv(1) == b""
        os.write(release[1], b"!")
        os.waitpid(child, 0)
        for number in (*ready, *release):
            os.close(number)


def test_keepalive_is_enabled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as connection:
        enable_keepalive(connection, 30.0)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            idle, pause, times = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + pause * times == 30
