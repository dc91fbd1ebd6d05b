"""Wrap policies of `torch.distributed.fsdp.wrap` → the modules that FSDP shards one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from trainkit.errors import ConfigurationError, UnsupportedArgumentError

__all__ = ["SMALLEST_UNIT", "wrap_of_policy"]

SMALLEST_UNIT = 100_000_000
"""Number of parameters from which torch's `size_based_auto_wrap_policy` makes a module a unit, by default."""


def wrap_of_policy(policy: Any, argument: str) -> Any:
    """The value of `wrap` of `FSDPStrategy` for a wrap policy.

    Args:
        policy: `transformer_auto_wrap_policy`, `size_based_auto_wrap_policy` or `lambda_auto_wrap_policy` of torch, alone or
            in a `functools.partial`; a `ModuleWrapPolicy`; a function with the arguments of these; or classes.
        argument: The name of the user's argument, for messages.

    Raises:
        ConfigurationError: It is none of these.
        UnsupportedArgumentError: A `CustomPolicy`, or an option of a policy that trainkit does not have.
    """
    from torch.distributed.fsdp import wrap

    function = policy.func if isinstance(policy, functools.partial) else policy
    options = dict(policy.keywords) if isinstance(policy, functools.partial) else {}
    if function is wrap.transformer_auto_wrap_policy:
        return _listed(options["transformer_layer_cls"]) if options.get("transformer_layer_cls") else None
    if function is wrap.size_based_auto_wrap_policy:
        more = sorted(options.keys() - {"min_num_params"})
        if more:
            raise UnsupportedArgumentError(
                f"{argument}: {', '.join(more)} of size_based_auto_wrap_policy is not supported. Choose the modules by a "
                "function: FSDPStrategy(wrap=lambda name, module: ...)"
            )
        return int(options.get("min_num_params", SMALLEST_UNIT))
    if isinstance(policy, wrap.CustomPolicy):
        raise UnsupportedArgumentError(
            f"{argument}: CustomPolicy is not supported: its options per module are those of FSDP1. Choose the modules by a "
            f"function: {argument.rstrip('=')}=functools.partial(lambda_auto_wrap_policy, lambda_fn=...)"
        )
    if isinstance(policy, set | frozenset | list | tuple):
        return _listed(policy)
    if isinstance(policy, type) or not callable(policy):
        raise ConfigurationError(
            f"{argument}{policy!r}: expected 'transformer_based_wrap', 'size_based_wrap', 'no_wrap', or a policy of "
            "torch.distributed.fsdp.wrap, such as ModuleWrapPolicy({Block})."
        )
    return _by_function(policy)


def _listed(classes: Any) -> list[Any]:
    """Classes in an order that is equal on all ranks, which that of a set is not."""
    return sorted(classes, key=lambda one: getattr(one, "__qualname__", str(one)))


def _by_function(policy: Callable[..., Any]) -> Callable[[str, nn.Module], bool]:
    def chosen(name: str, module: nn.Module) -> bool:
        """Ask the policy about one module. Containers have no forward to shard around."""
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return False
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return chosen
