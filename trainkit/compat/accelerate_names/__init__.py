"""Names of Hugging Face Accelerate: scripts import them from `trainkit.utils` and `trainkit.logging`."""

from __future__ import annotations

__all__: list[str] = []
