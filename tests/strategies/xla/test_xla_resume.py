"""Runs killed by SIGKILL and resumed: bit for bit on the same devices, with the same samples on another number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.xla.xla_cases import FEW, KINDS, close, limit
from helpers.xla.xla_resume import Life, by_update, journal, lived, lives, parameters

pytestmark = pytest.mark.xla


def assert_same_as_uninterrupted(
    kind: str, run_dir: Path, kills: int, seed: int, workers: tuple[int, ...] = (0,), arguments: dict[str, Any] | None = None
) -> None:
    """Check that losses, samples, augmentation and parameters of a killed run equal those of an uninterrupted one."""
    whole, broken = (Life(run_dir / name, arguments=arguments or {}) for name in ("whole", "broken"))
    expected = lived(kind, whole)
    attempt = lives(kind, broken, kills, seed, workers)
    found = lived(kind, broken, attempt)
    assert [line[0] for line in found] == [line[0] for line in expected], "the same rows"
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs
    mine, theirs = parameters(broken.folder), parameters(whole.folder)
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "kind, workers, arguments",
    [
        pytest.param("one", (0, 2), {}, marks=pytest.mark.slow),
        ("spmd", (0, 2), {"accumulate_grad_batches": 2}),
        pytest.param("fsdp", (2, 0), {}, marks=pytest.mark.slow),
        ("mesh", (0,), {"precision": "bf16-mixed"}),
    ],
)
def test_killed(kind: str, workers: tuple[int, ...], arguments: dict[str, Any], run_dir: Path) -> None:
    assert_same_as_uninterrupted(kind, run_dir, 3, 1, workers, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-true"}])
@pytest.mark.parametrize("seed", [2, 3])
def test_killed_often(kind: str, arguments: dict[str, Any], seed: int, run_dir: Path) -> None:
    assert_same_as_uninterrupted(kind, run_dir, 6, seed, (0, 2), arguments)


@pytest.mark.parametrize("kind", FEW)
def test_the_comparison_can_fail(kind: str, run_dir: Path) -> None:
    """A run with another seed has other samples and losses."""
    first = lived(kind, Life(run_dir / "first", samples=16))
    other = lived(kind, Life(run_dir / "other", samples=16, arguments={"seed": 6}))
    assert [line[0] for line in first] == [line[0] for line in other]
    assert all(mine[2] != theirs[2] and mine[4] != theirs[4] for mine, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_other_numbers_of_devices(workers: int, run_dir: Path) -> None:
    """Four devices, then two, then one, then two processes of DDP: each optimizer step has the same samples."""
    arguments = {"global_batch_size": 8}
    whole, broken = (Life(run_dir / name, workers=workers, arguments=arguments) for name in ("whole", "broken"))
    expected = lived("spmd", whole)
    lives("spmd", broken, 1, 4, (workers,))
    steps = [("spmd", 2, 5), ("one", 1, 12)]
    for attempt, (kind, count, until) in enumerate(steps, 1):
        lived(kind, Life(broken.folder, workers=workers, arguments={**arguments, "max_steps": until}), attempt, count)
    lived("ddp", broken, 3, 2)
    found = by_update_of(broken.folder)
    assert found.keys() == by_update(expected, 2).keys()
    for what in (2, 3):
        assert by_update_of(broken.folder, what) == by_update(expected, what)


def by_update_of(folder: Path, what: int = 2) -> dict[int, list[Any]]:
    """The records of each optimizer step, from the last attempt that ran it; micro-batches depend on the number of devices."""
    found: dict[int, list[Any]] = {}
    attempts = {int(path.stem.split("-")[1]) for path in folder.glob("journal-*.jsonl")}
    for attempt in sorted(attempts):
        own = journal(folder, attempt)
        found |= by_update(own, what)
    return found


def test_losses_on_other_numbers_of_devices(run_dir: Path) -> None:
    """Without dropout, whose masks depend on the device, they equal those of four devices except for rounding."""
    arguments = {"global_batch_size": 8}
    whole, broken = (Life(run_dir / name, dropout=0.0, arguments=arguments) for name in ("whole", "broken"))
    expected = lived("spmd", whole)
    lived("spmd", Life(broken.folder, dropout=0.0, arguments={**arguments, "max_steps": 6}), 0)
    found = {line[1]: line for line in expected}
    lived("fsdp", Life(broken.folder, dropout=0.0, arguments={**arguments, "max_steps": 10}), 1)
    lived("mesh", broken, 2)
    mine = {line[1]: line for attempt in range(3) for line in journal(broken.folder, attempt)}
    assert mine.keys() == found.keys()
    assert [line[2] for line in mine.values()] == [line[2] for line in found.values()]
    close([float.fromhex(line[4]) for line in mine.values()], [float.fromhex(line[4]) for line in found.values()], limit())
