"""What scripts written for Hugging Face Accelerate import from its `logging`: a logger for several processes."""

from __future__ import annotations

from trainkit.compat.accelerate_names.process_logging import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
