"""DeepSpeed's engine of stage 3 where nothing is learnt."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.strategies.zero.aio import checked
from trainkit.strategies.zero.deepspeed_api import Session, quiet

__all__ = ["BareEngine"]


class BareEngine:
    """It gathers parameters for forwards.

    Args:
        session: DeepSpeed.
        module: what is called; its parameters are divided.
        config: DeepSpeed's.
    """

    def __init__(self, session: Session, module: nn.Module, config: dict[str, Any]) -> None:
        with quiet(), checked():
            self._engine, *_ = session.package.initialize(model=module, config=config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._engine(*args, **kwargs)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module."""
        with quiet():
            self._engine.destroy()
