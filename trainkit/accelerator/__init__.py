"""`Accelerator`: the verbs of a training loop, for the `Trainer` and for own loops."""

from __future__ import annotations

from trainkit.accelerator.core import Accelerator

__all__ = ["Accelerator"]
