"""The full grids of `FSDPStrategy`; `test_fsdp_strategy.py` tests a part of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.resume.elastic import killed, parameters, resumed, undisturbed
from helpers.runs.parity import Case
from helpers.zero.zero_cases import Calm, RegressionModule, strategy
from helpers.zero.zero_parity import assert_parity
from helpers.zero.zero_resume import ADAMW, assert_portable, name_of, saved

pytestmark = pytest.mark.fsdp

KINDS = [("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("fsdp-reshard", 2), ("fsdp-cpu", 2), ("fsdp-root", 2)]
KINDS += [("fsdp-replicas", 4), ("fsdp-tensor", 2), ("fsdp-tensor", 4)]
FSDP_ENDS = [("fsdp", 2), ("fsdp", 4), ("fsdp-cpu", 2), ("fsdp-replicas", 4), ("fsdp-tensor", 4)]
OTHER_ENDS = [("auto", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3-both-cpu", 2)]
ENDS = [*product(FSDP_ENDS, FSDP_ENDS + OTHER_ENDS), *product(OTHER_ENDS, FSDP_ENDS)]
MOVES = [(*ends, precision) for ends in ENDS for precision in ("32-true", "bf16-mixed", "bf16-true")]
MOVES = [move for move in MOVES if move[2] != "bf16-true" or move[0][0].startswith(("fsdp", "zero"))]  # have master weights


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("kind, size", KINDS)
def test_parity(kind: str, size: int, window: int, clip: float | None, precision: str) -> None:
    assert_parity(kind, size, window, clip, precision)


@pytest.mark.grid
@pytest.mark.parametrize("source, target, precision", MOVES, ids=name_of)
def test_portability(source: tuple[str, int], target: tuple[str, int], precision: str, sources: Path) -> None:
    """Saved under one configuration, resumed under another, of which one at least is FSDP's."""
    make = Calm if precision == "bf16-true" else RegressionModule
    # ZeRO, which is compared with under bf16-true, reduces gradients in bfloat16
    limit, exact = (None, True) if precision != "bf16-true" else (2e-2, target[0].startswith(("fsdp", "zero")))
    assert_portable(saved(sources, *source, precision, make), *target, precision, make, exact=exact, limit=limit)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind, size", [*FSDP_ENDS, ("fsdp-reshard", 2), ("fsdp", 3)])
def test_exact_resume(kind: str, size: int, precision: str, run_dir: Path) -> None:
    """A run killed by SIGKILL and resumed equals an uninterrupted one bit for bit."""
    whole, broken = run_dir / "whole", run_dir / "broken"
    whole.mkdir()
    broken.mkdir()
    arguments = {"precision": precision, "gradient_clip_val": 1.0}
    small = Case(samples=35, options=ADAMW, arguments=arguments)
    expected = undisturbed(small, whole, size, strategy=strategy(kind))
    killed(small, broken, size, 0, (1, 2), strategy=strategy(kind))
    assert resumed(small, broken, size, 1, strategy=strategy(kind)) == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))
