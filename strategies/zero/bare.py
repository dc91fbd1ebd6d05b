"""DeepSpeed's stage 3 engine for runs without an optimizer, such as evaluation and prediction."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.strategies.zero.aio import checked
from trainkit.strategies.zero.deepspeed_api import Session, quiet

__all__ = ["BareEngine"]


class BareEngine:
    """Runs the forward of a module with sharded parameters, which it gathers when they are needed.

    Args:
        session: the DeepSpeed session.
        module: the module to run; its parameters are sharded.
        config: the DeepSpeed configuration.
    """

    def __init__(self, session: Session, module: nn.Module, config: dict[str, Any]) -> None:
        with quiet(), checked():
            self._engine, *_ = session.package.initialize(model=module, config=config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self._engine(*args, **kwargs)

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the module."""
        with quiet():
            self._engine.destroy()
