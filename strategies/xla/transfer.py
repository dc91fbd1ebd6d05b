"""Transfers batches to XLA devices with torch_xla's `MpDeviceLoader`: the next batch during the step of the current one.

`MpDeviceLoader` reads its loader in a thread, as far ahead as its queues allow. But fetching a batch draws from the same
random number generators as the step. So batches are fetched on the main thread, between steps, with their own seed, and the
threads of `MpDeviceLoader` only transfer them.
"""

from __future__ import annotations

import importlib
import math
import queue
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainkit.nested import leaves, map_tensors, move

__all__ = ["BatchSharding", "loaded_ahead", "to_xla"]

_NEVER = 1 << 62  # number of batches after which MpDeviceLoader would sync by itself


class BatchSharding:
    """How the tensors of a batch are sharded over a mesh: along their first dimension. Scalars are not sharded.

    Use it like a `ShardingSpec`, which supports only a fixed number of dimensions.

    Args:
        mesh: the mesh of devices.
        axes: the axes of the mesh over which samples are sharded.

    Attributes:
        parts: number of shards.
    """

    minibatch = False  # each host passes all samples, and the runtime uses those of its own devices

    def __init__(self, mesh: Any, axes: tuple[str, ...]) -> None:
        self._spmd = importlib.import_module("torch_xla.distributed.spmd")
        self.mesh, self._axes = mesh, axes
        self.parts = math.prod(mesh.shape()[axis] for axis in axes)
        self._specs: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return True

    def can_apply(self, tensor: Tensor) -> bool:
        """Whether a tensor is sharded."""
        return tensor.ndim > 0

    def xla_spec(self, tensor: Tensor) -> Any:
        """The sharding of a tensor, as the runtime needs it."""
        spec = self._specs.get(tensor.ndim)
        if spec is None:
            spec = self._specs[tensor.ndim] = self._spmd.ShardingSpec(self.mesh, self.partition(tensor))
        return spec.xla_spec(tensor)

    def partition(self, tensor: Tensor) -> tuple[Any, ...]:
        """The mesh axes of each dimension of a tensor."""
        return (self._axes, *[None] * (tensor.ndim - 1)) if tensor.ndim else ()

    def mark(self, value: Any) -> Any:
        """Shard the tensors of a batch that is already on the device."""
        xla: Any = importlib.import_module("torch_xla")
        for leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.device.type == "xla" and not xla._XLAC._get_xla_sharding_spec(leaf):
                self._spmd.mark_sharding(leaf, self.mesh, self.partition(leaf))
        return value


def to_xla(batch: Any, device: torch.device, sharding: BatchSharding | None) -> Any:
    """Move a batch to the device, sharded over the mesh."""
    tensors = _tensors_on_cpu(batch)
    if tensors:
        xm: Any = importlib.import_module("torch_xla.core.xla_model")
        batch = _with_tensors(batch, xm.send_cpu_data_to_device(tensors, device, sharding))
    if _moves_itself(batch):
        batch = move(batch, device)
    return batch if sharding is None else sharding.mark(batch)


def loaded_ahead(
    items: Iterator[Any],
    load: Callable[[Any, int], Any] | None,
    start: int,
    *,
    device: torch.device,
    sharding: BatchSharding | None,
    before: Callable[[], None],
) -> Iterator[Any]:
    """Yield items on the device, and transfer each during the step of the previous one.

    Args:
        items: batches, or tuples that contain a batch, on the CPU.
        load: `load(item, number)` moves an item to the device, if the user overrides a transfer hook. Items are then not
            transferred ahead.
        start: number of the first item.
        device: the target device.
        sharding: how batches are sharded over several devices.
        before: called before each item, when the step of the previous one is complete.
    """
    if load is not None:
        for number, item in enumerate(_each(items, before), start):
            loaded = load(item, number)
            yield loaded if sharding is None else sharding.mark(loaded)
        return
    feed = _Feed()
    parallel_loader: Any = importlib.import_module("torch_xla.distributed.parallel_loader")
    loader = parallel_loader.MpDeviceLoader(
        feed,
        device,
        batches_per_execution=_NEVER,  # the strategy syncs once per step
        loader_prefetch_size=2,
        device_prefetch_size=1,  # it waits for this number of batches, and then transfers them together
        input_sharding=sharding,
    )
    arrivals = iter(loader)
    waiting: deque[tuple[Any, bool]] = deque()

    def arrived() -> Any:
        item, sent = waiting.popleft()
        item = _with_tensors(item, next(arrivals)) if sent else item
        return to_xla(item, device, sharding) if _moves_itself(item) else item

    try:
        for item in _each(items, before):
            tensors = _tensors_on_cpu(item)
            if tensors:
                feed.put(tensors)
            waiting.append((item, bool(tensors)))
            if len(waiting) > 1:
                yield arrived()
        while waiting:
            yield arrived()
            before()
    finally:
        feed.end()
        loader._parallel_loader.close()


def _each(items: Iterator[Any], before: Callable[[], None]) -> Iterator[Any]:
    while True:
        before()
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


class _Feed:
    """The loader that `MpDeviceLoader` reads: yields what `put` adds, until `end`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[list[Tensor] | None] = queue.SimpleQueue()

    def put(self, tensors: list[Tensor]) -> None:
        self._items.put(tensors)

    def end(self) -> None:
        self._items.put(None)

    def __iter__(self) -> Iterator[list[Tensor]]:
        while (tensors := self._items.get()) is not None:
            yield tensors


def _tensors_on_cpu(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) if tensor.device.type == "cpu" else None)
    return found


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Replace the CPU tensors in a value by others, in order."""
    arrived = iter(tensors)
    return map_tensors(value, lambda tensor: next(arrived) if tensor.device.type == "cpu" else tensor)


def _moves_itself(value: Any) -> bool:
    """Whether a value contains an object that is not a tensor and has a method `to`."""
    return any(not isinstance(leaf, Tensor) and callable(getattr(leaf, "to", None)) for leaf in leaves(value))
