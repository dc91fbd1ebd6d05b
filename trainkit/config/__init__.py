"""Where and how a script runs, as a file, the flags of ``trainkit launch`` and the environment of the processes say it."""

from __future__ import annotations

__all__: list[str] = []
