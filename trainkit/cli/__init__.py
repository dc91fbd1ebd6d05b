"""The command `trainkit` and its subcommands, one module each."""

from __future__ import annotations

__all__: list[str] = []
