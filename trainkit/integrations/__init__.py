"""What exists for one other package. No other part of trainkit imports it."""

from __future__ import annotations

__all__: list[str] = []
