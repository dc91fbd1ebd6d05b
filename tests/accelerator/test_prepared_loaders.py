"""Your own training loop reads several loaders: one inside the other, or at the same time."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, set_seed, skip_first_batches
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError


def numbers(samples: int, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(samples))), batch_size)


def test_an_evaluation_in_the_middle_of_a_window_leaves_it_as_it_was() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, train, test = accelerator.prepare(nn.Linear(1, 1), numbers(10), numbers(6))
    seen = []
    for place, _ in enumerate(train):
        with accelerator.accumulate(model):
            before = accelerator.accumulation.snapshot()
            if place == 1:
                for _ in test:
                    assert accelerator.gather_for_metrics(torch.ones(2)).shape == (2,)
            assert accelerator.accumulation.snapshot() == before
            seen.append(accelerator.sync_gradients)
    assert seen == [False, False, True, False, True]
    assert accelerator.sync_gradients


@pytest.mark.parametrize("lengths, ends", [((6, 6), True), ((6, 10), False), ((10, 6), True)])
def test_loaders_that_are_zipped(lengths: tuple[int, int], ends: bool) -> None:
    """With `zip` the accumulation window is that of the second loader; it stays open if the first loader ends earlier."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, one, other = accelerator.prepare(nn.Linear(1, 1), *map(numbers, lengths))
    idle = accelerator.accumulation.snapshot()
    seen = []
    for _ in zip(one, other, strict=False):
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, ends]
    assert accelerator.sync_gradients is ends, "a window that is not full stays open, as in Accelerate"
    if ends:
        assert accelerator.accumulation.snapshot() == idle


def test_a_loop_that_is_left_early() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(numbers(10))
    idle = accelerator.accumulation.snapshot()
    for _ in loader:
        break
    next(iter(loader))
    assert accelerator.accumulation.snapshot() == idle


class Steps:
    """A loop in which each micro-batch has a gradient of 1; `found` contains the total weight of each optimizer step."""

    def __init__(self, *prepared: Any, batch_weight: Any = None, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        self.plain = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.plain.weight)
        optimizer = torch.optim.SGD(self.plain.parameters(), lr=1.0)
        self.model, self.optimizer, *self.loaders = self.accelerator.prepare(
            self.plain, optimizer, *prepared, batch_weight=batch_weight
        )
        self.found: list[float] = []

    def step(self, batch: Any, accumulates: bool = True) -> None:
        before = self.accelerator.unwrap_model(self.model).weight.item()
        if accumulates:
            self.accelerator.accumulate(self.model)
        self.accelerator.backward(self.model(torch.ones(len(batch[0]), 1)).mean())
        if self.optimizer.step():
            after = self.accelerator.unwrap_model(self.model).weight.item()
            self.found.append(round(before - after, 6))
        self.optimizer.zero_grad()


def left_windows(weighed: bool) -> list[list[float]]:
    """Epochs of five micro-batches per process, the last one short; the loop leaves all epochs but the last one early."""
    size = int(os.environ["WORLD_SIZE"])
    weigh = (lambda batch: float(len(batch[0]))) if weighed else None
    loop = Steps(numbers(10 * size - 1), batch_weight=weigh, gradient_accumulation_steps=3)
    for number in (4, 2, 1, 0, 5):
        for batch in islice(loop.loaders[0], number):
            loop.step(batch)
    return [loop.found, [loop.accelerator.updates]]


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_windows_that_are_left_are_completed(size: int, weighed: bool) -> None:
    """12 micro-batches of five epochs, four of them left early, are four windows of three: each step has weight 1."""
    for found, updates in run_world(size, left_windows, weighed):
        assert updates == [4]
        assert found == pytest.approx([1.0] * 4, abs=1e-6)


def test_a_window_that_is_entered_in_its_middle_counts_in_full() -> None:
    """If a loop skips the first micro-batches of a window, the optimizer step still has weight 1."""
    loop = Steps(numbers(14), gradient_accumulation_steps=4)
    for batch in skip_first_batches(loop.loaders[0], 1):
        loop.step(batch)
    assert loop.found == [1.0, 1.0], "batches 1 to 4, 5 and 6"
    loop.accelerator.open_loaders.loaded = True  # as after load_state
    loop = Steps(numbers(14), gradient_accumulation_steps=4)
    loop.accelerator.open_loaders.loaded = True
    for place, batch in enumerate(loop.loaders[0]):
        if place >= 3:
            loop.step(batch)
    assert loop.found == [1.0, 1.0], "batch 3, which ends the window that begins at 0, and 4 to 6"


def test_windows_of_another_size_complete_the_open_one() -> None:
    loop = Steps(numbers(8), gradient_accumulation_steps=4)
    for batch in islice(loop.loaders[0], 1):
        loop.step(batch)
    assert not loop.accelerator.sync_gradients
    assert not loop.optimizer.step(), "between epochs too"
    loop.optimizer.zero_grad()
    loop.accelerator.gradient_accumulation_steps = 1
    for batch in loop.loaders[0]:
        loop.step(batch)
    assert loop.found == [1.0] * 4


def test_an_evaluation_inside_a_window_that_was_left() -> None:
    loop = Steps(numbers(10), numbers(6), gradient_accumulation_steps=2)
    for _ in range(2):
        for batch in islice(loop.loaders[0], 3):
            for _ in islice(loop.loaders[1], 2):
                pass
            loop.step(batch)
            assert len(list(loop.loaders[1])) == 3
    assert loop.found == [1.0] * 3


def epoch_left_early_uneven_ranks(even: bool, strategy: str) -> list[float]:
    """The loop leaves an epoch after one micro-batch of a window of four; the next epoch completes the window.

    Two processes share five micro-batches, so rank 1 has only two in an epoch and rank 0 has three.
    """
    loop = Steps(numbers(10), gradient_accumulation_steps=4, even_batches=even, strategy=strategy)
    for number in (1, 3, 3):
        for batch in islice(loop.loaders[0], number):
            loop.step(batch)
    loop.accelerator.free_memory()
    return loop.found


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("even", [True, False])
def test_a_window_is_completed_by_rows_that_are_not_full(even: bool, strategy: str) -> None:
    """Each optimizer step has weight 1, also if one rank has fewer micro-batches in the window."""
    if strategy == "zero1":
        pytest.importorskip("deepspeed")
    for found in run_world(2, epoch_left_early_uneven_ranks, even, strategy):
        assert found == pytest.approx([1.0, 1.0], abs=1e-6)


def left_under_zero() -> list[float]:
    loop = Steps(numbers(20), gradient_accumulation_steps=2, strategy="zero1")
    for _ in range(2):
        for batch in islice(loop.loaders[0], 3):
            loop.step(batch)
    loop.accelerator.free_memory()
    return loop.found


@pytest.mark.parametrize("size", [1, 2])
def test_under_zero_windows_are_completed_too(size: int) -> None:
    pytest.importorskip("deepspeed")
    assert run_world(size, left_under_zero) == [[1.0] * 3] * size


def without_accumulate() -> list[float]:
    loop = Steps(numbers(10), gradient_accumulation_steps=2, even_batches=False)
    for _ in range(2):
        for batch in loop.loaders[0]:
            loop.step(batch, accumulates=False)
    return loop.found


def test_without_accumulate_all_processes_update_as_often() -> None:
    """Without `accumulate` all ranks make an optimizer step whenever one rank has a micro-batch: three per epoch.

    Two processes share five micro-batches.
    """
    assert run_world(2, without_accumulate) == [[0.5] * 6] * 2


def ends_of_epochs(even: bool, accumulate: int) -> list[tuple[int, list[float], bool]]:
    """For a training and an evaluation: number of batches, their shares, and whether the last one was padding."""
    accelerator = Accelerator(even_batches=even, gradient_accumulation_steps=accumulate)
    model, loader = accelerator.prepare(nn.Linear(1, 1), numbers(10))
    found = []
    for training in (True, False):
        model.train(training)
        shares, padding = [], False
        for _ in loader:
            with accelerator.accumulate(model):
                shares.append(accelerator.accumulation.current.share)
            padding = accelerator.open_loaders.padding
        found.append((len(shares), shares, padding))
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_even_batches_all_have_as_many(accumulate: int) -> None:
    """With `even_batches=True` both ranks get three batches; the last one of rank 1 is padding.

    Two processes share five micro-batches.
    """
    main, other = run_world(2, ends_of_epochs, True, accumulate)
    for count, shares, padding in main:
        assert (count, shares[-1], padding) == (3, 2.0, False)
    for count, shares, padding in other:
        assert (count, shares[-1], padding) == (3, 0.0, True)


def test_without_even_batches_one_is_filled_in_only_where_a_window_is_empty() -> None:
    """With `even_batches=False` a rank gets padding only in training, and only if it has no data in a window."""
    (trained, evaluated), (trained_2, evaluated_2) = run_world(2, ends_of_epochs, False, 1)
    assert (trained[0], evaluated[0]) == (3, 3)
    assert (trained_2[0], trained_2[2]) == (3, True)  # no data in the last window, but it takes part in averaging gradients
    assert evaluated_2[0] == 2
    (trained, _), (trained_2, _) = run_world(2, ends_of_epochs, False, 2)
    assert trained[1] == [0.5, 0.5, 2.0]
    assert trained_2[1:] == ([0.5, 0.5, 0.0], True)
    (trained, _), (trained_2, _) = run_world(2, ends_of_epochs, False, 3)
    assert [len(shares) for _, shares, _ in (trained, trained_2)] == [3, 2]  # rank 1 has data in it: no padding


@pytest.mark.world_size(2)
def test_join_uneven_inputs_says_so_for_a_while() -> None:
    """`even_batches` of `join_uneven_inputs` has an effect only inside its `with` block."""
    accelerator = Accelerator()
    model, loader = accelerator.prepare(nn.Linear(1, 1), numbers(10))
    model.eval()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert sum(1 for _ in loader) == 3 - accelerator.process_index
    assert sum(1 for _ in loader) == 3
    with accelerator.join_uneven_inputs([model]):
        assert sum(1 for _ in loader) == 3
    with (
        pytest.raises(ConfigurationError, match="join_uneven_inputs: Linear has not been prepared"),
        accelerator.join_uneven_inputs([nn.Linear(1, 1)]),
    ):
        pass


def test_batches_that_are_read_ahead_are_reported() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(2, 1), DataLoader(torch.ones(8, 2), batch_size=2))
    batches = iter(loader)
    first, _, _ = (next(batches) for _ in range(3))
    with pytest.raises(
        ConfigurationError, match=r"3 batches have been read since .*skip_first.*backward\(loss, weight=count\)"
    ):
        accelerator.accumulate(model)
    assert len(first) == 2
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(2, 1), DataLoader(torch.ones(8, 2), batch_size=2))
    for place, batch in enumerate(loader):
        if place % 2:
            continue  # without accumulation, a loop may skip batches
        accelerator.backward(model(batch).sum())


@pytest.mark.world_size(2)
def test_a_loop_that_reads_ahead_and_counts_would_count_padding() -> None:
    """It is an error in the first window, on all ranks, and for a loader without a length in the last one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def train(source: Any) -> None:
        model, loader = accelerator.prepare(nn.Linear(2, 1), source)
        accelerator.backward(model(torch.ones(1, 2)).sum())  # outside of accumulate
        batches = iter(loader)
        for first, second in zip(batches, batches, strict=False):
            for batch in (first, second):
                accelerator.backward(model(batch).sum())
        accelerator.free_memory()

    for samples in (8, 16):
        train(DataLoader(torch.ones(samples, 2), batch_size=2))
    text = (
        r"loop itself divides its losses, but an epoch has 5 batches for 2 processes.*prepare\(loader, batch_weight=function\)"
    )
    with pytest.raises(ConfigurationError, match=text):
        train(DataLoader(torch.ones(10, 2), batch_size=2))


def test_two_models_in_one_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, other, loader = accelerator.prepare(nn.Linear(2, 1), nn.Linear(2, 1), DataLoader(torch.ones(7, 2), batch_size=2))
    shares = []
    for batch in loader:
        for model in (one, other):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                shares.append((round(accelerator.accumulation.current.share, 6), accelerator.sync_gradients))
    assert shares[::2] == shares[1::2] == [(0.5, False), (0.5, True), (0.666667, False), (0.333333, True)]


# -------------------------------------------------------------------------------------------------------------- skipping


def test_skip_first_batches() -> None:
    accelerator = Accelerator(cpu=True)
    fetched: list[int] = []

    class Watched(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    loader = accelerator.prepare(DataLoader(Watched(), 2, shuffle=True))
    whole = [x.tolist() for x in loader]
    loader.set_epoch(0)
    fetched.clear()
    skipped = accelerator.skip_first_batches(loader, 4)
    assert len(skipped) == 2
    assert [x.tolist() for x in skipped] == whole[4:]
    assert fetched == [one for batch in whole[4:] for one in batch]
    assert len(list(loader)) == 6  # the next epoch has all batches
    assert skipped.batch_size == 2
    plain = accelerator.skip_first_batches(DataLoader(list(range(6)), 2), 2)
    assert (len(plain), [x.tolist() for x in plain]) == (1, [[4, 5]])
    assert accelerator.skip_first_batches([1, 2], 5).__len__() == 0
    loader.set_epoch(0)
    assert [x.tolist() for x in skip_first_batches(loader, 5)] == whole[5:]
    for odd in (-1, 1.5, True):
        with pytest.raises(ConfigurationError, match="num_batches must be an integer ≥ 0"):
            accelerator.skip_first_batches(loader, odd)


def test_a_loader_without_a_batch() -> None:
    """It is read, and a warning says why nothing comes."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(3)), 4, drop_last=True))
    with pytest.warns(TrainkitWarning, match="its 3 samples do not fill one batch of 4, and drop_last=True drops the rest"):
        assert list(loader) == []


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("trained", [3, 4])
@pytest.mark.parametrize("left_after", [2, None])
@pytest.mark.parametrize("inside", [False, True])
def test_an_evaluation_begins_again_after_a_resume(
    accumulated: int, trained: int, left_after: int | None, inside: bool, tmp_path: Path
) -> None:
    """Whether it was read to its end or left early, and whether a window is open; the training loader continues."""

    def prepared() -> tuple[Any, ...]:
        set_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return accelerator, *accelerator.prepare(model, optimizer, numbers(12), numbers(10))

    accelerator, model, optimizer, train, test = prepared()

    def evaluate() -> None:
        model.eval()
        for place, _ in enumerate(test, 1):
            if place == left_after:
                break
        model.train()

    for place, _ in enumerate(train, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.zeros(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if place == trained:
            if inside:
                evaluate()
            break
    if not inside:
        evaluate()
    accelerator.save_state(tmp_path / "saved")
    accelerator, model, optimizer, train, test = prepared()
    accelerator.load_state(tmp_path / "saved", resume_loaders=True)
    assert next(iter(test))[0].tolist() == [0.0, 1.0]
    assert next(iter(train))[0].tolist() == ([6.0, 7.0] if 3 in (accumulated, trained) else [8.0, 9.0])
