"""The input of a memory estimate: a module's parameters without values, and the optimizer state for them."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.parameter_placement import whole_shape
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.nested import rebuild
from trainkit.optim.optimizer_copy import count_slots, state_bytes
from trainkit.precision import Precision
from trainkit.state.pretrained import has_adapters
from trainkit.strategy import Contents, Weight

__all__ = ["built_placeholder", "contents_of", "parse_bytes", "placeholder_of"]


def placeholder_of(module: nn.Module, device: torch.device | str = "meta") -> nn.Module:
    """A copy of a module with parameters and buffers on the meta device: shapes without values.

    Submodules are copied, and attributes that are tensors or containers, so that changes to them do not affect the module;
    other attributes are shared. What is bound to a module is bound to its copy: methods, and a `forward` that replaces the
    one of the class, such as that of activation checkpointing.

    Args:
        module: The module.
        device: Another device, under a `FakeTensorMode`.
    """
    made: dict[int, Any] = {}

    def tensor(original: Any) -> Any:
        if original is None or id(original) in made:
            return made.get(id(original))
        empty = torch.empty(whole_shape(original), dtype=original.dtype, device=device)
        made[id(original)] = nn.Parameter(empty, original.requires_grad) if isinstance(original, nn.Parameter) else empty
        return made[id(original)]

    def attribute(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor(value)
        if isinstance(value, nn.Module):
            return part(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, part(value.__self__))
        if type(value) in (set, deque):
            return value.copy()
        return rebuild(value, attribute) if type(value) in (list, tuple, dict, OrderedDict, defaultdict) else value

    def part(module: nn.Module | None) -> Any:
        if module is None or id(module) in made:
            return made.get(id(module))
        if "_orig_mod" in module._modules:  # torch.compile(module) made it; its forward is bound to the original
            return part(module._modules["_orig_mod"])
        copy = made[id(module)] = object.__new__(type(module))
        vars(copy).update((name, attribute(value)) for name, value in vars(module).items())
        vars(copy).pop("_compiled_call_impl", None)  # module.compile() made it, bound to the original
        vars(copy)["_parameters"] = {name: tensor(value) for name, value in module._parameters.items()}
        vars(copy)["_buffers"] = {name: tensor(value) for name, value in module._buffers.items()}
        vars(copy)["_modules"] = {name: part(child) for name, child in module._modules.items()}
        return copy

    placeholder: nn.Module = part(module)
    known = {id(one): one for one in made.values()} | made  # deepcopy copies none of these, but takes the placeholder
    for replaced in [vars(one) for one in made.values() if isinstance(one, nn.Module) and "forward" in vars(one)]:
        replaced["forward"] = deepcopy(replaced["forward"], known)
    vars(placeholder)["_placeholders"] = made  # id of the original → placeholder
    return placeholder


def built_placeholder(module: TrainModule, precision: Precision, trainer: Any) -> TrainModule:
    """`placeholder_of` a module, on which `configure_model` has run if it has not on the module.

    Args:
        module: The module.
        precision: The precision of the run.
        trainer: What the placeholder sees as its trainer.
    """
    placeholder: Any = placeholder_of(module)
    placeholder._trainer = trainer
    if is_overridden(module, "configure_model", TrainModule) and not vars(module).get("_built", False):
        with torch.device("meta"), precision.init_context():
            placeholder.configure_model()
    return placeholder  # type: ignore[no-any-return]


def contents_of(modules: Iterable[nn.Module], optimizers: Sequence[Optimizer], window: int) -> Contents:
    """The parameters, buffers and optimizer state of a run.

    Args:
        modules: The modules in the precision of the run.
        optimizers: The optimizers of their parameters.
        window: Micro-batches per optimizer step.

    Raises:
        OptimizerError: A step of an optimizer with tiny parameters fails, so that the size of its state is unknown.
    """
    together = nn.ModuleList(modules)  # A ModuleList lists each parameter and buffer once.
    state: dict[int, int] = {}
    slots = 0
    for optimizer in optimizers:
        try:
            state |= state_bytes(optimizer)
            slots = max(slots, count_slots(optimizer))
        except Exception as error:
            raise OptimizerError(
                f"The size of the state of {type(optimizer).__name__} is unknown: a step with tiny parameters on the CPU "
                f"raised {type(error).__name__}: {error}. Plan with an optimizer that has the same amount of state."
            ) from error
    weights = tuple(
        Weight(whole_shape(p).numel(), p.element_size(), p.requires_grad, state.get(id(p), 0) if p.requires_grad else 0)
        for p in together.parameters()
    )
    buffers = list(together.buffers())
    not_stored = {id(part._buffers[name]) for part in together.modules() for name in part._non_persistent_buffers_set}
    return Contents(
        weights,
        flat_slots=slots,
        buffers=sum(b.nbytes for b in buffers),
        stored_buffers=sum(b.nbytes for b in buffers if id(b) not in not_stored),
        optimizers=tuple(optimizers),
        window=window,
        stored_frozen=not any(has_adapters(module) for module in together),
        modules=tuple(together),
    )


def parse_bytes(text: str) -> int:
    """Bytes of `"80G"`, `"512GiB"`, `"1.5T"` or a plain number; the units are powers of 1024.

    Raises:
        ConfigurationError: Another text.
    """
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:E\+?\d{1,2})?)([KMGT]?)I?B?", text.strip().upper().replace(" ", ""))
    size = 0 if match is None else int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))
    if not size:
        raise ConfigurationError(f"expected an amount of memory such as 80G or 512GiB, got {text!r}.")
    return size
