"""`MicroBatch` for authors of strategies; the code is in `trainkit.data.micro_batches`."""

from __future__ import annotations

from trainkit.data.micro_batches import NO_BATCH, WHOLE_WINDOW, MicroBatch, MicroBatchKind

__all__ = ["NO_BATCH", "WHOLE_WINDOW", "MicroBatch", "MicroBatchKind"]
