"""`FSDPStrategy` under manual optimization, and in your own training loop."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.fsdp.stack import Headed, Stack
from helpers.runs.parity import Case, Noisy, trained
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import WorldError, run_world
from helpers.zero.gan import Gan, gan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from trainkit import Accelerator, Callback, Trainer
from trainkit.strategies import DDPStrategy, FSDPStrategy


@pytest.mark.parametrize("precision", ["32-true", pytest.param("16-mixed", marks=pytest.mark.fsdp)])
def test_a_gan(precision: str) -> None:
    """Two submodules, each with an optimizer; the loss of one leaves gradients in the other."""
    limit = 2e-6 if precision == "32-true" else 5e-3
    for mine, theirs in zip(run_world(2, gan, "fsdp", precision), run_world(2, gan, "ddp", precision), strict=True):
        assert len(mine) == 8
        assert [x for pair in mine for x in pair] == pytest.approx([x for pair in theirs for x in pair], rel=limit)


class Reducing(Callback):
    """Calls a collective in a hook that only processes with a micro-batch call."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.mean(outputs["loss"])


def reduces_in_a_hook(samples: int) -> int:
    strategy = FSDPStrategy(wrap="Linear", timeout=timedelta(seconds=5))
    trainer = make_trainer(Reducing(), strategy=strategy, max_epochs=1)
    trainer.fit(TinyModule(), tiny_loader(samples))
    return trainer.global_step


def test_a_collective_in_a_hook_of_a_batch_that_not_all_ranks_have() -> None:
    """The run ends after the timeout, and the traceback names the hook; `docs/reference/hooks.md` says where it may be."""
    assert run_world(2, reduces_in_a_hook, 16) == [2, 2]
    with pytest.raises(WorldError, match=r"in on_train_batch_end\n(.*\n)*.*Timed out waiting 5000ms"):
        run_world(2, reduces_in_a_hook, 12)


class Speaking(Headed):
    """Has a method that calls its layers several times, like `generate` of a language model."""

    def generate(self, x: Tensor, length: int) -> list[float]:
        found = []
        for _ in range(length):
            found.append(float(self(x).mean()))
            x = x + found[-1]
        return found


def speak(strategy: Any) -> list[float]:
    """Train for three steps, and generate before and after each."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = Speaking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Noisy(12), 2))
    found: list[float] = []
    model.eval()
    for batch in loader:
        with torch.no_grad():
            found += model.generate(torch.ones(1, 6), length=2)
        loss = (model(batch["x"].float()) - batch["y"].float()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found += model.generate(torch.ones(1, 6), length=2)
    accelerator.free_memory()
    return found


def test_methods_other_than_forward_see_each_optimizer_step() -> None:
    mine, theirs = run_world(2, speak, FSDPStrategy()), run_world(2, speak, "ddp")
    assert len(set(theirs[0])) == len(theirs[0]) == 8
    for rank in range(2):
        assert mine[rank] == pytest.approx(theirs[rank], rel=2e-6)


class Adapted(Stack):
    """Trains adapters; the weights of the blocks are frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        import peft

        torch.manual_seed(2)
        adapters = peft.LoraConfig(r=2, target_modules=["inner"], init_lora_weights=False)
        self.net = peft.get_peft_model(self.net, adapters)


@pytest.mark.fsdp
def test_adapters_of_peft() -> None:
    case = Case(samples=16, make=Adapted, options={"optimizer": "adamw"}, window=4)
    mine, theirs = (trained(case, 2, strategy=strategy) for strategy in (FSDPStrategy(), DDPStrategy()))
    assert len(theirs.losses) == 16
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-11)
    assert len(theirs.parameters[-1]) > 8
    for own, other in zip(mine.parameters[-1], theirs.parameters[-1], strict=True):
        assert torch.allclose(own, other, rtol=1e-11, atol=1e-13)


class Tied(Gan):
    """Its two submodules share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator[2].weight = self.generator[2].weight


def tied() -> None:
    trainer = Trainer(strategy="fsdp", accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    trainer.fit(Tied(), DataLoader(Noisy(4), 2))


def late() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(Speaking())
    model(torch.ones(1, 6))
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))


def manual() -> None:
    Accelerator(cpu=True, strategy="fsdp").prepare(Gan())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (tied, "Sequential shares a parameter with another part of Tied"),
        (late, "SGD was made while the model had whole parameters"),
        (manual, "Gan.automatic_optimization is False, which is for the Trainer"),
    ],
)
def test_what_would_train_something_else_is_an_error(function: Any, text: str) -> None:
    with pytest.raises(WorldError, match=text):
        run_world(2, function)


def changed() -> list[float]:
    """Rank 0 changes a sharded parameter and a scalar, which is whole on each rank."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = nn.Sequential(nn.Linear(3, 1))
    model.scale = nn.Parameter(torch.tensor(1.0))
    accelerator.prepare(model)
    with accelerator.strategy.gathered_parameters(model, modified=True), torch.no_grad():
        if accelerator.is_main_process:
            model.scale.fill_(5.0)
            model[0].bias.fill_(7.0)
    with accelerator.strategy.gathered_parameters(model):
        found = [float(model.scale), float(model[0].bias)]
    accelerator.free_memory()
    return found


def test_changes_of_rank_0_reach_all_ranks() -> None:
    assert run_world(2, changed) == [[5.0, 7.0], [5.0, 7.0]]


class Split(nn.Module):
    """A layer whose rows are on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def parallelize(self, mesh: DeviceMesh) -> None:
        parallelize_module(self, mesh["tensor"], {"layer": ColwiseParallel(output_layouts=Replicate())})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def samples() -> tuple[list[float], list[float], list[float]]:
    """What `gather_for_metrics` returns for tensors and for objects, and what `gather` returns."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy(tensor_parallel=2, wrap=False))
    _, loader = accelerator.prepare(Split(), DataLoader(torch.arange(5.0)[:, None], 2))
    tensors, objects, all_ranks = [], [], []
    for batch in loader:
        tensors += accelerator.gather_for_metrics(batch).flatten().tolist()
        objects += accelerator.gather_for_metrics(batch.flatten().tolist(), use_gather_object=True)
        all_ranks += accelerator.gather(batch).flatten().tolist()
    accelerator.free_memory()
    return tensors, objects, all_ranks


def test_metrics_have_each_sample_once_with_tensor_parallelism() -> None:
    for tensors, objects, all_ranks in run_world(2, samples):
        assert tensors == objects == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert sorted(all_ranks) == sorted(2 * tensors)
