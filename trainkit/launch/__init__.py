"""Where the processes of a run come from, how they find each other, and how they end."""

from __future__ import annotations

__all__: list[str] = []
