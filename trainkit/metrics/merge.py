"""The metrics of an unfinished epoch: gathered from all ranks for a checkpoint, and distributed over another world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from trainkit.console import warn
from trainkit.distributed.world import World
from trainkit.metrics.reduce import RankRecord, step_number
from trainkit.metrics.saved_metrics import unstored
from trainkit.metrics.saved_objects import merge_objects, merge_values
from trainkit.metrics.values import read

__all__ = ["gather_states", "merge_states"]

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
    found: dict[tuple[str, str, bool], dict[int, Mapping[str, Any]]] = {}  # metric → rank in the checkpoint → entry
    for old, state in enumerate(states):
        for entry in state["metrics"]:
            found.setdefault((entry["name"], entry["suffix"], entry["updated"]), {})[old] = entry
    mine = range(rank, len(states), size)
    entries = [_metric(by_rank, mine, size) for by_rank in found.values() if rank == 0 or not _is_main_only(by_rank)]
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
        merged = merge_values("sum" if how == "mean" else how, [unstored(one, None) for one in totals], [], False)
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
    own = [(place - len(ordered), old, n) for place, (old, n) in enumerate(ordered) if old in taken]
    values = {old: _values(entry) for old, entry in taken.items()}
    alone = next(iter(by_rank.values()))["so_far"] if len({old for old, _ in ordered}) == 1 else None
    return {
        "values": [values[old][n] for _, old, n in own],
        "stamps": [stamp for stamp, _, _ in own] if size > 1 else None,
        "weights": [taken[old]["weights"][n] for _, old, n in own],
        "so_far": alone if own else None,
    }


def _values(entry: Mapping[str, Any]) -> list[Any]:
    """The values of a metric one by one, as they are stored in a checkpoint."""
    values = entry["values"]
    if isinstance(values, Mapping):
        return [{**values, "value": value} for value in values["value"].unbind()]
    return list(values.unbind()) if isinstance(values, Tensor) else list(values)


def _with_value(stored: Any, value: Tensor) -> Any:
    return {**stored, "value": value} if isinstance(stored, Mapping) else value


def _step_value(by_rank: Mapping[int, Mapping[str, Any]]) -> Tensor | None:
    """The value of the step as the next log boundary would have reduced it; for a function the newest value."""
    reports = []
    for old, entry in by_rank.items():
        if entry["step_value"] is not None:
            values = [value for value, _ in entry.get("earlier", ())]  # of a function; absent from older checkpoints
            numbers = read([unstored(value, None) for value in (*values, entry["step_value"])])
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
