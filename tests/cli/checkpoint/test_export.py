"""`trainkit checkpoint export`: plain safetensors files, and the errors. Folders for other libraries: test_formats.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule
from helpers.runs.trainers import same
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from trainkit.cli.main import main


class Two(nn.Module):
    """Two submodules; a parameter is tied within `net`, and BatchNorm has an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
        self.net[1][1].weight = self.net[0].weight
        self.scale = nn.Parameter(torch.tensor([1.0, 1e6]))


def export(*arguments: object) -> int:
    return main(["checkpoint", "export", *map(str, arguments)])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_whole_model(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, out = Two(), tmp_path / "out"
    assert export(save(module), out) == 0
    shown = capsys.readouterr().out.splitlines()
    size = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert shown == [
        f"Wrote {out}: safetensors, 10 tensors, {size} B",
        "  tied tensors are written once; not written, each with the tensor that it is tied to: net.1.1.weight (net.0.weight)",
    ]
    expected = module.state_dict()
    del expected["net.1.1.weight"]
    assert same(load_file(out / "model.safetensors"), expected)
    assert sorted(os.listdir(out)) == ["model.safetensors", "trainkit_export.json"]
    mark = json.loads((out / "trainkit_export.json").read_text())
    assert (mark["checkpoint"], mark["step"], mark["format"]) == ("ck", 7, "safetensors")
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "attribute, module", [("net", lambda m: m.net), ("net.1", lambda m: m.net[1]), ("head", lambda m: m.head)]
)
def test_an_exported_attribute_loads_into_the_module(save: Any, tmp_path: Path, attribute: str, module: Any) -> None:
    model = Two()
    assert export(save(model), tmp_path / "out", "--attribute", attribute) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = module(model).state_dict()
    if attribute == "net":
        del expected["1.1.weight"]
    assert same(found, expected)  # also a tied tensor that the checkpoint stores under a name outside of the module


@pytest.mark.parametrize("name, dtype", [
    ("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64), ("fp16", torch.float16),
])  # fmt: skip
def test_casting(save: Any, tmp_path: Path, name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    module = Two()
    assert export(save(module), tmp_path / "out", "--dtype", name) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in found.items():
        source = module.state_dict()[key]
        wanted: Tensor = source.to(dtype) if source.is_floating_point() else source
        assert tensor.dtype == wanted.dtype, key
        assert tensor.equal(wanted), key
    assert found["net.1.0.num_batches_tracked"].dtype == torch.int64
    said = "scale: 1 of 2 values are too large for float16 and became infinite" in capsys.readouterr().out
    assert said == (name == "fp16")


def test_several_files_and_an_index(save: Any, tmp_path: Path) -> None:
    module, out = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), tmp_path / "out"
    path = save(module)
    assert export(path, out, "--max-shard-size", "2KB") == 0
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) == 4
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert same(found, module.state_dict())
    assert export(path, out) == 0  # an export into one file must remove the old shards, or they would be read too
    assert sorted(os.listdir(out)) == ["model.safetensors", "trainkit_export.json"]
    assert same(load_file(out / "model.safetensors"), module.state_dict())


def test_several_models_of_a_training_loop(save: Any, tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3))
    path = save(first, second)
    for arguments, module in (([], first), (["--attribute", "model_1"], second), (["--attribute", "model_1/0"], second[0])):
        assert export(path, tmp_path / "out", *arguments) == 0
        assert same(load_file(tmp_path / "out" / "model.safetensors"), module.state_dict())


def test_only_trained_parameters(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    assert export(save(module, save="trainable"), tmp_path / "out") == 0
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"1.weight", "1.bias"}
    assert "contains only trained parameters; 2 frozen ones are missing" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, words", [
    (["--attribute", "nett"], "The model has no module 'nett'. Did you mean 'net'? Modules: head, net, and their submodules."),
    (["--attribute", "net.7"], "The model has no module 'net.7'."),
    (["--attribute", "net.0.weight"], "It is a parameter or buffer; expected a module."),
    (["--attribute", "scale"], "It is a parameter or buffer; expected a module."),
    (["--format", "transformers"], "expected a transformers model, but the module is not one. Fix: --format safetensors"),
    (["--format", "peft"], "expected a PEFT model"),
    (["--max-shard-size", "lots"], "max_shard_size must be a size such as '5GB'"),
    (["--dtype", "int8"], "invalid choice: 'int8'"),
])  # fmt: skip
def test_wrong_arguments_write_nothing(
    save: Any, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(Two())
    before = files(tmp_path)
    assert export(path, tmp_path / "new" / "out", *arguments) == 2
    assert words in capsys.readouterr().err
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["ck"]


def test_a_damaged_checkpoint_writes_nothing(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(TinyModule())
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert export(path, tmp_path / "out") == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["ck"]


def test_existing_files_are_not_overwritten(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = save(TinyModule()), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("all of it")
    (out / "adapter_config.json").write_text("{}")
    assert export(path, out) == 2
    assert (
        "is neither empty nor an earlier export; it contains adapter_config.json, thesis.tex. Fix:" in capsys.readouterr().err
    )
    assert sorted(os.listdir(out)) == ["adapter_config.json", "thesis.tex"]
    assert export(path, out, "--overwrite") == 0
    # a file that another program would read as part of the export is removed; other files are kept
    assert sorted(os.listdir(out)) == ["model.safetensors", "thesis.tex", "trainkit_export.json"]
    assert export(path, out) == 0  # the folder of an earlier export may be replaced
    (tmp_path / "file").touch()
    assert export(path, tmp_path / "file", "--overwrite") == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert export(path, empty) == 0


def test_a_checkpoint_is_never_written_to(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = save(TinyModule(), name="a"), save(TinyModule(), name="b")
    before = files(tmp_path)
    for arguments in ([path, other], [path, path], [path, other, "--overwrite"]):
        assert export(*arguments) == 2
        assert "is a checkpoint, which an export would damage" in capsys.readouterr().err
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_created(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(TinyModule())
    (tmp_path / "file").touch()
    assert export(path, tmp_path / "file" / "out") == 2
    assert "could not be written" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["ck", "file"]


def test_a_full_disk_keeps_existing_files(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = save(nn.Linear(200, 200)), tmp_path / "out"
    assert export(path, out) == 0
    before = files(out)
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        code = export(path, out, "--dtype", "fp64"), export(path, tmp_path / "a" / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == (2, 2)
    assert "could not be written" in capsys.readouterr().err
    assert files(out) == before
    assert sorted(os.listdir(tmp_path)) == ["ck", "out"]


def test_a_file_for_torch(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, out = Two(), tmp_path / "out.ckpt"
    saved = save(module)
    assert export(saved, out) == 0
    assert capsys.readouterr().out.startswith(f"Wrote {out}: for torch.load, ")
    read = torch.load(out, weights_only=True)
    assert same(read["state_dict"], module.state_dict())
    assert read["pytorch-lightning_version"] == "2.6.6"

    assert export(saved, out, "--attribute", "net", "--dtype", "fp16") == 0
    read = torch.load(out, weights_only=True)["state_dict"]
    assert same(read, module.net.half().state_dict())

    assert export(saved, out, "--format", "safetensors") == 2
    assert "--format safetensors writes a folder, and" in capsys.readouterr().err
    assert export(saved, tmp_path / "out.pt") == 2
    assert "Expected a folder or a file X.ckpt" in capsys.readouterr().err
    torch.save({"mine": 1}, out)
    assert export(saved, out) == 2
    assert "out.ckpt exists, and was not made of a checkpoint" in capsys.readouterr().err
    assert export(saved, out, "--overwrite") == 0
    assert "state_dict" in torch.load(out, weights_only=True)
