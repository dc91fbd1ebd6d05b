"""What is logged in the parts of a micro-batch, as the value of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics

from trainkit.metrics.part_values import PartValues


def options(reduce_fx: str = "mean", batch_size: int | None = None, enable_graph: bool = False) -> tuple[Any, ...]:
    """Those of `MetricStore.log`, after the name and the value."""
    return (False, None, None, None, reduce_fx, enable_graph, True, batch_size)


def recorded(parts: PartValues) -> list[tuple[str, Any, tuple[Any, ...]]]:
    found: list[Any] = []
    parts.record(lambda name, value, *given: found.append((name, value, given)))
    return found


@pytest.mark.parametrize(("how", "expected"), [("mean", 3.5), ("sum", 6.0), ("min", 2.0), ("max", 4.0)])
def test_the_value_of_the_whole(how: str, expected: float) -> None:
    """A mean is weighted as in the gradient; the graph of a part does not reach the whole."""
    parts = PartValues()
    for weight, value in ((1.0, 2.0), (3.0, 4.0)):
        parts.begin(weight)
        parts.log("loss", torch.tensor(value, requires_grad=True), *options(how, enable_graph=True))
    [(name, value, given)] = recorded(parts)
    assert (name, float(value)) == ("loss", expected)
    assert not value.requires_grad
    assert given == options(how)


def test_a_batch_size_replaces_the_weight() -> None:
    parts = PartValues()
    for weight, value, size in ((1.0, 2.0, 5), (3.0, 8.0, 1)):
        parts.begin(weight)
        parts.log("rows", value, *options(batch_size=size))
    [(_, value, given)] = recorded(parts)
    assert float(value) == 3.0
    assert given == options(batch_size=6)


def test_a_name_that_is_logged_twice_in_a_step() -> None:
    parts = PartValues()
    for value in (1.0, 2.0):
        parts.begin(1.0)
        parts.log("loss", value, *options())
        parts.log("loss", 10 * value, *options())
    assert [(name, float(value)) for name, value, _ in recorded(parts)] == [("loss", 1.5), ("loss", 15.0)]


def test_what_an_object_shows_of_the_step_is_that_of_the_whole() -> None:
    metric, parts = torchmetrics.MeanMetric(), PartValues()
    for weight, value in ((1.0, 2.0), (3.0, 4.0)):
        parts.begin(weight)
        metric(value)
        parts.log("metric", metric, *options())
    [(_, logged, _)] = recorded(parts)
    assert logged is metric
    assert float(metric._forward_cache) == 3.5
