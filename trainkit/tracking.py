"""What scripts written for Hugging Face Accelerate import from its `tracking`: the base class of custom trackers."""

from __future__ import annotations

from trainkit.loggers.trackers import GeneralTracker, on_main_process

__all__ = ["GeneralTracker", "on_main_process"]
