"""`Rendezvous`: how the launchers of a job find each other and number their nodes; registered with torch elastic.

torch's handler "static" keeps the node numbers of the user, but cannot restart nodes; "c10d" can, but numbers them itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
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
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from trainkit.console import notice
from trainkit.distributed.stores import connect_in_time
from trainkit.distributed.wire import decode
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import is_local

__all__ = ["BACKEND", "NodesChanged", "Rendezvous"]

BACKEND = "trainkit"
_LOOPBACK = "127.0.0.1"
_ANSWER_S = 15.0  # seconds: timeout of the store's operations
_HEARTBEAT_S = 5  # seconds between two heartbeats at torch's rendezvous; a node that misses three is lost
_LAST_CALL_S = 30.0  # seconds to wait for more nodes when the smallest number has joined
_POLL_S = 0.5
_LEAVE_S = 3.0  # seconds that the node that hosts the store waits for the other nodes to learn that the job is over
_LOST = (RendezvousError, RuntimeError)  # torch raises these when the connection to the store is lost.


class NodesChanged(Exception):  # noqa: N818
    """Another node waits to join, so the workers of all nodes must be restarted."""


class Rendezvous(RendezvousHandler):
    """torch's dynamic rendezvous with the node ranks that the user gave and one number of restarts for all nodes.

    The store of the launchers exists as long as they do. The workers of each start get a new store, on the first node. A single
    node hosts both stores on the loopback interface.

    Args:
        nodes: the smallest and the largest number of nodes.
        first: address and port of the node that hosts the store; on a single node the port of the workers, 0 for any.
        node_rank: rank of this node; `None`: any.
        timeout: seconds to wait for the other nodes.

    Attributes:
        where: address of the launchers' store, as "host:port".
        restarts: how many times the workers were restarted.
        needed: the job has not ended without this node.
    """

    def __init__(self, nodes: tuple[int, int], first: tuple[str, int], node_rank: int | None, timeout: float) -> None:
        self.restarts, self.needed = -1, True
        self._inner: DynamicRendezvousHandler | None = None
        self._workers: TCPStore | None = None
        self._round: Store | None = None
        self._size = 1
        self._nodes = nodes
        self._first = first
        self._node_rank = node_rank
        self._timeout = timeout
        if nodes[1] > 1:
            self._run = f"trainkit-{first[1]}"
            self.where = f"{first[0]}:{first[1]}"
        else:
            self._run = uuid.uuid4().hex
            self._store = _loopback_store(0)
            self.where = f"{_LOOPBACK}:{self._store.port}"

    def _connect(self, timeout: float) -> DynamicRendezvousHandler:
        host, port = self._first
        options: dict[str, Any] = {} if self._node_rank is None else {"is_host": self._node_rank == 0}
        options["read_timeout"] = max(1, int(timeout))
        params = RendezvousParameters("c10d", self.where, self._run, *self._nodes, **options)
        try:
            backend, store = connect_in_time(lambda: create_backend(params), port, timeout + _ANSWER_S)
        except RendezvousConnectionError as error:
            cause = str(error.__cause__).partition("\n")[0]
            if self._node_rank == 0:
                raise ConfigurationError(
                    f"cannot use port {port} of this node: {cause}. Choose another port on all nodes: --master-port PORT"
                ) from error
            raise ConfigurationError(
                f"no answer from {self.where} within {timeout:.0f} s ({cause}). Start the node with --node-rank 0 there, use "
                "the same --master-addr and --master-port on all nodes, and open that port in the firewall."
            ) from error
        except TimeoutError as error:
            raise ConfigurationError(
                f"the program that answers at {self.where} is not a launcher of this job. Choose another port on all nodes: "
                "--master-port PORT"
            ) from error
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        with socket.create_connection((host, port)) as probe:
            mine = str(probe.getsockname()[0])
        self._address = host if self._node_rank == 0 or is_local(mine) else mine
        limits = RendezvousTimeout(timedelta(seconds=self._timeout), timedelta(seconds=min(self._timeout, _LAST_CALL_S)))
        inner: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self._run, store, backend, *self._nodes, self._address, limits, keep_alive_interval=_HEARTBEAT_S
        )
        self._inner = inner
        return inner

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler`.

        Raises:
            ConfigurationError: the port is in use, there is no answer in time, or nodes have the same rank.
        """
        self._workers = None  # the port is free again
        if self._nodes[1] == 1:
            self.restarts += 1
            self._workers = _loopback_store(self._first[1])
            place = RendezvousStoreInfo(_LOOPBACK, self._workers.port)
            return RendezvousInfo(PrefixStore(f"start{self.restarts}", self._store), 0, 1, place)
        info = self._join()
        self._round = info.store
        self._size = info.world_size
        try:
            self._round.set(f"trainkit/{info.rank}", json.dumps([self._node_rank, self.restarts]))
            nodes = [self._read_node(self._round.get(f"trainkit/{index}")) for index in range(self._size)]
            _refuse_duplicates([node_rank for node_rank, _ in nodes])
            order = sorted(range(self._size), key=lambda index: (nodes[index][0] is None, nodes[index][0], index))
            rank = order.index(info.rank)
            self._workers = TCPStore(self._address, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
            port = None if self._workers is None else self._workers.port
            place = RendezvousStoreInfo.build(rank, PrefixStore("trainkit", self._round), self._address, port)
        except RuntimeError as error:
            raise self._lost() from error
        self.restarts = 1 + max(restarts for _, restarts in nodes)
        return RendezvousInfo(self._round, rank, self._size, place)

    def _read_node(self, line: bytes) -> tuple[int | None, int]:
        """The node rank and the number of restarts that another launcher has stored; any program can write to the store."""
        try:
            node_rank, restarts = decode(line)
        except (ValueError, TypeError):
            node_rank = restarts = ""
        if not isinstance(node_rank, int | None) or not isinstance(restarts, int):
            raise ConfigurationError(
                f"a program that is not a launcher of this job has written to its store at {self.where}. Choose another port "
                "on all nodes: --master-port PORT"
            )
        return node_rank, restarts

    def _join(self) -> RendezvousInfo:
        """Wait for the other nodes. If the connection to the first node is lost, wait until it answers again."""
        inner, deadline = self._inner or self._connect(self._timeout), time.monotonic() + self._timeout
        while True:
            try:
                return inner.next_rendezvous()
            except RendezvousGracefulExitError as error:  # torch's launcher does not expect this error.
                self.needed = False
                raise RendezvousClosedError("this node is not needed: the job already has all its nodes") from error
            except RendezvousClosedError as error:
                raise RendezvousClosedError(f"another node has ended the job at {self.where}") from error
            except RendezvousTimeoutError as error:
                few = f"fewer than {self._nodes[0]} nodes connected to {self.where} within {self._timeout:.0f} s"
                raise RendezvousTimeoutError(f"{few}. Start all nodes, or set a longer TRAINKIT_JOIN_TIMEOUT") from error
            except (DistError, RendezvousConnectionError) as error:
                if self._node_rank == 0 or time.monotonic() > deadline:
                    raise self._lost() from error
            notice(f"the connection to the first node, {self.where}, is lost; waiting until it answers again.")
            time.sleep(_POLL_S)
            try:
                inner = self._connect(deadline - time.monotonic())
            except ConfigurationError as error:
                raise self._lost() from error

    def _lost(self) -> RendezvousConnectionError:
        return RendezvousConnectionError(f"the connection to the first node, {self.where}, is lost")

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
        except _LOST:
            return True

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See `RendezvousHandler`. 0 if the store cannot be reached, which the workers detect themselves.

        Raises:
            NodesChanged: nodes are waiting.
        """
        with contextlib.suppress(*_LOST):
            if self._inner is not None and self._inner.num_nodes_waiting() > 0:
                raise NodesChanged
        return 0

    def shutdown(self) -> bool:
        """Do nothing: elastic calls this after each start; see `leave`."""
        return True

    def leave(self) -> bool:
        """End the job for all launchers. The host of the store waits until they know. Returns whether this one is connected."""
        self._workers = None
        with contextlib.suppress(*_LOST):
            closed = self._inner is not None and self._inner.shutdown()
            deadline = time.monotonic() + _LEAVE_S
            left = self._round.add("trainkit/left", 1) if closed and self._round is not None else self._size
            while not self._node_rank and left < self._size and time.monotonic() < deadline:
                time.sleep(_POLL_S / 5)
                left = self._round.add("trainkit/left", 0) if self._round is not None else self._size
        return self._inner is not None or self._nodes[1] == 1


def _loopback_store(port: int) -> TCPStore:
    """A store for this node only."""
    try:
        listening = socket.create_server((_LOOPBACK, port), backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"cannot use port {port} of this node: {error.strerror}. Choose another: --master-port PORT"
        ) from error
    options: dict[str, Any] = {"timeout": timedelta(seconds=_ANSWER_S), "use_libuv": os.name != "nt"}
    port = listening.getsockname()[1]
    return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), **options)


def _refuse_duplicates(node_ranks: list[int | None]) -> None:
    for rank in node_ranks:
        if rank is not None and (count := node_ranks.count(rank)) > 1:
            raise ConfigurationError(f"{count} nodes were started with --node-rank {rank}. Use each of 0, 1, … once.")


# LaunchConfig.rdzv_configs has the handler.
rendezvous_handler_registry.register(BACKEND, lambda params: params.get("handler"))
