"""How processes connect to the main process, and the errors if they cannot connect."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import time
from itertools import pairwise
from typing import Any

import pytest
from helpers.patience import PATIENCE
from helpers.worlds.stars import Shared, all_at_once
from helpers.worlds.worlds import free_port

from trainkit.console import TrainkitWarning
from trainkit.distributed import hub
from trainkit.distributed.channel import Channel
from trainkit.distributed.hub import PORT_VARIABLE, connect, open_listener
from trainkit.distributed.wire import encode
from trainkit.errors import ProcessFailedError


def shared_of(addresses: list[str], port: int) -> dict[str, Any]:
    return {"addresses": addresses, "port": port, "token": "token", "answer": "answer"}


def test_a_job_on_one_node_is_not_reachable_from_other_nodes() -> None:
    listener, shared = open_listener("127.0.0.1")
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert shared["addresses"] == ["127.0.0.1"]


@pytest.mark.parametrize("master", ["some.host", None, ""])
def test_a_node_has_several_addresses(master: str | None) -> None:
    listener, shared = open_listener(master)
    with listener:
        addresses = shared["addresses"]
        assert addresses[-1] == "127.0.0.1"
        assert (addresses[0] == "some.host") == bool(master)
        assert "" not in addresses
        with socket.create_connection(("127.0.0.1", shared["port"]), 5):
            pass


def test_the_tokens_are_never_the_same() -> None:
    words = set()
    for _ in range(3):
        listener, shared = open_listener("localhost")
        listener.close()
        words |= {shared["token"], shared["answer"]}
    assert len(words) == 6


def test_the_port_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    listener, shared = open_listener("127.0.0.1")
    with listener:
        assert shared["port"] == listener.getsockname()[1] == port


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv(PORT_VARIABLE, str(other.getsockname()[1]))

        def meet(rank: int) -> str:
            with pytest.raises(ProcessFailedError) as caught:
                Channel.open(rank, 2, "127.0.0.1", shared.of(rank))
            return str(caught.value)

        for text in all_at_once(2, meet):
            assert re.match(r"the main process cannot listen for other ranks: .*[Aa]ddress already in use", text)


def test_no_process_listens() -> None:
    port = free_port()
    with pytest.raises(ProcessFailedError) as caught:
        connect(3, shared_of(["127.0.0.1", "localhost"], port), 2.0, 30.0)
    text = str(caught.value)
    assert text.startswith("rank 3 on ")
    for part in (
        f"port {port} within 2 s",
        "127.0.0.1: [Errno",
        "localhost: [Errno",
        "firewall",
        f"export {PORT_VARIABLE}=29501",
    ):
        assert part in text


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\n", b"[]\n", encode({"welcome": "wrong"}), b"x" * 5000, None])
def test_another_program_listens(answer: bytes | None) -> None:
    """The error says that another program answered, or that there was no answer."""
    with socket.create_server(("127.0.0.1", 0)) as wrong:
        shared = shared_of(["127.0.0.1"], wrong.getsockname()[1])

        def other(rank: int) -> str:
            if rank == 0:
                connection, _ = wrong.accept()
                with connection:
                    connection.recv(1000)
                    if answer is None:
                        time.sleep(1.5)
                    else:
                        connection.sendall(answer)
                return ""
            with pytest.raises(ProcessFailedError) as caught:
                connect(1, shared, 1.0, 30.0)
            return str(caught.value)

        assert re.search(r"127\.0\.0\.1: (no answer|another program answered)", all_at_once(2, other)[1])


def test_the_next_address_is_tried() -> None:
    listener, shared = open_listener("127.0.0.1")
    shared["addresses"] = ["no.such.host.invalid", "127.0.0.1"]
    listener.setblocking(True)

    def meet(rank: int) -> bool:
        if rank == 1:
            with connect(1, shared, 10.0, 30.0):
                return True
        connection, _ = listener.accept()
        with connection:
            assert json.loads(connection.recv(1000)) == {"token": shared["token"], "rank": 1}
            connection.sendall(encode({"welcome": shared["answer"]}))
        return True

    with listener:
        assert all_at_once(2, meet) == [True, True]


def test_connections_without_the_token_are_closed() -> None:
    shared = Shared()
    strangers = [
        b"GET / HTTP/1.1\r\n\r\n",
        encode({"token": "guess", "rank": 1}),
        encode({"rank": 1}),
        encode([1]),
        encode({"token": "å" * 32, "rank": 1}),
        encode({"token": "\ud800", "rank": 1}),
        encode({"token": ["guess"], "rank": [1]}),
        b"[" * 1000 + b"\n",
        b'{"a":' * 200 + b"\n",
        b"1" * 900 + b"\n",
        b"x" * 10_000,
        b"\x16\x03\x01\n",
    ]

    def meet(rank: int) -> Any:
        if rank == 0:
            return Channel.open(0, 2, "127.0.0.1", shared.of(0))
        known = shared.of(1)(None)
        place = ("127.0.0.1", known["port"])
        strangers.extend(
            encode({"token": known["token"], "rank": wrong}) for wrong in (0, 2, "1", None, -1, True, 1.0, [1], {})
        )
        for said in strangers:
            with socket.create_connection(place, 10) as connection:
                connection.sendall(said)
                assert not leftover(connection), said
        with socket.create_connection(place, 10):  # a connection that sends nothing
            return Channel.open(1, 2, "127.0.0.1", shared.of(1))

    channels = all_at_once(2, meet)
    assert all_at_once(2, lambda rank: channels[rank].exchange("a", rank)) == [[0, 1]] * 2
    with pytest.raises(OSError, match="refused"):  # the listener is closed when all ranks are connected
        socket.create_connection(("127.0.0.1", shared.of(1)(None)["port"]), 10)
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("said", [b"", b"[", encode({"token": "guess", "rank": 1})[:-1]], ids=["nothing", "a byte", "half"])
def test_connections_without_the_token_keep_no_rank_out(said: bytes) -> None:
    """More connections than the listener lets wait; the oldest are dropped."""
    shared = Shared()
    idle: list[socket.socket] = []

    def meet(rank: int) -> Channel:
        if rank:
            place = ("127.0.0.1", shared.of(1)(None)["port"])
            for _ in range(2 * hub._MAX_WAITING):
                idle.append(socket.create_connection(place, 10))
                idle[-1].sendall(said)
        return Channel.open(rank, 2, "127.0.0.1", shared.of(rank))

    channels = all_at_once(2, meet)
    assert all_at_once(2, lambda rank: channels[rank].exchange("a", rank)) == [[0, 1]] * 2
    for connection in idle:
        with connection:  # all are closed when all ranks are connected
            connection.settimeout(PATIENCE)
            assert not leftover(connection)
    for channel in channels:
        channel.close()


def test_a_connection_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that sends a byte now and then is dropped while the listener waits for a rank."""
    monkeypatch.setattr(hub, "_HELLO_TIMEOUT_S", 0.2)
    shared = Shared()

    def meet(rank: int) -> Channel | None:
        if rank:
            place = ("127.0.0.1", shared.of(1)(None)["port"])
            with socket.create_connection(place, PATIENCE) as slow, contextlib.suppress(ConnectionError):
                while True:  # until the other side has closed the connection
                    slow.sendall(b" ")
                    time.sleep(0.01)
        return Channel.open(rank, 2, "127.0.0.1", shared.of(rank), limit=PATIENCE)

    for channel in all_at_once(2, meet):
        assert channel is not None
        channel.close()


def test_a_rank_that_is_dropped_connects_again() -> None:
    """The first connection is closed without an answer, as when there are too many."""
    listener, shared = open_listener("127.0.0.1")
    listener.setblocking(True)

    def meet(rank: int) -> bool:
        if rank:
            with connect(1, shared, PATIENCE, 30.0):
                return True
        for answer in (b"", b"", encode({"welcome": shared["answer"]})):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)
        return True

    with listener:
        assert all_at_once(2, meet) == [True, True]


@pytest.mark.parametrize("failures", [3, 10**9], ids=["for a moment", "until the limit"])
def test_no_file_descriptor_is_left(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener waits, instead of trying as fast as it can, and says why it does."""
    shared, accept, limit = Shared(), socket.socket.accept, PATIENCE if failures < 10 else 1.0
    attempts: list[float] = []

    def no_descriptor(self: socket.socket) -> Any:
        attempts.append(time.monotonic())
        if len(attempts) <= failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", no_descriptor)

    def meet(rank: int) -> Any:
        try:
            return Channel.open(rank, 2, "127.0.0.1", shared.of(rank), limit=limit)
        except ProcessFailedError as error:
            return error

    with pytest.warns(TrainkitWarning, match=r"could not accept a connection: Too many open files.*ulimit -n 65536") as warned:
        results = all_at_once(2, meet)
    assert len(warned) == 1
    assert len(attempts) < 30
    assert all(later - earlier >= 0.09 for earlier, later in pairwise(attempts))
    for one in results:
        if failures < 10:
            one.close()
    assert failures < 10 or "did not connect within 1 s. The main process could not accept" in str(results[0])


def test_a_listener_without_file_descriptors_drops_the_oldest_connection() -> None:
    class Full:
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    dropped: list[Any] = []

    class Loop:
        def drop(self, wire: Any) -> None:
            dropped.append(wire)

        def listen_later(self, seconds: float, *_: Any) -> None:
            assert seconds > 0
            assert dropped == ["first", "second"]

    made = hub.HubListener(Loop(), Full(), shared_of([], 0), 3, 30.0, lambda *_: None)  # type: ignore[arg-type]
    made._unauthenticated = dict.fromkeys(["first", "second"])  # type: ignore[arg-type]
    with pytest.warns(TrainkitWarning, match="Too many open files"):
        made._accept()
    assert dropped == ["first"]
    made._accept()
    made._accept()
    assert dropped == ["first", "second"]


def leftover(connection: socket.socket) -> bytes:
    """The next data from the other side; empty if the other side has closed the connection."""
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


def test_a_rank_that_does_not_connect_is_named_on_all_ranks() -> None:
    shared = Shared()

    def meet(rank: int) -> str:
        if rank == 2:
            return ""
        with pytest.raises(ProcessFailedError) as caught:
            Channel.open(rank, 3, "127.0.0.1", shared.of(rank), limit=0.5)
        return str(caught.value)

    text = "ranks [2] did not connect within 0.5 s. The reason is in their own error messages."
    assert all_at_once(3, meet)[:2] == [text] * 2
