"""The checkpoint directory: one format for every strategy, complete or absent, verified when read, never executable code."""

from __future__ import annotations

from trainkit.checkpoint.folder import list_checkpoints
from trainkit.checkpoint.reader import Checkpoint, open_checkpoint
from trainkit.tagged_json.codec import register

__all__ = ["Checkpoint", "list_checkpoints", "open_checkpoint", "register"]
