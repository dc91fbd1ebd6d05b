"""Context managers for your own training loop: `autocast`, `no_sync`, `profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import nn

from trainkit import Accelerator
from trainkit.config.kwargs_handlers import AutocastKwargs, ProfileKwargs
from trainkit.errors import ConfigurationError


def test_autocast() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with accelerator.autocast():
        assert layer(x).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert layer(x).dtype is torch.float32
    off = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with off.autocast():
        assert layer(x).dtype is torch.float32
    seen = []
    model = off.prepare(nn.Sequential(nn.Linear(2, 2)))
    off.unwrap_model(model)[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(x)
    assert seen == [torch.float32]  # also in a prepared model
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    with Accelerator(cpu=True).autocast():
        assert layer(x).dtype is torch.float32


def gradients(window: int) -> list[float]:
    """The gradient after each micro-batch of a window; all but the last one are inside `no_sync`. Ranks see different data."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for place in range(window):
        x = torch.full((1, 1), float(10**place * (1 + rank)))
        if place < window - 1:
            with accelerator.no_sync(model):
                assert not accelerator.sync_gradients
                accelerator.backward(model(x).sum())
                assert optimizer.step() is False
        else:
            assert accelerator.sync_gradients
            accelerator.backward(model(x).sum())
        (parameter,) = model.parameters()
        found.append(parameter.grad.item())
    assert optimizer.step() is True
    return found


def test_no_sync_adds_up_until_gradients_travel() -> None:
    """Inside `no_sync` each rank accumulates its own gradients; the next backward averages them over the ranks."""
    one, other = run_world(2, gradients, 3)
    assert one == [1.0, 11.0, 166.5]
    assert other == [2.0, 22.0, 166.5]  # the mean of 111 and 222


def test_no_sync_of_what_was_not_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    with (
        pytest.raises(ConfigurationError, match="no_sync: Linear has not been prepared"),
        accelerator.no_sync(nn.Linear(1, 1)),
    ):
        pass


def test_profile(tmp_path: Path) -> None:
    seen: list[Any] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=seen.append,
        record_shapes=True,
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile() as recording:
        for _ in range(3):
            nn.Linear(2, 2)(torch.ones(1, 2))
            recording.step()
    assert len(seen) == 1
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "traces"))) as recording:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert any(event.key == "aten::linear" for event in recording.key_averages())
    assert json.loads((tmp_path / "traces" / "profile_0.json").read_text())["traceEvents"]
