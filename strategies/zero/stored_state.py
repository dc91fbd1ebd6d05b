"""Masters and optimizer state under ZeRO, as a checkpoint holds them: whole tensors by parameter, and back into the parts.

A parameter's elements lie flat, one range of them with each process. :class:`Spread` knows the ranges and this process's part;
gathering sends the parts to the process that writes them, and loading takes each process's range out of a whole tensor, with
nothing sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.errors import StateMismatchError
from trainkit.optim.stored_optimizer import StoredOptimizer, placeholder_parameter
from trainkit.strategies.zero.engine import Engine
from trainkit.strategies.zero.partitions import is_sharded
from trainkit.strategies.zero.swap import Part, partition
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["Spread", "load_optimizer", "load_weights", "stored_optimizer", "stored_weights", "working_weights"]

Ranges = list[tuple[int, int]]


class Spread:
    """A tensor whose elements are with several processes, each a range of them.

    Args:
        shape: of the whole.
        dtype: of its elements.
        ranges: by rank, from and to; (0, 0) for one that has none.
        part: this process's elements, as many as its range has; asked for when they are needed.
        device: that tensors travel on.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, ranges: Ranges, part: Callable[[], Part], device: torch.device
    ) -> None:
        self.shape, self.dtype, self.ranges, self.part, self._device = shape, dtype, ranges, part, device

    def sharded_tensor(self) -> ShardedTensor:
        """As a checkpoint takes it."""
        return ShardedTensor(self.shape, self.dtype, self.collect)

    @torch.no_grad()
    def collect(self, owner: int | None) -> Tensor | None:
        """The whole, on the process of rank ``owner`` or on all; collective."""
        if len(self.ranges) == 1:
            return self.part().read().view(self.shape)
        if owner is None:
            whole = self.collect(0)
            if whole is None:
                whole = torch.empty(self.shape, dtype=self.dtype, device=self._device)
            dist.broadcast(whole, 0)
            return whole
        rank = dist.get_rank()
        start, end = self.ranges[rank]
        if rank != owner:
            if start < end:
                dist.send(self.part().read().to(self._device).contiguous(), owner)
            return None
        whole = torch.empty(self.shape.numel(), dtype=self.dtype, device=self._device)
        for other, (first, last) in enumerate(self.ranges):
            if first >= last:
                continue
            if other == rank:
                whole[first:last].copy_(self.part().read())
            else:
                dist.recv(whole[first:last], other)
        return whole.view(self.shape)

    @torch.no_grad()
    def load(self, whole: Tensor) -> None:
        """Take this process's part out of a whole."""
        start, end = self.ranges[dist.get_rank() if len(self.ranges) > 1 else 0]
        if start < end:
            self.part().write(whole.reshape(-1)[start:end])


# ----------------------------------------------------------------------------------------------- where the parts are


def _positions(engine: Engine) -> Iterator[tuple[Any, int, Ranges, int, int]]:
    """For each parameter: its flat tensor's number, the ranges of all, and from where to where this process's is in it."""
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


def _masters(engine: Engine, device: torch.device) -> Iterator[tuple[Any, Spread]]:
    """Each parameter of an engine with where its masters are."""
    dtype = engine.flats[0].dtype
    for parameter, number, ranges, first, last in _positions(engine):
        yield parameter, Spread(_shape(parameter), dtype, ranges, partial(engine.part, number, first, last), device)


def _frozen(parameter: Any, device: torch.device) -> Spread:
    """A parameter of stage 3 that no optimizer has: what is used is all there is."""
    size, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    count, rank = parameter.ds_zero_partition_world_size, parameter.ds_zero_partition_rank
    ranges = [(min(r * size, total), min((r + 1) * size, total)) for r in range(count)]
    start, end = ranges[rank]
    return Spread(_shape(parameter), parameter.dtype, ranges, partial(partition, parameter, end - start), device)


# ------------------------------------------------------------------------------------------------------------ weights


def stored_weights(module: nn.Module, engines: list[Engine], device: torch.device) -> dict[int, Tensor]:
    """``id(parameter)`` → its master, or where there is none what is divided."""
    own = {id(parameter): parameter for parameter in module.parameters()}
    found: dict[int, Tensor] = {}
    for engine in engines:
        for parameter, spread in _masters(engine, device):
            if id(parameter) in own and (engine.stage == 3 or parameter.dtype != spread.dtype):
                found[id(parameter)] = spread.sharded_tensor()
    for key, parameter in own.items():
        if key not in found and is_sharded(parameter):
            found[key] = _frozen(parameter, device).sharded_tensor()
    return found


def working_weights(module: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """``id(parameter)`` → what is divided, in the dtype in which it is used."""
    return {id(p): _frozen(p, device).sharded_tensor() for p in module.parameters() if is_sharded(p)}


@torch.no_grad()
def load_weights(values: Mapping[nn.Parameter, Tensor], engines: list[Engine], device: torch.device) -> None:
    """Give masters and working copies their values; each process has the whole ones. Parameters that have no placeholders are
    loaded already, and masters that are copies of them follow.
    """
    for engine in engines:
        if engine.stage < 3 and engine.parameters[0].dtype == engine.flats[0].dtype:
            engine.zero.refresh_fp32_params()
        for parameter, spread in _masters(engine, device):
            if parameter in values:
                spread.load(values[parameter])
    for parameter, value in values.items():
        if is_sharded(parameter):
            _frozen(parameter, device).load(value)
        if parameter.shape == value.shape:  # whole here
            parameter.data.copy_(value)


# ----------------------------------------------------------------------------------------------------- optimizer state


def stored_optimizer(engine: Engine, device: torch.device) -> StoredOptimizer:
    """The optimizer with whole state, which is gathered when it is written."""
    flats = engine.flats
    stored = StoredOptimizer(
        engine.shadow.optimizer,
        {
            id(p): placeholder_parameter(_shape(p), flats[0].dtype)
            for group in engine.shadow.optimizer.param_groups
            for p in group["params"]
        },
    )
    state = engine.shadow.inner.state
    for parameter, number, ranges, first, last in _positions(engine):
        slots: dict[str, Any] = {}
        for slot, value in state.get(flats[number], {}).items():
            if isinstance(value, Tensor) and value.numel() == flats[number].numel() and value.ndim:  # 0 on a disk
                part = partial(engine.part, number, first, last, slot)
                slots[slot] = Spread(_shape(parameter), value.dtype, ranges, part, device).sharded_tensor()
            else:  # as torch has it
                slots[slot] = torch.tensor(float(value)) if slot == "step" and isinstance(value, int) else value
        if slots:
            stored.optimizer.state[stored.placeholders[id(parameter)]] = slots
    return stored


@torch.no_grad()
def load_optimizer(engine: Engine, stored: StoredOptimizer) -> None:
    """Put whole state into the parts.

    Raises:
        StateMismatchError: parameters that share a part have different counters.
    """
    stored.take_options()
    flats, state = engine.flats, engine.shadow.inner.state
    members: dict[int, list[tuple[dict[str, Any], Ranges, int, int]]] = {}
    for parameter, number, ranges, first, last in _positions(engine):
        members.setdefault(number, []).append((stored.state(parameter), ranges, first, last))
    state.clear()
    for number, parts in members.items():
        if any(slots for slots, *_ in parts):
            with engine.resident(number):
                state[flats[number]] = held = _state_of(flats[number], parts)
                if engine.shadow.counts_in_ints and "step" in held:
                    held["step"] = int(held["step"])
    if engine.stage < 3:
        engine.zero._hp_optimizer_states_linked = False  # so that it links the new tensors
        engine.zero._lazy_init_hp_params_optimizer_state()


def _state_of(flat: Tensor, parts: list[tuple[dict[str, Any], Ranges, int, int]]) -> dict[str, Any]:
    """A partition's state, out of whole tensors: for each parameter its slots, its ranges, and from where to where it is."""
    held: dict[str, Any] = {}
    for slot, example in {slot: value for slots, *_ in parts for slot, value in slots.items()}.items():
        if isinstance(example, Tensor) and example.ndim:
            whole = held[slot] = torch.zeros_like(flat, dtype=example.dtype, requires_grad=False)
            for slots, ranges, first, last in parts:
                if slot in slots and first < last:
                    start = ranges[dist.get_rank()][0]
                    whole.view(-1)[first:last].copy_(slots[slot].reshape(-1)[start : start + last - first])
            continue
        _refuse_differing(slot, [slots[slot] for slots, *_ in parts if slot in slots])
        held[slot] = example.clone() if isinstance(example, Tensor) else example
    return held


def _refuse_differing(slot: str, values: list[Any]) -> None:
    said = {float(value) if isinstance(value, Tensor) else value for value in values}
    if len(said) > 1:
        raise StateMismatchError(
            f"the optimizer's {slot!r} differs from parameter to parameter ({', '.join(map(str, sorted(said, key=str)[:4]))}), "
            "and ZeRO has one for all of a group. Put the parameters into groups by it."
        )
