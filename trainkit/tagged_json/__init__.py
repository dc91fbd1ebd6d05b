"""Values of many types as strict JSON, for checkpoints and for what ranks exchange: never pickle, never code."""

from __future__ import annotations

__all__: list[str] = []
