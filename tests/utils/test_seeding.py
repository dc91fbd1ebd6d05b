"""`set_seed`: Accelerate's arguments, and the rank before the processes are connected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainkit.rng import resolve_seed
from trainkit.utils import set_seed

LAST = (1 << 64) - 1


def test_set_seed_is_seed_everything() -> None:
    assert set_seed(8) is None
    assert resolve_seed(None) == 8


def test_set_seed_takes_what_accelerates_does() -> None:
    set_seed(8, device_specific=True)
    assert resolve_seed(None) == 8, "one seed for all processes"
    assert torch.initial_seed() == 8, "of the only process, which is the first"
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(8, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


def test_set_seed_goes_by_the_launcher_before_the_processes_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.accelerator.processes.read_ranks", lambda env: SimpleNamespace(rank=3, size=4))
    monkeypatch.setattr("trainkit.accelerator.processes.latest", lambda: None)
    set_seed(LAST, device_specific=True)
    assert (resolve_seed(None), torch.initial_seed()) == (LAST, 2), "taken modulo 2 to the 64"
