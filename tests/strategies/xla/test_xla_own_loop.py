"""Under XLA, a training loop with Accelerator gives the same results as the Trainer, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.xla.xla_cases import KINDS, Net, Numbers, Trained, limit, loader, strategy, train, under
from torch import Tensor
from torch.utils.data import DataLoader

import trainkit
from trainkit import Accelerator

pytestmark = pytest.mark.xla

SAMPLES = 77


class Loop:
    """A training loop with accumulation windows of two micro-batches, and clipping."""

    def __init__(self, kind: str, net: Any = None, precision: str = "32-true") -> None:
        trainkit.seed_everything(5)
        self.net = Net("adamw", dropout=0.2) if net is None else net
        self.accelerator = Accelerator(strategy=strategy(kind), precision=precision, gradient_accumulation_steps=2)
        data = loader(kind, Numbers(SAMPLES, noise=True), shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.net, self.net.made(), data)
        self.trained, self.updates = Trained(), 0

    def epoch(self, save: tuple[int, Path] | None = None) -> None:
        """Train for an epoch. `save`: the number of micro-batches after which to save, and the folder."""
        for number, batch in enumerate(self.loader, 1):
            self.trained.ids.append(batch["id"].tolist())
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    loss = (self.model(batch["x"]).float() - batch["y"].float()).square().mean(1).mean()
                self.accelerator.backward(loss)
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.trained.losses.append(float(loss))
            self.trained.compilations.append(self.accelerator.strategy.compilations)
            if self.accelerator.sync_gradients:
                self.trained.norms.append(float(norm))
            if save is not None and number == save[0]:
                self.accelerator.save_state(save[1])

    def end(self) -> Trained:
        self.trained.parameters = {name: p.detach().cpu().clone() for name, p in self.net.named_parameters()}
        self.accelerator.free_memory()
        return self.trained


class Called(Net):
    """Has a `forward`, so that a training loop can call it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def both(kind: str, precision: str) -> tuple[Trained, Trained]:
    loop = Loop(kind, Called("adamw", dropout=0.2), precision)
    loop.epoch()
    loop.epoch()
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": precision}
    data = loader(kind, Numbers(SAMPLES, noise=True), shuffle=True)
    own = loop.end()
    return own, train(kind, Called("adamw", dropout=0.2), data, **arguments)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trainer_is_the_loop(precision: str, kind: str) -> None:
    mine, theirs = under(kind, both, precision)
    assert len(mine.losses) == 20
    assert mine.ids == theirs.ids
    assert mine.losses == theirs.losses
    assert mine.norms == theirs.norms
    assert mine.parameters.keys() == theirs.parameters.keys()
    assert all(torch.equal(mine.parameters[name], value) for name, value in theirs.parameters.items())
    assert mine.compilations[-1] == mine.compilations[10], "the second epoch compiles nothing"


def saved_and_loaded(kind: str, folder: Path) -> tuple[Trained, Trained]:
    """A loop that saves in the middle of its first epoch, and one that resumes from there."""
    whole = Loop(kind, Called("adamw", dropout=0.2))
    whole.epoch((4, folder))
    whole.epoch()
    expected = whole.end()
    rest = Loop(kind, Called("adamw", dropout=0.2))
    rest.accelerator.load_state(folder, resume_loaders=True)
    rest.epoch()
    rest.epoch()
    return expected, rest.end()


@pytest.mark.parametrize("kind", list(KINDS))
def test_save_state_and_load_state(kind: str, run_dir: Path) -> None:
    """The resumed loop equals the uninterrupted one bit for bit, with dropout, shuffling and augmentation."""
    whole, rest = under(kind, saved_and_loaded, run_dir / "state")
    assert rest.ids == whole.ids[4:]
    assert rest.losses == whole.losses[4:]
    assert all(torch.equal(rest.parameters[name], value) for name, value in whole.parameters.items())


def evaluated(kind: str) -> dict[str, Any]:
    """Evaluate 21 samples in a training loop under XLA, and with a plain model."""
    net, again, data = Called(), Called(), Numbers(21)
    accelerator = Accelerator(strategy=strategy(kind))
    model = accelerator.prepare(net).eval()
    prepared = accelerator.prepare(DataLoader(data, 2))
    found, ids, counted = [], [], 0
    with torch.no_grad():
        for batch in prepared:
            outputs, numbers = accelerator.strategy.all_gather((model(batch["x"]), batch["id"]))
            found.append(outputs.cpu())
            ids += numbers.tolist()
            counted += len(accelerator.gather_for_metrics(outputs.mean().repeat(len(batch["x"]))))
        plain = again(data.x)
    return {"found": torch.cat(found), "ids": ids, "plain": plain, "counted": counted}


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_evaluation(kind: str) -> None:
    found = under(kind, evaluated)
    assert found["ids"] == list(range(21))
    assert found["counted"] == 21
    # relative to the largest output: one whose terms almost cancel has only their rounding errors left
    assert (found["found"] - found["plain"]).abs().max() <= 10 * limit() * found["plain"].abs().max()
