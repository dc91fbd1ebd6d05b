"""`Tuner` on two processes: both find the same, and a shortage of memory on one of them counts for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit.errors import ConfigurationError, ProcessFailedError
from trainkit.tuner import Tuner


class Uneven(TinyModule):
    """Rank 1 runs out of memory before rank 0 does, and may raise another error."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 7

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > (20 if torch.distributed.get_rank() else 40):
            raise ValueError("broken") if self.fails else torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return tiny_loader(256, self.batch_size)


class Broken(Uneven):
    fails = True


def searched() -> dict[str, Any]:
    """What a rank finds, and the losses of a fit after the search and of one without it."""
    found: dict[str, Any] = {}
    for search in (False, True):
        torch.manual_seed(3)
        module, logger = TinyModule(), Memory()
        trainer = make_trainer(logger=logger, log_every_n_steps=1, strategy="ddp")
        if search:
            result = Tuner(trainer).lr_find(module, tiny_loader(28), num_training=30, max_lr=0.1, update_attr=False)
            assert result is not None
            found["results"], found["suggestion"] = result.results, result.suggestion()
        trainer.fit(module, tiny_loader(28, shuffle=True))  # an odd number of micro-batches
        found[f"rows {search}"] = logger.rows, [p.tolist() for p in module.parameters()]
    module = Uneven()
    tuner = Tuner(make_trainer(strategy="ddp"))
    found["sizes"] = tuner.scale_batch_size(module), tuner.scale_batch_size(module, mode="binsearch", margin=0.0)
    found["attribute"] = module.batch_size
    try:
        tuner.scale_batch_size(Broken())
    except ProcessFailedError as error:
        found["error"] = str(error)
    return found


def test_two_processes_find_the_same() -> None:
    first, second = run_world(2, searched)
    assert first.pop("rows False") == first.pop("rows True")
    assert second.pop("rows False") == second.pop("rows True")
    assert first == second
    assert len(first["results"]["loss"]) == 30
    assert first["suggestion"] in first["results"]["lr"]
    assert first["sizes"] == (16, 20)
    assert first["attribute"] == 20
    assert first["error"] == "the trial with batch size 32 failed on rank 1: ValueError: broken"


def under_zero() -> Any:
    module = Uneven()
    trainer = make_trainer(strategy="zero1")
    with pytest.raises(ConfigurationError, match=r"trainer\.plan"):
        Tuner(trainer).scale_batch_size(module)
    before = [p.tolist() for p in module.parameters()]
    found = Tuner(trainer).lr_find(module, tiny_loader(28), num_training=20, max_lr=0.1)
    assert found is not None
    unchanged = before == [p.tolist() for p in module.parameters()]
    trainer.fit(module, tiny_loader(28))
    return unchanged, found.results, module.learning_rate, trainer.global_step, [p.tolist() for p in module.parameters()]


@pytest.mark.zero
def test_under_zero_the_learning_rate_is_found_and_the_batch_size_is_refused() -> None:
    first, second = run_world(2, under_zero)
    assert first == second
    assert first[0]
    assert len(first[1]["lr"]) == 20
    assert first[3] == 4
