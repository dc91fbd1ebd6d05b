"""Profilers for `Trainer(profiler=SimpleProfiler(...))`, and what scripts written for Lightning import."""

from __future__ import annotations

from trainkit.names import lazily
from trainkit.trainer.profiler import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

__path__: list[str] = []  # Lightning's modules below it, such as profilers.simple, are found by trainkit.names.import_paths
__getattr__, __dir__ = lazily(globals(), dict.fromkeys(__all__, ""))
