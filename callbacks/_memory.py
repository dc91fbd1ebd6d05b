"""Measures the memory in use and its peak, of this process and of its device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__: list[str] = []

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # resets VmHWM to VmRSS, see proc(5)


@dataclass(frozen=True)
class Memory:
    """Bytes in use in one stage.

    Attributes:
        start: at its start.
        end: at its end.
        peak: the maximum in between.
        bound: what `peak` is: `""` if it is exact, `"at most"` if it is an upper bound, `"at least"` if it is a lower bound.
    """

    start: int
    end: int
    peak: int
    bound: str = ""


@dataclass
class _OpenStage:
    start: int
    peak: int
    high: int  # the counter's peak at its start


class Gauge:
    """Measures the memory of host or device in stages, which may be nested.

    Args:
        read: returns the bytes in use, and the peak since the last reset.
        reset: resets the peak; returns whether that worked.
        bound: what the peaks are; see `Memory`.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], reset: Callable[[], bool], bound: str = "") -> None:
        self.open: dict[str, _OpenStage] = {}
        self._read, self._reset, self._bound = read, reset, bound
        self._resets = True

    @property
    def used(self) -> int:
        """The bytes in use."""
        return self._read()[0]

    def begin(self, stage: str) -> None:
        """Begin a stage."""
        self._fold()
        used, high = self._read()
        self.open[stage] = _OpenStage(used, used, high)

    def end(self, stage: str) -> Memory:
        """End a stage."""
        used = self._fold()
        done = self.open.pop(stage)
        bound = self._bound if self._resets or done.peak > done.high else "at most"
        return Memory(done.start, used, done.peak, bound)

    def _fold(self) -> int:
        """Record the peak for all open stages, and reset it; returns the bytes in use."""
        used, peak = self._read()
        for stage in self.open.values():
            stage.peak = max(stage.peak, peak)
        self._resets = self._resets and self._reset()
        return used


def host_gauge() -> Gauge | None:
    """For the resident memory of this process; None if it cannot be measured."""
    return None if _host_memory() is None else Gauge(lambda: _host_memory() or (0, 0), _reset_host)


def _host_memory() -> tuple[int, int] | None:
    """Resident bytes of this process, and the peak since the last reset."""
    try:
        status = _STATUS.read_text("ascii", "replace")
    except OSError:
        return None
    found = [re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE) for name in ("VmRSS", "VmHWM")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0][1]) * 1024, int(found[1][1]) * 1024


def _reset_host() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK, "ascii")
    except OSError:  # a sandbox, or a kernel without it
        return False
    return True


def device_gauge(device: torch.device) -> Gauge | None:
    """For the memory that torch has allocated on a device; None if torch does not count it."""
    if device.type == "cuda":
        torch.cuda.init()  # before that there are no peaks to reset

        def reset() -> bool:
            torch.cuda.reset_peak_memory_stats(device)
            return True

        return Gauge(lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)), reset)
    if device.type == "mps":
        return Gauge(lambda: (torch.mps.current_allocated_memory(),) * 2, lambda: True, "at least")
    return None
