"""Checks of the backend for `torch.compile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainkit.errors import ConfigurationError, UnsupportedArgumentError, nearest

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = ["known_backend", "refuse_compiled"]


def known_backend(backend: Any) -> str:
    """The name of a backend of `torch.compile`; a `ConfigurationError` if torch does not know it."""
    name, known = str(backend).lower(), torch._dynamo.list_backends(exclude_tags=None)
    if name not in known:
        raise ConfigurationError(f"dynamo_backend={backend!r}: expected one of {', '.join(known)}.{nearest(name, known)}")
    return name


def refuse_compiled(backend: str, strategy: Strategy) -> None:
    """Raise an `UnsupportedArgumentError` if the strategy does not support compiled models."""
    if not strategy.compiles:
        raise UnsupportedArgumentError(
            f"dynamo_backend={backend!r} does not work with {type(strategy).__name__}, whose hooks and tensors do not "
            "support compiled code. Remove dynamo_backend, or use strategy='ddp'."
        )
