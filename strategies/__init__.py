"""Where a run runs: one strategy a file.

Strategies know the core and nothing of callbacks, the trainer or its loop. One device needs nothing from here: the
base class, ``trainkit.strategy.Strategy``, is a working strategy for it.
"""

from __future__ import annotations

if __name__ != "trainkit.strategies":
    raise ImportError(
        f"expected this folder to be imported as the package 'trainkit.strategies', got the name {__name__!r}. "
        "Write: import trainkit.strategies"
    )

__all__: list[str] = []
