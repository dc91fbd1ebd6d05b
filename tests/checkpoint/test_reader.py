"""Reading returns what was written, and names damaged files; hostile files are in test_reader_hostile.py."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from helpers.resume.checkpoints import IMPORTABLE, content, load, make, names

from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.checkpoint_plan import CheckpointPlan
from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.folder import candidates, list_checkpoints
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, is_checkpoint
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError

FORMAT_1 = Path(__file__).parent / "format_1"


def problem(path: Path) -> str:
    """Return the error of a damaged checkpoint, which must be the same for reading and for verifying it."""
    with pytest.raises(CorruptCheckpointError) as read:
        open_checkpoint(path).read()
    with pytest.raises(CorruptCheckpointError) as verified:
        open_checkpoint(path).verify()
    assert str(read.value) == str(verified.value)
    return str(read.value)


def newest(folder: Path) -> int:
    """The step that a run resumes from: that of the first candidate that can be read."""
    for found in candidates(folder):
        if found.problem is None:
            try:
                return open_checkpoint(found.path).read().manifest.step
            except CorruptCheckpointError:
                continue
    raise AssertionError("none can be read")


# --------------------------------------------------------------------------------------------- reading what was written


@pytest.mark.parametrize("shard", [5 * 10**9, 40])
def test_a_checkpoint_is_read_as_written(run_dir: Path, shard: int) -> None:
    path = make(run_dir / "checkpoint", run_id="run", max_shard_size=shard)
    assert ((path / "model.safetensors.index.json").exists()) == (shard == 40)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.path == path
    assert checkpoint.stems == ["model", "optimizer", "state"]
    checkpoint.verify()
    loaded = checkpoint.read()
    written = content()
    assert loaded.manifest == checkpoint.manifest
    assert (loaded.manifest.step, loaded.manifest.run_id) == (10, "run")
    assert set(loaded.tensors) == set(written.tensors)
    for stem, tensors in written.tensors.items():
        assert set(loaded.tensors[stem]) == set(tensors)
        for name, tensor in tensors.items():
            assert loaded.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[stem][name], tensor)
    assert loaded.state["mine"] == {"global_step": 10, "betas": (0.9, 0.95)}
    assert torch.equal(loaded.state["best"], torch.tensor(0.5))
    assert loaded.attachments("config.json") == b'{"model_type": "tiny"}'
    with pytest.raises(CheckpointNotFoundError, match="tokenizer.json"):
        loaded.attachments("tokenizer.json")
    loaded.tensors["model"]["first.weight"].add_(1)  # the caller may change the tensors


@pytest.mark.parametrize("stems", [["model"], ["optimizer"], ["state"], ["model", "state"], []])
def test_only_requested_stems_are_read(run_dir: Path, stems: list[str]) -> None:
    path = make(run_dir / "checkpoint")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "state.safetensors"):
        if name.split(".")[0] not in stems:
            data = bytearray((path / name).read_bytes())
            data[-1] ^= 1
            (path / name).write_bytes(data)
    loaded = open_checkpoint(path).read(stems)
    assert set(loaded.tensors) == set(stems) - {"state"}
    assert bool(loaded.state) == ("state" in stems)
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(path).read()


def test_missing_stem_is_named(run_dir: Path) -> None:
    """Requesting tensors that the checkpoint does not contain is an error that lists those it contains."""
    checkpoint = open_checkpoint(make(run_dir / "checkpoint"))
    with pytest.raises(StateMismatchError, match="model_1, but this one has model, optimizer, state"):
        checkpoint.read(["model", "model_1"])


def test_the_working_directory_may_change(run_dir: Path) -> None:
    make(run_dir / "checkpoint")
    checkpoint = open_checkpoint("checkpoint")
    os.chdir("/")
    checkpoint.read()
    os.chdir(run_dir / "checkpoint")
    assert open_checkpoint(".").path == run_dir / "checkpoint"


def test_a_link_to_a_checkpoint_is_one(run_dir: Path) -> None:
    """A link to a checkpoint can be opened like the checkpoint."""
    (run_dir / "best").symlink_to(make(run_dir / "checkpoint"))
    assert open_checkpoint(run_dir / "best").read().manifest.step == 10


# ------------------------------------------------------------------------------------------------ missing checkpoints


def test_what_is_near_is_named(run_dir: Path) -> None:
    """The error for a path without a checkpoint lists checkpoints nearby or says what the path is."""
    folder = run_dir / "checkpoints"
    make(folder / "step-00000010")
    make(folder / "step-00000020")
    make(run_dir / "x")
    (run_dir / "x").rename(folder / ".step-00000030.tmp-run")
    (folder / "notes").mkdir()
    (run_dir / "model.ckpt").write_text("")
    (run_dir / "model.txt").write_text("")
    for path, parts in {
        folder: ["folder of checkpoints", "'step-00000010', 'step-00000020'", f"Fix: '{folder / 'step-00000020'}'"],
        folder / "step-00000011": ["this path does not exist", "'step-00000010', 'step-00000020'", "Did you mean 'step-000000"],
        folder / "notes": ["contains no checkpoint files", "'step-00000010'"],
        folder / ".step-00000030.tmp-run": ["incomplete or being removed"],
        folder / "step-00000010" / "model.safetensors": [f"Fix: '{folder / 'step-00000010'}'"],
        run_dir / "nowhere" / "step": ["this path does not exist", f"Checkpoints in {run_dir / 'nowhere'}: none"],
        run_dir / "model.ckpt": ["is a Lightning checkpoint"],
        run_dir / "model.txt": ["a checkpoint is a folder"],
    }.items():
        with pytest.raises(CheckpointNotFoundError) as caught:
            open_checkpoint(path)
        for part in [str(path), *parts]:
            assert part in str(caught.value)


def test_what_is_a_checkpoint(run_dir: Path) -> None:
    """A visible folder with at least one file of a checkpoint counts as a checkpoint, also when it is incomplete."""
    for number, name in enumerate(
        (
            "manifest.json",
            "manifest.sha256",
            "state.json",
            "state.safetensors",
            "model.safetensors",
            "model_1.safetensors",
            "model-00002-of-00003.safetensors",
            "optimizer.safetensors",
            "model.safetensors.index.json",
        )
    ):
        for folder, expected in ((f"folder-{number}", True), (f".folder-{number}", False)):
            (run_dir / folder).mkdir()
            (run_dir / folder / name).write_text("")
            assert is_checkpoint(run_dir / folder) == expected
            if expected:
                with pytest.raises(CorruptCheckpointError, match=r"manifest\.(json|sha256): missing"):
                    open_checkpoint(run_dir / folder)
    (run_dir / "other").mkdir()
    for name in ("notes.txt", "config.json", "a.safetensors.tmp", "Manifest.jsonl"):
        (run_dir / "other" / name).write_text("")
    assert not is_checkpoint(run_dir / "other")
    assert not is_checkpoint(run_dir / "other" / "notes.txt")
    assert not is_checkpoint(run_dir / "nothing")


# -------------------------------------------------------------------------------------------------------------- damage


DAMAGE: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda path, data: path.write_bytes(b""),
    "half": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "cut": lambda path, data: path.write_bytes(data[:-1]),
    "longer": lambda path, data: path.write_bytes(data + b"\n"),
    "missing": lambda path, data: path.unlink(),
    "zeros": lambda path, data: path.write_bytes(bytes(len(data))),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("checksum, shard", [("xxh3-128", 5 * 10**9), ("xxh3-128", 40), ("sha256", 5 * 10**9)])
def test_damage_is_found_and_named_and_the_next_older_is_used(run_dir: Path, damage: str, checksum: str, shard: int) -> None:
    make(run_dir / "old")
    path = make(run_dir / "new", 2, step=20, max_shard_size=shard, checksum=checksum)
    assert open_checkpoint(path).manifest.checksum == checksum
    assert newest(run_dir) == 20
    assert len(names(path)) >= 7
    for name in names(path):
        data = (path / name).read_bytes()
        DAMAGE[damage](path / name, data)
        found = problem(path)
        assert str(path / name) in found or (name == DIGEST and str(path / MANIFEST) in found and DIGEST in found)
        assert newest(run_dir) == 10
        if damage != "zeros":
            assert [one.path.name for one in list_checkpoints(run_dir) if one.problem is None] == ["old"]
            assert name in next(one.problem or "" for one in list_checkpoints(run_dir) if one.path.name == "new")
        (path / name).write_bytes(data)
    assert newest(run_dir) == 20


@pytest.mark.parametrize("checksum", [pytest.param("sha256", marks=pytest.mark.slow), "xxh3-128"])
@pytest.mark.parametrize("shard", [5 * 10**9, pytest.param(40, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found_and_named(run_dir: Path, shard: int, checksum: str) -> None:
    make(run_dir / "old")
    path = make(run_dir / "new", 2, step=20, max_shard_size=shard, checksum=checksum)
    numbers = random.Random(0)
    for name in names(path):
        data = (path / name).read_bytes()
        bits = range(8 * len(data))
        for bit in numbers.sample(bits, min(200, len(bits))):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(flipped)
            with pytest.raises(CorruptCheckpointError, match=name) as caught:
                load(path)
            assert str(path) in str(caught.value)
        assert newest(run_dir) == 10
        (path / name).write_bytes(data)
    assert newest(run_dir) == 20


@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_blocks_and_files_of_the_same_size_that_change_places_are_found(run_dir: Path, checksum: str) -> None:
    blocks = torch.arange(3 * 2**18, dtype=torch.int32).view(3, -1)  # 1 MiB each, as they are written
    path = make(run_dir / "a", tensors={"model": {"x": blocks}, "model_1": {"x": blocks + 1}}, checksum=checksum)
    file, other = path / "model.safetensors", path / "model_1.safetensors"
    data, header = file.read_bytes(), file.stat().st_size - blocks.nbytes
    first, second = data[header : header + 2**20], data[header + 2**20 : header + 2 * 2**20]
    file.write_bytes(data[:header] + second + first + data[header + 2 * 2**20 :])
    assert str(file) in problem(path)
    file.write_bytes(other.read_bytes())
    assert str(file) in problem(path)
    other.write_bytes(data)
    assert str(file) in problem(path)
    file.write_bytes(data)
    assert str(other) in problem(path)


def test_the_digests_are_those_of_the_algorithm_that_the_manifest_names(run_dir: Path) -> None:
    for checksum, hash_of in {
        "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
        "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    }.items():
        path = make(run_dir / checksum, checksum=checksum)
        manifest = json.loads((path / MANIFEST).read_bytes())
        assert (manifest["format_version"], manifest["checksum"]) == (2, checksum)
        assert set(manifest["files"]) == set(names(path)) - {MANIFEST, DIGEST}
        for name, entry in manifest["files"].items():
            data = (path / name).read_bytes()
            assert entry == {"size": len(data), checksum: hash_of(data)}
        # the manifest itself always has SHA-256
        assert (path / DIGEST).read_text() == f"{hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()}  {MANIFEST}\n"


# ------------------------------------------------------------------------------------------------------------ format 1


@pytest.fixture
def in_format_1(run_dir: Path) -> Path:
    """A copy of `make(path, minute=7)` as version 0.1 wrote it before it named the algorithm (commit fd6a3d41)."""
    return Path(shutil.copytree(FORMAT_1, run_dir / "old", dirs_exist_ok=True))


def test_a_checkpoint_in_format_1_is_verified_and_read(in_format_1: Path, run_dir: Path) -> None:
    old, new = open_checkpoint(in_format_1), open_checkpoint(make(run_dir / "new", minute=7))
    old.verify()
    assert (old.manifest.format_version, old.manifest.checksum) == (1, "sha256")
    same = {"format_version": 2, "checksum": "xxh3-128", "files": new.manifest.files, "metrics": {}}
    assert dataclasses.replace(old.manifest, **same) == dataclasses.replace(new.manifest, metrics={})
    before, after = old.read(), new.read()
    assert before.state["mine"] == after.state["mine"]
    for stem, tensors in after.tensors.items():
        assert before.tensors[stem].keys() == tensors.keys()
        assert all(torch.equal(before.tensors[stem][name], tensor) for name, tensor in tensors.items())
    for name in old.manifest.files:
        assert (in_format_1 / name).read_bytes() == (run_dir / "new" / name).read_bytes()


def test_damage_to_a_checkpoint_in_format_1_is_found(in_format_1: Path) -> None:
    for name in names(in_format_1):
        data = (in_format_1 / name).read_bytes()
        (in_format_1 / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        assert name in problem(in_format_1) or name == DIGEST
        (in_format_1 / name).write_bytes(data)
    open_checkpoint(in_format_1).verify()


def test_a_checkpoint_in_format_1_is_replaced_by_one_of_the_new_format(in_format_1: Path) -> None:
    commit(CheckpointPlan(content(2)), in_format_1, replace=True)
    assert open_checkpoint(in_format_1).manifest.format_version == 2
    load(in_format_1)


def test_all_missing_files_are_named(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    (path / "model.safetensors").unlink()
    (path / "state.json").write_bytes(b"")
    with pytest.raises(
        CorruptCheckpointError, match=r"(?s)state.json: expected \d+ bytes, found 0.*model.safetensors: missing"
    ):
        open_checkpoint(path)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    checkpoint = open_checkpoint(path)
    commit(CheckpointPlan(content(step=20)), path, replace=True)
    for read in (checkpoint.read, checkpoint.verify, lambda: checkpoint.attachment("state.json")):
        with pytest.raises(CheckpointError, match="replaced by another checkpoint while it was read") as caught:
            read()
        assert not isinstance(caught.value, CorruptCheckpointError)
    checkpoint = open_checkpoint(path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="removed while it was read"):
        checkpoint.read()


WRITER = """
import sys
from pathlib import Path
from helpers.resume.checkpoints import content
from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.checkpoint_plan import CheckpointPlan
print("ready", flush=True)
for step in range(int(sys.argv[2])):
    commit(CheckpointPlan(content(step, step=step)), Path(sys.argv[1]), replace=True)
"""


def test_a_reader_next_to_a_writer_never_sees_damage(run_dir: Path) -> None:
    """One process replaces a checkpoint repeatedly while another lists, opens and reads it."""
    path = make(run_dir / "checkpoint")
    command = [sys.executable, "-c", WRITER, str(path), "50"]
    read = 0
    refused: list[str] = []
    with subprocess.Popen(command, env={**os.environ, **IMPORTABLE}, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while writer.poll() is None:
            assert [one.problem for one in list_checkpoints(run_dir)] == [None]
            try:
                loaded = open_checkpoint(path).read()
                assert loaded.state["mine"]["global_step"] == int(loaded.tensors["model"]["steps"]) == loaded.manifest.step
                read += 1
            except CheckpointError as error:
                refused.append(str(error))
    assert all("replaced by another checkpoint while it was read" in message for message in refused)
    assert writer.returncode == 0
    assert read
    assert open_checkpoint(path).manifest.step == 49


def test_a_small_file(run_dir: Path) -> None:
    """`read_small_file` reads a file up to the given size and refuses larger ones."""
    path = run_dir / "file"
    path.write_bytes(b"12345")
    assert read_small_file(path, 5) == b"12345"
    with pytest.raises(CorruptCheckpointError, match="expected at most 4 bytes, found 5"):
        read_small_file(path, 4)
