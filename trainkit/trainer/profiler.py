"""Where the time of a run goes. Profiling wraps what is called when a run is set up, so it costs nothing when it is off."""

from __future__ import annotations

import cProfile
import inspect
import io
import pstats
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import record_function

from trainkit.console import echo, warn
from trainkit.errors import ConfigurationError, MissingMethodError, UnknownNameError, make_instance, nearest
from trainkit.loggers.log_folder import replace_file
from trainkit.paths import disk_path
from trainkit.registry import adapt

__all__ = [
    "PASS_THROUGH",
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "double_start_error",
    "make_profiler",
]


class Profiler:
    """Base class: subclass it and define `start` and `stop`, or `profile` instead of both; and `summary`.

    Args:
        dirpath: Folder of the files that it writes. Default: the log folder of the run, from the start of the run on.
        filename: Write the summary to this file, `{stage}-{filename}.txt`, with the rank added if there are several
            processes, and `-v1`, `-v2`, … in later runs of the same stage. Default: the main process prints it.

    Raises:
        MissingMethodError: `profile` is called, and neither it nor `start` and `stop` are defined.

    Example:
        ```python
        class Counting(Profiler):
            def __init__(self):
                super().__init__()
                self.calls = {}

            def start(self, action_name):
                self.calls[action_name] = self.calls.get(action_name, 0) + 1

            def stop(self, action_name): ...

            def summary(self):
                return str(self.calls)
        ```
    """

    filename: str | None = None  # class attributes: a subclass may not call __init__
    _dirpath: str | Path | None = None
    _log_dir: str | Path | None = None
    _stage: str | None = None
    _local_rank: int | None = None
    _rank: int | None = None  # The global rank: nodes may share the folder, and local ranks occur on each.
    _runs: Mapping[Path, int] = {}  # replaced, not changed

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = dirpath, filename

    @property
    def dirpath(self) -> str | Path | None:
        """Folder of the files."""
        return self._dirpath or self._log_dir

    @dirpath.setter
    def dirpath(self, folder: str | Path | None) -> None:
        if folder is not None:
            disk_path(folder, f"{type(self).__name__}(dirpath=)", "leave it out: the folder of the run is uploaded")
        self._dirpath = folder

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run begins.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            local_rank: The rank of this process on its node, if there are several processes.
            log_dir: The log folder of the run.
        """
        self._stage = stage
        self._local_rank = local_rank
        self._log_dir = log_dir
        self._begin_files()

    def teardown(self, stage: str | None = None) -> None:
        """The run has ended."""

    def step(self) -> None:
        """A micro-batch of training is done."""

    def start(self, action_name: str) -> None:
        """An action begins."""
        raise MissingMethodError(
            f"{type(self).__name__}: expected methods start(self, action_name) and stop(self, action_name), found none. Fix:\n"
            "    def start(self, action_name): ...\n    def stop(self, action_name): ..."
        )

    def stop(self, action_name: str) -> None:
        """The action has ended."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """A context manager around an action; calls `start` and `stop`."""
        return self._from_start_to_stop(action_name)

    @contextmanager
    def _from_start_to_stop(self, action_name: str) -> Iterator[Any]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """The results as text; empty: there is nothing to show."""
        return ""

    def describe(self) -> None:
        """Write the summary to the file, if there is a `filename`; otherwise print it."""
        text = self.summary()
        if text and self.filename is None:
            echo(text)
        elif text:
            path = self._path(".txt")
            with self._surviving(path):
                replace_file(path, lambda file: file.write(text + "\n"))  # a link there is not followed

    @contextmanager
    def _surviving(self, path: Path) -> Iterator[None]:
        """In this context a file that cannot be written is a warning: what was measured must not end training."""
        try:
            yield
        except OSError as error:
            warn(f"{type(self).__name__} could not write {path}: {error}. Training is not affected. Fix: free some space")

    def _begin_files(self) -> None:
        """The files that are written from now on replace none that this profiler has written before."""
        stem = self._stem()
        self._runs = {**self._runs, stem: self._runs.get(stem, 0) + 1}

    def _path(self, suffix: str, default: str = "profile") -> Path:
        """A file of this profiler, stage, process and run; `default`: its name if there is no `filename`."""
        version = self._runs.get(self._stem(), 1) - 1
        stem = self._stem(default)
        return stem.with_name(stem.name + (f"-v{version}" if version else "") + suffix)

    def _stem(self, default: str = "profile") -> Path:
        rank = self._local_rank if self._rank is None else self._rank
        parts = [self._stage, self.filename or default, rank]
        return Path(self.dirpath or ".") / "-".join(str(part) for part in parts if part is not None)

    def wrap(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, profiled as `action`."""

        @wraps(function, assigned=(), updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.profile(action):
                return function(*args, **kwargs)

        return wrapper

    def iterate(self, action: str, iterator: Iterator[Any]) -> Iterator[Any]:
        """The items of an iterator; fetching each item is profiled as `action`."""
        while True:
            with self.profile(action):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class PassThroughProfiler(Profiler):
    """Measures nothing: what `trainer.profiler` is without a profiler."""

    def start(self, action_name: str) -> None:
        """Do nothing."""


PASS_THROUGH = PassThroughProfiler()


class SimpleProfiler(Profiler):
    """Calls and seconds of each action on the host; on CUDA, the time of kernels that were only enqueued is not included.

    Args:
        dirpath: As in `Profiler`.
        filename: As in `Profiler`.
        extended: Show the number of calls and the share of the time as well.

    Attributes:
        recorded_durations: Action → the seconds of each of its calls, an array of floats.
        current_actions: Action → when it began, for those that `start` began and `stop` has not ended.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: defaultdict[str, array[float]] = defaultdict(_no_durations)
        self.start_time = time.perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Restart the clock."""
        super().setup(stage, local_rank, log_dir)
        self.current_actions.clear()
        self.recorded_durations.clear()
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        """Begin to time an action.

        Raises:
            ConfigurationError: It has begun already.
        """
        if action_name in self.current_actions:
            raise double_start_error(action_name)
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Record the time of an action.

        Raises:
            ConfigurationError: It has not begun.
        """
        ended = time.perf_counter()
        if action_name not in self.current_actions:
            raise ConfigurationError(
                f"profiler.stop({action_name!r}): the action has not begun. Call start({action_name!r}) first."
            )
        self.recorded_durations[action_name].append(ended - self.current_actions.pop(action_name))

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """A context manager around an action, which may be inside another one of its name."""
        kind = type(self)
        if (kind.start, kind.stop) != (SimpleProfiler.start, SimpleProfiler.stop):
            return super().profile(action_name)  # it calls those of a subclass
        return self._time(action_name)

    @contextmanager
    def _time(self, action_name: str) -> Iterator[Any]:
        began = time.perf_counter()
        try:
            yield action_name
        finally:
            self.recorded_durations[action_name].append(time.perf_counter() - began)

    def summary(self) -> str:
        """A table, the longest action first."""
        whole = time.perf_counter() - self.start_time
        rows = sorted(((sum(its), len(its), name) for name, its in self.recorded_durations.items()), reverse=True)
        lines = [f"{'action':<52}" + (f"{'calls':>10}" if self.extended else "") + f"{'mean ms':>12}{'total s':>12}"]
        lines[0] += f"{'share':>9}" if self.extended else ""
        for total, count, name in rows:
            calls, share = (f"{count:>10}", f"{total / whole:>9.1%}") if self.extended else ("", "")
            lines.append(f"{name:<52}{calls}{total / count * 1e3:>12.3f}{total:>12.3f}{share}")
        return "\n".join(lines)


def double_start_error(action_name: str) -> ConfigurationError:
    """The error for a second `start` of an action without a `stop`."""
    return ConfigurationError(
        f"profiler.start({action_name!r}): the action has begun already. Call stop({action_name!r}) first."
    )


def _no_durations() -> array[float]:
    return array("d")


class AdvancedProfiler(Profiler):
    """Python's `cProfile` over the whole run; the summary lists the functions with the most time (`tottime`).

    Outside a run it profiles what is inside `profile(action_name)`.

    Args:
        dirpath: As in `Profiler`.
        filename: As in `Profiler`.
        line_count_restriction: Number of functions in the summary (int), or a fraction of them (float).
        dump_stats: Write the whole profile as well, for `pstats`, to `{stage}-{filename}.prof` in `dirpath`; named like the
            summary.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 30,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._profile: cProfile.Profile | None = None
        self._depth = 0

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start the profile of the run."""
        super().setup(stage, local_rank, log_dir)
        self._profile = None
        self._depth = 0
        self.start(stage)

    def teardown(self, stage: str | None = None) -> None:
        """Stop the profile."""
        if self._depth and self._profile is not None:
            self._profile.disable()
        self._depth = 0

    def start(self, action_name: str) -> None:
        """Record calls from now on."""
        self._depth += 1
        if self._depth == 1:
            self._profile = self._profile or cProfile.Profile()
            self._profile.enable()

    def stop(self, action_name: str) -> None:
        """Record no more calls, if this is the outermost action.

        Raises:
            ConfigurationError: No action has begun.
        """
        if self._profile is None or not self._depth:
            raise ConfigurationError(
                f"profiler.stop({action_name!r}): the action has not begun. Call start({action_name!r}) first."
            )
        self._depth -= 1
        if not self._depth:
            self._profile.disable()

    def summary(self) -> str:
        """The functions with the most time (`tottime`)."""
        if self._profile is None:
            return "nothing was profiled"
        if self.dump_stats:
            path = self._path(".prof")
            with self._surviving(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._profile.dump_stats(path)
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(self.line_count_restriction)
        return text.getvalue()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_profile": None, "_depth": 0}  # a cProfile.Profile cannot be copied


_NAMES = ("simple", "advanced", "pytorch")


def make_profiler(profiler: str | Profiler | None) -> Profiler | None:
    """The profiler of a name (`"simple"`, `"advanced"`, `"pytorch"`), or the object itself; `None` if it measures nothing.

    Raises:
        UnknownNameError: Another name.
        ConfigurationError: An object that is no profiler.
    """
    if profiler is None or type(profiler) is PassThroughProfiler:
        return None
    if isinstance(profiler, Profiler):
        return profiler
    if not isinstance(profiler, str):
        adapt(profiler)
        raise ConfigurationError(
            f"profiler must be a name ({', '.join(_NAMES)}) or a Profiler object, not {profiler!r}."
            f"{make_instance(profiler, Profiler)}"
        )
    name = profiler.lower()
    if name == "pytorch":
        return PyTorchProfiler()
    if name not in _NAMES:
        raise UnknownNameError(f"unknown profiler {profiler!r}; known: {', '.join(_NAMES)}.{nearest(name, _NAMES)}")
    return SimpleProfiler() if name == "simple" else AdvancedProfiler()


_EVALUATIONS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_EVERYTHING = {"row_limit", "sort_by"}  # These options of the table have arguments of their own.


_NOTHING = "no micro-batch was profiled: the run was shorter than wait + warmup + active"


class PyTorchProfiler(Profiler):
    """`torch.profiler` over a few micro-batches of training, or batches of an evaluation; writes a Chrome trace.

    The trace is `{stage}-trace.json`, such as `fit-trace.json`; with a `filename` it is `{stage}-{filename}-trace.json`. With
    several processes the rank is added, in later runs of the same stage `-v1`, `-v2`, …, and in later cycles of a `schedule`
    `-cycle-2`, … Outside a run it profiles from the first `profile(action_name)` to `describe()` or `summary()`.

    Args:
        dirpath: As in `Profiler`.
        filename: As in `Profiler`.
        group_by_input_shapes: Have a row in the summary for each shape of the inputs of an operator.
        export_to_chrome: Write the trace.
        row_limit: Operators in the summary; -1: all.
        sort_by_key: Column that the summary is sorted by, see `torch.profiler`.
        table_kwargs: More arguments for the table of the summary, such as `max_name_column_width`; see `EventList.table` of
            torch.
        wait: Micro-batches skipped at the start.
        warmup: Micro-batches profiled but not kept.
        active: Micro-batches kept.
        record_shapes: Record the shapes of inputs; always with `group_by_input_shapes`.
        **profiler_kwargs: Arguments of `torch.profiler.profile`, such as `profile_memory=True` or a `schedule`;
            `schedule=None` keeps the whole run.

    Attributes:
        function_events: The events of the micro-batches that were kept in the last run, in the last cycle of its `schedule`, a
            list of torch; `None`: there are none yet.
        trace_path: The file of the trace; `None` before a run.

    Raises:
        UnknownNameError: `profiler_kwargs` or `table_kwargs` contains something that torch does not have.
        ConfigurationError: `table_kwargs` contains `row_limit` or `sort_by`.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        group_by_input_shapes: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 30,
        sort_by_key: str = "self_cpu_time_total",
        table_kwargs: Mapping[str, Any] | None = None,
        wait: int = 1,
        warmup: int = 1,
        active: int = 5,
        record_shapes: bool = False,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key
        self.group_by_input_shapes = group_by_input_shapes
        self.table_kwargs = dict(table_kwargs or {})
        if twice := _EVERYTHING & self.table_kwargs.keys():
            raise ConfigurationError(
                f"PyTorchProfiler(table_kwargs=) contains {', '.join(sorted(twice))}. Expected arguments of the table that "
                "PyTorchProfiler does not have itself. Fix: PyTorchProfiler(row_limit=50, sort_by_key='cpu_time_total')"
            )
        _check("table_kwargs=", self.table_kwargs, EventList.table)
        _check("**profiler_kwargs", profiler_kwargs, torch.profiler.profile.__init__)
        schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._options = {"schedule": schedule, "record_shapes": record_shapes or group_by_input_shapes, **profiler_kwargs}
        self._inner: torch.profiler.profile | None = None
        self._open: dict[str, record_function] = {}  # the actions that `start` began
        self._table = _NOTHING
        self._cycles: list[Path] = []  # the traces of the run
        self.function_events: Any = None
        self.trace_path: Path | None = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start the profile."""
        super().setup(stage, local_rank, log_dir)
        self._begin(self._options)

    def _begin(self, options: Mapping[str, Any]) -> None:
        self._table = _NOTHING
        self._cycles = []
        self.function_events = None
        self.trace_path = self._trace()
        self._inner = torch.profiler.profile(**{"on_trace_ready": self._keep, **options})
        self._inner.start()

    def _trace(self) -> Path:
        """The file of the next cycle."""
        cycle = f"-cycle-{len(self._cycles) + 1}" if self._cycles else ""
        return self._path(f"{cycle}.json", "trace") if self.filename is None else self._path(f"-trace{cycle}.json")

    def _keep(self, profile: Any) -> None:
        self.trace_path = self._trace()
        self._cycles.append(self.trace_path)
        if self.export_to_chrome:
            with self._surviving(self.trace_path):
                self.trace_path.parent.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(self.trace_path))
        self.function_events = profile.events()
        rows = profile.key_averages(group_by_input_shape=self.group_by_input_shapes)
        self._table = rows.table(sort_by=self.sort_by_key, row_limit=self.row_limit, **self.table_kwargs)

    def teardown(self, stage: str | None = None) -> None:
        """Stop the profile."""
        for action in list(self._open):
            self.stop(action)
        if self._inner is not None:
            self._inner.stop()
            self._inner = None

    def step(self) -> None:
        """Advance the schedule."""
        if self._inner is not None:
            self._inner.step()

    def start(self, action_name: str) -> None:
        """Begin a range in the trace.

        Raises:
            ConfigurationError: It has begun already.
        """
        if action_name in self._open:
            raise double_start_error(action_name)
        self._begin_outside_a_run()
        self._open[action_name] = record_function(action_name)
        self._open[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """End a range in the trace.

        Raises:
            ConfigurationError: It has not begun.
        """
        if action_name not in self._open:
            raise ConfigurationError(
                f"profiler.stop({action_name!r}): the action has not begun. Call start({action_name!r}) first."
            )
        self._open.pop(action_name).__exit__(None, None, None)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Show the action as a range in the trace."""
        kind = type(self)
        # Whether a subclass overrides start or stop.
        overridden = (kind.start, kind.stop) != (PyTorchProfiler.start, PyTorchProfiler.stop)
        self._begin_outside_a_run()
        action = super().profile(action_name) if overridden else record_function(action_name)
        return self._with_step(action) if _EVALUATIONS.get(self._stage or "") == action_name else action

    @contextmanager
    def _with_step(self, action: AbstractContextManager[Any]) -> Iterator[Any]:
        """An action, and the step after it: the loop of an evaluation makes none."""
        with action as entered:
            yield entered
        self.step()

    def _begin_outside_a_run(self) -> None:
        if self._stage is None and self._inner is None:
            self._begin_files()
            self._begin({**self._options, "schedule": None})

    def summary(self) -> str:
        """The operators with the most time in the column `sort_by_key`, and the path of the trace."""
        if self._stage is None:
            self.teardown()
        return "\n".join([self._table, *map(str, self._cycles if self.export_to_chrome else ())])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_inner": None, "_open": {}, "function_events": None}  # a profile cannot be copied


def _check(argument: str, value: Mapping[str, Any], function: Any) -> None:
    """Refuse names that a function of torch does not have."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    for name in value:
        if name not in known:
            raise UnknownNameError(
                f"PyTorchProfiler({argument}): there is no {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
