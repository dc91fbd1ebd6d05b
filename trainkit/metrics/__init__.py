"""What `self.log` records: record, reduce, synchronize over ranks, save and restore."""

from __future__ import annotations

__all__: list[str] = []
