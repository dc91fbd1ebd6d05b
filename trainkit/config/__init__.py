"""Where and how a script runs: configuration files, flags of `trainkit launch`, environment variables."""

from __future__ import annotations

__all__: list[str] = []
