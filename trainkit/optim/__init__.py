"""Forms of `configure_optimizers`, prepared optimizers and schedulers, schedules by name, and the gradient norm."""

from __future__ import annotations

from trainkit.optim.schedules import make_schedule

__all__ = ["make_schedule"]
