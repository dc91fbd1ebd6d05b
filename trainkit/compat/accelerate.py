"""The door for Accelerate: after `import trainkit.compat.accelerate`, `import accelerate` gives trainkit's names."""

from __future__ import annotations

from trainkit.names.doors import open_door

__all__: list[str] = []

open_door("accelerate")
