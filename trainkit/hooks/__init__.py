"""The names and signatures of all hooks, and the table of who implements which."""

from __future__ import annotations

__all__: list[str] = []
