"""Files in torch's format: written with plain values, read by a process of their own."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections import OrderedDict, namedtuple
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.trainers import same
from torch import nn

from trainkit.checkpoint.plain_files import write_object
from trainkit.checkpoint.torch_file import is_torch_file, load, note_in, plain, write_torch_file
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointWriteError, ConfigurationError, CorruptCheckpointError, UnsavableError

FILE = Path("value.pt")
Pair = namedtuple("Pair", "a b")


class Color(str, Enum):
    RED = "red"


def again(value: Any) -> Any:
    write_torch_file(FILE, value)
    return torch.load(FILE, weights_only=True)


@pytest.mark.parametrize(
    "value, stored",
    [
        ({"a": [1, 2.5, True, None, "x", b"y", (1, (2,))], 3: {"b": {}}}, None),
        (OrderedDict(a=Pair(1, torch.Size([2, 3]))), {"a": (1, (2, 3))}),
        ([np.float32(0.5), np.int64(3), np.bool_(True), Color.RED], [0.5, 3, True, "red"]),
        (argparse.Namespace(lr=0.1, names=["a"]), {"lr": 0.1, "names": ["a"]}),
        (float("nan"), None),
        ({"dtype": torch.bfloat16}, None),
    ],
    ids=str,
)
def test_values(value: Any, stored: Any) -> None:
    found, expected = again(value), value if stored is None else stored
    assert repr(found) == repr(expected)  # as NaN is not equal to itself, and True is equal to 1


def test_tensors() -> None:
    base = torch.arange(1000.0)
    layer = nn.Linear(2, 2)
    value = {
        "part": base[10:12],
        "turned": torch.randn(3, 2).T,
        "parameter": layer.weight,
        "tied": layer.weight,
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }
    found = again(value)
    assert same(found, value)
    assert found["tied"] is found["parameter"]
    assert not found["parameter"].requires_grad
    assert found["part"].untyped_storage().nbytes() == 8, "not the thousand numbers that it is a part of"
    assert os.path.getsize(FILE) < 3500


@pytest.mark.parametrize(
    "value, said",
    [
        ({"a": [nn.Linear(1, 1)]}, r"object\['a'\]\[0\] cannot be stored in torch's format: it is a Linear.*state_dict"),
        ({"a": {1, 2}}, r"object\['a'\] .*it is a set"),
        ({"a": np.arange(3)}, r"object\['a'\] .*add_safe_globals\(\[numpy.*Int64DType\]\).*store torch.from_numpy\(array\)"),
        ([np.array(["a", 1], object)], r"object\[0\] .*ObjectDType\]\). Fix: call that before you save, or store tolist"),
        (np.array(["2020"], "datetime64[D]"), "object .*it is a ndarray"),
        ({(1, "a"): np.array([nn.Linear(1, 1)])}, "object.*cannot be stored"),
        ({"a": torch.device("cpu")}, r"object\['a'\] .*it is a device"),
        ({"f": len}, r"object\['f'\] .*it is a builtin_function_or_method"),
        (torch.empty(2, device="meta"), "on the meta device"),
        ({(1, torch.ones(1)): 1, torch.ones(1): 2}, "a key of object cannot be stored"),
    ],
)
def test_nothing_else_is_stored(value: Any, said: str) -> None:
    again(1)
    with pytest.raises(UnsavableError, match=said):
        write_torch_file(FILE, value)
    assert torch.load(FILE, weights_only=True) == 1, "an existing file is unchanged"


ARRAYS = {
    "numbers": np.arange(6.0).reshape(2, 3),
    "texts": np.array([["a", "bc"]]),
    "objects": np.array(["PAD", 101, (1, [2])], object),
}


def test_arrays_that_the_program_calls_safe_stay_arrays() -> None:
    """What the error names is what `torch.load(weights_only=True)` needs, and no more is stored than that."""
    names = set[Any]()
    for array in ARRAYS.values():
        with pytest.raises(UnsavableError) as found:
            write_torch_file(FILE, array)
        listed = str(found.value).partition("add_safe_globals([")[2].partition("])")[0].split(", ")
        names |= {attrgetter(name.removeprefix("numpy."))(np) for name in listed}
    with torch.serialization.safe_globals([*names]):
        found_arrays = again(ARRAYS)
        with pytest.raises(UnsavableError, match=r"object\[1\] cannot be stored in torch's format: it is a Linear"):
            write_torch_file(FILE, np.array([1, nn.Linear(1, 1)], object))
    assert found_arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found_arrays[name].dtype, found_arrays[name].tolist()) == (array.dtype, array.tolist())


def test_other_arrays_are_replaced_on_request() -> None:
    replaced: list[str] = []
    found = plain(ARRAYS, "saved", replaced)
    assert torch.equal(found.pop("numbers"), torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert found == {"texts": [["a", "bc"]], "objects": ["PAD", 101, (1, [2])]}
    kinds = {"numbers": "tensor", "texts": "list", "objects": "list"}
    assert [text.partition(":")[0] for text in replaced] == [f"saved['{n}'] is stored as a {k}" for n, k in kinds.items()]


def test_a_value_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsavableError, match="expected at most 100 levels"):
        write_torch_file(FILE, value)


def test_a_file_is_there_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    again({"a": 1})

    def full(value: Any, file: Any) -> None:
        file.write(b"PK")
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 64 vs 0")  # what torch raises

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(CheckpointWriteError, match=r"value.pt could not be written: the disk may be full .*unexpected pos"):
            write_torch_file(FILE, {"a": 2})
    assert torch.load(FILE, weights_only=True) == {"a": 1}
    assert os.listdir() == ["value.pt"]
    FILE.unlink()
    FILE.mkdir()
    with pytest.raises(CheckpointWriteError, match="Is a directory"):
        write_torch_file(FILE, 1)


def test_two_that_write_one_file_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other begins and ends while this one writes."""
    save = torch.save

    def slow(value: Any, file: Any) -> None:
        if value == {"a": 1}:
            file.write(b"the first part")
            write_torch_file(FILE, {"a": 2})
            assert torch.load(FILE, weights_only=True) == {"a": 2}
            file.seek(0)
        save(value, file)

    monkeypatch.setattr(torch, "save", slow)
    write_torch_file(FILE, {"a": 1})
    assert torch.load(FILE, weights_only=True) == {"a": 1}
    assert os.listdir() == ["value.pt"]


def test_a_note_is_lost_when_another_program_saves_the_file() -> None:
    write_torch_file(FILE, {"a": torch.ones(3)}, note="made of x")
    assert note_in(FILE) == "made of x"
    value = torch.load(FILE, weights_only=True, mmap=True)
    assert torch.equal(value["a"], torch.ones(3))
    with zipfile.ZipFile(FILE) as archive:
        assert archive.testzip() is None
    torch.save(value, "copy.pt")
    assert [note_in(Path(name)) for name in ("copy.pt", "absent.pt")] == ["", ""]


def test_reading() -> None:
    value = {"w": torch.randn(2, 3), "n": [1, "x"]}
    torch.save(value, "zip.weights")
    torch.save(value, "old.weights", _use_new_zipfile_serialization=False)
    write_object(Path("ours.pt"), value)
    for name in ("zip.weights", "old.weights", "ours.pt"):
        assert is_torch_file(name) == (name != "ours.pt"), name
        assert torch.equal(load(name)["w"], value["w"]), name
        assert load(name)["n"] == [1, "x"], name
    with pytest.raises(ConfigurationError, match="device 'meta' is not supported"):
        load("zip.weights", map_location="meta")


def test_what_is_no_plain_value_is_omitted_and_said() -> None:
    torch.save({"w": torch.ones(1), "net": nn.ReLU()}, FILE)
    with pytest.warns(TrainkitWarning, match=r"value.pt: not all of it was read: .*net \(torch.nn.modules.activation.ReLU\)"):
        assert load(FILE) == {"w": torch.ones(1)}
    FILE.write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch PWNED\x85R.")
    with pytest.raises(CorruptCheckpointError, match=r"the file tries to run code: it calls posix.system"):
        load(FILE)
    assert os.listdir() == ["value.pt"]
