"""`backward(loss, weight=)`: the gradient is the weighted mean over the accumulation window of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Precision
from trainkit.errors import ConfigurationError, DataError

SAMPLES, SIZE = 22, 2  # eleven micro-batches


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, 5, (SAMPLES,), generator=generator)
    return TensorDataset(x, counts)


def weight_of(counts: Tensor) -> float:
    return float(counts.sum())


def mean_loss(model: Any, x: Tensor, counts: Tensor) -> Tensor:
    """The mean weighted by `counts`; NaN if all counts are 0."""
    return ((model(x).squeeze(1) - 1.0).square() * counts).sum() / counts.sum()


def updates(accumulate: int, by: str, even: bool = True, precision: str = "64-true") -> list[list[float]]:
    """The gradient of each optimizer step."""
    torch.manual_seed(5)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, precision=precision, even_batches=even)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    options: dict[str, Any] = {"batch_weight": lambda batch: weight_of(batch[1])} if by == "batch_weight" else {}
    loader = accelerator.prepare(DataLoader(data(), SIZE), **options)
    found = []
    for x, counts in loader:
        with accelerator.accumulate(model):
            loss = mean_loss(model, x, counts)
            more = {"weight": weight_of(counts)} if by == "weight" else {}
            accelerator.backward(loss, **more)
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                found.append([float(value) for p in model.parameters() for value in p.grad.reshape(-1)])
            optimizer.step()
            optimizer.zero_grad()
    return found


def by_hand(rows: int) -> list[list[float]]:
    """The gradients computed with plain PyTorch: one process, and one batch for each optimizer step."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for x, counts in DataLoader(data(), SIZE * rows):
        optimizer.zero_grad()
        mean_loss(model, x, counts).backward()
        found.append([float(value) for p in model.parameters() for value in p.grad.reshape(-1)])
        optimizer.step()
    return found


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("size, accumulate", [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)])
def test_the_gradient_is_the_weighted_mean(size: int, accumulate: int, even: bool) -> None:
    wanted = by_hand(size * accumulate)
    for by in ("weight", "batch_weight"):
        for found in run_world(size, updates, accumulate, by, even):
            assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-9, atol=1e-12)


def test_a_tensor_is_a_weight_too_and_other_things_are_not() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    accelerator.backward(loss, weight=torch.tensor(3))
    assert model.weight.grad.item() == 1.0  # the weight of the only micro-batch of a window does not matter
    for odd in (-1.0, float("nan"), "three"):
        with pytest.raises(DataError, match=r"backward\(weight=\) must be a finite number ≥ 0"):
            accelerator.backward(model(torch.ones(1, 1)).sum(), weight=odd)  # type: ignore[arg-type]


def test_a_window_of_no_weight_is_no_update() -> None:
    """An accumulation window of total weight 0 makes no optimizer step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), float("nan"))).sum(), weight=0.0)
            updated = optimizer.step()
    assert updated is False
    assert accelerator.optimizer_step_was_skipped
    assert model.weight.item() == before


def test_weights_of_some_and_not_of_others() -> None:
    """`weight` must be given for all micro-batches of a window or for none."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum(), weight=1.0)
    with (
        accelerator.accumulate(model),
        pytest.raises(ConfigurationError, match="for some micro-batches of a window and not for others"),
    ):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_a_weight_of_nothing_is_forgotten_with_its_micro_batch() -> None:
    """A micro-batch of weight 0 skips its own optimizer step, and not the next one."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(torch.ones(4, 1), batch_size=1)
    )
    updated = []
    for place, x in enumerate(loader):
        accelerator.backward(model(x).sum(), **({} if place else {"weight": 0.0}))
        updated.append(optimizer.step())
        optimizer.zero_grad()
    assert updated == [False, True, True, True]


def test_two_weights_for_one_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum(), weight=1.0)
        with pytest.raises(ConfigurationError, match=r"called twice for a micro-batch.*loss1 \+ loss2"):
            accelerator.backward(model(torch.ones(1, 1)).sum(), weight=3.0)


def test_both_ways_to_say_it() -> None:
    """`backward(weight=)` and `prepare(batch_weight=)` together are an error."""
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(nn.Linear(1, 1), DataLoader(data(), 2), batch_weight=lambda batch: 1.0)
    with pytest.raises(ConfigurationError, match=r"backward\(weight=\) and prepare\(batch_weight=\) set the same thing"):
        accelerator.backward(model(torch.ones(1, 1)).sum(), weight=1.0)
    with pytest.raises(ConfigurationError, match=r"prepare\(batch_weight=\) needs a loader"):
        accelerator.prepare(nn.Linear(1, 1), batch_weight=lambda batch: 1.0)


def test_float16_does_not_overflow_by_large_weights() -> None:
    """Large weights do not overflow: a loss is scaled by its expected share of the window, not by its weight."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, precision=Precision("16-mixed", init_scale=2.0**10))
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for weight in (60000.0, 20000.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum() * weight / 60000.0, weight=weight)
            updated = optimizer.step()
    assert updated
    assert model.weight.grad.item() == pytest.approx((60000.0 * 1.0 + 20000.0 / 3) / 80000.0, rel=1e-3)
