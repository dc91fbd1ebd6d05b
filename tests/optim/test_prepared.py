"""A prepared scheduler is stepped like that of Accelerate: with each optimizer step, once for each process."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Precision, Strategy
from trainkit.console import TrainkitWarning

SAMPLES, EPOCHS = 48, 2


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(torch.ones(SAMPLES, 1)), 4)


def trace(
    make: Any, prepared_length: bool = False, accumulate: int = 1, epochs: int = EPOCHS, updates: int = 1000, **options: Any
) -> list[float]:
    """Train with a prepared scheduler; returns the learning rate of each of at most `updates` steps, and the last one."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, **options)
    model, optimizer, loader = parts()
    whole = len(loader)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    length = len(loader) if prepared_length else whole
    scheduler = accelerator.prepare(make(optimizer, -(-length // accumulate) * epochs))
    found = []
    for _ in range(epochs):
        for (x,) in loader:
            if len(found) == updates:
                return found
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum() * 0.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    found.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
                optimizer.zero_grad()
    return [*found, optimizer.param_groups[0]["lr"]]


def by_hand(make: Any, steps: int, at: list[int]) -> list[float]:
    _, optimizer, _ = parts()
    scheduler, rates = make(optimizer, steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rates.append(optimizer.param_groups[0]["lr"])
    return [rates[one] for one in at]


def cosine(optimizer: Any, steps: int) -> Any:
    return CosineAnnealingLR(optimizer, steps)


def one_cycle(optimizer: Any, steps: int) -> Any:
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)


@pytest.mark.parametrize("make", [cosine, one_cycle])
@pytest.mark.parametrize("size, accumulate", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_schedule_made_for_the_loader_as_it_was_ends_with_the_training(make: Any, size: int, accumulate: int) -> None:
    # with the length of the loader before prepare, the schedule ends with the last optimizer step on any number of processes
    batches = SAMPLES // 4
    steps = batches // accumulate * EPOCHS
    wanted = by_hand(make, steps, list(range(0, steps + 1, size)))
    for found in run_world(size, trace, make, False, accumulate):
        assert found == pytest.approx(wanted)


def test_one_cycle_whose_last_row_is_short() -> None:
    """Five processes make five scheduler steps for the last two micro-batches of an epoch, but none after OneCycleLR's end."""
    found = run_world(5, trace, one_cycle)[0]
    assert len(found) == 2 * 3 + 1
    assert found[-1] == pytest.approx(by_hand(one_cycle, 24, [24])[0])


@pytest.mark.world_size(2)
def test_with_split_batches_each_update_is_a_step() -> None:
    found = trace(cosine, prepared_length=True, split_batches=True)
    assert found == pytest.approx(by_hand(cosine, 24, list(range(25))))


def test_with_step_scheduler_with_optimizer_false_each_call_is_a_step() -> None:
    for found in run_world(2, in_windows):
        assert found == [1.0, 0.5, 0.25, 0.125]


def in_windows() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model, optimizer, loader = accelerator.prepare(*parts())
    scheduler = accelerator.prepare(StepLR(optimizer, 1, 0.5))
    found = [optimizer.param_groups[0]["lr"]]
    for (x,), _ in zip(loader, range(3), strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
    return found


class Own:
    """A scheduler that is not a class of torch."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@pytest.mark.world_size(2)
def test_one_that_is_not_torchs_takes_a_step_with_each_call() -> None:
    scheduler = Accelerator().prepare(Own())
    scheduler.step()
    assert scheduler.steps == 1


def test_a_skipped_update_is_no_step() -> None:
    accelerator = Accelerator(strategy=Strategy("cpu"), precision=Precision("16-mixed", init_scale=2.0**4))
    model, optimizer, loader = accelerator.prepare(*parts())
    scheduler = accelerator.prepare(StepLR(optimizer, 1, 0.5))
    for place, (x,) in enumerate(loader):
        accelerator.backward(model(x).sum() * (float("inf") if place == 1 else 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is (place == 1)
        if place == 3:
            break
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.125


# --------------------------------------------------------------------------------------------------------------- warnings


def lambdas(optimizer: Any, steps: int) -> Any:
    def falling(step: int, *, num_training_steps: int) -> float:
        return max(0.0, 1.0 - step / num_training_steps)

    return LambdaLR(optimizer, partial(falling, num_training_steps=steps))  # as transformers makes them


def linear(optimizer: Any, steps: int) -> Any:
    return LinearLR(optimizer, 1.0, 0.1, total_iters=steps)


def warned(make: Any, prepared_length: bool, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(make, prepared_length, **options)
    return [str(one.message) for one in caught if issubclass(one.category, TrainkitWarning)]


MAKES = [cosine, one_cycle, lambdas, linear]


def warned_of_each() -> list[dict[str, list[str]]]:
    """For each kind of scheduler: the warnings, by the length for which it was created and the number of optimizer steps."""
    return [
        {
            "prepared": warned(make, True, epochs=3),
            "first": warned(make, True, epochs=3, updates=1),
            "both": warned(make, True, epochs=2),
            "one epoch": warned(make, True, epochs=2, updates=6),
            "whole": warned(make, False, epochs=3),
        }
        for make in MAKES
    ]


def test_one_made_for_the_prepared_length_warns_once() -> None:
    main, other = run_world(2, warned_of_each)
    for said in main:
        (text,) = said["prepared"]
        assert "ends after 18 steps, and makes 2 steps with each optimizer step, one for each process" in text
        assert "18 matches the 6 batches of the prepared loader, so it ends too early" in text
        assert "it must match the 12 batches of the loader before prepare" in text
        assert said["first"] == [text]  # at the first optimizer step, before a learning rate is wrong
        # two epochs of 6 batches are as long as one of 12: the warning comes when training continues after the schedule's end
        (text,) = said["both"]
        assert "ends after 12 steps" in text
        assert "12 matches the 6 batches" in text
        assert said["one epoch"] == said["whole"] == []
    assert not any(text for said in other for text in said.values())  # only the main process warns


@pytest.mark.parametrize("make", MAKES)
def test_no_warning_on_one_process(make: Any) -> None:
    # with one process, the prepared loader has the same length, so there is no warning
    assert warned(make, True, strategy=Strategy("cpu")) == []


def test_nor_has_one_whose_steps_are_the_users_own_or_that_ends_a_little_early() -> None:
    # no warning if each call is one step, or if the schedule ends only two steps before the training
    assert run_world(2, unwarned) == [[], []]


def unwarned() -> list[str]:
    global SAMPLES
    own = [*warned(cosine, True, step_scheduler_with_optimizer=False), *warned(cosine, True, split_batches=True)]
    # 47 batches of each process in windows of two are 24 optimizer steps an epoch: in two epochs, two processes make 96 steps
    # of a schedule of 94
    SAMPLES = 4 * 94
    return [*own, *warned(lambda optimizer, steps: CosineAnnealingLR(optimizer, 94), False, accumulate=2)]
