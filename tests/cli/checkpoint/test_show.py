"""`trainkit checkpoint show`."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule
from torch import nn

from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.cli.checkpoint.text import bytes_text
from trainkit.cli.main import main


def test_contents_of_a_checkpoint(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder / "step-00000008"
    capsys.readouterr()
    assert main(["checkpoint", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == str(path)
    assert "  step      8, 2 epochs complete" in lines
    assert "  ran on    1 × single, 32-true" in lines
    [saved] = [line for line in lines if line.startswith("  saved ")]
    assert " by ModelCheckpoint(every_n_epochs=1, train_time_interval=datetime.timedelta(seconds=1800)), trainkit " in saved
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert bytes_text((path / name).stat().st_size) in line
    assert "model: 2 tensors, 5 elements" in lines
    assert "optimizer: 6 tensors, 12 elements" in lines
    [group] = [line for line in lines if line.startswith("optimizer 0 (AdamW) group 0: ")]
    assert group.startswith("optimizer 0 (AdamW) group 0: 2 parameters, lr=0.1, weight_decay=0.01, betas=(0.9, 0.999), ")
    assert lines[-3:] == ["hyper-parameters", "  learning_rate: 0.1", "  name: 'line'"]
    assert "TENSOR" not in shown


@pytest.mark.parametrize(
    ("saved_by", "shown"),
    [
        (None, "the user"),
        (
            ModelCheckpoint(monitor="loss", every_n_epochs=2).state_key,
            "ModelCheckpoint(monitor='loss', mode='min', every_n_epochs=2)",
        ),
        (
            ModelCheckpoint(train_time_interval=timedelta(hours=1)).state_key,
            "ModelCheckpoint(train_time_interval=datetime.timedelta(seconds=3600))",
        ),
        (ModelCheckpoint(monitor="it's", mode="max", every_n_train_steps=5).state_key, None),
        (EarlyStopping(monitor="x").state_key, "EarlyStopping(monitor='x', mode='min')"),
        ("verify-resume", "verify-resume"),
        ("Mine{'a': ", "Mine{'a': "),
        ("Mine{1, 2}", "Mine{1, 2}"),
        ("my {'a': 1}", "my {'a': 1}"),
        ("", ""),
    ],
)
def test_who_saved_it(saved_by: str | None, shown: str | None, save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(save(TinyModule(), saved_by=saved_by))]) == 0
    shown = """ModelCheckpoint(monitor="it's", mode='max', every_n_train_steps=5)""" if shown is None else shown
    assert f" by {shown}, trainkit " in capsys.readouterr().out


def test_tensors_and_aliases(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 2, dtype=torch.bfloat16), "b": nn.Linear(3, 2, dtype=torch.bfloat16)})
    module["b"].weight = module["a"].weight
    path = save(module, shard=100)
    assert main(["checkpoint", "show", str(path), "--tensors"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model", "a.weight", "BF16", "[2,", "3]"] in lines
    assert ["model", "b.bias", "BF16", "[2]"] in lines
    assert ["model:", "b.weight", "is", "tied", "to", "a.weight"] in lines
    assert len(list(path.glob("model-*.safetensors"))) == 3


def test_the_state_in_a_readable_form(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    state = {
        "user": {
            "seen": {3, 1}, "pair": (1, 2.5), 7: "seven", "far": -math.inf, "big": torch.zeros(100, 3),
            "few": torch.tensor([1, 2]), "array": np.arange(3), "deep": [{"x": None}], "long": list(range(30)),
            "text": "\x1b[31mred",
        }
    }  # fmt: skip
    assert main(["checkpoint", "show", str(save(TinyModule(), state=state)), "--state"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "  user:", "    seen: {1, 3}", "    pair: (1, 2.5)", "    7: 'seven'", "    far: -inf",
        "    big: tensor float32 [100, 3]", "    few: tensor int64 [2] [1, 2]", "    array: array int64 [3] [0, 1, 2]",
        "    deep:", "      0:", "        x: None",
        "    text: '\\x1b[31mred'",
    ):  # fmt: skip
        assert line in shown.splitlines(), line
    assert "18, 19, … (30 items)]" in shown


def test_json(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = TinyModule()
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"user": {1: {2, 1}, "nan": math.nan, "t": torch.ones(20)}, "hyper_parameters": {"depth": 3}}
    path = save(module, optimizers=[optimizer], state=state)
    assert main(["checkpoint", "show", str(path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["path"] == str(path)
    assert value["step"] == 7
    assert value["parts"]["model"] == {"tensors": 2, "elements": 5}
    [group] = value["groups"]
    assert (group["class"], group["parameters"]) == ("AdamW", ["layer.weight", "layer.bias"])
    assert group["options"]["betas"] == [0.9, 0.999]
    assert value["hyper_parameters"] == {"depth": 3}
    assert not {"tensors", "state"} & set(value)
    assert main(["checkpoint", "show", str(path), "--json", "--tensors", "--state"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["tensors"]["model"]["layer.weight"] == {"file": "model.safetensors", "dtype": "F32", "shape": [1, 4]}
    assert value["state"]["user"] == {"1": [1, 2], "nan": "nan", "t": "tensor float32 [20]"}


def test_missing_or_damaged_checkpoints(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(run_folder / "step-00000005")]) == 2
    assert "Did you mean 'step-0000000" in capsys.readouterr().err
    path = run_folder / "step-00000004"
    data = bytearray((path / "state.json").read_bytes())
    data[10] ^= 1
    (path / "state.json").write_bytes(data)
    assert main(["checkpoint", "show", str(path)]) == 2
    assert "state.json" in capsys.readouterr().err


def test_a_wrong_header(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(TinyModule())
    file = path / "model.safetensors"
    data = file.read_bytes()
    for lie in ((2**62).to_bytes(8, "little"), (len(data)).to_bytes(8, "little")):
        file.write_bytes(lie + data[8:])  # the file size stays the same, so that only parsing the header finds the damage
        assert main(["checkpoint", "show", str(path)]) == 2
        assert "model.safetensors has a malformed header: " in capsys.readouterr().err
    file.write_bytes(data[:8] + data[8:].replace(b'"shape":[1,4]', b'"shape":[1,x]'))
    assert main(["checkpoint", "show", str(path)]) == 2
    assert "model.safetensors has a malformed header: " in capsys.readouterr().err


@pytest.mark.parametrize("size, text", [
    (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
    (580 * 10**6, "580 MB"), (5 * 10**9, "5 GB"), (2 * 10**12, "2 TB"), (3 * 10**15, "3e+03 TB"),
])  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text
