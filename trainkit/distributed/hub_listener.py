"""How the processes of a run find the main one: addresses, a door that opens to those who know the word, and what fails."""

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

from trainkit.distributed.wire import LIMIT, Loop, Wire, encode, keep_watch
from trainkit.errors import ProcessFailedError

__all__ = ["PORT", "Door", "connect", "opened"]

PORT = "TRAINKIT_CHANNEL_PORT"  # the variable with the port that the main process listens on; unset: any free one
_STRANGER = 1024  # bytes of a line of somebody who has not said the word yet
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def opened(master_addr: str | None) -> tuple[socket.socket, dict[str, Any]]:
    """A socket that listens, and what the other processes must know to connect to it.

    Raises:
        OSError: the port is taken, or there is no network.
    """
    port = int(os.environ.get(PORT) or 0)
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
        "word": secrets.token_hex(16),
        "answer": secrets.token_hex(16),
    }


def _addresses(master_addr: str | None) -> list[str]:
    """Where this machine may be reached, the likeliest first."""
    found = [master_addr] if master_addr else []
    if master_addr not in _LOOPBACK:
        for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # sends nothing: it only asks which of our addresses would be used
                found.append(probe.getsockname()[0])
        with contextlib.suppress(OSError):
            found += [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
        found.append("127.0.0.1")
    return list(dict.fromkeys(found))


class Door:
    """Where the main process lets the others in: those that say the word, each once, and nobody when all are there.

    Args:
        loop: serves the connections.
        listener: the socket.
        shared: what the others were told.
        size: the number of processes.
        patience: as of :func:`keep_watch`.
        enter: ``enter(rank, wire)`` when one is there; sets what the wire does.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        shared: dict[str, Any],
        size: int,
        patience: float,
        enter: Callable[[int, Wire], None],
    ) -> None:
        self._loop, self._listener, self._shared, self._size = loop, listener, shared, size
        self._patience, self._enter = patience, enter
        self._strangers: set[Wire] = set()
        self.absent = set(range(1, size))

    def open(self) -> None:
        """From now on; in the loop's thread."""
        self._loop.listen(self._listener, self._knocked)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._loop.forget(self._listener)
        for wire in self._strangers:
            self._loop.drop(wire)

    def _knocked(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again
            return
        if len(self._strangers) > 64 + self._size:
            connection.close()
            return
        keep_watch(connection, self._patience)
        wire = Wire(
            connection, lambda message: self._hello(wire, message), lambda why: self._strangers.discard(wire), _STRANGER
        )
        self._strangers.add(wire)
        self._loop.add(wire)

    def _hello(self, wire: Wire, message: Any) -> None:
        self._strangers.discard(wire)
        known = isinstance(message, dict) and hmac.compare_digest(str(message.get("word")), str(self._shared["word"]))
        if not known or message.get("rank") not in self.absent:
            self._loop.drop(wire)
            return
        wire.limit = LIMIT
        self.absent.remove(message["rank"])
        self._loop.send(wire, encode({"welcome": self._shared["answer"]}))
        self._enter(message["rank"], wire)


def connect(rank: int, shared: dict[str, Any], limit: float, patience: float) -> socket.socket:
    """A connection to the main process, which has said welcome.

    Raises:
        ProcessFailedError: it cannot be reached within ``limit`` seconds; says where, and what to do.
    """
    end = monotonic() + limit
    addresses, port = shared["addresses"], shared["port"]
    failures = []
    for number, address in enumerate(addresses):
        share = (end - monotonic()) / (len(addresses) - number)
        try:
            connection = socket.create_connection((address, port), max(share, 0.1))
        except OSError as error:
            failures.append(f"{address}: {error}")
            continue
        try:
            connection.sendall(encode({"word": shared["word"], "rank": rank}))
            answer = _first_line(connection)
            if hmac.compare_digest(str(answer.get("welcome")), str(shared["answer"])):
                keep_watch(connection, patience)
                return connection
            failures.append(f"{address}: somebody else answered")
        except (OSError, ValueError, AttributeError) as error:
            failures.append(f"{address}: no answer ({error})")
        connection.close()
    raise ProcessFailedError(
        f"rank {rank} on {socket.gethostname()} cannot reach the main process on port {port} within {limit:g} s: "
        f"{'; '.join(failures)}. trainkit needs one TCP connection from each process to the main one, beside the collectives. "
        f"Allow it in the firewall; a port of your choice: export {PORT}=29501 on the machine of rank 0. If the name in "
        "MASTER_ADDR leads elsewhere: export MASTER_ADDR=<an address of that machine> everywhere."
    )


def _first_line(connection: socket.socket) -> Any:
    """The first message that comes, read byte by byte, so that nothing after it is taken."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _STRANGER:
            raise ValueError("closed without a word" if not byte else "not one of ours")
        line += byte
    return json.loads(line)
