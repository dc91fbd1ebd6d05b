"""Profilers under the names that scripts import from Lightning: `Trainer(profiler=SimpleProfiler())`."""

from __future__ import annotations

from trainkit.trainer.profiler import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]
