"""The error for a test process that hangs shows its stack and the stacks of its child processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from helpers.patience import PATIENCE, VAIN
from helpers.worlds.worlds import WorldError, start_world
from torch.utils.data import DataLoader, Dataset


class Stuck(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        Path("there").touch()
        time.sleep(VAIN)  # here the worker hangs


def waits_for_its_worker() -> None:
    next(iter(DataLoader(Stuck(), num_workers=1)))  # here the process of the test waits


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc for the workers")
def test_a_world_that_hangs_shows_its_stacks() -> None:
    world = start_world(1, waits_for_its_worker)
    over = time.monotonic() + PATIENCE
    while not Path("there").exists() and time.monotonic() < over:
        time.sleep(0.01)
    with pytest.raises(WorldError, match=r"ranks \[0\] have not ended within 0.5 s") as caught:
        world.results(0.5)
    process, _, worker = str(caught.value).partition("(a child)")
    assert "in waits_for_its_worker" in process
    assert "in __getitem__" in worker
