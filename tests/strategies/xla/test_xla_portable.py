"""Checkpoints of XLA are resumed under other strategies, in an environment with another torch, and vice versa."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from helpers.xla.main_runs import run_main
from helpers.xla.xla_cases import FEW, KINDS, Net, Notes, Numbers, by_hand, close, limit, quiet, under
from helpers.zero.zero_resume import SaveAfterTen, SaveAtOnce, tensors
from torch.utils.data import DataLoader

from trainkit import Callback

pytestmark = pytest.mark.xla

SAMPLES, UPDATES = 72, 18
OTHERS = [("auto", 1), ("ddp", 2), ("zero3", 2), ("fsdp-reshard", 2)]  # "fsdp" is a kind of XLA's here


def falling(step: int) -> float:
    return 1.0 - step / 20


def go(kind: str, *callbacks: Callback, **arguments: Any) -> Notes:
    notes = Notes()
    trainer = quiet(kind, notes, *callbacks, max_epochs=2, global_batch_size=8, gradient_clip_val=1.0)
    trainer.fit(Net("adamw", falling), DataLoader(Numbers(SAMPLES), 2), **arguments)
    return notes


def save(kind: str, folder: Path) -> None:
    """Train for ten optimizer steps, and save."""
    go(kind, SaveAfterTen(folder))


def go_on(kind: str, source: Path, copy: Path) -> dict[int, list[float]]:
    """Resume from `source` and train to the end; returns the losses of each optimizer step."""
    trained = go(kind, SaveAtOnce(copy), ckpt_path=source).trained
    found: dict[int, list[float]] = {}
    before = 10
    for made, loss in zip(trained.updates, trained.losses, strict=True):
        found.setdefault(before + 1, []).append(loss)
        before = made
    return found


@cache
def undisturbed() -> list[float]:
    """The losses of the last eight optimizer steps, by hand."""
    return by_hand(Net("adamw", falling), Numbers(SAMPLES), 2, clip=1.0).losses[10:]


def assert_goes_on(found: list[dict[int, list[float]]], source: Path, copy: Path) -> None:
    saved, again = tensors(source), tensors(copy)
    assert saved.keys() == again.keys()
    assert len(saved) == 4 + 3 * 4
    for name, tensor in saved.items():
        assert tensor.dtype == again[name].dtype == torch.float32
        assert torch.equal(again[name], tensor), name
    losses = {update: [x for own in found for x in own[update]] for update in found[0]}
    close([sum(own) / len(own) for own in losses.values()], undisturbed(), limit())


@pytest.mark.parametrize("kind", FEW)
def test_xla_checkpoint_resumes_elsewhere(kind: str, run_dir: Path) -> None:
    """Parameters and optimizer state are restored bit for bit, and training continues as if it had not moved."""
    under(kind, save, run_dir / "saved")
    for other, size in OTHERS:
        copy = run_dir / f"{other}-{size}"
        found = run_main(go_on, other, run_dir / "saved", copy, size=size if size > 1 else None)
        assert_goes_on(found if size > 1 else [found], run_dir / "saved", copy)


@pytest.mark.parametrize("other, size", OTHERS)
def test_other_checkpoint_resumes_under_xla(other: str, size: int, run_dir: Path) -> None:
    run_main(save, other, run_dir / "saved", size=size if size > 1 else None)
    for kind in FEW:
        assert_goes_on([under(kind, go_on, run_dir / "saved", run_dir / kind)], run_dir / "saved", run_dir / kind)


@pytest.mark.parametrize("kind", FEW)
def test_from_one_configuration_to_another(kind: str, run_dir: Path) -> None:
    under(kind, save, run_dir / "saved")
    for other in [other for other in KINDS if other != kind]:
        assert_goes_on([under(other, go_on, run_dir / "saved", run_dir / other)], run_dir / "saved", run_dir / other)


def test_the_comparison_can_fail(run_dir: Path) -> None:
    """A loss that differs by 0.1 % is found."""
    run_world(1, save, "auto", run_dir / "saved")
    [found] = run_world(1, go_on, "auto", run_dir / "saved", run_dir / "copy")
    assert_goes_on([found], run_dir / "saved", run_dir / "copy")
    found[14] = [loss * 1.001 for loss in found[14]]
    with pytest.raises(AssertionError, match="off by .* at 3 of 8"):
        assert_goes_on([found], run_dir / "saved", run_dir / "copy")


class Divided(Callback):
    """The sharding of parameters and optimizer state, after each optimizer step and when training begins."""

    def __init__(self) -> None:
        self.specs: list[dict[str, str]] = []

    def look(self, trainer: Any, module: Any) -> None:
        import torch_xla

        found, (optimizer,) = {}, trainer.optimizers
        for name, parameter in module.named_parameters():
            found[name] = torch_xla._XLAC._get_xla_sharding_spec(parameter)
            for key, value in optimizer.state[parameter].items():
                if value.device.type == "xla" and value.ndim:
                    found[f"{name}/{key}"] = torch_xla._XLAC._get_xla_sharding_spec(value)
        self.specs.append(found)

    on_train_start = look

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, module)


def divided(kind: str, folder: Path) -> list[list[dict[str, str]]]:
    """Record the sharding in a run of ten optimizer steps, and in a run that resumes from its checkpoint."""
    whole, rest = Divided(), Divided()
    go(kind, whole, SaveAfterTen(folder))
    go(kind, rest, ckpt_path=folder)
    return [whole.specs, rest.specs]


@pytest.mark.parametrize("kind", ["fsdp", "mesh"])
def test_optimizer_state_is_sharded_like_the_parameters(kind: str, run_dir: Path) -> None:
    """Also state that was loaded. If each device held all of it, the parameters would differ in the last digits."""
    whole, rest = under(kind, divided, run_dir / "saved")
    parameters = {name: spec for name, spec in whole[0].items() if "/" not in name}
    assert len(parameters) == len(whole[0]) == 4, "there is no state before the first update"
    assert all("devices=" in spec for spec in parameters.values()), parameters
    for seen in (*whole[1:], *rest):
        assert len(seen) == 12
        for name, spec in seen.items():
            assert spec == parameters[name.split("/")[0]], name
