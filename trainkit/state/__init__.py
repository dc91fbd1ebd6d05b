"""What a checkpoint holds of models, optimizers, schedulers, metrics and a run: taken from the live objects and put back.

Nothing here knows of files: :mod:`trainkit.checkpoint` writes and reads what these rooms take and put back.
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Say what to use to who imports from here what Accelerate has in its ``state``."""
    from trainkit.unsupported import refuse_import

    refuse_import(name)
    raise AttributeError(f"module 'trainkit.state' has no attribute {name!r}")
