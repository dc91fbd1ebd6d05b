"""What a checkpoint holds of models, optimizers, schedulers, metrics and a run: taken from the live objects and put back.

Nothing here knows of files: :mod:`trainkit.checkpoint` writes and reads what these rooms take and put back.
"""

from __future__ import annotations

__all__: list[str] = []
