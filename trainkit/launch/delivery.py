"""``Delivery``: gives each worker process what it is to do, and takes what came of it, through a connection of their own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

from trainkit.errors import ConfigurationError

__all__ = ["HANDED", "Delivery", "Failed", "Worker"]

# Where the worker finds it, as JSON; for it alone, and not for what it starts.
HANDED = "TRAINKIT_HANDED"

_MET_AT = ("MASTER_ADDR", "MASTER_PORT")
_LAST = 30.0  # seconds that what a worker has said has to arrive when it has ended
_PAUSE = 0.01  # seconds
_BACKLOG = 256


class Failed(NamedTuple):
    """What a worker says of its failure.

    Attributes:
        rank: of the worker.
        where: "loading" what it was given, "calling" the function, or "returning" its result.
        summary: the error in one line.
        follows: it is what the failure of another one looks like from there.
    """

    rank: int
    where: str
    summary: str
    follows: bool


class Delivery:
    """Listens for workers; nobody but this user's processes that know a secret can connect.

    Args:
        work: bytes for each of them.
        settings: JSON that goes before.
        replicas: XLA's runtime starts the processes that do the work: so many, 0 if that is its choice.
        copies: when so many have it, it is forgotten, for it may be large; default: never.

    Raises:
        ConfigurationError: there is no place for the socket.

    Attributes:
        failures: of the workers of the last start, in the order in which they came.
        result: of rank 0; ``None`` if it has sent none.
    """

    def __init__(
        self, work: bytes, settings: dict[str, Any], *, replicas: int | None = None, copies: int | None = None
    ) -> None:
        self.failures: list[Failed] = []
        self.result: bytes | None = None
        self._work, self._settings, self._secret = work, settings, secrets.token_bytes(32)
        self._replicas, self._copies, self._start = replicas, copies, -1
        self._lock = threading.Lock()
        self._closed = False
        try:  # a socket in a folder of this user's alone; on Windows a named pipe
            self._listener = Listener(backlog=_BACKLOG, authkey=self._secret)
        except OSError as error:
            raise ConfigurationError(
                f"notebook_launcher: no socket can be made in {tempfile.gettempdir()}: {error}. Name a folder with a short "
                "path before Python starts: export TMPDIR=/tmp"
            ) from error
        self._serving: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="trainkit-delivery", daemon=True)
        self._accepting.start()

    def variables(self) -> dict[str, str]:
        """The environment variables by which a worker finds it."""
        said = {
            "address": self._listener.address,
            "secret": self._secret.hex(),
            "replicas": self._replicas,
            "met at": {name: os.environ[name] for name in _MET_AT if name in os.environ},  # which the agent sets anew
        }
        return {HANDED: json.dumps(said)}

    def close(self) -> None:
        """Wait for what workers that have ended have said, and listen no more; any number of times."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # a listener is woken by whom it waits for; this one does not even say the secret
            Client(self._listener.address).close()
        self._accepting.join(_LAST)
        self._listener.close()
        deadline = time.monotonic() + _LAST
        for thread in self._serving:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:  # somebody else, or a worker that has ended while it connected
                time.sleep(_PAUSE)
                continue
            if self._closed:
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="trainkit-delivery", daemon=True)
            thread.start()
            self._serving.append(thread)

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            start = int(_heard(connection)["start"])
            with self._lock:
                if start > self._start:  # what came of the start before does not matter any more
                    self._start, self.failures, self.result = start, [], None
            connection.send_bytes(json.dumps(self._settings).encode())
            connection.send_bytes(self._work)
            self._forget()
            said = _heard(connection)
            result = connection.recv_bytes() if said["result"] else None
            with self._lock:
                if start < self._start:
                    return
                if said["failed"] is not None:
                    self.failures.append(Failed(**said["failed"]))
                if result is not None:
                    self.result = result

    def _forget(self) -> None:
        if self._copies is not None:
            with self._lock:
                self._copies -= 1
                self._work = self._work if self._copies > 0 else b""


class Worker:
    """The other end, in a worker.

    Args:
        handed: what the variable :data:`HANDED` says.
        rank: of the worker.
        start: how often the workers were started before.
    """

    def __init__(self, handed: dict[str, Any], rank: int, start: int) -> None:
        self.rank = rank
        self._connection = Client(handed["address"], authkey=bytes.fromhex(handed["secret"]))
        self._say({"start": start})
        self.settings: dict[str, Any] = _heard(self._connection)

    def work(self) -> bytes:
        """What it was given."""
        return self._connection.recv_bytes()

    def failed(self, where: str, summary: str, follows: bool = False) -> None:
        """Say that it fails; the last that it says."""
        with contextlib.suppress(OSError):  # who would hear it may be gone, and what matters is the failure
            self._say({"result": False, "failed": Failed(self.rank, where, summary, follows)._asdict()})
            self._connection.close()

    def done(self, result: bytes | None = None) -> None:
        """Say that it is done, with the result; the last that it says."""
        self._say({"result": result is not None, "failed": None})
        if result is not None:
            self._connection.send_bytes(result)
        self._connection.close()

    def _say(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


def _heard(connection: Connection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message
