"""`trainkit checkpoint diff`, and the bit-for-bit comparison that it uses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn

from trainkit.cli.checkpoint.compare import compare_tensors, compare_values
from trainkit.cli.main import main
from trainkit.state.training_objects import model_stem


def trained(root: Path, steps: int = 4, **arguments: Any) -> Path:
    trainer = make_trainer(default_root_dir=root, enable_checkpointing=True, max_steps=steps, max_epochs=-1, **arguments)
    trainer.fit(TinyModule(), tiny_loader())
    return Path(trainer.checkpoint_callback.last_model_path)


def diff(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["checkpoint", "diff", *map(str, arguments)])
    shown = capsys.readouterr()
    assert shown.err == ""
    return code, shown.out.splitlines()


def test_identical_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    first = trained(tmp_path / "a")
    torch.manual_seed(3)
    second = trained(tmp_path / "b")
    code, lines = diff(first, second, capsys=capsys)
    assert (code, lines) == (
        0, ["equal, bit for bit: model, optimizer, state (not compared without --all: callbacks, loggers, logged metrics)"],
    )  # fmt: skip
    assert diff(first, first, "--all", capsys=capsys) == (0, ["equal, bit for bit: model, optimizer, state"])
    code, lines = diff(first, second, "--all", capsys=capsys)  # the state of the callbacks contains their folders
    assert code == 1
    assert all(line.startswith("state: callbacks[") for line in lines[:-1])


def test_differences_are_named(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        module[0].weight.fill_(1.0)
    first = save(module, optimizers=[optimizer], state={"hyper_parameters": {"depth": 3}}, name="a")
    with torch.no_grad():
        module[0].weight[1, 0] = 1.25
        module[0].weight[1, 2] = 0.5
        module[1].running_mean[0] = 7.0
        optimizer.state[module[0].bias]["exp_avg"][1] += 1.0
    optimizer.param_groups[0]["lr"] = 0.05
    second = save(module, optimizers=[optimizer], state={"hyper_parameters": {"depth": 4}}, name="b", step=8)
    code, lines = diff(first, second, capsys=capsys)
    assert code == 1
    assert lines[0] == "manifest: step: 7 and 8"
    assert "model: 0.weight: 2 of 6 elements differ, by at most 0.5; the first at [1, 0]: 1.0 and 1.25" in lines
    assert any(line.startswith("model: 1.running_mean: 1 of 2 elements differs") for line in lines)
    assert any(
        line.startswith("optimizer: 0/0.bias/exp_avg: 1 of 2 elements differs, by at most 1; the first at [1]")
        for line in lines
    )
    assert "state: hyper_parameters['depth']: 3 and 4" in lines
    assert "state: optimizers[0]['groups'][0]['options']['lr']: 0.1 and 0.05" in lines
    assert lines[-1] == "6 differences: manifest 1, model 2, optimizer 1, state 2"


def test_shards_and_aliases_make_no_difference(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    tied = save(module, name="tied", shard=64)
    module[1].weight = nn.Parameter(module[0].weight.detach().clone())
    assert diff(tied, save(module, name="free"), capsys=capsys)[0] == 0
    code, lines = diff(tied, save(nn.Linear(3, 3), name="other"), capsys=capsys)
    assert code == 1
    assert "model: 0.weight: only in the first" in lines
    assert "model: weight: only in the second" in lines


def test_parts_that_only_one_has(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(nn.Linear(2, 2), name="a")
    second = save(nn.Linear(2, 2), nn.Linear(2, 2), name="b")
    code, lines = diff(first, second, capsys=capsys)
    assert code == 1
    assert f"{model_stem(1)}: the whole part: only in the second" in lines
    assert "state: models: 1 item and 2 items" in lines


def test_a_damaged_checkpoint_is_an_error(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = save(TinyModule(), name="a"), save(TinyModule(), name="b")
    data = bytearray((second / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (second / "model.safetensors").write_bytes(data)
    assert main(["checkpoint", "diff", str(first), str(second)]) == 2
    assert "model.safetensors" in capsys.readouterr().err


NAN = float("nan")


def other_nan() -> Tensor:
    return torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("first, second, words", [
    (torch.tensor(1.0), torch.tensor(1.0), None),
    (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), None),
    (torch.tensor([]), torch.tensor([]), None),
    (torch.tensor([math.inf]), torch.tensor([math.inf]), None),
    (torch.tensor([NAN]), other_nan(), "1 of 1 element differs, by at most NaN; the first at [0]: nan and nan"),
    (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), "by at most 0; the first at [1]: 0.0 and -0.0"),
    (torch.tensor([1.0, NAN]), torch.tensor([2.0, 1.0]), "2 of 2 elements differ, by at most NaN"),
    (torch.tensor([math.inf]), torch.tensor([-math.inf]), "by at most inf"),
    (torch.tensor(1.0), torch.tensor(2.0), "by at most 1; the first at []: 1.0 and 2.0"),
    (torch.tensor([1]), torch.tensor([1.0]), "int64 [1] and float32 [1]"),
    (torch.zeros(2, 3), torch.zeros(3, 2), "float32 [2, 3] and float32 [3, 2]"),
    (torch.tensor([2**62, 5]), torch.tensor([2**62 + 1, 5]), "1 of 2 elements differs, by at most 0"),
    (torch.tensor([True]), torch.tensor([False]), "by at most 1; the first at [0]: True and False"),
    (torch.tensor([1 + 2j]), torch.tensor([1 + 5j]), "by at most 3"),
    (torch.tensor([1.0]).bfloat16(), torch.tensor([1.5]).bfloat16(), "by at most 0.5"),
    (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), "by at most 1"),
    (torch.arange(6).reshape(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 6]]), "the first at [2, 1]: 5 and 6"),
    (None, torch.zeros(1), "only in the second"),
])  # fmt: skip
def test_tensors_are_compared_bit_for_bit(first: Tensor | None, second: Tensor | None, words: str | None) -> None:
    found = compare_tensors(first, second)
    assert (found is None) if words is None else (found is not None and words in found), found


def test_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.cli.checkpoint.compare._CHUNK", 7)
    first = torch.arange(60.0).reshape(5, 12)
    second = first.clone()
    second[1, 3] += 1
    second[4, 11] -= 3
    assert compare_tensors(first, second) == "2 of 60 elements differ, by at most 3; the first at [1, 3]: 15.0 and 16.0"
    assert compare_tensors(first, first.clone()) is None


def test_values_with_their_types() -> None:
    first = {
        "same": [1, (2.0, NAN)], "zero": 0.0, "kind": 1, "tuple": (1,), "gone": 1, 7: "x", "t": torch.ones(2), "a": np.ones(2),
        "list": [1, 2], "z": complex(0.0, -0.0), "np": np.float32(1.0), "text": np.array(["a", "b"]), "wide": np.array(["a"]),
        "objects": np.array([1, "a"], object), "more": np.ones(2),
    }  # fmt: skip
    second = {
        "same": [1, (2.0, NAN)], "zero": -0.0, "kind": True, "tuple": [1], "new": 2, 7: "y", "t": torch.zeros(2),
        "a": np.zeros(2), "list": [1, 3, 4], "z": complex(0.0, 0.0), "np": np.float32(1.0), "text": np.array(["a", "c"]),
        "wide": np.array(["ab"]), "objects": np.array([1, "a"], object), "more": np.ones(2, np.int64),
    }  # fmt: skip
    assert dict(compare_values(first, second, "s")) == {
        "s['zero']": "0.0 and -0.0",
        "s['kind']": "1 and True",
        "s['tuple']": "(1,) and [1]",
        "s['gone']": "only in the first: 1",
        "s['new']": "only in the second: 2",
        "s[7]": "'x' and 'y'",
        "s['t']": "2 of 2 elements differ, by at most 1; the first at [0]: 1.0 and 0.0",
        "s['a']": "2 of 2 elements differ, by at most 1; the first at [0]: 1.0 and 0.0",
        "s['list']": "2 items and 3 items",
        "s['list'][1]": "2 and 3",
        "s['z']": "-0j and 0j",
        "s['text'][1]": "'b' and 'c'",
        "s['wide']": "array <U1 [1] ['a'] and array <U2 [1] ['ab']",
        "s['more']": "array float64 [2] [1.0, 1.0] and array int64 [2] [1, 1]",
    }
