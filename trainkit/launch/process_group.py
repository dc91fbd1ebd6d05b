"""torch's default process group: the user's, or one that connects the processes that a launcher has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainkit.distributed.stores import connected, restarts
from trainkit.errors import ConfigurationError
from trainkit.launch.interface import set_gloo_interface
from trainkit.launch.rank_info import RankInfo, is_local

__all__ = ["alone", "default_group", "make_default_group"]

_CONNECT_TIMEOUT = timedelta(minutes=10)
_LATE = 5.0  # seconds that torch's own message about a timeout may take

_alone: Any = None  # the process group of a process that is the only one

# The store of the groups of this process, and the number of groups so far. The user may destroy a group; the next group must
# not read what it has left in the store.
_store: tuple[tuple[str, int, int, int], Any] | None = None
_groups = 0


def default_group() -> Any:
    """The default process group; `None` if there is none, or only that of `alone`."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if group is _alone else group


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """Create a process group for a single process, for a library that needs one. Runs ignore it."""
    global _alone
    from torch.distributed import HashStore  # not in every build of torch

    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    _alone = dist.group.WORLD
    try:
        yield
    finally:
        if dist.is_initialized() and dist.group.WORLD is _alone:
            dist.destroy_process_group()
        _alone = None


def make_default_group(place: RankInfo, backend: str, timeout: timedelta) -> None:
    """Create the default process group with the other processes.

    Args:
        place: rank, world size, and the address and port of rank 0.
        backend: the backend of the group.
        timeout: the timeout of its collectives.

    Raises:
        ConfigurationError: the processes cannot connect to each other.
    """
    from torch.distributed import PrefixStore, Store  # not in every build of torch

    global _store, _groups
    where = (place.master_addr, place.master_port, place.rank, place.size)
    if _store is None or _store[0] != where:
        _store = where, _connect(place, min(timeout, _CONNECT_TIMEOUT))
    _groups += 1
    store: Store = PrefixStore(f"group{_groups}", _store[1])
    if _launcher_hosts_store() and place.nodes == 1:  # torchrun may keep it over restarts, with addresses of dead processes
        store = PrefixStore(f"start{restarts(os.environ)}", store)
    if not is_local(place.master_addr):
        set_gloo_interface(os.environ, place.master_addr)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)


def _launcher_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(place: RankInfo, timeout: timedelta) -> Any:
    """The store of the processes, after all of them have connected to it."""
    from torch.distributed import TCPStore  # not in every build of torch

    hosted = _launcher_hosts_store()
    server = place.rank == 0 and not hosted

    def connect() -> TCPStore:
        return TCPStore(
            place.master_addr,
            place.master_port,
            world_size=place.size,
            is_master=server,
            timeout=timeout,
            multi_tenant=not hosted,
            use_libuv=os.name != "nt",
        )

    try:
        return connected(connect, place.master_port, timeout.total_seconds() + _LATE)
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{place.master_addr}:{place.master_port}"
        if server and "address already in use" in str(error).lower():
            raise ConfigurationError(
                f"rank 0 cannot listen at {where}: the port is in use. Choose another port for all processes: export "
                "MASTER_PORT=29501"
            ) from error
        raise ConfigurationError(
            f"rank {place.rank} of {place.size} could not connect to all other ranks at {where} within "
            f"{timeout.total_seconds():.0f} s. Start all processes, set MASTER_ADDR and MASTER_PORT to an address and a free "
            f"port of the node of rank 0, and open that port in the firewall. Error of torch: {str(error).splitlines()[0]}"
        ) from error
