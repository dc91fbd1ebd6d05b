"""Windows of your own training loop with several forwards and backward passes train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.parity import Noisy
from helpers.worlds.worlds import WorldError, run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Accelerator, Trainer, TrainModule
from trainkit.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Scaled(nn.Module):
    """Two blocks, which are units, and a scalar, which is whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def two_forwards(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    first, second = model(x).square().mean(), model(x + 1).square().mean()
    accelerator.backward(first)
    accelerator.backward(second)


def two_losses(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    accelerator.backward(model(x).square().mean())
    accelerator.backward(model(x - 1).abs().mean())


def same_forward(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)


def loss_and_none(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    accelerator.backward(model(x).square().mean())
    model(x)
    accelerator.backward(None)


def none(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    model(x)
    accelerator.backward(None)


def none_on_one_rank(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    accelerator.backward(loss if accelerator.is_main_process else None)


def after_evaluation(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x + 1)
    accelerator.backward(loss)


LOOPS = {loop.__name__: loop for loop in (two_forwards, two_losses, same_forward, loss_and_none, none, none_on_one_rank)}
LOOPS["after_evaluation"] = after_evaluation


def trained(strategy: Any, loop: str, window: int, batch: int = 2) -> list[Any]:
    """The parameters after three optimizer steps with weight decay."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=window)
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    data = torch.randn(12 * window, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch))
    for x in loader:
        with accelerator.accumulate(model):
            LOOPS[loop](accelerator, model, x)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("loop", LOOPS)
def test_as_with_the_same_global_batches(loop: str) -> None:
    """As one process with batches of twice the size, or as DDP if one rank has no loss. DDP refuses two of these loops."""
    for window in (1, 2):
        if loop == "none_on_one_rank":
            expected = run_world(2, trained, "ddp", loop, window)[0]
        else:
            expected = trained("single", loop, window, 4)
        start = [parameter.detach() for parameter in Scaled().parameters()]
        assert all(map(torch.equal, expected, start)) == (loop == "none")
        for found in run_world(2, trained, FSDPStrategy(), loop, window):
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def cleared() -> list[bool]:
    """Which parameters of the head change in a step before which the gradient of its bias is cleared, as DINO does."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy())
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.head.parameters()]
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
    model.module.head.bias.grad = None
    optimizer.step()
    accelerator.free_memory()
    return [not torch.equal(a, b) for a, b in zip(before, accelerator.unwrap_model(model).head.parameters(), strict=True)]


def test_a_gradient_that_the_user_clears_is_no_missing_one() -> None:
    assert run_world(2, cleared) == [[True, False]] * 2


def given_up(strategy: Any, first: float) -> list[Any]:
    """The parameters after a window that was given up, and one that was not."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.full((2, 4), 0.1 * (1 + accelerator.process_index), dtype=torch.float64)
    with accelerator.no_sync(model):
        accelerator.backward(model(x * first).sum())
    optimizer.zero_grad()
    accelerator.backward(model(x).sum())
    optimizer.step()
    accelerator.free_memory()
    return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


def test_zero_grad_drops_gradients_that_are_not_reduced() -> None:
    expected = run_world(2, given_up, "ddp", 1.0)
    for first in (1.0, 5.0):
        for mine, theirs in zip(run_world(2, given_up, FSDPStrategy(), first), expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def two_models() -> None:
    """Rank 0 has no loss of the discriminator, whose loss on rank 1 does not depend on the generator."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy())
    generator, discriminator = accelerator.prepare(Scaled(), Scaled())
    fake = generator(torch.ones(2, 4, dtype=torch.float64))
    loss = discriminator(fake.detach().expand(2, 4)).sum()
    accelerator.backward(None if accelerator.is_main_process else loss)


def test_no_loss_of_one_of_several_models() -> None:
    with pytest.raises(WorldError, match="several models were called since the last backward pass"):
        run_world(2, two_models)


def two_optimizers() -> list[bool]:
    """Whether two optimizers with weight decay change their parameters after a window without a loss."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy())
    model = Scaled()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, weight_decay=0.1) for part in (model.blocks, model.head)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    model(torch.ones(2, 4, dtype=torch.float64))
    accelerator.backward(None, weight=0)
    for optimizer in optimizers:
        optimizer.step()
    accelerator.free_memory()
    after = accelerator.unwrap_model(model).parameters()
    return [torch.equal(one, other) for one, other in zip(before, after, strict=True)]


def test_no_optimizer_steps_after_a_window_without_a_loss() -> None:
    for found in run_world(2, two_optimizers):
        assert all(found)


class Heads(TrainModule):
    """Its second part has two heads, which are units; a step calls one of them. A parameter belongs to no part."""

    def __init__(self, closures: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.body, self.heads = nn.Linear(6, 4), Choosing()
        self.shift = nn.Parameter(torch.ones(1, 6))
        self.closures, self.stepped = closures, 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for place, optimizer in enumerate(optimizers):

            def closure(place: int = place, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = self.heads(self.body(batch["x"].to(self.shift.dtype) + self.shift), place).square().mean()
                self.manual_backward(loss)
                return loss

            if self.closures:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            self.stepped += 1

    def configure_optimizers(self) -> Any:
        rest = [*self.body.parameters(), self.shift]
        return [torch.optim.SGD([*rest, *head.parameters()], lr=0.01) for head in self.heads.each]


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x: Tensor, place: int) -> Tensor:
        return self.each[place](x)


def heads(closures: bool, precision: str) -> int:
    module = Heads(closures)
    trainer = Trainer(
        strategy=FSDPStrategy(wrap="heads.each.*"),
        accelerator="cpu",
        max_epochs=1,
        precision=precision,
        logger=False,
        seed=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Noisy(8), 2))
    return module.stepped


def test_a_manual_step_may_call_some_of_the_units() -> None:
    for closures, precision in ((False, "32-true"), (True, "32-true"), (False, "bf16-true")):
        assert run_world(2, heads, closures, precision) == [4, 4]
