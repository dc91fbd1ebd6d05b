"""Train with the methods of `FSDPStrategy` in a process of several, and compare with a plain loop on one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.runs.replicas import Net, Plan, by_hand, flat, over_strategy, sgd
from torch import nn

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.strategies import FSDPStrategy

__all__ = ["PLAN", "assert_like_one_process", "joined_fsdp"]

PLAN: Plan = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
"""Three windows; each of two ranks has two micro-batches in a window."""


def joined_fsdp(**options: Any) -> FSDPStrategy:
    """An `FSDPStrategy` that has joined the process group. Each linear layer is a unit."""
    strategy = FSDPStrategy(**{"timeout": timedelta(seconds=60), "wrap": "Linear", "precision": "64-true", **options})
    strategy.join(RequestedDevices("cpu"))
    return strategy


def assert_like_one_process(
    make: Callable[[], nn.Module] = Net,
    plan: Plan = PLAN,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    before: Callable[[nn.Module, int], None] = lambda module, window: None,
    reference: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Train under FSDP and in a plain loop: the parameters are equal. Returns the module, whole again.

    Args:
        make: Creates the module.
        plan: What to train on.
        optimizer: Creates the optimizer.
        before: Called with the module and the number of the window, before each window.
        reference: Creates the module of the plain loop, if it is another one.
        **options: Of `FSDPStrategy`.
    """
    expected = by_hand(plan, (reference or make)().double(), optimizer, before)
    strategy = joined_fsdp(**options)
    module = over_strategy(strategy, plan, make().double(), optimizer, before)  # type: ignore[arg-type]
    strategy.teardown()
    assert flat(module) == pytest.approx(flat(expected), rel=1e-10, abs=1e-13)
    return module
