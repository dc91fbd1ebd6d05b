"""What `self.log` records: record, reduce, synchronize over ranks, save and restore."""

from __future__ import annotations

from trainkit.names import lazily

__all__: list[str] = []

# Lightning 1 had the metrics of torchmetrics here, for which the error names it.
__getattr__, __dir__ = lazily(globals(), {})
