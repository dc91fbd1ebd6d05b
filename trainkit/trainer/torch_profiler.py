"""`PyTorchProfiler`: the operators and kernels of a run, with `torch.profiler`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import record_function

from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.trainer.profiler import Profiler, begun_already

__all__ = ["PyTorchProfiler"]

_EVALUATIONS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_EVERYTHING = {"row_limit", "sort_by"}  # of the table, which have arguments of their own


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
        self.export_to_chrome, self.row_limit, self.sort_by_key = export_to_chrome, row_limit, sort_by_key
        self.group_by_input_shapes, self.table_kwargs = group_by_input_shapes, dict(table_kwargs or {})
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
        self._table, self._cycles, self.function_events = _NOTHING, [], None
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
            raise begun_already(action_name)
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
        own = (kind.start, kind.stop) != (PyTorchProfiler.start, PyTorchProfiler.stop)  # of a subclass
        self._begin_outside_a_run()
        action = super().profile(action_name) if own else record_function(action_name)
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


def _check(argument: str, given: Mapping[str, Any], function: Any) -> None:
    """Refuse names that a function of torch does not have."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    for name in given:
        if name not in known:
            raise UnknownNameError(
                f"PyTorchProfiler({argument}): there is no {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
