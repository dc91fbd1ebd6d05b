"""Runs under XLA with manual optimization, evaluations, all kinds of loaders and batches, hooks and callbacks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.trainers import Memory
from helpers.xla.xla_cases import FEW, KINDS, SIZE, Net, Notes, Numbers, by_hand, close, limit, loader, quiet, train, under
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainkit import TrainModule
from trainkit.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    NonFiniteGuard,
    ThroughputMonitor,
)
from trainkit.data import CombinedLoader

pytestmark = pytest.mark.xla


# --------------------------------------------------------------------------------------------- manual optimization


class Gan(TrainModule):
    """Two optimizers; the generator's loss leaves gradients in the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        generator = torch.Generator().manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        self.losses: list[Tensor] = []

    def both(self, batch: Any) -> Iterator[tuple[int, Tensor]]:
        """Yields the index and the loss of each optimizer."""
        made = self.discriminator(self.generator(batch["x"])).square().mean()
        yield 0, made
        told = (self.discriminator(batch["y"][:, :1]) - 1).square().mean()
        told = told + self.discriminator(self.generator(batch["x"]).detach()).square().mean()
        yield 1, told

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for number, loss in self.both(batch):
            optimizers[number].zero_grad()
            self.manual_backward(loss)
            optimizers[number].step()
            self.losses.append(loss.detach())
        self.log("told", self.losses[-1])

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]


def gan(kind: str) -> tuple[list[float], list[float], int]:
    module, data = Gan(), Numbers(40)
    again = copy.deepcopy(module)
    trainer = quiet(kind, max_epochs=2)
    trainer.fit(module, loader(kind, data))
    optimizers, plain = again.configure_optimizers(), []
    for _ in range(2):
        for batch in DataLoader(data, SIZE):
            for number, loss in again.both(batch):
                optimizers[number].zero_grad()
                loss.backward()
                optimizers[number].step()
                plain.append(loss.item())
    return [float(loss) for loss in module.losses], plain, trainer.global_step


@pytest.mark.parametrize("kind", FEW)
def test_manual_optimization(kind: str) -> None:
    mine, theirs, steps = under(kind, gan)
    assert steps == 10
    close(mine, theirs, 5 * limit())


# ------------------------------------------------------------------------------------------------------ evaluations


class Evaluated(Net):
    """Has steps for validation on two loaders, for testing and for prediction."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("most", batch["x"].max(), reduce_fx="max")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"id": batch["id"], "out": self.net(batch["x"])}


def evaluated(kind: str, samples: int) -> tuple[dict[str, float], dict[str, float], Tensor, Tensor, list[int]]:
    module, data = Evaluated("sgd"), Numbers(samples)
    trainer = quiet(kind)
    trainer.fit(module, loader(kind, Numbers(24)), [DataLoader(data, 2), DataLoader(Numbers(5), 2)])
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "train_loss"}
    found |= trainer.test(module, DataLoader(data, 2))[0]
    outputs = trainer.predict(module, DataLoader(data, 2))
    predicted = torch.cat([output["out"].cpu() for output in outputs])
    ids = [number for output in outputs for number in output["id"].tolist()]
    module.cpu().eval()
    with torch.no_grad():
        plain = module.net(data.x)
        expected = {"test_loss": module.loss({"x": data.x, "y": data.y}).item()}
        for number, own in enumerate((data, Numbers(5))):
            expected[f"val_loss/dataloader_idx_{number}"] = module.loss({"x": own.x, "y": own.y}).item()
            expected[f"most/dataloader_idx_{number}"] = own.x.max().item()
    return found, expected, predicted, plain, ids


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("samples", [1, 21])
def test_evaluations(samples: int, kind: str) -> None:
    """Exact for any number of samples: each counts once, and predictions are in order."""
    found, expected, predicted, plain, ids = under(kind, evaluated, samples)
    assert ids == list(range(samples))
    assert torch.allclose(predicted, plain, rtol=50 * limit(), atol=limit())
    assert found == pytest.approx(expected, rel=10 * limit())


# --------------------------------------------------------------------------------------------- loaders and batches


class Stream(IterableDataset[Any]):
    """The same samples as a stream."""

    def __init__(self, samples: int) -> None:
        self.data = Numbers(samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class Named(Numbers):
    """Samples with a name and a number that is not a tensor."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "name": f"sample {index}", "more": {"index": index}}


class Strict(Net):
    """Checks its batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if "name" in batch:
            assert batch["name"] == [f"sample {index}" for index in batch["id"].tolist()]
            assert batch["more"]["index"].tolist() == batch["id"].tolist()
        assert batch["x"].device.type == "xla"
        return super().training_step(batch, batch_idx)


def loaded(kind: str, way: str) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {"max_epochs": 2}
    data: Any = {"stream": Stream, "names": Named}.get(way, Numbers)(53)
    if way == "limit":
        arguments["limit_train_batches"] = 4
    mine = train(kind, Strict("sgd"), loader(kind, data), **arguments)
    return mine, by_hand(Net("sgd"), Numbers(32 if way == "limit" else 53), 2)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("way", ["stream", "names", "limit"])
def test_loaders(way: str, kind: str) -> None:
    mine, theirs = under(kind, loaded, way)
    assert mine.ids == theirs.ids
    close(mine.losses, theirs.losses, limit())


class TwoLoaders(Net):
    """Trains on a batch from each of two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[list[list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.numbers.append([batch[name]["id"].tolist() for name in ("a", "b")])
        return self.loss(batch["a"]) + self.loss(batch["b"])


def combined(kind: str) -> list[list[list[int]]]:
    module = TwoLoaders()
    loaders = CombinedLoader({"a": loader(kind, Numbers(24)), "b": loader(kind, Numbers(29), 4)}, mode="min_size")
    quiet(kind).fit(module, loaders)
    return module.numbers


@pytest.mark.parametrize("kind", FEW)
def test_a_combined_loader(kind: str) -> None:
    found = under(kind, combined)
    assert found == [[list(range(8 * i, 8 * i + 8)), list(range(4 * i, 4 * i + 4))] for i in range(3)]


class Sometimes(Net):
    """Returns no loss in every third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


def without_losses(kind: str, window: int) -> tuple[int, int, bool]:
    module, notes = Sometimes("sgd"), Notes()
    trainer = quiet(kind, notes, max_epochs=2, accumulate_grad_batches=window)
    trainer.fit(module, loader(kind, Numbers(72)))
    finite = all(bool(torch.isfinite(p).all()) for p in notes.trained.parameters.values())
    return trainer.global_step, len(notes.trained.losses), finite


@pytest.mark.parametrize("kind", FEW)
def test_steps_without_a_loss(kind: str) -> None:
    assert under(kind, without_losses, 1) == (12, 12, True)
    assert under(kind, without_losses, 3) == (6, 12, True)


class Moves(Net):
    """Overrides the hooks that transfer a batch to the device."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(f"before {batch['x'].device.type}")
        return {**batch, "x": batch["x"] * 2}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(f"transfer {device.type}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(f"after {batch['x'].device.type}")
        return {**batch, "x": batch["x"] / 2}


def moved(kind: str) -> tuple[list[str], list[float], list[float]]:
    module = Moves()
    losses = train(kind, module, loader(kind, Numbers(24))).losses
    return module.calls, losses, by_hand(Net("sgd"), Numbers(24), 1).losses


@pytest.mark.parametrize("kind", FEW)
def test_hooks_of_the_transfer(kind: str) -> None:
    calls, mine, theirs = under(kind, moved)
    assert calls == ["before cpu", "transfer xla", "after xla"] * 3
    close(mine, theirs, limit())


# --------------------------------------------------------------------------------------- callbacks and torchmetrics


class WithMetric(Net):
    """Logs a torchmetrics object."""

    def __init__(self) -> None:
        import torchmetrics

        super().__init__("sgd", lambda step: 0.9**step)
        self.error = torchmetrics.MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.error.update(self.net(batch["x"]), batch["y"])
        self.log("error", self.error)


def with_callbacks(kind: str, folder: Path) -> dict[str, Any]:
    memory = Memory()
    stopping = EarlyStopping("val_loss", patience=2, min_delta=10.0)
    saving = ModelCheckpoint(dirpath=folder, monitor="val_loss")
    attached = [ModelSummary(), stopping, saving, NonFiniteGuard(), LearningRateMonitor(), ThroughputMonitor()]
    module = WithMetric()
    trainer = quiet(
        kind, *attached, max_epochs=10, logger=memory, log_every_n_steps=2, enable_checkpointing=True, enable_model_summary=True
    )
    trainer.fit(module, loader(kind, Numbers(48)), loader(kind, Numbers(21)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "epochs": trainer.current_epoch,
        "metrics": metrics,
        "names": {name for _, row in memory.rows for name in row},
        "saved": str(saving.best_model_path),
    }


@pytest.mark.parametrize("kind", FEW)
def test_callbacks(kind: str, run_dir: Path) -> None:
    pytest.importorskip("torchmetrics")
    found = under(kind, with_callbacks, run_dir / "checkpoints")
    assert found["epochs"] == 3, "no better than the first, twice"
    assert Path(found["saved"]).is_dir()
    assert found["metrics"]["error"] == pytest.approx(found["metrics"]["val_loss"], rel=1e-5)
    assert any(name.startswith("lr") for name in found["names"])
    assert any("per_sec" in name for name in found["names"]), found["names"]


class Broken(Net):
    """The loss of the third step is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (math.nan if batch_idx == 2 else 1.0)


def guarded(kind: str) -> tuple[int, bool]:
    guard, module = NonFiniteGuard(action="skip"), Broken()
    trained = train(kind, module, loader(kind, Numbers(48)), guard)
    return guard.skipped_updates, all(bool(torch.isfinite(p).all()) for p in trained.parameters.values())


@pytest.mark.parametrize("kind", FEW)
def test_steps_that_are_not_finite_are_skipped(kind: str) -> None:
    """All other optimizer steps are made."""
    skipped, finite = under(kind, guarded)
    assert finite
    assert skipped == 1
