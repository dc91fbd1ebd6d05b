"""Metrics of several ranks: the exchanges at the end of a step, of a row of an evaluation, and of an epoch.

All functions here are collective and return the same on all ranks. The ranks have one micro-batch each in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.metrics.record import MetricInfo, Record, Scope
from trainkit.metrics.reduce import (
    Groups,
    RankRecord,
    apply,
    check,
    epoch_number,
    groups,
    of_loader,
    report_of,
    step_number,
    values_of,
)
from trainkit.metrics.saved_metrics import warn_missing
from trainkit.metrics.torchmetrics import computed, states_of
from trainkit.metrics.values import one_element, read

__all__ = ["Ended", "Key", "agree_on_steps", "end_epoch", "end_objects", "end_row", "end_step"]

Key = tuple[str, str]
Records = MutableMapping[Key, Record]
Ended = list[tuple[MetricInfo, float]]  # metrics with their values of a step or an epoch


def end_step(
    world: World, records: Records, waiting: Mapping[Key, Record], stamp: int, callback: MutableMapping[str, Any]
) -> Ended:
    """The values of a step at a log boundary.

    Args:
        world: the ranks.
        records: the metrics of this rank.
        waiting: metrics that have waited for the boundary since an earlier epoch, the same on all ranks.
        stamp: the stamp of the last batch of this rank.
        callback: receives the values.

    Raises:
        MetricError: the ranks did not log the same metrics.
    """
    fresh = [record for record in records.values() if record.fresh]
    gathered = world.exchange([stamp, report_of(fresh)])
    found = groups(report for _, report in gathered)
    check(found, [last_stamp for last_stamp, _ in gathered], step=True)
    for record in fresh:
        record.fresh = False
    old = [record for key, record in waiting.items() if key not in found]
    new = _agree_on(world, found, records, last=False)
    callback.update(_by_name(new))
    numbers = read([record.value_of_step() for record in old])
    return [*zip(old, numbers, strict=True), *((group[0], number) for group, number in new.values())]


def agree_on_steps(world: World, records: Records, *, last: bool) -> dict[str, Any]:
    """The values of the step by name; `last`: see `step_number`."""
    report = report_of([record for record in records.values() if record.step_value is not None])
    return _by_name(_agree_on(world, groups(world.exchange(report)), records, last=last))


def end_row(world: World, fresh: Iterable[Record], had_batch: bool, count: int) -> list[tuple[int, Ended]]:
    """The number of each batch in a row of an evaluation, and its values.

    Args:
        world: the ranks.
        fresh: the metrics that this rank has logged by step.
        had_batch: whether this rank had a batch.
        count: the number of the last batch in the row.
    """
    gathered = world.exchange([had_batch, report_of(fresh)])
    number = count - sum(had for had, _ in gathered)
    rows: list[tuple[int, Ended]] = []
    for rank, (had, report) in enumerate(gathered):
        number += had
        if report:
            rows.append((number, [(metric, metric.step[0]) for data in report if (metric := RankRecord(rank, data)).step]))
    return rows


def end_epoch(
    world: World,
    records: Records,
    stamp: int,
    gaps: Sequence[Sequence[int]],
    callback: MutableMapping[str, Any],
    *,
    last: bool,
    ends: bool = True,
) -> tuple[Ended, dict[Key, Record]]:
    """The values of an epoch, and the metrics whose step value waits for the next log boundary.

    Args:
        world: the ranks.
        records: the metrics of this rank.
        stamp: the stamp of its last batch in the epoch.
        gaps: the gaps of this rank, see `check`.
        callback: receives the values of the epoch and, in training, of its last step.
        last: True in an evaluation, see `step_number`.
        ends: the epoch ends, and step values wait. False: only return its values so far.

    Raises:
        MetricError: the ranks did not log the same metrics, or a value is not a number.
    """
    stamps, all_gaps, reports = zip(*world.exchange([stamp, gaps, report_of(records.values(), epoch=True)]), strict=True)
    found = groups(reports)
    check(found, stamps, all_gaps)
    steps = _agree_on(world, found, records, last=last)
    if not last:
        callback.update(_by_name(steps))
    numbers = {key: group for key, group in found.items() if group[0].on_epoch and group[0].how not in ("function", "object")}
    values = {key: epoch_number(group) for key, group in numbers.items()}
    values |= _computed_values(world, found, records)
    ended: Ended = []
    for key, group in found.items():
        value = values.get(key)
        if value is not None:
            group[0].loaders = sorted({index for one in group for index in one.loaders})
            ended.append((group[0], value))
            callback[group[0].full_name] = callback[group[0].epoch_name] = _tensor(value)
    return ended, _waiting(steps, records) if ends else {}


def end_objects(world: World, records: Mapping[Key, Record]) -> dict[Key, float | None]:
    """The values of torchmetrics objects at the end of an evaluation loader, of those that any rank has logged in it.

    Args:
        world: the ranks.
        records: the metrics of this rank with these objects.
    """
    found = groups(world.exchange(report_of(records.values(), epoch=True)))
    return _first_of(world, _object_calls(world, found, records))


def _waiting(steps: Mapping[Key, tuple[list[RankRecord], float]], records: Records) -> dict[Key, Record]:
    """The metrics whose step value the loggers have not received, including those that this rank has not logged."""
    waiting: dict[Key, Record] = {}
    for key, (group, number) in steps.items():
        if any(one.fresh for one in group):
            waiting[key] = record = records.get(key) or _record(group[0])
            record.agree(_tensor(number), -1)
            record.fresh = True
    return waiting


def _tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _record(one: RankRecord) -> Record:
    """A metric that this rank has not logged."""
    signature = (one.prog_bar, one.logger, one.on_step, one.on_epoch, "mean", Scope.TRAIN_BATCH, one.main_only)
    return Record((one.name, one.suffix), signature, one.on_step, one.on_epoch)


def _by_name(steps: Mapping[Key, tuple[list[RankRecord], float]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for group, number in steps.values():
        named[group[0].full_name] = named[group[0].step_name] = _tensor(number)
    return named


def _agree_on(world: World, found: Groups, records: Records, *, last: bool) -> dict[Key, tuple[list[RankRecord], float]]:
    """The value of the step of each metric that has one; it is stored in the records, too."""
    there = {key: step for key, group in found.items() if (step := step_number(group, last=last)) is not None}
    lists = {key: values for key, (values, _) in there.items() if isinstance(values, list)}
    alike = all(len(found[key]) == world.size and not any(one.awaits for one in found[key]) for key in lists)
    applied = _first_of(world, {key: _apply_call(records.get(key), values) for key, values in lists.items()}, alone=alike)
    agreed: dict[Key, tuple[list[RankRecord], float]] = {}
    for key, (value, stamp) in there.items():
        number = applied[key] if isinstance(value, list) else value
        if number is None:
            continue  # a function that was not passed again since the resume
        agreed[key] = found[key], number
        record = records.get(key)
        if record is not None:
            record.agree(_tensor(number), stamp)
    return agreed


# ---------------------------------------------------------------------------------------------- functions and objects


def _apply_call(record: Record | None, values: list[float]) -> Callable[[], float] | None:
    """A call of the function of a metric, if this rank has the function."""
    if record is None or record.awaits is not None:
        return None
    name, function = record.full_name, record.reduce_fx
    return lambda: apply(name, function, values)


def _first_of(world: World, calls: Mapping[Key, Callable[[], float] | None], *, alone: bool = False) -> dict[Key, float | None]:
    """The result of each call from the first rank that can make it; all ranks use this result.

    Args:
        world: the ranks.
        calls: the calls; `None` for those that this rank cannot make.
        alone: all ranks can make all calls with the same results; nothing is exchanged.

    Raises:
        MetricError: a call failed on another rank. The rank where it failed raises its own error.
    """
    own: list[float | None] = []
    error: Exception | None = None
    try:
        own = [None if call is None else call() for call in calls.values()]
    except Exception as failure:
        if alone:
            raise
        error = failure
    if alone or not calls:
        return dict(zip(calls, own, strict=True))
    gathered = world.exchange([own, None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(gathered):
        if text is not None:
            raise MetricError(f"rank {rank}: {text}")
    columns = zip(*(values for values, _ in gathered), strict=True)
    return {key: next((v for v in column if v is not None), None) for key, column in zip(calls, columns, strict=True)}


def _computed_values(world: World, found: Groups, records: Records) -> dict[Key, float | None]:
    """The values of the epoch that a function or an object computes; nothing is exchanged if there are none."""
    calls = _object_calls(world, found, records)
    for key, group in found.items():
        if group[0].how == "function" and group[0].on_epoch:
            calls[key] = _reduce_call(group, records.get(key))
    values = _first_of(world, calls) | {key: one for key, group in found.items() if (one := of_loader(group)) is not None}
    for key, value in values.items():
        record = records.get(key)
        if value is None and record is not None:
            warn_missing(record)
    return values


def _object_calls(world: World, found: Groups, records: Mapping[Key, Record]) -> dict[Key, Callable[[], float] | None]:
    """For each object the call that computes its value of the epoch. The states of shared objects are gathered first."""
    objects = {key: group for key, group in found.items() if _is_to_compute(group)}
    shared = [key for key, group in objects.items() if not group[0].main_only]
    for key in shared:
        _refuse_other_libraries(objects[key])
    gathered = world.exchange_state([_states(records.get(key)) for key in shared]) if shared else []
    calls = {key: _compute_call(records.get(key), [states[n] for states in gathered]) for n, key in enumerate(shared)}
    # in the order of `objects`, which is the same on all ranks, as their results are matched by position
    main_only = [key for key in objects if key not in calls]
    return calls | {key: _compute_call(records.get(key), [_states(records.get(key))]) for key in main_only}


def _is_to_compute(group: list[RankRecord]) -> bool:
    """Whether it is an object whose value of the epoch is not known from the end of its evaluation loader."""
    return group[0].how == "object" and group[0].on_epoch and of_loader(group) is None


def _reduce_call(group: list[RankRecord], record: Record | None) -> Callable[[], float] | None:
    """A call of a function with all values of the epoch, or its result before the resume if it was not passed again."""
    values = values_of(group)
    if record is None or record.awaits is None:
        return _apply_call(record, values) if values else None
    so_far, own = record.awaits["so_far"], len(record.values)
    return (lambda: read([so_far])[0]) if so_far is not None and own == len(values) else None


def _states(record: Record | None) -> dict[str, Any]:
    """The states of a metric's object on this rank, or those in the checkpoint if it was not logged since the resume."""
    if record is None:
        return {}
    if record.torchmetric is not None:
        return states_of(record.torchmetric) if hasattr(record.torchmetric, "_defaults") else {}
    state = (record.awaits or {}).get("object")
    return {} if state is None else {"": {"updates": state["updates"], "states": state["states"]}}


def _compute_call(record: Record | None, gathered: list[dict[str, Any]]) -> Callable[[], float] | None:
    if record is None or record.torchmetric is None:
        return None
    name, metric = record.full_name, record.torchmetric
    if not hasattr(metric, "_defaults"):
        return lambda: read([one_element(name, metric.compute())])[0]
    return lambda: read([one_element(name, computed(name, metric, gathered))])[0]


def _refuse_other_libraries(group: list[RankRecord]) -> None:
    """Refuse objects of other libraries, whose states cannot be combined."""
    for one in group:
        if one.epoch is not None and not one.epoch[1]:
            raise MetricError(
                f"log({one.full_name!r}): the states of a {one.epoch[0]} on several processes cannot be combined, because it "
                f"is not a torchmetrics Metric. Log a number: log({one.name!r}, metric.compute()), or only the value of the "
                "main process: rank_zero_only=True"
            )
