"""Names of Lightning: scripts import them from `trainkit.utilities` and its modules."""

from __future__ import annotations

__all__: list[str] = []
