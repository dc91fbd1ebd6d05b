"""The verbs of a strategy for values of users: `broadcast`, `reduce`, `barrier`; and its names for ranks and devices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Callback, Strategy
from trainkit.errors import CollectiveError, ConfigurationError, UnknownNameError
from trainkit.strategies import DDPStrategy


class Verbs(Callback):
    """Calls the verbs in a run."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        values = torch.tensor([0.1, 0.2, float(rank)], dtype=torch.float64)
        both = torch.tensor([[0.1, 0.2, 0.0], [0.1, 0.2, 1.0]], dtype=torch.float64)
        for name, expected in {"mean": both.sum(0) / 2, "AVG": both.sum(0) / 2, "sum": both.sum(0), "min": both[0]}.items():
            assert torch.equal(strategy.reduce(values, reduce_op=name), expected)
        assert torch.equal(strategy.reduce(values, None, dist.ReduceOp.MAX), both[1])
        assert strategy.reduce({"n": torch.tensor(rank), "text": "same"}) == {"n": torch.tensor(0.5), "text": "same"}
        mine = {"path": f"run_{rank}", "values": values, "kind": Verbs}
        for source in (0, 1):
            got = strategy.broadcast(mine if rank == source else None, source)
            assert (got["path"], got["kind"], got["values"][2]) == (f"run_{source}", Verbs, source)
        assert strategy.broadcast(mine)["path"] == "run_0"
        strategy.barrier()
        strategy.barrier("after the verbs")
        self.found.append((strategy.lightning_module, strategy.model))


@pytest.mark.world_size(2)
def test_the_verbs_in_two_processes() -> None:
    verbs = Verbs()
    module, trainer = TinyModule(), make_trainer(verbs, strategy="ddp", devices=2)
    copied = copy.deepcopy(trainer)
    trainer.fit(module, tiny_loader())
    assert verbs.found == [(module, module)]
    assert (trainer.num_devices, trainer.device_ids, trainer.num_nodes, trainer.node_rank) == (2, [0, 1], 1, 0)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": trainer.global_rank}
    strategy = trainer.strategy
    assert (strategy.global_rank, strategy.is_global_zero) == (strategy.rank, strategy.rank == 0)
    assert copied.strategy.world is strategy.world, "a copy has the same processes"
    with pytest.raises(ConfigurationError, match="of 2 processes cannot be pickled.*copy.deepcopy works"):
        pickle.dumps(trainer)
    with pytest.raises(CollectiveError, match=r"strategy.barrier\('mine'\).*strategy.broadcast|strategy.broadcast.*'mine'"):
        strategy.barrier("mine") if trainer.is_global_zero else strategy.broadcast(1)


def test_one_process() -> None:
    strategy, value = Strategy("cpu"), {"a": torch.ones(2)}
    assert strategy.broadcast(value) is value
    assert strategy.reduce(value) is value
    assert (strategy.global_rank, strategy.node_rank, strategy.num_nodes, strategy.is_global_zero) == (0, 0, 1, True)
    assert strategy.root_device == strategy.device
    assert strategy.precision_plugin is strategy.precision
    strategy.barrier("nothing to wait for")
    with pytest.raises(ConfigurationError, match="src must be a rank from 0 to 0, not 1"):
        strategy.broadcast(value, src=1)
    with pytest.raises(UnknownNameError, match=r"unknown reduce_op 'summ'.*Did you mean 'sum'"):
        strategy.reduce(value, reduce_op="summ")
    with pytest.raises(ConfigurationError, match=r"works on all processes.*torch.distributed.all_reduce"):
        strategy.reduce(value, group="mine")


def test_a_wrapped_module() -> None:
    strategy, module, wrapper = Strategy("cpu"), TinyModule(), torch.nn.Identity()
    strategy.connect(module, wrapper)
    assert (strategy.lightning_module, strategy.model) == (module, wrapper)
    strategy.connect(module)
    assert strategy.model is module


class _OldBarrier(DDPStrategy):
    """A strategy whose `barrier` takes no name, as Lightning allows."""

    def barrier(self) -> None:  # type: ignore[override]
        self.world.barrier()


@pytest.mark.world_size(2)
def test_broadcast_needs_no_barrier_with_a_name() -> None:
    found: list[Any] = []

    class Broadcasts(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(trainer.strategy.broadcast(trainer.global_rank))

    make_trainer(Broadcasts(), strategy=_OldBarrier(), devices=2).fit(TinyModule(), tiny_loader())
    assert found == [0]


@pytest.mark.zero
@pytest.mark.world_size(2)
def test_the_verbs_under_zero() -> None:
    verbs = Verbs()
    make_trainer(verbs, strategy="zero2", devices=2).fit(TinyModule(), tiny_loader())
    assert len(verbs.found) == 1
