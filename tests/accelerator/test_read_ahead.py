"""Loops that read all batches of an optimizer step before `accumulate`, to divide their losses by what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator
from trainkit.errors import ConfigurationError

BATCH = 4
Read = Callable[[Any, int], Iterator[list[Any]]]


def data(samples: int) -> TensorDataset:
    """Inputs, and classes of which some do not count."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (samples, 5), generator=generator)
    labels[torch.rand(samples, 5, generator=generator) < 0.4] = -100
    return TensorDataset(torch.randn(samples, 6, generator=generator).double(), labels)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 15).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def loss_of(model: nn.Module, inputs: Any, labels: Any, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).view(-1, 3), labels.flatten(), reduction=reduction)


def expected(samples: int, window: int) -> list[list[float]]:
    """The weights after training in one process on the mean over the counted classes of each window."""
    model, optimizer = make()
    inputs, labels = data(samples).tensors
    for start in [*range(0, samples, window)] * 2:
        loss_of(model, inputs[start : start + window], labels[start : start + window], "mean").backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]


def counted(loader: Any, steps: int) -> Iterator[list[Any]]:
    """As in Accelerate's example: no batch is asked for after the last one."""
    batches = iter(loader)
    for start in range(0, len(loader), steps):
        yield list(islice(batches, min(steps, len(loader) - start)))


def until_the_end(loader: Any, steps: int) -> Iterator[list[Any]]:
    """The end of the loader is found while the last batches are read."""
    batches = iter(loader)
    while window := list(islice(batches, steps)):
        yield window


def collected(loader: Any, steps: int) -> Iterator[list[Any]]:
    """A loop over the loader, with the rest after it."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == steps:
            yield window
            window = []
    if window:
        yield window


class Loop:
    def __init__(self, samples: int, steps: int) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        self.steps = steps
        model, optimizer = make()
        self.plain = model
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(data(samples), batch_size=BATCH)
        )

    def train(self, batches: list[Any]) -> None:
        """One optimizer step."""
        accelerator = self.accelerator
        items = accelerator.gather(sum(labels.ne(-100).sum() for _, labels in batches)).sum().item()
        for place, (inputs, labels) in enumerate(batches):
            with accelerator.accumulate(self.model):
                loss = loss_of(self.model, inputs, labels, "sum") * self.steps * accelerator.num_processes / items
                accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                assert accelerator.sync_gradients == (place == len(batches) - 1)

    def weights(self) -> list[list[float]]:
        return [parameter.tolist() for parameter in self.plain.parameters()]


def trained(samples: int, steps: int, read: Read) -> list[list[float]]:
    loop = Loop(samples, steps)
    for _ in range(2):
        for batches in read(loop.loader, steps):
            loop.train(batches)
    return loop.weights()


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-12) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("read", [counted, until_the_end, collected])
@pytest.mark.parametrize("samples, steps", [(64, 2), (54, 2), (72, 4), (86, 4)])
def test_each_step_is_the_mean_over_all_that_is_counted(samples: int, steps: int, read: Read, processes: int) -> None:
    """Also where the last window is short, of one batch only, or ends with a short batch."""
    for weights in run_world(processes, trained, samples, steps, read):
        assert same(weights, expected(samples, BATCH * steps * processes))


def resumed(at: int, skip: str) -> list[list[float]]:
    """Train to a checkpoint, and again from it in other objects."""
    loop = Loop(72, 4)
    for done, batches in enumerate(counted(loop.loader, 4)):
        loop.train(batches)
        if done == at:
            loop.accelerator.save_state("there")
            loop.accelerator.wait_for_everyone()
            break
    loop.accelerator.free_memory()
    loop = Loop(72, 4)
    loop.accelerator.load_state("there", resume_loaders=skip == "resume")
    windows = counted(loop.loader, 4)
    if skip == "resume":
        windows = until_the_end(loop.loader, 4)
    for epoch in range(2):
        for done, batches in enumerate(windows):
            if epoch == 0 and skip == "read" and done <= at:
                continue
            loop.train(batches)
        windows = counted(loop.loader, 4)
    return loop.weights()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("skip", ["resume", "read"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_loop_that_resumes(at: int, skip: str, processes: int, run_dir: Path) -> None:
    """Also at a window of one batch, and in a loop that skips the batches that were trained on by reading them."""
    for weights in run_world(processes, resumed, at, skip):
        assert same(weights, expected(72, BATCH * 4 * processes))


def test_a_loop_must_train_on_all_that_it_has_read() -> None:
    loop = Loop(64, 2)
    batches = iter(loop.loader)
    inputs, labels = next(batches)
    next(batches)
    with loop.accelerator.accumulate(loop.model):
        loop.accelerator.backward(loss_of(loop.model, inputs, labels, "mean"))
    with pytest.raises(ConfigurationError, match="1 of 2 batches that were read ahead have not been trained on"):
        next(batches)
    loop = Loop(64, 2)
    loop.train(list(islice(batches := iter(loop.loader), 2)))
    with pytest.raises(ConfigurationError, match="accumulate.. was called more often than for the 2 batches"):
        loop.accelerator.accumulate(loop.model)


def test_an_evaluation_between_two_batches() -> None:
    loop, other = Loop(64, 2), DataLoader(data(8), batch_size=BATCH)
    evaluated = loop.accelerator.prepare(other)
    for _ in range(2):
        for batches in counted(loop.loader, 2):
            items = sum(labels.ne(-100).sum() for _, labels in batches)
            for inputs, labels in batches:
                with loop.accelerator.accumulate(loop.model):
                    loop.accelerator.backward(loss_of(loop.model, inputs, labels, "sum") * 2 / items)
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                loop.model.eval()
                assert len(list(evaluated)) == 2
                loop.model.train()
    assert same(loop.weights(), expected(64, 2 * BATCH))


def test_weights_that_the_loader_knows() -> None:
    """Then each loss is the mean of its batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = make()
    model, optimizer, loader = accelerator.prepare(
        plain := model,
        optimizer,
        DataLoader(data(54), batch_size=BATCH),
        batch_weight=lambda batch: float((batch[1] != -100).sum()),
    )
    for _ in range(2):
        for batches in until_the_end(loader, 2):
            for inputs, labels in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, inputs, labels, "mean"))
                    optimizer.step()
                    optimizer.zero_grad()
    assert same([parameter.tolist() for parameter in plain.parameters()], expected(54, 2 * BATCH))
