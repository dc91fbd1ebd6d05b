"""The device mesh of a run: replicas × shards × ranks of one tensor-parallel group, and which ranks read the same data."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError

__all__ = ["Meshes"]


class Meshes:
    """The mesh of a run. Its dimensions are `"data"`, and `"replicas"` and `"tensor"` if they are greater than 1.

    Args:
        world: the processes.
        device: the device of this process.
        replicas: number of copies of the sharded model.
        tensor_parallel: number of ranks that compute one forward together.
        timeout: of collectives.

    Attributes:
        whole: the mesh with all dimensions.
        shards: the dimensions over which `fully_shard` replicates and shards.
        data_world: the ranks over which data is sharded, seen from this rank.

    Raises:
        ConfigurationError: the sizes do not divide the number of processes.
    """

    def __init__(self, world: World, device: torch.device, replicas: int, tensor_parallel: int, timeout: timedelta) -> None:
        shards, rest = divmod(world.size, replicas * tensor_parallel)
        if rest or not shards:
            raise ConfigurationError(
                f"FSDPStrategy(replicas={replicas}, tensor_parallel={tensor_parallel}) needs a multiple of "
                f"{replicas * tensor_parallel} processes, but this run has {world.size}. Use devices="
                f"{max(1, shards) * replicas * tensor_parallel}, or other sizes."
            )
        sizes = {"replicas": replicas, "data": shards, "tensor": tensor_parallel}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
        self.whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.shards: DeviceMesh = self.whole["replicas", "data"] if replicas > 1 else self.whole["data"]
        self.data_world = world if tensor_parallel == 1 else _data_world(world, tensor_parallel, timeout)


def _data_world(world: World, tensor_parallel: int, timeout: timedelta) -> World:
    """The ranks with the same place in their tensor-parallel groups: each of them reads other data."""
    group: Any = None
    for place in range(tensor_parallel):  # each process creates all groups
        ranks = list(range(place, world.size, tensor_parallel))
        made = dist.new_group(ranks, backend="gloo", timeout=timeout)
        if world.rank in ranks:
            group = made
    return World(
        world.rank // tensor_parallel,
        world.size // tensor_parallel,
        local_rank=world.local_rank // tensor_parallel,
        local_size=max(1, world.local_size // tensor_parallel),
        node=world.node,
        nodes=world.nodes,
        launcher=world.launcher,
        control=group,
        watchdog=world.watchdog,
    )
