"""torchmetrics objects: the value from the states on all ranks, and the states of several evaluation loaders.

torchmetrics' own synchronization is not used: it treats a rank without batches as a rank that saw zeros, requires the same
number and type of tensors on each rank, and needs them on the device of the process group of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import MetricError
from trainkit.metrics.saved_objects import (
    can_interleave,
    merge_objects,
    merge_values,
    object_state,
    on_device,
    reduction_names,
    set_state,
    updates_of,
)
from trainkit.nested import map_tensors

__all__ = ["LoaderStates", "compact", "computed", "overlap", "reset", "states_of"]


def compact(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU without its graph; a view is copied without the rest of its memory."""
    tensor = tensor.detach().cpu()
    own = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


def _parts(metric: Any) -> dict[str, Any]:
    """An object and the objects inside it, by path; none if it is an object of another library."""
    if not hasattr(metric, "_defaults"):
        return {}
    return {path: part for path, part in metric.named_modules() if hasattr(part, "_defaults")}


def overlap(one: Any, other: Any) -> bool:
    """Whether two objects share state: they are the same, or one is in a composition with the other or a part of it."""
    return one is other or not {*map(id, _parts(one).values())}.isdisjoint(map(id, _parts(other).values()))


def reset(objects: Iterable[Any]) -> None:
    """Reset each distinct object once. Their new states are ordinary tensors, which training can change in place."""
    with torch.inference_mode(False), torch.no_grad():
        for metric in {id(metric): metric for metric in objects}.values():
            metric.reset()


class LoaderStates:
    """The states of objects from the evaluation loaders that have ended: the next loader begins with empty objects."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, list[dict[str, Any]]]] = {}  # by id of the object

    def set_aside(self, objects: Sequence[Any]) -> None:
        """Keep the states of the objects and of those inside them, and reset them."""
        parts = {id(part): part for metric in objects for part in _parts(metric).values() if part._defaults}
        for key, part in parts.items():  # all of them first: objects of a MetricCollection share lists
            self._kept.setdefault(key, (part, []))[1].append(object_state(part))
        reset(objects)

    def put_back(self) -> list[Any]:
        """After the last loader: give each object the states of all loaders. Returns those whose states cannot be merged."""
        kept, self._kept = self._kept, {}
        failed = []
        for part, states in kept.values():
            try:
                set_state(part, merge_objects([*states, object_state(part)] if updates_of(part) else states))
            except (ValueError, RuntimeError):
                failed.append(part)
        return failed


def states_of(metric: Any) -> dict[str, dict[str, Any]]:
    """The states of an object on this rank, to be sent to other ranks; parts without an update are skipped."""
    found: dict[str, dict[str, Any]] = {}
    for path, part in _parts(metric).items():
        if updates_of(part):
            states = {name: map_tensors(getattr(part, name), compact) for name in part._defaults}
            found[path] = {"updates": updates_of(part), "states": states}
    return found


def computed(name: str, metric: Any, gathered: Sequence[Mapping[str, Any]]) -> Any:
    """The value of an object from the states of all ranks. Its own states are restored afterwards.

    Args:
        name: the name of the metric, for messages.
        metric: the object on this rank.
        gathered: the result of `states_of` on each rank.

    Raises:
        MetricError: the states cannot be combined.
    """
    parts = _parts(metric)
    with _restored_after(list(parts.values())):
        for path, part in parts.items():
            found = [states[path] for states in gathered if path in states]
            try:
                _set_states(part, [one["states"] for one in found], [one["updates"] for one in found])
            except (ValueError, RuntimeError, TypeError, KeyError) as error:
                raise MetricError(
                    f"log({name!r}): the states of this {type(part).__name__} on different processes cannot be combined: "
                    f"{error}. Log a number, or only the value of the main process: rank_zero_only=True"
                ) from error
        return metric.compute()


def _set_states(part: Any, states: Sequence[Mapping[str, Any]], updates: Sequence[int]) -> None:
    """Set the states of an object to the combined states of several."""
    part._to_sync, part._computed = False, None
    if not states:
        return
    interleave, names = can_interleave(states, updates), reduction_names(part)
    for name in part._defaults:
        values = [on_device(state[name], part) for state in states]
        how = names[name]
        if len(values) == 1:
            value = values[0]
        elif how == "other" or (how == "none" and isinstance(values[0], Tensor)):  # as in torchmetrics
            value = torch.stack(values) if isinstance(values[0], Tensor) else merge_values("cat", values, updates, interleave)
            value = value if how == "none" else part._reductions[name](value)
        else:
            value = merge_values(how, values, updates, interleave)
        setattr(part, name, value)
    part._update_count = sum(updates)
    if hasattr(part, "_num_vals_seen"):
        part._num_vals_seen = sum(updates)


@contextmanager
def _restored_after(parts: Sequence[Any]) -> Iterator[None]:
    """Restore the states of the objects at the end of the block."""
    names = ("_to_sync", "_computed", "_update_count", "_num_vals_seen")
    before = [
        (part, {name: getattr(part, name) for name in (*part._defaults, *names) if hasattr(part, name)}) for part in parts
    ]
    try:
        yield
    finally:
        for part, values in before:
            for name, value in values.items():
                setattr(part, name, value)
