"""Which modules of a model `fully_shard` shards each by itself: the units, whose parameters are gathered together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.console import notice
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.module.blocks import Choice, describe_modules, find_repeated_blocks, select_modules

__all__ = [
    "Slot",
    "Wrap",
    "callable_parts",
    "choose_units",
    "describe_units",
    "find_ignored_parameters",
    "find_sharded_parts",
    "refuse_unshardable",
    "slots",
]

Wrap = Choice | Sequence[Choice] | int | bool | None
"""The type of the argument `wrap`."""

Slot = tuple[nn.Module, str]
"""Where a parameter is: its module, and its name in that module."""


def choose_units(module: nn.Module, wrap: Wrap) -> dict[str, nn.Module]:
    """The units inside a module: dotted name → module. The rest of the module is a unit of its own.

    A module that shares a parameter with the rest of the model is no unit, because a parameter belongs to one unit; nor is one
    without a forward, such as an `nn.ModuleList`. A notice says so if the user has named it.

    Args:
        wrap: See `FSDPStrategy`.

    Raises:
        ConfigurationError: `wrap` is wrong, or matches no module.
    """
    if wrap is False:
        return {}
    if wrap is None or wrap is True:
        chosen = find_repeated_blocks(module)
    elif isinstance(wrap, int):
        chosen = _of_size(module, wrap)
    else:
        chosen = select_modules(module, wrap, "wrap")
    units = {name: unit for name, unit in chosen.items() if _has_forward(unit) and not _shares_parameters(module, unit)}
    left = {name: type(unit).__name__ for name, unit in chosen.items() if name not in units}
    if left and not (wrap is None or wrap is True or isinstance(wrap, int)):
        notice(
            f"wrap: {describe_modules(left)} cannot be sharded by itself: it has no forward or parameters, or shares a "
            "parameter with the rest of the model. Its parameters belong to the unit around it."
        )
    return units


def _of_size(module: nn.Module, minimum: int) -> dict[str, nn.Module]:
    """The smallest modules with at least this number of parameters, each counted in one module."""
    if minimum < 1:
        raise ConfigurationError(f"wrap={minimum}: expected a number of parameters > 0. For example: wrap=10_000_000")
    units: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, part in reversed(list(module.named_modules())):  # submodules before the modules that contain them
        sizes = {id(p): p.numel() for p in part.parameters() if id(p) not in taken}
        if part is not module and sum(sizes.values()) >= minimum and _has_forward(part):
            units[name] = part
            taken |= sizes.keys()
    return dict(reversed(units.items()))


def describe_units(module: nn.Module, units: Mapping[str, nn.Module], roots: Sequence[nn.Module]) -> str:
    """What is sharded of a module, in words: "12 Block (layers.0, layers.1, ..., layers.11), and the root".

    Args:
        module: The user's, before it is sharded: torch then replaces the classes.
        units: The units inside it, by name.
        roots: The module itself, or its submodules that are sharded each by itself.
    """
    inner = {name: type(unit).__name__ for name, unit in units.items() if unit not in roots}
    outer = {name: type(part).__name__ for name, part in module.named_modules() if name and part in roots}
    rest = f"the roots: {describe_modules(outer)}" if outer else "the root"
    return f"{describe_modules(inner)}, and {rest}" if inner else rest


def callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that have a forward and parameters."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from callable_parts(child)
        elif next(child.parameters(), None) is not None:
            yield child


def find_sharded_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that are sharded each by itself under manual optimization."""
    parts = list(callable_parts(module))
    for part in parts:
        if _shares_parameters(module, part):
            raise ModuleError(
                f"{type(part).__name__} shares a parameter with another part of {type(module).__name__}. Under manual "
                "optimization FSDP shards each submodule by itself, and would untie them. Put the modules that share it into "
                "one submodule with a forward, or use strategy='ddp'."
            )
    return parts


def _has_forward(part: nn.Module) -> bool:
    return type(part).forward is not nn.Module.forward and next(part.parameters(), None) is not None


def _shares_parameters(module: nn.Module, unit: nn.Module) -> bool:
    """Whether a parameter of the unit is also used elsewhere in the module."""
    parameters = {id(p) for p in unit.parameters()}
    return any(id(owner._parameters[name]) in parameters for owner, name in slots(module, lambda part: part is unit))


def slots(module: nn.Module, stop: Callable[[nn.Module], bool] = lambda part: False) -> Iterator[Slot]:
    """The places of all parameters of a module, of a tied one each.

    Args:
        stop: Returns whether a submodule and what it contains are skipped.
    """
    seen: set[int] = set()
    pending = [module]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield from ((part, name) for name, p in part._parameters.items() if p is not None)
        pending += [child for child in reversed(list(part.children())) if not stop(child)]


def find_ignored_parameters(module: nn.Module, ignored_modules: Any) -> set[nn.Parameter]:
    """The parameters that stay whole on each rank: those of the modules that the user names, and scalars.

    Raises:
        ConfigurationError: A name matches no module.
    """
    chosen = {} if ignored_modules is None else select_modules(module, ignored_modules, "ignored_modules")
    ignored = {p for part in chosen.values() for p in part.parameters()}
    return ignored | {p for p in module.parameters() if p.ndim == 0}


def refuse_unshardable(named_units: dict[str, nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuse modules that `fully_shard` cannot shard.

    Args:
        named_units: The units and the root, by name.
        ignored: Parameters that are not sharded.
    """
    units = set(named_units.values())
    for name, unit in named_units.items():
        _refuse_integers(name, unit, ignored)
        parameters = [owner._parameters[key] for owner, key in slots(unit, units.__contains__)]
        dtypes = Counter(p.dtype for p in parameters if isinstance(p, Tensor) and p.requires_grad and p not in ignored)
        if len(dtypes) > 1:
            shown = ", ".join(f"{count} of {str(dtype).removeprefix('torch.')}" for dtype, count in dtypes.most_common())
            raise ModuleError(
                f"{name or 'the model'} has trained parameters of several dtypes ({shown}), but torch's fully_shard gathers "
                "the parameters of a unit in one dtype. Convert them: module.float(); or shard the part with the other dtype "
                "by itself: FSDPStrategy(wrap=[…])"
            )
        for path, part in unit.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight not in ignored:
                raise ModuleError(
                    f"{f'{name}.{path}'.strip('.')} is an embedding with sparse gradients, which torch's fully_shard cannot "
                    "reduce. Use sparse=False, or strategy='ddp'."
                )


def _refuse_integers(name: str, unit: nn.Module, ignored: set[nn.Parameter]) -> None:
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch ≥ 2.13
        return
    for path, parameter in unit.named_parameters():
        if not (parameter.is_floating_point() or parameter.is_complex() or parameter in ignored):
            raise ModuleError(
                f"{f'{name}.{path}'.strip('.')} is a parameter of integers, which torch {torch.__version__} cannot shard. "
                "Make it a buffer: register_buffer(name, tensor); or use torch 2.13"
            )
