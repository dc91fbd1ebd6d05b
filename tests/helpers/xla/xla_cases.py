"""The modules and data that tests of XLA train, the configurations, and the same training with a plain loop on the CPU.

A global micro-batch has eight samples on any number of devices, so that all are compared with the same plain loop.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from helpers.runs.trainers import Memory
from helpers.xla.xla_runs import run_xla
from helpers.zero.zero_cases import strategy as other_strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from trainkit import Callback, Trainer, TrainModule

__all__ = [
    "FEW",
    "GPT",
    "KINDS",
    "QUICK",
    "SEVERAL",
    "SIZE",
    "Masked",
    "Net",
    "Notes",
    "Numbers",
    "Text",
    "Trained",
    "by_hand",
    "close",
    "devices",
    "limit",
    "loader",
    "quiet",
    "strategy",
    "train",
    "under",
]

# name → number of devices, and arguments of the strategy
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "spmd": (4, {}),
    "fsdp": (4, {"fsdp": True}),
    "mesh": (4, {"fsdp": True, "mesh": {"data": 2, "fsdp": 2}}),
}
SEVERAL = [kind for kind, (count, _) in KINDS.items() if count > 1]
FEW = ["one", "spmd", "fsdp"]  # for tests in which a mesh with two axes makes no difference
SIZE = 8  # samples of a global micro-batch

# Compile fast instead of well: tests use a compiled graph for about a second. A TPU does not have these flags.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
_REAL = os.environ.get("PJRT_DEVICE", "CPU").upper() != "CPU"
if _REAL:
    QUICK.clear()


def limit(precision: str = "32-true") -> float:
    """Maximum relative difference of losses to the plain loop on the CPU; a TPU rounds differently, so it is larger there."""
    if precision != "32-true":
        return 2e-2 if _REAL else 5e-3
    return 1e-3 if _REAL else 2e-6


def devices(kind: str) -> int:
    """Number of devices of a configuration."""
    return KINDS[kind][0]


def strategy(kind: str, **options: Any) -> Any:
    """Create the strategy for a name of `KINDS` or of `zero_cases.py`."""
    if kind not in KINDS:
        return other_strategy(kind, **options)
    from trainkit.strategies import XLAStrategy

    if _REAL:  # by default, a TPU multiplies float32 matrices in bfloat16
        import torch_xla.backends

        torch_xla.backends.set_mat_mul_precision("highest")
    return XLAStrategy(**{**KINDS[kind][1], **options})


def under(kind: str, function: Callable[..., Any], *args: Any, optimized: bool = False, flags: str = "") -> Any:
    """Run `function(kind, *args)` in a new process with the devices of the configuration; returns the result.

    Args:
        kind: A name of `KINDS`.
        function: A function of a module.
        args: Its arguments after `kind`.
        optimized: Compile with XLA's default optimizations, which takes ten times as long.
        flags: More flags of XLA.
    """
    given = f"{'' if optimized else QUICK.get('XLA_FLAGS', '')} {flags}".strip()
    return run_xla(function, kind, *args, devices=devices(kind), env={"XLA_FLAGS": given} if given else {})


def quiet(kind: str, *callbacks: Callback, options: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    """A Trainer without output, logging, checkpoints and sanity check."""
    defaults: dict[str, Any] = {
        "accelerator": "auto" if kind in KINDS else "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "seed": 5,
    }
    return Trainer(strategy=strategy(kind, **(options or {})), callbacks=list(callbacks), **{**defaults, **arguments})


class Numbers(Dataset[Any]):
    """Samples of eight numbers and their sines; with `noise`, augmentation from torch, numpy and `random`."""

    def __init__(self, samples: int, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 8, generator=generator)
        self.y, self.noise = self.x.sin(), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.rand(8) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return {"id": torch.tensor(index), "x": x, "y": self.y[index]}


class Text(Dataset[Any]):
    """Sequences of nine tokens, of a vocabulary of sixteen."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.randint(16, (samples, 9), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index), "rows": self.rows[index]}


def loader(kind: str, data: Any, size: int = SIZE, **options: Any) -> DataLoader[Any]:
    """A DataLoader whose micro-batches have `size` samples over all devices."""
    return DataLoader(data, size // (devices(kind) if kind in KINDS else 1), **options)


class Net(TrainModule):
    """A small network.

    Args:
        optimizer: `"adamw"` or `"sgd"`.
        factor: Optimizer step → learning rate, relative to that of the optimizer.
        dropout: Dropout probability.
    """

    def __init__(self, optimizer: str = "adamw", factor: Callable[[int], float] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8))
        _initialize(self)
        self.optimizer, self.factor = optimizer, factor

    def samples(self, batch: Any) -> Tensor:
        """The loss of each sample, computed in float32."""
        dtype = self.net[0].weight.dtype
        return (self.net(batch["x"].to(dtype)).float() - batch["y"].float()).square().mean(1)

    def loss(self, batch: Any) -> Tensor:
        return self.samples(batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def made(self) -> torch.optim.Optimizer:
        """Create the optimizer."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        made = self.made()
        if self.factor is None:
            return made
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, self.factor)
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Masked(Net):
    """Its loss ignores the samples that `sample_mask` excludes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = self.sample_mask
        loss = (self.samples(batch) * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss


class GPT(Net):
    """A transformer with one layer, whose embedding and head share a parameter."""

    def __init__(self, optimizer: str = "adamw", factor: Callable[[int], float] | None = None) -> None:
        super().__init__(optimizer, factor)
        del self.net
        self.embedding, self.places = nn.Embedding(16, 16), nn.Embedding(8, 16)
        self.norm, self.mixed, self.wide = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        _initialize(self)
        self.head.weight = self.embedding.weight

    def samples(self, batch: Any) -> Tensor:
        rows = batch["rows"]
        hidden = self.embedding(rows[:, :-1]) + self.places.weight
        query, key, value = self.mixed(self.norm(hidden)).chunk(3, dim=2)
        hidden = hidden + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(hidden + self.wide(hidden).tanh())
        return nn.functional.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def _initialize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


@dataclass
class Trained:
    """Record of a training.

    Attributes:
        losses: Loss of each global micro-batch.
        places: (epoch, batch index) of each global micro-batch.
        ids: Indices of its samples.
        seen: Sum of the inputs of each of its samples, after augmentation.
        rates: Learning rate of the first parameter group, in each optimizer step.
        updates: Number of optimizer steps after each global micro-batch.
        compilations: Number of compilations after each global micro-batch.
        norms: Gradient norm of each optimizer step, if gradients are clipped.
        parameters: Parameters at the end.
    """

    losses: list[float] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    seen: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


class Notes(Callback):
    """Fills a `Trained`. It reads values between two steps, which adds no graph to compile."""

    def __init__(self) -> None:
        self.trained = Trained()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.trained.places.append((trainer.current_epoch, batch_idx))
        self.trained.ids.append(batch["id"].tolist())
        if "x" in batch:
            self.trained.seen.append(batch["x"].cpu().sum(1).tolist())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.trained.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.trained.losses.append(float(outputs["loss"]))
        self.trained.updates.append(trainer.global_step)
        self.trained.compilations.append(trainer.strategy.compilations)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.trained.parameters = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def train(kind: str, module: Any, data: DataLoader[Any], *callbacks: Callback, **arguments: Any) -> Trained:
    """Train in this process; returns the record."""
    notes, memory = Notes(), Memory()
    loaders = arguments.pop("val_dataloaders", None)
    trainer = quiet(kind, notes, *callbacks, **{"logger": memory, "log_every_n_steps": 1, **arguments})
    trainer.fit(module, data, loaders)
    notes.trained.norms = list(memory.of("grad_norm").values())
    return notes.trained


def batches(data: Any, size: int = SIZE) -> Iterator[Any]:
    """The global micro-batches of an epoch, in the order of the dataset."""
    for begin in range(0, len(data), size):
        yield default_collate([data[i] for i in range(begin, min(begin + size, len(data)))])


def by_hand(
    module: Any,
    data: Any,
    epochs: int,
    *,
    window: int = 1,
    clip: float | None = None,
    cast: bool = False,
    weigh: Callable[[Any], float] = lambda batch: len(batch["id"]),
) -> Trained:
    """Train a copy of the module with a plain loop on the CPU; returns the record.

    Args:
        module: A `Net` with its initial parameters; the loop uses its `loss` and its optimizer, but not trainkit.
        data: The dataset; it is not shuffled.
        epochs: Number of epochs.
        window: Number of micro-batches in an accumulation window.
        clip: Maximum gradient norm.
        cast: Use torch's autocast to bfloat16.
        weigh: Weight of a micro-batch in its window.
    """
    module, trained = copy.deepcopy(module).train(), Trained()
    optimizer = module.made()
    for _ in range(epochs):
        epoch = list(batches(data))
        for begin in range(0, len(epoch), window):
            own: Sequence[Any] = epoch[begin : begin + window]
            if module.factor is not None:
                optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * module.factor(len(trained.rates))
            trained.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            for batch in own:
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    loss = module.loss(batch)
                (loss * (weigh(batch) / sum(map(weigh, own)))).backward()
                trained.losses.append(loss.item())
                trained.ids.append(batch["id"].tolist())
            if clip is not None:
                trained.norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip).item())
            optimizer.step()
    trained.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return trained


def close(mine: Sequence[float], theirs: Sequence[float], allowed: float) -> None:
    """Check that two sequences of numbers agree, to the relative difference `allowed`.

    Raises:
        AssertionError: A number differs by more; the message has all differences.
    """
    assert len(mine) == len(theirs)
    off = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(mine, theirs, strict=True)]
    assert all(value <= allowed for value in off), f"off by {max(off):.2e} at {off.index(max(off))} of {len(off)}: {off}"
