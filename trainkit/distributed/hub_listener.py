"""How the processes of a run connect to the main process: addresses, an authenticated listener, and errors."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from trainkit.console import warn
from trainkit.distributed.wire import LIMIT, ConnectionLoop, JsonConnection, decode, enable_keepalive, encode
from trainkit.errors import ProcessFailedError

__all__ = ["PORT_VARIABLE", "HubListener", "connect", "open_listener"]

PORT_VARIABLE = "TRAINKIT_CHANNEL_PORT"  # the port on which the main process listens; unset: any free port
_MAX_HELLO = 1024  # bytes of a message from a connection that has not authenticated
_HELLO_TIMEOUT = 5.0  # seconds for a connection to authenticate
_MAX_WAITING = 64  # connections that have not authenticated, in addition to one for each rank
_PAUSE = 0.1  # seconds before a rank that was disconnected tries again, and before the main process accepts again
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # accepting failed for lack of resources
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    found = [master_addr] if master_addr else []
    if master_addr not in _LOOPBACK:
        for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # sends nothing; only finds out which local address would be used
                found.append(probe.getsockname()[0])
        with contextlib.suppress(OSError):
            found += [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
        found.append("127.0.0.1")
    return list(dict.fromkeys(found))


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
        self._loop, self._listener, self._shared, self._size = loop, listener, shared, size
        self._silence_limit, self._on_connect = silence_limit, on_connect
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
        self._loop.call_later(_HELLO_TIMEOUT, lambda: self._drop_unauthenticated(wire))

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
            self._loop.listen_later(_PAUSE, self._listener, self._accept)

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
        if not dropped or monotonic() + _PAUSE > end:
            break
        sleep(_PAUSE)  # the main process may have had too many other connections at that moment
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
