"""`trainkit estimate-memory`: the memory of models of transformers, and one of a placeholder for timm."""

from __future__ import annotations

import importlib.machinery
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.cli.main import main

TINY = {"model_type": "bert", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 30000}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def table(output: str) -> dict[str, list[str]]:
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_the_sizes_are_those_of_accelerate(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    utils = pytest.importorskip("accelerate.utils")
    import transformers

    assert main(["estimate-memory", str(bert)]) == 0
    shown = capsys.readouterr().out
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(bert))
    total, (largest, _) = utils.calculate_maximum_sizes(model)
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert shown.startswith(f"{bert}, {trained:,} parameters:\n")
    found = table(shown)
    assert list(found) == ["float32", "float16", "int8", "int4"]
    adam = f"{(total + 12 * trained) / 2**20:.1f} MiB"  # gradients and two moments in addition to the weights
    assert found["float32"] == [f"{largest / 2**20:.1f} MiB", f"{total / 2**20:.1f} MiB", adam]
    assert found["float16"][0] == f"{largest / 2 / 2**20:.1f} MiB"
    assert found["float16"][2] == adam
    assert found["int4"][0] == f"{largest / 8 / 2**20:.1f} MiB"
    assert found["int8"][2] == found["int4"][2] == "-"


def test_the_dtypes_that_are_named(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate-memory", str(bert), "--library_name", "transformers", "--dtypes", "int8", "float16"]
    assert main(arguments) == 0
    assert list(table(capsys.readouterr().out)) == ["int8", "float16"]


def test_code_of_the_model_runs_only_if_it_is_trusted(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bert / "own.py").write_text(
        "from transformers import PretrainedConfig, PreTrainedModel\nimport torch\n"
        "class Config(PretrainedConfig):\n    model_type = 'own'\n"
        "class Model(PreTrainedModel):\n    config_class = Config\n"
        "    def __init__(self, config):\n        super().__init__(config)\n        self.layer = torch.nn.Linear(256, 256)\n"
    )
    remote = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (bert / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": remote}))
    assert main(["estimate-memory", str(bert)]) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert main(["estimate-memory", str(bert), "--trust_remote_code"]) == 0
    assert "65,792 parameters" in capsys.readouterr().out


def test_a_model_of_timm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    timm: Any = types.ModuleType("timm")
    timm.__spec__ = importlib.machinery.ModuleSpec("timm", None, origin="here")
    timm.create_model = lambda name, pretrained: nn.Sequential(nn.Linear(1024, 512, bias=False), nn.Linear(512, 4, bias=False))
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert main(["estimate-memory", "resnet", "--library_name", "timm", "--dtypes", "float32"]) == 0
    assert table(capsys.readouterr().out) == {"float32": ["2.0 MiB", "2.0 MiB", "8.0 MiB"]}


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    assert main(["estimate-memory", str(tmp_path)]) == 2
    assert re.search(r"(?s)transformers cannot create '.*Fix: check the name or the folder", capsys.readouterr().err)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["estimate-memory", "x", "--library_name", "timm"]) == 2
    assert "estimate-memory needs the package timm. Install it with: pip install timm" in capsys.readouterr().err
