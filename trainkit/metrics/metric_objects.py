"""torchmetrics objects: their states, saved and restored, merged from several objects, and combined from all ranks.

torchmetrics' own synchronization is not used: it treats a rank without batches as a rank that saw zeros, requires the same
number and type of tensors on each rank, and needs them on the device of the process group of the gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.console import warn
from trainkit.errors import MetricError
from trainkit.nested import map_tensors

__all__ = [
    "LoaderStates",
    "can_interleave",
    "capture_objects",
    "compact",
    "compute_over_ranks",
    "count_updates",
    "join_object",
    "merge_objects",
    "merge_values",
    "metric_objects",
    "object_state",
    "on_device",
    "overlap",
    "reduction_names",
    "reset",
    "restore_objects",
    "set_state",
    "states_of",
    "updates_of",
]

_COUNTERS = ("_num_vals_seen", "max_val", "min_val")  # torchmetrics' wrappers keep these in addition to their declared states.
_REDUCTIONS = {f"dim_zero_{name}": name for name in ("cat", "max", "mean", "min", "sum")}
_ELEMENTWISE: dict[str, Any] = {"max": torch.maximum, "min": torch.minimum, "sum": torch.add}
_MISSING = object()


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """The torchmetrics objects inside a module, by their paths."""
    needed = ("_defaults", "_reductions", "_update_count")
    return {path: part for path, part in module.named_modules() if path and all(hasattr(part, name) for name in needed)}


def count_updates(module: nn.Module) -> dict[str, int]:
    """The number of updates of each torchmetrics object inside a module, to find out later which were updated since."""
    return {path: updates_of(part) for path, part in metric_objects(module).items()}


def updates_of(metric: Any) -> int:
    """The number of updates of an object since its last reset."""
    return int(metric._update_count) + int(getattr(metric, "_num_vals_seen", 0))


def reduction_names(metric: Any) -> dict[str, str]:
    """How each state of an object is combined over ranks: "sum", "mean", "max", "min", "cat", "none" or "other"."""
    return {
        name: "none" if how is None else _REDUCTIONS.get(getattr(how, "__name__", ""), "other")
        for name, how in metric._reductions.items()
    }


def _counters(metric: Any) -> dict[str, Any]:
    return {name: vars(metric)[name] for name in _COUNTERS if name in vars(metric)}


def capture_objects(module: nn.Module, before: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The states of the torchmetrics objects inside a module that have any.

    Args:
        module: the module with these objects as attributes.
        before: the result of `count_updates` at the start of a running evaluation that will be repeated: objects that
            were updated since belong to it and are skipped.
    """
    objects = {path: part for path, part in metric_objects(module).items() if updates_of(part) or _counters(part)}
    if before is not None:
        objects = {path: part for path, part in objects.items() if updates_of(part) == before.get(path, 0)}
    return {path: object_state(part) for path, part in objects.items()}


def restore_objects(module: nn.Module, states: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the torchmetrics objects inside a module, and reset those without saved states. Returns all objects by path."""
    objects = metric_objects(module)
    lost = sorted(set(states) - set(objects))
    if lost:
        warn(f"the checkpoint contains torchmetrics objects that the module does not have; ignoring them: {', '.join(lost)}.")
    for path, part in objects.items():  # all resets first: the reset of a wrapper resets the object inside
        if path in states or updates_of(part):
            part.reset()
    for path in states.keys() & objects.keys():
        _set_object(path, objects[path], states[path])
    return objects


def object_state(metric: Any) -> dict[str, Any]:
    """The state of one object without the objects inside it."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "updates": int(metric._update_count),
        "counters": _counters(metric),
        "states": {name: list(value) if isinstance(value, list) else value for name, value in states.items()},
        "reductions": reduction_names(metric),
    }


def _set_object(path: str, metric: Any, state: Mapping[str, Any]) -> None:
    if set(state["states"]) != set(metric._defaults):
        warn(
            f"{path}: the states of this {type(metric).__name__} in the checkpoint differ from those of the current object, "
            "which is not restored and starts empty."
        )
        return
    parts = {part: {name: on_device(value, metric) for name, value in state[part].items()} for part in ("states", "counters")}
    set_state(metric, {**state, **parts})


def set_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Give an object a state of `object_state`; its tensors and lists are not copied."""
    for name, value in [*state["states"].items(), *state["counters"].items()]:
        setattr(metric, name, value)
    metric._update_count = int(state["updates"])
    metric._computed = None


def on_device(value: Any, metric: Any) -> Any:
    """A copy of a state on the object's device, since metrics change their states in place."""
    if isinstance(value, list):
        keep = bool(getattr(metric, "compute_on_cpu", False))  # Lists of such a metric stay on the CPU.
        return [one.clone() if keep and isinstance(one, Tensor) else on_device(one, metric) for one in value]
    return value.to(metric.device, copy=True) if isinstance(value, Tensor) else value


# ------------------------------------------------------------------------------------------------------------- several


def can_interleave(states: Sequence[Mapping[str, Any]], updates: Sequence[int]) -> bool:
    """Whether lists have one item per update, so that lists of several ranks can be interleaved in the order of the data."""
    per_object = zip(states, updates, strict=True)
    return all(len(v) == count for state, count in per_object for v in state.values() if isinstance(v, list))


def merge_values(how: str, values: Sequence[Any], updates: Sequence[int], interleave: bool) -> Any:
    """Merge one state of several objects, as if a single object had seen the updates of all of them.

    Args:
        how: See `reduction_names`.
        values: The state of each object.
        updates: Number of updates of each object.
        interleave: Take one item of each list in turn. False: append one list to the other.

    Raises:
        ValueError: The states cannot be merged.
    """
    if all(isinstance(value, list) for value in values):
        if not interleave:
            return list(chain.from_iterable(values))
        items = chain.from_iterable(zip_longest(*values, fillvalue=_MISSING))
        return [item for item in items if item is not _MISSING]
    if how == "cat":
        return _concatenate(values)
    if not all(isinstance(value, Tensor) for value in values):
        raise ValueError(f"states of different kinds: {', '.join(type(value).__name__ for value in values)}")
    if how == "mean":
        return _mean(values, updates)
    if how not in _ELEMENTWISE:
        raise ValueError(f"dist_reduce_fx is {how}")
    return reduce(_ELEMENTWISE[how], values)


def _concatenate(values: Sequence[Any]) -> Any:
    """The tensors of all states: a list if one of the states is a list, else one tensor."""
    tensors = list(chain.from_iterable(value if isinstance(value, list) else [value] for value in values))
    if any(isinstance(value, list) for value in values):
        return tensors
    return torch.cat([one.reshape(1) if one.ndim == 0 else one for one in tensors])


def _mean(values: Sequence[Tensor], updates: Sequence[int]) -> Tensor:
    """The mean weighted by the number of updates; equal states keep their bits."""
    if all(torch.equal(value, values[0]) for value in values[1:]):
        return values[0]
    total = reduce(torch.add, [value.double() * count for value, count in zip(values, updates, strict=True)])
    mean = total / sum(updates)
    return mean.to(values[0].dtype) if values[0].is_floating_point() else mean.float()


def merge_objects(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the saved states of several objects into one.

    Args:
        states: The results of `object_state`, on the CPU.

    Raises:
        ValueError: The states cannot be merged.
    """
    used = [state for state in states if state["updates"]] or list(states[:1])
    if len(used) == 1 and len({repr(state["counters"]) for state in states}) == 1:
        return dict(used[0])
    how, names = used[0]["reductions"], list(used[0]["states"])
    if any(list(state["states"]) != names for state in used):
        raise ValueError("the objects have different states")
    counters = _merge_counters([state["counters"] for state in states], used[0]["counters"])
    updates = [state["updates"] for state in used]
    interleave = can_interleave([state["states"] for state in used], updates)
    merged = {name: merge_values(how[name], [state["states"][name] for state in used], updates, interleave) for name in names}
    return {"updates": sum(updates), "counters": counters, "states": merged, "reductions": dict(how)}


def _merge_counters(counters: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, Any]:
    """Merge `max_val` and `min_val`, which are named for their reduction."""
    if "_num_vals_seen" in names:
        raise ValueError("its counter _num_vals_seen cannot be merged")
    return {name: merge_values(name[:3], [one[name] for one in counters], [], False) for name in names}


def join_object(name: str, metric: Any, state: Mapping[str, Any]) -> None:
    """Add the state of before the resume to that of an object that was not found by its path and has been updated since."""
    if not updates_of(metric):
        _set_object(name, metric, state)
        return
    before = {key: on_device(value, metric) for key, value in state["states"].items()}
    try:
        if state["counters"] or set(before) != set(metric._defaults):
            raise ValueError
        updates = [int(state["updates"]), int(metric._update_count)]
        joined = {
            key: merge_values(how, [before[key], getattr(metric, key)], updates, False)
            for key, how in reduction_names(metric).items()
        }
    except (ValueError, RuntimeError):
        warn(
            f"log({name!r}): the state of this {type(metric).__name__} from before the resume cannot be combined with its "
            "current state. Its value for this epoch covers only the batches since the resume. Keep the object as an attribute "
            "of the module: self.metric = …"
        )
        return
    for key, value in joined.items():
        setattr(metric, key, value)
    metric._update_count = sum(updates)
    metric._computed = None


def compact(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU without its graph; a view is copied without the rest of its memory."""
    tensor = tensor.detach().cpu()
    owns_memory = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns_memory else tensor.clone(memory_format=torch.contiguous_format)


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
        self._kept: dict[int, tuple[Any, list[dict[str, Any]]]] = {}  # Id of an object → the object and its states.

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
    by_path: dict[str, dict[str, Any]] = {}
    for path, part in _parts(metric).items():
        if updates_of(part):
            states = {name: map_tensors(getattr(part, name), compact) for name in part._defaults}
            by_path[path] = {"updates": updates_of(part), "states": states}
    return by_path


def compute_over_ranks(name: str, metric: Any, gathered: Sequence[Mapping[str, Any]]) -> Any:
    """The value of an object from the states of all ranks. Its own states are restored afterwards.

    Args:
        name: the name of the metric, for messages.
        metric: the object on this rank.
        gathered: the result of `states_of` on each rank.

    Raises:
        MetricError: the states cannot be combined.
    """
    parts = _parts(metric)
    with _restoring(list(parts.values())):
        for path, part in parts.items():
            rank_states = [states[path] for states in gathered if path in states]
            try:
                _set_states(part, [one["states"] for one in rank_states], [one["updates"] for one in rank_states])
            except (ValueError, RuntimeError, TypeError, KeyError) as error:
                raise MetricError(
                    f"log({name!r}): the states of this {type(part).__name__} on different processes cannot be combined: "
                    f"{error}. Log a number, or only the value of the main process: rank_zero_only=True"
                ) from error
        return metric.compute()


def _set_states(part: Any, states: Sequence[Mapping[str, Any]], updates: Sequence[int]) -> None:
    """Set the states of an object to the combined states of several."""
    part._to_sync = False
    part._computed = None
    if not states:
        return
    interleave, names = can_interleave(states, updates), reduction_names(part)
    for name in part._defaults:
        values = [on_device(state[name], part) for state in states]
        how = names[name]
        if len(values) == 1:
            value = values[0]
        elif how == "other" or (how == "none" and isinstance(values[0], Tensor)):  # torchmetrics does the same.
            value = torch.stack(values) if isinstance(values[0], Tensor) else merge_values("cat", values, updates, interleave)
            value = value if how == "none" else part._reductions[name](value)
        else:
            value = merge_values(how, values, updates, interleave)
        setattr(part, name, value)
    part._update_count = sum(updates)
    if hasattr(part, "_num_vals_seen"):
        part._num_vals_seen = sum(updates)


@contextmanager
def _restoring(parts: Sequence[Any]) -> Iterator[None]:
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
