"""XLA trains like plain torch on a CPU: the same losses, gradient norms and parameters on the same global batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.xla.xla_cases import GPT, KINDS, Net, Numbers, Text, Trained, by_hand, close, limit, loader, train, under

pytestmark = pytest.mark.xla

SAMPLES = 79  # the last seven are a short batch


def to_zero(step: int) -> float:
    return 1.0 - step / 29


class ByTokens(Net):
    """Weights its micro-batches by numbers in their samples instead of by their sizes."""

    def batch_weight(self, batch: dict[str, Any]) -> float:
        return float((batch["id"] % 3 + 1).sum())

    def loss(self, batch: Any) -> torch.Tensor:
        share = (batch["id"] % 3 + 1).float()
        return (self.samples(batch) * share).sum() / share.sum()


@dataclass(frozen=True)
class Way:
    """One way to train: the module, the arguments of the trainer, and those of the plain loop."""

    make: Callable[..., Net] = Net
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    plainly: dict[str, Any] = field(default_factory=dict)
    data: Callable[[int], Any] = Numbers


WAYS = {
    "adamw": Way(),
    "sgd": Way(options={"optimizer": "sgd"}),
    "accumulated and clipped": Way(
        arguments={"accumulate_grad_batches": 4, "gradient_clip_val": 0.5}, plainly={"window": 4, "clip": 0.5}
    ),
    "to zero, clipped": Way(
        options={"factor": to_zero, "optimizer": "sgd"}, arguments={"gradient_clip_val": 0.3}, plainly={"clip": 0.3}
    ),
    "by tokens": Way(
        ByTokens, {"optimizer": "sgd"}, {"accumulate_grad_batches": 3}, {"window": 3, "weigh": ByTokens.batch_weight}
    ),
    "gpt": Way(GPT, data=Text),
}


def both(kind: str, name: str, epochs: int, precision: str = "32-true") -> tuple[Trained, Trained]:
    """Train with the Trainer, and by hand."""
    way = WAYS[name]
    module, data = way.make(**way.options), way.data(SAMPLES)
    plainly = dict(way.plainly)
    if "weigh" in plainly:
        plainly["weigh"] = module.batch_weight
    again = copy.deepcopy(module)  # the Trainer first: torch detects XLA's device only at the first backward pass
    arguments = {"max_epochs": epochs, "precision": precision, **way.arguments}
    mine = train(kind, module, loader(kind, data), **arguments)
    if precision == "bf16-true":
        again.bfloat16()
    return mine, by_hand(again, data, epochs, cast=precision == "bf16-mixed", **plainly)


def assert_same(mine: Trained, theirs: Trained, allowed: float, parameters: bool, digit: float = 0.0) -> None:
    """`digit`: the relative rounding error of a gradient norm."""
    assert mine.ids == theirs.ids
    assert mine.rates == theirs.rates
    close(mine.losses, theirs.losses, allowed)
    close(mine.norms, theirs.norms, max(allowed, digit))
    for name, value in theirs.parameters.items() if parameters else ():
        assert torch.allclose(mine.parameters[name], value, rtol=2.5 * allowed, atol=0.5 * allowed), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WAYS)
def test_parity(name: str, kind: str) -> None:
    """Over thirty micro-batches, three of them short. Compiled with the options of a user's run, except for the slow GPT."""
    mine, theirs = under(kind, both, name, 3, optimized=name != "gpt")
    assert len(theirs.losses) == 30
    assert_same(mine, theirs, limit(), WAYS[name].options.get("optimizer") == "sgd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["adamw", "accumulated and clipped", "gpt"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_parity_in_bfloat16(name: str, precision: str, kind: str) -> None:
    mine, theirs = under(kind, both, name, 1, precision)
    assert len(theirs.losses) == 10
    assert_same(mine, theirs, limit(precision), False, digit=2.0**-7 if precision == "bf16-true" else 0.0)


def test_the_comparison_can_fail() -> None:
    mine, theirs = under("one", both, "sgd", 1)
    mine.losses[3] *= 1 + 2 * limit()
    with pytest.raises(AssertionError, match="off by .* at 3 of 10"):
        assert_same(mine, theirs, limit(), True)
    theirs.losses = mine.losses
    mine.parameters["net.0.weight"] += 1e-3
    with pytest.raises(AssertionError, match="net.0.weight"):
        assert_same(mine, theirs, limit(), True)
