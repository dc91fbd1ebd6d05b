"""`FSDPStrategy` together with activation checkpointing and compilation of blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.fsdp.stack import Stack
from helpers.runs.parity import Case, Record, RegressionModule, trained
from torch import nn

from trainkit import Float8Precision
from trainkit.strategies import FSDPStrategy

ADAMW = {"optimizer": "adamw"}


@cache
def run(**arguments: Any) -> Record:
    """Train on two processes, with the repeated blocks as units."""
    arguments = {**arguments, "compile": dict(arguments["compile"])} if "compile" in arguments else arguments
    case = Case(samples=24, make=Stack, options=ADAMW, window=4, arguments={"max_epochs": 2, "precision": "64-true"})
    return trained(case, 2, strategy=FSDPStrategy(), **arguments)


class Wide(RegressionModule):
    """A `RegressionModule` with a layer that computes in float8."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 6))


def is_second(name: str, layer: nn.Linear) -> bool:
    return name.endswith("net.1")


@pytest.mark.fsdp
@pytest.mark.parametrize("all_gather", [False, True])
def test_float8(all_gather: bool) -> None:
    """The losses are those of one process; weights may be gathered in float8. torchao emulates it on the CPU."""
    case = Case(samples=24, make=Wide, window=4, arguments={"max_epochs": 2})

    def losses(size: int, strategy: Any, **options: Any) -> dict[tuple[int, int], float]:
        precision = Float8Precision(emulate=True, filter=is_second, **options)
        return trained(case, size, strategy=strategy, precision=precision).losses

    alone = losses(1, "auto")
    assert len(alone) == 24
    assert losses(2, FSDPStrategy(wrap="Linear"), all_gather=all_gather) == pytest.approx(alone, rel=5e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"activation_checkpointing": True},
        pytest.param({"activation_checkpointing": "selective"}, marks=pytest.mark.fsdp),
        {"compile": (("backend", "aot_eager"), ("fullgraph", True))},  # the hooks of fully_shard are outside of the graphs
        pytest.param({"compile": (("backend", "aot_eager"), ("regional", False))}, marks=pytest.mark.fsdp),
        pytest.param({"compile": (("backend", "aot_eager"),), "activation_checkpointing": True}, marks=pytest.mark.fsdp),
    ],
    ids=["recomputed", "selective", "compiled", "whole", "both"],
)
def test_the_losses_are_the_same_bits(arguments: dict[str, Any]) -> None:
    """With dropout, and gradients that are reduced once in a window of two micro-batches."""
    plain, other = run(), run(**arguments)
    assert len(plain.losses) == 24
    assert other.losses == plain.losses
    assert all(bool((a == b).all()) for a, b in zip(other.parameters[-1], plain.parameters[-1], strict=True))
