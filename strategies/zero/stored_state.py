"""Saves master weights and optimizer state under ZeRO as full tensors per parameter, and loads full tensors into the shards.

Each process holds a range of a parameter's flattened elements. `FlatShards` knows the ranges and this process's shard.
Saving sends the shards to the process that writes them. Loading copies each process's range out of a full tensor, without
communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import StateMismatchError
from trainkit.optim.optimizer_copy import StoredOptimizer, placeholder_parameter
from trainkit.strategies.zero.engine import TrainingEngine
from trainkit.strategies.zero.nvme import Shard, partition
from trainkit.strategies.zero.partitions import is_sharded
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = [
    "FlatShards",
    "flat_positions",
    "load_optimizer",
    "load_weights",
    "make_stored_optimizer",
    "make_stored_weights",
    "working_weights",
]

Ranges = list[tuple[int, int]]


class FlatShards:
    """A tensor that is sharded by ranges of its flattened elements.

    Args:
        shape: The shape of the full tensor.
        ranges: Start and end of the range of each rank; equal if a rank has no elements.
        shard: Returns this process's shard, with the elements of its range; called when they are needed.
        device: The device for communication.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, ranges: Ranges, shard: Callable[[], Shard], device: torch.device
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ranges = ranges
        self.shard = shard
        self._device = device

    def make_sharded_tensor(self) -> ShardedTensor:
        """Returns it in the form in which checkpoints save it."""
        return ShardedTensor(self.shape, self.dtype, self.collect)

    @torch.no_grad()
    def collect(self, owner: int | None) -> Tensor | None:
        """Returns the full tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
        if len(self.ranges) == 1:
            return self.shard().read().view(self.shape)
        if owner is None:
            full = self.collect(0)
            if full is None:
                full = torch.empty(self.shape, dtype=self.dtype, device=self._device)
            dist.broadcast(full, 0)
            return full
        rank = dist.get_rank()
        start, end = self.ranges[rank]
        if rank != owner:
            if start < end:
                dist.send(self.shard().read().to(self._device).contiguous(), owner)
            return None
        full = torch.empty(self.shape.numel(), dtype=self.dtype, device=self._device)
        for other, (first, last) in enumerate(self.ranges):
            if first >= last:
                continue
            if other == rank:
                full[first:last].copy_(self.shard().read())
            else:
                dist.recv(full[first:last], other)
        return full.view(self.shape)

    @torch.no_grad()
    def load(self, full: Tensor) -> None:
        """Copy this process's range of a full tensor into its shard."""
        start, end = self.ranges[dist.get_rank() if len(self.ranges) > 1 else 0]
        if start < end:
            self.shard().write(full.reshape(-1)[start:end])


# -------------------------------------------------------------------------------------------- positions of the shards


def flat_positions(engine: TrainingEngine) -> Iterator[tuple[Any, int, Ranges, int, int]]:
    """Yields, per parameter: the number of its flat tensor, the ranges of all ranks, start and end of its shard there."""
    zero = engine.zero
    if engine.stage == 3:
        for group in zero.fp16_groups:
            for parameter in group:
                number, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                count, total = zero._get_param_partition_world_size(parameter), parameter.ds_numel
                ranges = [(min(r * size, total), min((r + 1) * size, total)) for r in range(count)]
                start, end = ranges[zero._get_param_partition_rank(parameter)]
                yield parameter, number, ranges, offset, offset + end - start
        return
    for number, group in enumerate(zero.bit16_groups):
        order, offsets = zero.round_robin_bit16_indices[number], zero.round_robin_bit16_offsets[number]
        size, count = int(zero.partition_size[number]), dist.get_world_size()
        for place, index in enumerate(order):
            parameter, begin = group[index], offsets[place]
            total = parameter.numel()
            ranges = [(_within(r * size - begin, total), _within((r + 1) * size - begin, total)) for r in range(count)]
            start, end = ranges[dist.get_rank()]
            first = begin + start - dist.get_rank() * size if start < end else 0
            yield parameter, number, ranges, first, first + end - start


def _within(value: int, total: int) -> int:
    return min(max(value, 0), total)


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _masters(engine: TrainingEngine, device: torch.device) -> Iterator[tuple[Any, FlatShards]]:
    """Yields each parameter of an engine with its master weights."""
    dtype = engine.flats[0].dtype
    for parameter, number, ranges, first, last in flat_positions(engine):
        yield parameter, FlatShards(_shape(parameter), dtype, ranges, partial(engine.shard, number, first, last), device)


def _working(parameter: Any, device: torch.device) -> FlatShards:
    """The working copy of a parameter in stage 3, which the forward uses. A frozen parameter has no master weights."""
    size, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    count, rank = parameter.ds_zero_partition_world_size, parameter.ds_zero_partition_rank
    ranges = [(min(r * size, total), min((r + 1) * size, total)) for r in range(count)]
    start, end = ranges[rank]
    return FlatShards(_shape(parameter), parameter.dtype, ranges, partial(partition, parameter, end - start), device)


# ------------------------------------------------------------------------------------------------------------ weights


def make_stored_weights(module: nn.Module, engines: list[TrainingEngine], device: torch.device) -> dict[int, Tensor]:
    """`id(parameter)` → its master weights; without master weights, its shards."""
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    weights: dict[int, Tensor] = {}
    for engine in engines:
        for parameter, shards in _masters(engine, device):
            if id(parameter) in parameters and (engine.stage == 3 or parameter.dtype != shards.dtype):
                weights[id(parameter)] = shards.make_sharded_tensor()
    for key, parameter in parameters.items():
        if key not in weights and is_sharded(parameter):
            weights[key] = _working(parameter, device).make_sharded_tensor()
    return weights


def working_weights(module: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """`id(parameter)` → its shards in the dtype of the forward."""
    return {id(p): _working(p, device).make_sharded_tensor() for p in module.parameters() if is_sharded(p)}


@torch.no_grad()
def load_weights(values: Mapping[nn.Parameter, Tensor], engines: list[TrainingEngine], device: torch.device) -> None:
    """Load full tensors, which every process has, into master weights and working copies. Parameters without placeholders are
    already loaded; their master weights are copied from them.
    """
    for engine in engines:
        if engine.stage < 3 and engine.parameters[0].dtype == engine.flats[0].dtype:
            engine.zero.refresh_fp32_params()
        for parameter, shards in _masters(engine, device):
            if parameter in values:
                shards.load(values[parameter])
    for parameter, value in values.items():
        if is_sharded(parameter):
            _working(parameter, device).load(value)
        if parameter.shape == value.shape:  # The parameter is not sharded, or is gathered.
            parameter.data.copy_(value)


# ----------------------------------------------------------------------------------------------------- optimizer state


def make_stored_optimizer(engine: TrainingEngine, optimizer: Optimizer, device: torch.device) -> StoredOptimizer:
    """Returns an optimizer of an engine with full optimizer state, which is gathered when the checkpoint is written."""
    flats = engine.flats
    stored = StoredOptimizer(
        optimizer,
        {id(p): placeholder_parameter(_shape(p), flats[0].dtype) for group in optimizer.param_groups for p in group["params"]},
    )
    state = engine.shadow.inner.state
    for parameter, number, ranges, first, last in _positions_in(engine, stored):
        slots: dict[str, Any] = {}
        for slot, value in state.get(flats[number], {}).items():
            if isinstance(value, Tensor) and value.numel() == flats[number].numel() and value.ndim:  # 0 on NVMe
                shard = partial(engine.shard, number, first, last, slot)
                slots[slot] = FlatShards(_shape(parameter), value.dtype, ranges, shard, device).make_sharded_tensor()
            else:  # The state has PyTorch's form.
                slots[slot] = torch.tensor(float(value)) if slot == "step" and isinstance(value, int) else value
        if slots:
            stored.optimizer.state[stored.placeholders[id(parameter)]] = slots
    return stored


def _positions_in(engine: TrainingEngine, stored: StoredOptimizer) -> Iterator[tuple[Any, int, Ranges, int, int]]:
    """The positions of the parameters of one optimizer."""
    return (one for one in flat_positions(engine) if id(one[0]) in stored.placeholders)


@torch.no_grad()
def load_optimizer(engine: TrainingEngine, stored: StoredOptimizer) -> None:
    """Load full optimizer state into the shards.

    Raises:
        StateMismatchError: Parameters in the same shard have different step counters.
    """
    stored.copy_options()
    flats, state = engine.flats, engine.shadow.inner.state
    members: dict[int, list[tuple[dict[str, Any], Ranges, int, int]]] = {}
    for parameter, number, ranges, first, last in _positions_in(engine, stored):
        members.setdefault(number, []).append((stored.state(parameter), ranges, first, last))
    for number, entries in members.items():
        state.pop(flats[number], None)
        if any(slots for slots, *_ in entries):
            with engine.resident(number):
                state[flats[number]] = held = _state_of(flats[number], entries)
                if engine.shadow.counts_in_ints(engine.group_of(number)) and "step" in held:
                    held["step"] = int(held["step"])
    if engine.stage < 3:
        engine.zero._hp_optimizer_states_linked = False  # DeepSpeed then links the new tensors.
        engine.zero._lazy_init_hp_params_optimizer_state()


def _state_of(flat: Tensor, entries: list[tuple[dict[str, Any], Ranges, int, int]]) -> dict[str, Any]:
    """Returns the optimizer state of a flat shard. Entries: full state, ranges, start and end in the shard, per parameter."""
    held: dict[str, Any] = {}
    for slot, example in {slot: value for slots, *_ in entries for slot, value in slots.items()}.items():
        if isinstance(example, Tensor) and example.ndim:
            target = held[slot] = torch.zeros_like(flat, dtype=example.dtype, requires_grad=False)
            for slots, ranges, first, last in entries:
                if slot in slots and first < last:
                    start = ranges[dist.get_rank()][0]
                    target.view(-1)[first:last].copy_(slots[slot].reshape(-1)[start : start + last - first])
            continue
        _refuse_differing(slot, [slots[slot] for slots, *_ in entries if slot in slots])
        held[slot] = example.clone() if isinstance(example, Tensor) else example
    return held


def _refuse_differing(slot: str, values: list[Any]) -> None:
    distinct = {float(value) if isinstance(value, Tensor) else value for value in values}
    if len(distinct) > 1:
        raise StateMismatchError(
            f"the optimizer's {slot!r} differs between parameters ({', '.join(map(str, sorted(distinct, key=str)[:4]))}), but "
            f"ZeRO keeps one value per parameter group. Put parameters with the same {slot!r} into the same group."
        )
