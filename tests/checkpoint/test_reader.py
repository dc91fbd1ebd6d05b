"""Reading: what was written comes back, what was not is found out and named, and nothing that is read is ever run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT, run_python

from trainkit.checkpoint import Checkpoint, open_checkpoint
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.draft import Content, Draft
from trainkit.checkpoint.folder import candidates, list_checkpoints
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, digest_line
from trainkit.checkpoint.reader import is_checkpoint, look_at, read_small_file
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    TrainkitError,
)

ABOUT: dict[str, Any] = {
    "run_id": "run",
    "save_counter": 1,
    "step": 10,
    "epoch": 0,
    "position": {"samples": 40},
    "seed": 1,
    "order_version": 1,
    "key_version": 1,
    "world_size": 1,
    "strategy": "auto",
    "precision": "32-true",
    "contents": {"model": "all", "optimizer": True, "resumable": True},
    "aliases": {"model": {"tied.weight": "first.weight"}},
    "irregular": [],
    "metrics": {"val_loss": 0.5, "broken": float("nan")},
    "saved_by": None,
}


def content(step: int = 10, counter: int = 1, shard: int = 5 * 10**9) -> Content:
    return Content(
        tensors={
            "model": {"first.weight": torch.arange(12.0).view(3, 4) + step, "steps": torch.tensor(step)},
            "optimizer": {"0/first.weight/exp_avg": torch.full((3, 4), 0.25), "0/first.weight/step": torch.tensor(float(step))},
        },
        state={"loop": {"global_step": step, "betas": (0.9, 0.95)}, "best": torch.tensor(0.5)},
        about={**ABOUT, "step": step, "save_counter": counter},
        attachments={"config.json": b'{"model_type": "tiny"}'},
        max_shard_size=shard,
    )


def make(path: Path, step: int = 10, counter: int = 1, shard: int = 5 * 10**9) -> Path:
    commit(Draft(content(step, counter, shard)), path)
    return path


def seal(path: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None, *, measure: bool = True) -> None:
    """Make manifest and digest agree with what is there, as an attacker would; ``change`` edits the manifest's JSON."""
    manifest = json.loads((path / MANIFEST).read_text())
    if measure:
        for name in manifest["files"]:
            data = (path / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    write_manifest(path, json.dumps(manifest).encode())


def write_manifest(path: Path, data: bytes) -> None:
    (path / MANIFEST).write_bytes(data)
    (path / DIGEST).write_bytes(digest_line(data))


def load(path: Path) -> None:
    """Everything that can be done with a checkpoint."""
    open_checkpoint(path).read()


def problem(path: Path) -> str:
    """What is wrong with a checkpoint, by reading it and by verifying it: both must find the same file."""
    with pytest.raises(CorruptCheckpointError) as read:
        open_checkpoint(path).read()
    with pytest.raises(CorruptCheckpointError) as verified:
        open_checkpoint(path).verify()
    assert str(read.value) == str(verified.value)
    return str(read.value)


def newest(folder: Path) -> int:
    """The step that a resume takes: the first of the candidates that can be read."""
    for found in candidates(folder):
        if found.problem is None:
            try:
                return open_checkpoint(found.path).read().manifest.step
            except CorruptCheckpointError:
                continue
    raise AssertionError("none can be read")


# ----------------------------------------------------------------------------------------------------- what was written


@pytest.mark.parametrize("shard", [5 * 10**9, 40])
def test_what_was_written_comes_back(run_dir: Path, shard: int) -> None:
    path = make(run_dir / "checkpoint", shard=shard)
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
    assert loaded.state["loop"] == {"global_step": 10, "betas": (0.9, 0.95)}
    assert torch.equal(loaded.state["best"], torch.tensor(0.5))
    assert loaded.attachments("config.json") == b'{"model_type": "tiny"}'
    with pytest.raises(CheckpointNotFoundError, match="tokenizer.json"):
        loaded.attachments("tokenizer.json")
    loaded.tensors["model"]["first.weight"].add_(1)  # it is the caller's now


@pytest.mark.parametrize("stems", [["model"], ["optimizer"], ["state"], ["model", "state"], []])
def test_only_what_is_asked_for_is_read(run_dir: Path, stems: list[str]) -> None:
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


def test_what_it_has_not_is_named(run_dir: Path) -> None:
    checkpoint = open_checkpoint(make(run_dir / "checkpoint"))
    with pytest.raises(StateMismatchError, match="model_1, this one has model, optimizer, state"):
        checkpoint.read(["model", "model_1"])


def test_the_working_directory_may_change(run_dir: Path) -> None:
    make(run_dir / "checkpoint")
    checkpoint = open_checkpoint("checkpoint")
    os.chdir("/")
    checkpoint.read()
    os.chdir(run_dir / "checkpoint")
    assert open_checkpoint(".").path == run_dir / "checkpoint"


def test_a_link_to_a_checkpoint_is_one(run_dir: Path) -> None:
    (run_dir / "best").symlink_to(make(run_dir / "checkpoint"))
    assert open_checkpoint(run_dir / "best").read().manifest.step == 10


# -------------------------------------------------------------------------------------------------- what is not there


def test_what_is_near_is_named(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    make(folder / "step-00000010")
    make(folder / "step-00000020")
    make(run_dir / "x")
    (run_dir / "x").rename(folder / ".step-00000030.tmp-run")
    (folder / "notes").mkdir()
    (run_dir / "model.ckpt").write_text("")
    for path, parts in {
        folder: ["folder of checkpoints", "'step-00000010', 'step-00000020'", f"Fix: '{folder / 'step-00000020'}'"],
        folder / "step-00000011": ["there is nothing", "'step-00000010', 'step-00000020'", "Did you mean 'step-000000"],
        folder / "notes": ["none of a checkpoint's files", "'step-00000010'"],
        folder / ".step-00000030.tmp-run": ["not finished"],
        folder / "step-00000010" / "model.safetensors": [f"Fix: '{folder / 'step-00000010'}'"],
        run_dir / "nowhere" / "step": ["there is nothing", "none in"],
        run_dir / "model.ckpt": ["a checkpoint is a folder"],
    }.items():
        with pytest.raises(CheckpointNotFoundError) as caught:
            open_checkpoint(path)
        for part in [str(path), *parts]:
            assert part in str(caught.value)


def test_what_is_a_checkpoint(run_dir: Path) -> None:
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


def files_of(path: Path) -> list[str]:
    return sorted(os.listdir(path))


DAMAGE: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda path, data: path.write_bytes(b""),
    "half": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "cut": lambda path, data: path.write_bytes(data[:-1]),
    "longer": lambda path, data: path.write_bytes(data + b"\n"),
    "missing": lambda path, data: path.unlink(),
    "zeros": lambda path, data: path.write_bytes(bytes(len(data))),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("shard", [5 * 10**9, 40])
def test_damage_is_found_and_named_and_the_next_older_is_used(run_dir: Path, damage: str, shard: int) -> None:
    make(run_dir / "old", 10, 1)
    path = make(run_dir / "new", 20, 2, shard)
    assert newest(run_dir) == 20
    assert len(files_of(path)) >= 7
    for name in files_of(path):
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


@pytest.mark.parametrize("shard", [5 * 10**9, pytest.param(40, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found_and_named(run_dir: Path, shard: int) -> None:
    make(run_dir / "old", 10, 1)
    path = make(run_dir / "new", 20, 2, shard)
    numbers = random.Random(0)
    for name in files_of(path):
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


def test_all_missing_files_are_named(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    (path / "model.safetensors").unlink()
    (path / "state.json").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"(?s)state.json: 0 bytes, but \d+ were .*model.safetensors: missing"):
        open_checkpoint(path)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint", 10)
    checkpoint = open_checkpoint(path)
    commit(Draft(content(20)), path, replace=True)
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
sys.path.insert(0, sys.argv[2])
from test_reader import Draft, commit, content
print("ready", flush=True)
for step in range(int(sys.argv[3])):
    commit(Draft(content(step, step)), Path(sys.argv[1]), replace=True)
"""


def test_a_reader_beside_a_writer_never_sees_damage(run_dir: Path) -> None:
    """One process replaces a checkpoint again and again, another lists, opens and reads it."""
    path = make(run_dir / "checkpoint")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(here.parent)])}
    command = [sys.executable, "-c", WRITER, str(path), str(here), "50"]
    read = 0
    refused: list[str] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while writer.poll() is None:
            assert [one.problem for one in list_checkpoints(run_dir)] == [None]
            try:
                loaded = open_checkpoint(path).read()
                assert loaded.state["loop"]["global_step"] == int(loaded.tensors["model"]["steps"]) == loaded.manifest.step
                read += 1
            except CheckpointError as error:
                refused.append(str(error))
    assert all("replaced by another checkpoint while it was read" in message for message in refused)
    assert writer.returncode == 0
    assert read
    assert open_checkpoint(path).manifest.step == 49


# -------------------------------------------------------------------------------------------------------------- hostile


NAMES = [
    *("../secret", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".hidden"),
    *("C:x", "nul", "x\0y", "x\ny", "manifest.json", "é" * 90),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_cannot_lead_elsewhere(run_dir: Path, name: str) -> None:
    path = make(run_dir / "folder" / "checkpoint")
    (run_dir / "folder" / "secret").write_bytes(b"secret")
    entry = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    seal(path, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(CorruptCheckpointError, match=MANIFEST):
        load(path)
    assert look_at(path)[0] is None


def with_raw(path: Path, find: bytes, replace: bytes) -> None:
    data = (path / MANIFEST).read_bytes()
    assert data.count(find) == 1
    write_manifest(path, data.replace(find, replace))


@pytest.mark.parametrize(
    "find, replace",
    [
        (b'"step": 10', b'"step": NaN'),
        (b'"step": 10', b'"step": -Infinity'),
        (b'"step": 10', b'"step": 1e999'),
        (b'"step": 10', b'"step": 10, "step": 11'),
        (b'"step": 10', b'"step": ' + b"9" * 100_000),
        (b'"step": 10', b'"step": 1.0'),
        (b'"step": 10', b'"step": true'),
        (b'"step": 10', b'"step": -1'),
        (b'"seed": 1', b'"seed": "\xff"'),
        (b'"seed": 1', b'"seed": 1, "more": ' + b"[" * 101 + b"]" * 101),
        (b'"seed": 1', b'"seed": 1, "more": ' + b"[" * 100_000 + b"]" * 100_000),
        (b'"seed": 1', b'"seed": 1, "more": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        (b'"seed": 1', b'"seed": 1} {'),
    ],
)
def test_a_manifest_of_bad_json(run_dir: Path, find: bytes, replace: bytes) -> None:
    path = make(run_dir / "checkpoint")
    with_raw(path, find, replace)
    with pytest.raises(CorruptCheckpointError, match=MANIFEST):
        load(path)


def test_a_manifest_that_is_too_large_is_not_read(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    for name in (MANIFEST, DIGEST):
        data = (path / name).read_bytes()
        os.truncate(path / name, 2**40)  # takes no space, and would take all memory
        with pytest.raises(CorruptCheckpointError, match=rf"{name}: .* bytes, but at most"):
            load(path)
        (path / name).write_bytes(data)
    os.truncate(path / "state.json", 2**40)
    seal(path, lambda manifest: manifest["files"]["state.json"].update(size=2**40), measure=False)
    with pytest.raises(CorruptCheckpointError, match="state.json has .* none is written with more"):
        load(path)


def test_a_manifest_whose_files_cannot_be_all(run_dir: Path) -> None:
    def rename(old: str, new: str) -> None:
        path = make(run_dir / new)
        (path / old).rename(path / new)

        def change(manifest: dict[str, Any]) -> None:
            manifest["files"][new] = manifest["files"].pop(old)

        seal(path, change, measure=False)
        with pytest.raises(CorruptCheckpointError, match=rf"{MANIFEST}: .*(not complete|lists no state.json)"):
            load(path)

    rename("state.json", "other.json")
    rename("model.safetensors", "model-00001-of-00002.safetensors")
    rename("model.safetensors", "model-00002-of-00002.safetensors")
    rename("model.safetensors", "model-00001-of-99999.safetensors")
    rename("model.safetensors", "optimizer-00001-of-00002.safetensors")


def test_aliases_and_index_must_agree_with_the_tensors(run_dir: Path) -> None:
    for number, aliases in enumerate(({"tied": "nothing"}, {"first.weight": "steps"})):
        path = make(run_dir / str(number))
        seal(path, lambda manifest, aliases=aliases: manifest["aliases"].update(model=aliases))  # type: ignore[misc]
        with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST}: .* is said to be stored as"):
            load(path)
    path = make(run_dir / "index", shard=40)
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00001-of", "00002-of"))
    seal(path)
    with pytest.raises(CorruptCheckpointError, match="index.json: it does not say where the tensors are"):
        load(path)
    path = make(run_dir / "twice", shard=40)
    first, second = sorted(path.glob("model-*.safetensors"))
    shutil.copy(first, second)
    seal(path)
    with pytest.raises(CorruptCheckpointError, match="is in model-00001-of-00002.safetensors too"):
        load(path)


def test_a_newer_format_is_said_to_be_one(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    seal(path, lambda manifest: manifest.update(format_version=99, files="another way"), measure=False)
    with pytest.raises(CheckpointError, match="newer trainkit") as caught:
        load(path)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert "newer" in (look_at(path)[1] or "")


def test_only_ordinary_files_are_opened(run_dir: Path) -> None:
    """A link leads to what is outside, a pipe never ends, a device does things."""
    path = make(run_dir / "checkpoint")
    for name in files_of(path):
        outside = run_dir / "outside"
        (path / name).rename(outside)
        kinds: list[tuple[str, Callable[[Path], object]]] = [
            ("a link", lambda file, outside=outside: file.symlink_to(outside)),
            ("a link", lambda file: file.symlink_to("/dev/zero")),
            ("a pipe", os.mkfifo),
            ("a folder", os.mkdir),
        ]
        if os.geteuid() == 0:
            kinds.append(("a device", lambda file: os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 5))))  # /dev/zero
        for kind, put in kinds:
            try:
                put(path / name)
            except PermissionError:  # no devices in this container
                continue
            with pytest.raises(CorruptCheckpointError, match=f"{name}: .*{kind}"):
                load(path)
            (path / name).rmdir() if kind == "a folder" else (path / name).unlink()
        outside.rename(path / name)
    load(path)


def test_files_changed_after_opening(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    checkpoint = open_checkpoint(path)
    for name in checkpoint.manifest.files:
        data = (path / name).read_bytes()
        for put in (
            lambda file: None,
            os.mkfifo,
            lambda file: file.symlink_to("/dev/zero"),
            lambda file, data=data: file.write_bytes(data + b"more"),
            lambda file, data=data: file.write_bytes(data[:-1]),
        ):
            (path / name).unlink(missing_ok=True)
            put(path / name)
            for read in (checkpoint.read, checkpoint.verify, lambda name=name: checkpoint.attachment(name)):
                with pytest.raises(CorruptCheckpointError, match=name):
                    read()
        (path / name).unlink()
        (path / name).write_bytes(data)
    checkpoint.verify()


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("sealed", [True, False])
def test_a_pickle_under_any_name_is_not_run(run_dir: Path, sealed: bool) -> None:
    marker = run_dir / "it-ran"
    torch.save({"x": Marker(marker)}, run_dir / "zip.pt")
    torch.save({"x": Marker(marker)}, run_dir / "legacy.pt", _use_new_zipfile_serialization=False)
    bombs = [pickle.dumps(Marker(marker), protocol) for protocol in (0, 2, 5)]
    bombs += [(run_dir / name).read_bytes() for name in ("zip.pt", "legacy.pt")]
    pickle.loads(bombs[0])
    assert marker.exists()  # it does work
    marker.unlink()
    path = make(run_dir / "checkpoint")
    for name in files_of(path):
        for bomb in bombs:
            (path / name).write_bytes(bomb)
            if name == MANIFEST and sealed:
                write_manifest(path, bomb)
            elif sealed and name != DIGEST:
                seal(path)
            if name == "config.json" and sealed:
                assert open_checkpoint(path).read().attachments(name) == bomb  # bytes, and nothing more
            else:
                with pytest.raises(CorruptCheckpointError, match=name):
                    load(path)
            assert not marker.exists()
        shutil.rmtree(path)
        make(path)


def test_a_header_that_lies(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = "first.weight"
    for change in (
        {"shape": [2**62, 2**62]},
        {"shape": [10**9, 10**9], "data_offsets": [0, 48]},
        {"shape": [-3, -4]},
        {"data_offsets": [0, 10**12]},
        {"data_offsets": [-48, 0]},
        {"data_offsets": [48, 0]},
        {"dtype": "F128"},
        {"shape": "x"},
    ):
        lie = json.dumps({**header, name: {**header[name], **change}}).encode()
        file.write_bytes(len(lie).to_bytes(8, "little") + lie + data[8 + length :])
        seal(path)
        with pytest.raises(CorruptCheckpointError, match="model.safetensors"):
            load(path)
    for count in (0, 2**63, 2**64 - 1, len(data), length + 10**6):
        file.write_bytes(count.to_bytes(8, "little") + data[8:])
        seal(path)
        with pytest.raises(CorruptCheckpointError, match="model.safetensors"):
            load(path)


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("mutated") / "checkpoint", shard=40)


@settings(max_examples=100)
@given(data=st.data())
def test_mutations_of_a_real_checkpoint(mutated: Path, data: st.DataObject) -> None:
    mutate(mutated, data)


@pytest.mark.slow
@settings(max_examples=2_000)
@given(data=st.data())
def test_many_mutations_of_a_real_checkpoint(mutated: Path, data: st.DataObject) -> None:
    mutate(mutated, data)


def mutate(mutated: Path, data: st.DataObject) -> None:
    """With digests that agree, as an attacker would: an error of ours or what can be used, nothing else."""
    name = data.draw(st.sampled_from(files_of(mutated)))
    kept = {each: (mutated / each).read_bytes() for each in files_of(mutated)}
    changed = bytearray(kept[name])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        stop = data.draw(st.integers(start, min(len(changed), start + 40)))
        pieces = st.sampled_from(
            [b"", b"{", b"[", b"]}", b'"$tensor"', b'{"$tuple":1}', b"-1", b"9" * 30, b"null", b"NaN", b"\0"]
        )
        changed[start:stop] = data.draw(st.one_of(pieces, st.binary(max_size=8)))
    try:
        (mutated / name).write_bytes(changed)
        if name == MANIFEST:
            write_manifest(mutated, bytes(changed))
        elif name != DIGEST:
            seal(mutated)
        outcomes = []
        for read in (Checkpoint.read, Checkpoint.verify):
            try:
                read(open_checkpoint(mutated))
                outcomes.append("")
            except TrainkitError as error:
                outcomes.append(str(error))
        # Whether bools are bools is not seen without their values; there are none here.
        assert outcomes[0] == outcomes[1]
        list_checkpoints(mutated.parent)
    finally:
        for each, before in kept.items():
            (mutated / each).write_bytes(before)


# --------------------------------------------------------------------------------------------------------------- memory

# For each checkpoint, in a process of its own: what was raised, and by how many bytes the peak of the memory has grown.
MEASURE = """
import os, sys
import torch
from trainkit.checkpoint import Checkpoint, open_checkpoint
from trainkit.errors import TrainkitError

def peak():
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0]) * 1024

ordinary, *paths = sys.argv[1:]
open_checkpoint(ordinary).read()  # what is loaded on first use
for path in paths:
    for action in (Checkpoint.read, Checkpoint.verify):
        child = os.fork()
        if child == 0:
            before, said = peak(), "read"
            try:
                result = action(open_checkpoint(path))
            except TrainkitError as error:
                said = type(error).__name__
            print(said, peak() - before, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


def measure(ordinary: Path, *paths: Path) -> list[tuple[str, int]]:
    """What was raised by reading, and the memory that took; the same for verifying, then for the next checkpoint."""
    done = run_python("-W", "ignore", "-c", MEASURE, str(ordinary), *map(str, paths))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(paths), done.stderr
    return [(said, int(grown)) for said, grown in lines]


LARGE: dict[str, Callable[[], bytes]] = {
    "empty maps": lambda: b'{"x":[' + b"{}," * 1_000_000 + b"{}]}",
    "empty lists": lambda: b'{"x":[' + b"[]," * 1_000_000 + b"[]]}",
    "small maps": lambda: b'{"x":[' + b'{"":0},' * 400_000 + b"0]}",
    "numbers": lambda: b'{"x":[' + b"1.5," * 800_000 + b"0]}",
    "texts": lambda: b'{"x":["' + b'","'.join(b"%05x" % number for number in range(400_000)) + b'"]}',
    "keys": lambda: b'{"x":{"' + b'":0,"'.join(b"%05x" % number for number in range(400_000)) + b'":0}}',
    "tuples": lambda: b'{"x":[' + b'{"$tuple":[]},' * 200_000 + b"0]}",
    "one text": lambda: b'{"x":"' + b"x" * 8_000_000 + b'"}',
    "escapes": lambda: b'{"x":"' + b"\\ud83d\\ude00" * 500_000 + b'"}',
}


def file_of_tensors(path: Path, size: int) -> None:
    """One large tensor, in a file that takes no space."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [size - 136], "data_offsets": [0, size - 136]}}).encode().ljust(128)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, size)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of the memory is read from /proc")
@pytest.mark.parametrize("kinds", [["tuples"], pytest.param([*LARGE], marks=pytest.mark.slow)])
def test_memory_is_bounded(run_dir: Path, kinds: list[str]) -> None:
    """At most 64 MiB + 40 × the JSON + the files of tensors, whatever is in them."""
    paths = {kind: make(run_dir / kind) for kind in ("ordinary", "tensors", "manifest", *kinds)}
    file_of_tensors(paths["tensors"] / "model.safetensors", 200 * 2**20)
    seal(paths["tensors"], lambda manifest: manifest.update(aliases={}))
    entry = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    seal(paths["manifest"], lambda manifest: manifest["files"].update({f"{number:x}": entry for number in range(20_000)}))
    for kind in kinds:
        (paths[kind] / "state.json").write_bytes(LARGE[kind]())
        seal(paths[kind])
    measured = measure(paths["ordinary"], *paths.values())
    for number, (kind, path) in enumerate(paths.items()):
        for action, (said, grown) in zip(("read", "verify"), measured[2 * number : 2 * number + 2], strict=True):
            assert said == ("CorruptCheckpointError" if kind == "manifest" else "read"), (kind, action)
            files = {name: (path / name).stat().st_size for name in files_of(path)}
            json_size = files[MANIFEST] + files["state.json"]
            tensor_size = sum(size for name, size in files.items() if name.endswith(".safetensors") and action == "read")
            assert grown <= 64 * 2**20 + 40 * json_size + tensor_size, (kind, action)


def test_a_small_file(run_dir: Path) -> None:
    path = run_dir / "file"
    path.write_bytes(b"12345")
    assert read_small_file(path, 5) == b"12345"
    with pytest.raises(CorruptCheckpointError, match="5 bytes, but at most 4 were expected"):
        read_small_file(path, 4)
