"""`FSDPStrategy` together with activation checkpointing and compilation of blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from helpers.fsdp.stack import Stack
from helpers.runs.parity import Case, Record, trained

from trainkit.strategies import FSDPStrategy

ADAMW = {"optimizer": "adamw"}


@cache
def run(**arguments: Any) -> Record:
    """Train on two processes, with the repeated blocks as units."""
    arguments = {**arguments, "compile": dict(arguments["compile"])} if "compile" in arguments else arguments
    case = Case(samples=24, make=Stack, options=ADAMW, window=4, arguments={"max_epochs": 2, "precision": "64-true"})
    return trained(case, 2, strategy=FSDPStrategy(), **arguments)


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
