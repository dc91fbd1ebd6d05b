"""`Record`: one metric of a stage, with its options, its value of the step and its values of the epoch, also in a checkpoint.

A checkpoint does not store functions and objects, and a resumed run computes the same values bit for bit. A metric with a named
reduction is restored completely. A metric with a function of the user or a torchmetrics object is completed when its name is
logged again; a torchmetrics object that is an attribute of the module is found by its path and restored before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from trainkit.console import warn
from trainkit.errors import MetricError
from trainkit.metrics.metric_objects import join_object, object_state
from trainkit.metrics.values import is_metric_object, one_element, reduction_of, stack

__all__ = [
    "MetricInfo",
    "Record",
    "Scope",
    "adopt",
    "cadence",
    "capture",
    "fill",
    "restore_value",
    "store_value",
    "sum_weighted",
    "value_if_missing",
    "warn_missing",
]

_CHUNK = 64  # number of values of an epoch that are kept before they are added up: one kernel instead of 64, bounded memory


class Scope(Enum):
    """Where in a run `log` is called, which decides which options are allowed and the defaults."""

    NOWHERE = "nowhere"
    TRAIN_BATCH = "train batch"
    TRAIN_EPOCH = "train epoch"
    EVAL_BATCH = "evaluation batch"
    EVAL_EPOCH = "evaluation epoch"

    @property
    def in_batch(self) -> bool:
        """Whether there is a current batch."""
        return self in (Scope.TRAIN_BATCH, Scope.EVAL_BATCH)


def cadence(name: str, signature: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a metric is logged by step and by epoch; the defaults depend on the scope.

    Args:
        name: The name of the metric.
        signature: See `Record`.

    Raises:
        MetricError: The options contradict the scope or each other.
    """
    _, _, on_step, on_epoch, _, scope, *_ = signature
    if scope is Scope.NOWHERE:
        raise MetricError(
            f"log({name!r}) cannot be called here: no step or epoch is running. Call it in a step, in a hook between "
            "on_train_start and on_train_end, or in a validation or test hook."
        )
    on_step = scope is Scope.TRAIN_BATCH if on_step is None else on_step
    on_epoch = scope is not Scope.TRAIN_BATCH if on_epoch is None else on_epoch
    if on_step and not scope.in_batch:
        raise MetricError(f"log({name!r}, on_step=True): an epoch hook has no batch. Use on_step=False, on_epoch=True.")
    if not on_step and not on_epoch:
        raise MetricError(f"log({name!r}): with on_step=False and on_epoch=False nothing is logged. Set one of them to True.")
    return on_step, on_epoch


class MetricInfo:
    """A metric without its values.

    Args:
        key: the name, and the suffix of the evaluation loader.
        options: on_step, on_epoch, prog_bar, logger.

    Attributes:
        logger: whether it is passed to the loggers.
        loaders: the evaluation loaders in whose batches it was logged.
    """

    __slots__ = ("loaders", "logger", "name", "on_epoch", "on_step", "prog_bar", "suffix")

    def __init__(self, key: tuple[str, str], options: Sequence[Any]) -> None:
        self.name, self.suffix = key
        self.on_step, self.on_epoch, self.prog_bar = map(bool, options[:3])
        self.logger = options[3] is not False
        self.loaders: list[int] = []

    @property
    def full_name(self) -> str:
        """The name passed to `log`, with the suffix of the loader."""
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        """The name of the value of a step."""
        return self.name + ("_step" if self.on_epoch else "") + self.suffix

    @property
    def epoch_name(self) -> str:
        """The name of the value of the epoch."""
        return self.name + ("_epoch" if self.on_step else "") + self.suffix


class Record(MetricInfo):
    """A metric that this rank logs.

    Args:
        key: see `MetricInfo`.
        signature: prog_bar, logger, on_step, on_epoch, reduce_fx, scope, rank_zero_only, as passed to `log`.
        on_step: the resolved value.
        on_epoch: the resolved value.

    Attributes:
        reduce_fx: "mean", "sum", "min", "max", or a function.
        main_only: only the value of the main process is used.
        step_value: the value of the step, of its last micro-batch; see `value_of_step`.
        step_weight: its samples, if there are several ranks or micro-batches; `None`: all ranks have agreed on the value.
        fresh: whether the value was not passed to the loggers yet.
        values: the values of the epoch that are not in `total` yet; all of them if a function reduces them.
        weights: their samples.
        stamps: their stamps, for a function over several ranks; else `None`.
        total: the sum, minimum or maximum of earlier values; for a mean the weighted sum.
        weight: the samples in `total`.
        stamp: the stamp of the store at the last value.
        since: the stamp of the store at the first value of the epoch; -1 outside batches.
        pending_state: the saved state that belongs to its function or object, from a restore until the metric is logged again.
        window: the window of the store at the value of the step, if windows have several micro-batches; else -1.
        earlier: values of the step and their samples from earlier micro-batches of that window.
        of_loader: the value of an object at the end of its evaluation loader.
    """

    __slots__ = (
        "earlier", "fresh", "main_only", "of_loader", "pending_state", "reduce_fx", "signature", "since", "stamp", "stamps",
        "step_value", "step_weight", "torchmetric", "total", "values", "weight", "weights", "window",
    )  # fmt: skip

    def __init__(self, key: tuple[str, str], signature: tuple[Any, ...], on_step: bool, on_epoch: bool) -> None:
        prog_bar, logger, _, _, reduce_fx, _, self.main_only = signature[:7]
        super().__init__(key, (on_step, on_epoch, prog_bar, logger))
        self.signature = signature
        self.reduce_fx = reduction_of(self.name, reduce_fx)
        self.torchmetric: Any = None
        self.step_value: Any = None
        self.step_weight: float | None = None
        self.fresh = False
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.stamps: list[int] | None = None
        self.total: Tensor | None = None
        self.weight = 0.0
        self.stamp = self.since = 0
        self.pending_state: dict[str, Any] | None = None
        self.window = -1
        self.earlier: list[tuple[Any, float]] = []
        self.of_loader: Any = None

    @property
    def how(self) -> str:
        """How the value of the epoch is computed: "mean", "sum", "min", "max", "function", or "object" (of torchmetrics)."""
        if self.torchmetric is not None or (self.pending_state is not None and self.pending_state["is_object"]):
            return "object"
        return self.reduce_fx if isinstance(self.reduce_fx, str) else "function"

    @property
    def has_values(self) -> bool:
        """Whether anything was logged for the epoch."""
        return bool(self.values) or self.total is not None

    def add(self, value: Any, weight: float) -> None:
        """Add a value to the epoch."""
        self.values.append(value)
        self.weights.append(weight)
        if self.stamps is not None:
            self.stamps.append(self.stamp)
        if len(self.values) >= _CHUNK and isinstance(self.reduce_fx, str):
            self.fold()

    def fold(self) -> None:
        """Add the kept values to the total, in float64 if the device supports it."""
        if not self.values:
            return
        values = stack(self.values)
        if self.reduce_fx == "mean":
            part, self.weight = sum_weighted(values, self.weights), self.weight + sum(self.weights)
        else:
            part = values.sum() if self.reduce_fx == "sum" else values.amin() if self.reduce_fx == "min" else values.amax()
        if self.total is not None:
            part = part.to(self.total.device)  # a module on several devices may log values of each
        if self.total is None:
            self.total = part
        elif self.reduce_fx in ("min", "max"):
            self.total = (torch.minimum if self.reduce_fx == "min" else torch.maximum)(self.total, part)
        else:
            self.total = self.total + part
        self.values, self.weights = [], []

    def add_step(self, value: Any, weight: float, window: int, *, again: bool) -> None:
        """Add the value of a micro-batch to that of the window; `again`: it replaces another value of the same micro-batch."""
        if window != self.window:
            self.window = window
            self.earlier.clear()
        elif not again:
            self.earlier.append((self.step_value, self.step_weight or 0.0))
            if len(self.earlier) >= _CHUNK and self.how != "function":
                self._fold_step()
        self.step_value = value
        self.step_weight = weight
        self.fresh = True

    @property
    def step_values(self) -> list[Any]:
        """The values of the step: of the micro-batches of the window so far, in order."""
        return [*(value for value, _ in self.earlier), self.step_value]

    def value_of_step(self) -> Any:
        """The value of the step on this rank: that of its micro-batch, or of those of the accumulation window so far.

        As in the gradient, a mean weighs the micro-batches by their samples. Otherwise `reduce_fx` decides.
        """
        if not self.earlier or self.step_value is None:
            return self.step_value
        if self.how == "function" and self.pending_state is not None:
            return self.step_value  # the function was not passed again since the resume
        if self.how == "function":
            return one_element(self.full_name, self.reduce_fx(stack(self.step_values)))
        self.earlier.append((self.step_value, self.step_weight or 0.0))
        self._fold_step()
        self.step_value, self.step_weight = self.earlier.pop()
        return self.step_value

    def _fold_step(self) -> None:
        """Reduce the earlier values to one."""
        values, weights = stack([value for value, _ in self.earlier]), [weight for _, weight in self.earlier]
        if self.how in ("mean", "object"):
            value = sum_weighted(values, weights) / sum(weights)
        else:
            value = values.sum() if self.how == "sum" else values.amin() if self.how == "min" else values.amax()
        self.earlier = [(value, sum(weights))]

    def step_of_object(self, metric: Any) -> Any:
        """The value of a torchmetrics object for the batch that is logged; `None` if it is not logged by step or has none."""
        if metric is not self.torchmetric:
            raise MetricError(
                f"log({self.name!r}): the name was already used in this epoch for another Metric or for numbers. Use different "
                "names."
            )
        if not self.on_step:
            return None
        latest = getattr(metric, "_forward_cache", None)  # The value of the last batch, if it was computed.
        if latest is not None:
            return one_element(self.name, latest)
        if not self.on_epoch:
            raise MetricError(
                f"log({self.name!r}, metric, on_step=True): {type(metric).__name__} has no value for this batch, because "
                "update() does not compute one. Call metric(preds, target) instead of metric.update(preds, target), or log it "
                "by epoch: on_step=False, on_epoch=True"
            )
        return None

    def agree(self, value: Any, stamp: int) -> None:
        """Set the value of the step on which all ranks have agreed."""
        self.step_value = value
        self.step_weight = None
        self.stamp = stamp
        self.earlier.clear()

    def wait(self) -> None:
        """After the epoch: keep only the value of the step, which waits for the next log boundary."""
        self.values = []
        self.weights = []
        self.total = None
        self.weight = 0.0
        self.stamps = None
        self.torchmetric = self.pending_state = None

    def epoch_value(self) -> Tensor | None:
        """The value of the epoch, or of an object's evaluation loader, on this rank; `None` if it has none."""
        if self.pending_state is not None:
            missing, value = value_if_missing(self)
            if missing:
                return value
        if not self.on_epoch:
            return None
        if self.torchmetric is not None:
            of_loader: Tensor | None = self.of_loader
            return one_element(self.full_name, self.torchmetric.compute()) if of_loader is None else of_loader
        if not isinstance(self.reduce_fx, str):
            return one_element(self.full_name, self.reduce_fx(stack(self.values))) if self.values else None
        self.fold()
        if self.total is None:
            return None
        if self.reduce_fx != "mean":
            return self.total
        return self.total / self.weight if self.weight > 0 else torch.full_like(self.total, torch.nan)


def sum_weighted(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The sum of values times their weights; values of weight 0 do not count, even if they are NaN."""
    factors = torch.tensor(weights, dtype=values.dtype).to(values.device, non_blocking=True)
    weighted = values * factors
    if 0.0 in weights:  # the mean over nothing is NaN
        weighted = weighted.masked_fill(factors == 0.0, 0.0)
    return weighted.sum()


def store_value(value: Any) -> Any:
    """A number unchanged; a tensor with the type of its device, if that is not the CPU."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value if value.device.type == "cpu" else {"value": value, "device": value.device.type}


def restore_value(value: Any, device: torch.device | None) -> Any:
    """The value that was passed to `store_value`, copied; on `device`, if given, unless it was on the CPU."""
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
        "step_value": store_value(metric.step_value if listed else metric.value_of_step()),
        "step_weight": metric.step_weight,
        "earlier": [[store_value(value), weight] for value, weight in metric.earlier] if listed else [],
        "weight": metric.weight,
        "total": store_value(metric.total),
        "weights": list(metric.weights),
        "values": _store_values(metric.values),
        "stamps": None if metric.stamps is None else list(metric.stamps),
        "is_object": False,
        "so_far": _value_so_far(metric),
    }
    if metric.pending_state is not None:  # It was not logged again since it was restored.
        entry.update(metric.pending_state, object=None if metric.pending_state["shared"] else metric.pending_state["object"])
    elif metric.torchmetric is not None:
        state = object_state(metric.torchmetric) if path is None and shared is None else None
        entry.update(is_object=True, path=path, object=state, shared=shared and [shared.name, shared.suffix])
    return entry


def _store_values(values: list[Any]) -> Any:
    """One tensor for values of the same kind. They are not added up: the sum would depend on the moment of the save."""
    if values and all(isinstance(v, Tensor) and v.dtype is values[0].dtype and v.device == values[0].device for v in values):
        return store_value(torch.stack([value.detach().reshape(()) for value in values]))
    return [store_value(value) for value in values]


def _value_so_far(metric: Record) -> Any:
    """The result of a function of the user on the values so far, which is used if nothing more is logged."""
    if isinstance(metric.reduce_fx, str) or not metric.values or metric.pending_state is not None:
        return None
    try:
        return store_value(one_element(metric.full_name, metric.reduce_fx(stack(metric.values))))
    except Exception:  # it may need more values; otherwise it fails again at the end of the epoch
        return None


def fill(metric: Record, entry: Mapping[str, Any], device: torch.device | None, objects: Mapping[str, Any]) -> None:
    """Restore a new metric from the result of `capture`; what is missing is noted in `pending_state`."""
    metric.since, metric.stamp, metric.fresh = entry["since"], entry["stamp"], entry["fresh"]
    metric.step_value, metric.step_weight = restore_value(entry["step_value"], device), entry["step_weight"]
    metric.window = entry.get("window", -1)  # absent from checkpoints of earlier versions, like `earlier` and `shared`
    metric.earlier = [(restore_value(value, device), weight) for value, weight in entry.get("earlier", ())]
    metric.total = restore_value(entry["total"], device)
    metric.weight, metric.weights = entry["weight"], list(entry["weights"])
    values = entry["values"]
    if isinstance(values, list):
        metric.values = [restore_value(value, device) for value in values]
    else:
        metric.values = list(restore_value(values, device).unbind())
    metric.stamps = None if entry["stamps"] is None else list(entry["stamps"])
    if not entry["updated"]:
        return
    metric.torchmetric = objects.get(entry["path"]) if entry["is_object"] else None
    metric.pending_state = {key: entry.get(key) for key in ("reduce_fx", "is_object", "path", "object", "shared", "so_far")}
    metric.pending_state["so_far"] = restore_value(entry["so_far"], device)


def value_if_missing(metric: Record) -> tuple[bool, Tensor | None]:
    """Whether the function or object of a metric is missing at the end of the epoch, and the value in that case.

    For a function it is its result when the checkpoint was saved. For an object there is no value, and a warning.
    """
    pending = metric.pending_state
    assert pending is not None
    if metric.torchmetric is not None or (pending["reduce_fx"] is not None and not pending["is_object"]):
        return False, None
    if metric.on_epoch and pending["so_far"] is None:
        warn_missing(metric)
    return True, pending["so_far"]


def warn_missing(metric: Record) -> None:
    """Warn once that the function or object for the value of the epoch is missing."""
    if metric.pending_state is not None and metric.pending_state.setdefault("warned", False):
        return
    if metric.pending_state is not None:
        metric.pending_state["warned"] = True
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
    pending = metric.pending_state
    assert pending is not None
    reduction = reduction_of(metric.name, signature[4])
    known = reduction if isinstance(reduction, str) else None
    now = (on_step, on_epoch, *signature[5:7], known)
    if (metric.on_step, metric.on_epoch, *metric.signature[5:7], pending["reduce_fx"]) != now:
        return False
    if is_metric_object(metric.name, value) != pending["is_object"]:
        return False
    if pending["is_object"] and metric.torchmetric is None:
        group = [one for one in (metric, *others) if _first_with_object(one) == _first_with_object(metric)]
        states = [
            one.pending_state["object"]
            for one in group
            if one.pending_state is not None and one.pending_state["object"] is not None
        ]
        for one in group:
            one.torchmetric = value
        for saved in {id(saved): saved for saved in states}.values():
            join_object(metric.name, value, saved)
    metric.pending_state = None
    metric.signature = signature
    metric.reduce_fx = reduction
    metric.prog_bar, metric.logger = bool(signature[0]), signature[1] is not False
    return True


def _first_with_object(metric: Record) -> tuple[str, str] | None:
    """The name and the suffix of the first metric in the checkpoint with this object; `None` if it does not wait for one."""
    pending = metric.pending_state
    if pending is None or not pending["is_object"] or metric.torchmetric is not None:
        return None
    return tuple(pending["shared"] or (metric.name, metric.suffix))
