"""Weights that are loaded into sharded models: each rank reads its shards, and no process holds the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fsdp.allocations import Allocations
from helpers.fsdp.stack import Stack
from helpers.runs.parity import Case, Noisy, Record, RegressionModule, train
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import strategy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainkit import Accelerator, Callback, load_checkpoint_in_model
from trainkit.errors import ConfigurationError, StateMismatchError
from trainkit.strategies import FSDPStrategy

WIDTH = 128


class Block(nn.Module):
    """Two layers with large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, WIDTH), *(Block() for _ in range(8)), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 6))


class Large(Stack):
    """Created with or without values."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(**options)
        with torch.device(device):
            self.net = network()


class Measuring(Callback):
    """Marks when everything is loaded, and saves at the end."""

    def __init__(self, held: Allocations, folder: Path | None = None) -> None:
        self.held, self.folder = held, folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.held.mark("loaded")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.folder is not None:
            trainer.save_checkpoint(self.folder)


def sizes(module: nn.Module) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest one."""
    own = [p.nbytes for p in module.parameters()]
    return sum(own), max(own)


def fit(folder: Path) -> int:
    """Train, and resume with a module without values; returns the peak until the first step of the second run."""
    for device, copy in (("cpu", folder), ("meta", None)):
        with Allocations() as held:
            trainer = make_trainer(Measuring(held, copy), strategy="fsdp", max_epochs=1 if copy else 2)
            loader = DataLoader(Noisy(8), batch_size=2)
            module = Large(device, optimizer="adamw")
            trainer.fit(module, loader, ckpt_path=None if copy else folder)
        assert {p.device.type for p in module.parameters()} == {device}  # whole again, or without values again
    return held.peaks["loaded"]


def test_no_process_holds_the_whole_model_when_it_resumes(run_dir: Path) -> None:
    whole, largest = sizes(network())
    shards = 3 * whole // 2  # of parameters and of AdamW's state
    for peak in run_world(2, fit, run_dir / "saved"):
        assert shards < peak < shards + largest


def load(folder: str, whole: str) -> dict[str, Any]:
    """Prepare a model without values, load it, and train."""
    found: dict[str, Any] = {}
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    with torch.device("meta"):
        net = network()
    with Allocations() as held:
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        load_checkpoint_in_model(model, folder, strict=True)
        held.mark("loaded")
    found["peak"] = held.peaks["loaded"]
    expected = load_file(whole)
    with accelerator.strategy.gathered_parameters(net):
        found["loaded"] = all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    accelerator.backward(model(torch.ones(4, 6)).square().mean())
    optimizer.step()
    with accelerator.strategy.gathered_parameters(net):
        found["trained"] = not torch.equal(net[-1].weight, expected["10.weight"])
    load_checkpoint_in_model(accelerator.unwrap_model(model), whole)  # also while it is trained, and without its wrapper
    with accelerator.strategy.gathered_parameters(net):
        found["again"] = all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    accelerator.free_memory()
    return found


def test_load_checkpoint_in_model(run_dir: Path) -> None:
    """Each rank reads its shards, from one file and from several, and nothing else is allocated."""
    net = network()
    whole, largest = sizes(net)
    net[-2].running_mean.fill_(3.0)
    Accelerator().save_model(net, run_dir / "parts", max_shard_size="300KB")
    assert len(list((run_dir / "parts").glob("*.safetensors"))) > 4
    save_file(net.state_dict(), run_dir / "whole.safetensors")
    for found in run_world(2, load, str(run_dir / "parts"), str(run_dir / "whole.safetensors")):
        assert (found["loaded"], found["trained"], found["again"]) == (True, True, True)
        assert whole // 2 <= found["peak"] < whole // 2 + largest


@pytest.mark.world_size(2)
def test_what_cannot_be_loaded_into_shards(run_dir: Path) -> None:
    """An error, after which the model is as before."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy(wrap=False))
    net = nn.Sequential(nn.Linear(3, 4))
    model = accelerator.prepare(net)
    before = net[0].weight.full_tensor()
    for name, tensor in (("fits", torch.ones(4, 3)), ("other", torch.ones(3, 3))):
        if accelerator.is_main_process:
            save_file({"0.weight": tensor, "0.bias": torch.ones(4)}, f"{name}.safetensors")
    accelerator.wait_for_everyone()
    for options, text in (
        ({"device_map": {"": "cpu"}}, "strategy='fsdp', which has placed its shards. Remove device_map, or load"),
        ({"device_map": {"": "cpu"}, "dtype": torch.bfloat16}, "Remove device_map and dtype, or load"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            load_checkpoint_in_model(model, "fits.safetensors", **options)
    with pytest.raises(StateMismatchError, match=r"0.weight: shape \(3, 3\) in the checkpoint, \(4, 3\) in the model"):
        load_checkpoint_in_model(model, "other.safetensors")
    assert torch.equal(net[0].weight.full_tensor(), before)
    load_checkpoint_in_model(model, "fits.safetensors")
    assert torch.equal(net[0].weight.full_tensor(), torch.ones(4, 3))
    by_hand = fully_shard(nn.Sequential(nn.Linear(3, 4)), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigurationError, match="the parameters are sharded, and not by Accelerator.prepare"):
        load_checkpoint_in_model(by_hand, "fits.safetensors")


class Tied(Stack):
    """The embedding and the head of a language model have the same weight."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(1)
        with torch.device(device):
            self.net = nn.Sequential(nn.Embedding(24, 6), *(type(block)() for block in self.net[1:]), nn.Linear(6, 24))
        self.net[-1].weight = self.net[0].weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["id"]), batch["id"] // 2)


class Regression(RegressionModule):
    """With tensor parallelism, its layers are sharded."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__(**options)
        self.net.to(device)


class Saving(Callback):
    """Saves after four optimizer steps, and stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.accelerator.sync_gradients:
            trainer.save_checkpoint(self.folder)
            trainer.should_stop = True


def resume(make: Any, kind: str, folder: Path) -> list[Record]:
    """An uninterrupted run, and two that resume one that stopped: with a module that has values, and with one without."""
    cases = [
        Case(samples=24, window=4, make=partial(make, device=device), options={"optimizer": "adamw"})
        for device in ("cpu", "meta")
    ]
    train(cases[0], Saving(folder), strategy=strategy(kind))
    resumed = [train(case, strategy=strategy(kind), ckpt_path=str(folder)) for case in cases]
    return [train(cases[0], strategy=strategy(kind)), *resumed]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        pytest.param(Tied, "fsdp", marks=pytest.mark.fsdp),
        (Regression, "fsdp-tensor"),
        pytest.param(Regression, "fsdp-cpu", marks=pytest.mark.fsdp),
        pytest.param(Regression, "fsdp-replicas", marks=pytest.mark.fsdp),
    ],
)
def test_exact_resume_with_and_without_values(make: Any, kind: str, run_dir: Path) -> None:
    """With dropout, in the middle of an epoch. Tied weights stay tied."""
    for whole, *resumed in run_world(2, resume, make, kind, run_dir / "saved"):
        expected = {key: loss for key, loss in whole.losses.items() if key[0] >= 4}
        assert len(expected) == (8 if kind == "fsdp-tensor" else 4)
        assert len(whole.parameters[-1]) == (14 if make is Tied else 4)
        for record in resumed:
            assert record.losses == expected
            assert all(torch.equal(a, b) for a, b in zip(record.parameters[-1], whole.parameters[-1], strict=True))
