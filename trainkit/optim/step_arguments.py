"""`StepArguments`: the arguments of a `Trainer` that determine an optimizer step."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["StepArguments"]


class StepArguments(Protocol):
    """What a strategy checks before any process is started; for the meanings see `trainkit.Trainer`."""

    accumulate_grad_batches: int
    global_batch_size: int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    activation_checkpointing: Any
