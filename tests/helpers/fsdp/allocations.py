"""Measure the memory that torch allocates on the host, exactly."""

from __future__ import annotations

import gc
from typing import Any

import torch

__all__ = ["Allocations"]


class Allocations:
    """A context in which each allocation of torch in host memory is recorded, also those that are freed soon after.

    Memory-mapped files do not count until a tensor is copied from them.

    Attributes:
        peaks: Name of a mark → maximum bytes allocated at one time before it, in addition to those from before the context.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._names: set[str] = set()

    def __enter__(self) -> Allocations:
        gc.collect()  # memory from before that is freed inside would be subtracted
        self._profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        """A moment up to which to return the peak."""
        self._names.add(name)
        with torch.profiler.record_function(name):
            pass

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        total = peak = 0
        recorded: Any = self._profile.profiler
        for event in sorted(recorded.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
            elif event.name() in self._names:
                self.peaks[event.name()] = peak
