"""Compare training with ZeRO with the same training with DDP."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_cases import FSDP
from helpers.runs.parity import Case, Record, RegressionModule, trained
from helpers.zero.zero_cases import strategy

__all__ = ["LIMITS", "assert_parity", "assert_same", "expected"]

LIMITS = {"32-true": 2e-6, "bf16-mixed": 5e-3, "16-mixed": 5e-3}


@cache
def expected(size: int, window: int, clip: float | None, precision: str, make: type = RegressionModule) -> Record:
    """The record of the same training with DDP, or without a strategy on one process."""
    return run("ddp" if size > 1 else "auto", size, window, clip, precision, make)


def run(
    kind: str, size: int, window: int, clip: float | None, precision: str, make: type = RegressionModule, **options: Any
) -> Record:
    """Train two epochs with a strategy; returns the record."""
    arguments = {"max_epochs": 2, "precision": precision, "gradient_clip_val": clip, "log_every_n_steps": 1}
    case = Case(samples=40, batch_size=2, window=window * size, make=make, arguments=arguments)
    return trained(case, size, strategy=strategy(kind, **options))


def assert_same(record: Record, other: Record, limit: float) -> None:
    """Samples and learning rates are equal, and losses agree to the relative difference `limit`."""
    assert record.losses.keys() == other.losses.keys()
    assert len(record.losses) >= 20
    for key, loss in other.losses.items():
        assert record.losses[key] == pytest.approx(loss, rel=limit, abs=1e-9), key
    assert record.ids == other.ids
    assert record.rates == other.rates


def assert_parity(
    kind: str, size: int, window: int, clip: float | None, precision: str, make: type = RegressionModule, **options: Any
) -> None:
    """Check that losses, gradient norms and parameters are those of DDP with the same global batches.

    Args:
        kind: Argument of `zero_cases.strategy`.
        size: Number of processes.
        window: Number of micro-batches of a process in an accumulation window.
        clip: Maximum gradient norm, or None.
        precision: Precision of the Trainer.
        make: Class of the module.
        **options: Arguments of the strategy.
    """
    readers = size // FSDP.get(kind, {}).get("tensor_parallel", 1)  # ranks that read different data
    record = run(kind, size, window, clip, precision, make, **options)
    other = expected(readers, window * size // readers, clip, precision, make)
    # with tensor parallelism, each rank rounds its part of a sum
    limit = LIMITS[precision] * (1 if readers == size or precision == "32-true" else 8)
    assert_same(record, other, limit)
    assert ("grad_norm" in other.metrics) == (clip is not None)
    assert record.metrics == pytest.approx(other.metrics, rel=limit)
    if precision == "32-true":
        for mine, theirs in zip(record.parameters[-1], other.parameters[-1], strict=True):
            assert torch.allclose(mine, theirs, rtol=5e-6, atol=1e-6)
