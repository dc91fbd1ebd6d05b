"""Strategies: one package for each backend.

A strategy uses the core, but not the callbacks, the trainer or its loop. Training on one device needs no class from here; it
uses the base class `trainkit.strategy.Strategy`.
"""

from __future__ import annotations

if __name__ != "trainkit.strategies":
    raise ImportError(
        f"expected this folder to be imported as the package 'trainkit.strategies', got the name {__name__!r}. "
        "Write: from trainkit.strategies import DDPStrategy"
    )

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.strategies.ddp.ddp_strategy import DDPStrategy
    from trainkit.strategies.fsdp.fsdp_strategy import FSDPStrategy
    from trainkit.strategies.xla.xla_strategy import XLAStrategy
    from trainkit.strategies.zero.zero_strategy import ZeROStrategy
    from trainkit.strategy import Strategy

__all__ = ["DDPStrategy", "FSDPStrategy", "Strategy", "XLAStrategy", "ZeROStrategy"]

# The packages, fastest strategy first. `INFO` in each describes its strategy to the registry.
PACKAGES = ("ddp", "fsdp", "zero", "xla")

_FILES = {"DDPStrategy": "ddp", "FSDPStrategy": "fsdp", "Strategy": ".strategy", "XLAStrategy": "xla", "ZeROStrategy": "zero"}

__getattr__, __dir__ = lazily(globals(), _FILES)
