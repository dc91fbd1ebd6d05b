"""`self.log` in a fit on two processes: over which ranks a value is reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world

from trainkit import Trainer
from trainkit.errors import MetricError


class Ranked(TinyModule):
    """Logs its rank with the given options, in training and in validation."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=True, **self.options)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_rank", float(self.global_rank), **self.options)


def fitted(options: dict[str, Any]) -> dict[str, float]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", strategy="ddp", max_epochs=1, num_sanity_val_steps=0, **quiet)
    trainer.fit(Ranked(**options), tiny_loader(), tiny_loader())
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "rank" in name}


@pytest.mark.parametrize("rank_zero_only, value", [(False, 0.5), (True, 0.0)])
def test_rank_zero_only_is_the_value_of_rank_zero_on_every_rank(rank_zero_only: bool, value: float) -> None:
    """The mean over ranks 0 and 1 is 0.5; the value of rank 0 alone is 0."""
    first, second = run_world(2, fitted, {"rank_zero_only": rank_zero_only})
    assert first == {"rank": value, "rank_step": value, "rank_epoch": value, "val_rank": value}
    assert second == first


@pytest.mark.parametrize("sync_dist", [False, True])
def test_values_are_reduced_with_and_without_sync_dist(sync_dist: bool) -> None:
    """As documented, `sync_dist` has no effect: values are always reduced, because that of one rank would be wrong."""
    for found in run_world(2, fitted, {"sync_dist": sync_dist}):
        assert (found["rank_epoch"], found["val_rank"]) == (0.5, 0.5)


@pytest.mark.world_size(2)
def test_a_group_of_some_processes_is_refused() -> None:
    """`sync_dist_group` is not silently ignored: the mean over all ranks is not the mean over the group."""
    torch.distributed.init_process_group("gloo")
    alone = [torch.distributed.new_group([rank]) for rank in (0, 1)][torch.distributed.get_rank()]
    with pytest.raises(
        MetricError, match=r"log\('rank', sync_dist_group=...\): .*Remove the argument: self.log\('rank', value\)"
    ):
        fitted({"sync_dist_group": alone})


def _over_all() -> dict[str, float]:
    torch.distributed.init_process_group("gloo")
    return fitted({"sync_dist_group": torch.distributed.group.WORLD})


def test_the_group_of_all_processes_is_the_default() -> None:
    assert [found["val_rank"] for found in run_world(2, _over_all)] == [0.5, 0.5]
