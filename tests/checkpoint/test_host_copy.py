"""Copies in reused host memory: in the layout of the files, independent of the tensors, allocated only once."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainkit.checkpoint.host_copy import HostBuffers
from trainkit.checkpoint.tensor_file import TensorFile, chunks, plan_files, tensors_in
from trainkit.errors import UnsavableError

Files = dict[str, tuple[TensorFile, dict[str, Tensor]]]


def lay_out(stem: str, tensors: dict[str, Tensor], limit: int = 10**12) -> Files:
    files, _ = plan_files(stem, tensors, limit)
    return {file.name: (file, {entry.name: tensors[entry.name] for entry in file.entries}) for file in files}


def streamed(files: Files) -> dict[str, bytes]:
    return {
        name: b"".join(bytes(piece) for entry in file.entries for piece in chunks(entry, tensors[entry.name]))
        for name, (file, tensors) in files.items()
    }


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def make() -> dict[str, Tensor]:
    base = torch.arange(24.0)
    return {
        "bool": torch.tensor([True, False, True]),
        "weight": nn.Parameter(torch.randn(3, 5)),
        "transposed": torch.randn(4, 6).T,
        "half": torch.randn(7).to(torch.bfloat16),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "long": torch.arange(5),
        "conj": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "tied": base,
        "view": base[3:9],
        "expanded": torch.ones(1).expand(4),
        "graph": torch.ones(2, requires_grad=True) * 3,
        "unsigned": torch.arange(3).to(torch.uint16),
    }


def test_the_bytes_are_those_of_the_files() -> None:
    files = lay_out("model", make()) | lay_out("optimizer", make(), limit=700) | lay_out("state", {})
    assert len(files) > 3
    copied = HostBuffers().copy(files)
    assert {name: bytes(view) for name, view in copied.items()} == streamed(files)
    for name, (file, tensors) in files.items():
        assert len(copied[name]) == file.size - len(file.header)
        read = tensors_in(file.header + bytes(copied[name]), name)
        assert all(torch.equal(read[key].float(), tensor.detach().float()) for key, tensor in tensors.items() if key != "conj")


def test_changing_the_tensors_changes_nothing_in_the_copy() -> None:
    tensors = {"a": torch.ones(1000), "b": torch.zeros(3, 3)}
    files = lay_out("model", tensors)
    copied = HostBuffers().copy(files)
    before = bytes(copied["model.safetensors"])
    for tensor in tensors.values():
        tensor.fill_(7)
    assert bytes(copied["model.safetensors"]) == before != streamed(files)["model.safetensors"]


def test_the_second_copy_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = HostBuffers()
    tensors = {"a": torch.ones(100_000), "b": torch.zeros(3, 3)}
    files = lay_out("model", tensors) | lay_out("optimizer", tensors)
    first = {name: address(view) for name, view in buffers.copy(files).items()}
    held = buffers.nbytes
    tensors["a"].fill_(5)

    def empty(*args: object, **kwargs: object) -> None:
        raise AssertionError("memory is allocated")

    monkeypatch.setattr(torch, "empty", empty)
    second = buffers.copy(files)
    assert {name: address(view) for name, view in second.items()} == first
    assert {name: bytes(view) for name, view in second.items()} == streamed(files)
    assert buffers.nbytes == held == sum(file.size - len(file.header) for file, _ in files.values())
    # only some of the files, as in a weights-only save, and then all of them again
    part = {name: value for name, value in files.items() if name.startswith("model")}
    assert {name: address(view) for name, view in buffers.copy(part).items()} == {name: first[name] for name in part}
    assert {name: address(view) for name, view in buffers.copy(files).items()} == first


def test_memory_follows_what_is_saved() -> None:
    """The buffers have the size of the last save, and other files replace the old buffers."""
    buffers = HostBuffers()
    for size in (1000, 1010, 1020, 500, 2000):
        files = lay_out("model", {"a": torch.full((size,), float(size))})
        assert {name: bytes(view) for name, view in buffers.copy(files).items()} == streamed(files)
    assert buffers.nbytes <= 8000 * 1.1
    files = lay_out("other", {f"t{i}": torch.ones(500) for i in range(4)}, limit=3000)
    assert len(files) == 4
    buffers.copy(files)
    assert buffers.nbytes == 8000  # the memory for "model" is released
    buffers.free()
    assert buffers.nbytes == 0
    assert {name: bytes(view) for name, view in buffers.copy(files).items()} == streamed(files)


def test_a_tensor_of_another_shape_is_not_squeezed_in() -> None:
    """A changed shape or dtype is an error: `copy_` would silently broadcast or convert the values."""
    files = lay_out("model", {"a": torch.ones(4)})
    for other in (torch.ones(1), torch.ones(4, dtype=torch.float64), torch.ones(())):
        changed = {name: (file, {"a": other}) for name, (file, _) in files.items()}
        with pytest.raises(UnsavableError, match="'a' was torch.float32"):
            HostBuffers().copy(changed)


def test_the_copies_keep_no_other_object_alive() -> None:
    buffers = HostBuffers()
    tensor = torch.ones(1000)
    view = buffers.copy(lay_out("model", {"a": tensor}))["model.safetensors"]
    watched = weakref.ref(buffers), weakref.ref(tensor)
    del buffers, tensor
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"  # the bytes live as long as the view


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tensors_on_cuda_are_copied_to_page_locked_memory() -> None:
    device = torch.device("cuda")
    tensors = {name: tensor.detach().to(device) for name, tensor in make().items()} | {"host": torch.ones(3)}
    tensors["large"] = torch.randn(5_000_000, device=device)
    files = lay_out("model", tensors)
    buffers = HostBuffers()
    for value in (1.0, 2.0):
        tensors["large"].fill_(value)
        copied = buffers.copy(files)
        tensors["large"].fill_(9.0)  # queued behind the copy
        read = tensors_in(files["model.safetensors"][0].header + bytes(copied["model.safetensors"]), "x")
        assert read["large"].unique().tolist() == [value]
    assert len(buffers._locked) == 1
    assert torch.frombuffer(copied["model.safetensors"], dtype=torch.uint8).is_pinned()
    buffers.free()
    assert not buffers._locked
