"""The memory estimate: how much memory a run will need per device and on the host."""

from __future__ import annotations

__all__: list[str] = []
