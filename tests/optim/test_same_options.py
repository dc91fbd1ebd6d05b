"""Optimizers with different options on the ranks of one run are refused, by `fit` and by `prepare`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world
from torch import nn

from trainkit import Accelerator, Trainer
from trainkit.errors import OptimizerError
from trainkit.optim.same_options import check_same_options, list_options

DIFFERENT = (
    "rank 0 and rank 1 have different optimizers. Rank 0: SGD 0, group 0: lr=0.5; rank 1: SGD 0, group 0: lr=0.25. "
    "With different options"
)


def test_options() -> None:
    """Numbers are compared exactly, and by group; what chooses a kernel, and what is no number, is not."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": torch.tensor(0.5), "name": "head"}]
    optimizer = torch.optim.Adam(groups, lr=0.1, fused=False, betas=(0.5, 0.75))
    lines = list_options([optimizer])
    assert {"Adam 0, group 0: lr=0.1", "Adam 0, group 1: lr=0.5", "Adam 0, group 0: betas=(0.5, 0.75)"} <= set(lines)
    assert not [line for line in lines if "fused" in line or "params" in line or "name" in line]
    check_same_options([lines, lines])
    with pytest.raises(OptimizerError, match="rank 0 and rank 2 have .* rank 2: the same, and no more"):
        check_same_options([lines, lines, lines[:-1]])


class OwnRate(TinyModule):
    """Draws its learning rate in each process, as a script does whose study is not shared between the processes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=rate())


def rate() -> float:
    return 0.5 / (1 + int(os.environ["RANK"]))


def refused() -> list[str]:
    model = nn.Linear(1, 1)
    accelerator = Accelerator()
    with pytest.raises(OptimizerError) as own_loop:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate()))
    with pytest.raises(OptimizerError) as fit:
        Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(OwnRate(), tiny_loader())
    return [str(own_loop.value), str(fit.value)]


def test_other_rates_on_another_rank_are_refused() -> None:
    for messages in run_world(2, refused):
        assert [message[: len(DIFFERENT)] for message in messages] == [DIFFERENT] * 2
