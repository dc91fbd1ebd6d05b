"""One object in one file, written by `Accelerator.save` and read by `trainkit.utils.load`."""

from __future__ import annotations

import collections
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resume.resuming import forked
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from trainkit.checkpoint.plain_files import read_tensors, write_object
from trainkit.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
    UnsavableError,
)
from trainkit.utils import load

FILE = Path("object")


def again(value: Any) -> Any:
    write_object(FILE, value)
    return load(FILE)


def test_a_state_dict_is_a_plain_file_of_tensors() -> None:
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    found = again(state)
    assert list(found) == list(load_file(FILE))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with safe_open(FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_of_several_names_is_stored_once() -> None:
    weight = torch.randn(3, 4)
    found = again({"a": weight, "b": weight.detach(), "row": weight[0], "turned": weight.T})
    assert set(load_file(FILE)) == {"a", "row", "turned"}, (
        "another part, or another order, of the same memory is another tensor"
    )
    assert found["a"] is found["b"]
    assert torch.equal(found["row"], weight[0])
    assert torch.equal(found["turned"], weight.T)
    assert FILE.stat().st_size < 3 * weight.nbytes + 1000
    tensors, aliases = read_tensors(FILE)
    assert (set(tensors), aliases) == ({"a", "row", "turned"}, {"b": "a"})


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text, and longer than eight bytes",
        [1, 2.5, float("inf")],
        {},
        {"$odd": {1: "a", (2, 3): b"bytes"}, "set": {1, 2}, "path": Path("a/b")},
        collections.Counter(a=2),
        torch.float16,
    ],
)
def test_other_values_are_stored_as_json(value: Any) -> None:
    found = again(value)
    assert found == value
    assert type(found) is type(value)
    json.loads(FILE.read_text())


def test_tensors_among_other_things() -> None:
    weight = torch.randn(2, 3)
    value = {"model": {"w": weight, "tied": weight.detach()}, "epoch": 3, "history": (1.5, np.arange(4)), 7: torch.tensor(True)}
    found = again(value)
    assert found.keys() == value.keys()
    assert (found["epoch"], found["history"][0], found[7].item()) == (3, 1.5, True)
    assert isinstance(found["history"], tuple)
    assert np.array_equal(found["history"][1], np.arange(4))
    assert torch.equal(found["model"]["w"], weight)
    assert found["model"]["w"] is found["model"]["tied"]
    assert len(load_file(FILE)) == 3, "which any program reads"
    assert torch.equal(again(torch.ones(2)), torch.ones(2))
    with pytest.raises(CorruptCheckpointError, match="expected tensors by name, found another object .*trainkit.utils.load"):
        read_tensors(FILE)


def test_values_are_those_at_the_call_and_of_any_dtype() -> None:
    tensors = {
        "half": torch.randn(3).bfloat16(),
        "turned": torch.randn(4, 5).T,
        "none": torch.empty(0, 3),
        "number": torch.tensor(7),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    found = again(tensors)
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    found["parameter"].fill_(2.0)  # loaded tensors can be changed
    assert not found["parameter"].requires_grad


def test_a_file_of_another_program() -> None:
    save_file({"x": torch.arange(3)}, "theirs.safetensors", metadata={"who": "they"})
    assert torch.equal(load("theirs.safetensors")["x"], torch.arange(3))
    os.symlink("theirs.safetensors", "link")
    assert torch.equal(load("link", map_location="cpu")["x"], torch.arange(3))
    with pytest.raises(ConfigurationError, match="device 'meta' is not supported"):
        load("link", map_location="meta")


@pytest.mark.parametrize("length", [0x80, 0x280, 0x4B50])
def test_a_length_that_begins_like_a_pickle(length: int) -> None:
    header = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(length)
    FILE.write_bytes(length.to_bytes(8, "little") + header + b"\x05")
    assert load(FILE)["x"].tolist() == [5]


def test_folders_are_created_and_files_replaced() -> None:
    write_object(Path("a/b/c.json"), 1)
    write_object(Path("a/b/c.json"), {"x": torch.ones(1)})
    write_object(Path("a/b/c.json"), 2)
    assert load("a/b/c.json") == 2
    left = Path("a/b/.c.json.tmp-0123")
    left.write_text("left by a kill")
    os.utime(left, (1, 1))
    write_object(Path("a/b/c.json"), 3)
    assert (load("a/b/c.json"), os.listdir("a/b")) == (3, ["c.json"])


def test_a_value_that_cannot_be_stored_leaves_the_old_file() -> None:
    write_object(FILE, 1)
    for value, said in (
        ({"model": nn.Linear(1, 1)}, r'object\["model"\] cannot be stored: it is a module'),
        ({"f": [print]}, r'object\["f"\]\[0\] cannot be stored: it is code'),
        ({"x": torch.empty(2, device="meta")}, "the tensor 'x' cannot be stored: it is on the meta device"),
        ({"__metadata__": torch.ones(1)}, "the name is reserved"),
    ):
        with pytest.raises(UnsavableError, match=said):
            write_object(FILE, value)
    assert (load(FILE), os.listdir()) == (1, ["object"])


def test_a_full_disk_leaves_the_old_file() -> None:
    write_object(FILE, 1)

    def fill() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        try:
            write_object(FILE, {"large": torch.zeros(2**20)})
        except CheckpointWriteError as error:
            return str(error)
        return "it was written"

    status, said = forked(fill)
    assert status == 0
    assert said.startswith("object could not be written: ")
    assert (load(FILE), sorted(os.listdir())) == (1, ["answer.json", "object"])


def test_a_kill_leaves_the_old_or_the_new_file() -> None:
    """A kill before the temporary file is opened or renamed leaves the old file; without a kill, the new file is there."""
    write_object(FILE, {"x": torch.zeros(2**20)})

    def killed(state: dict[str, int]) -> None:
        import sys

        def watch(event: str, args: Any) -> None:
            if event in ("open", "os.rename") and ".object.tmp" in str(args[0]):
                state["left"] -= 1
                if state["left"] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        write_object(FILE, {"x": torch.ones(2**20)})

    values = []
    for survived in range(3):
        status, _ = forked(lambda survived=survived: killed({"left": survived}))
        assert status == (signal.SIGKILL if survived < 2 else 0)
        values.append(float(load(FILE)["x"].unique()))
    assert values == [0.0, 0.0, 1.0]
    left = {name for name in os.listdir() if name.startswith(".object.tmp-")}  # of the two kills; a later save removes them
    assert len(left) <= 2
    assert set(os.listdir()) - left <= {"answer.json", "object"}


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "not valid JSON"),
        (b"hello, world", "not valid JSON"),
        ((99).to_bytes(8, "little") + b"{}", "a header of 99 bytes in a file of 10 bytes"),
        (b'{"$tensor": "#x"}', "refers to the tensor '#x', which does not exist"),
        (b'{"$code": "x"}', "unknown tag"),
    ],
)
def test_other_files_are_refused(data: bytes, said: str) -> None:
    FILE.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=said):
        load(FILE)


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(30), b"\x80\x02}q\x00."])
def test_a_pickle_is_not_a_file_of_tensors(data: bytes) -> None:
    FILE.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"looks like a pickle.*torch.load"):
        read_tensors(FILE)


@pytest.mark.parametrize("aliases", ['["a"]', '{"b": "c"}', '{"a": "a"}', '{"b": 1}', "{", '{"b": "a", "b": "a"}'], ids=str)
def test_malformed_aliases_are_refused(aliases: str) -> None:
    save_file({"a": torch.ones(1)}, FILE, metadata={"trainkit_aliases": aliases})
    with pytest.raises(CorruptCheckpointError, match="trainkit_aliases"):
        load(FILE)


def test_a_missing_file() -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere cannot be read: there is no such file"):
        load("nowhere")
    with pytest.raises(CheckpointNotFoundError, match="it is a folder"):
        read_tensors(".")
