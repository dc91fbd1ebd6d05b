"""A run is killed and resumed, on the same or on another number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.elastic import killed, parameters, resumed, undisturbed
from helpers.runs.parity import Case
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world

from trainkit import Callback, Trainer

LINES = dict[tuple[int, int], dict[str, Any]]


def folders(base: Path, *names: str) -> list[Path]:
    made = [base / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def by_step(lines: LINES, what: str) -> dict[int, list[Any]]:
    """For each optimizer step, the values of its micro-batches on all ranks, sorted."""
    found: dict[int, list[Any]] = {}
    for (step, _), entry in lines.items():
        found.setdefault(step, []).extend(entry[what] if isinstance(entry[what], list) else [entry[what]])
    return {step: sorted(values) for step, values in found.items()}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_exact_resume(size: int, precision: str, run_dir: Path) -> None:
    """On the same number of processes, losses, samples, augmentation and parameters are bit-identical."""
    whole, broken = folders(run_dir, "whole", "broken")
    case = Case(samples=75, options={"optimizer": "adamw", "schedule": True}, arguments={"precision": precision})
    expected = undisturbed(case, whole, size)
    killed(case, broken, size, 0, (size - 1, 2))
    killed(case, broken, size, 1, (0, 5))
    lines = resumed(case, broken, size, 2)
    assert lines == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))


MOVES = [(2, 1, 2), (1, 2, 0), (2, 3, 0), (4, 1, 0)]
MOVES += [pytest.param(*move, marks=pytest.mark.slow) for move in ((2, 1, 0), (1, 2, 2), (2, 3, 2), (4, 1, 2))]


@pytest.mark.parametrize("before, after, workers", MOVES)
def test_another_number_of_processes(before: int, after: int, workers: int, run_dir: Path) -> None:
    """Each optimizer step has the same samples and augmentation, and the same loss except for rounding."""
    whole, broken = folders(run_dir, "whole", "broken")
    case = Case(samples=75, workers=workers, options={"optimizer": "adamw"})
    expected = undisturbed(case, whole, before)
    killed(case, broken, before, 0, (before - 1, 2))
    lines = resumed(case, broken, after, 1)
    assert lines.keys() == expected.keys()
    for what in ("ids", "seen"):
        assert by_step(lines, what) == by_step(expected, what)
    assert all(lines[key]["ids"] == expected[key]["ids"] for key in expected)
    for key, entry in expected.items():
        assert float.fromhex(lines[key]["loss"]) == pytest.approx(float.fromhex(entry["loss"]), rel=1e-11)


class Validations(Callback):
    """Records the (epoch, batch_idx) of each validation."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.places.append((trainer.current_epoch, trainer.batch_idx))


def validations(ckpt_path: str | None, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Train, and return where validation ran. Without a checkpoint, train one optimizer step and save one."""
    noted = Validations()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        seed=1,
        max_epochs=2,
        max_steps=1 if ckpt_path is None else -1,
        callbacks=[noted],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )
    trainer.fit(TinyModule(), tiny_loader(96), tiny_loader(8), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint("first")
    return noted.places


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, [(0, 8), (1, 7)]),
        ({"val_check_interval": 4}, [(0, 4), (0, 8), (1, 3), (1, 7)]),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, [(0, 6), (1, 3)]),
    ],
)
def test_validation_in_an_epoch_that_has_become_longer(
    arguments: dict[str, Any], expected: list[tuple[int, int]], run_dir: Path
) -> None:
    """After a resume on three processes, the epoch has 9 optimizer steps instead of 8, and validation is still at its end.

    Two processes saved the checkpoint after 2 of 24 micro-batches.
    """
    assert run_world(2, validations, None, arguments) == [[], []]
    assert run_world(3, validations, "first", arguments) == [expected] * 3
