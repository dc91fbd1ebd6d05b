"""Checkpoints under ZeRO: exact resume, and the same state under every strategy and on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import killed, parameters, resumed, undisturbed
from parity import Case, Recorder, train, trained
from replicas import together
from torch import Tensor
from zero_cases import STAGES, strategy

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint

ADAMW = {"optimizer": "adamw", "schedule": True}
UNDER = [("auto", 1), ("ddp", 2), *((kind, 2) for kind in STAGES if kind != "zero1-cpu"), ("zero3", 1), ("zero2", 3)]


def case(precision: str = "32-true") -> Case:
    """Six updates of an epoch and a half; of dropout, augmentation, a schedule, clipping and accumulation each a bit."""
    arguments = {"precision": precision, "gradient_clip_val": 1.0, "max_epochs": -1, "max_steps": 20}
    return Case(samples=75, options=ADAMW, arguments=arguments)


@pytest.mark.parametrize(
    "kind, precision",
    [(kind, "32-true") for kind in STAGES] + [(kind, "bf16-true" if kind.endswith("cpu") else "bf16-mixed") for kind in STAGES],
)
def test_exact_resume(kind: str, precision: str, run_dir: Path) -> None:
    """Killed by SIGKILL and gone on with, bit for bit: losses, samples, augmentation, parameters."""
    whole, broken = run_dir / "whole", run_dir / "broken"
    whole.mkdir()
    broken.mkdir()
    small = Case(samples=75, options=ADAMW, arguments={"precision": precision, "gradient_clip_val": 1.0})
    expected = undisturbed(small, whole, 2, strategy=strategy(kind))
    killed(small, broken, 2, 0, (1, 2), strategy=strategy(kind))
    assert resumed(small, broken, 2, 1, strategy=strategy(kind)) == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))


class SaveAtOnce(Callback):
    """Saves again what has just been loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder)


class SaveAfterTen(Callback):
    """Saves after ten updates, and ends the training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 10 and trainer.accelerator.sync_gradients:
            trainer.save_checkpoint(self.folder)
            trainer.should_stop = True


def go_on(precision: str, kind: str, source: Path, copy: Path) -> dict[Any, float]:
    """Train to the end from a checkpoint; the losses."""
    recorder = Recorder()
    train(case(precision), recorder, SaveAtOnce(copy), strategy=strategy(kind), ckpt_path=str(source))
    return recorder.record.losses


def save(precision: str, kind: str, folder: Path) -> None:
    train(case(precision), SaveAfterTen(folder / "saved"), strategy=strategy(kind))


def tensors(folder: Path) -> dict[str, Tensor]:
    loaded = open_checkpoint(folder).read().tensors
    return {f"{stem}/{name}": tensor for stem, own in loaded.items() for name, tensor in own.items() if stem != "state"}


@pytest.mark.parametrize("kind, size", UNDER)
def test_portability(kind: str, size: int, run_dir: Path) -> None:
    """Saved under one configuration, resumed under each: the state bit for bit, and the losses of ten updates more."""
    together(size, {"save": (save, "32-true", kind, run_dir)})
    source = run_dir / "saved"
    whole = trained(case(), 1)
    expected = {key: loss for key, loss in whole.losses.items() if key[0] >= 10}
    assert len(expected) == 90
    here = UNDER.index((kind, size))
    for other, count in (UNDER[here - 1], UNDER[here - 4]):  # each is resumed under two, all pairs in `make test-zero`
        copy = run_dir / f"{other}-{count}"
        losses: dict[Any, float] = {}
        for own in together(count, {"go on": (go_on, "32-true", other, source, copy)})["go on"]:
            losses |= own
        assert losses == pytest.approx(expected, rel=2e-6)
        saved, again = tensors(source), tensors(copy)
        assert saved.keys() == again.keys()
        assert len(saved) == 4 + 3 * 4
        for name, tensor in saved.items():
            assert torch.equal(again[name], tensor), name
            assert again[name].dtype == tensor.dtype == torch.float32
            assert tensor.abs().sum() > 0


@pytest.mark.parametrize("kind, other", [("zero1", "zero3"), ("zero3-cpu", "zero2"), ("zero2", "zero3-both-cpu")])
def test_masters(kind: str, other: str, run_dir: Path) -> None:
    """Under bf16-true the float32 masters are what is saved, exactly, and come back exactly under another stage."""
    together(2, {"save": (save, "bf16-true", kind, run_dir)})
    source, copy = run_dir / "saved", run_dir / "copy"
    together(2, {"go on": (go_on, "bf16-true", other, source, copy)})
    saved, again = tensors(source), tensors(copy)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert any(not torch.equal(t, t.bfloat16().float()) for name, t in saved.items() if name.startswith("model/"))
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())


def test_counters_that_differ_within_a_group(run_dir: Path) -> None:
    """A parameter that has been trained for fewer updates than others of its group cannot be held; it is said."""
    from trainkit.errors import StateMismatchError
    from trainkit.strategies.zero_state import _refuse_differing

    _refuse_differing("step", [torch.tensor(3.0), torch.tensor(3.0)])
    with pytest.raises(StateMismatchError, match=r"'step' differs from parameter to parameter \(2.0, 3.0\)"):
        _refuse_differing("step", [torch.tensor(3.0), torch.tensor(2.0)])
