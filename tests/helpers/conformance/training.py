"""The same training with a plain PyTorch loop on one device, with `Trainer`, and with a training loop over `Accelerator`.

The tests compare the loss of each optimizer step (the mean over its global batch) and the parameters at the end.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.conformance.settings import Setting
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import trainkit
from trainkit import Accelerator, Callback, Precision, Trainer, TrainModule
from trainkit.micro_batch import MicroBatchKind

__all__ = [
    "EPOCHS",
    "Net",
    "Numbers",
    "Result",
    "Way",
    "assert_same",
    "by_hand",
    "by_own_loop",
    "by_trainer",
    "combined",
    "trainer_of",
]

EPOCHS = 2
SEED = 5
SIZE = 2  # samples of a micro-batch on one device


@dataclass(frozen=True)
class Way:
    """How to train.

    Attributes:
        accumulate: Number of micro-batches of a process in an accumulation window.
        windows: Number of full accumulation windows in an epoch.
        rest: Number of samples in an incomplete last window, in which processes have different numbers of micro-batches.
        clip: Maximum gradient norm, or maximum absolute value.
        by_value: Clip by value instead of by norm.
        optimizer: `"sgd"` (with momentum) or `"adamw"`.
        random: Use shuffling, noise from torch, numpy and `random`, and dropout.
        without_loss: Samples; a micro-batch with one of them returns no loss.
        overflow: Samples; a micro-batch with one of them returns an infinite loss.
        precision: Precision of the run; `None`: the widest that the strategy supports.
    """

    accumulate: int = 1
    windows: int = 4
    rest: int = 0
    clip: float | None = None
    by_value: bool = False
    optimizer: str = "sgd"
    random: bool = False
    without_loss: tuple[int, ...] = ()
    overflow: tuple[int, ...] = ()
    precision: str | None = None

    def window(self, setting: Setting) -> int:
        """Number of samples in a full accumulation window, over all processes."""
        return SIZE * setting.devices * setting.processes * self.accumulate

    def samples(self, setting: Setting) -> int:
        """Number of samples in an epoch."""
        return self.windows * self.window(setting) + self.rest

    def precision_under(self, setting: Setting) -> Any:
        """The value for `precision=`. For float16 with a loss scale so small that only the `overflow` samples overflow."""
        name = self.precision or setting.precision
        return Precision(name, init_scale=256.0) if name == "16-mixed" else name


@dataclass
class Result:
    """What happened in one process.

    Attributes:
        losses: Number of earlier optimizer steps → (number of samples, loss) of each micro-batch with a finite loss.
        parameters: Full parameters at the end.
        buffers: Buffers at the end.
        steps: Number of optimizer steps.
    """

    losses: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def end(self, module: nn.Module, steps: int) -> None:
        """Record the parameters and buffers at the end; sharded parameters must be gathered."""
        self.parameters = {name: value.detach().cpu().clone() for name, value in module.named_parameters()}
        self.buffers = {name: value.detach().cpu().clone() for name, value in module.named_buffers()}
        self.steps = steps

    def note(self, step: int, batch: Any, loss: Tensor) -> None:
        """Record the loss of a micro-batch, if it is finite."""
        if bool(torch.isfinite(loss)):
            self.losses.setdefault(step, []).append((len(batch["id"]), float(loss.detach())))

    def means(self) -> dict[int, float]:
        """The loss of each optimizer step: the mean over its samples."""
        return {
            step: sum(count * loss for count, loss in own) / sum(count for count, _ in own)
            for step, own in sorted(self.losses.items())
        }


def combined(results: list[Result]) -> Result:
    """Combine the results of all processes into one.

    Raises:
        AssertionError: The processes have different parameters, buffers or numbers of optimizer steps.
    """
    first, *others = results
    whole = replace(first, losses={step: list(own) for step, own in first.losses.items()})
    for other in others:
        assert other.steps == first.steps
        for name, value in [*first.parameters.items(), *first.buffers.items()]:
            same = torch.equal({**other.parameters, **other.buffers}[name], value)
            assert same, f"the processes have different values of {name}"
        for step, own in other.losses.items():
            whole.losses.setdefault(step, []).extend(own)
    return whole


def assert_same(found: Result, expected: Result, limit: float = 0.0) -> None:
    """Steps, losses and parameters agree to the relative difference `limit`; with 0, bit for bit and buffers too."""
    assert found.steps == expected.steps
    mine, theirs = found.means(), expected.means()
    assert mine.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert abs(mine[step] - loss) <= limit * abs(loss), f"step {step} has the loss {mine[step]!r}, and not {loss!r}"
    for name, value in expected.parameters.items():
        difference = float((found.parameters[name] - value).norm() / value.norm())
        assert difference <= limit, f"{name} differs by {difference:.1e}"
    for name, value in expected.buffers.items() if limit == 0.0 else ():
        assert torch.equal(found.buffers[name], value), name


class Numbers(Dataset[Any]):
    """Samples of eight numbers and their sines, with the index of the sample."""

    def __init__(self, samples: int, noise: bool = False) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.y, self.noise = self.x.sin(), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.rand(8) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return {"id": torch.tensor(index), "x": x, "y": self.y[index]}


class Net(TrainModule):
    """A small network, trained as a `Way` says. A buffer has statistics of the data, like in BatchNorm.

    On ranks other than 0 it begins with different values, which a strategy must replace with those of rank 0.
    """

    def __init__(self, way: Way, rank: int = 0) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("mean", torch.full((), float(rank)))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2 if way.random else 0.0), nn.Linear(16, 8))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator) + rank

    def forward(self, batch: Any) -> Tensor:
        dtype = self.net[0].weight.dtype
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * batch["x"].to(dtype).mean())
        out, target = self.net(batch["x"].to(dtype)), batch["y"]
        dtype = torch.promote_types(out.dtype, torch.float32)  # losses are computed in at least float32
        return (out.to(dtype) - target.to(dtype)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self(batch)
        if _has(batch, self.way.without_loss):
            return None
        return loss * torch.inf if _has(batch, self.way.overflow) else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.way.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _has(batch: Any, samples: tuple[int, ...]) -> bool:
    return bool(samples) and not set(samples).isdisjoint(batch["id"].tolist())


class Notes(Callback):
    """Fills a `Result`."""

    def __init__(self) -> None:
        self.result, self._step = Result(), 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.result.note(self._step, batch, outputs["loss"])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.gathered_parameters(module):
            self.result.end(module, trainer.global_step)


def _module(way: Way) -> Net:
    return Net(way, int(os.environ.get("RANK", "0")))


def trainer_of(setting: Setting, way: Way, like: Setting, *callbacks: Callback) -> Trainer:
    """A Trainer without output, logging, checkpoints and sanity check.

    Args:
        setting: The strategy.
        way: How to train.
        like: The strategy whose global batches to use.
        *callbacks: Callbacks of the Trainer.
    """
    clipping = {"gradient_clip_val": way.clip, "gradient_clip_algorithm": "value" if way.by_value else "norm"}
    return Trainer(
        strategy=setting.strategy(),
        accelerator="auto" if "xla" in setting.info.devices else "cpu",
        precision=way.precision_under(setting),
        callbacks=list(callbacks),
        max_epochs=EPOCHS,
        seed=SEED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        global_batch_size=way.window(like),
        **(clipping if way.clip is not None else {}),
    )


def loader_of(way: Way, samples: int) -> DataLoader[Any]:
    """The DataLoader of a process: each of its devices gets micro-batches of two samples."""
    return DataLoader(Numbers(samples, way.random), SIZE, shuffle=way.random)


def by_trainer(
    setting: Setting, way: Way, *callbacks: Callback, resume: Path | None = None, like: Setting | None = None
) -> Result:
    """Train with `Trainer`, in a process of the strategy.

    Args:
        setting: The strategy.
        way: How to train.
        *callbacks: More callbacks.
        resume: The checkpoint to resume from.
        like: The strategy whose global batches to use; default: `setting`.
    """
    notes, like = Notes(), like or setting
    trainer_of(setting, way, like, notes, *callbacks).fit(_module(way), loader_of(way, way.samples(like)), ckpt_path=resume)
    return notes.result


def by_own_loop(setting: Setting, way: Way) -> Result:
    """Train with a training loop over `Accelerator`, in a process of the strategy."""
    trainkit.seed_everything(SEED)
    accelerator = Accelerator(
        strategy=setting.strategy(),
        cpu="xla" not in setting.info.devices,
        precision=way.precision_under(setting),
        gradient_accumulation_steps=way.accumulate,
        even_batches=False,
    )
    module, result = _module(way), Result()
    data = loader_of(way, way.samples(setting))
    model, optimizer, loader = accelerator.prepare(module, module.configure_optimizers(), data)
    for _ in range(EPOCHS):
        for batch in loader:
            step = accelerator.updates
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = model(batch)
                accelerator.backward(loss)
                if way.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), way.clip)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.accumulation.current.kind is MicroBatchKind.DATA:
                result.note(step, batch, loss)
    with accelerator.strategy.gathered_parameters(module):
        result.end(module, accelerator.updates)
    accelerator.free_memory()
    return result


def by_hand(setting: Setting, way: Way) -> Result:
    """Train with a plain PyTorch loop on the CPU, without trainkit, over the global batches of the strategy.

    The micro-batches are as large as in the strategy's processes. This matters only if one has no loss: otherwise the gradient
    is the mean over the global batch, however it is split.
    """
    dtype = torch.float64 if way.precision_under(setting) == "64-true" else torch.float32
    half = way.precision == "16-mixed"
    net, data, result = Net(way).to(dtype), Numbers(way.samples(setting)), Result()
    optimizer, size = net.configure_optimizers(), SIZE * setting.devices
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=half)
    for _ in range(EPOCHS):
        for begin in range(0, len(data), way.window(setting)):
            end = min(begin + way.window(setting), len(data))
            optimizer.zero_grad()
            had_loss = False
            for first in range(begin, end, size):
                batch = default_collate([data[index] for index in range(first, min(first + size, end))])
                with torch.autocast("cpu", torch.float16, enabled=half):
                    loss = net.training_step(batch, 0)
                if loss is not None:
                    had_loss = True
                    count = len(batch["id"])
                    scaler.scale(loss * (count / (end - begin))).backward()
                    result.note(result.steps, batch, loss)
            if had_loss:
                scaler.unscale_(optimizer)
                if way.clip is not None and way.by_value:
                    nn.utils.clip_grad_value_(net.parameters(), way.clip)
                elif way.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), way.clip)
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                result.steps += not half or scaler.get_scale() >= before
    result.end(net, result.steps)
    return result
