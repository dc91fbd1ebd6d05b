"""The metrics of an unfinished epoch in a checkpoint, so that a resumed run computes the same values bit for bit.

A checkpoint does not store functions and objects. A metric with a named reduction is restored completely. A metric with a
function of the user or a torchmetrics object is completed when its name is logged again; a torchmetrics object that is an
attribute of the module is found by its path and restored before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.console import warn
from trainkit.metrics.saved_objects import join_object, object_state
from trainkit.metrics.values import is_metric_object, one_element, reduction_of, stacked

if TYPE_CHECKING:
    from trainkit.metrics.record import Record

__all__ = ["adopt", "capture", "fill", "stored", "unstored", "value_if_missing", "warn_missing"]


def stored(value: Any) -> Any:
    """A number unchanged; a tensor with the type of its device, if that is not the CPU."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value if value.device.type == "cpu" else {"value": value, "device": value.device.type}


def unstored(value: Any, device: torch.device | None) -> Any:
    """The value that was passed to `stored`, copied; on `device`, if given, unless it was on the CPU."""
    if isinstance(value, Mapping):
        tensor: Tensor = value["value"]
        return tensor.to(device, copy=True) if device is not None else tensor.clone()
    return value.clone() if isinstance(value, Tensor) else value


def capture(metric: Record, path: str | None, *, shared: Record | None = None, updated: bool = True) -> dict[str, Any]:
    """The state of one metric.

    Args:
        metric: the metric.
        path: the path of its torchmetrics object in the module, if it has one.
        shared: an earlier metric of the same object, whose state has the object's.
        updated: whether it was logged in this epoch; if not, only the value of a step waits for the next log boundary.
    """
    prog_bar, logger, _, _, _, scope, main_only = metric.signature[:7]  # a restored one has more items
    listed = metric.stamps is not None  # a function over several ranks, which gets the values of all of them
    entry: dict[str, Any] = {
        "name": metric.name,
        "suffix": metric.suffix,
        "prog_bar": prog_bar,
        "logger": logger,
        "on_step": metric.on_step,
        "on_epoch": metric.on_epoch,
        "scope": scope.value,
        "reduce_fx": metric.reduce_fx if isinstance(metric.reduce_fx, str) else None,
        "main_only": main_only,
        "updated": updated,
        "since": metric.since,
        "stamp": metric.stamp,
        "fresh": metric.fresh,
        "window": metric.window,
        "step_value": stored(metric.step_value if listed else metric.value_of_step()),
        "step_weight": metric.step_weight,
        "earlier": [[stored(value), weight] for value, weight in metric.earlier] if listed else [],
        "weight": metric.weight,
        "total": stored(metric.total),
        "weights": list(metric.weights),
        "values": _stored_values(metric.values),
        "stamps": None if metric.stamps is None else list(metric.stamps),
        "is_object": False,
        "so_far": _value_so_far(metric),
    }
    if metric.awaits is not None:  # not logged again since it was restored
        entry.update(metric.awaits, object=None if metric.awaits["shared"] else metric.awaits["object"])
    elif metric.torchmetric is not None:
        state = object_state(metric.torchmetric) if path is None and shared is None else None
        entry.update(is_object=True, path=path, object=state, shared=shared and [shared.name, shared.suffix])
    return entry


def _stored_values(values: list[Any]) -> Any:
    """One tensor for values of the same kind. They are not added up: the sum would depend on the moment of the save."""
    if values and all(isinstance(v, Tensor) and v.dtype is values[0].dtype and v.device == values[0].device for v in values):
        return stored(torch.stack([value.detach().reshape(()) for value in values]))
    return [stored(value) for value in values]


def _value_so_far(metric: Record) -> Any:
    """The result of a function of the user on the values so far, which is used if nothing more is logged."""
    if isinstance(metric.reduce_fx, str) or not metric.values or metric.awaits is not None:
        return None
    try:
        return stored(one_element(metric.full_name, metric.reduce_fx(stacked(metric.values))))
    except Exception:  # it may need more values; otherwise it fails again at the end of the epoch
        return None


def fill(metric: Record, entry: Mapping[str, Any], device: torch.device | None, objects: Mapping[str, Any]) -> None:
    """Restore a new metric from the result of `capture`; what is missing is noted in `awaits`."""
    metric.since, metric.stamp, metric.fresh = entry["since"], entry["stamp"], entry["fresh"]
    metric.step_value, metric.step_weight = unstored(entry["step_value"], device), entry["step_weight"]
    metric.window = entry.get("window", -1)  # absent from checkpoints of earlier versions, like `earlier` and `shared`
    metric.earlier = [(unstored(value, device), weight) for value, weight in entry.get("earlier", ())]
    metric.total = unstored(entry["total"], device)
    metric.weight, metric.weights = entry["weight"], list(entry["weights"])
    values = entry["values"]
    if isinstance(values, list):
        metric.values = [unstored(value, device) for value in values]
    else:
        metric.values = list(unstored(values, device).unbind())
    metric.stamps = None if entry["stamps"] is None else list(entry["stamps"])
    if not entry["updated"]:
        return
    metric.torchmetric = objects.get(entry["path"]) if entry["is_object"] else None
    metric.awaits = {key: entry.get(key) for key in ("reduce_fx", "is_object", "path", "object", "shared", "so_far")}
    metric.awaits["so_far"] = unstored(entry["so_far"], device)


def value_if_missing(metric: Record) -> tuple[bool, Tensor | None]:
    """Whether the function or object of a metric is missing at the end of the epoch, and the value in that case.

    For a function it is its result when the checkpoint was saved. For an object there is no value, and a warning.
    """
    awaits = metric.awaits
    assert awaits is not None
    if metric.torchmetric is not None or (awaits["reduce_fx"] is not None and not awaits["is_object"]):
        return False, None
    if metric.on_epoch and awaits["so_far"] is None:
        warn_missing(metric)
    return True, awaits["so_far"]


def warn_missing(metric: Record) -> None:
    """Warn once that the function or object for the value of the epoch is missing."""
    if metric.awaits is not None and metric.awaits.setdefault("warned", False):
        return
    if metric.awaits is not None:
        metric.awaits["warned"] = True
    is_object = metric.how == "object"
    what = "its torchmetrics object" if is_object else "its function reduce_fx"
    fix = "keep the object as an attribute of the module" if is_object else "log it in the last batch of the epoch"
    warn(
        f"log({metric.name!r}): a checkpoint cannot contain {what}, and the metric was not logged again between the resume "
        f"and the end of the epoch. Its value for this epoch is missing. Fix: {fix}."
    )


def adopt(
    metric: Record, signature: tuple[Any, ...], on_step: bool, on_epoch: bool, value: Any, others: Iterable[Record] = ()
) -> bool:
    """Continue a restored metric with the call that logs it again. Returns whether the call is for the same metric.

    `prog_bar` and `logger` may have changed.

    Args:
        metric: the metric.
        signature: of the call, like `on_step` and `on_epoch`.
        on_step: see `Record`.
        on_epoch: see `Record`.
        value: what is logged.
        others: the metrics of this epoch; those with the same object get it, too.
    """
    awaits = metric.awaits
    assert awaits is not None
    reduction = reduction_of(metric.name, signature[4])
    known = reduction if isinstance(reduction, str) else None
    now = (on_step, on_epoch, *signature[5:7], known)
    if (metric.on_step, metric.on_epoch, *metric.signature[5:7], awaits["reduce_fx"]) != now:
        return False
    if is_metric_object(metric.name, value) != awaits["is_object"]:
        return False
    if awaits["is_object"] and metric.torchmetric is None:
        group = [one for one in (metric, *others) if _first_with_object(one) == _first_with_object(metric)]
        states = [one.awaits["object"] for one in group if one.awaits is not None and one.awaits["object"] is not None]
        for one in group:
            one.torchmetric = value
        for saved in {id(saved): saved for saved in states}.values():
            join_object(metric.name, value, saved)
    metric.awaits = None
    metric.signature, metric.reduce_fx = signature, reduction
    metric.prog_bar, metric.logger = bool(signature[0]), signature[1] is not False
    return True


def _first_with_object(metric: Record) -> tuple[str, str] | None:
    """The name and the suffix of the first metric in the checkpoint with this object; `None` if it does not wait for one."""
    awaits = metric.awaits
    if awaits is None or not awaits["is_object"] or metric.torchmetric is not None:
        return None
    return tuple(awaits["shared"] or (metric.name, metric.suffix))
