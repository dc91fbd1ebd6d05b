"""Checkpoints under ZeRO: exact resume, and the same state under every strategy and on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.elastic import killed, parameters, resumed, undisturbed
from helpers.runs.parity import Case, Recorder, RegressionModule, train
from helpers.runs.replicas import together
from helpers.zero.zero_cases import strategy
from helpers.zero.zero_resume import ADAMW, SaveAtOnce, assert_portable, case, go_on, save, tensors
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainkit import Callback
from trainkit.errors import StateMismatchError

ZERO = pytest.mark.zero

# Each precision once; each stage in all of them is in test_zero_grid.py.
PRECISIONS = {"zero1": "32-true", "zero2-cpu": "16-mixed", "zero3": "bf16-mixed", "zero3-both-cpu": "bf16-true"}


@pytest.mark.parametrize(
    "kind, precision", [pytest.param(*pair, marks=() if pair[0] == "zero3" else ZERO) for pair in PRECISIONS.items()]
)
def test_exact_resume(kind: str, precision: str, run_dir: Path) -> None:
    """A run killed by SIGKILL and resumed equals an uninterrupted one bit for bit: losses, samples, parameters."""
    whole, broken = run_dir / "whole", run_dir / "broken"
    whole.mkdir()
    broken.mkdir()
    small = Case(samples=75, options=ADAMW, arguments={"precision": precision, "gradient_clip_val": 1.0})
    expected = undisturbed(small, whole, 2, strategy=strategy(kind))
    killed(small, broken, 2, 0, (1, 2), strategy=strategy(kind))
    assert resumed(small, broken, 2, 1, strategy=strategy(kind)) == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters(broken), parameters(whole), strict=True))


@pytest.mark.parametrize(
    "kind, other",
    [
        ("zero3-cpu", "zero2"),
        *(pytest.param(*pair, marks=ZERO) for pair in (("zero1", "zero3"), ("zero2", "zero3-both-cpu"))),
    ],
)
def test_master_weights(kind: str, other: str, run_dir: Path) -> None:
    """Under bf16-true the float32 master weights are saved, and restored exactly under another stage."""
    together(2, {"save": (save, case("bf16-true"), kind, run_dir / "saved")})
    together(2, {"resume": (go_on, case("bf16-true"), other, run_dir / "saved", run_dir / "copy")})
    saved, again = tensors(run_dir / "saved"), tensors(run_dir / "copy")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert any(not torch.equal(t, t.bfloat16().float()) for name, t in saved.items() if name.startswith("model/"))
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())


def test_counters_that_differ_within_a_group(run_dir: Path) -> None:
    """A parameter with fewer optimizer steps than others of its group is an error."""
    from trainkit.errors import StateMismatchError
    from trainkit.strategies.zero.stored_state import _refuse_differing

    _refuse_differing("step", [torch.tensor(3.0), torch.tensor(3.0)])
    with pytest.raises(StateMismatchError, match=r"'step' differs between parameters \(2.0, 3.0\)"):
        _refuse_differing("step", [torch.tensor(3.0), torch.tensor(2.0)])


class OnDisk(Callback):
    """Records which tensor files are memory-mapped in on_load_checkpoint, and in on_train_start."""

    def __init__(self) -> None:
        self.mapped: list[set[str]] = []

    def look(self) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        self.mapped.append({Path(line.split()[-1]).name for line in lines if line.endswith(".safetensors")})

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.look()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.look()


@ZERO
@pytest.mark.parametrize("kind", ["auto", "zero1", "zero3"])
def test_no_process_reads_the_whole_checkpoint(kind: str, run_dir: Path) -> None:
    """Each process reads only its shard, and no file stays mapped when training begins."""
    together(1, {"save": (save, case(), "auto", run_dir / "saved")})
    seen = OnDisk()
    train(case(), seen, strategy=strategy(kind), ckpt_path=str(run_dir / "saved"))
    assert seen.mapped == [set() if kind == "auto" else {"model.safetensors", "optimizer.safetensors"}, set()]


class Checkpointed(RegressionModule):
    """A module with torch's activation checkpointing wrapper around a layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net[0] = checkpoint_wrapper(self.net[0])


@pytest.mark.parametrize(
    "before, kind, after, other",
    [
        (Checkpointed, "zero3", RegressionModule, "zero2"),
        (RegressionModule, "zero2", Checkpointed, "zero3"),
        pytest.param(Checkpointed, "zero3-both-cpu", Checkpointed, "zero1", marks=ZERO),
    ],
)
def test_activation_checkpointing_leaves_no_trace(before: type, kind: str, after: type, other: str, run_dir: Path) -> None:
    together(2, {"save": (save, case(make=before), kind, run_dir / "saved")})
    assert not [name for name in tensors(run_dir / "saved") if "_checkpoint_wrapped_module" in name]
    assert_portable(run_dir / "saved", other, 2, make=after)


class Longer(RegressionModule):
    """A module with one more layer, which is also trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.more = torch.nn.Linear(6, 6)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss({**batch, "x": self.more(batch["x"].to(self.dtype))})


def lengthened(kind: str, source: Path, copy: Path) -> tuple[str, int]:
    """Resume with one more layer: returns the error, and the last optimizer step when loading only matching parameters."""
    longer = case(make=Longer)
    try:
        train(longer, strategy=strategy(kind), ckpt_path=str(source))
    except StateMismatchError as error:
        said = str(error)
    recorder = Recorder()
    train(longer, recorder, SaveAtOnce(copy), strategy=strategy(kind), ckpt_path=str(source), strict=False)
    return said, max(step for step, _ in recorder.record.losses)


@pytest.mark.parametrize("kind", ["zero2", pytest.param("zero3", marks=ZERO)])
def test_matching_parts_of_another_model(kind: str, run_dir: Path) -> None:
    """With `strict=False`, a parameter that is not in the checkpoint starts with moments of zero."""
    together(2, {"save": (save, case(), kind, run_dir / "saved")})
    ends = together(2, {"go": (lengthened, kind, run_dir / "saved", run_dir / "copy")})["go"]
    assert all("missing in the checkpoint (2): more.weight, more.bias" in said for said, _ in ends)
    assert [step for _, step in ends] == [19, 19]
    before, after = tensors(run_dir / "saved"), tensors(run_dir / "copy")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not after["optimizer/0/more.weight/exp_avg"].any()
