"""``Rendezvous``: how the launchers of a job find each other and number their nodes; registered with torch elastic."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from trainkit.console import notice
from trainkit.distributed.stores import connected
from trainkit.errors import ConfigurationError
from trainkit.launch.place import is_local

__all__ = ["BACKEND", "Rendezvous"]

BACKEND = "trainkit"
_LOOPBACK = "127.0.0.1"
_ANSWER = 15.0  # seconds: timeout of the store's operations
_HEARTBEAT = 5  # seconds between two heartbeats at torch's rendezvous; a node that misses three is gone
_LAST_CALL = 30.0  # seconds that the smallest number of nodes waits for more
_POLL = 0.5  # seconds
_LEAVING = 3.0  # seconds for which the node that hosts the store lets the others learn that the job is over


class Rendezvous(RendezvousHandler):
    """torch's dynamic rendezvous with the order of nodes that the user gave and one number of restarts for all nodes.

    The store of the launchers lives as long as they do. The workers of each start get a new one, on the first of the nodes. A
    single node needs no rendezvous; it hosts both stores on the loopback interface.

    Args:
        nodes: the smallest and the largest number.
        first: the address of the node that hosts the store, and the port; of a single node the port of the workers, 0 for any.
        number: of this node; ``None``: any.
        patience: seconds to wait for the other nodes.
        before: called before each start; what it raises ends the job.

    Attributes:
        where: the launchers' store is, as "host:port".
        restarts: how many times the workers were restarted.
        needed: the job has not ended without this node.

    Raises:
        ConfigurationError: the port is in use, or nothing answers there in that time.
    """

    def __init__(
        self, nodes: tuple[int, int], first: tuple[str, int], number: int | None, patience: float, before: Callable[[], None]
    ) -> None:
        self.restarts, self.needed = -1, True
        self._inner: DynamicRendezvousHandler | None = None
        self._workers: TCPStore | None = None
        self._round: Store | None = None
        self._size, self._before = 1, before
        self._nodes, self._first, self._number, self._patience = nodes, first, number, patience
        if nodes[1] > 1:
            self._run, self.where = f"trainkit-{first[1]}", f"{first[0]}:{first[1]}"
            self._connect(patience)
        else:
            self._run, self._store = uuid.uuid4().hex, _loopback_store(0)
            self.where = f"{_LOOPBACK}:{self._store.port}"

    def _connect(self, patience: float) -> None:
        host, port = self._first
        options: dict[str, Any] = {} if self._number is None else {"is_host": self._number == 0}
        params = RendezvousParameters(
            "c10d", self.where, self._run, *self._nodes, read_timeout=max(1, int(patience)), **options
        )
        try:
            backend, store = connected(lambda: create_backend(params), port, patience + _ANSWER)
        except RendezvousConnectionError as error:
            cause = str(error.__cause__).partition("\n")[0]
            if self._number == 0:
                raise ConfigurationError(
                    f"port {port} of this machine cannot be used: {cause}. Choose another, on all machines: --master-port PORT"
                ) from error
            raise ConfigurationError(
                f"nobody answers at {self.where} within {patience:.0f} s ({cause}). Start the machine with --node-rank 0 "
                "there, give all the same --master-addr and --master-port, and let no firewall be between."
            ) from error
        except TimeoutError as error:
            raise ConfigurationError(
                f"what answers at {self.where} is not an agent of this job. Choose another, on all machines: --master-port PORT"
            ) from error
        store.set_timeout(timedelta(seconds=_ANSWER))
        with socket.create_connection((host, port)) as probe:
            mine = str(probe.getsockname()[0])
        self._address = host if self._number == 0 or is_local(mine) else mine
        limits = RendezvousTimeout(timedelta(seconds=self._patience), timedelta(seconds=min(self._patience, _LAST_CALL)))
        self._inner = DynamicRendezvousHandler.from_backend(
            self._run, store, backend, *self._nodes, self._address, limits, keep_alive_interval=_HEARTBEAT
        )

    def next_rendezvous(self) -> RendezvousInfo:
        self._before()
        self._workers = None  # the port is free again
        if self._inner is None:
            self.restarts += 1
            self._workers = _loopback_store(self._first[1])
            place = RendezvousStoreInfo(_LOOPBACK, self._workers.port)
            return RendezvousInfo(PrefixStore(f"start{self.restarts}", self._store), 0, 1, place)
        met = self._met()
        store, size = met.store, met.world_size
        try:
            store.set(f"trainkit/{met.rank}", json.dumps([self._number, self.restarts]))
            said: list[list[Any]] = [json.loads(store.get(f"trainkit/{index}")) for index in range(size)]
            _refuse_twice([number for number, _ in said])
            order = sorted(range(size), key=lambda index: (said[index][0] is None, said[index][0], index))
            rank = order.index(met.rank)
            self._workers = TCPStore(self._address, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
            port = self._workers.port if self._workers is not None else None
            place = RendezvousStoreInfo.build(rank, PrefixStore("trainkit", store), self._address, port)
        except (DistError, RuntimeError) as error:
            raise RendezvousConnectionError("lost the connection to the other nodes") from error
        self.restarts = 1 + max(restarts for _, restarts in said)
        self._round, self._size = store, size
        return RendezvousInfo(store, rank, size, place)

    def _met(self) -> RendezvousInfo:
        """Meet the other nodes. If the connection to the first one is lost: when it answers again."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                assert self._inner is not None
                return self._inner.next_rendezvous()
            except RendezvousGracefulExitError as error:  # which torch's launcher does not expect
                self.needed = False
                raise RendezvousClosedError("there are as many nodes as the job takes") from error
            except (DistError, RendezvousConnectionError) as error:
                if self._number == 0 or time.monotonic() > deadline:
                    raise RendezvousConnectionError("lost the connection to the other nodes") from error
            notice(f"the connection to the first machine, {self.where}, is lost; waiting for it.")
            time.sleep(_POLL)
            try:
                self._connect(deadline - time.monotonic())
            except ConfigurationError as error:
                raise RendezvousConnectionError(str(error)) from error

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        """Whether another launcher has ended the job, or cannot be reached any more."""
        try:
            return self._inner is not None and bool(self._inner.is_closed())
        except (RendezvousError, DistError, RuntimeError):
            return True

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See ``RendezvousHandler``. 0 if the store cannot be reached: the workers notice that themselves."""
        try:
            return 0 if self._inner is None else int(self._inner.num_nodes_waiting())
        except (RendezvousError, DistError, RuntimeError):
            return 0

    def shutdown(self) -> bool:
        """Tell the other launchers that the job is over, and let them hear it if the store is here; free the port."""
        told = self._inner is None or bool(self._inner.shutdown())
        with contextlib.suppress(DistError, RuntimeError):
            left = self._round.add("trainkit/left", 1) if self._round is not None and told else self._size
            deadline = time.monotonic() + _LEAVING
            while not self._number and left < self._size and time.monotonic() < deadline:
                time.sleep(_POLL / 5)
                left = self._round.add("trainkit/left", 0) if self._round is not None else self._size
        self._workers = None
        return told


def _loopback_store(port: int) -> TCPStore:
    """A store for this machine only."""
    try:
        listening = socket.create_server((_LOOPBACK, port), backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} of this machine cannot be used: {error.strerror}. Choose another: --master-port PORT"
        ) from error
    options: dict[str, Any] = {"timeout": timedelta(seconds=_ANSWER), "use_libuv": os.name != "nt"}
    port = listening.getsockname()[1]
    return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), **options)


def _refuse_twice(numbers: list[int | None]) -> None:
    for number in numbers:
        if number is not None and numbers.count(number) > 1:
            raise ConfigurationError(
                f"{numbers.count(number)} machines were started with --node-rank {number}. Number them 0, 1, …, each once."
            )


def _create(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous that the launcher hands over in ``LaunchConfig.rdzv_configs``."""
    make: Any = params.get("make")
    handler: RendezvousHandler = make()
    return handler


rendezvous_handler_registry.register(BACKEND, _create)
