"""The same training loops with Accelerate's `Accelerator` and with trainkit's, on one and on two processes.

Each micro-batch has a gradient of 1 and the learning rate is 1, so an optimizer step changes the parameter by the total
weight of its micro-batches.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import nn
from torch.utils.data import DataLoader

SIZES = [1, 2]
Loop = Callable[..., Any]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")


def library(name: str) -> tuple[Any, Any]:
    """The class `Accelerator` and the function `set_seed` of a library."""
    if name == "accelerate":
        from accelerate import Accelerator
        from accelerate.utils import set_seed
    else:
        from trainkit import Accelerator, set_seed  # type: ignore[assignment]
    return Accelerator, set_seed


def numbers(processes: int, batches: int, **options: Any) -> DataLoader[Any]:
    """A loader with `batches` micro-batches of two numbers for each process."""
    return DataLoader(torch.arange(2.0 * batches * processes)[:, None], batch_size=2, **options)


class Weights:
    """A training loop that records each batch's number (`ids`) and how much the parameter changed in it (`found`)."""

    def __init__(self, name: str, steps: int, batches: int = 5, **options: Any) -> None:
        self.accelerator = library(name)[0](cpu=True, gradient_accumulation_steps=steps)
        if name == "accelerate":
            self.accelerator.sync_gradients = True  # Accelerate keeps it per process: an earlier loop may have left it False
        self.plain = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.plain.weight)
        optimizer = torch.optim.SGD(self.plain.parameters(), lr=1.0)
        loader = numbers(self.accelerator.num_processes, batches, **options)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.plain, optimizer, loader)
        self.found: list[float] = []
        self.ids: list[int] = []

    def backward(self, batch: Any) -> None:
        self.ids.append(int(batch.flatten()[0]) // 2)
        self.accelerator.backward(self.model(torch.ones_like(batch)).mean())

    def note(self, before: float) -> None:
        self.found.append(round(before - self.plain.weight.item(), 6))

    def step(self, batch: Any) -> None:
        """The body of a training loop, as in Accelerate's documentation."""
        before = self.plain.weight.item()
        with self.accelerator.accumulate(self.model):
            self.backward(batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.note(before)


# ------------------------------------------------------------------------------------------------------------------- loops


def broken_off(loop: Weights) -> None:
    for step, batch in enumerate(loop.loader):
        if step == 3:
            break
        loop.step(batch)


def zipped_first(loop: Weights) -> None:
    for batch, _ in zip(loop.loader, range(3), strict=False):
        loop.step(batch)


def zipped_last(loop: Weights) -> None:
    for _, batch in zip(range(3), loop.loader, strict=False):
        loop.step(batch)


def cut(loop: Weights) -> None:
    for batch in islice(loop.loader, 3):
        loop.step(batch)


LEFT = {function.__name__: function for function in (broken_off, zipped_first, zipped_last, cut)}


def left(name: str, which: str, steps: int) -> list[float]:
    """Four epochs of five micro-batches; the loop leaves each epoch after three."""
    loop = Weights(name, steps)
    for _ in range(4):
        LEFT[which](loop)
    return loop.found


def without_accumulate(name: str) -> list[float]:
    loop = Weights(name, steps=4)
    for batch in loop.loader:
        before = loop.plain.weight.item()
        assert loop.accelerator.sync_gradients
        loop.backward(batch)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.note(before)
    return loop.found


def by_hand(name: str) -> list[float]:
    """The loop itself counts the accumulation windows, without `accumulate`."""
    loop = Weights(name, steps=2, batches=6)
    for step, batch in enumerate(loop.loader):
        before = loop.plain.weight.item()
        loop.backward(batch)
        if step % 2 == 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.note(before)
    return loop.found


def cleared_at_the_head(name: str) -> list[float]:
    loop = Weights(name, steps=2, batches=6)
    for batch in loop.loader:
        before = loop.plain.weight.item()
        with loop.accelerator.accumulate(loop.model):
            loop.optimizer.zero_grad()
            loop.backward(batch)
            loop.optimizer.step()
        loop.note(before)
    return loop.found


def cleared_before(name: str) -> list[float]:
    loop = Weights(name, steps=2, batches=6)
    for batch in loop.loader:
        before = loop.plain.weight.item()
        loop.optimizer.zero_grad()
        with loop.accelerator.accumulate(loop.model):
            loop.backward(batch)
            loop.optimizer.step()
        loop.note(before)
    return loop.found


def drawn(name: str, device_specific: bool) -> list[float]:
    accelerator, set_seed = library(name)
    accelerator = accelerator(cpu=True)
    set_seed(8, device_specific=device_specific)
    return [float(torch.rand(1)), float(np.random.rand()), random.random()]


def resumed(name: str, folder: str, way: str, steps: int) -> tuple[list[int], list[float]]:
    """Resume a checkpoint that was saved after 4 of 10 micro-batches; returns the batches and the weights after that."""
    library(name)[1](3)
    loop, done = Weights(name, steps, batches=10), 4
    for step, batch in enumerate(loop.loader, 1):
        loop.step(batch)
        if step == done:
            loop.accelerator.save_state(f"{folder}/{name}-{way}-{steps}")
            break
    loop.accelerator.free_memory()
    loop = Weights(name, steps, batches=10)
    options = {"resume_loaders": True} if way == "argument" else {}
    loop.accelerator.load_state(f"{folder}/{name}-{way}-{steps}", **options)
    nn.init.zeros_(loop.plain.weight)
    if way == "verb":
        loop.accelerator.resume_loaders()
    for epoch in range(2):
        batches = loop.loader
        if way == "skip_first_batches" and epoch == 0:
            batches = loop.accelerator.skip_first_batches(loop.loader, done)
        for step, batch in enumerate(batches):
            if way == "counted" and epoch == 0 and step < done:
                continue
            loop.step(batch)
    return loop.ids, loop.found


WAYS = ("counted", "skip_first_batches")


def everything(name: str, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {(which, steps): left(name, which, steps) for which in LEFT for steps in (2, 3, 4)}
    for function in (without_accumulate, by_hand, cleared_at_the_head, cleared_before):
        found[function.__name__] = function(name)
    for way in WAYS if name == "accelerate" else (*WAYS, "argument", "verb"):
        for steps in (1, 2):
            found[way, steps] = resumed(name, folder, way, steps)
    for specific in (False, True):
        found["drawn", specific] = drawn(name, specific)
    return found


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Iterator[tuple[dict[Any, Any], dict[Any, Any]]]]:
    """A function that takes the number of processes and yields, for each rank, the results of trainkit and of Accelerate."""
    folder = tmp_path_factory.mktemp("states")

    @cache
    def run(name: str, size: int) -> list[Any]:
        Path(folder, str(size)).mkdir(exist_ok=True)
        return run_world(size, everything, name, f"{folder}/{size}")

    def both(size: int) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
        return zip(run("trainkit", size), run("accelerate", size), strict=True)

    return both


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", list(LEFT))
def test_an_epoch_that_is_left_inside_a_window(beside: Any, which: str, size: int) -> None:
    """If a loop leaves an epoch inside a window, the next epoch completes the window: each step has weight 1."""
    for ours, theirs in beside(size):
        assert ours[which, 2] == theirs[which, 2] == [0, 1] * 6
        assert ours[which, 3] == theirs[which, 3] == [0, 0, 1] * 4
        assert ours[which, 4] == theirs[which, 4] == [0, 0, 0, 1] * 3


@pytest.mark.parametrize("size", SIZES)
def test_a_loop_without_accumulate_updates_with_each_batch(beside: Any, size: int) -> None:
    """Without `accumulate` each batch makes an optimizer step; its loss is divided by gradient_accumulation_steps."""
    for ours, theirs in beside(size):
        assert ours["without_accumulate"] == theirs["without_accumulate"] == [0.25] * 5


@pytest.mark.parametrize("size", SIZES)
def test_windows_that_a_loop_counts_itself(beside: Any, size: int) -> None:
    """A loop without `accumulate` that steps after every second batch makes steps of weight 1."""
    for ours, theirs in beside(size):
        assert ours["by_hand"] == theirs["by_hand"] == [0, 1] * 3


@pytest.mark.parametrize("size", SIZES)
def test_gradients_cleared_at_the_head_of_the_body(beside: Any, size: int) -> None:
    """`zero_grad` at the start of the body of `accumulate` loses half of each window in Accelerate, and nothing in trainkit.

    Accelerate's `zero_grad` also acts in the last micro-batch of a window.
    """
    for ours, theirs in beside(size):
        assert theirs["cleared_at_the_head"] == [0, 0.5] * 3
        assert ours["cleared_at_the_head"] == [0, 1] * 3
        assert ours["cleared_before"] == theirs["cleared_before"] == [0, 1] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["counted", "skip_first_batches", "argument", "verb"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loop_that_continues_in_the_middle_of_an_epoch(beside: Any, steps: int, way: str, size: int) -> None:
    """Each way to skip the first four of ten batches trains on batches 4 to 9 and then on a whole epoch."""
    for rank, (ours, theirs) in enumerate(beside(size)):
        expected = [size * batch + rank for batch in [*range(4, 10), *range(10)]]
        assert theirs["counted", steps][0] == theirs["skip_first_batches", steps][0] == expected
        assert ours[way, steps] == (expected, ([1.0] if steps == 1 else [0.0, 1.0]) * (16 // steps))
        assert ours[way, steps] == theirs["counted", steps]


@pytest.mark.parametrize("size", SIZES)
def test_a_seed_for_each_process(beside: Any, size: int) -> None:
    """`set_seed` draws the same random numbers as Accelerate's, with and without `device_specific`."""
    found = list(beside(size))
    for ours, theirs in found:
        assert ours["drawn", False] == theirs["drawn", False]
        assert ours["drawn", True] == theirs["drawn", True]
    assert len({tuple(ours["drawn", True]) for ours, _ in found}) == size
    assert len({tuple(ours["drawn", False]) for ours, _ in found}) == 1
