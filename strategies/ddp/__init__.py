"""`DDPStrategy`: one process per device, gradients averaged by all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.strategies.ddp.ddp_strategy import DDPStrategy

__all__ = ["DDPStrategy"]

__getattr__, __dir__ = lazily(globals(), {"DDPStrategy": "ddp_strategy"})
