"""Forms of `configure_optimizers`, prepared optimizers and schedulers, and the gradient norm."""

from __future__ import annotations

__all__: list[str] = []
