"""How much memory is in use, and how much was at most since a moment: of this process, and of its device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__: list[str] = []

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what proc(5) wants written to set VmHWM back to VmRSS


@dataclass(frozen=True)
class Memory:
    """Bytes that were in use.

    Attributes:
        start: when the stage began.
        end: when it ended.
        peak: the most in between.
        bound: what is known of ``peak``: ``""``: it is exact; ``"at most"``, ``"at least"``.
    """

    start: int
    end: int
    peak: int
    bound: str = ""


@dataclass
class _OpenStage:
    """A stage that has begun."""

    start: int
    peak: int
    high: int  # the peak that the counter had then


class Gauge:
    """The memory of one place, measured for stages that may lie within each other.

    Args:
        read: the bytes in use, and the peak since it was last reset.
        reset: set that peak back; returns whether it could.
        bound: what is known of the peaks.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], reset: Callable[[], bool], bound: str = "") -> None:
        self.open: dict[str, _OpenStage] = {}
        self._read, self._reset, self._bound = read, reset, bound
        self._resets = True

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self._fold()
        used, high = self._read()
        self.open[stage] = _OpenStage(used, used, high)

    def end(self, stage: str) -> Memory:
        """It ends; its figures."""
        used = self._fold()
        done = self.open.pop(stage)
        bound = self._bound if self._resets or done.peak > done.high else "at most"
        return Memory(done.start, used, done.peak, bound)

    def _fold(self) -> int:
        """Record the peak so far for all open stages, and reset it; returns the bytes in use."""
        used, peak = self._read()
        for stage in self.open.values():
            stage.peak = max(stage.peak, peak)
        self._resets = self._resets and self._reset()
        return used


def host_gauge() -> Gauge | None:
    """Of the resident memory of this process; None where that cannot be measured."""
    return None if _host_memory() is None else Gauge(lambda: _host_memory() or (0, 0), _reset_host)


def _host_memory() -> tuple[int, int] | None:
    """Resident bytes of this process, and the most since it was last reset."""
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
    """Of what torch has allocated on a device; None where it does not tell."""
    if device.type == "cuda":
        torch.cuda.init()  # before that there are no peaks to be reset

        def reset() -> bool:
            torch.cuda.reset_peak_memory_stats(device)
            return True

        return Gauge(lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)), reset)
    if device.type == "mps":
        return Gauge(lambda: (torch.mps.current_allocated_memory(),) * 2, lambda: True, "at least")
    return None
