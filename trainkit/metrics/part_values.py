"""`PartValues`: what `self.log` gets in the parts of one micro-batch, until it is logged as the value of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainkit.metrics.record import sum_weighted
from trainkit.metrics.values import is_metric_object, one_element, one_number, reduction_of, stack, weight_of

__all__ = ["PartValues"]

_REDUCE_FX, _ENABLE_GRAPH, _BATCH_SIZE = 4, 5, 7  # places in the options of `MetricStore.log`, after the name and the value


@dataclass
class _LoggedParts:
    """The calls of `log` at one place of the step, of all parts.

    Attributes:
        value: A torchmetrics object; `None`: numbers were logged.
        options: Of the last call.
        values: The numbers; of an object those that it computed for the parts, `None` where it did not.
        weights: The weights of the parts.
        sizes: The `batch_size` of each call.
    """

    value: Any
    options: tuple[Any, ...]
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)


class PartValues:
    """Values logged in the parts of a micro-batch.

    The value of the whole is the mean of those of the parts, weighted as in the gradient, or with "sum", "min" and "max" their
    sum, minimum or maximum. So a mean over samples is that of the whole micro-batch.
    """

    def __init__(self) -> None:
        self._logged: dict[tuple[str, int], _LoggedParts] = {}
        self._calls: dict[str, int] = {}  # name → number of its calls in this part
        self._weight = 1.0

    def begin(self, weight: float) -> None:
        """A part of this weight begins."""
        self._weight = weight
        self._calls = {}

    def log(self, name: str, value: Any, *options: Any) -> None:
        """Called instead of `MetricStore.log`."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        is_object = is_metric_object(name, value)
        kept = self._logged.setdefault((name, call), _LoggedParts(value if is_object else None, options))
        kept.options = options
        kept.values.append(getattr(value, "_forward_cache", None) if is_object else one_number(name, value, False))
        size = options[_BATCH_SIZE]
        kept.weights.append(self._weight if size is None else weight_of(name, size))
        kept.sizes.append(size)

    def record(self, log: Callable[..., None]) -> None:
        """Log the value of the whole micro-batch for each name."""
        for (name, _), kept in self._logged.items():
            options = list(kept.options)
            options[_ENABLE_GRAPH] = False  # the graph of a part is freed after its backward pass
            if None not in kept.sizes:
                options[_BATCH_SIZE] = sum(kept.sizes)
            if kept.value is None:
                value = _combine(kept.values, kept.weights, reduction_of(name, options[_REDUCE_FX]))
            else:
                value = kept.value
                if len(kept.values) > 1 and None not in kept.values:  # as if it had computed the whole micro-batch
                    value._forward_cache = _combine([one_element(name, one) for one in kept.values], kept.weights, "mean")
            log(name, value, *options)


def _combine(values: list[Any], weights: list[float], how: Any) -> Any:
    if len(values) == 1:
        return values[0]
    stacked = stack(values)
    if how in ("sum", "min", "max"):
        return stacked.sum() if how == "sum" else stacked.amin() if how == "min" else stacked.amax()
    total = sum(weights)
    return sum_weighted(stacked, weights) / total if total > 0.0 else stacked[-1]
