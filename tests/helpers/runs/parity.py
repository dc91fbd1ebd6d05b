"""The same training on any number of processes, with a record of it for comparisons.

Shuffling, augmentation and dropout are random. Tests compare the loss of each global micro-batch, the learning rates and the
parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from trainkit import Callback, TrainModule
from trainkit.trainer.trainer import Trainer

__all__ = ["Case", "Noisy", "Record", "Recorder", "RegressionModule", "train", "trained"]


class Noisy(Dataset[Any]):
    """Samples with augmentation from torch, numpy and `random`; each contains its index."""

    def __init__(self, samples: int, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)
        self.lengths = torch.randint(1, 7, (samples,), generator=generator) if ragged else torch.full((samples,), 6)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.rand(()).item() + float(np.random.rand()) + random.random()
        mask = (torch.arange(6) < self.lengths[index]).double()
        return {"id": torch.tensor(index), "x": self.x[index] + 0.01 * noise, "y": self.y[index], "mask": mask}


class RegressionModule(TrainModule):
    """A small network with dropout; its loss is the mean over the elements that the masks select."""

    rates: ClassVar = {"adamw": 0.01, "sgd": 0.05}

    def __init__(self, optimizer: str = "sgd", schedule: bool = False, bias: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16, bias=bias), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 6), nn.Dropout(0.1))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        self.optimizer, self.schedule = optimizer, schedule

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"].to(self.dtype)
        out = self.net(batch["x"].to(self.dtype)) - batch["y"].to(self.dtype)
        return (out.square() * mask).sum() / mask.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def parallelize(self, mesh: DeviceMesh) -> None:
        # dropout sees whole tensors, so that its masks are those of one device
        plan = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(self.net, mesh["tensor"], plan)

    def configure_optimizers(self) -> Any:
        made: torch.optim.Optimizer
        if self.optimizer == "adamw":
            made = torch.optim.AdamW(self.parameters(), lr=self.rates["adamw"])
        else:
            made = torch.optim.SGD(self.parameters(), lr=self.rates["sgd"], momentum=0.9)
        if not self.schedule:
            return made
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, self.trainer.estimated_stepping_batches)
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class RaggedModule(RegressionModule):
    """The weight of a micro-batch is the number of elements that its masks select."""

    def batch_weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["mask"].sum())


@dataclass
class Record:
    """What happened in a process.

    Attributes:
        losses: (optimizer step, global micro-batch in its epoch) → loss.
        ids: Optimizer step → indices of its samples.
        seen: (optimizer step, index of a sample) → sum of the inputs after augmentation.
        rates: Learning rate of each optimizer step.
        parameters: Parameters at the end; with `each_step`, before them those at the start of each accumulation window.
        metrics: `callback_metrics` at the end.
    """

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    seen: dict[tuple[int, int], float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    parameters: list[list[Tensor]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Recorder(Callback):
    """Fills a `Record`."""

    def __init__(self, each_step: bool = False) -> None:
        self.record, self.each_step = Record(), each_step
        self._step = -1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self.record.ids.setdefault(step, []).extend(batch["id"].tolist())
        for sample, x in zip(batch["id"].tolist(), batch["x"].sum(1).tolist(), strict=True):
            self.record.seen[step, sample] = x
        self._step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        number = batch_idx * trainer.world_size + trainer.strategy.data_world.rank
        if outputs is not None:
            self.record.losses[self._step, number] = float(outputs["loss"])

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.each_step:
            self.record.parameters.append([p.detach().clone() for p in module.parameters()])

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.record.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.gathered_parameters(module):
            self.record.parameters.append([p.detach().clone() for p in module.parameters()])
        self.record.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


@dataclass(frozen=True)
class Case:
    """What to train.

    Attributes:
        samples: Number of samples of the dataset.
        batch_size: Number of samples in a micro-batch.
        window: Number of micro-batches in an accumulation window, over all processes.
        workers: `num_workers` of the DataLoader.
        ragged: Samples have different lengths, which are the weights of micro-batches.
        make: Class of the module, or a function that creates it.
        options: Arguments of the module.
        arguments: Arguments of the Trainer.
    """

    samples: int = 96
    batch_size: int = 2
    window: int = 12
    workers: int = 0
    ragged: bool = False
    make: Callable[..., RegressionModule] = RegressionModule
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def train(case: Case, *callbacks: Callback, **arguments: Any) -> Record:
    """Train in this process, which may be one of several."""
    recorder = Recorder()
    module = (RaggedModule if case.ragged else case.make)(**case.options)
    resume = {"ckpt_path": arguments.pop("ckpt_path", None), "strict": arguments.pop("strict", True)}
    given = {"max_epochs": 2, "precision": "64-true", "seed": 5, **case.arguments, **arguments}
    given.setdefault("enable_checkpointing", False)
    given.setdefault("global_batch_size", case.batch_size * case.window)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[recorder, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )
    loader = DataLoader(Noisy(case.samples, case.ragged), case.batch_size, shuffle=True, num_workers=case.workers)
    trainer.fit(module, loader, **resume)
    return recorder.record


def trained(case: Case, size: int, **arguments: Any) -> Record:
    """Train on `size` processes; returns their records as one, after checking that rates, metrics and parameters are equal."""
    records = [train(case, **arguments)] if size == 1 else run_world(size, _train, case, arguments)
    first: Record = records[0]
    for other in records[1:]:
        if first.losses.keys() & other.losses.keys():  # tensor parallel ranks read the same data
            assert other.losses.items() <= first.losses.items()
        else:
            first.losses.update(other.losses)
            first.seen.update(other.seen)
            for step, ids in other.ids.items():
                first.ids.setdefault(step, []).extend(ids)
        assert other.rates == first.rates
        assert other.metrics == first.metrics
        for mine, theirs in zip(first.parameters, other.parameters, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), "the processes have drifted apart"
    return first


def _train(case: Case, arguments: dict[str, Any]) -> Record:
    return train(case, **arguments)
