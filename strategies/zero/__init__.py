"""`ZeROStrategy`: ZeRO-1/2/3 with CPU and NVMe offload, on DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.strategies.zero.zero_strategy import ZeROStrategy

__all__ = ["ZeROStrategy"]

__getattr__, __dir__ = lazily(globals(), {"ZeROStrategy": "zero_strategy"})
