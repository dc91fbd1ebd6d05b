"""The files of a model whose weights another program opens by its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import content, load, seal
from safetensors.torch import load_file

from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.checkpoint_plan import CheckpointPlan, sizes_to_copy
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.model_files import files_problem, model_name, split_names
from trainkit.errors import CorruptCheckpointError, StateMismatchError

OF_MODEL: dict[str, Any] = {"model": {"prefix": "net."}, "module": {"prefix": ""}}
OF_ADAPTER: dict[str, Any] = {
    "adapter_model": {"prefix": "net.", "names": {"a": "a.default", "b": "b"}},
    "module": {"prefix": ""},
}


@pytest.mark.parametrize("files", [{}, OF_MODEL, OF_ADAPTER])
def test_each_name_is_in_one_file_and_comes_back(files: dict[str, Any]) -> None:
    names = ["net.a.default", "net.b", "net.a", "head", "nets.a", "net"]
    by_file = split_names(names, files)
    back = [model_name(files.get(stem, {"prefix": ""}), name) for stem, own in by_file.items() for name in own]
    assert sorted(back) == sorted(names)
    assert sorted(name for own in by_file.values() for name in own.values()) == sorted(names)


def test_the_names_in_the_files() -> None:
    names = ["net.a.default", "net.b", "head"]
    assert split_names(names, OF_MODEL) == {"model": {"a.default": "net.a.default", "b": "net.b"}, "module": {"head": "head"}}
    assert split_names(names, OF_ADAPTER)["adapter_model"] == {"a": "net.a.default", "b": "net.b"}
    assert split_names(["head"], OF_MODEL) == {"module": {"head": "head"}}  # no file without tensors
    assert split_names([], OF_MODEL) == {"model": {}}


@pytest.mark.parametrize(
    "value",
    [
        *([], {"model": "net."}, {"model": {}}, {"model": {"prefix": 1}}, {"optimizer": {"prefix": ""}}),
        *({"model": {"prefix": "", "names": []}}, {"model": {"prefix": "", "names": {"a": 1}}}),
    ],
)
def test_malformed_files_are_described(value: Any) -> None:
    problem = files_problem(value)
    assert problem is not None
    assert "expected an object with 'model', 'adapter_model' or 'module'" in problem
    assert files_problem(OF_MODEL) is None
    assert files_problem(OF_ADAPTER) is None


def saved(path: Path) -> Path:
    tensors = {"model": {"net.a": torch.ones(3), "head": torch.zeros(2), "net.b": torch.full((1,), 2.0)}}
    made = content(
        1,
        tensors=tensors,
        aliases={"model": {"tied": "net.a"}},
        state={"models": [{"extra": {}, "trained": {}, "fingerprint": None, "configs": {}}]},
    )
    made.model_files = OF_MODEL
    commit(CheckpointPlan(made), path)
    return path


def test_the_reader_gives_the_names_of_the_module(run_dir: Path) -> None:
    path = saved(run_dir / "ck")
    assert load_file(path / "model.safetensors").keys() == {"a", "b"}
    checkpoint = open_checkpoint(path)
    assert checkpoint.stems == ["model", "state"]
    assert checkpoint.read({"model"}).tensors["model"].keys() == {"net.a", "net.b", "head"}
    assert checkpoint.state_dict().keys() == {"net.a", "net.b", "head", "tied"}
    checkpoint.verify()
    with pytest.raises(StateMismatchError, match="module"):
        checkpoint.read({"module"})
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert (manifest["format_version"], manifest["model_files"]) == (4, OF_MODEL)


def test_parameters_that_are_not_finite_have_the_names_of_the_module() -> None:
    tensors = {"model": {"net.a": torch.full((1,), torch.nan), "head": torch.full((1,), torch.inf)}}
    made = content(1, tensors=tensors, parameters={"model": {"net.a": True, "head": True}}, aliases={})
    made.model_files = OF_MODEL
    plan = CheckpointPlan(made)
    for _, pieces in plan.files():
        list(pieces)
    assert plan.nonfinite == ["net.a", "head"]
    sizes = sizes_to_copy(made.tensors, model_files=OF_MODEL)
    assert sizes == {"model.safetensors": 4, "module.safetensors": 4}


def change(path: Path, files: Any) -> None:
    seal(path, lambda manifest: manifest.update(model_files=files))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"model": {"prefix": "net."}, "adapter_model": {"prefix": ""}, "module": {"prefix": ""}}, "adapter_model"),
        ({"module": {"prefix": ""}}, "model_files does not match the files of model"),
        ({"model": {"prefix": "", "names": {"a": "head"}}, "module": {"prefix": ""}}, "'head' is in two files"),
        ({"model": {"prefix": 7}}, "model_files"),
    ],
)
def test_files_that_contradict_the_checkpoint_are_corrupt(files: Any, named: str, run_dir: Path) -> None:
    path = saved(run_dir / "ck")
    change(path, files)
    with pytest.raises(CorruptCheckpointError, match=named):
        load(path)


def test_a_flipped_bit_in_either_file_is_found(run_dir: Path) -> None:
    for name in ("model.safetensors", "module.safetensors"):
        path = saved(run_dir / name.partition(".")[0])
        data = bytearray((path / name).read_bytes())
        data[-1] ^= 1
        (path / name).write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=name):
            open_checkpoint(path).verify()
