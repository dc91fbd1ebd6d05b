"""Files of tensors: other programs can read them, their size is known before writing, and wrong headers are errors."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from helpers.resume.checkpoints import complaint
from helpers.support import examples, run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from safetensors.torch import save as safetensors_save
from torch import Tensor, nn

from trainkit.checkpoint import tensor_file
from trainkit.checkpoint.checksum import DEFAULT_CHECKSUM
from trainkit.checkpoint.regular_file import read_file
from trainkit.checkpoint.tensor_file import Entry, FiniteCheck, TensorFile, chunks, plan_files, tensors_in, write_file
from trainkit.errors import ConfigurationError, CorruptCheckpointError, UnsavableError
from trainkit.tagged_json.tensors import DTYPES as FORMAT_DTYPES

LARGE = 10**12
NAME = "step-1/model.safetensors"
DTYPES = list(FORMAT_DTYPES.values())


def make(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape).to(dtype) if dtype is torch.bool else torch.randint(0, 100, shape).to(dtype)


def pieces(file: TensorFile, tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield file.header
    for entry in file.entries:
        yield from chunks(entry, tensors[entry.name])


def write(stem: str, tensors: dict[str, Tensor], max_shard_size: int = LARGE) -> list[tuple[TensorFile, str]]:
    files, _ = plan_files(stem, tensors, max_shard_size)
    written = []
    for file in files:
        size, digest = write_file(Path(file.name), pieces(file, tensors), DEFAULT_CHECKSUM)
        assert size == file.size == Path(file.name).stat().st_size
        assert digest == xxhash.xxh3_128_hexdigest(Path(file.name).read_bytes())
        written.append((file, digest))
    return written


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(read: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(read[name]) == raw(tensor), name


# ---------------------------------------------------------------------------------------------- writing and reading


def test_every_dtype_is_written_and_read_back_by_us_and_by_safetensors() -> None:
    tensors = {f"{dtype}.{shape}": make(dtype, *shape) for dtype in DTYPES for shape in [(), (3,), (2, 0), (2, 3, 1)]}
    ((file, digest),) = write("model", tensors)
    buffer = read_file(Path(file.name), file.size, digest, file.name)
    assert_same(tensors_in(buffer, file.name), tensors)
    assert_same(load_file(file.name), tensors)


def test_what_safetensors_writes_is_read() -> None:
    tensors = {f"t{i}": make(dtype, i, 2) for i, dtype in enumerate(DTYPES) if dtype != torch.float8_e8m0fnu}
    data = safetensors_save(tensors, metadata={"format": "pt", "more": "text"})
    assert_same(tensors_in(data, "x"), tensors)


def test_transformers_finds_its_metadata() -> None:
    file = plan_files("model", {"a": torch.ones(1)}, LARGE)[0][0]
    assert json.loads(file.header[8:])["__metadata__"] == {"format": "pt"}


def test_a_file_without_tensors_is_valid() -> None:
    ((file, digest),) = write("state", {})
    assert tensors_in(read_file(Path(file.name), file.size, digest, "x"), "x") == {}
    assert load_file(file.name) == {}


def test_data_is_aligned_and_read_without_a_copy() -> None:
    tensors = {f"{'n' * i}{d}": make(dtype, 3) for i in range(8) for d, dtype in enumerate(DTYPES)}
    ((file, digest),) = write("model", tensors)
    assert len(file.header) % 8 == 0
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries)
    buffer = read_file(Path(file.name), file.size, digest, "x")
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    read = tensors_in(buffer, "x")
    for entry in file.entries:
        assert read[entry.name].data_ptr() == start + len(file.header) + entry.start
        assert read[entry.name].untyped_storage().nbytes() == entry.end - entry.start  # not the whole file's
    read[file.entries[0].name].fill_(1)  # writable


def test_data_that_is_not_aligned_is_copied() -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[2],"data_offsets":[1,17]}}'
    data = struct.pack("<Q", len(header)) + header + b"\7" + struct.pack("<2d", 1.5, -2.5)
    for buffer in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8).copy().data):
        read = tensors_in(buffer, "x")
        assert (read["a"].tolist(), read["b"].tolist()) == ([7], [1.5, -2.5])
        assert read["b"].data_ptr() % 8 == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[::3],
        torch.ones(1).expand(5, 5),
        torch.arange(4.0)[1:],
        torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last),
        nn.Parameter(torch.arange(3.0)),
        torch.arange(3.0, requires_grad=True) * 2,
        torch.tensor(5).expand(()),
    ],
    ids=["transposed", "strided", "expanded", "offset", "conjugate", "negative", "channels", "parameter", "graph", "scalar"],
)
def test_any_strides_are_written_in_order(tensor: Tensor) -> None:
    ((file, digest),) = write("model", {"t": tensor})
    assert_same(tensors_in(read_file(Path(file.name), file.size, digest, "x"), "x"), {"t": tensor})


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        tensor = torch.arange(3.0)
    write("model", {"t": tensor})
    assert_same(load_file("model.safetensors"), {"t": tensor})


def test_tied_tensors_are_written_whole() -> None:
    base = torch.arange(10.0)
    tensors = {"all": base, "again": base, "part": base[2:5]}
    write("model", tensors)
    assert_same(load_file("model.safetensors"), tensors)


def test_pieces_are_small_and_share_memory_where_they_can() -> None:
    tensor = torch.arange(2_000_003, dtype=torch.int64)
    entry = Entry("t", tensor.dtype, (2_000_003,), 0, tensor.nbytes)
    found = list(chunks(entry, tensor))
    assert max(map(len, found)) <= 4 * 2**20
    assert b"".join(found) == raw(tensor)
    assert np.frombuffer(found[0], np.uint8).ctypes.data == tensor.data_ptr()


def test_large_tensors_of_other_strides_are_copied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any order of dimensions, at most one piece is copied at a time, never the whole tensor."""
    monkeypatch.setattr(tensor_file, "_MAX_COPY_BYTES", 4096)
    whole = torch.arange(40_000, dtype=torch.float32).view(4, 50, 200)
    copied = []
    original = Tensor.contiguous

    def contiguous(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(self.nbytes)
        return original(self, *args, **kwargs)

    for tensor in (
        whole.permute(2, 1, 0),
        whole.permute(0, 2, 1),
        whole[:, ::2],
        whole[..., 3].T,
        whole[:1, :1].expand(9, 50, 200),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "contiguous", contiguous)
            found = b"".join(chunks(Entry("t", tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes), tensor))
        assert found == raw(tensor)
    plain = whole[:1, :1].expand(9, 50, 200)[..., None]
    assert b"".join(chunks(Entry("t", plain.dtype, tuple(plain.shape), 0, plain.nbytes), plain)) == raw(plain)
    assert len(copied) > 20
    assert max(copied) <= 4096


def test_a_tensor_that_changes_its_shape_while_saving_is_found() -> None:
    tensors = {"w": torch.ones(3)}
    file = plan_files("model", tensors, LARGE)[0][0]
    for other in (torch.ones(4), torch.ones(3, dtype=torch.int32), torch.ones(3, 1)):
        with pytest.raises(UnsavableError, match=r"'w' was torch.float32 \(3,\).*do not change it while it is saved"):
            list(chunks(file.entries[0], other))


# --------------------------------------------------------------------------------------------------------- shards


def test_shards_and_their_index() -> None:
    tensors = {f"layer.{i}.weight": make(torch.float32, 100, 10) for i in range(10)} | {"big": make(torch.float32, 5000)}
    files, index = plan_files("model", tensors, 9000)
    assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) == 6
    assert all(file.size <= 9000 for file in files[:-1])  # header included
    assert [entry.name for entry in files[-1].entries] == ["big"]
    assert index is not None
    content = json.loads(index)
    assert content["metadata"] == {"total_size": 60_000}
    assert content["weight_map"] == {entry.name: file.name for file in files for entry in file.entries}
    assert content["weight_map"].keys() == tensors.keys()
    write("model", tensors, 9000)
    assert_same({k: v for file in files for k, v in load_file(file.name).items()}, tensors)
    assert plan_files("model", tensors, 9000) == (files, index)


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 6000))
def test_shards_are_as_large_as_allowed(sizes: list[int], limit: int) -> None:
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    files, index = plan_files("s", tensors, limit)
    assert (index is None) == (len(files) == 1)
    assert sorted(entry.name for file in files for entry in file.entries) == sorted(tensors)
    for file in files:
        assert file.size <= limit or len(file.entries) <= 1
        assert file.size == len(file.header) + sum(entry.end - entry.start for entry in file.entries)
        assert load(file.header + bytes(file.size - len(file.header))).keys() == {entry.name for entry in file.entries}


def test_what_a_file_cannot_hold_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated, but such models exist
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    for tensor, says in [
        (torch.ones(1, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "to_dense()"),
        (quantized, "quantized"),
        (torch.ones(1, dtype=torch.complex128), "safetensors does not support torch.complex128"),
        (nn.UninitializedParameter(), "run one batch"),
        (nn.UninitializedBuffer(), "run one batch"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "wraps other tensors"),
    ]:
        with pytest.raises(UnsavableError, match=r"model: the tensor 'layer.w' cannot be stored") as caught:
            plan_files("model", {"fine": torch.ones(1), "layer.w": tensor}, LARGE)
        assert says in str(caught.value)
    with pytest.raises(UnsavableError, match="reserved by the safetensors format"):
        plan_files("model", {"__metadata__": torch.ones(1)}, LARGE)
    with pytest.raises(UnsavableError, match="not valid Unicode"):
        plan_files("model", {"\ud800": torch.ones(1)}, LARGE)
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        plan_files("model", {}, 0)


def test_names_of_any_kind() -> None:
    tensors = {
        name: torch.ones(1) for name in ("", "a.b", 'quo"te', "back\\slash", "ü→\U0001f600", "\0\n", "0/w/exp_avg", "a" * 5000)
    }
    ((file, digest),) = write("model", tensors)
    assert_same(tensors_in(read_file(Path(file.name), file.size, digest, "x"), "x"), tensors)
    assert_same(load_file(file.name), tensors)


# --------------------------------------------------------------------------------------------------- write_file


@given(st.lists(st.binary(max_size=300) | st.integers(0, 3).map(lambda n: bytes([n]) * (n * 700_000)), max_size=8))
@settings(max_examples=40)
def test_all_pieces_are_written_in_order(parts: list[bytes]) -> None:
    path = Path("file")
    whole = b"".join(parts)
    given_parts: list[bytes | memoryview] = [memoryview(p) if i % 2 else p for i, p in enumerate(parts)]
    for checksum, expected in {
        None: "",
        "xxh3-128": xxhash.xxh3_128_hexdigest(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }.items():
        path.unlink(missing_ok=True)
        assert write_file(path, given_parts, checksum) == (len(whole), expected)
        assert path.read_bytes() == whole


def test_pieces_of_other_types_are_bytes_too() -> None:
    numbers = np.arange(5, dtype=np.int64)
    assert write_file(Path("file"), [numbers.data])[0] == 40
    assert Path("file").read_bytes() == numbers.tobytes()


def test_nothing_is_overwritten() -> None:
    Path("there").write_text("old")
    Path("link").symlink_to("elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            write_file(Path(name), [b"new"])
    assert Path("there").read_text() == "old"
    assert not Path("elsewhere").exists()


def test_it_is_synced_before_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(sys, "platform", "linux")
    write_file(Path("file"), [b"x" * 5_000_000])
    assert synced == [5_000_000]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs RLIMIT_FSIZE to act as on Linux")
@pytest.mark.parametrize("size", [5_000, 20_000_000])
def test_a_full_disk_passes_through(size: int) -> None:
    code = f"""
import resource, signal
from pathlib import Path
from trainkit.checkpoint.tensor_file import write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size} // 2, resource.RLIM_INFINITY))
try:
    write_file(Path("file"), [bytes({size})])
except OSError as error:
    print(type(error).__name__, error.errno, Path("file").stat().st_size)
"""
    done = run_python(code)
    assert done.stdout.split() == ["OSError", "27", str(size // 2)], done.stderr


# ------------------------------------------------------------------------------------------- wrong headers


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor_at(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


def lies(data: bytes) -> str:
    return complaint(lambda: tensors_in(data, NAME), NAME, limit=700)


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "0 bytes; a file of tensors has at least 8"),
        (b"\0" * 7, "7 bytes"),
        (b"\0" * 8, "Expecting value"),
        (b"\xff" * 8, "a header of 18,446,744,073,709,551,615 bytes in a file of 8 bytes"),
        (file_of({}, length=3), "a header of 3 bytes in a file of 10 bytes"),
        (file_of({}, length=2**63), "a header of 9,223,372,036,854,775,808 bytes"),
        (file_of([]), "expected a JSON object, got list"),
        (file_of(b"null"), "expected a JSON object, got NoneType"),
        (file_of(b"{}", b"\0"), "1 bytes belong to no tensor"),
        (file_of(b"[" * 200 + b"]" * 200), "JSON nested 200 levels deep"),
        (file_of(b'{"w":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"w":{}}', b"\0"), "'w' occurs more than once"),
        (file_of({"__metadata__": 1}), "__metadata__ must map strings to strings"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__ must map strings to strings"),
        (file_of({"w": []}), "must have exactly dtype, shape and data_offsets"),
        (file_of({"w": {"dtype": "F32", "shape": []}}), "must have exactly dtype, shape and data_offsets"),
        (file_of(tensor_at(extra=1), bytes(8)), "must have exactly dtype, shape and data_offsets"),
        (file_of(tensor_at("F31"), bytes(8)), "unknown dtype 'F31'"),
        (file_of(tensor_at("float32"), bytes(8)), "unknown dtype"),
        (file_of(tensor_at(["F32"]), bytes(8)), "unknown dtype"),
        (file_of(tensor_at(shape=2), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape="ab"), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[2.0]), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[True, 2]), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[-2]), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[-1, -2]), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[None]), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[1] * 64 + [2]), bytes(8)), "malformed shape"),
        (file_of(tensor_at(shape=[2**62, 4, 2]), bytes(8)), "which is too large"),  # 2^65: 2 in 64 bits
        (file_of(tensor_at(shape=[2**32, 2**32]), bytes(8)), "which is too large"),  # 2^64: 0 in 64 bits
        (file_of(tensor_at(shape=[10**900]), bytes(8)), "which is too large"),
        (file_of(tensor_at(shape=[0, 2**40, 2**40], offsets=[0, 0])), "which is too large"),
        (file_of(tensor_at(offsets=[0, 8, 8]), bytes(8)), "malformed data_offsets"),
        (file_of(tensor_at(offsets={"0": 8}), bytes(8)), "malformed data_offsets"),
        (file_of(tensor_at(offsets=[0.0, 8.0]), bytes(8)), "malformed data_offsets"),
        (file_of(tensor_at(offsets=[False, 8]), bytes(8)), "malformed data_offsets"),
        (file_of(tensor_at(offsets=[-8, 0]), bytes(8)), "has data_offsets -8 to 0 in 8 bytes"),
        (file_of(tensor_at(offsets=[8, 0]), bytes(8)), "has data_offsets 8 to 0"),
        (file_of(tensor_at(offsets=[8, 16]), bytes(8)), "has data_offsets 8 to 16 in 8 bytes"),
        (file_of(tensor_at(offsets=[2**64 - 8, 2**64]), bytes(8)), "has data_offsets 18,446"),
        (file_of(tensor_at(offsets=[0, 4]), bytes(8)), "has 4 bytes, but F32"),
        (file_of(tensor_at(shape=[3]), bytes(8)), "has 8 bytes, but F32"),
        (file_of(tensor_at(shape=[0]), bytes(8)), "has 8 bytes, but F32"),
        (file_of(tensor_at(offsets=[4, 12]), bytes(12)), "leaves a gap of 4 bytes"),
        (file_of(tensor_at(), bytes(12)), "4 bytes belong to no tensor"),
        (file_of(tensor_at() | {"v": tensor_at()["w"]}, bytes(8)), "overlaps another tensor"),
        (file_of(tensor_at() | {"v": tensor_at("U8", [6], [4, 10])["w"]}, bytes(10)), "overlaps another tensor"),
        (file_of(tensor_at() | {"v": tensor_at(offsets=[12, 20])["w"]}, bytes(20)), "leaves a gap of 4 bytes"),
        (file_of(tensor_at("BOOL", [2], [0, 2]), b"\1\2"), "bytes other than 0 and 1"),
        (b"\x80\x02]q\x00(K\x01K\x02e." * 3, "a header of"),  # a pickle
        (b"PK\x03\x04" + bytes(100), "a header of 67,324,752 bytes in a file of 104"),  # a zip file
    ],
)  # fmt: skip
def test_wrong_headers(data: bytes, says: str) -> None:
    assert says in lies(data)


def test_a_header_larger_than_any_of_ours_is_refused_unparsed() -> None:
    assert "bytes of JSON, expected at most" in lies(file_of(b" " * (64 * 2**20 + 1)))


def test_unusual_but_sound_headers_are_read() -> None:
    header = (
        b' {"b":{"shape":[],"dtype":"U8","data_offsets":[8,9]} , "a" :{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
        b'"e":{"dtype":"F64","shape":[0,7],"data_offsets":[8,8]}}  '
    )
    data = file_of(header, struct.pack("<2fB", 1, 2, 3))
    read = tensors_in(data, "x")
    assert {name: (t.dtype, t.tolist()) for name, t in read.items()} == {
        "b": (torch.uint8, 3),
        "a": (torch.float32, [[1.0], [2.0]]),
        "e": (torch.float64, []),
    }
    assert read["e"].shape == (0, 7)


SAMPLE = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False]), "c": torch.arange(3), "d": torch.empty(0, 2)}


def sample() -> bytes:
    file = plan_files("x", SAMPLE, LARGE)[0][0]
    return b"".join(pieces(file, SAMPLE))


def assert_within(data: bytes) -> None:
    """Read the data: this gives an error, or tensors that together cover exactly the data part."""
    before = bytes(data)
    try:
        read = tensors_in(data, "x")
    except CorruptCheckpointError as error:
        message = str(error)
    else:
        message = "x: "
        length = int.from_bytes(data[:8], "little")
        assert sum(tensor.nbytes for tensor in read.values()) == len(data) - 8 - length
        places = {name: d["data_offsets"] for name, d in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"}
        for name, tensor in read.items():
            start, end = places[name]
            assert raw(tensor) == data[8 + length + start : 8 + length + end]
    assert message.startswith("x: ")
    assert data == before


@given(st.data())
@settings(max_examples=examples(400))
def test_mutated_bytes_are_read_or_refused(draw: st.DataObject) -> None:
    data = bytearray(sample())
    for _ in range(draw.draw(st.integers(1, 5))):
        place = draw.draw(st.integers(0, len(data) - 1))
        kind = draw.draw(st.sampled_from(["flip", "digit", "cut", "repeat", "end"]))
        if kind == "flip":
            data[place] ^= 1 << draw.draw(st.integers(0, 7))
        elif kind == "digit":
            data[place] = draw.draw(st.sampled_from(b'0123456789-.e[]{}",: '))
        elif kind == "cut":
            del data[place : place + draw.draw(st.integers(1, 9))]
        elif kind == "repeat":
            data[place:place] = data[place : place + draw.draw(st.integers(1, 50))]
        else:
            del data[place:]
        data = data or bytearray(b"\0")
        if draw.draw(st.booleans()) and len(data) > 8 and b"}}" in data:  # correct the header's length so that it is parsed
            data[:8] = struct.pack("<Q", data.rindex(b"}}") - 6)
    assert_within(bytes(data))


extremes = [2**31, 2**32, 2**61, 2**62, 2**63, 2**64, 2**64 + 2, -(2**63), 10**30, 2.0, True, None, "2"]
numbers = st.integers(-9, 50) | st.sampled_from(extremes)


@given(st.data())
@settings(max_examples=examples(400))
def test_mutated_headers_are_read_or_refused(draw: st.DataObject) -> None:
    data = sample()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for _ in range(draw.draw(st.integers(1, 3))):
        name = draw.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
        kind = draw.draw(st.sampled_from(["shape", "data_offsets", "dtype", "copy", "drop", "more", "shift"]))
        entry = header[name]
        if kind in ("shape", "data_offsets"):
            entry[kind] = draw.draw(st.lists(numbers, max_size=3))
        elif kind == "dtype":
            entry["dtype"] = draw.draw(st.sampled_from([*FORMAT_DTYPES, "F4", "", None]))
        elif kind == "copy":
            header[draw.draw(st.text(max_size=2))] = copy.deepcopy(entry)
        elif kind == "drop" and len(header) > 2:
            del header[name]
        elif kind == "shift" and isinstance(entry["data_offsets"], list):
            by = draw.draw(st.integers(-30, 30))
            entry["data_offsets"] = [n + by if isinstance(n, int) else n for n in entry["data_offsets"]]
        else:
            entry[draw.draw(st.text(max_size=3))] = 1
    assert_within(file_of(header, data[8 + length :]))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    assert_within(data)
    assert_within(struct.pack("<Q", len(data)) + data)


@given(st.data())
@settings(max_examples=60)
def test_safetensors_reads_the_same_tensors(draw: st.DataObject) -> None:
    """Whatever trainkit reads, safetensors reads too, with the same values: trainkit is the stricter reader."""
    data = bytearray(sample())
    place = draw.draw(st.integers(8, len(data) - 1))
    data[place] = draw.draw(st.integers(0, 255))
    try:
        read = tensors_in(bytes(data), "x")
    except CorruptCheckpointError:
        return
    try:
        theirs = load(bytes(data))
    except SafetensorError as error:
        pytest.fail(f"safetensors refuses what we read: {error}")
    assert_same(read, theirs)


MEASURE = """
import json, struct, sys
from trainkit.checkpoint.tensor_file import tensors_in
from trainkit.errors import CorruptCheckpointError

def line(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

tensors_in(struct.pack("<Q", 2) + b"{}", "x")
for dtype, shape, offsets in (("U8", [0], [0, 0]), ("U8", [], [0, 1]), ("F64", [0] + [1] * 63, [0, 0])):
    entry = json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets}, separators=(",", ":"))
    count = 4 * 2**20 // (len(entry) + 8)
    header = ("{" + ",".join(f'"{i}":{entry}' for i in range(count)) + "}").encode()
    data = bytearray(struct.pack("<Q", len(header)) + header + bytes(offsets[1]))
    open("/proc/self/clear_refs", "w").write("5")
    before = line("VmRSS") - len(data)
    try:
        found = len(tensors_in(data, "x"))
    except CorruptCheckpointError:
        found = 0
    print(line("VmHWM") - before, len(data), found)
    del header, data
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_for_a_hostile_header_is_bounded() -> None:
    done = run_python(MEASURE, bare=True)
    assert done.returncode == 0, done.stderr
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [found > 0 for _, _, found in lines] == [True, False, True]
    for peak, length, _ in lines:
        assert peak <= 40 * length + 32 * 2**20, peak / length


# ----------------------------------------------------------------------------------------------------------- not finite

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    finite = torch.ones(2**20 + 5).to(dtype)
    for value in (math.nan, math.inf, -math.inf):
        for where in (0, -1):
            broken = finite.clone()
            broken[where] = torch.tensor(value).to(dtype)
            stored = broken[where].to(torch.complex64 if dtype.is_complex else torch.float32)
            for trained in (True, False):
                check = FiniteCheck({"w": trained})
                check.add("w", finite)
                assert check.nonfinite == []
                check.add("w", broken)
                check.add("w", broken)
                # some dtypes of 8 bits have no infinity
                wrong = bool(torch.isnan(stored) if not trained else ~torch.isfinite(stored))
                assert check.nonfinite == (["w"] if wrong else [])


def test_the_largest_values_of_half_precision_are_finite() -> None:
    check = FiniteCheck({"w": True})
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        check.add("w", torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype))
    assert check.nonfinite == []


def test_only_parameters_of_float_are_checked() -> None:
    check = FiniteCheck({"w": True})
    check.add("mask", torch.tensor([-math.inf]))
    for dtype in set(DTYPES) - set(FLOATS):
        check.add("w", torch.ones(3).to(dtype))
    assert check.nonfinite == []


@pytest.mark.parametrize("shape", ["plain", "transposed", "expanded", "scalar", "strided", "one row"])
def test_all_values_of_a_tensor_are_checked(shape: str) -> None:
    """Also those of one that is not contiguous, which is copied in parts."""
    values = torch.ones(3000, 2000)
    values[-1, -1] = math.nan
    tensor = {
        "plain": values,
        "transposed": values.t(),
        "expanded": values[-1:].expand(3, 2000),
        "scalar": values[-1, -1],
        "strided": values[:, 1::2],
        "one row": values[:, -1],
    }[shape]
    check = FiniteCheck({"w": True})
    entry = plan_files("model", {"w": tensor}, LARGE)[0][0].entries[0]
    assert sum(map(len, chunks(entry, tensor, check))) == tensor.nbytes
    assert check.nonfinite == ["w"]
    empty = torch.empty(0, 3)
    assert list(chunks(plan_files("model", {"w": empty}, LARGE)[0][0].entries[0], empty, FiniteCheck({"w": True}))) == []
