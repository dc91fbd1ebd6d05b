"""What a checkpoint holds of the metrics of an epoch that is not over, so that its values come out bit for bit.

A checkpoint holds no function and no object. A metric with the name of a reduction comes back at once. One that is reduced
by a function of the user's, or that stands for a torchmetrics object, comes back when its name is logged again; such an
object that the module has as an attribute is found by its path and gets its state before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.console import warn
from trainkit.metric_values import is_metric_object, one_element, reduction_of, stacked

if TYPE_CHECKING:
    from trainkit.metrics import _Metric

__all__ = [
    "adopt",
    "capture",
    "capture_objects",
    "count_updates",
    "fill",
    "metric_objects",
    "restore_objects",
    "stored",
    "unstored",
    "without_it",
]

_COUNTERS = ("_num_vals_seen", "max_val", "min_val")  # what torchmetrics' wrappers keep beside their declared states


def stored(value: Any) -> Any:
    """A number as it is; a tensor with the kind of device that it is on, if that is not the CPU."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value if value.device.type == "cpu" else {"value": value, "device": value.device.type}


def unstored(value: Any, device: torch.device | None) -> Any:
    """What :func:`stored` was given, in memory of its own; on ``device`` if it was not on the CPU and one is given."""
    if isinstance(value, Mapping):
        tensor: Tensor = value["value"]
        return tensor.to(device, copy=True) if device is not None else tensor.clone()
    return value.clone() if isinstance(value, Tensor) else value


def capture(metric: _Metric, path: str | None) -> dict[str, Any]:
    """The state of one metric; ``path`` is that of its torchmetrics object in the module, if it is one and has one."""
    prog_bar, logger, _, _, _, scope = metric.signature[:6]  # one that was restored has more
    entry: dict[str, Any] = {
        "name": metric.name,
        "suffix": metric.suffix,
        "prog_bar": prog_bar,
        "logger": logger,
        "on_step": metric.on_step,
        "on_epoch": metric.on_epoch,
        "scope": scope.value,
        "reduce_fx": metric.reduce_fx if isinstance(metric.reduce_fx, str) else None,
        "updated": metric.updated,
        "stamp": metric.stamp,
        "fresh": metric.fresh,
        "step_value": stored(metric.step_value),
        "weight": metric.weight,
        "total": stored(metric.total),
        "weights": list(metric.weights),
        "values": _stored_values(metric.values),
        "is_object": False,
        "so_far": _value_so_far(metric),
    }
    if metric.awaits is not None:  # not logged again since it was restored
        entry.update(metric.awaits)
    elif metric.torchmetric is not None:
        entry.update(is_object=True, path=path, object=None if path is not None else _object_state(metric.torchmetric))
    return entry


def _stored_values(values: list[Any]) -> Any:
    """One tensor instead of many, where they are alike; they are not summed up: sums depend on where they are cut."""
    if values and all(isinstance(v, Tensor) and v.dtype is values[0].dtype and v.device == values[0].device for v in values):
        return stored(torch.stack([value.detach().reshape(()) for value in values]))
    return [stored(value) for value in values]


def _value_so_far(metric: _Metric) -> Any:
    """What a function of the user's comes to now, which is the epoch's value if nothing more is logged."""
    if isinstance(metric.reduce_fx, str) or not metric.values or metric.awaits is not None:
        return None
    try:
        return stored(one_element(metric.full_name, metric.reduce_fx(stacked(metric.values))))
    except Exception:  # it may need more values than there are; should it stay so, the end of the epoch tells
        return None


def fill(metric: _Metric, entry: Mapping[str, Any], device: torch.device | None, objects: Mapping[str, Any]) -> None:
    """Give a new metric the state that :func:`capture` took; what it lacks then, it awaits."""
    metric.updated, metric.stamp, metric.fresh = entry["updated"], entry["stamp"], entry["fresh"]
    metric.step_value, metric.total = unstored(entry["step_value"], device), unstored(entry["total"], device)
    metric.weight, metric.weights = entry["weight"], list(entry["weights"])
    values = entry["values"]
    if isinstance(values, list):
        metric.values = [unstored(value, device) for value in values]
    else:
        metric.values = list(unstored(values, device).unbind())
    metric.torchmetric = objects.get(entry["path"]) if entry["is_object"] else None
    metric.awaits = {key: entry.get(key) for key in ("reduce_fx", "is_object", "path", "object", "so_far")}
    metric.awaits["so_far"] = unstored(entry["so_far"], device)


def without_it(metric: _Metric) -> tuple[bool, Tensor | None]:
    """Whether the epoch ends without the function or object of a metric, and what its value is then.

    It is what the function came to when the checkpoint was made. There is none of an object: a warning says so.
    """
    awaits = metric.awaits
    assert awaits is not None
    if metric.torchmetric is not None or (awaits["reduce_fx"] is not None and not awaits["is_object"]):
        return False, None
    if metric.on_epoch and metric.updated and awaits["so_far"] is None:
        what = "a torchmetrics object" if awaits["is_object"] else "reduced by a function, reduce_fx=…"
        fix = (
            "keep the object as an attribute of the module" if awaits["is_object"] else "log it in the last batch of the epoch"
        )
        warn(
            f"log({metric.name!r}): it is {what}, which a checkpoint cannot hold, and was not logged again between the resume "
            f"and the end of the epoch: its value of this epoch is missing. To have it, {fix}."
        )
    return True, awaits["so_far"]


def adopt(metric: _Metric, signature: tuple[Any, ...], on_step: bool, on_epoch: bool, value: Any) -> bool:
    """Let a restored metric go on with the call that logs it again; whether the call is for the same metric.

    Whether it is shown in the progress bar or given to loggers may have changed.
    """
    awaits = metric.awaits
    assert awaits is not None
    reduction = reduction_of(metric.name, signature[4])
    known = reduction if isinstance(reduction, str) else None
    if (metric.on_step, metric.on_epoch, metric.signature[5], awaits["reduce_fx"]) != (on_step, on_epoch, signature[5], known):
        return False
    if is_metric_object(metric.name, value) != awaits["is_object"]:
        return False
    if awaits["is_object"] and metric.torchmetric is None:
        metric.torchmetric = value
        if awaits["object"] is not None:
            _join_object(metric.name, value, awaits["object"])
    metric.awaits = None
    metric.signature, metric.reduce_fx = signature, reduction
    metric.prog_bar, metric.logger = signature[:2]
    return True


# ---------------------------------------------------------------------------------------------------- torchmetrics objects


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """The torchmetrics objects inside a module, by their paths."""
    needed = ("_defaults", "_reductions", "_update_count")
    return {path: part for path, part in module.named_modules() if path and all(hasattr(part, name) for name in needed)}


def count_updates(module: nn.Module) -> dict[str, int]:
    """How often each torchmetrics object inside a module has been updated, to tell later which have been since."""
    return {path: _updates(part) for path, part in metric_objects(module).items()}


def _updates(metric: Any) -> int:
    return int(metric._update_count) + int(getattr(metric, "_num_vals_seen", 0))


def _counters(metric: Any) -> dict[str, Any]:
    return {name: vars(metric)[name] for name in _COUNTERS if name in vars(metric)}


def capture_objects(module: nn.Module, before: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The states of the torchmetrics objects inside a module that hold anything.

    Args:
        module: where they are attributes.
        before: what :func:`count_updates` said at the start of an evaluation that is running and will be repeated: objects
            that were updated since are its own and are left out.
    """
    objects = {path: part for path, part in metric_objects(module).items() if _updates(part) or _counters(part)}
    if before is not None:
        objects = {path: part for path, part in objects.items() if _updates(part) == before.get(path, 0)}
    return {path: _object_state(part) for path, part in objects.items()}


def restore_objects(module: nn.Module, states: Mapping[str, Any]) -> dict[str, Any]:
    """Give the torchmetrics objects inside a module their states; those that had none start anew. All of them, by path."""
    objects = metric_objects(module)
    lost = sorted(set(states) - set(objects))
    if lost:
        warn(f"the checkpoint has the state of torchmetrics objects that the module does not have: {', '.join(lost)}.")
    for path, part in objects.items():  # all of them first: to reset a wrapper resets what it wraps
        if path in states or _updates(part):
            part.reset()
    for path in states.keys() & objects.keys():
        _set_object(path, objects[path], states[path])
    return objects


def _object_state(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "updates": int(metric._update_count),
        "counters": _counters(metric),
        "states": {name: list(value) if isinstance(value, list) else value for name, value in states.items()},
    }


def _set_object(path: str, metric: Any, state: Mapping[str, Any]) -> None:
    if set(state["states"]) != set(metric._defaults):
        warn(f"{path}: the {type(metric).__name__} in the checkpoint has other states than the module's, which starts anew.")
        return
    for name, value in [*state["states"].items(), *state["counters"].items()]:
        setattr(metric, name, _on_device(value, metric))
    metric._update_count = int(state["updates"])
    metric._computed = None


def _on_device(value: Any, metric: Any) -> Any:
    """In memory of its own: metrics change their states in place."""
    if isinstance(value, list):
        keep = bool(getattr(metric, "compute_on_cpu", False))  # such lists live on the CPU
        return [one.clone() if keep and isinstance(one, Tensor) else _on_device(one, metric) for one in value]
    return value.to(metric.device, copy=True) if isinstance(value, Tensor) else value


def _join_object(name: str, metric: Any, state: Mapping[str, Any]) -> None:
    """Add the state of before the resume to that of an object that was not found by its path and has been updated since."""
    if not _updates(metric):
        _set_object(name, metric, state)
        return
    joined: dict[str, Any] = {}
    updates = int(state["updates"])
    for key, now in ((key, getattr(metric, key)) for key in metric._defaults):
        if state["counters"]:
            break  # what it counts beside them cannot be joined
        how = getattr(metric._reductions[key], "__name__", "")
        before = _on_device(state["states"][key], metric) if key in state["states"] else None
        if before is None or type(before) is not type(now):
            break
        if isinstance(now, list) or how == "dim_zero_sum":
            joined[key] = before + now
        elif how in ("dim_zero_max", "dim_zero_min"):
            joined[key] = (torch.maximum if how == "dim_zero_max" else torch.minimum)(before, now)
        elif how == "dim_zero_cat":
            joined[key] = torch.cat([before, now])
        else:
            break
    else:
        for key, value in joined.items():
            setattr(metric, key, value)
        metric._update_count += updates
        metric._computed = None
        return
    warn(
        f"log({name!r}): what this {type(metric).__name__} had gathered before the resume cannot be added to what it has "
        "now: its value of this epoch is of the batches since. Keep it as an attribute of the module: self.metric = …"
    )
