"""Training gives the same losses, samples, learning rates and parameters on 1, 2, 3 and 4 processes."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest
from helpers.runs.parity import Case, Record, trained
from torch import Tensor

EXACT = 1e-11
CASES = {
    "plain": Case(),
    "adamw and a schedule": Case(options={"optimizer": "adamw", "schedule": True}),
    "clipping": Case(arguments={"gradient_clip_val": 0.05}),
    "ragged": Case(ragged=True),
    "a short last batch": Case(samples=93),
    "one micro-batch in the last window": Case(samples=74, arguments={"gradient_clip_val": 0.05}),
    "ragged and short": Case(samples=75, ragged=True),
    "workers": Case(samples=75, workers=2),
}


@cache
def alone(name: str) -> Record:
    """The record of the same case on one process."""
    return trained(CASES[name], 1)


def relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference between two lists of tensors, relative to the norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def assert_same(record: Record, expected: Record, losses: float, parameters: float) -> None:
    assert record.losses.keys() == expected.losses.keys()
    assert {step: sorted(ids) for step, ids in record.ids.items()} == {s: sorted(ids) for s, ids in expected.ids.items()}
    assert record.seen == expected.seen, "the augmentation is another"
    assert record.rates == expected.rates
    assert max(relative(record.losses[key], expected.losses[key]) for key in expected.losses) < losses
    assert apart(record.parameters[-1], expected.parameters[-1]) < parameters


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, size: int) -> None:
    expected = alone(name)
    record = trained(CASES[name], size)
    assert len(expected.rates) == len({step for step, _ in expected.losses}) >= 8
    assert_same(record, expected, EXACT, EXACT)
    assert relative(record.metrics["train_loss_epoch"], expected.metrics["train_loss_epoch"]) < EXACT


@pytest.mark.parametrize("size, window", [(2, 2), (2, 8), (3, 3), (4, 4), (4, 16)])
def test_accumulation_of_one_and_four(size: int, window: int) -> None:
    """Each rank accumulates one or four micro-batches per optimizer step."""
    case = Case(window=window, samples=77, options={"optimizer": "adamw"})
    assert_same(trained(case, size), trained(case, 1), EXACT, EXACT)


@pytest.mark.parametrize("size", [2, 3])
def test_float32(size: int) -> None:
    case = Case(samples=360, arguments={"precision": "32-true", "max_steps": 30})
    assert_same(trained(case, size), trained(case, 1), 2e-6, 5e-6)


def of_updates(record: Record) -> dict[int, float]:
    """The loss of each optimizer step: the mean over its micro-batches."""
    found: dict[int, list[float]] = {}
    for (step, _), loss in record.losses.items():
        found.setdefault(step, []).append(loss)
    return {step: fmean(losses) for step, losses in found.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_bfloat16(size: int) -> None:
    """The losses of micro-batches may differ more than those of optimizer steps.

    If the last bit of a parameter is rounded differently, the loss of a micro-batch of two samples changes visibly.
    """
    case = Case(arguments={"precision": "bf16-mixed", "max_steps": 10, "max_epochs": 3})
    record, expected = trained(case, size), trained(case, 1)
    assert_same(record, expected, 0.05, 5e-3)
    losses = of_updates(expected)
    assert len(losses) == 10
    assert max(relative(loss, losses[step]) for step, loss in of_updates(record).items()) < 5e-3


def test_the_comparison_can_fail() -> None:
    """A run with another seed is not the same."""
    other = trained(Case(arguments={"seed": 6}), 1)
    with pytest.raises(AssertionError):
        assert_same(other, alone("plain"), EXACT, EXACT)


def test_dropout_and_augmentation_are_there() -> None:
    """The cases use random augmentation, and the same seed gives the same losses."""
    first, second = (trained(Case(arguments={"max_steps": 1, "seed": seed}), 1) for seed in (5, 5))
    assert first.losses == second.losses
    samples = alone("plain").seen
    assert len({round(value, 12) for (_, sample), value in samples.items() if sample == 0}) == 2, "two epochs, two versions"
