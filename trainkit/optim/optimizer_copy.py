"""Copies of an optimizer: whole ones for checkpoints of sharded state, and tiny ones that measure the size of its state.

`quantizes` tells which optimizers keep that state in 8 or 4 bits, in blocks of each parameter.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.parameter_placement import whole_shape
from trainkit.errors import StateMismatchError
from trainkit.optim.parameter_names import ParameterNames
from trainkit.registry import strategy_infos

__all__ = [
    "StoredOptimizer",
    "bare_copy",
    "count_slots",
    "empty_copy",
    "placeholder_parameter",
    "quantizes",
    "state_bytes",
    "trial_copy",
]


def placeholder_parameter(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of this shape and dtype on the CPU, without values: all its elements are one, in memory of one element."""
    return nn.Parameter(torch.empty((), dtype=dtype).expand(shape), requires_grad=False)


def empty_copy(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class with the same options and groups, and without state; `__init__` is not called."""
    kind = type(optimizer)
    if hasattr(kind, "__del__"):  # It would free what the copy shares with the original.
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})
    copy: Optimizer = object.__new__(kind)
    # A scheduler has replaced `step` by a wrapper for the original.
    vars(copy).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    copy.state = type(optimizer.state)(dict)
    return copy


class StoredOptimizer:
    """A placeholder for an optimizer: of its class, with its options, but with whole parameters and whole state.

    Args:
        original: The user's optimizer.
        placeholders: `id(parameter)` → its placeholder, for each parameter of the groups.

    Attributes:
        optimizer: The optimizer that is saved and loaded; its state is empty.
    """

    def __init__(self, original: Optimizer, placeholders: Mapping[int, nn.Parameter]) -> None:
        self._original = original
        self.placeholders = placeholders
        self.optimizer = empty_copy(original)
        self.optimizer.param_groups = [
            {**group, "params": [placeholders[id(p)] for p in group["params"]]} for group in original.param_groups
        ]

    def names(self, names: Mapping[int, str]) -> ParameterNames:
        """The names of the parameters, by the ids of the placeholders."""
        placeholder_names = ParameterNames()
        for group in self._original.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    placeholder, name = self.placeholders[id(parameter)], names[id(parameter)]
                    placeholder_names[id(placeholder)] = name
                    placeholder_names.parameters[name] = placeholder
        return placeholder_names

    def check(self, described: Any, what: str) -> None:
        """Check that the state can be sharded.

        Raises:
            StateMismatchError: State that is neither one number nor has its parameter's shape, or that belongs to no parameter.
        """
        if not isinstance(described, dict):
            return  # reported elsewhere
        odd = [key for key in ("opaque", "entries", "more") if described.get(key)]
        for name, about in (described.get("state") or {}).items():
            if isinstance(about, dict):
                odd += [f"{name}: {slot}" for key in ("irregular", "lists") for slot in about.get(key) or ()]
        if odd:
            raise StateMismatchError(
                f"{what}: ZeRO cannot shard this state of the optimizer over the processes: {', '.join(odd[:5])}. "
                "Resume with another strategy."
            )

    def copy_options(self) -> None:
        """Copy the loaded options to the user's groups."""
        for ours, theirs in zip(self._original.param_groups, self.optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """The loaded state of a parameter."""
        state: dict[str, Any] = self.optimizer.state.get(self.placeholders[id(parameter)], {})
        return state


# Sizes of the dimensions of a trial parameter: the size of a slot shows which of these dimensions it has.
_PRIMES = (3, 5, 7, 11, 13, 17, 19)
# torchao does not quantize the state of smaller parameters.
_QUANTIZED_FROM_NUMEL = 4096


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """A copy of the optimizer, of the same class with the same groups, without state and hooks."""
    copy = empty_copy(optimizer)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(copy, name, OrderedDict())  # the user's hooks run once per step, not for each part of it
    return copy


def trial_copy(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """A copy of the optimizer, without state and hooks, that steps these parameters with the options of a group."""
    copy = bare_copy(optimizer)
    copy.param_groups = [{**group, "params": parameters}]
    if isinstance(copy, torch.optim.Adagrad):  # It creates its state in the constructor.
        for parameter in parameters:
            copy.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.ones_like(parameter)}
    return copy


def count_slots(optimizer: Optimizer) -> int:
    """Number of tensors of a parameter's size in the state of each parameter, for float32 parameters."""
    device = optimizer.param_groups[0]["params"][0].device
    if device.type == "meta" or _on_host(optimizer):
        device = torch.device("cpu")
    counts = [0]
    for group in optimizer.param_groups:
        for dims in {max(len(whole_shape(parameter)), 1) for parameter in group["params"]}:
            shape = _PRIMES[:dims]
            slots = _trial(optimizer, group, shape, torch.float32, device)
            counts.append(sum(slot.ndim > 0 and slot.numel() == math.prod(shape) for slot in slots))
    return max(counts)


def _on_host(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps on the CPU only."""
    return any(type(optimizer).__name__ in info.host_optimizers for info in strategy_infos())


def state_bytes(optimizer: Optimizer) -> dict[int, int]:
    """`id(parameter)` → bytes of its optimizer state. Nothing of the size of the parameters is allocated."""
    block = _block_size(optimizer)
    if block is not None:
        return _bytes_in_blocks(optimizer, math.lcm(_QUANTIZED_FROM_NUMEL, block))
    sizes: dict[int, int] = {}
    trials: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = whole_shape(parameter)
            key = number, len(shape), parameter.dtype
            if key not in trials:
                trials[key] = _trial(optimizer, group, _PRIMES[: len(shape)], parameter.dtype, "cpu")
            sizes[id(parameter)] = sum(_scale_numel(slot, shape) * slot.element_size() for slot in trials[key])
    return sizes


def quantizes(kind: type[Any]) -> bool:
    """Whether an optimizer of this class quantizes blocks of its state, by its package."""
    return kind.__module__.startswith("torchao.") or (kind.__module__.startswith("bitsandbytes.") and "8bit" in kind.__name__)


def _block_size(optimizer: Optimizer) -> int | None:
    """Number of elements of a block of the state, if the optimizer quantizes it in blocks, as those of torchao do."""
    size = getattr(optimizer, "block_size", None)
    return size if isinstance(size, int) else None


def _bytes_in_blocks(optimizer: Optimizer, period: int) -> dict[int, int]:
    """`state_bytes` of state in blocks: that of a large parameter grows by the same amount with each `period` of elements.

    Whether it is quantized depends on whether the parameter is large, and on the rest of its last block.
    """
    trials: dict[tuple[int, int, torch.dtype], int] = {}

    def measure(number: int, group: dict[str, Any], elements: int, dtype: torch.dtype) -> int:
        key = number, elements, dtype
        if key not in trials:
            trials[key] = sum(map(_count_bytes, _trial(optimizer, group, (elements,), dtype, "cpu")))
        return trials[key]

    sizes = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            elements = whole_shape(parameter).numel()
            periods = max(elements // period - 1, 0)
            small = elements - periods * period
            size = measure(number, group, small, parameter.dtype)
            if periods:
                size += periods * (measure(number, group, small + period, parameter.dtype) - size)
            sizes[id(parameter)] = size
    return sizes


def _count_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a quantized one those of its inner tensors."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    return tensor.nbytes if inner is None else sum(_count_bytes(getattr(tensor, name)) for name in inner()[0])


def _trial(
    optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """The state of a parameter with this shape after a step."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    eager = nullcontext() if _block_size(optimizer) is None else torch.compiler.set_stance("force_eager")  # torchao compiles
    with torch.random.fork_rng(devices=[]), torch.device(device), eager:  # regardless of the default device
        trial = trial_copy(optimizer, group, [parameter])
        trial.step()
    return [value for value in trial.state[parameter].values() if isinstance(value, Tensor)]


def _scale_numel(slot: Tensor, shape: torch.Size) -> int:
    """Number of elements of a trial's slot for a parameter with this shape."""
    if slot.ndim == 0:
        return 1
    return math.prod(size for size, prime in zip(shape, _PRIMES, strict=False) if slot.numel() % prime == 0)
