"""Captures the state of models, optimizers, schedulers and a run for a checkpoint, and restores it.

Only `single_file` accesses files here; `trainkit.checkpoint` reads and writes checkpoints.
"""

from __future__ import annotations

from typing import Any

from trainkit.names import absent

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Explain what to use instead of a name that Accelerate has in its `state`."""
    raise absent("trainkit.state", name, __all__)
