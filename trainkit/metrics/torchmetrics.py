"""torchmetrics objects of several processes: what each has gathered is brought together, and one value comes of all.

It is done here, and not by torchmetrics' own synchronisation: that takes a process without batches for one that has seen zeros,
needs each process to hold as many tensors as the others, of the same type, and wants them where the group for gradients is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import MetricError
from trainkit.metrics.saved_objects import in_turn, merge_values, on_device, reduction_names, updates_of
from trainkit.nested import map_tensors

__all__ = ["compact", "computed", "states_of"]


def compact(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, without its graph, and without the memory that it is a view of."""
    tensor = tensor.detach().cpu()
    own = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


def _parts(metric: Any) -> dict[str, Any]:
    """An object and those inside it, by path."""
    return {path: part for path, part in metric.named_modules() if hasattr(part, "_defaults")}


def states_of(metric: Any) -> dict[str, dict[str, Any]]:
    """What an object has gathered on this process, to be sent to the others; parts without an update are left out."""
    found: dict[str, dict[str, Any]] = {}
    for path, part in _parts(metric).items():
        if updates_of(part):
            states = {name: map_tensors(getattr(part, name), compact) for name in part._defaults}
            found[path] = {"updates": updates_of(part), "states": states}
    return found


def computed(name: str, metric: Any, gathered: Sequence[Mapping[str, Any]]) -> Any:
    """The value of an object that has seen what those of all processes have; it goes on with what it had.

    Args:
        name: of the metric, for messages.
        metric: the object on this process.
        gathered: what :func:`states_of` gave on each process.

    Raises:
        MetricError: the states do not go together.
    """
    parts = _parts(metric)
    with _kept(list(parts.values())):
        for path, part in parts.items():
            told = [states[path] for states in gathered if path in states]
            try:
                _take(part, [one["states"] for one in told], [one["updates"] for one in told])
            except (ValueError, RuntimeError, TypeError, KeyError) as error:
                raise MetricError(
                    f"log({name!r}): the states of this {type(part).__name__} on different processes cannot be combined: "
                    f"{error}. Log a number, or the value of the main process only: rank_zero_only=True"
                ) from error
        return metric.compute()


def _take(part: Any, states: Sequence[Mapping[str, Any]], updates: Sequence[int]) -> None:
    """Give an object what several have gathered."""
    part._to_sync, part._computed = False, None
    if not states:
        return
    alternate, names = in_turn(states, updates), reduction_names(part)
    for name in part._defaults:
        values = [on_device(state[name], part) for state in states]
        how = names[name]
        if len(values) == 1:
            value = values[0]
        elif how == "other" or (how == "none" and isinstance(values[0], Tensor)):  # as torchmetrics has it
            value = torch.stack(values) if isinstance(values[0], Tensor) else merge_values("cat", values, updates, alternate)
            value = value if how == "none" else part._reductions[name](value)
        else:
            value = merge_values(how, values, updates, alternate)
        setattr(part, name, value)
    part._update_count = sum(updates)
    if hasattr(part, "_num_vals_seen"):
        part._num_vals_seen = sum(updates)


@contextmanager
def _kept(parts: Sequence[Any]) -> Iterator[None]:
    """What objects hold is theirs again afterwards."""
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
