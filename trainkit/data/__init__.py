"""A user's loader → this rank's resumable share of the global order; order; prefetch to the device."""

from __future__ import annotations

from trainkit.data.combined import CombinedLoader
from trainkit.data.loader import PreparedLoader

__all__ = ["CombinedLoader", "PreparedLoader"]
