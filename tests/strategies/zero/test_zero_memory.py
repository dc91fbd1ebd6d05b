"""The memory estimate of ZeRO equals real runs over gloo, whose tensors are counted during an optimizer step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.runs.planned import Planned, bytes_at_the_peak, bytes_in_the_update
from helpers.runs.replicas import together
from helpers.runs.trainers import make_trainer
from helpers.zero.zero_cases import NVME, STAGES
from torch import nn

from trainkit.errors import OptimizerError
from trainkit.memory.inventory import contents_of
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero.zero_memory import ZeROMemory
from trainkit.strategy import Contents, Weight


def contents(precision: str) -> Contents:
    return make_trainer(precision=precision)._memory_estimator().contents(Planned())


def memory(kind: str, **options: Any) -> ZeROMemory:
    stage, optimizer, params = (STAGES | NVME)[kind]
    options = {"nvme_path": ".", **options} if kind in NVME else options
    return ZeROMemory(stage=stage, offload_optimizer=optimizer, offload_params=params, **options)


def assert_update(kinds: list[str], precision: str, size: int) -> None:
    """Assert that the bytes of all tensors in the middle of an optimizer step are those of the plan.

    Each kind has processes of its own: tensors of a ZeRO-3 run outlive it, and would be subtracted if they are freed later.
    """
    wrong = {}
    for kind in kinds:
        by_rank = together(size, {"held": (bytes_in_the_update, [kind], precision)})["held"]
        moment = memory(kind).footprint(contents(precision), size).moments["update"]
        said, held = (moment.device + moment.host).total, max(found[kind] for found in by_rank)
        if held != pytest.approx(said, rel=0.05):
            wrong[kind] = f"{held:,} bytes, and the plan says {said:,}: {held / said:.3f}"
    assert not wrong


def assert_peak(kinds: list[str], precision: str, size: int, **options: Any) -> None:
    """Assert that the peak of torch's allocations in an optimizer step equals the plan's largest moment."""
    for _ in range(3):  # a tensor that a thread of gloo frees is not recorded as freed, which adds to some measurements
        by_rank = together(size, {"held": (_peaks, kinds, precision, options)})["held"]
        wrong = {}
        for kind in kinds:
            footprint = memory(kind, **options).footprint(contents(precision), size)
            said = max((moment.device + moment.host).total for moment in footprint.moments.values())
            held = max(found[kind] for found in by_rank)
            if held != pytest.approx(said, rel=0.1):
                wrong[kind] = f"{held:,} bytes, and the plan says {said:,}: {held / said:.3f}"
        if not wrong:
            return
    raise AssertionError(wrong)


def _peaks(kinds: list[str], precision: str, options: dict[str, Any]) -> dict[str, int]:
    return bytes_at_the_peak(kinds, precision, **options)


@pytest.mark.zero
@pytest.mark.parametrize(
    "size, precision", [(1, "32-true"), (2, "32-true"), (1, "bf16-true"), (2, "bf16-true"), (3, "bf16-true")]
)
def test_in_the_update(size: int, precision: str) -> None:
    assert_update([*STAGES], precision, size)


def test_at_the_peak() -> None:
    """On one process, since torch does not record tensors that gloo's threads free."""
    for precision in ("32-true", "bf16-true"):
        assert_peak(["zero1", "zero2"], precision, 1)


def test_two_buckets() -> None:
    """With overlap_comm=True, one bucket is filled while the other is reduced."""
    assert_peak(["zero1", "zero2"], "32-true", 1, overlap_comm=True)


def test_small_buckets() -> None:
    """Small relative to the model, like the default buckets relative to a large model."""
    assert_peak(["zero1", "zero2"], "32-true", 1, reduce_bucket_size=1_200_000)


@pytest.mark.zero
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_on_nvme(size: int, precision: str) -> None:
    assert_update([*NVME], precision, size)


@pytest.mark.zero
@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_autocast(size: int) -> None:
    assert_update([*STAGES], "bf16-mixed", size)


def test_memory_over_numbers_of_processes() -> None:
    """With more processes, each holds less optimizer state, but all together never less than a single process."""
    held = contents("32-true")
    for kind in STAGES:
        totals = [memory(kind).footprint(held, size).moments["update"] for size in (1, 2, 4, 8)]
        optimizer = [(moment.device + moment.host).optimizer for moment in totals]
        assert optimizer == sorted(optimizer, reverse=True)
        assert all(size * part >= optimizer[0] for size, part in zip((1, 2, 4, 8), optimizer, strict=True))


def test_a_large_model() -> None:
    """Buckets, gathered parameters and sub-groups have the sizes of DeepSpeed's options, not of the model."""
    large = Contents(tuple(Weight(50_000_000, 2, True) for _ in range(200)), flat_slots=2)
    device = memory("zero3-both-cpu").footprint(large, 8).device
    assert device.buffers == 2 * 2 * 500_000_000
    assert device.parameters == 2 * 1_000_000_000
    assert memory("zero3-both-nvme").footprint(large, 8).device.parameters == 2 * 100_000_000
    update = memory("zero3").footprint(large, 8).moments["update"].device
    assert update.gradients == 2 * 1_250_000_000 + 4 * (1_000_000_000 + 50_000_000 // 8)


def test_an_unsupported_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, device="meta"))
    held = Contents((Weight(4, 4, True),), optimizers=(torch.optim.Adafactor([weight]),))
    with pytest.raises(OptimizerError, match="Adafactor does not work under ZeRO"):
        memory("zero1").footprint(held, 2)


def test_the_estimate_uses_the_options_of_the_strategy() -> None:
    strategy = ZeROStrategy(stage=3, reduce_bucket_size=1000, param_persistence_threshold=0, device="cpu")
    trainer = make_trainer(strategy=strategy)
    rows = trainer.plan(Planned(), processes=[2]).rows
    (own,) = [row for row in rows if row.own]
    assert own.strategy == "zero3"
    assert own.footprint == memory("zero3", reduce_bucket_size=1000, param_persistence_threshold=0).footprint(
        trainer._memory_estimator().contents(Planned()), 2
    )
    assert own.footprint.moments["update"].device.buffers == 4 * 1000


@pytest.mark.parametrize("kind", ["zero1", "zero2-cpu", "zero3"])
def test_a_matrix_that_is_stepped_whole(kind: str) -> None:
    """The largest one, with its gradient and its state in float32, is added to the step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to("meta")
    matrices, biases = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    held = contents_of([model], [torch.optim.Muon(matrices), torch.optim.AdamW(biases)], 1)
    without = replace(held, optimizers=(torch.optim.AdamW(model.parameters()),))
    more, less = (memory(kind).footprint(each, 2).moments["update"].device.buffers for each in (held, without))
    assert more - less == (2 + held.flat_slots) * 4 * 32
