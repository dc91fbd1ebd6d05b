"""A run that is killed and resumed many times gives the same results as one that is never killed, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.resuming import Run, forked, read_trace

HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start")


def chain(kills: int, seed: int, workers: tuple[int, ...], precision: str) -> dict[str, Any]:
    """Kill one run `kills` times, at random steps in random hooks. Each process uses the next number of DataLoader workers."""
    draw = random.Random(seed)
    updates = Run().updates
    steps = sorted(draw.choices(range(1, updates), k=kills))
    for number, step in enumerate(steps):
        run = Run(kill_at=step, kill_in=draw.choice(HOOKS), workers=workers[number % len(workers)], precision=precision)
        status, _ = forked(run.go)
        assert os.WIFSIGNALED(status), f"kill {number} at step {step} in {run.kill_in}"
        assert os.WTERMSIG(status) == signal.SIGKILL
    status, answer = forked(Run(workers=workers[-1], precision=precision).go)
    assert status == 0
    return answer


def compare(kills: int, seed: int, workers: tuple[int, ...], precision: str) -> None:
    undisturbed = Run(trace="plain.jsonl", folder="plain", precision=precision)
    status, expected = forked(undisturbed.go)
    assert status == 0
    answer = chain(kills, seed, workers, precision)
    assert read_trace("trace.jsonl") == read_trace("plain.jsonl")
    assert answer == expected
    assert rows("runs") == rows("plain")


def rows(folder: str) -> list[dict[str, Any]]:
    """The log rows of the newest run. A process that was killed before its first checkpoint was a run of its own."""
    newest = max(Path(folder).rglob("metrics.jsonl"), key=lambda path: int(path.parent.name.split("_")[1]))
    return [json.loads(line) for line in newest.read_text().splitlines()]


def test_killed_twenty_times() -> None:
    compare(20, 1, (0, 2), "32-true")
    steps = Counter((row["step"], *sorted(set(row) - {"step", "epoch"})) for row in rows("runs"))
    assert max(steps.values()) == 1, "no row twice"
    assert not [path for path in Path("runs").rglob("*") if ".tmp-" in path.name]


def test_killed_in_bf16() -> None:
    compare(4, 2, (0,), "bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("workers", [(0,), (2,), (0, 2)])
def test_killed_twenty_times_in_every_way(workers: tuple[int, ...], precision: str) -> None:
    compare(20, 3, workers, precision)


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds a run whose random generators are not seeded by the position in the data."""
    import trainkit.data.loader

    plain = Run(trace="plain.jsonl", folder="plain", epochs=1)
    status, _ = forked(plain.go)
    monkeypatch.setattr(trainkit.data.loader, "seed_generators", lambda key, generators=(): None)
    killed, _ = forked(Run(kill_at=4, epochs=1).go)
    ended, _ = forked(Run(epochs=1).go)
    assert (status, os.WTERMSIG(killed), ended) == (0, signal.SIGKILL, 0)
    assert read_trace("trace.jsonl") != read_trace("plain.jsonl")
