"""How the agents of a job meet, and where their workers will: one agent by itself, or those of several machines."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from trainkit.console import notice
from trainkit.distributed.stores import connected
from trainkit.errors import ConfigurationError

__all__ = ["Alone", "Meeting"]

_LOOPBACK = "127.0.0.1"
_ANSWER = timedelta(seconds=15)  # within which the store of the agents answers
_HEARTBEAT = 5  # seconds between two signs of life at torch's rendezvous; who misses three no longer takes part
_LAST_CALL = 30.0  # seconds that the smallest number of machines waits for more
_POLL = 0.5  # seconds between two looks at the others
_BEAT = 2.0  # seconds between two signs of life
_SILENT = 60.0  # seconds without one after which a machine is taken to be gone; longer than its workers need to end
_FAREWELL = 3.0  # seconds


class Alone(RendezvousHandler):
    """One agent. Its workers meet at a store of its own, a new one for each start, so that none finds the keys of the last.

    Args:
        run: the name of the job.
        port: of the workers' store; ``None``: a free one.

    Attributes:
        memory: where this agent's store can be reached, as "host:port".
        restarts: how often the workers have been started anew.
    """

    def __init__(self, run: str, port: int | None) -> None:
        self.restarts = -1
        self._run, self._port = run, port
        self._own = _server(_LOOPBACK, 0)
        self._workers: TCPStore | None = None
        self.memory = f"{_LOOPBACK}:{self._own.port}"

    def next_rendezvous(self) -> RendezvousInfo:
        """See ``RendezvousHandler``; there is nobody to wait for."""
        self.restarts += 1
        self._workers = None  # the port is free again
        self._workers = _server(_LOOPBACK, self._port or 0)
        meeting_point = RendezvousStoreInfo(_LOOPBACK, self._workers.port)
        return RendezvousInfo(PrefixStore(f"round{self.restarts}", self._own), 0, 1, meeting_point)

    def get_backend(self) -> str:
        """See ``RendezvousHandler``."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """The workers use the store that the agent keeps for them."""
        return True

    def is_closed(self) -> bool:
        """See ``RendezvousHandler``."""
        return False

    def set_closed(self) -> None:
        """See ``RendezvousHandler``."""

    def num_nodes_waiting(self) -> int:
        """See ``RendezvousHandler``."""
        return 0

    def get_run_id(self) -> str:
        """See ``RendezvousHandler``."""
        return self._run

    def wait_for_all(self) -> None:
        """Wait for the other machines to be done; there are none."""

    def shutdown(self) -> bool:
        """See ``RendezvousHandler``."""
        return True


class Meeting(RendezvousHandler):
    """The agents of several machines: torch's dynamic rendezvous, over a store on the first machine.

    To it this adds the order of the machines that the user has given, a new store for the workers at each start, and the
    number of restarts, the same on all.

    Args:
        run: the name of the job.
        least: machines that are needed.
        most: machines that are taken.
        address: of the machine that keeps the store.
        port: there.
        number: of this machine; ``None``: any.
        patience: how long to wait for the others, in seconds.

    Raises:
        ConfigurationError: the port is in use, or nobody answers there in that time.
    """

    def __init__(
        self, run: str, least: int, most: int, address: str, port: int, *, number: int | None, patience: float
    ) -> None:
        self.restarts = 0
        self.memory = f"{address}:{port}"
        self._number, self._starts = number, 0
        self._round: Any = None  # the store of this start
        self._rank = self._size = 0  # in it
        self._next_beat = 0.0
        self._heard: dict[int, tuple[int | None, float]] = {}  # of each machine the last beat, and when it came
        self._hosting = False
        self._workers: TCPStore | None = None
        self._run, self._machines = run, (least, most)
        self._first, self._patience = (address, port), patience
        self._connect(patience)

    def _connect(self, patience: float) -> None:
        """To the store of the agents."""
        store, self._address = self._store(*self._first, patience)
        join = self._patience
        self._inner = DynamicRendezvousHandler.from_backend(
            self._run,
            store,
            C10dRendezvousBackend(store, self._run),
            *self._machines,
            self._address,
            RendezvousTimeout(join=timedelta(seconds=join), last_call=timedelta(seconds=min(join, _LAST_CALL))),
            keep_alive_interval=_HEARTBEAT,
        )

    def _store(self, address: str, port: int, patience: float) -> tuple[TCPStore, str]:
        """The store of the agents, and the address of this machine for the others."""
        if self._number == 0 or (self._number is None and _is_here(address)):
            try:
                store = _server(None, port)
                self._hosting = True
                return store, address
            except ConfigurationError:
                if self._number == 0:
                    raise  # else another agent of this machine may keep it
        return _client(address, port, patience)

    def next_rendezvous(self) -> RendezvousInfo:
        """See ``RendezvousHandler``."""
        self._workers = None
        met = self._met()
        store, size = met.store, met.world_size
        try:
            store.set(f"trainkit/{met.rank}", json.dumps([self._number, self._starts]))
            said: list[list[Any]] = [json.loads(store.get(f"trainkit/{index}")) for index in range(size)]
            self._refuse_twice([number for number, _ in said])
            order = sorted(range(size), key=lambda index: (said[index][0] is None, said[index][0], index))
            rank = order.index(met.rank)
            if rank == 0:
                self._workers = _server(None, 0)
                store.set("trainkit/workers", json.dumps([self._address, self._workers.port]))
            host, port = json.loads(store.get("trainkit/workers"))
        except (DistError, RuntimeError) as error:
            raise RendezvousConnectionError("lost the connection to the others while they were numbered") from error
        self.restarts = max(starts for _, starts in said)
        self._starts = self.restarts + 1
        self._round, self._rank, self._size = store, rank, size
        self._next_beat, self._heard = 0.0, {}
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo(host, port))

    def _met(self) -> Any:
        """Meet the others. If the connection to the first machine is lost: when it answers again, or has been started anew."""
        deadline = time.monotonic() + self._patience
        while True:
            # torch lets the first machine say only once where it is to be met, and one that comes later would wait for that
            self._inner._bootstrap_store_info = None
            try:
                return self._inner.next_rendezvous()
            except (DistError, RendezvousConnectionError) as error:
                if self._hosting or time.monotonic() > deadline:
                    raise RendezvousConnectionError("lost the connection to the others") from error
            host, port = self._first
            notice(f"the connection to the first machine, {host}:{port}, is lost; waiting for it.")
            time.sleep(_POLL)
            try:
                self._connect(deadline - time.monotonic())
            except ConfigurationError as error:
                raise RendezvousConnectionError(str(error)) from error

    def _refuse_twice(self, numbers: list[int | None]) -> None:
        given = [number for number in numbers if number is not None]
        for number in given:
            if given.count(number) > 1:
                raise ConfigurationError(
                    f"{given.count(number)} machines were started with --node-rank {number}. Number them 0, 1, …, each once."
                )

    def get_backend(self) -> str:
        """See ``RendezvousHandler``."""
        return str(self._inner.get_backend())

    @property
    def use_agent_store(self) -> bool:
        """The workers use the store that the first agent keeps for them."""
        return True

    def is_closed(self) -> bool:
        """Whether another agent has ended the job, or cannot be reached any more."""
        try:
            return bool(self._inner.is_closed())
        except RendezvousError:
            return True

    def set_closed(self) -> None:
        """See ``RendezvousHandler``."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See ``RendezvousHandler``. If the store cannot be reached nobody is: the workers notice it themselves."""
        try:
            self._beat()
            return int(self._inner.num_nodes_waiting())
        except (RendezvousError, DistError, RuntimeError):
            return 0

    def get_run_id(self) -> str:
        """See ``RendezvousHandler``."""
        return str(self._inner.get_run_id())

    def wait_for_all(self) -> None:
        """Wait until the workers of all machines are done, another machine has given up, or one is not heard of any more.

        Where an agent leaves before, what it keeps for the others is gone.
        """
        try:
            done = self._round.add("trainkit/done", 1)
            while done < self._size and not self.is_closed() and not self.num_nodes_waiting() and not self._has_lost_one():
                time.sleep(_POLL)
                done = self._round.add("trainkit/done", 0)
            if done >= self._size:
                time.sleep(2 * _POLL)  # in which the others see it too
        except (DistError, RuntimeError):
            pass  # who keeps the store has left, and does so when all are done

    def _beat(self) -> None:
        """Let the others hear of this agent."""
        if time.monotonic() >= self._next_beat:
            self._round.add(f"trainkit/beat/{self._rank}", 1)
            self._next_beat = time.monotonic() + _BEAT

    def _has_lost_one(self) -> bool:
        now = time.monotonic()
        for rank in range(self._size):
            count = self._round.add(f"trainkit/beat/{rank}", 0)
            if self._heard.get(rank, (None, 0.0))[0] != count:
                self._heard[rank] = count, now
        return any(now - when > _SILENT for rank, (_, when) in self._heard.items() if rank != self._rank)

    def shutdown(self) -> bool:
        """Tell the others that the job has ended; who keeps the store gives them a moment to hear it."""
        told = bool(self._inner.shutdown())
        if self._round is None or not told:
            return told
        try:
            left = self._round.add("trainkit/left", 1)
            deadline = time.monotonic() + _FAREWELL
            while self._hosting and left < self._size and time.monotonic() < deadline:
                time.sleep(_POLL / 5)
                left = self._round.add("trainkit/left", 0)
        except (DistError, RuntimeError):
            return False
        return True


def _server(host: str | None, port: int) -> TCPStore:
    """A store that this process keeps, for all machines or (``host``) for this one only."""
    both = host is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listening = socket.create_server((host or "", port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} of this machine cannot be used: {error.strerror}. Choose another, on all machines: --master-port PORT"
        ) from error
    port = listening.getsockname()[1]
    return TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_ANSWER,
        master_listen_fd=listening.detach(),
        use_libuv=os.name != "nt",
    )


def _client(host: str, port: int, patience: float) -> tuple[TCPStore, str]:
    """A connection to the store of another machine, and the address that this machine has for it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as probe:
                address = str(probe.getsockname()[0])
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigurationError(
                    f"nobody answers at {host}:{port} within {patience:.0f} s ({error}). Start the machine with --node-rank 0 "
                    "there, give all the same --master-addr and --master-port, and let no firewall be between."
                ) from error
            time.sleep(0.5)

    def connect() -> TCPStore:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_ANSWER, use_libuv=os.name != "nt")

    try:
        return connected(connect, port, _ANSWER.total_seconds()), address
    except (DistError, RuntimeError, TimeoutError) as error:
        raise ConfigurationError(
            f"what answers at {host}:{port} is not an agent of this job. Choose another, on all machines: --master-port PORT"
        ) from error


def _is_here(host: str) -> bool:
    """Whether a name or address is one of this machine's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as tried:
            try:
                tried.bind(address)
            except OSError:
                continue
            return True
    return False
