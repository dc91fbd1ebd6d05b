"""`FSDPStrategy`: parameters, gradients and optimizer state sharded with torch's `fully_shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.strategies.fsdp.fsdp_strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]

__getattr__, __dir__ = lazily(globals(), {"FSDPStrategy": "fsdp_strategy"})
