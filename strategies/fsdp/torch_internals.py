"""What torch has no public way for: to remove `fully_shard` from a module. For torch 2.9 to 2.13."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule, fully_shard

__all__ = ["allocate", "remove_fully_shard", "without_forward_hooks"]

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_STATES = "__composable_api_state_key"


def _state(unit: nn.Module) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch ≥ 2.13
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers on the meta device memory without values. `to_empty` would also empty all others."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


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
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for unit in units:
        state = _state(unit)
        for table, handle in (
            (unit._forward_pre_hooks, state._pre_forward_hook_handle),
            (unit._forward_hooks, state._post_forward_hook_handle),
        ):
            kept.append((table, dict(table)))
            table.pop(handle.id, None)
    try:
        yield
    finally:
        for table, before in kept:
            table.clear()
            table.update(before)
