"""One run: `Trainer`, its arguments, set-up and tear-down, the two loops, resume, saving and signals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["Trainer"]

__getattr__, __dir__ = lazily(globals(), {"Trainer": "trainer"})
