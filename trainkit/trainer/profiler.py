"""Where the time of a run goes. Profiling wraps what is called when a run is set up, so it costs nothing when it is off."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from trainkit.errors import ConfigurationError, MissingMethodError, UnknownNameError, nearest

__all__ = ["AdvancedProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler", "make_profiler"]


class Profiler:
    """Base class: subclass it and define `profile` and `summary`.

    Raises:
        MissingMethodError: One of the two is called and not defined.
    """

    def start(self, directory: Path) -> None:
        """A run begins; `directory` is where files may be written."""

    def stop(self) -> None:
        """The run has ended."""

    def step(self) -> None:
        """A micro-batch of training is done."""

    def profile(self, action: str) -> AbstractContextManager[None]:
        """A context manager around an action."""
        raise MissingMethodError(
            f"{type(self).__name__}: expected a method profile(self, action), found none. Fix:\n"
            "    @contextlib.contextmanager\n    def profile(self, action): yield"
        )

    def summary(self) -> str:
        """The results as text."""
        raise MissingMethodError(
            f"{type(self).__name__}: expected a method summary(self), found none. Fix:\n"
            "    def summary(self): return 'nothing was measured'"
        )

    def wrapped(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, profiled as `action`."""

        @wraps(function, assigned=(), updated=())
        def profiled(*args: Any, **kwargs: Any) -> Any:
            with self.profile(action):
                return function(*args, **kwargs)

        return profiled

    def iterated(self, action: str, iterator: Iterator[Any]) -> Iterator[Any]:
        """The items of an iterator; fetching each item is profiled as `action`."""
        while True:
            with self.profile(action):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class SimpleProfiler(Profiler):
    """Calls and seconds of each action on the host; on CUDA, the time of kernels that were only enqueued is not included."""

    def __init__(self) -> None:
        self._times: dict[str, tuple[int, float]] = {}
        self._began = time.perf_counter()

    def start(self, directory: Path) -> None:
        """Restart the clock."""
        self._times.clear()
        self._began = time.perf_counter()

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Time an action."""
        began = time.perf_counter()
        try:
            yield
        finally:
            count, total = self._times.get(action, (0, 0.0))
            self._times[action] = count + 1, total + time.perf_counter() - began

    def summary(self) -> str:
        """A table, the longest action first."""
        whole = time.perf_counter() - self._began
        lines = [f"{'action':<52}{'calls':>10}{'mean ms':>12}{'total s':>12}{'share':>9}"]
        for action, (count, total) in sorted(self._times.items(), key=lambda item: -item[1][1]):
            lines.append(f"{action:<52}{count:>10}{total / count * 1e3:>12.3f}{total:>12.3f}{total / whole:>9.1%}")
        return "\n".join(lines)


class AdvancedProfiler(Profiler):
    """Python's `cProfile` over the whole run; the summary lists the functions with the most time (`tottime`).

    Args:
        lines: Functions in the summary.
    """

    def __init__(self, lines: int = 30) -> None:
        self._profile = cProfile.Profile()
        self._lines = lines

    def start(self, directory: Path) -> None:
        """Restart the profile."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> None:
        """Stop the profile."""
        self._profile.disable()

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Do nothing: `cProfile` records every call."""
        yield

    def summary(self) -> str:
        """The functions with the most time (`tottime`)."""
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(self._lines)
        return text.getvalue()


class PyTorchProfiler(Profiler):
    """`torch.profiler` over a few micro-batches of training; writes a Chrome trace, `trace.json`.

    Args:
        wait: Micro-batches skipped at the start.
        warmup: Micro-batches profiled but not kept.
        active: Micro-batches kept.
        rows: Operators in the summary.
    """

    def __init__(self, wait: int = 1, warmup: int = 1, active: int = 5, rows: int = 30) -> None:
        self._schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._rows = rows
        self._inner: torch.profiler.profile | None = None
        self._table = "no micro-batch was profiled: the run was shorter than wait + warmup + active"
        self.trace_path: Path | None = None

    def start(self, directory: Path) -> None:
        """Start the profile."""
        self.trace_path = directory / "trace.json"
        self._inner = torch.profiler.profile(schedule=self._schedule, on_trace_ready=self._keep)
        self._inner.start()

    def _keep(self, profile: Any) -> None:
        assert self.trace_path is not None
        self.trace_path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.trace_path))
        self._table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=self._rows)

    def stop(self) -> None:
        """Stop the profile."""
        if self._inner is not None:
            self._inner.stop()
            self._inner = None

    def step(self) -> None:
        """Advance the schedule."""
        if self._inner is not None:
            self._inner.step()

    def profile(self, action: str) -> AbstractContextManager[None]:
        """Show the action as a range in the trace."""
        return torch.profiler.record_function(action)

    def summary(self) -> str:
        """The operators with the most CPU time (`self_cpu_time_total`), and the path of the trace."""
        return f"{self._table}\n{self.trace_path}"


_NAMES: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def make_profiler(profiler: str | Profiler | None) -> Profiler | None:
    """The profiler of a name (`"simple"`, `"advanced"`, `"pytorch"`), or the object itself.

    Raises:
        UnknownNameError: Another name.
        ConfigurationError: An object that is no profiler.
    """
    if profiler is None or isinstance(profiler, Profiler):
        return profiler
    if not isinstance(profiler, str):
        raise ConfigurationError(f"profiler must be a name ({', '.join(_NAMES)}) or a Profiler object, not {profiler!r}.")
    if profiler not in _NAMES:
        raise UnknownNameError(f"unknown profiler {profiler!r}; known: {', '.join(_NAMES)}.{nearest(profiler, _NAMES)}")
    return _NAMES[profiler]()
