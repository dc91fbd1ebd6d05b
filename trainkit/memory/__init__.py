"""The memory estimate: what a run holds per device and on the host, before it starts."""

from __future__ import annotations

__all__: list[str] = []
