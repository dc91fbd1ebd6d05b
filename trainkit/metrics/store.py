"""`MetricStore`: what `self.log` collects.

Values stay on the device: `log` keeps a detached copy and waits for nothing. At a log boundary the values of the step are
stacked and read once; the values of an epoch are reduced at its end, means in float64 and weighted by samples.

Several ranks exchange names, options, values and weights there, once. So each rank knows the metrics of all ranks, detects
differences between them, and computes the same results, even if it had no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.data.micro_batches import NO_BATCH
from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.metrics.metric_objects import LoaderStates, capture_objects, metric_objects, overlap, reset, restore_objects
from trainkit.metrics.part_values import PartValues
from trainkit.metrics.record import MetricInfo, Record, Scope, adopt, cadence, capture, fill, restore_value, store_value
from trainkit.metrics.sync import (
    FINGERPRINTS,
    Key,
    MetricValues,
    agree_on_steps,
    check,
    describe,
    end_epoch,
    end_objects,
    end_row,
    end_step,
    fingerprint,
    groups,
)
from trainkit.metrics.values import alike, is_metric_object, one_number, read, weight_of
from trainkit.nested import batch_size as size_of

__all__ = ["MetricResults", "MetricStore", "Scope", "as_tensors"]


@dataclass
class MetricResults:
    """The values of all stores of a run.

    Attributes:
        callback: values for monitors.
        progress_bar: values in the progress bar.
        logged: the latest values passed to the loggers.
        evaluated: names in `callback` that an evaluation has computed. Training does not replace their values.
    """

    callback: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    evaluated: set[str] = field(default_factory=set)

    def add(self, values: Mapping[str, Any], *, evaluation: bool = False) -> None:
        """Add values for monitors. If training and validation log the same name, the value of the validation is kept."""
        if evaluation:
            self.evaluated.update(values)
            self.callback.update(values)
        else:
            self.callback.update((name, value) for name, value in values.items() if name not in self.evaluated)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors by name, for a checkpoint."""
        return {
            "callback": {name: store_value(value) for name, value in self.callback.items()},
            "progress_bar": dict(self.progress_bar),
            "logged": dict(self.logged),
            "evaluated": sorted(self.evaluated),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Restore `state_dict` in place, as other objects refer to this one; tensors of a device go to `device`."""
        callback = {name: restore_value(value, device) for name, value in state["callback"].items()}
        for mine, others in (
            (self.callback, callback),
            (self.progress_bar, state["progress_bar"]),
            (self.logged, state["logged"]),
        ):
            mine.clear()
            mine.update(others)
        self.evaluated = set(state.get("evaluated", ()))  # absent from checkpoints of earlier versions


def as_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values as tensors: numbers as float64 tensors on the CPU, tensors on their device."""
    with torch.inference_mode(False):  # The copy of an inference tensor is then an ordinary tensor.
        tensors = {n: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for n, v in values.items()}
        return {name: v.clone() if v.is_inference() else v for name, v in tensors.items()}


_ONE_PROCESS = World()
_EVALUATION = (Scope.EVAL_BATCH, Scope.EVAL_EPOCH)


class MetricStore:
    """The metrics of one stage.

    Methods that pass values to the progress bar and the loggers are collective: all ranks call them in the same order.

    Args:
        emit: `emit(metrics, for_step)` passes metrics, as numbers, to the loggers: those of a step or those of an epoch. A
            third argument is the number of that step.
        results: receives the results.
        compiled: steps are compiled. In compiled code `log` only keeps the call, which is recorded after the step: this needs
            no graph break.
        world: the ranks over which values are reduced.

    Attributes:
        log: see `trainkit.TrainModule.log`.
        scope: where in the run the loop is.
        batch: the current batch, for the number of its samples.
        suffix: the suffix of the evaluation loader, if there are several.
        stamp: a number that the loop sets for each batch of this rank, stored with each value, see `last_stamp`. It
            increases during an epoch and is the same on all ranks for the batches of a row; negative before the first batch.
        window: the stamp of the first micro-batch of the accumulation window, whose values are reduced to that of the step;
            -1 if each micro-batch is a step.
        missing_stamps: stamps of earlier loaders at which other ranks had a batch and this one had none, as (first, end).
        outer: the store of the training that this validation interrupts.
        count: returns the weight of a batch: the number of its samples or, in training, what `batch_weight` returned.
        previewed: the epoch has ended, and the results have its values; those of its last step are not the latest any more.
        loaders: metric of the last `flush_epoch` → the evaluation loaders that it was logged in; `[]`: in no batch.
        schema: a number for the metrics of this epoch and their reductions, if there are several ranks. Ranks that have logged
            the same have the same number; 0 if nothing was logged.
    """

    def __init__(
        self,
        emit: Callable[..., None],
        results: MetricResults,
        *,
        compiled: bool = False,
        world: World = _ONE_PROCESS,
    ) -> None:
        self._compiled = compiled
        self._collect(self._log)
        self._deferred: list[tuple[Any, ...]] = []  # calls of `log` in compiled code
        self._emit = emit
        self.results = results
        self._world = world
        self._distributed = self._weighs = world.size > 1
        self._metrics: dict[tuple[str, str], Record] = {}  # The metrics of this epoch.
        self._waiting: dict[tuple[str, str], Record] = {}  # Step values of an earlier epoch that wait for a log boundary.
        self._skipped: dict[int, Any] = {}  # objects that only the main process logs, if this is another rank
        self.scope = Scope.NOWHERE
        self.batch: Any = None
        self._size: tuple[Any, float] = (None, 0)
        self.missing_stamps: list[tuple[int, int]] = []
        self.loaders: dict[str, list[int]] = {}
        self.suffix = ""
        self.stamp = -1
        self.window = -1
        self.schema = 0
        self.outer: MetricStore | None = None
        self._loader_states = LoaderStates()
        self._unmerged: list[Any] = []  # objects without the states of all loaders
        self.count: Callable[[Any], float] = size_of
        self.previewed = False

    def _log_or_defer(self, name: str, value: Any, *options: Any) -> None:
        if torch.compiler.is_compiling():  # torch.compile runs this append after its graph
            if isinstance(value, Tensor):
                value = value.clone()  # the step may change its tensor in place
            self._deferred.append((name, value, *options))
            return
        self.record_deferred()
        self._record(name, value, *options)

    def record_deferred(self) -> None:
        """Record what compiled code has logged, in the order of the calls."""
        deferred, self._deferred = self._deferred, []
        for arguments in deferred:
            self._record(*arguments)

    def _collect(self, record: Callable[..., None]) -> None:
        self._record = record  # what is logged goes here
        self.log: Callable[..., None] = self._log_or_defer if self._compiled else record

    @contextmanager
    def collecting(self, parts: PartValues) -> Iterator[None]:
        """Within it nothing is recorded, and what is logged goes to `parts`."""
        self._collect(parts.log)
        try:
            yield
        finally:
            self._deferred = []  # of a step that has failed
            self._collect(self._log)

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: str | Callable[..., Any],
        enable_graph: bool,
        add_dataloader_idx: bool,
        batch_size: int | None,
        rank_zero_only: bool,
    ) -> None:
        if rank_zero_only and self._world.rank:
            self._skip(value)
            return
        signature = (prog_bar, logger, on_step, on_epoch, reduce_fx, self.scope, rank_zero_only)
        key = (name, self.suffix if add_dataloader_idx else "")
        try:
            metric = self._metrics.get(key)
        except TypeError:  # a name that is no string
            metric = None
        if metric is None or metric.signature != signature:
            metric = self._declare(key, metric, signature, value)
        if metric.torchmetric is not None:
            self._log_object(metric, value, batch_size)
            return
        value = one_number(name, value, enable_graph)
        weight = self._weight(name, batch_size) if metric.on_epoch or self._weighs else 0.0
        if metric.on_step:
            if self.window < 0:
                metric.step_value = value
                metric.step_weight = weight
                metric.fresh = True
            else:
                metric.add_step(value, weight, self.window, again=metric.stamp == self.stamp)
        metric.stamp = self.stamp
        if metric.on_epoch:
            metric.add(value, weight)

    def _log_object(self, metric: Record, value: Any, batch_size: int | None) -> None:
        """Log another batch of a torchmetrics object, which keeps its own state."""
        of_step = metric.step_of_object(value)
        if of_step is not None:
            weight, again = self._weight(metric.name, batch_size), metric.stamp == self.stamp
            metric.add_step(of_step, weight, self.stamp if self.window < 0 else self.window, again=again)
        metric.stamp = self.stamp

    def begin_window(self, stamp: int, size: int) -> None:
        """An accumulation window of `size` micro-batches begins at this stamp."""
        self.window = stamp if size > 1 else -1
        self._weighs = self._distributed or size > 1

    def _declare(self, key: tuple[str, str], known: Record | None, signature: tuple[Any, ...], value: Any) -> Record:
        """The record of a name that is logged for the first time in an epoch, or with different options than before."""
        if not isinstance(key[0], str) or not key[0]:
            raise MetricError(
                f"log: the name of a metric must be a non-empty string, not {key[0]!r}. Example: log('loss', loss)"
            )
        if known is not None and alike(known.signature, signature):
            return known
        on_step, on_epoch = cadence(key[0], signature)
        if known is not None:
            if known.pending_state is not None and adopt(known, signature, on_step, on_epoch, value, self._metrics.values()):
                return known
            if known.has_values:
                raise _other_options(key[0], resumed=known.pending_state is not None)
        metric = Record(key, signature, on_step, on_epoch)
        if is_metric_object(key[0], value):
            metric.torchmetric = value
            self._refuse_shared(metric)
        if self._distributed:
            metric.since = self.stamp if self.scope.in_batch else -1
            metric.stamps = [] if metric.how == "function" else None
            self.schema = (self.schema + fingerprint(metric) - (0 if known is None else fingerprint(known))) % FINGERPRINTS
        self._metrics[key] = metric
        return metric

    def _refuse_shared(self, metric: Record) -> None:
        """Refuse an object whose state also has the batches of another metric.

        Raises:
            MetricError: training logs it in this epoch, too; or its states of several loaders could not be merged.
        """
        value, kind = metric.torchmetric, type(metric.torchmetric).__name__
        for other in () if self.outer is None else self.outer._metrics.values():
            if other.torchmetric is not None and overlap(value, other.torchmetric):
                raise MetricError(
                    f"log({metric.full_name!r}): this {kind} is also logged in training, as {other.full_name!r}, in an epoch "
                    "that has not ended, so both values would mix the data of training and validation. Use an object for each: "
                    "self.val_metric = self.train_metric.clone()"
                )
        self._refuse_unmerged(metric)

    def _refuse_unmerged(self, metric: Record) -> None:
        """Refuse a metric of all loaders whose object has lost the states of some: see `end_loaders`."""
        if not any(overlap(metric.torchmetric, part) for part in self._unmerged):
            return
        value = metric.torchmetric
        names = ", ".join(repr(m.full_name) for m in self._metrics.values() if m.suffix and overlap(m.torchmetric, value))
        raise MetricError(
            f"log({metric.full_name!r}): this {type(value).__name__} is also logged for each loader, as {names}, "
            "and its states of several loaders cannot be merged. Use two objects: self.total = self.metric.clone()"
        )

    def _skip(self, value: Any) -> None:
        """On another rank, skip a value that only the main process logs. An object is still reset at the end of the epoch."""
        if callable(getattr(value, "reset", None)):
            self._skipped[id(value)] = value

    def _weight(self, name: str, batch_size: Any) -> float:
        """`batch_size` if given, else the weight of the current batch."""
        if batch_size is not None:
            return weight_of(name, batch_size)
        if self.scope in (Scope.TRAIN_EPOCH, Scope.EVAL_EPOCH):
            return 1
        batch, size = self._size
        if batch is not self.batch or batch is None:
            size = 0 if self.batch is NO_BATCH else self.count(self.batch)
            self._size = (self.batch, size)
        return size

    @property
    def pending(self) -> bool:
        """Whether a value of a step waits for a log boundary on this rank."""
        if self._waiting:
            return True
        for metric in self._metrics.values():  # noqa: SIM110 - faster than any() of a generator, after each batch
            if metric.fresh:
                return True
        return False

    def _pop_fresh(self) -> dict[tuple[str, str], Record]:
        """The metrics with values of the step that were not published yet; they count as published now."""
        fresh = {key: metric for key, metric in self._metrics.items() if metric.fresh}
        for metric in fresh.values():
            metric.fresh = False
        return fresh

    def flush_step(self) -> bool:
        """At a log boundary: read the values of the step, all at once, and pass them to the progress bar and the loggers.

        Returns:
            Whether there were any, so that the device has been waited for.

        Raises:
            MetricError: a rank with batches did not log the same metrics, or logged them with different options.
        """
        waiting, self._waiting = self._waiting, {}
        if self._distributed:
            seen: dict[str, Any] = {}
            metric_values = end_step(self._world, self._metrics, waiting, self.stamp, seen)
            self.results.add(seen)
        else:
            fresh = [*({**waiting, **self._pop_fresh()}.values())]
            metric_values = [*zip(fresh, read([m.value_of_step() for m in fresh]), strict=True)]
        self._publish(metric_values, for_step=True)
        return bool(metric_values)

    def flush_row(self, world: World, had_batch: bool, count: int) -> None:
        """After a row of an evaluation in which a rank has logged by step: pass the values of each batch to the loggers.

        Args:
            world: the ranks.
            had_batch: whether this rank had a batch in the row.
            count: number of batches of the stage so far, with those of this row; the step of the values of the last batch.
        """
        for step, metric_values in end_row(world, self._pop_fresh().values(), had_batch, count):
            self._publish(metric_values, for_step=True, step=step)

    def flush_epoch(self) -> dict[str, float]:
        """At the end of an epoch: reduce, pass to the progress bar and the loggers, and reset. Returns the values by name.

        Raises:
            MetricError: a rank with batches did not log the same metrics, or logged them with different options; or the result
                of a function or an object is not a number.
        """
        metric_values, waiting = self._reduce_epoch()
        self._forget()
        # a metric that is logged rarely waits for a log boundary of the next epoch
        self._waiting |= waiting
        for metric in waiting.values():
            metric.wait()
        self.loaders = {metric.epoch_name: metric.loaders for metric, _ in metric_values}
        self._publish(metric_values, for_step=False)
        return {metric.epoch_name: number for metric, number in metric_values}

    def preview_epoch(self) -> None:
        """Before the hooks at the end of an epoch: let monitors see its values so far. The hooks may log more.

        Raises:
            MetricError: see `flush_epoch`.
        """
        self._reduce_epoch(ends=False)
        self.previewed = True

    def end_loader(self, index: int, first: int) -> None:
        """At the end of an evaluation loader, whose stamps began at `first`: note which metrics were logged in it.

        If there are several loaders, objects that were logged under its suffix are computed and reset. Collective then.
        """
        for metric in self._metrics.values():
            if metric.stamp >= first:
                metric.loaders.append(index)
        if not self.suffix:
            return
        records = {key: one for key, one in self._metrics.items() if key[1] == self.suffix and one.how == "object"}
        if self._distributed:
            for key, number in end_objects(self._world, records).items():
                if key in records:
                    records[key].of_loader = number
        else:
            for metric in records.values():
                metric.of_loader = metric.epoch_value()
        self._loader_states.set_aside([metric.torchmetric for metric in records.values()])

    def end_loaders(self) -> None:
        """After the last loader: the values of later calls and of metrics without a suffix are those of all loaders.

        Raises:
            MetricError: the states of an object that was logged without a suffix, too, cannot be merged.
        """
        self.suffix = ""
        self.batch = None
        self._unmerged = self._loader_states.put_back()
        for metric in self._metrics.values():
            if not metric.suffix:
                self._refuse_unmerged(metric)

    def _reduce_epoch(self, *, ends: bool = True) -> tuple[MetricValues, dict[Key, Record]]:
        """The values of the epoch, also for monitors, and the metrics whose step value waits; `ends`: see `end_epoch`."""
        seen: dict[str, Any] = {}
        evaluation = self.scope in _EVALUATION
        if self._distributed:
            reduced = end_epoch(self._world, self._metrics, self.stamp, self.missing_stamps, seen, last=evaluation, ends=ends)
        else:
            reduced = self._end_epoch(seen)
        self.results.add(seen, evaluation=evaluation)
        return reduced

    def _end_epoch(self, seen: dict[str, Any]) -> tuple[MetricValues, dict[Key, Record]]:
        if self.scope not in _EVALUATION:
            seen.update(self.step_values())
        values: list[tuple[MetricInfo, Any]] = []
        for metric in self._metrics.values():
            value = metric.epoch_value()
            if value is not None:
                values.append((metric, value))
                seen[metric.full_name] = seen[metric.epoch_name] = value
        waiting = {key: metric for key, metric in self._metrics.items() if metric.fresh}
        numbers = read([value for _, value in values])
        return [(metric, number) for (metric, _), number in zip(values, numbers, strict=True)], waiting

    def _forget(self) -> None:
        """The epoch has ended: all its values are computed."""
        objects = [metric.torchmetric for metric in self._metrics.values() if metric.torchmetric is not None]
        reset([*objects, *self._skipped.values()])
        self._metrics = {}
        self._size = (None, 0)
        self.schema = 0
        self.previewed = False
        self._skipped = {}

    def _publish(self, metric_values: MetricValues, *, for_step: bool, step: int | None = None) -> None:
        to_loggers: dict[str, float] = {}
        for metric, number in metric_values:
            name = metric.step_name if for_step else metric.epoch_name
            if metric.prog_bar:
                self.results.progress_bar[name] = number
            if metric.logger:
                to_loggers[name] = number
        if to_loggers:
            self.results.logged.update(to_loggers)
            self._emit(to_loggers, for_step, *(() if step is None else (step,)))

    def step_values(self) -> dict[str, Any]:
        """The latest value in this epoch of each metric that is logged by step, on this rank."""
        values: dict[str, Any] = {}
        for metric in self._metrics.values():
            if metric.step_value is not None:
                values[metric.full_name] = values[metric.step_name] = metric.value_of_step()
        return values

    def in_bar(self) -> dict[str, Any]:
        """The step values for the progress bar that wait for a log boundary: those of this rank, not read yet."""
        return {m.step_name: m.value_of_step() for m in {**self._waiting, **self._metrics}.values() if m.prog_bar and m.fresh}

    def agree_on_step_values(self) -> dict[str, Any]:
        """`step_values`, the same on all ranks, for decisions that depend on them.

        Until a metric is logged again, `step_values` returns these values, too.
        """
        if not self._distributed:
            return self.step_values()
        return agree_on_steps(self._world, self._metrics, last=self.scope in _EVALUATION)

    def schema_entries(self) -> list[Any]:
        """The metrics of this epoch, for which `schema` is a number; JSON."""
        return [describe(metric) for metric in self._metrics.values()]

    def check_schema(self, world: World) -> None:
        """Compare the metrics of this epoch with those of the other ranks.

        Raises:
            MetricError: a rank with batches did not log the same metrics, or logged them with different options.
        """
        reports = [[*entry, None, False, False, None] for entry in self.schema_entries()]
        gathered = world.exchange([self.stamp, reports])
        check(groups(metrics for _, metrics in gathered), [stamp for stamp, _ in gathered])

    def last_stamp(self, name: str) -> int | None:
        """The stamp of a value in `step_values`; `None` if it does not have the name."""
        stamps = (m.stamp for m in self._metrics.values() if m.step_value is not None and name in (m.full_name, m.step_name))
        return next(stamps, None)

    def list_logged_since(self, stamp: int) -> list[str]:
        """The names in `step_values` that were logged at `stamp` or later."""
        recent = [metric for metric in self._metrics.values() if metric.step_value is not None and metric.stamp >= stamp]
        return [name for metric in recent for name in (metric.full_name, metric.step_name)]

    def state_dict(self, module: nn.Module | None = None, before: Mapping[str, int] | None = None) -> dict[str, Any]:
        """The metrics of the epoch so far: numbers, tensors, lists and dicts; tensors are not copied.

        Args:
            module: a module with torchmetrics objects as attributes; those that have state are included, logged or not.
            before: see `trainkit.metrics.metric_objects.capture_objects`.
        """
        objects = {} if module is None else capture_objects(module, before)
        # also those without updates, as a composition whose parts are updated
        paths = {} if module is None else {id(part): path for path, part in metric_objects(module).items()}
        metrics = [capture(metric, None, updated=False) for metric in self._waiting.values()]
        first: dict[int, Record] = {}  # Id of an object → its first record.
        for metric in self._metrics.values():
            value = metric.torchmetric
            shared = None if value is None else first.setdefault(id(value), metric)
            metrics.append(capture(metric, paths.get(id(value)), shared=None if shared is metric else shared))
        return {"stamp": self.stamp, "metrics": metrics, "objects": objects}

    def load_state_dict(
        self, state: Mapping[str, Any], module: nn.Module | None = None, device: torch.device | None = None
    ) -> None:
        """Continue the epoch of `state_dict`.

        Args:
            state: the result of `state_dict`.
            module: its torchmetrics objects get their states now; without it, when they are logged again.
            device: the device for tensors that were not on the CPU.
        """
        objects = {} if module is None else restore_objects(module, state["objects"])
        self.discard()
        self.stamp = int(state["stamp"])
        states = {(entry["name"], entry["suffix"]): entry.get("object") for entry in state["metrics"]}
        for entry in state["metrics"]:
            if shared := entry.get("shared"):
                entry = {**entry, "object": entry["object"] or states[tuple(shared)]}
            # a signature that no call can have, so that the options of the next call are compared
            options = (entry["prog_bar"], entry["logger"], entry["on_step"], entry["on_epoch"], entry["reduce_fx"] or _unknown)
            key = (entry["name"], entry["suffix"])
            signature = (*options, Scope(entry["scope"]), entry["main_only"], None)
            metric = Record(key, signature, entry["on_step"], entry["on_epoch"])
            fill(metric, entry, device, objects)
            if not entry["updated"]:
                self._waiting[key] = metric
                continue
            self._metrics[key] = metric
            if self._distributed:
                self.schema = (self.schema + fingerprint(metric)) % FINGERPRINTS

    def discard(self) -> None:
        """Discard what was logged in this epoch (after the sanity check, or when an epoch is aborted)."""
        self._metrics = {}
        self._waiting = {}
        self.stamp = -1
        self.missing_stamps = []
        self.schema = 0
        self.previewed = False
        self._loader_states = LoaderStates()
        self._unmerged = []


def _other_options(name: str, resumed: bool) -> MetricError:
    if resumed:
        return MetricError(
            f"log({name!r}): the options differ from those before the checkpoint, in the same epoch. Use the same options "
            "until the epoch ends, or resume from a checkpoint saved at the end of an epoch."
        )
    return MetricError(
        f"log({name!r}) was called twice in one epoch with different options or from hooks of different kinds. Use a "
        "different name for each call."
    )


def _unknown(values: Tensor) -> Tensor:
    """Placeholder for a function of the user that has not been passed again yet."""
    raise AssertionError(values)
