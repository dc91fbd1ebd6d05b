"""Ranks and collectives (`World`), devices, and the detection of failed ranks."""

from __future__ import annotations

__all__: list[str] = []
