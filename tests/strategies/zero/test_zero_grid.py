"""The full grids of ZeRO, including NVMe; `test_zero_strategy.py` and `test_stored_state.py` test a part of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.resume.elastic import killed, parameters, resumed, undisturbed
from helpers.runs.parity import Case, RegressionModule
from helpers.zero.zero_cases import NVME, STAGES, Calm, Wide, strategy
from helpers.zero.zero_parity import assert_parity
from helpers.zero.zero_resume import ADAMW, assert_portable, name_of, saved

pytestmark = pytest.mark.zero

KINDS = [*STAGES, "zero3-nvme", "zero3-both-nvme"]
SOURCES = [("auto", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3-both-cpu", 2), ("zero3-both-nvme", 2)]
TARGETS = [("auto", 1), ("ddp", 2), ("ddp", 3)]
TARGETS += [(kind, size) for kind in ("zero1", "zero2", "zero3", "zero3-both-cpu", "zero3-both-nvme") for size in (1, 2)]
TARGETS += [("zero2", 3), ("zero3", 3)]
MOVES = list(product(SOURCES, TARGETS, ["32-true", "bf16-mixed", "bf16-true"]))
MOVES = [move for move in MOVES if move[2] != "bf16-true" or move[0][0].startswith("zero")]  # others have no master weights


def made(precision: str, *kinds: str) -> type:
    """The module to train: a large one for offload to a disk."""
    if any(kind in NVME for kind in kinds):
        return Wide
    return Calm if precision == "bf16-true" else RegressionModule


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, size: int, window: int, clip: float | None, precision: str) -> None:
    assert_parity(kind, size, window, clip, precision, made(precision, kind))


@pytest.mark.grid
@pytest.mark.parametrize("source, target, precision", MOVES, ids=name_of)
def test_portability(source: tuple[str, int], target: tuple[str, int], precision: str, sources: Path) -> None:
    """Saved under one configuration, resumed under another."""
    make, exact = made(precision, source[0], target[0]), precision != "bf16-true" or target[0].startswith("zero")
    assert_portable(saved(sources, *source, precision, make), *target, precision, make, exact=exact)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_resume(kind: str, precision: str, run_dir: Path) -> None:
    """A run killed by SIGKILL and resumed equals an uninterrupted one bit for bit. No swap folder is left on the disk."""
    whole, broken = run_dir / "whole", run_dir / "broken"
    whole.mkdir()
    broken.mkdir()
    arguments = {"precision": precision, "gradient_clip_val": 1.0}
    small = Case(samples=35, make=made(precision, kind), options=ADAMW, arguments=arguments)
    expected = undisturbed(small, whole, 2, strategy=strategy(kind))
    killed(small, broken, 2, 0, (1, 2), strategy=strategy(kind))
    assert (len([*Path.cwd().glob("trainkit-swap-*")]) > 0) == (kind in NVME)
    assert resumed(small, broken, 2, 1, strategy=strategy(kind)) == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))
    assert not [*Path.cwd().glob("trainkit-swap-*")]
