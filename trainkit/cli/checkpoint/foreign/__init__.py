"""Checkpoints of other programs: read them, and convert what they hold."""

from __future__ import annotations

__all__: list[str] = []
