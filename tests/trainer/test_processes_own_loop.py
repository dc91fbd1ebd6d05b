"""Your own training loop on several processes gives the same parameters as the Trainer, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.runs.parity import Noisy, RegressionModule
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import WorldError, run_world, start_world
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit import Accelerator, seed_everything
from trainkit.strategy import Strategy

EPOCHS = 2


def loader(samples: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Noisy(samples), 4, shuffle=True)


def parameters(module: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def by_trainer(samples: int, accumulate: int, precision: str) -> tuple[list[Tensor], int]:
    module = RegressionModule(optimizer="adamw", schedule=True)
    trainer = make_trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05,
        seed=3,
    )
    trainer.fit(module, loader(samples))
    return parameters(module), trainer.global_step


def by_own_loop(samples: int, accumulate: int, precision: str) -> tuple[list[Tensor], int]:
    seed_everything(3)
    module = RegressionModule()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    accelerator = Accelerator(
        precision=precision,
        gradient_accumulation_steps=accumulate,
        even_batches=False,
        step_scheduler_with_optimizer=False,
    )
    model, prepared, batches = accelerator.prepare(module.net, optimizer, loader(samples))
    steps = EPOCHS * -(-len(batches) // accumulate)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model), accelerator.autocast():
                dtype = next(module.parameters()).dtype
                mask = batch["mask"].to(dtype)
                out = model(batch["x"].to(dtype)) - batch["y"].to(dtype)
                accelerator.backward((out.square() * mask).sum() / mask.sum())
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            prepared.step()
            if accelerator.sync_gradients:
                scheduler.step()
            prepared.zero_grad()
    return parameters(module), accelerator.updates


@pytest.mark.parametrize("samples", [48, 42, 50, 6])  # full windows; a short last batch; uneven windows; two batches
@pytest.mark.parametrize(
    "size, accumulate, precision",
    [(1, 2, "32-true"), (2, 1, "64-true"), (2, 2, "32-true"), (3, 2, "32-true"), (3, 1, "bf16-mixed")],
)
def test_own_loop(samples: int, size: int, accumulate: int, precision: str) -> None:
    trainers = run_world(size, by_trainer, samples, accumulate, precision)
    loops = run_world(size, by_own_loop, samples, accumulate, precision)
    updates = EPOCHS * math.ceil(samples / (4 * size * accumulate))
    assert {steps for _, steps in (*trainers, *loops)} == {updates}
    for one, other in zip(trainers, loops, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one[0], trainers[0][0], strict=True))


def by_lbfgs(samples: int, batch_size: int) -> tuple[list[Tensor], int]:
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 1).double()
    data = torch.randn(samples, 3, dtype=torch.float64) * torch.logspace(-1, 1, samples, dtype=torch.float64)[:, None]
    targets = data.sin().sum(1, keepdim=True)
    accelerator = Accelerator()
    net, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe"),
        DataLoader(torch.utils.data.TensorDataset(data, targets), batch_size),
    )
    calls = 0
    for _ in range(3):
        for inputs, wanted in batches:

            def closure(inputs: Tensor = inputs, wanted: Tensor = wanted) -> Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(net(inputs), wanted)
                accelerator.backward(loss)
                return loss

            with accelerator.accumulate(net):
                optimizer.step(closure)
    return parameters(model), calls


@pytest.mark.parametrize("samples", [16, 12])  # equal batches; rank 1 has half as many samples as rank 0
def test_a_line_search_takes_the_same_steps_on_all(samples: int) -> None:
    """The line search depends on the loss, so the ranks must average it to evaluate the closure equally often."""
    (single, calls), *ranks = run_world(1, by_lbfgs, samples, 16) + run_world(2, by_lbfgs, samples, 8)
    for found, theirs in ranks:
        assert theirs == calls
        assert all(torch.equal(a, b) for a, b in zip(found, ranks[0][0], strict=True))
        torch.testing.assert_close(found, single, rtol=1e-9, atol=1e-12)


def evaluated_on_the_main_process() -> float:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    if accelerator.is_main_process:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(4, 2))
    return float(accelerator.strategy.world.sums([1.0])[0])


def test_a_forward_on_the_main_process_alone() -> None:
    """A forward in eval mode on one rank does not wait for the other rank."""
    assert run_world(2, evaluated_on_the_main_process) == [2.0, 2.0]


def one_fails() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    for step in range(1000):
        if accelerator.strategy.rank == 1 and step == 3:
            raise ValueError("this loop fails")
        accelerator.backward(model(torch.ones(4, 2)).sum())


def test_one_loop_fails() -> None:
    ends = start_world(2, one_fails).ends(15)
    assert not any(fine for fine, _ in ends)
    assert "ValueError: this loop fails" in ends[1][1]


def test_one_device_is_asked_for() -> None:
    """A strategy for one device runs by itself in each process."""
    assert run_world(2, alone) == [1, 1]


def alone() -> int:
    return Accelerator(strategy=Strategy("cpu")).strategy.world_size


@pytest.mark.world_size(2)
def test_a_model_is_wrapped_once() -> None:
    accelerator, model = Accelerator(), torch.nn.Linear(2, 2)
    prepared = accelerator.prepare(model)
    assert prepared is not model
    assert accelerator.prepare(model) is accelerator.prepare(prepared) is prepared


def test_worlds_can_fail() -> None:
    """`run_world` raises the error of a process that fails."""
    with pytest.raises(WorldError, match="ValueError: this loop fails"):
        run_world(2, one_fails)
