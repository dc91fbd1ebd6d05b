"""The door for Lightning: after `import trainkit.compat.lightning`, `import lightning` gives trainkit's names."""

from __future__ import annotations

from trainkit.names.doors import open_door

__all__: list[str] = []

open_door("lightning")
