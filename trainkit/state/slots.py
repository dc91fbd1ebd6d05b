"""The size of an optimizer's state, measured by running one step of a copy of the optimizer with tiny parameters."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.parameter_placement import whole_shape
from trainkit.optim.stored_optimizer import empty_copy
from trainkit.registry import strategy_infos

__all__ = ["bare_copy", "count_slots", "state_bytes"]

# Sizes of the dimensions of a trial parameter: the size of a slot shows which of these dimensions it has.
_PRIMES = (3, 5, 7, 11, 13, 17, 19)
_QUANTIZED_FROM = 4096  # elements; torchao does not quantize the state of smaller parameters


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """A copy of the optimizer, of the same class with the same groups, without state and hooks."""
    copy = empty_copy(optimizer)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(copy, name, OrderedDict())  # the user's hooks run once per step, not for each part of it
    return copy


def count_slots(optimizer: Optimizer) -> int:
    """Number of tensors of a parameter's size in the state of each parameter, for flat float32 parameters."""
    device = optimizer.param_groups[0]["params"][0].device
    if device.type == "meta" or _on_host(optimizer):
        device = torch.device("cpu")
    tried = [_trial(optimizer, group, (3,), torch.float32, device) for group in optimizer.param_groups]
    return max((sum(slot.ndim > 0 for slot in slots) for slots in tried), default=0)


def _on_host(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps on the CPU only."""
    return any(type(optimizer).__name__ in info.host_optimizers for info in strategy_infos())


def state_bytes(optimizer: Optimizer) -> dict[int, int]:
    """`id(parameter)` → bytes of its optimizer state. Nothing of the size of the parameters is allocated."""
    block = _block_size(optimizer)
    if block is not None:
        return _bytes_in_blocks(optimizer, math.lcm(_QUANTIZED_FROM, block))
    found: dict[int, int] = {}
    tried: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = whole_shape(parameter)
            key = number, len(shape), parameter.dtype
            if key not in tried:
                tried[key] = _trial(optimizer, group, _PRIMES[: len(shape)], parameter.dtype, "cpu")
            found[id(parameter)] = sum(_scaled(slot, shape) * slot.element_size() for slot in tried[key])
    return found


def _block_size(optimizer: Optimizer) -> int | None:
    """Number of elements of a block of the state, if the optimizer quantizes it in blocks, as those of torchao do."""
    size = getattr(optimizer, "block_size", None)
    return size if isinstance(size, int) else None


def _bytes_in_blocks(optimizer: Optimizer, period: int) -> dict[int, int]:
    """`state_bytes` of state in blocks: that of a large parameter grows by the same amount with each `period` of elements.

    Whether it is quantized depends on whether the parameter is large, and on the rest of its last block.
    """
    tried: dict[tuple[int, int, torch.dtype], int] = {}

    def measured(number: int, group: dict[str, Any], elements: int, dtype: torch.dtype) -> int:
        key = number, elements, dtype
        if key not in tried:
            tried[key] = sum(map(_stored_bytes, _trial(optimizer, group, (elements,), dtype, "cpu")))
        return tried[key]

    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            elements = whole_shape(parameter).numel()
            periods = max(elements // period - 1, 0)
            small = elements - periods * period
            size = measured(number, group, small, parameter.dtype)
            if periods:
                size += periods * (measured(number, group, small + period, parameter.dtype) - size)
            found[id(parameter)] = size
    return found


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a quantized one those of its inner tensors."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    return tensor.nbytes if inner is None else sum(_stored_bytes(getattr(tensor, name)) for name in inner()[0])


def _trial(
    optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """The state of a parameter with this shape after a step."""
    trial = bare_copy(optimizer)
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    trial.param_groups = [{**group, "params": [parameter]}]
    eager = nullcontext() if _block_size(optimizer) is None else torch.compiler.set_stance("force_eager")  # torchao compiles
    with torch.random.fork_rng(devices=[]), torch.device(device), eager:  # regardless of the default device
        if isinstance(trial, torch.optim.Adagrad):  # creates its state in the constructor
            trial.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.ones_like(parameter)}
        trial.step()
    return [value for value in trial.state[parameter].values() if isinstance(value, Tensor)]


def _scaled(slot: Tensor, shape: torch.Size) -> int:
    """Number of elements of a trial's slot for a parameter with this shape."""
    if slot.ndim == 0:
        return 1
    return math.prod(size for size, prime in zip(shape, _PRIMES, strict=False) if slot.numel() % prime == 0)
