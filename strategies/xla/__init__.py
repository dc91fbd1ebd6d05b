"""`XLAStrategy`: TPUs and other XLA devices, through torch_xla."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.strategies.xla.xla_strategy import XLAStrategy

__all__ = ["XLAStrategy"]

__getattr__, __dir__ = lazily(globals(), {"XLAStrategy": "xla_strategy"})
