"""What torch has no public way for, such as to remove `fully_shard` from a module. For torch 2.9 to 2.13."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["allocate", "drop_gradients", "has_no_values", "remove_fully_shard", "without_forward_hooks"]

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_STATES = "__composable_api_state_key"


def _state(unit: nn.Module) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch ≥ 2.13
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def allocate(module: nn.Module, device: torch.device) -> list[str]:
    """Give parameters and buffers on the meta device memory. `to_empty` would also empty all others.

    Returns their names without "module.". Until they are filled, they are NaN or the least integer, see `has_no_values`.
    """
    found = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]

    def memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        made, unset = torch.empty_like(tensor, device=device), _unset_value(tensor.dtype)
        return made if unset is None else made.fill_(unset)

    if found:
        with torch.no_grad():
            module._apply(memory)
    return [name.removeprefix("module.") for name in found]


def has_no_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor from `allocate` have never been set, as far as this rank can see."""
    local, unset = tensor.to_local() if isinstance(tensor, DTensor) else tensor, _unset_value(tensor.dtype)
    if unset is None or not local.numel():
        return False
    first = local.detach().reshape(-1)[0].item()
    return first != first if unset != unset else first == unset


def _unset_value(dtype: torch.dtype) -> float | None:
    """What a tensor without values is filled with; `None`: each value of the dtype is an ordinary one, as of `bool`."""
    if dtype.is_floating_point:
        return math.nan
    return torch.iinfo(dtype).min if dtype.is_signed and not dtype.is_complex else None


def drop_gradients(units: Iterable[nn.Module]) -> None:
    """Drop the gradients that torch has accumulated in another dtype than that of the parameters, and not reduced."""
    for unit in units:
        for group in _groups(_state(unit)):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None


def remove_fully_shard(units: Iterable[nn.Module]) -> None:
    """Remove torch's hooks, class and attributes from modules that `fully_shard` was called with; parameters stay.

    Args:
        units: the modules, each passed to `fully_shard` by itself.
    """
    for unit in units:
        state = _state(unit)
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in _groups(state):
            handles = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
            for handle in [handle for table in handles for handle in table.values()]:
                handle.remove()
            for parameter in group.fsdp_params:
                parameter._post_load_hook_handle.remove()
        kind = type(unit)
        if issubclass(kind, FSDPModule):
            unit.__class__ = kind.__mro__[2]  # [the sharded class, FSDPModule, the user's class, …]
        for part in unit.modules():
            for name in _MARKS:
                vars(part).pop(name, None)
        for name in [name for name in vars(unit) if name.startswith(_STATES)]:
            del vars(unit)[name]
        _composable_state._module_state_mapping.pop(unit, None)


@contextmanager
def without_forward_hooks(units: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the forward of these modules gathers and frees no parameters."""
    kept: list[tuple[dict[int, Any], dict[int, Any], int]] = []
    for unit in units:
        state = _state(unit)
        for table, handle in (
            (unit._forward_pre_hooks, state._pre_forward_hook_handle),
            (unit._forward_hooks, state._post_forward_hook_handle),
        ):
            kept.append((table, dict(table), handle.id))
            table.pop(handle.id, None)
    try:
        yield
    finally:
        for table, before, own in kept:
            now = dict(table)  # the user may have registered or removed hooks
            table.clear()
            table.update({key: hook for key, hook in before.items() if key == own or key in now} | now)
