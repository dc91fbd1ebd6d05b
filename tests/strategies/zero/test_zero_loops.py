"""ZeRO in your own training loop, with manual optimization, and without training."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Noisy, RegressionModule
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world, start_world
from helpers.zero.gan import gan
from helpers.zero.zero_cases import STAGES, strategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainkit
from trainkit import Accelerator
from trainkit.callbacks import NonFiniteGuard
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import ConfigurationError, NonFiniteError
from trainkit.micro_batch import MicroBatchKind

pytestmark = pytest.mark.zero  # they take long

SOME = ["zero1", "zero2", "zero2-cpu", "zero3", "zero3-both-cpu"]


def own_loop(kind: str, precision: str, clip: bool) -> list[float]:
    """Train two epochs, whose last accumulation window is short and uneven; returns the losses."""
    trainkit.seed_everything(5)
    accelerator = Accelerator(strategy=strategy(kind), precision=precision, gradient_accumulation_steps=2)
    net = RegressionModule().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, prepared, loader = accelerator.prepare(net, optimizer, DataLoader(Noisy(21), 2, shuffle=True))
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch["x"].float()) - batch["y"].float()).square().mean()
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
            if accelerator.accumulation.current.kind is MicroBatchKind.DATA:
                losses.append(float(loss))
    return losses


class Trained(RegressionModule):
    """The training of `own_loop`, for a `Trainer`."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch["x"].float()) - batch["y"].float()).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def by_trainer(kind: str, precision: str, clip: bool) -> list[float]:
    module = Trained()
    trainer = make_trainer(
        strategy=strategy(kind),
        seed=5,
        max_epochs=2,
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0 if clip else None,
    )
    trainer.fit(module, DataLoader(Noisy(21), 2, shuffle=True))
    return module.losses


@cache
def of_ddp(size: int, precision: str, clip: bool) -> list[list[float]]:
    return run_world(size, own_loop, "ddp", precision, clip)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize(
    "size, precision, clip",
    [
        (2, "bf16-mixed", True),
        (1, "32-true", True),
        (2, "32-true", False),
    ],
)
def test_own_loop(kind: str, size: int, precision: str, clip: bool) -> None:
    """The losses equal those of the Trainer bit for bit, and those of DDP except for rounding."""
    own = run_world(size, own_loop, kind, precision, clip)
    assert own == run_world(size, by_trainer, kind, precision, clip)
    for mine, other in zip(own, of_ddp(size, precision, clip), strict=True):
        assert mine == pytest.approx(other, rel=2e-6 if precision == "32-true" else 5e-3)


@pytest.mark.parametrize("kind", list(STAGES))
@pytest.mark.parametrize(
    "size, precision",
    [
        (2, "32-true"),
        (1, "32-true"),
        (2, "16-mixed"),
    ],
)
def test_a_gan(kind: str, size: int, precision: str) -> None:
    limit = 2e-6 if precision == "32-true" else 5e-3
    for mine, theirs in zip(run_world(size, gan, kind, precision), run_world(size, gan, "ddp", precision), strict=True):
        assert len(mine) == 16 // size
        assert [x for pair in mine for x in pair] == pytest.approx([x for pair in theirs for x in pair], rel=limit)


class Evaluated(RegressionModule):
    """Has a test step and a predict step."""

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"].float())


def evaluate(kind: str, samples: int) -> tuple[Any, ...]:
    """Test and predict before a fit, validate during it, and test after it; returns the results."""
    module, data = Evaluated(), DataLoader(Noisy(samples), 2)
    trainer = make_trainer(strategy=strategy(kind), seed=5, global_batch_size=4)
    found: list[Any] = [trainer.test(module, data), [t.tolist() for t in trainer.predict(module, data)]]
    trainer.fit(module, DataLoader(Noisy(16), 2), data)
    found.append(float(trainer.callback_metrics["val_loss"]))
    return (*found, trainer.test(module, data))


@pytest.mark.parametrize("kind", ["zero2", "zero3", "zero3-both-cpu"])
@pytest.mark.parametrize("samples", [1, 9, 7])
def test_evaluation(kind: str, samples: int) -> None:
    """The results are exact for any number of samples, even if a process has fewer batches than another, or none."""
    (expected,) = run_world(1, evaluate, "auto", samples)
    for size in (1, 2):
        for found in run_world(size, evaluate, kind, samples):
            for mine, theirs in zip(found, expected, strict=True):
                assert _numbers(mine) == pytest.approx(_numbers(theirs), rel=1e-5)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in _numbers(item)] if isinstance(value, list) else [float(value)]


class Broken(RegressionModule):
    """The gradient of the third optimizer step is not finite, but its loss is."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss


def guarded(kind: str, action: str) -> tuple[str, int, bool]:
    module, guard = Broken(), NonFiniteGuard(action=action)
    trainer = make_trainer(guard, strategy=strategy(kind), seed=5)
    said = ""
    try:
        trainer.fit(module, DataLoader(Noisy(16), 2))
    except NonFiniteError as error:
        said = str(error)
    return said, guard.skipped_updates, all(bool(torch.isfinite(p).all()) for p in module.parameters())


@pytest.mark.parametrize("kind", SOME)
def test_gradients_that_are_not_finite(kind: str) -> None:
    """They are applied, as under other strategies, and `NonFiniteGuard` detects them."""
    for said, _, finite in run_world(1, guarded, kind, "raise"):
        assert "Not finite in optimizer step 3: the gradient of all parameters together" in said
        assert not finite
    for said, skipped, finite in run_world(2, guarded, kind, "skip"):
        assert (said, skipped, finite) == ("", 2, True)  # a skipped step is not counted, so the fourth step is skipped too


class NoLossOnOne(RegressionModule):
    """One process has no loss in its third step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 and self.global_rank == 1 else loss


def fails() -> None:
    make_trainer(strategy=strategy("zero3"), seed=5).fit(NoLossOnOne(), DataLoader(Noisy(16), 2))


def test_a_step_that_needs_a_loss() -> None:
    """All processes fail, and the process without a loss reports the reason."""
    first, second = start_world(2, fails).ends()
    assert not first[0]
    assert not second[0]
    assert "training_step returned no loss. Under ZeRO-3" in second[1]
    assert "to skip a batch, give it weight 0 with batch_weight" in second[1]


class OtherOrder(RegressionModule):
    """Two layers of the same size, which one process calls once in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        turned = batch_idx == 2 and self.global_rank == 1
        layers = [self.second, self.first] if turned else [self.first, self.second]
        return self.net(layers[1](layers[0](batch["x"].float()))).square().mean()


def turns(kind: str) -> int:
    trainer = make_trainer(strategy=strategy(kind), seed=5)
    trainer.fit(OtherOrder(), DataLoader(Noisy(24), 2))
    return trainer.global_step


def test_gradients_in_another_order_on_one_process() -> None:
    """Stage 2 sums gradients in the order of their computation, and detects this one step later; stage 1 has a fixed order."""
    for succeeded, said in start_world(2, turns, "zero2").ends():
        assert not succeeded
        assert "the processes computed gradients in different orders" in said
    assert run_world(2, turns, "zero1") == [6, 6]


def test_part_of_the_parameters_cannot_be_clipped() -> None:
    accelerator = Accelerator(strategy=strategy("zero2"))
    net = RegressionModule().net
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 6)).sum())
    with pytest.raises(ConfigurationError, match="clips the gradients of all parameters of an optimizer together"):
        accelerator.clip_grad_norm_([next(net.parameters())], 1.0)
    with pytest.raises(ConfigurationError, match="cannot be clipped by value under ZeRO"):
        accelerator.clip_grad_value_(net.parameters(), 1.0)
    with pytest.raises(ConfigurationError, match="ZeRO clips by the 2-norm"):
        accelerator.clip_grad_norm_(net.parameters(), 1.0, norm_type=1.0)
    optimizer.step()
    accelerator.free_memory()


def saved_and_loaded(kind: str, folder: str) -> None:
    """A training loop saves in the middle, and another one resumes; also saves weights for other programs."""
    trainkit.seed_everything(5)
    losses: list[list[float]] = []
    for start in (0, 4):
        accelerator = Accelerator(strategy=strategy(kind))
        net = RegressionModule().net
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, prepared = accelerator.prepare(net, optimizer)
        if start:
            accelerator.load_state(folder)
        losses.append([])
        for step in range(start, 8):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            loss = model(x).square().mean()
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
            losses[-1].append(float(loss))
            if step == 3 and not start:
                accelerator.save_state(folder)
                accelerator.save_model(model, f"{folder}-weights")
        accelerator.free_memory()
    assert losses[0][4:] == losses[1]


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("size", [2, 1])
def test_save_state_and_save_model(kind: str, size: int, run_dir: Path) -> None:
    run_world(size, saved_and_loaded, kind, str(run_dir / "state"))
    weights = load_file(run_dir / "state-weights" / "model.safetensors")
    saved = open_checkpoint(run_dir / "state").read(["model"]).tensors["model"]
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "0.weight": (16, 6),
        "0.bias": (16,),
        "3.weight": (6, 16),
        "3.bias": (6,),
    }
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
