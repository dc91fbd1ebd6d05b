"""Metrics of several ranks: what each rank reports, whether the reports match, and their reduction.

Nothing here communicates: the functions get the reports of all ranks, which are the same on all ranks, and so return the same.
Numbers are added in rank order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from trainkit.errors import MetricError
from trainkit.metrics.record import MetricInfo, Record
from trainkit.metrics.values import one_element, read

__all__ = [
    "FINGERPRINTS",
    "Groups",
    "RankRecord",
    "apply",
    "check",
    "described",
    "epoch_number",
    "fingerprint",
    "groups",
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
        awaits: whether the function or object is missing: it was not logged again since a resume.
        epoch: for numbers the total and its samples; for a function values and stamps; for an object its class, whether
            its states can be combined, and its value if its loader has ended.
    """

    __slots__ = ("awaits", "epoch", "fresh", "how", "main_only", "rank", "since", "step")

    def __init__(self, rank: int, data: Sequence[Any]) -> None:
        name, suffix, options, self.how, self.main_only, self.since, self.step, self.fresh, self.awaits, self.epoch = data[:10]
        super().__init__((name, suffix), options)
        self.loaders = list(data[10]) if len(data) > 10 else []
        self.rank = rank


Groups = dict[tuple[str, str], list[RankRecord]]  # what the ranks reported of each metric, in rank order


def described(record: Record) -> list[Any]:
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
        ended: Any = None
        if epoch and record.on_epoch:
            if record.how == "object":
                kind = type(record.torchmetric)
                combines = record.torchmetric is None or hasattr(record.torchmetric, "_defaults")
                ended = [kind.__name__, combines, record.of_loader]
            elif record.how == "function":
                ended = [[], list(record.stamps or ())]
                for value in record.values:
                    later(value, ended[0])
            else:
                record.fold()
                if record.total is not None:
                    ended = []
                    later(record.total, ended)
                    ended.append(record.weight)
        report.append([*described(record), step, record.fresh, record.awaits is not None, ended, record.loaders])
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
    found: Groups = {}
    for rank, metrics in enumerate(gathered):
        for data in metrics:
            one = RankRecord(rank, data)
            found.setdefault((one.name, one.suffix), []).append(one)
    return found


# ------------------------------------------------------------------------------------------------------------- checking


def check(
    found: Groups, last_stamps: Sequence[int], gaps: Sequence[Sequence[Sequence[int]]] | None = None, *, step: bool = False
) -> None:
    """Check that every rank that should have logged a metric has logged it, with the same options.

    A rank need not log a metric that was first logged after its own last batch, or after its last batch of an evaluation
    loader.

    Args:
        found: the metrics of all ranks.
        last_stamps: for each rank the stamp of its last batch; negative if it had none.
        gaps: for each rank the earlier stamps at which other ranks had a batch and it had none, as [first, end].
        step: check the values of a step: only those with the newest stamp are required.

    Raises:
        MetricError: the ranks did not log the same metrics; the message names metrics and ranks.
    """
    gaps = [[]] * len(last_stamps) if gaps is None else gaps
    wrong: list[str] = []
    for group in found.values():
        first = group[0]
        if first.main_only and all(one.rank == 0 for one in group):
            continue
        needed = _newest(group) if step else min(one.since for one in group)
        had = [_had_batch(needed, last, none) for last, none in zip(last_stamps, gaps, strict=True)]
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


def _had_batch(stamp: int, last: int, gaps: Sequence[Sequence[int]]) -> bool:
    """Whether a rank had a batch at a stamp, or any batch if the stamp is negative."""
    return last >= max(stamp, 0) and not any(first <= stamp < end for first, end in gaps)


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
    facts = repr((record.name, record.suffix, record.on_step, record.on_epoch, record.how))
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=8).digest(), "little") % FINGERPRINTS


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
    return _combined(how, values), newest


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
    return _mean(totals, sum(part[1] for part in parts)) if group[0].how == "mean" else _combined(group[0].how, totals)


def of_loader(group: Sequence[RankRecord]) -> float | None:
    """The value of an object whose evaluation loader has ended; `None` for other metrics."""
    values = [one.epoch[2] for one in group if one.how == "object" and one.epoch is not None]
    return next((value for value in values if value is not None), None)


def values_of(group: Sequence[RankRecord]) -> list[float]:
    """All values of the epoch, for a function, in the order of the dataset, whose batches are distributed round-robin."""
    found: list[tuple[int, int, int, float]] = []
    for one in group:
        values, stamps = one.epoch or ((), ())
        found += [(stamp, one.rank, n, value) for n, (value, stamp) in enumerate(zip(values, stamps, strict=True))]
    return [value for *_, value in sorted(found, key=lambda item: item[:3])]


def apply(name: str, function: Callable[..., Any], values: Sequence[float]) -> float:
    """The result of a function of the user."""
    return read([one_element(name, function(torch.tensor(values, dtype=torch.float64)))])[0]


def _mean(totals: list[float], weight: float) -> float:
    return sum(totals) / weight if weight > 0 else math.nan


def _combined(how: str, values: Sequence[float]) -> float:
    if how == "sum":
        return sum(values)
    both = torch.tensor(values, dtype=torch.float64)  # which propagates NaN, as with a single rank
    return float(both.amin() if how == "min" else both.amax())
