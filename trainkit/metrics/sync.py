"""Metrics of several ranks: what each one reports, the exchanges at the end of a step, a row and an epoch, and saved states.

Functions with a `World` are collective and return the same on all ranks. The ranks have one micro-batch each in a row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.console import warn
from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.metrics.metric_objects import compute_over_ranks, merge_objects, merge_values, states_of
from trainkit.metrics.record import MetricInfo, Record, Scope, restore_value, warn_missing
from trainkit.metrics.values import one_element, read

__all__ = [
    "FINGERPRINTS",
    "Groups",
    "Key",
    "MetricValues",
    "RankRecord",
    "agree_on_steps",
    "apply",
    "check",
    "describe",
    "end_epoch",
    "end_objects",
    "end_row",
    "end_step",
    "epoch_number",
    "fingerprint",
    "gather_states",
    "groups",
    "merge_states",
    "of_loader",
    "report_of",
    "step_number",
    "values_of",
]

FINGERPRINTS = 1 << 62  # fingerprints are added in 64 signed bits, and negated


class RankRecord(MetricInfo):
    """The report of one rank on a metric.

    Args:
        rank: the rank.
        data: an item of the result of `report_of`.

    Attributes:
        how: see `Record`, like `main_only` and `since`.
        step: value, samples (`None`: all ranks have agreed on the value), stamp and window of the step; `None` without a
            value. For a function and a window of several micro-batches the value is the list of their values.
        fresh: whether the loggers have not received the value.
        incomplete: whether the function or object is missing: it was not logged again since a resume.
        epoch: for numbers the total and its samples; for a function values and stamps; for an object its class, whether
            its states can be combined, and its value if its loader has ended.
    """

    __slots__ = ("epoch", "fresh", "how", "incomplete", "main_only", "rank", "since", "step")

    def __init__(self, rank: int, data: Sequence[Any]) -> None:
        name, suffix, options, self.how, self.main_only, self.since, self.step, self.fresh, self.incomplete, self.epoch = data[
            :10
        ]
        super().__init__((name, suffix), options)
        self.loaders = list(data[10]) if len(data) > 10 else []
        self.rank = rank


Groups = dict[tuple[str, str], list[RankRecord]]  # Metric → what the ranks reported of it, in rank order.


def describe(record: Record) -> list[Any]:
    """A metric without its values, as JSON."""
    options = [record.on_step, record.on_epoch, record.prog_bar, record.logger]
    return [record.name, record.suffix, options, record.how, record.main_only, record.since]


def report_of(records: Iterable[Record], *, epoch: bool = False) -> list[list[Any]]:
    """The report of this rank on its metrics, as JSON. All values are read with one wait for the device.

    Args:
        records: the metrics.
        epoch: include the values of the epoch.
    """
    report: list[list[Any]] = []
    waiting: list[Any] = []  # values to read, and their places in the report
    places: list[tuple[list[Any], int]] = []

    def later(value: Any, into: list[Any]) -> None:
        waiting.append(value)
        places.append((into, len(into)))
        into.append(None)

    for record in records:
        step = None if record.step_value is None else _step_of(record, later)
        of_epoch: Any = None
        if epoch and record.on_epoch:
            if record.how == "object":
                kind = type(record.torchmetric)
                combines = record.torchmetric is None or hasattr(record.torchmetric, "_defaults")
                of_epoch = [kind.__name__, combines, record.of_loader]
            elif record.how == "function":
                of_epoch = [[], list(record.stamps or ())]
                for value in record.values:
                    later(value, of_epoch[0])
            else:
                record.fold()
                if record.total is not None:
                    of_epoch = []
                    later(record.total, of_epoch)
                    of_epoch.append(record.weight)
        report.append([*describe(record), step, record.fresh, record.pending_state is not None, of_epoch, record.loaders])
    for (into, index), number in zip(places, read(waiting), strict=True):
        into[index] = number
    return report


def _step_of(record: Record, later: Callable[[Any, list[Any]], None]) -> list[Any]:
    """The report on the value of a step; `later` adds a value that is read later."""
    step: list[Any] = []
    if record.earlier and record.how == "function":
        step.append([])
        for value in record.step_values:
            later(value, step[0])
    else:
        later(record.value_of_step(), step)
    step += [record.step_weight, record.stamp, record.stamp if record.window < 0 else record.window]
    return step


def groups(gathered: Iterable[Iterable[Sequence[Any]]]) -> Groups:
    """The reports of all ranks by metric."""
    by_metric: Groups = {}
    for rank, metrics in enumerate(gathered):
        for data in metrics:
            one = RankRecord(rank, data)
            by_metric.setdefault((one.name, one.suffix), []).append(one)
    return by_metric


# ------------------------------------------------------------------------------------------------------------- checking


def check(
    metrics: Groups,
    last_stamps: Sequence[int],
    missing_stamps: Sequence[Sequence[Sequence[int]]] | None = None,
    *,
    step: bool = False,
) -> None:
    """Check that every rank that should have logged a metric has logged it, with the same options.

    A rank need not log a metric that was first logged after its own last batch, or after its last batch of an evaluation
    loader.

    Args:
        metrics: the metrics of all ranks.
        last_stamps: for each rank the stamp of its last batch; negative if it had none.
        missing_stamps: for each rank the earlier stamps at which other ranks had a batch and it had none, as [first, end].
        step: check the values of a step: only those with the newest stamp are required.

    Raises:
        MetricError: the ranks did not log the same metrics; the message names metrics and ranks.
    """
    missing_stamps = [[]] * len(last_stamps) if missing_stamps is None else missing_stamps
    wrong: list[str] = []
    for group in metrics.values():
        first = group[0]
        if first.main_only and all(one.rank == 0 for one in group):
            continue
        needed = _newest(group) if step else min(one.since for one in group)
        had = [_had_batch(needed, last, none) for last, none in zip(last_stamps, missing_stamps, strict=True)]
        wrong += _missing(group, had)
        wrong += [_differing(first, other) for other in group[1:] if _options(first) != _options(other)][:1]
    if wrong:
        raise MetricError("\n".join(wrong))


def _missing(group: Sequence[RankRecord], had: Sequence[bool]) -> list[str]:
    """An error message if ranks that had a batch did not log a metric; otherwise an empty list."""
    first, there = group[0], sorted({one.rank for one in group})
    missing = [rank for rank, needed in enumerate(had) if needed and rank not in there]
    if not missing:
        return []
    return [
        f"log({first.full_name!r}): logged on {_ranks(there)}, not on {_ranks(missing)}. Log it on every rank, or log only "
        f"the value of the main process: log({first.name!r}, value, rank_zero_only=True)"
    ]


def _had_batch(stamp: int, last: int, missing_stamps: Sequence[Sequence[int]]) -> bool:
    """Whether a rank had a batch at a stamp, or any batch if the stamp is negative."""
    return last >= max(stamp, 0) and not any(first <= stamp < end for first, end in missing_stamps)


def _options(one: RankRecord) -> dict[str, Any]:
    return {"on_step": one.on_step, "on_epoch": one.on_epoch, "reduce_fx": one.how, "rank_zero_only": one.main_only}


def _differing(first: RankRecord, other: RankRecord) -> str:
    pairs = zip(_options(first).items(), _options(other).values(), strict=True)
    which = [(name, one, another) for (name, one), another in pairs if one != another]
    here = ", ".join(f"{name}={one!r}" for name, one, _ in which)
    there = ", ".join(f"{name}={another!r}" for name, _, another in which)
    return (
        f"log({first.full_name!r}): logged on rank {first.rank} with {here}, on rank {other.rank} with {there}. Pass the "
        "same options on every rank."
    )


def _ranks(ranks: list[int]) -> str:
    """ "rank 0", "ranks 1, 2", "ranks 1-63"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def fingerprint(record: Record) -> int:
    """A hash of what must be the same for a metric on all ranks; 0 if nothing must be."""
    if record.main_only:
        return 0
    return _hash(repr((record.name, record.suffix, record.on_step, record.on_epoch, record.how)))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % FINGERPRINTS


# ------------------------------------------------------------------------------------------------------------- reducing


def _newest(group: Sequence[RankRecord]) -> int:
    return max((one.step[2] for one in group if one.step is not None), default=-1)


def step_number(group: Sequence[RankRecord], *, last: bool = False) -> tuple[float | list[float], int] | None:
    """The value of a step, reduced over all ranks, and its stamp; `None` if there is none.

    Only values of the newest accumulation window count. For a function the list of the values is returned; a single value is
    not reduced.

    Args:
        group: the metric on all ranks.
        last: return the value of the last rank instead, as in an evaluation each batch is a step.
    """
    steps = _steps_of_newest(group)
    if not steps:
        return None
    newest, how = _newest(group), group[0].how
    values = [value for value, *_ in steps]
    if how == "function":
        values = _in_order(values)
    if last or len(values) == 1:
        return values[-1], newest
    if how == "function":
        return values, newest
    if how in ("mean", "object"):
        totals = [value * weight for value, weight, *_ in steps if weight]
        return _mean(totals, sum(weight for _, weight, *_ in steps)), newest
    return _combine(how, values), newest


def _steps_of_newest(group: Sequence[RankRecord]) -> list[Any]:
    """The steps of the newest window; one without a weight was reduced before, and is used only if there is no other."""
    newest = max((one.step[3] for one in group if one.step is not None), default=-1)
    steps = [one.step for one in group if one.step is not None and one.step[3] == newest]
    return [step for step in steps if step[1] is not None] or steps[:1]


def _in_order(values: Sequence[Any]) -> list[float]:
    """The values of a window, of which each rank has one or a list, in the order of the micro-batches."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    return [value for row in zip_longest(*lists) for value in row if value is not None]


def epoch_number(group: Sequence[RankRecord]) -> float | None:
    """The value of the epoch of a metric with "mean", "sum", "min" or "max"; `None` if it has none."""
    parts = [one.epoch for one in group if one.epoch is not None]
    if not parts:
        return None
    totals = [part[0] for part in parts]
    return _mean(totals, sum(part[1] for part in parts)) if group[0].how == "mean" else _combine(group[0].how, totals)


def of_loader(group: Sequence[RankRecord]) -> float | None:
    """The value of an object whose evaluation loader has ended; `None` for other metrics."""
    values = [one.epoch[2] for one in group if one.how == "object" and one.epoch is not None]
    return next((value for value in values if value is not None), None)


def values_of(group: Sequence[RankRecord]) -> list[float]:
    """All values of the epoch, for a function, in the order of the dataset, whose batches are distributed round-robin."""
    entries: list[tuple[int, int, int, float]] = []
    for one in group:
        values, stamps = one.epoch or ((), ())
        entries += [(stamp, one.rank, n, value) for n, (value, stamp) in enumerate(zip(values, stamps, strict=True))]
    return [value for *_, value in sorted(entries, key=lambda item: item[:3])]


def apply(name: str, function: Callable[..., Any], values: Sequence[float]) -> float:
    """The result of a function of the user."""
    return read([one_element(name, function(torch.tensor(values, dtype=torch.float64)))])[0]


def _mean(totals: list[float], weight: float) -> float:
    return sum(totals) / weight if weight > 0 else math.nan


def _combine(how: str, values: Sequence[float]) -> float:
    if how == "sum":
        return sum(values)
    both = torch.tensor(values, dtype=torch.float64)  # A tensor propagates NaN, as with a single rank.
    return float(both.amin() if how == "min" else both.amax())


Key = tuple[str, str]
Records = MutableMapping[Key, Record]
MetricValues = list[tuple[MetricInfo, float]]  # metrics with their values of a step or an epoch


def end_step(
    world: World, records: Records, waiting: Mapping[Key, Record], stamp: int, callback: MutableMapping[str, Any]
) -> MetricValues:
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
    report = report_of(fresh)
    plan = _plan_step(world, fresh, report, stamp)
    if plan is None:
        gathered = world.exchange([stamp, report])
        metrics = groups(report for _, report in gathered)
        check(metrics, [last_stamp for last_stamp, _ in gathered], step=True)
        new = _agree_on(world, metrics, records, last=False)
    else:
        metrics = plan
        new = _reduce_step(world, plan, report, records) if plan else {}
    for record in fresh:
        record.fresh = False
    old = [record for key, record in waiting.items() if key not in metrics]
    callback.update(_by_name(new))
    numbers = read([record.value_of_step() for record in old])
    return [*zip(old, numbers, strict=True), *((group[0], number) for group, number in new.values())]


def _plan_step(world: World, fresh: Sequence[Record], report: Sequence[Sequence[Any]], stamp: int) -> Groups | None:
    """What is reduced at a log boundary, as far as it need not be gathered: found out by one small reduction.

    The control word of the boundary has a hash of the names, options and stamps, and whether anything was logged.

    Args:
        world: the ranks.
        fresh: the metrics of this rank.
        report: `report_of(fresh)`.
        stamp: the stamp of the last batch of this rank.

    Returns:
        Each metric once, in the order of the main process. `None` if ranks with a batch have logged different metrics, or in
        rare cases, such as a function that is missing since a resume: then all reports are gathered.
    """
    common = [record for record in fresh if not record.main_only]
    odd, names = any(map(_is_odd, fresh)), _names_of_step(common)
    idle = 0 if common else stamp + 2
    odd_on_any, by_main, number, negated, newest, idle_on_any, main_is_idle = world.largest(
        [odd, len(common) < len(fresh), *names, idle, world.is_main and not common]
    )
    needed = FINGERPRINTS - newest  # a rank whose last batch had this stamp, or a later one, must have logged all
    differs = number + negated != FINGERPRINTS or main_is_idle or idle_on_any - 2 >= needed
    if odd_on_any or (number and differs):
        return None
    if not number and not by_main:
        return {}  # nothing was logged
    return groups([world.from_main(report) if by_main or idle_on_any else report])


def _reduce_step(
    world: World, plan: Groups, report: Sequence[Sequence[Any]], records: Records
) -> dict[Key, tuple[list[RankRecord], float]]:
    """The values of the step: one reduction of sums, weights and maxima, and an exchange only if there are functions.

    Sums are added with their rounding errors (T. J. Dekker, A floating-point technique for extending the available precision,
    1971), so that they do not depend on the order in which ranks are added, but for the last bit in rare cases.
    """
    mine = groups([report])
    common = {key: one.how for key, (one, *_) in plan.items() if not one.main_only}
    functions = {key for key, how in common.items() if how == "function"}
    sums: list[float] = [float(bool(mine.keys() & common.keys()))]  # the number of ranks, then values
    largest: list[float] = []
    for key in sorted(common.keys() - functions):
        added, compared = _terms(common[key], mine[key][0].step if key in mine else None)
        sums += added
        largest += compared
    if len(sums) + len(largest) > 1:
        sums, largest = _reduce(world, sums, largest)
    own_calls = [data for data in report if (data[0], data[1]) in functions]
    by_function = groups(world.exchange(own_calls) if functions else [])
    agreed = _agree_on(world, by_function, records, last=False)
    ranks, totals, maxima = sums[0], iter(sums[1:]), iter(largest)
    for key in sorted(plan.keys() - functions):
        one = plan[key][0]
        value = _value_of_step(one, totals, maxima, ranks)
        agreed[key] = plan[key], value
        if key in records:
            records[key].agree(_tensor(value), one.step[2])
    return {key: agreed[key] for key in plan if key in agreed}


def _is_odd(record: Record) -> bool:
    """Whether the report of a metric has to be gathered: its value or function is missing, or earlier ones wait."""
    return record.step_value is None or record.pending_state is not None or bool(record.main_only and record.earlier)


def _names_of_step(records: Sequence[Record]) -> tuple[int, int, int]:
    """A hash of what must be the same on ranks that have logged in a step, its negation, and that of the oldest stamp.

    Each is from 0 to `FINGERPRINTS`, and 0 if nothing was logged, so that the largest of all ranks tells whether they differ.
    """
    if not records:
        return 0, 0, 0
    entries = [[*describe(record)[:5], record.stamp, record.window, record.step_weight is None] for record in records]
    number = 1 + _hash(repr(sorted(entries, key=lambda entry: entry[:2])))
    return number, FINGERPRINTS - number, FINGERPRINTS - min(max(record.stamp, 0) for record in records)


def _terms(how: str, step: Sequence[Any] | None) -> tuple[list[float], list[float]]:
    """What a rank contributes to the sums, and to the maxima, for a metric; `step` is `None` if it has no value of it."""
    if how in ("min", "max"):
        return [], [-math.inf if step is None else -step[0] if how == "min" else step[0]]
    if how == "sum":
        return [0.0 if step is None else step[0]], []
    weight = 0.0 if step is None else step[1] or 0.0
    return [step[0] * weight if step is not None and weight else 0.0, weight], []


def _reduce(world: World, sums: list[float], largest: list[float]) -> tuple[list[float], list[float]]:
    """The sums and the maxima over all ranks, in one reduction."""
    size = len(sums)
    total = world.combine(torch.tensor([*sums, *[0.0] * size, *largest], dtype=torch.float64), _adder(size))
    found, errors, largest = total[:size].tolist(), total[size : 2 * size].tolist(), total[2 * size :].tolist()
    return [one + error if math.isfinite(error) else one for one, error in zip(found, errors, strict=True)], largest


def _value_of_step(one: RankRecord, totals: Iterator[float], maxima: Iterator[float], ranks: float) -> float:
    """The value of a metric from what was reduced, of which it takes its part."""
    value: float = one.step[0]
    if one.main_only:
        return value
    if one.how in ("min", "max"):
        found = next(maxima) if one.how == "max" else -next(maxima)
    elif one.how == "sum":
        found = next(totals)
    else:
        total, weight = next(totals), next(totals)
        found = _mean([total], weight)
    alone = one.step[1] is None or ranks <= 1  # the value of a single rank, or one that was reduced before
    return value if alone else found


def _adder(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that combines two vectors of `size` sums, their rounding errors, and maxima."""

    def add(one: Tensor, other: Tensor) -> Tensor:
        mine, its = one.numpy(), other.numpy()  # the operations of numpy take a fifth of the time for a few numbers
        a, b = mine[:size], its[:size]
        found = np.maximum(mine, its)
        with np.errstate(invalid="ignore"):  # infinities
            total = np.add(a, b, out=found[:size])
            of_b = total - a
            found[size : 2 * size] = mine[size : 2 * size] + its[size : 2 * size] + ((a - (total - of_b)) + (b - of_b))
        return torch.from_numpy(found)

    return add


def agree_on_steps(world: World, records: Records, *, last: bool) -> dict[str, Any]:
    """The values of the step by name; `last`: see `step_number`."""
    report = report_of([record for record in records.values() if record.step_value is not None])
    return _by_name(_agree_on(world, groups(world.exchange(report)), records, last=last))


def end_row(world: World, fresh: Iterable[Record], had_batch: bool, count: int) -> list[tuple[int, MetricValues]]:
    """The number of each batch in a row of an evaluation, and its values.

    Args:
        world: the ranks.
        fresh: the metrics that this rank has logged by step.
        had_batch: whether this rank had a batch.
        count: the number of the last batch in the row.
    """
    gathered = world.exchange([had_batch, report_of(fresh)])
    number = count - sum(had for had, _ in gathered)
    rows: list[tuple[int, MetricValues]] = []
    for rank, (had, report) in enumerate(gathered):
        number += had
        if report:
            rows.append((number, [(metric, metric.step[0]) for data in report if (metric := RankRecord(rank, data)).step]))
    return rows


def end_epoch(
    world: World,
    records: Records,
    stamp: int,
    missing_stamps: Sequence[Sequence[int]],
    callback: MutableMapping[str, Any],
    *,
    last: bool,
    ends: bool = True,
) -> tuple[MetricValues, dict[Key, Record]]:
    """The values of an epoch, and the metrics whose step value waits for the next log boundary.

    Args:
        world: the ranks.
        records: the metrics of this rank.
        stamp: the stamp of its last batch in the epoch.
        missing_stamps: those of this rank, see `check`.
        callback: receives the values of the epoch and, in training, of its last step.
        last: True in an evaluation, see `step_number`.
        ends: the epoch ends, and step values wait. False: only return its values so far.

    Raises:
        MetricError: the ranks did not log the same metrics, or a value is not a number.
    """
    stamps, all_missing, reports = zip(
        *world.exchange([stamp, missing_stamps, report_of(records.values(), epoch=True)]), strict=True
    )
    metrics = groups(reports)
    check(metrics, stamps, all_missing)
    steps = _agree_on(world, metrics, records, last=last)
    if not last:
        callback.update(_by_name(steps))
    numbers = {key: group for key, group in metrics.items() if group[0].on_epoch and group[0].how not in ("function", "object")}
    values = {key: epoch_number(group) for key, group in numbers.items()}
    values |= _compute_values(world, metrics, records)
    metric_values: MetricValues = []
    for key, group in metrics.items():
        value = values.get(key)
        if value is not None:
            group[0].loaders = sorted({index for one in group for index in one.loaders})
            metric_values.append((group[0], value))
            callback[group[0].full_name] = callback[group[0].epoch_name] = _tensor(value)
    return metric_values, _waiting(steps, records) if ends else {}


def end_objects(world: World, records: Mapping[Key, Record]) -> dict[Key, float | None]:
    """The values of torchmetrics objects at the end of an evaluation loader, of those that any rank has logged in it.

    Args:
        world: the ranks.
        records: the metrics of this rank with these objects.
    """
    metrics = groups(world.exchange(report_of(records.values(), epoch=True)))
    return _first_of(world, _object_calls(world, metrics, records))


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


def _agree_on(world: World, metrics: Groups, records: Records, *, last: bool) -> dict[Key, tuple[list[RankRecord], float]]:
    """The value of the step of each metric that has one; it is stored in the records, too."""
    there = {key: step for key, group in metrics.items() if (step := step_number(group, last=last)) is not None}
    lists = {key: values for key, (values, _) in there.items() if isinstance(values, list)}
    alike = all(len(metrics[key]) == world.size and not any(one.incomplete for one in metrics[key]) for key in lists)
    applied = _first_of(world, {key: _apply_call(records.get(key), values) for key, values in lists.items()}, alone=alike)
    agreed: dict[Key, tuple[list[RankRecord], float]] = {}
    for key, (value, stamp) in there.items():
        number = applied[key] if isinstance(value, list) else value
        if number is None:
            continue  # a function that was not passed again since the resume
        agreed[key] = metrics[key], number
        record = records.get(key)
        if record is not None:
            record.agree(_tensor(number), stamp)
    return agreed


# ---------------------------------------------------------------------------------------------- functions and objects


def _apply_call(record: Record | None, values: list[float]) -> Callable[[], float] | None:
    """A call of the function of a metric, if this rank has the function."""
    if record is None or record.pending_state is not None:
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
    results: list[float | None] = []
    error: Exception | None = None
    try:
        results = [None if call is None else call() for call in calls.values()]
    except Exception as failure:
        if alone:
            raise
        error = failure
    if alone or not calls:
        return dict(zip(calls, results, strict=True))
    gathered = world.exchange([results, None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(gathered):
        if text is not None:
            raise MetricError(f"rank {rank}: {text}")
    columns = zip(*(values for values, _ in gathered), strict=True)
    return {key: next((v for v in column if v is not None), None) for key, column in zip(calls, columns, strict=True)}


def _compute_values(world: World, metrics: Groups, records: Records) -> dict[Key, float | None]:
    """The values of the epoch that a function or an object computes; nothing is exchanged if there are none."""
    calls = _object_calls(world, metrics, records)
    for key, group in metrics.items():
        if group[0].how == "function" and group[0].on_epoch:
            calls[key] = _reduce_call(group, records.get(key))
    values = _first_of(world, calls) | {key: one for key, group in metrics.items() if (one := of_loader(group)) is not None}
    for key, value in values.items():
        record = records.get(key)
        if value is None and record is not None:
            warn_missing(record)
    return values


def _object_calls(world: World, metrics: Groups, records: Mapping[Key, Record]) -> dict[Key, Callable[[], float] | None]:
    """For each object the call that computes its value of the epoch. The states of shared objects are gathered first."""
    objects = {key: group for key, group in metrics.items() if _is_to_compute(group)}
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
    if record is None or record.pending_state is None:
        return _apply_call(record, values) if values else None
    so_far, own_count = record.pending_state["so_far"], len(record.values)
    return (lambda: read([so_far])[0]) if so_far is not None and own_count == len(values) else None


def _states(record: Record | None) -> dict[str, Any]:
    """The states of a metric's object on this rank, or those in the checkpoint if it was not logged since the resume."""
    if record is None:
        return {}
    if record.torchmetric is not None:
        return states_of(record.torchmetric) if hasattr(record.torchmetric, "_defaults") else {}
    state = (record.pending_state or {}).get("object")
    return {} if state is None else {"": {"updates": state["updates"], "states": state["states"]}}


def _compute_call(record: Record | None, gathered: list[dict[str, Any]]) -> Callable[[], float] | None:
    if record is None or record.torchmetric is None:
        return None
    name, metric = record.full_name, record.torchmetric
    if not hasattr(metric, "_defaults"):
        return lambda: read([one_element(name, metric.compute())])[0]
    return lambda: read([one_element(name, compute_over_ranks(name, metric, gathered))])[0]


def _refuse_other_libraries(group: list[RankRecord]) -> None:
    """Refuse objects of other libraries, whose states cannot be combined."""
    for one in group:
        if one.epoch is not None and not one.epoch[1]:
            raise MetricError(
                f"log({one.full_name!r}): the states of a {one.epoch[0]} on several processes cannot be combined, because it "
                f"is not a torchmetrics Metric. Log a number: log({one.name!r}, metric.compute()), or only the value of the "
                "main process: rank_zero_only=True"
            )


State = dict[str, Any]


def gather_states(world: World, state: Mapping[str, Any]) -> list[State]:
    """The `MetricStore.state_dict` of each rank; if there are several ranks, tensors are copied to the CPU. Collective."""
    gathered: list[State] = world.exchange_state(dict(state))
    return gathered


def merge_states(states: Mapping[str, Any] | Sequence[Mapping[str, Any]], rank: int, size: int) -> State:
    """The state of one of `size` ranks, merged from the states of all ranks in a checkpoint.

    With the same world size each rank gets its own state. Otherwise rank r takes over ranks r, r + size, …, which preserves
    totals. A rank that takes over none still gets the metrics without values, since it may not log them again in this epoch.

    Args:
        states: the states of all ranks in the checkpoint, or that of a single process.
        rank: the rank of this process.
        size: the world size.
    """
    if isinstance(states, Mapping):
        states = [states]
    if len(states) == size:
        return dict(states[rank])
    by_metric: dict[tuple[str, str, bool], dict[int, Mapping[str, Any]]] = {}  # metric → rank in the checkpoint → entry
    for old, state in enumerate(states):
        for entry in state["metrics"]:
            by_metric.setdefault((entry["name"], entry["suffix"], entry["updated"]), {})[old] = entry
    mine = range(rank, len(states), size)
    entries = [_metric(by_rank, mine, size) for by_rank in by_metric.values() if rank == 0 or not _is_main_only(by_rank)]
    objects: dict[str, list[Any]] = {}
    for old in mine:
        for path, kept in states[old]["objects"].items():
            objects.setdefault(path, []).append(kept)
    return {"stamp": -1, "metrics": entries, "objects": {path: _object(path, kept) for path, kept in objects.items()}}


def _is_main_only(by_rank: Mapping[int, Mapping[str, Any]]) -> bool:
    entry = next(iter(by_rank.values()))
    return bool(entry["main_only"] and entry["updated"])


def _metric(by_rank: Mapping[int, Mapping[str, Any]], mine: range, size: int) -> State:
    """One metric, merged from the entries of the ranks in the checkpoint that this rank takes over."""
    first = next(iter(by_rank.values()))
    taken = {old: entry for old, entry in by_rank.items() if old in mine}
    merged = {**first, "since": 0, "stamp": -1, "window": -1, "step_weight": None, "earlier": [], "weight": 0.0}
    merged |= {"total": None, "stamps": None}
    merged |= {"step_value": _step_value(by_rank), "fresh": any(entry["fresh"] for entry in by_rank.values())}
    merged |= {"weights": [], "values": [], "so_far": None}
    if not first["updated"]:
        return merged
    if first["is_object"]:
        kept = [entry["object"] for entry in taken.values() if entry["object"] is not None]
        return {**merged, "object": _object(first["name"], kept) if kept else None}
    if first["reduce_fx"] is None:
        return {**merged, **_for_a_function(by_rank, taken, size)}
    return {**merged, **_for_numbers(first["reduce_fx"], list(taken.values()))}


def _for_numbers(how: str, entries: Sequence[Mapping[str, Any]]) -> State:
    """The combined totals, and the concatenated values that are in no total yet."""
    total = None
    if totals := [entry["total"] for entry in entries if entry["total"] is not None]:
        # the total of a mean is a sum
        merged = merge_values("sum" if how == "mean" else how, [restore_value(one, None) for one in totals], [], False)
        total = _with_value(totals[0], merged)
    return {
        "total": total,
        "values": list(chain.from_iterable(map(_values, entries))),
        "weights": list(chain.from_iterable(entry["weights"] for entry in entries)),
        "weight": sum((entry["weight"] for entry in entries), 0.0),
    }


def _for_a_function(by_rank: Mapping[int, Mapping[str, Any]], taken: Mapping[int, Any], size: int) -> State:
    """All values in the order of the dataset, each with its place among those of all ranks as a negative stamp."""
    places: list[tuple[int, int, int]] = []
    for old, entry in by_rank.items():
        stamps = entry["stamps"] or range(len(entry["values"]))  # the values of a single process are in order
        places += [(stamp, old, n) for n, stamp in enumerate(stamps)]
    ordered = [(old, n) for _, old, n in sorted(places)]
    own_places = [(place - len(ordered), old, n) for place, (old, n) in enumerate(ordered) if old in taken]
    values = {old: _values(entry) for old, entry in taken.items()}
    alone = next(iter(by_rank.values()))["so_far"] if len({old for old, _ in ordered}) == 1 else None
    return {
        "values": [values[old][n] for _, old, n in own_places],
        "stamps": [stamp for stamp, _, _ in own_places] if size > 1 else None,
        "weights": [taken[old]["weights"][n] for _, old, n in own_places],
        "so_far": alone if own_places else None,
    }


def _values(entry: Mapping[str, Any]) -> list[Any]:
    """The values of a metric one by one, as they are stored in a checkpoint."""
    values = entry["values"]
    if isinstance(values, Mapping):
        return [{**values, "value": value} for value in values["value"].unbind()]
    return list(values.unbind()) if isinstance(values, Tensor) else list(values)


def _with_value(store_value: Any, value: Tensor) -> Any:
    return {**store_value, "value": value} if isinstance(store_value, Mapping) else value


def _step_value(by_rank: Mapping[int, Mapping[str, Any]]) -> Tensor | None:
    """The value of the step as the next log boundary would have reduced it; for a function the newest value."""
    reports = []
    for old, entry in by_rank.items():
        if entry["step_value"] is not None:
            values = [value for value, _ in entry.get("earlier", ())]  # Only functions have it; older checkpoints do not.
            numbers = read([restore_value(value, None) for value in (*values, entry["step_value"])])
            how = "object" if entry["is_object"] else entry["reduce_fx"] or "function"
            weight = 1 if entry["step_weight"] is None and len(by_rank) == 1 else entry["step_weight"]
            stamp, window = entry["stamp"], entry.get("window", -1)
            step = [numbers if values else numbers[0], weight, stamp, stamp if window < 0 else window]
            options = [entry["on_step"], entry["on_epoch"], False, None]
            reports.append(RankRecord(old, [entry["name"], entry["suffix"], options, how, False, 0, step, False, False, None]))
    reduced = step_number(reports)
    if reduced is None:
        return None
    value = reduced[0]
    return torch.tensor(value[-1] if isinstance(value, list) else value, dtype=torch.float64)


def _object(name: str, states: Sequence[Mapping[str, Any]]) -> State:
    """The merged state of an object from several ranks."""
    if len(states) == 1:
        return dict(states[0])
    try:
        return merge_objects(states)
    except (ValueError, RuntimeError) as error:
        warn(
            f"{name}: the states of this torchmetrics object from {len(states)} processes cannot be combined ({error}). Only "
            "the state of the first process is used, so the value for this epoch is not exact. For an exact value, resume on "
            "the number of processes that saved the checkpoint."
        )
        return dict(states[0])
