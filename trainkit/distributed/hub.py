"""`Hub`: what the main process knows about all ranks of a run; how they connect to it and what it sends them."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from time import monotonic, sleep
from typing import Any

from trainkit.console import warn
from trainkit.distributed.failure import Failure, Runs
from trainkit.distributed.wire import LIMIT, ConnectionLoop, JsonConnection, decode, enable_keepalive, encode
from trainkit.errors import ProcessFailedError

__all__ = ["PORT_VARIABLE", "Hub", "HubConnection", "LocalHubConnection", "connect", "open_listener"]

PORT_VARIABLE = "TRAINKIT_CHANNEL_PORT"  # the port on which the main process listens; unset: any free port
_MAX_HELLO = 1024  # bytes of a message from a connection that has not authenticated
_HELLO_TIMEOUT_S = 5.0  # seconds for a connection to authenticate
_MAX_WAITING = 64  # connections that have not authenticated, in addition to one for each rank
_PAUSE_S = 0.1  # seconds before a rank that was disconnected tries again, and before the main process accepts again
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # accepting failed for lack of resources
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Errors of a connection on which the other side was silent for too long.
_SILENT = {getattr(errno, name, None) for name in ("ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENETDOWN")}


class Hub:
    """The center of the star: receives the messages of all ranks and decides what happened, in the same order for all ranks.

    An exchange is complete when every rank has sent its value: every rank receives all values or, if they were collected, the
    main process receives them, and every rank its reply. During a failure no exchange completes: the participating ranks
    receive the reason. The failure of a run in a process that survives is over when every rank has left that run. A failure
    that ends a process is permanent.

    Args:
        size: the number of processes.
        send: `send(rank, message)`.
    """

    def __init__(self, size: int, send: Callable[[int, Any], None]) -> None:
        self._size = size
        self._send = send
        self._exchanges: dict[str, dict[int, Any]] = {}  # key → values by rank
        self._runs = [Runs() for _ in range(size)]
        self._failures: dict[int | None, Failure] = {}  # the first of each run, in the order of arrival
        self._latest: Failure | None = None  # the latest failure of a run, even if it is over
        self._exited: dict[int, Failure] = {}
        self._asking: dict[int, str] = {}  # ranks that asked what each rank is doing → key of the answer
        self._answers: dict[int, Any] = {}

    @property
    def waiting(self) -> int:
        """Number of exchanges that are not complete."""
        return len(self._exchanges)

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Receive a message of a rank."""
        if rank in self._exited:
            return
        if "exchange" in message:
            self._add_value(rank, message["exchange"], message["value"], message.get("collect", False))
        elif "reply" in message:
            self._reply(message["reply"], message["value"])
        elif "withdraw" in message:
            self._withdraw(rank, message["withdraw"])
        elif "begin" in message:
            self._runs[rank].begin()
            self._after_runs(rank)
            self._find_missing()
        elif "end" in message:
            self._runs[rank].end(message["end"])
            self._after_runs(rank)
            self._clear()
        elif "fail" in message:
            self._fail(Failure(**message["fail"]), message.get("of"))
        elif "ask" in message:
            self._ask(rank, message["ask"])
        elif "answer" in message:
            self._answer(rank, message["answer"])
        elif "exit" in message:
            kind, text = message["exit"]
            self.on_exit(rank, kind, text, message.get("begun"))
        if "number" in message:
            self._send(rank, {"acknowledged": message["number"]})

    def on_exit(self, rank: int, kind: str, text: str = "", begun: int | None = None) -> None:
        """A rank has exited. `kind`: see `Failure`; `begun`: number of its collectives, if known."""
        if rank in self._exited:
            return
        mine = next((one for one in self._failures.values() if one.rank == rank), None)
        end = mine if kind == "died" and mine is not None else Failure(rank, kind, text)
        self._exited[rank] = end
        self._send_all({"exited": end.record(), "begun": begun})
        self._asking.pop(rank, None)
        self._send_answers()
        self._find_missing()
        for key, values in list(self._exchanges.items()):
            if rank not in values:
                self._cancel(key, end)

    def _add_value(self, rank: int, key: str, value: Any, collect: bool) -> None:
        why = next(iter(self._failures.values()), None)
        if why is not None:
            self._send(rank, {"canceled": key, "why": why.record()})
            return
        values = self._exchanges.setdefault(key, {})
        values[rank] = value
        missing = [end for other, end in self._exited.items() if other not in values]
        if missing:
            self._cancel(key, missing[0])
        elif len(values) == self._size:
            in_order = [values[other] for other in range(self._size)]
            if collect:  # not complete before the reply of the main process: until then a failure cancels it on all ranks
                self._send(0, {"collected": key, "values": in_order})
                return
            del self._exchanges[key]
            self._send_all({"result": key, "values": in_order})

    def _reply(self, key: str, value: Any) -> None:
        if self._exchanges.pop(key, None) is not None:  # not canceled
            self._send_all({"result": key, "values": [value]})

    def _withdraw(self, rank: int, key: str) -> None:
        values = self._exchanges.get(key, {})
        values.pop(rank, None)
        if not values:
            self._exchanges.pop(key, None)

    def _cancel(self, key: str, why: Failure) -> None:
        for rank in self._exchanges.pop(key):
            self._send(rank, {"canceled": key, "why": why.record()})

    def _fail(self, failure: Failure, of: int | None = None) -> None:
        """Handle a failure. `of`: the run for which the rank posted the same failure before, if it now ends the process."""
        run = failure.run
        if run is not None and all(runs.over(run) for rank, runs in enumerate(self._runs) if rank != failure.rank):
            return  # all other ranks have left that run: they are affected only if the process exits
        if run is None:
            self._send_all({"failed rank": failure.rank})
        if run in self._failures:
            return
        if run is not None:
            self._latest = failure
        elif self._latest is not None and self._latest.run == of:  # all ranks must name the first failure
            failure = replace(self._latest, run=None)
        self._failures[run] = failure
        self._send_all({"failed": failure.record()})
        for key in list(self._exchanges):
            self._cancel(key, next(iter(self._failures.values())))

    def _ask(self, rank: int, key: str) -> None:
        """Ask all ranks once, however many of them ask: they usually wait for the same rank, and ask repeatedly."""
        if not self._asking:
            self._answers = {}
            self._send_all({"asked": True})
        self._asking[rank] = key

    def _answer(self, rank: int, what: Any) -> None:
        if self._asking:
            self._answers[rank] = what
            self._send_answers()

    def _send_answers(self) -> None:
        """Send the answers to the ranks that asked, as soon as all ranks that have not exited have answered."""
        if not self._asking or any(rank not in self._answers for rank in range(self._size) if rank not in self._exited):
            return
        values = [self._answers.get(rank) for rank in range(self._size)]
        asking, self._asking, self._answers = self._asking, {}, {}
        for rank, key in asking.items():
            self._send(rank, {"result": key, "values": values})

    def _find_missing(self) -> None:
        """Report a failure if a rank that has exited is needed by a rank in a run."""
        if None in self._failures:
            return
        inside = {number for rank, runs in enumerate(self._runs) if rank not in self._exited for number in runs.open}
        for rank, end in self._exited.items():
            if any(self._runs[rank].missing(number) for number in inside):
                self._fail(replace(end, run=None))

    def _clear(self) -> None:
        for run in [run for run in self._failures if run is not None and all(runs.over(run) for runs in self._runs)]:
            del self._failures[run]
            self._send_all({"cleared": run})

    def _after_runs(self, rank: int) -> None:
        """Send the runs of the main process: the other ranks need them if it exits, and the hub with it."""
        if rank == 0:
            self._send_all({"main runs": self._runs[0].record()})

    def _send_all(self, message: dict[str, Any]) -> None:
        for rank in reversed(range(self._size)):  # the main process last: when it acts, the other ranks already know
            if rank not in self._exited:
                self._send(rank, message)


# ----------------------------------------------------------------------------------------------------------------- listening


def open_listener(master_addr: str | None) -> tuple[socket.socket, dict[str, Any]]:
    """A listening socket, and what other processes need to connect to it.

    Raises:
        OSError: the port is taken, or there is no network.
    """
    port = int(os.environ.get(PORT_VARIABLE) or 0)
    if master_addr in _LOOPBACK:
        family = socket.AF_INET6 if master_addr == "::1" else socket.AF_INET
        listener = socket.create_server(("::1" if master_addr == "::1" else "127.0.0.1", port), family=family, backlog=1024)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=1024)
    listener.setblocking(False)
    return listener, {
        "addresses": _addresses(master_addr),
        "port": listener.getsockname()[1],
        "token": secrets.token_hex(16),
        "answer": secrets.token_hex(16),
    }


def _addresses(master_addr: str | None) -> list[str]:
    """The addresses of this node, the likeliest first."""
    addresses = [master_addr] if master_addr else []
    if master_addr not in _LOOPBACK:
        for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # sends nothing; only finds out which local address would be used
                addresses.append(probe.getsockname()[0])
        with contextlib.suppress(OSError):
            addresses += [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
        addresses.append("127.0.0.1")
    return list(dict.fromkeys(addresses))


class HubListener:
    """Accepts one connection from each rank that knows the token; closed when all ranks are connected.

    A rank sends the token at once. A connection that does not, within a few seconds, is dropped, and so is the oldest of them
    when there are too many: connections without the token cannot keep a rank out.

    Args:
        loop: serves the connections.
        listener: the listening socket.
        shared: the second result of `open_listener`.
        size: the number of processes.
        silence_limit: see `enable_keepalive`.
        on_connect: `on_connect(rank, connection)` is called for each rank; sets the handlers of the connection.

    Attributes:
        missing: ranks that have not connected yet.
        problem: why a connection could not be accepted; "": all could.
    """

    def __init__(
        self,
        loop: ConnectionLoop,
        listener: socket.socket,
        shared: dict[str, Any],
        size: int,
        silence_limit: float,
        on_connect: Callable[[int, JsonConnection], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._shared = shared
        self._size = size
        self._silence_limit = silence_limit
        self._on_connect = on_connect
        self._unauthenticated: dict[JsonConnection, None] = {}  # the oldest first
        self.missing = set(range(1, size))
        self.problem = ""

    def open(self) -> None:
        """Start to accept connections in the loop's thread."""
        self._loop.listen(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting connections, and drop those that have not authenticated."""
        self._loop.forget(self._listener)
        for wire in list(self._unauthenticated):
            self._drop_unauthenticated(wire)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # closed already, unless there are too many
            if error.errno in _FULL:
                self._wait_for_resources(error)
            return
        try:
            enable_keepalive(connection, self._silence_limit)
        except OSError:  # the other side has closed it already
            connection.close()
            return
        while len(self._unauthenticated) >= _MAX_WAITING + self._size:
            self._drop_oldest()
        wire = JsonConnection(
            connection,
            lambda message: self._authenticate(wire, message),
            lambda why: self._forget(wire),
            _MAX_HELLO,
        )
        self._unauthenticated[wire] = None
        self._loop.add(wire)
        self._loop.call_later(_HELLO_TIMEOUT_S, lambda: self._drop_unauthenticated(wire))

    def _wait_for_resources(self, error: OSError) -> None:
        """Accept again when a connection without the token is closed, or else in a moment; until then the new one waits."""
        if not self.problem:
            self.problem = (
                f"The main process could not accept a connection: {error.strerror}. Expected a file descriptor for each rank. "
                "Fix: ulimit -n 65536"
            )
            warn(f"{self.problem}. It tries again until all ranks are connected.")
        if self._unauthenticated:
            self._drop_oldest()
        else:
            self._loop.listen_later(_PAUSE_S, self._listener, self._accept)

    def _drop_oldest(self) -> None:
        for wire in list(self._unauthenticated)[:1]:
            self._drop_unauthenticated(wire)

    def _drop_unauthenticated(self, wire: JsonConnection) -> None:
        if wire in self._unauthenticated:
            self._forget(wire)
            self._loop.drop(wire)

    def _forget(self, wire: JsonConnection) -> None:
        self._unauthenticated.pop(wire, None)

    def _authenticate(self, wire: JsonConnection, message: Any) -> None:
        self._forget(wire)
        rank = message.get("rank") if isinstance(message, dict) and _same(message.get("token"), self._shared["token"]) else None
        if type(rank) is not int or rank not in self.missing:
            self._loop.drop(wire)
            return
        wire.limit = LIMIT
        self.missing.remove(rank)
        self._loop.send(wire, encode({"welcome": self._shared["answer"]}))
        self._on_connect(rank, wire)


def _same(value: Any, secret: str) -> bool:
    """Whether a value is the secret; takes the same time whatever part of it is right."""
    return isinstance(value, str) and hmac.compare_digest(value.encode(errors="replace"), secret.encode())


def connect(rank: int, shared: dict[str, Any], limit: float, silence_limit: float) -> socket.socket:
    """An authenticated connection to the main process.

    Raises:
        ProcessFailedError: no connection within `limit` seconds; the message has the addresses and the fix.
    """
    end = monotonic() + limit
    addresses, port = shared["addresses"], shared["port"]
    while True:
        failures, dropped = [], False
        for number, address in enumerate(addresses):
            seconds = (end - monotonic()) / (len(addresses) - number)
            try:
                connection = socket.create_connection((address, port), max(seconds, 0.1))
            except OSError as error:
                failures.append(f"{address}: {error}")
                continue
            try:
                _authenticate(connection, shared, rank, monotonic() + seconds)
                enable_keepalive(connection, silence_limit)
                return connection
            except (EOFError, OSError, ValueError) as error:
                failures.append(f"{address}: {error if isinstance(error, ValueError) else f'no answer ({error})'}")
                dropped |= isinstance(error, EOFError | ConnectionError)
            connection.close()
        if not dropped or monotonic() + _PAUSE_S > end:
            break
        sleep(_PAUSE_S)  # the main process may have had too many other connections at that moment
    raise ProcessFailedError(
        f"rank {rank} on {socket.gethostname()} cannot reach the main process on port {port} within {limit:g} s: "
        f"{'; '.join(failures)}. trainkit needs one TCP connection from each process to the main process, in addition to the "
        f"collectives. Allow it in the firewall; to choose the port: export {PORT_VARIABLE}=29501 on the node of rank 0. If "
        "the name in MASTER_ADDR resolves to another host: export MASTER_ADDR=<an address of that node> on all nodes."
    )


def _authenticate(connection: socket.socket, shared: dict[str, Any], rank: int, end: float) -> None:
    """Send the token and check the answer.

    Raises:
        EOFError: the other side has closed the connection.
        OSError: the connection is broken, or there is no answer in time.
        ValueError: another program answers.
    """
    connection.sendall(encode({"token": shared["token"], "rank": rank}))
    line = b""
    while not line.endswith(b"\n"):  # byte by byte, so that nothing after it is consumed
        connection.settimeout(max(end - monotonic(), 0.01))
        try:
            byte = connection.recv(1)
        except TimeoutError:
            raise TimeoutError("timed out") from None
        if not byte:
            raise EOFError("closed by the other side")
        line += byte
        if len(line) > _MAX_HELLO:
            raise ValueError("another program answered")
    try:
        answer = decode(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not _same(answer.get("welcome"), shared["answer"]):
        raise ValueError("another program answered")


# --------------------------------------------------------------------------------------------------------------- connections


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
        self._on_message = on_message
        self._on_lost = on_lost
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
            if "runs" in message:
                message["values"] = [value for value, count in message.pop("runs") for _ in range(count)]
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
        self._encoded: tuple[Any, bytes] = (None, b"")  # the latest message, which usually goes to all ranks, and its line
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
            if message is not self._encoded[0]:
                self._encoded = message, _encode_result(message) if "result" in message else encode(message)
            self._loop.send(self._wires[rank], self._encoded[1])

    def _send_all(self, message: Any) -> None:
        line = encode(message)
        for wire in self._wires.values():
            self._loop.send(wire, line)


def _encode_result(message: dict[str, Any]) -> bytes:
    """Encode the values of all ranks, of which most are often equal: each run of equal ones as one value and their number."""
    runs = [(value, sum(1 for _ in equal)) for value, equal in groupby(message["values"])]
    return encode({"result": message["result"], "runs": runs})


def _kind(why: Exception) -> str:
    return "lost" if isinstance(why, OSError) and why.errno in _SILENT else "died"
