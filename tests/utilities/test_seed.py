"""`isolate_rng`."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from trainkit.utilities import isolate_rng


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


@pytest.mark.parametrize("include_cuda", [True, False])
def test_the_generators_continue_as_before(include_cuda: bool) -> None:
    with isolate_rng():
        expected = draw()
    with isolate_rng(include_cuda=include_cuda):
        draw()
    assert draw() == expected
    with isolate_rng():
        following = draw()
    assert following != expected
    with suppress(KeyError), isolate_rng():
        draw()
        raise KeyError
    assert draw() == following


def test_the_generators_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    before = gpu.get_state()
    with isolate_rng():
        torch.rand(1, generator=gpu)
    assert torch.equal(gpu.get_state(), before)
    with isolate_rng(include_cuda=False):
        torch.rand(1, generator=gpu)
    assert not torch.equal(gpu.get_state(), before)
