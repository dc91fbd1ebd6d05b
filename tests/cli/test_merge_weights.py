"""`trainkit merge-weights`: the weights of a checkpoint in one file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.runs.trainers import same
from safetensors.torch import load_file
from torch import nn

from trainkit import Accelerator
from trainkit.cli.main import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3, 2))
    accelerator.save_state(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_all_weights_in_one_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["merge-weights", str(checkpoint), str(out)]) == 0
    assert capsys.readouterr().out == f"Wrote {out}: safetensors, 2 tensors, 32 B\n"
    assert sorted(os.listdir(out)) == ["model.safetensors", "trainkit_export.json"]
    assert same(load_file(out / "model.safetensors"), load_file(checkpoint / "model.safetensors"))


@pytest.mark.parametrize(
    "option, words",
    [
        ("--unsafe_serialization", "--unsafe_serialization is not supported: a pickle can run code"),
        ("--remove_checkpoint_dir", "--remove_checkpoint_dir is not supported, .* rm -r checkpoint"),
    ],
)
def test_options_that_are_not_supported(option: str, words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", "checkpoint", "out", option]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not Path("out").exists()


@pytest.mark.parametrize("place", [".", "pytorch_model_fsdp_0"])
def test_shards_of_accelerate(place: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "old" / place).mkdir(parents=True)
    (run_dir / "old" / place / "__0_0.distcp").touch()
    assert main(["merge-weights", "old", "out"]) == 2
    assert (
        "Fix: accelerate merge-weights old out, then trainkit checkpoint import out/model.safetensors"
        in capsys.readouterr().err
    )


def test_no_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", "nowhere", "out"]) == 2
    assert "nowhere" in capsys.readouterr().err
