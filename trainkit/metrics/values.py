"""Checks what is passed to `log` and converts it to numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.errors import MetricError, UnknownNameError, nearest

__all__ = [
    "TO_HOST",
    "alike",
    "check_group",
    "is_metric_object",
    "number_of",
    "one_element",
    "one_number",
    "read",
    "reduction_of",
    "stack",
    "weight_of",
]

# Name → functions with the same meaning, as in Lightning's log.
_REDUCTIONS: dict[str, tuple[Any, ...]] = {
    "mean": (torch.mean,),
    "sum": (torch.sum, sum),
    "min": (torch.min, min),
    "max": (torch.max, max),
}


def alike(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two signatures differ at most in a function defined in the call, which is a new object each time."""
    one, other = getattr(first[4], "__code__", None), getattr(second[4], "__code__", None)
    return one is not None and one is other and first[:4] == second[:4] and first[5:] == second[5:]


def reduction_of(name: str, reduce_fx: Any) -> Any:
    """Resolve `reduce_fx` to "mean", "sum", "min", "max", or a function of all values.

    Raises:
        UnknownNameError: an unknown name.
        MetricError: neither a name nor a function.
    """
    word = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    if word == "avg":
        return "mean"
    for known, others in _REDUCTIONS.items():
        if any(word is other for other in others) or word == known:
            return known
    if isinstance(reduce_fx, str):
        raise UnknownNameError(
            f"log({name!r}): unknown reduce_fx {reduce_fx!r}; known: {', '.join(_REDUCTIONS)}, or a function."
            f"{nearest(reduce_fx, _REDUCTIONS)}"
        )
    if not callable(reduce_fx):
        raise MetricError(f"log({name!r}): reduce_fx must be one of {', '.join(_REDUCTIONS)} or a function, not {reduce_fx!r}.")
    return reduce_fx


def is_metric_object(name: str, value: Any) -> bool:
    """Whether a value is a torchmetrics `Metric`. Values that cannot be logged raise an error now, not after an epoch."""
    if isinstance(value, Tensor) and value.is_complex():
        raise MetricError(f"log({name!r}): expected a real number, not a complex one. Use value.abs() or value.real")
    if isinstance(value, type):
        raise MetricError(f"log({name!r}): expected a value, not the class {value.__name__}. Use an object: {value.__name__}()")
    if not (callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))):
        return False
    if hasattr(value, "items"):
        raise MetricError(f"log({name!r}): {type(value).__name__} contains several metrics. Use self.log_dict(collection)")
    if hasattr(value, "best_metric"):
        raise MetricError(
            f"log({name!r}): {type(value).__name__} keeps the values of earlier epochs, but a logged metric is reset after the "
            f"epoch. In on_validation_epoch_end: self.log({name!r}, tracker.compute())"
        )
    if getattr(value, "dist_sync_on_step", False) and dist.is_available() and dist.is_initialized():
        raise MetricError(
            f"log({name!r}): {type(value).__name__}(dist_sync_on_step=True) gathers at each step, but not every process has a "
            "batch in each step. Remove the argument: trainkit combines the values of all processes."
        )
    return True


def weight_of(name: str, batch_size: Any) -> float:
    """The `batch_size` of the user as a number; reading it must not wait for a device."""
    if type(batch_size) is int and batch_size >= 0:
        return batch_size
    on_device = isinstance(batch_size, Tensor) and batch_size.device.type != "cpu"
    try:
        weight = math.nan if on_device or isinstance(batch_size, str | bool) else float(batch_size)
    except (TypeError, ValueError):
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0.0):
        raise MetricError(
            f"log({name!r}): batch_size must be a number of samples ≥ 0, not {batch_size!r}. Example: batch_size=len(x)"
        )
    return weight


TO_HOST: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {}
"""Device type → function that reads several values. It replaces a stack, which XLA would compile for each length."""


def stack(values: list[Any]) -> Tensor:
    """The values as one float64 tensor on the device of the first tensor (the CPU if that does not support float64)."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=torch.float64)
    first = tensors[0]
    if first.device.type in TO_HOST:
        fetched = iter(TO_HOST[first.device.type]([t.detach() for t in tensors]))
        return stack([next(fetched).item() if isinstance(value, Tensor) else value for value in values])
    device = torch.device("cpu") if first.device.type == "mps" else first.device
    if len(tensors) == len(values) and all(t.dtype is first.dtype and t.device == first.device for t in tensors):
        return torch.stack([t.reshape(()) for t in tensors]).to(device).double()  # This is one kernel instead of one per value.
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in values])


def read(values: list[Any]) -> list[float]:
    """The values as numbers, with one wait for the device."""
    if not any(isinstance(value, Tensor) for value in values):
        return [float(value) for value in values]
    numbers: list[float] = stack([v.detach() if isinstance(v, Tensor) else v for v in values]).tolist()
    return numbers


def one_element(name: str, value: Any) -> Any:
    """The result of a `Metric` or a function, which must be a number or a tensor with one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, Number):
        return number_of(name, value)
    raise MetricError(
        f"log({name!r}): the result must be a number or a tensor with one element, not {value!r}. Log its parts: "
        "log_dict(metric.compute())"
    )


def one_number(name: str, value: Any, enable_graph: bool) -> Any:
    """A logged value: a number, or a tensor with one element, detached and copied unless `enable_graph`."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise MetricError(
                f"log({name!r}): expected a number or a tensor with one element, not a tensor of shape {tuple(value.shape)}. "
                "Reduce it first, for example with .mean()."
            )
        return value if enable_graph else value.detach().clone()  # the caller may change its tensor in place
    return value if type(value) in (float, int) else number_of(name, value)


def number_of(name: str, value: Any) -> float:
    """Convert any number (numpy scalars, booleans) to a float."""
    if isinstance(value, str | bytes) or value is None:
        raise MetricError(f"log({name!r}): a metric must be a number, a tensor with one element or a Metric, not {value!r}.")
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()  # a numpy array of one element
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MetricError(
            f"log({name!r}): a metric must be a number, a tensor with one element or a Metric, not {type(value).__name__}. "
            "Use log_dict for a dict of metrics."
        ) from None


def check_group(name: str, group: Any) -> None:
    """Refuse a `sync_dist_group` with some of the ranks: a metric is reduced over all ranks.

    Raises:
        MetricError: the group is not `torch.distributed.group.WORLD`.
    """
    if group is not torch.distributed.group.WORLD:
        raise MetricError(
            f"log({name!r}, sync_dist_group=...): expected None or torch.distributed.group.WORLD, got {group!r}. A metric is "
            f"reduced over all processes. Remove the argument: self.log({name!r}, value)"
        )
