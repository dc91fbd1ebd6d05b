"""How the processes of a run connect to the main process: addresses, an authenticated listener, and errors."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

from trainkit.distributed.wire import LIMIT, ConnectionLoop, JsonConnection, enable_keepalive, encode
from trainkit.errors import ProcessFailedError

__all__ = ["PORT_VARIABLE", "HubListener", "connect", "open_listener"]

PORT_VARIABLE = "TRAINKIT_CHANNEL_PORT"  # the port on which the main process listens; unset: any free port
_MAX_HELLO = 1024  # bytes of a message from a connection that has not authenticated
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

    Args:
        loop: serves the connections.
        listener: the listening socket.
        shared: the second result of `open_listener`.
        size: the number of processes.
        silence_limit: see `enable_keepalive`.
        on_connect: `on_connect(rank, connection)` is called for each rank; sets the handlers of the connection.

    Attributes:
        missing: ranks that have not connected yet.
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
        self._unauthenticated: set[JsonConnection] = set()
        self.missing = set(range(1, size))

    def open(self) -> None:
        """Start to accept connections in the loop's thread."""
        self._loop.listen(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting connections, and drop those that have not authenticated."""
        self._loop.forget(self._listener)
        for wire in self._unauthenticated:
            self._loop.drop(wire)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # already closed
            return
        if len(self._unauthenticated) > 64 + self._size:
            connection.close()
            return
        enable_keepalive(connection, self._silence_limit)
        wire = JsonConnection(
            connection,
            lambda message: self._authenticate(wire, message),
            lambda why: self._unauthenticated.discard(wire),
            _MAX_HELLO,
        )
        self._unauthenticated.add(wire)
        self._loop.add(wire)

    def _authenticate(self, wire: JsonConnection, message: Any) -> None:
        self._unauthenticated.discard(wire)
        known = isinstance(message, dict) and hmac.compare_digest(str(message.get("token")), str(self._shared["token"]))
        if not known or message.get("rank") not in self.missing:
            self._loop.drop(wire)
            return
        wire.limit = LIMIT
        self.missing.remove(message["rank"])
        self._loop.send(wire, encode({"welcome": self._shared["answer"]}))
        self._on_connect(message["rank"], wire)


def connect(rank: int, shared: dict[str, Any], limit: float, silence_limit: float) -> socket.socket:
    """An authenticated connection to the main process.

    Raises:
        ProcessFailedError: no connection within `limit` seconds; the message has the addresses and the fix.
    """
    end = monotonic() + limit
    addresses, port = shared["addresses"], shared["port"]
    failures = []
    for number, address in enumerate(addresses):
        seconds = (end - monotonic()) / (len(addresses) - number)
        try:
            connection = socket.create_connection((address, port), max(seconds, 0.1))
        except OSError as error:
            failures.append(f"{address}: {error}")
            continue
        try:
            connection.sendall(encode({"token": shared["token"], "rank": rank}))
            answer = _first_line(connection)
            if hmac.compare_digest(str(answer.get("welcome")), str(shared["answer"])):
                enable_keepalive(connection, silence_limit)
                return connection
            failures.append(f"{address}: another program answered")
        except (OSError, ValueError, AttributeError) as error:
            failures.append(f"{address}: no answer ({error})")
        connection.close()
    raise ProcessFailedError(
        f"rank {rank} on {socket.gethostname()} cannot reach the main process on port {port} within {limit:g} s: "
        f"{'; '.join(failures)}. trainkit needs one TCP connection from each process to the main process, in addition to the "
        f"collectives. Allow it in the firewall; to choose the port: export {PORT_VARIABLE}=29501 on the node of rank 0. If "
        "the name in MASTER_ADDR resolves to another host: export MASTER_ADDR=<an address of that node> on all nodes."
    )


def _first_line(connection: socket.socket) -> Any:
    """The first message, read byte by byte so that nothing after it is consumed."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _MAX_HELLO:
            raise ValueError("closed without a message" if not byte else "not a trainkit message")
        line += byte
    return json.loads(line)
