"""Metrics of several processes: what each tells the others, whether that goes together, and what it comes to.

Nothing here talks to another process: the functions work on what all have told, which is the same everywhere, and so come to
the same. Numbers are added in the order of the ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
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
    "step_number",
    "tell",
    "values_of",
]

FINGERPRINTS = 1 << 62  # they are added up in 64 signed bits, and negated


class RankRecord(MetricInfo):
    """What one process has told of a metric.

    Args:
        rank: of the process.
        data: as :func:`tell` made it.

    Attributes:
        how: as of :class:`~trainkit.metrics.record.Record`.
        main_only: likewise.
        since: likewise.
        step: value, samples (``None``: agreed on before) and stamp of the step; ``None`` without one.
        fresh: the loggers have not had it.
        awaits: the process has no function or object for it: it was not logged again since a resume.
        epoch: of numbers the total and its samples; for a function values and stamps; of an object its class, and whether
            its states can be combined.
    """

    __slots__ = ("awaits", "epoch", "fresh", "how", "main_only", "rank", "since", "step")

    def __init__(self, rank: int, data: Sequence[Any]) -> None:
        name, suffix, options, self.how, self.main_only, self.since, self.step, self.fresh, self.awaits, self.epoch = data[:10]
        super().__init__((name, suffix), options)
        self.loaders = list(data[10]) if len(data) > 10 else []
        self.rank = rank


Groups = dict[tuple[str, str], list[RankRecord]]  # what the ranks reported of each metric, in rank order


def described(record: Record) -> list[Any]:
    """A metric without its values."""
    options = [record.on_step, record.on_epoch, record.prog_bar, record.logger]
    return [record.name, record.suffix, options, record.how, record.main_only, record.since]


def tell(records: Iterable[Record], *, epoch: bool = False) -> list[list[Any]]:
    """What this process has to tell of its metrics, as JSON; all values are read by one wait for the device.

    Args:
        records: the metrics.
        epoch: the values of the epoch, too.
    """
    told: list[list[Any]] = []
    waiting: list[Any] = []  # values, and where each goes
    places: list[tuple[list[Any], int]] = []

    def later(value: Any, into: list[Any]) -> None:
        waiting.append(value)
        places.append((into, len(into)))
        into.append(None)

    for record in records:
        step: list[Any] | None = None
        if record.step_value is not None:
            step = []
            later(record.step_value, step)
            step += [record.step_weight, record.stamp]
        ended: Any = None
        if epoch and record.on_epoch:
            if record.how == "object":
                kind = type(record.torchmetric)
                ended = [kind.__name__, record.torchmetric is None or hasattr(record.torchmetric, "_defaults")]
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
        told.append([*described(record), step, record.fresh, record.awaits is not None, ended, record.loaders])
    for (into, index), number in zip(places, read(waiting), strict=True):
        into[index] = number
    return told


def groups(gathered: Iterable[Iterable[Sequence[Any]]]) -> Groups:
    """What all processes have told, metric by metric."""
    found: Groups = {}
    for rank, metrics in enumerate(gathered):
        for data in metrics:
            one = RankRecord(rank, data)
            found.setdefault((one.name, one.suffix), []).append(one)
    return found


# ------------------------------------------------------------------------------------------------- does it go together


def check(
    found: Groups, worked: Sequence[int], gaps: Sequence[Sequence[Sequence[int]]] | None = None, *, step: bool = False
) -> None:
    """Check that every process that should have logged a metric has logged it, and with the same options.

    A process need not log a metric that was first logged in batches after its own last one, or after its last one of an
    evaluation loader.

    Args:
        found: The metrics of all processes.
        worked: The stamp of each process's last batch; negative if it had none.
        gaps: For each process the earlier stamps at which others had a batch and it had none, as [first, end].
        step: Check the values of a step: only those of the newest stamp are needed.

    Raises:
        MetricError: The processes have not logged the same; names metrics and ranks.
    """
    gaps = [[]] * len(worked) if gaps is None else gaps
    wrong: list[str] = []
    for group in found.values():
        first = group[0]
        if first.main_only and all(one.rank == 0 for one in group):
            continue
        needed = _newest(group) if step else min(one.since for one in group)
        had = [_had_batch(needed, last, none) for last, none in zip(worked, gaps, strict=True)]
        wrong += _missing(group, had)
        wrong += [_differing(first, other) for other in group[1:] if _options(first) != _options(other)][:1]
    if wrong:
        raise MetricError("\n".join(wrong))


def _missing(group: Sequence[RankRecord], had: Sequence[bool]) -> list[str]:
    """A complaint if ranks that had a batch have not logged a metric."""
    first, there = group[0], sorted({one.rank for one in group})
    missing = [rank for rank, needed in enumerate(had) if needed and rank not in there]
    if not missing:
        return []
    return [
        f"log({first.full_name!r}): logged on {_ranks(there)}, not on {_ranks(missing)}. Log it on every rank, "
        f"or the value of the main process only: log({first.name!r}, value, rank_zero_only=True)"
    ]


def _had_batch(stamp: int, last: int, gaps: Sequence[Sequence[int]]) -> bool:
    """Whether a process had a batch at a stamp, or any at all where that is negative."""
    return last >= max(stamp, 0) and not any(first <= stamp < end for first, end in gaps)


def _options(one: RankRecord) -> dict[str, Any]:
    return {"on_step": one.on_step, "on_epoch": one.on_epoch, "reduce_fx": one.how, "rank_zero_only": one.main_only}


def _differing(first: RankRecord, other: RankRecord) -> str:
    pairs = zip(_options(first).items(), _options(other).values(), strict=True)
    which = [(name, one, another) for (name, one), another in pairs if one != another]
    here = ", ".join(f"{name}={one!r}" for name, one, _ in which)
    there = ", ".join(f"{name}={another!r}" for name, _, another in which)
    return (
        f"log({first.full_name!r}): logged on rank {first.rank} with {here}, on rank {other.rank} with {there}. Give the same "
        "on every rank."
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
    """A number that stands for what must be the same of a metric on every process; 0, if nothing must."""
    if record.main_only:
        return 0
    facts = repr((record.name, record.suffix, record.on_step, record.on_epoch, record.how))
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=8).digest(), "little") % FINGERPRINTS


# ---------------------------------------------------------------------------------------------------- what it comes to


def _newest(group: Sequence[RankRecord]) -> int:
    return max((one.step[2] for one in group if one.step is not None), default=-1)


def step_number(group: Sequence[RankRecord], *, last: bool = False) -> tuple[float | list[float], int] | None:
    """The value of a step, reduced over all processes, and its stamp; ``None`` if there is none.

    Only values of the newest stamp count. For a function it is the list of the values; a single value is returned as it is.

    Args:
        group: The metric on all processes.
        last: Return the value of the last rank instead: in an evaluation each batch is a step.
    """
    newest = _newest(group)
    steps = _steps_at(newest, group)
    if not steps:
        return None
    values = [value for value, *_ in steps]
    if last or len(values) == 1:
        return values[-1], newest
    how = group[0].how
    if how == "function":
        return values, newest
    if how in ("mean", "object"):
        totals = [value * weight for value, weight, _ in steps if weight]
        return _mean(totals, sum(weight for _, weight, _ in steps)), newest
    return _combined(how, values), newest


def _steps_at(stamp: int, group: Sequence[RankRecord]) -> list[Any]:
    """The steps with a stamp; one without a weight was reduced before and only counts if there is no other."""
    steps = [one.step for one in group if one.step is not None and one.step[2] == stamp]
    return [step for step in steps if step[1] is not None] or steps[:1]


def epoch_number(group: Sequence[RankRecord]) -> float | None:
    """The value of the epoch of a metric that is made of numbers by "mean", "sum", "min" or "max"; ``None`` if it has none."""
    parts = [one.epoch for one in group if one.epoch is not None]
    if not parts:
        return None
    totals = [part[0] for part in parts]
    return _mean(totals, sum(part[1] for part in parts)) if group[0].how == "mean" else _combined(group[0].how, totals)


def values_of(group: Sequence[RankRecord]) -> list[float]:
    """All values of the epoch, for a function, in the order of the data set: that of the batches, which go round the ranks."""
    found: list[tuple[int, int, int, float]] = []
    for one in group:
        values, stamps = one.epoch or ((), ())
        found += [(stamp, one.rank, n, value) for n, (value, stamp) in enumerate(zip(values, stamps, strict=True))]
    return [value for *_, value in sorted(found, key=lambda item: item[:3])]


def apply(name: str, function: Callable[..., Any], values: Sequence[float]) -> float:
    """What a function of the user's comes to."""
    return read([one_element(name, function(torch.tensor(values, dtype=torch.float64)))])[0]


def _mean(totals: list[float], weight: float) -> float:
    return sum(totals) / weight if weight > 0 else math.nan


def _combined(how: str, values: Sequence[float]) -> float:
    if how == "sum":
        return sum(values)
    both = torch.tensor(values, dtype=torch.float64)  # which lets NaN through, as on one process
    return float(both.amin() if how == "min" else both.amax())
