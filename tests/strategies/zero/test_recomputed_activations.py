"""Under each stage of ZeRO a run with recomputed activations is bit-identical to one without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, RegressionModule, train
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import strategy
from torch import Tensor, nn

CHOICES = (True, "selective", {"every": 2})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.2)
        self.calls = 0
        self.inner.register_forward_pre_hook(self.count)

    def count(self, *given: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(self.dropout(self.inner(x).tanh())))


class Deep(RegressionModule):
    """A module with blocks. `made` has the last one, to be looked at after its fit."""

    made: Deep

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(Block(), Block(), nn.Linear(6, 6))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        Deep.made = self


def trained(kind: str, precision: str, choices: tuple[Any, ...]) -> list[tuple[list[float], list[Tensor], list[int]]]:
    results = []
    for choice in (None, *choices):
        arguments = {"activation_checkpointing": choice, "max_epochs": 1, "precision": precision, "gradient_clip_val": 1.0}
        case = Case(samples=24, window=4, make=Deep, options={"optimizer": "adamw"}, arguments=arguments)
        record = train(case, strategy=strategy(kind, device="cpu"))
        calls = [block.calls for block in Deep.made.net[:2]]
        assert all("forward" not in vars(block) for block in Deep.made.net)
        results.append((list(record.losses.values()), record.parameters[-1], calls))
    return results


def check(kind: str, precision: str = "32-true", choices: tuple[Any, ...] = CHOICES) -> None:
    for expected, *others in run_world(2, trained, kind, precision, choices):
        for choice, (losses, parameters, calls) in zip(choices, others, strict=True):
            assert losses == expected[0]
            assert all(map(torch.equal, parameters, expected[1]))
            once, twice = expected[2][0], 2 * expected[2][0]
            assert calls == [twice, once if choice == {"every": 2} else twice]


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_in_two_processes(kind: str) -> None:
    check(kind, choices=(True,))


@pytest.mark.zero
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero2-cpu", "zero3", "zero3-cpu", "zero3-both-cpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_each_stage(kind: str, precision: str) -> None:
    check(kind, precision)
