"""Finds a learning rate and a batch size before training, with short trials on a copy of the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.tuner.range_test import RangeTest
    from trainkit.tuner.tuner import Tuner

__all__ = ["RangeTest", "Tuner"]

_FILES = {"RangeTest": "range_test", "Tuner": "tuner"}

__getattr__, __dir__ = lazily(globals(), _FILES)
