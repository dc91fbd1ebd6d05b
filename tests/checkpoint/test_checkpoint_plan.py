"""A checkpoint before it is written: the files and sizes of its plan, and the host memory for copies of its tensors."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resume.checkpoints import content, digest
from torch import Tensor, nn

from trainkit import __version__
from trainkit.checkpoint import checkpoint_plan as module
from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan, HostBuffers, sizes_to_copy
from trainkit.checkpoint.hook_files import HookFiles
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, FileEntry, digest_line
from trainkit.checkpoint.tensor_file import TensorFile, chunks, plan_files, tensors_in
from trainkit.errors import CheckpointError, UnsavableError
from trainkit.tagged_json.codec import loads


def made_of(**changes: Any) -> CheckpointContent:
    """A `CheckpointContent` with many types, non-contiguous tensors, and values that can be changed in place."""
    torch.manual_seed(1)
    fields: dict[str, Any] = {
        "tensors": {
            "model": {"weight": torch.randn(30, 20), "bias": torch.randn(20).bfloat16(), "count": torch.tensor(7)},
            "optimizer": {"0/weight/exp_avg": torch.randn(20, 30).t(), "0/weight/step": torch.tensor(12.0)},
        },
        "state": {"epoch": 1, "best": torch.tensor([0.5]), "betas": (0.9, 0.999), "array": np.arange(3)},
        "attachments": {"config.json": b"{}"},
        "epoch": 1,
        "position": {"samples": 96},
        "seed": 5,
        "aliases": {"model": {"tied": "weight"}},
        "metrics": {"val_loss": float("nan")},
    }
    return content(3, step=12, **{**fields, **changes})


def written(draft: CheckpointPlan) -> dict[str, bytes]:
    """Contents of all files as a commit would write them, including the manifest and its digest."""
    files = {name: b"".join(bytes(piece) for piece in pieces) for name, pieces in draft.files()}
    data = draft.manifest({name: digest(data) for name, data in files.items()}).to_bytes()
    return {**files, MANIFEST: data, DIGEST: digest_line(data)}


def stored(files: dict[str, bytes], stem: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, data in files.items():
        if name.startswith(stem) and name.endswith(".safetensors"):
            tensors.update(tensors_in(bytearray(data), name))
    return tensors


@pytest.mark.parametrize("detached", [False, True], ids=["streamed", "detached"])
@pytest.mark.parametrize("max_shard_size", [5 * 10**9, 1500], ids=["whole", "divided"])
def test_the_size_is_exact_before_anything_is_written(max_shard_size: int, detached: bool) -> None:
    draft = CheckpointPlan(made_of(max_shard_size=max_shard_size))
    size, sizes = draft.size, dict(draft.sizes)
    if detached:
        draft.detach(HostBuffers())
    files = written(draft)
    assert {name: len(data) for name, data in files.items()} == sizes
    assert sum(map(len, files.values())) == size == draft.size
    assert ("model-00001-of-00002.safetensors" in files) == (max_shard_size == 1500)


@pytest.mark.parametrize("detached", [False, True], ids=["streamed", "detached"])
def test_the_files_hold_the_content(detached: bool) -> None:
    made = made_of()
    draft = CheckpointPlan(made)
    if detached:
        draft.detach(HostBuffers())
    files = written(draft)
    assert set(files) == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
        "config.json",
        MANIFEST,
        DIGEST,
    }
    for stem, tensors in made.tensors.items():
        read = stored(files, stem)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)
    state = loads(files["state.json"], {"state.safetensors": stored(files, "state")}, "state.json")
    assert (state["epoch"], state["betas"], state["best"].item()) == (1, (0.9, 0.999), 0.5)
    assert state["array"].tolist() == [0, 1, 2]


def test_the_manifest_tells_of_the_files() -> None:
    before = datetime.now(timezone.utc).replace(tzinfo=None)
    draft = CheckpointPlan(made_of())
    manifest = draft.manifest({name: digest(name.encode()) for name, _ in draft.files()})
    assert {name: entry.size for name, entry in manifest.files.items()} == {
        name: size for name, size in draft.sizes.items() if name not in (MANIFEST, DIGEST)
    }
    assert manifest.files["state.json"].digest == digest(b"state.json")
    assert (manifest.run_id, manifest.step, manifest.position) == ("run1", 12, {"samples": 96})
    assert (manifest.trainkit_version, manifest.format_version, manifest.checksum) == (__version__, 2, "xxh3-128")
    assert draft.run_id == "run1"
    saved_at = datetime.strptime(manifest.saved_at, "%Y-%m-%dT%H:%M:%S.%fZ")
    assert before <= saved_at <= datetime.now(timezone.utc).replace(tzinfo=None)


def test_state_without_tensors_has_no_file_of_tensors() -> None:
    files = written(CheckpointPlan(made_of(state={"epoch": 1})))
    assert "state.safetensors" not in files


def test_a_module_without_tensors_has_an_empty_file() -> None:
    assert stored(written(CheckpointPlan(made_of(tensors={"model": {}}))), "model") == {}


def test_the_overhead_is_below_one_percent() -> None:
    """A draft of many tensors of a typical size is at most 1 % larger than its tensors."""
    shapes = {f"layers.{k}.attention.{part}.weight": (128, 128) for k in range(24) for part in ("q", "k", "v", "out")}
    tensors = {
        "model": {name: torch.zeros(shape) for name, shape in shapes.items()},
        "optimizer": {
            f"0/{name}/{slot}": torch.zeros(shape) for name, shape in shapes.items() for slot in ("exp_avg", "exp_avg_sq")
        },
    }
    state = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    assert state < CheckpointPlan(made_of(tensors=tensors)).size <= 1.01 * state


# ---------------------------------------------------------------------------------------- objects that a draft references


def test_after_detach_no_change_of_the_process_reaches_it() -> None:
    made = made_of()
    parameter = nn.Parameter(torch.ones(4))
    made.tensors["model"]["parameter"] = parameter
    draft = CheckpointPlan(made)
    before = written(draft)
    draft.detach(HostBuffers())
    with torch.no_grad():
        parameter.fill_(7)
        for tensors in made.tensors.values():
            for tensor in tensors.values():
                tensor.zero_()
    made.state["best"].zero_()
    made.state["array"][:] = 9
    made.state["epoch"] = 99
    made.about["position"]["samples"] = 99
    made.about["metrics"]["val_loss"] = 0.0
    made.tensors["model"].clear()
    made.tensors.clear()
    assert written(draft) == before


def test_without_detach_the_tensors_are_read_when_they_are_written() -> None:
    made = made_of()
    draft = CheckpointPlan(made)
    made.tensors["model"]["count"].fill_(8)
    assert stored(written(draft), "model")["count"] == 8


def test_state_and_manifest_are_encoded_when_it_is_created() -> None:
    made = made_of(state={"history": [1, 2]})
    draft = CheckpointPlan(made)
    made.state["history"].append(3)
    made.about["position"]["samples"] = 99
    assert json.loads(written(draft)["state.json"])["history"] == [1, 2]
    assert draft.manifest(dict.fromkeys(draft.sizes, "0" * 64)).position == {"samples": 96}


def test_detach_lets_the_tensors_go() -> None:
    made = made_of(tensors={"model": {"weight": torch.ones(5)}})
    gone = weakref.ref(made.tensors["model"]["weight"])
    draft = CheckpointPlan(made)
    draft.detach(HostBuffers())
    del made
    assert gone() is None
    assert stored(written(draft), "model")["weight"].tolist() == [1.0] * 5


def test_buffers_serve_one_draft_after_the_other() -> None:
    buffers = HostBuffers()
    for value in (1.0, 2.0, 3.0):
        draft = CheckpointPlan(made_of(tensors={"model": {"weight": torch.full((1000,), value)}}))
        draft.detach(buffers)
        assert stored(written(draft), "model")["weight"].unique().tolist() == [value]


# ----------------------------------------------------------------------------------------------- values that are refused


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"state": {"callbacks": {"Mine": {"fn": print}}}}, "['\"]callbacks['\"].*['\"]Mine['\"].*['\"]fn['\"]"),
        ({"tensors": {"model": {"ghost": torch.empty(3, device="meta")}}}, "ghost"),
        ({"position": {"samples": {1, 2}}}, "position"),
        ({"run_id": "../x"}, "run_id"),
    ],
    ids=["state", "tensor", "position", "run_id"],
)
def test_a_value_that_cannot_be_stored_is_named_immediately(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsavableError, match=named):
        CheckpointPlan(made_of(**changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.attachments.update({"../config.json": b""}),
        lambda made: made.attachments.update({"manifest.json": b""}),
        lambda made: made.attachments.update({"Model.safetensors": b""}),
        lambda made: made.attachments.update({"CONFIG.JSON": b""}),
        lambda made: made.attachments.update({"state.json": b""}),
        lambda made: made.tensors.update(state={"x": torch.ones(1)}),
        lambda made: made.tensors.update({"a/b": {"x": torch.ones(1)}}),
    ],
    ids=["outside", "manifest", "stem", "case", "state", "stem of state", "stem with a folder"],
)
def test_files_that_cannot_be_together_are_refused(change: Callable[[CheckpointContent], object]) -> None:
    made = made_of()
    change(made)
    with pytest.raises(CheckpointError, match="Fix: "):
        CheckpointPlan(made)


# ------------------------------------------------------------------------------------------------------------ not finite


@pytest.mark.parametrize("detached", [False, True])
def test_parameters_that_are_not_finite_are_named(detached: bool) -> None:
    """Those of the model that is written, and those of averaged weights that are kept in the state; buffers are not checked."""
    nan, inf = torch.full((3,), math.nan), torch.full((3,), -math.inf)
    tensors = {
        "model": {"a": torch.ones(2), "b": nan.bfloat16(), "mask": inf, "frozen": inf, "empty": torch.empty(0)},
        "model_1": {"c": inf.clone()},
        "optimizer": {"0/a/exp_avg": nan},
    }
    parameters = {
        "model": {"a": True, "b": True, "frozen": False, "empty": True},
        "model_1": {"c": True},
        "state": {"user/kept/d": True},
    }
    state = {"user": {"kept": {"d": nan.clone(), "e": nan.clone()}}}
    draft = CheckpointPlan(made_of(tensors=tensors, parameters=parameters, state=state, aliases={}))
    if detached:
        draft.detach(HostBuffers())
    files = written(draft)
    assert draft.nonfinite == ["b", "c", "user/kept/d"]
    assert json.loads(files[MANIFEST])["finite"] is True  # `commit` knows what all ranks have found
    digests = dict.fromkeys(draft.sizes, "0" * 64)
    assert (draft.manifest(digests, False).finite, draft.manifest(digests).finite) == (False, True)
    draft.release()
    assert draft.nonfinite == ["b", "c", "user/kept/d"]


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


def test_reserved_memory_is_what_the_first_copy_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model": make(), "optimizer": {"0/a/exp_avg": torch.full((3000,), 0.5), "0/a/step": torch.tensor(1.0)}}
    plan = CheckpointPlan(made_of(tensors=tensors, state={}))
    buffers = HostBuffers()
    buffers.reserve(sizes_to_copy(tensors), torch.device("cpu"))
    held = buffers.nbytes
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("memory is allocated"))
    plan.detach(buffers)
    assert buffers.nbytes == held > 0
    monkeypatch.undo()
    assert stored(written(plan), "optimizer")["0/a/exp_avg"].unique().tolist() == [0.5]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sizes_to_copy_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(module, "SPLIT_ABOVE_BYTES", 1000)
    tensors = {"model": {f"w{n}": torch.zeros(100 + n) for n in range(7)}, "optimizer": {"0/w0/step": torch.tensor(1.0)}}
    for rank in range(ranks):
        plan = CheckpointPlan(made_of(tensors=tensors, state={}), rank=rank, ranks=ranks)
        own = {name: file.size - len(file.header) for name, (file, _) in plan._tensors.items() if file.entries}
        assert sizes_to_copy(tensors, rank=rank, ranks=ranks) == own


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


def test_a_file_of_a_hook_replaces_an_attachment(tmp_path: Path) -> None:
    """A hook that writes `config.json` itself; the weights of a model that it has saved are checked, and not stored."""
    folder, partial = tmp_path / "staged", tmp_path / "partial"
    folder.mkdir(), partial.mkdir()
    (folder / "config.json").write_bytes(b"a hook's")
    made = made_of(parameters={"model": {"weight": True}}, aliases={})
    made.hook_files, made.by_hook = HookFiles(folder), ["model"]
    made.about["contents"]["by_hook"] = ["model"]
    made.tensors["model"]["weight"][0, 0] = math.inf
    planned = CheckpointPlan(made)
    assert sorted(planned.names - {MANIFEST, DIGEST}) == [
        "config.json",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
    ]
    files = {name: b"".join(bytes(piece) for piece in pieces) for name, pieces in planned.files()}
    digests = {name: digest(data) for name, data in files.items()} | made.hook_files.move(partial, "xxh3-128")
    assert (partial / "config.json").read_bytes() == b"a hook's"
    manifest = planned.manifest(digests)
    assert manifest.hook_files == {"config.json": FileEntry(8, digest(b"a hook's"))}
    assert (manifest.format_version, manifest.by_hook) == (3, ["model"])
    assert len(manifest.to_bytes()) == planned.sizes[MANIFEST]
    assert planned.nonfinite == ["weight"]
