"""``DDPStrategy``: one process or one device per rank, gradients averaged by all-reduce."""

from __future__ import annotations
