"""`Accelerator`: the verbs of a training loop, for the `Trainer` and for your own training loop."""

from __future__ import annotations

from trainkit.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
