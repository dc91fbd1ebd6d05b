"""Profilers for `Trainer(profiler=SimpleProfiler(...))`, and what scripts written for Lightning import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.trainer.profiler import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler
    from trainkit.trainer.torch_profiler import PyTorchProfiler

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

_FILES = dict.fromkeys(__all__, ".trainer.profiler")
__getattr__, __dir__ = lazily(globals(), {**_FILES, "PyTorchProfiler": ".trainer.torch_profiler"})
