"""What a plan of memory is made of: a module's parameters without their values, and what its optimizers keep for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.distributed.placement import whole_shape
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.footprint import Contents, Weight
from trainkit.state.configs import has_adapters
from trainkit.state.slots import count_slots, state_bytes

__all__ = ["contents_of", "parse_bytes", "twin_of"]


def twin_of(module: nn.Module) -> nn.Module:
    """A module like this one whose parameters and buffers are on the meta device: shapes, and no values.

    Its parts are its own, so that what is done to its layers is not done to the module's; other attributes are the module's.
    """
    made: dict[int, Any] = {}

    def tensor(given: Any) -> Any:
        if given is None or id(given) in made:
            return made.get(id(given))
        empty = torch.empty(whole_shape(given), dtype=given.dtype, device="meta")
        made[id(given)] = nn.Parameter(empty, given.requires_grad) if isinstance(given, nn.Parameter) else empty
        return made[id(given)]

    def part(given: nn.Module | None) -> Any:
        if given is None or id(given) in made:
            return made.get(id(given))
        twin = made[id(given)] = object.__new__(type(given))
        vars(twin).update(vars(given))
        vars(twin)["_parameters"] = {name: tensor(value) for name, value in given._parameters.items()}
        vars(twin)["_buffers"] = {name: tensor(value) for name, value in given._buffers.items()}
        vars(twin)["_modules"] = {name: part(child) for name, child in given._modules.items()}
        return twin

    twin: nn.Module = part(module)
    vars(twin)["_twins"] = made  # by the id of what is the module's own
    return twin


def contents_of(modules: Iterable[nn.Module], optimizers: Sequence[Optimizer], window: int) -> Contents:
    """What modules and optimizers have to keep.

    Args:
        modules: in the precision of the run.
        optimizers: over their parameters.
        window: micro-batches in an update.

    Raises:
        OptimizerError: a step of an optimizer over tiny parameters fails, so that it is not known what it keeps.
    """
    listed = list(modules)
    state: dict[int, int] = {}
    slots = 0
    for optimizer in optimizers:
        try:
            state |= state_bytes(optimizer)
            slots = max(slots, count_slots(optimizer))
        except Exception as error:
            raise OptimizerError(
                f"it is not known how much {type(optimizer).__name__} keeps for its parameters: a step of it over tiny ones, "
                f"with gradients, on the CPU ended with {type(error).__name__}: {error}. Plan with one that keeps as much."
            ) from error
    own = {id(p): p for module in listed for p in module.parameters()}
    weights = tuple(
        Weight(
            whole_shape(p).numel(),
            p.element_size(),
            p.requires_grad,
            state=state.get(key, 0) if p.requires_grad else 0,
        )
        for key, p in own.items()
    )
    buffers = {id(b): b.nbytes for module in listed for b in module.buffers()}
    passing = {id(part._buffers[name]) for part in _parts(listed) for name in part._non_persistent_buffers_set}
    return Contents(
        weights,
        flat_slots=slots,
        buffers=sum(buffers.values()),
        stored_buffers=sum(size for key, size in buffers.items() if key not in passing),
        optimizers=tuple(optimizers),
        window=window,
        stored_frozen=not any(has_adapters(module) for module in listed),
    )


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [part for module in modules for part in module.modules()]


def parse_bytes(text: str) -> int:
    """Bytes of ``"80G"``, ``"512GiB"``, ``"1.5T"`` or a plain number; the units are powers of 1024.

    Raises:
        ConfigurationError: it is none of these.
    """
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    bare = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (bare[:-1], bare[-1]) if bare[-1:] in ("K", "M", "G", "T") else (bare, "")
    try:
        size = float(number) * units[unit]
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ConfigurationError(f"expected an amount of memory such as 80G or 512GiB, got {text!r}.")
    return int(size)
