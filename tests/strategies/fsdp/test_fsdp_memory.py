"""The memory estimate of `FSDPStrategy`: small cases by hand, and the tensors of real runs over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.planned import Planned, bytes_in_the_update
from helpers.runs.replicas import together
from helpers.runs.trainers import make_trainer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainkit.errors import OptimizerError
from trainkit.memory.inventory import contents_of
from trainkit.strategies import FSDPStrategy
from trainkit.strategy import Contents, Footprint, Held


class Block(nn.Module):
    """A layer of 20 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def contents(dtype: torch.dtype = torch.float32, window: int = 1, **options: Any) -> Contents:
    """Three blocks of 20 elements, and a root of 12, with SGD and momentum: 72 elements."""
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 3, bias=False)).to(device="meta", dtype=dtype)
    for name, value in options.items():
        setattr(model, name, value)
    return contents_of([model], [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)], window)


def footprint(held: Contents, processes: int, **options: Any) -> Footprint:
    return FSDPStrategy(device="cpu", **options).footprint(held, processes)


def test_everything_is_sharded() -> None:
    for processes in (2, 4):
        update = footprint(contents(), processes).moments["update"]
        assert update.device == Held(parameters=288 // processes, gradients=288 // processes, optimizer=288 // processes)
        assert update.host == Held()


def test_a_matrix_that_is_stepped_whole() -> None:
    """The largest one, with its gradient and its momentum; for optimizers that step shards nothing."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to("meta")
    matrices, biases = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    held = contents_of([model], [torch.optim.Muon(matrices), torch.optim.AdamW(biases)], 1)
    assert footprint(held, 2).moments["update"].device.buffers == 3 * 4 * 32
    assert FSDPStrategy(device="cpu").footprint(contents(), 2).moments["update"].device.buffers == 0
    shards = footprint(contents_of([model.bfloat16()], held.optimizers, 1), 2).moments["update"].device
    assert shards.buffers == (2 + held.flat_slots) * 4 * 32


def test_whole_units() -> None:
    moments = footprint(contents(), 2).moments
    # 48 bytes of the root, and two blocks of 80
    assert moments["forward"].device == Held(parameters=144, optimizer=144, buffers=48 + 160)
    # 120 of the sharded gradients are those of two blocks, 24 of the root: it and a block are whole
    assert moments["reduce a unit"].device == Held(144, 144 + 24 + 40, 144, buffers=48 + 160 + 80)
    assert moments["reduce the root"].device == Held(144, 144 + 24, 144, buffers=48)
    whole = footprint(contents(), 2, wrap=False).moments
    assert whole["forward"].device.buffers == 2 * 288
    assert whole["reduce a unit"].device == Held(144, 288, 144, buffers=288)
    assert whole["reduce the root"].device == Held(144, 288, 144, buffers=288)


def test_units_that_stay_whole() -> None:
    assert footprint(contents(), 4, reshard_after_forward=False).moments["forward"].device.buffers == 288
    assert footprint(contents(), 4, reshard_after_forward=2).moments["forward"].device.buffers == 48 + 160 + 144


def test_activations() -> None:
    held = Contents(**{**vars(contents()), "profile": ((1000, 0), (900, 128), (0, 288))})
    moments = footprint(held, 2).moments
    assert moments["forward"].device.activations == 1000
    # 128 bytes of gradients, half of them in the other rank's shards, are whole or wait
    assert moments["backward"].device == Held(144, 128, 144, buffers=48 + 160, activations=900)


def test_an_accumulation_window() -> None:
    """`accumulate="once"` keeps whole gradients until the last micro-batch, `"reshard"` shards."""
    held = Contents(**{**vars(contents(window=4)), "profile": ((1000, 0),)})
    assert footprint(held, 2).moments["backward"].device == Held(144, 288, 144, buffers=48 + 160 + 80, activations=1000)
    assert footprint(held, 2).moments["reduce a unit"].device.gradients == 288
    assert footprint(held, 2, accumulate="reshard").moments["backward"].device.gradients == 144
    assert footprint(held, 2).moments["update"].device.gradients == 144


def test_16_bits() -> None:
    """Shards are float32 master weights; units are gathered in 16 bits, and reduced in float32."""
    moments = footprint(contents(torch.bfloat16), 2).moments
    assert moments["update"].device == Held(gradients=144, optimizer=144, masters=144)
    assert moments["forward"].device.buffers == 24 + 80
    assert moments["reduce a unit"].device == Held(0, 144 + (24 + 40) // 2, 144, 144, buffers=24 + 80 + 80)
    assert moments["reduce the root"].device.buffers == 48
    assert footprint(contents(torch.bfloat16), 2).checkpoint == 2 * 288
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    given = footprint(contents(), 2, mixed_precision=policy).moments
    assert given["forward"].device == Held(parameters=144, optimizer=144, buffers=24 + 80)


def test_on_the_host() -> None:
    made = footprint(contents(), 2, offload_params="cpu")
    assert made.name == "fsdp, both on cpu"
    update = made.moments["update"]
    assert (update.device, update.host) == (Held(), Held(144, 144, 144))
    assert made.moments["forward"].device == Held(buffers=48 + 160)


def test_meshes() -> None:
    assert footprint(contents(), 4, replicas=2).moments["update"].device.parameters == 144
    parallel = footprint(contents(), 4, tensor_parallel=2).moments
    assert (parallel["update"].device.parameters, parallel["forward"].device.buffers) == (72, 24 + 80)


def test_ignored_modules() -> None:
    update = footprint(contents(), 2, ignored_modules="3").moments["update"]
    assert update.device == Held(parameters=120 + 48, gradients=120 + 48, optimizer=120 + 48)


def test_a_single_process() -> None:
    assert footprint(contents(), 1).moments.keys() == {"update"}
    assert footprint(contents(torch.bfloat16), 1).moments["update"].device == Held(gradients=288, optimizer=288, masters=288)


def test_an_optimizer_that_cannot_step_shards() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(OptimizerError, match="Adafactor does not work on sharded parameters"):
        footprint(Contents((), optimizers=(torch.optim.Adafactor([weight]),)), 2)


@pytest.mark.parametrize(
    "size, precision",
    [
        (2, "32-true"),
        pytest.param(2, "bf16-true", marks=pytest.mark.slow),
        pytest.param(2, "bf16-mixed", marks=pytest.mark.slow),
        pytest.param(4, "32-true", marks=pytest.mark.slow),
    ],
)
def test_in_the_update(size: int, precision: str) -> None:
    """The tensors at the end of an optimizer step are a rank's shards of parameters, gradients and state, and no whole unit."""
    by_rank = together(size, {"held": (bytes_in_the_update, ["fsdp"], precision)})["held"]
    planned = make_trainer(precision=precision)._memory_estimator().contents(Planned())
    said = footprint(planned, size, wrap="Linear").moments["update"].device.total
    assert max(found["fsdp"] for found in by_rank) == pytest.approx(said, rel=0.02)
