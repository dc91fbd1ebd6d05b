"""Names of other frameworks where they work. What does not work is a table of `trainkit.names`."""

from __future__ import annotations

__all__: list[str] = []
