"""Tensor parallelism: `parallelize` shards the layers of a group of ranks, which read the same data."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import PLAN, assert_like_one_process, joined_fsdp
from helpers.runs.parity import Noisy, RegressionModule
from helpers.runs.replicas import Net, by_hand, flat, inputs, over_strategy
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader

from trainkit import Trainer, TrainModule
from trainkit.errors import MissingMethodError, ModuleError
from trainkit.strategies import FSDPStrategy


class Layers(Net):
    """Two layers in tensor parallel; the last one has fewer rows than ranks, and a bias that each rank has."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)

    def parallelize(self, mesh: Any) -> None:
        parallelize_module(self, mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()})


class TiedLayers(Layers):
    """The first and the last layer have the same weight; the one between them is not in tensor parallel."""

    plans = ("column", "column")

    def __init__(self) -> None:
        super().__init__(4)
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        for i, parameter in enumerate((*self.middle.parameters(), self.last.bias)):
            parameter.data = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) / (i + 1)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())

    def parallelize(self, mesh: Any) -> None:
        made = {
            "column": ColwiseParallel(output_layouts=Replicate()),
            "row": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(self, mesh["tensor"], dict(zip(("first", "last"), (made[p] for p in self.plans), strict=True)))


class Untied(TiedLayers):
    """Plans that shard the tied weight in two ways."""

    plans = ("column", "row")


class Nothing(Net):
    """Its plan matches no layer."""

    def parallelize(self, mesh: Any) -> None:
        pass


class Empty(TrainModule):
    """It has no method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Heads(nn.Module):
    """Each rank has one of two heads, with a norm in it and a norm after it."""

    def __init__(self, planned: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.planned = planned
        self.split, self.norm, self.join, self.after = nn.Linear(1, 8), nn.RMSNorm(4), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.split(x).unflatten(-1, (-1, 4))
        return self.after(self.join(self.norm(heads).flatten(-2)))

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        return (self(inputs(batch, torch.float64)[:, :1]) * torch.arange(4.0, dtype=torch.float64)).square().mean()

    def parallelize(self, mesh: Any) -> None:
        plan = {"split": ColwiseParallel(), "join": RowwiseParallel()}
        if self.planned:
            plan |= {"split": ColwiseParallel(use_local_output=False), "norm": SequenceParallel(sequence_dim=1)}
        parallelize_module(self, mesh["tensor"], plan)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def check_norm(data: int) -> None:
    """A norm counts what tensor-parallel ranks have alike once."""
    plain, strategy = Layers().double(), joined_fsdp(tensor_parallel=2)
    module = strategy.prepare_module(Layers().double())
    strategy.backward(strategy.step_function(module, module, "training_step")(1 + strategy.data_world.rank, 0))
    sum(plain.training_step(item, 0) for item in range(1, data + 1)).div(data).backward()
    for norm_type in (2.0, 1.0, float("inf")):
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        norm = strategy.clip_grad_norm_(module.parameters(), 1e9, norm_type)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
    strategy.teardown()


def check(data: int) -> None:
    """Training, ties and norms.

    Args:
        data: Number of ranks that read different data.
    """
    for accumulate in ("once", "reshard"):
        assert_like_one_process(Layers, PLAN, tensor_parallel=2, accumulate=accumulate)
    for optimizer in (adamw, lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True)):
        assert_like_one_process(Layers, PLAN, optimizer, tensor_parallel=2, wrap=False)
    trained: Any = assert_like_one_process(TiedLayers, PLAN, tensor_parallel=2, wrap=False)
    assert trained.first.weight is trained.last.weight
    check_norm(data)


@pytest.mark.world_size(2)
def test_tensor_parallel_alone() -> None:
    check(data=1)


@pytest.mark.world_size(4)
def test_tensor_parallel_and_sharded() -> None:
    check(data=2)


@pytest.mark.world_size(2)
def test_what_cannot_be_parallelized() -> None:
    for module, error, message in (
        (Net(), MissingMethodError, r"FSDPStrategy\(tensor_parallel=2\) needs Net.parallelize"),
        (Empty(), MissingMethodError, "needs Empty.parallelize"),
        (Nothing(), ModuleError, "Nothing.parallelize has sharded no parameter"),
        (Untied(), ModuleError, "parallelize shards tied parameters differently: weight of Linear"),
    ):
        with pytest.raises(error, match=message):
            joined_fsdp(tensor_parallel=2).prepare_module(module)


@pytest.mark.world_size(2)
def test_parameters_that_no_plan_shards_in_a_part_of_the_activations() -> None:
    """Each rank has a part of the gradient of a norm over its heads, and nothing adds them up. In a plan, they are."""
    strategy = joined_fsdp(tensor_parallel=2)
    with pytest.raises(ModuleError, match=r"^norm\.weight: the ranks of a tensor-parallel group have different gradients"):
        over_strategy(strategy, PLAN, Heads(planned=False).double())  # type: ignore[arg-type]
    strategy.teardown()
    strategy = joined_fsdp(tensor_parallel=2)
    module = over_strategy(strategy, PLAN, Heads(planned=True).double())  # type: ignore[arg-type]
    strategy.teardown()
    assert flat(module) == pytest.approx(flat(by_hand(PLAN, Heads(planned=False).double())), rel=1e-10, abs=1e-12)


@pytest.mark.world_size(2)
def test_each_of_several_models_is_checked() -> None:
    """The second model has parameters of the same names, and no gradients."""
    strategy = joined_fsdp(tensor_parallel=2)
    first, _ = (strategy.wrap(strategy.prepare_module(Heads(planned=False).double())) for _ in range(2))
    loss = (first(inputs(1, torch.float64)[:, :1]) * torch.arange(4.0, dtype=torch.float64)).square().mean()
    with pytest.raises(ModuleError, match=r"^norm\.weight: the ranks of a tensor-parallel group"):
        strategy.backward(loss)
    strategy.teardown()


@pytest.mark.world_size(2)
def test_the_module_afterwards() -> None:
    """It is whole, has no hooks, and can be copied, pickled, called by one rank, and trained again."""
    module = Layers().double()
    for _ in range(2):
        strategy = joined_fsdp(tensor_parallel=2)
        over_strategy(strategy, PLAN, module, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))  # type: ignore[arg-type]
        assert all(isinstance(p, DTensor) for p in module.parameters())
        strategy.teardown()
        assert not any(isinstance(p, DTensor) for p in module.parameters())
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        x = inputs(2, torch.float64)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert strategy.rank == 1 or torch.equal(other(x), module(x))
    again = by_hand([*PLAN, *PLAN], Layers().double(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert flat(module) == pytest.approx(flat(again), rel=1e-10)


class Evaluated(RegressionModule):
    """It has dropout; it also logs a sum, and returns predictions."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("samples", float(len(batch["id"])), reduce_fx="sum", on_epoch=True)


def evaluate(path: Path, several: bool) -> tuple[dict[str, float], list[float]]:
    strategy: Any = FSDPStrategy(tensor_parallel=2, wrap=False, device="cpu") if several else "auto"
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        seed=5,
        global_batch_size=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=path,
    )
    module = Evaluated()
    trainer.fit(module, DataLoader(Noisy(24), 2, shuffle=True), DataLoader(Noisy(13), 2))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    del metrics["train_loss_step"]  # of the last micro-batch of this rank
    (tested,) = trainer.validate(module, DataLoader(Noisy(7), 2), verbose=False)
    return {**metrics, **{f"again/{name}": float(value) for name, value in tested.items()}}, flat(module)


def test_metrics_and_dropout_are_those_of_one_process(run_dir: Path) -> None:
    """Each sample counts once, although two ranks read it; dropout is the same in both."""
    expected, parameters = evaluate(run_dir, several=False)
    assert expected["samples"] == 13
    for metrics, found in run_world(4, evaluate, run_dir, True):
        assert metrics == pytest.approx(expected, rel=1e-10)
        assert found == pytest.approx(parameters, rel=1e-10, abs=1e-13)
