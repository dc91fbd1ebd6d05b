"""A save compares what the ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance.toy import AllReduceStrategy
from helpers.resume.checkpoints import about
from helpers.resume.saving import Adam
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.threaded import run_threads, try_threads
from torch import Tensor, nn

from trainkit import Accelerator, Callback
from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.checkpoint_plan import CheckpointContent
from trainkit.distributed.world import World
from trainkit.errors import CheckpointError
from trainkit.state.plan_checkpoint import checksums, plan_checkpoint
from trainkit.tagged_json.tensors import ShardedTensor


def content(counter: int = 1, **changes: Tensor) -> CheckpointContent:
    """A content of a parameter, a buffer and a moment, for a save with this number; `changes` replaces some."""
    values = {"weight": torch.arange(6.0), "mean": torch.zeros(2), "moment": torch.ones(6), **changes}
    tensors = {
        "model": {"weight": values["weight"], "mean": values["mean"]},
        "optimizer": {"0/weight/exp_avg": values["moment"]},
    }
    return CheckpointContent(
        tensors, {"models": [{"trained": {"weight": True}, "fingerprint": None}]}, about(save_counter=counter)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [0, 1, 5, 16])
def test_every_element_counts(dtype: torch.dtype, size: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    before = checksums(content(weight=tensor))["weight"]
    for index in range(size):
        changed = tensor.clone()
        changed[index] = 1
        assert checksums(content(weight=changed))["weight"] != before, index


@pytest.mark.parametrize("index", [0, 511 * 2, 512 * 2, 100_000, 16 * 512 * 2 * 13 - 1, 16 * 512 * 2 * 13])
def test_the_parts_of_a_large_tensor(index: int) -> None:
    """Of a large tensor the first save reads all elements, and later ones read each of them once in 16 saves."""
    zeros = torch.zeros(16 * 512 * 2 * 13 + 3)
    changed = zeros.clone()
    changed[index] = 1
    found = [checksums(content(n, weight=zeros)) != checksums(content(n, weight=changed)) for n in range(1, 34)]
    assert found[0]
    last = index >= 16 * 512 * 2 * 13  # behind the last whole block, which is always read
    assert sum(found[1:17]) == sum(found[17:]) == (16 if last else 1)


def test_a_view_of_any_layout() -> None:
    whole = torch.arange(13.0)
    for view in (whole[1:12], whole[1::3], whole[:12].view(3, 4).t(), torch.tensor(1.0)):
        assert checksums(content(weight=view)) == checksums(content(weight=view.clone()))


def test_buffers_and_sharded_tensors_are_not_compared() -> None:
    sharded = ShardedTensor([6], torch.float32, lambda owner: None)
    assert checksums(content(weight=sharded)).keys() == {"optimizer: 0/weight/exp_avg"}
    assert checksums(content()) == checksums(content(mean=torch.ones(2)))


def draft(world: World, name: str, values: list[Tensor]) -> None:
    plan_checkpoint(world, content(**{name: values[world.rank]}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weight", "'weight' has other values on rank 1, 3 than on rank 0 (1 of 2 parameters and optimizer states differ)"),
        ("moment", "'optimizer: 0/weight/exp_avg' has other values on rank 1, 3 than on rank 0"),
    ],
)
def test_ranks_that_differ(name: str, said: str) -> None:
    for error in try_threads(4, draft, name, [torch.zeros(6), torch.ones(6), torch.zeros(6), torch.full((6,), 2.0)]):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith(said)


def test_another_layout_is_left_to_the_commit() -> None:
    run_threads(2, draft, "weight", [torch.zeros(6), torch.ones(7)])


class LocalSGD(AllReduceStrategy):
    """Each rank trains alone."""

    def reduce_gradients(self, *_: Any) -> None:
        pass


class AverageBeforeSave(Callback):
    """The one of the page on custom strategies."""

    def on_save_checkpoint(self, trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        for tensor in [*module.parameters(), *(value for state in states for value in state.values())]:
            if isinstance(tensor, Tensor):
                tensor.data.copy_(trainer.strategy.mean(tensor.data))


class AverageParameters(Callback):
    def on_save_checkpoint(self, trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        for p in module.parameters():
            p.data.copy_(trainer.strategy.mean(p.data))


def fit(strategy: Any, *callbacks: Callback, sizes: tuple[int, ...] = (16,)) -> Adam:
    module = Adam()
    trainer = make_trainer(*callbacks, strategy=strategy, accelerator="cpu", max_steps=2)
    trainer.fit(module, tiny_loader(*sizes))
    trainer.save_checkpoint("saved")
    return module


@pytest.mark.world_size(2)
def test_a_strategy_whose_ranks_differ(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'layer\.weight' has other values on rank 1 than on rank 0 \(6 of 8 "):
        fit(LocalSGD())
    assert not Path("saved").exists()


@pytest.mark.world_size(2)
def test_only_the_optimizer_differs() -> None:
    with pytest.raises(CheckpointError, match=r"'optimizer: 0/layer\.weight/exp_avg' has other values on rank 1 .* \(4 of 8 "):
        fit(LocalSGD(), AverageParameters())


@pytest.mark.world_size(2)
def test_ranks_that_average_before_the_save() -> None:
    module = fit(LocalSGD(), AverageBeforeSave())
    assert torch.equal(open_checkpoint("saved").read().tensors["model"]["layer.weight"], module.layer.weight)


@pytest.mark.world_size(2)
def test_ddp_has_the_same_bits_on_all_ranks() -> None:
    fit("ddp", sizes=(22, 4))  # with a short last batch, which only one rank has


@pytest.mark.world_size(2)
def test_your_own_training_loop() -> None:
    """The main process writes alone, so a checkpoint has its values and no mix; the next verb says that others differ."""
    accelerator = Accelerator(cpu=True)
    module = nn.Linear(2, 1)
    accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with torch.no_grad():
        module.bias += accelerator.process_index
    accelerator.save_state("saved")
    with pytest.raises(CheckpointError, match="'bias' has other values on rank 1"):
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save_state("saved")  # alone: nothing to compare with
    accelerator.wait_for_everyone()
    saved = open_checkpoint("saved").read().tensors["model"]["bias"]
    assert torch.equal(saved, module.bias) == accelerator.is_main_process
