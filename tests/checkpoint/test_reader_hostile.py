"""Reading a checkpoint that an attacker wrote: the error names it, nothing outside is opened, and no code runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import digest, load, make, names, seal, write_manifest
from helpers.support import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.checkpoint import Checkpoint, open_checkpoint
from trainkit.checkpoint.checksum import DEFAULT_CHECKSUM
from trainkit.checkpoint.folder import list_checkpoints
from trainkit.checkpoint.manifest import DIGEST, MANIFEST
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.errors import CheckpointError, CorruptCheckpointError, TrainkitError

NAMES = [
    *("../secret", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".hidden"),
    *("C:x", "nul", "x\0y", "x\ny", "manifest.json", "é" * 90),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_cannot_lead_elsewhere(run_dir: Path, name: str) -> None:
    path = make(run_dir / "folder" / "checkpoint")
    (run_dir / "folder" / "secret").write_bytes(b"secret")
    entry = {"size": 6, DEFAULT_CHECKSUM: digest(b"secret")}
    seal(path, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(CorruptCheckpointError, match=MANIFEST):
        load(path)
    assert inspect_checkpoint(path)[0] is None


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
        os.truncate(path / name, 2**40)  # a sparse file that would need more than all memory
        with pytest.raises(CorruptCheckpointError, match=rf"{name}: expected at most .* bytes, found"):
            load(path)
        (path / name).write_bytes(data)
    os.truncate(path / "state.json", 2**40)
    seal(path, lambda manifest: manifest["files"]["state.json"].update(size=2**40), measure=False)
    with pytest.raises(CorruptCheckpointError, match="state.json has .* expected at most 64 MiB"):
        load(path)


def test_a_manifest_whose_files_cannot_be_all(run_dir: Path) -> None:
    # A manifest that lists no state.json, or only some of the shards of a file, is refused.

    def rename(old: str, new: str) -> None:
        path = make(run_dir / new)
        (path / old).rename(path / new)

        def change(manifest: dict[str, Any]) -> None:
            manifest["files"][new] = manifest["files"].pop(old)

        seal(path, change, measure=False)
        with pytest.raises(CorruptCheckpointError, match=rf"{MANIFEST}: .*(incomplete|state.json is not listed)"):
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
        with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST}: .* does not match model.safetensors"):
            load(path)
    path = make(run_dir / "index", max_shard_size=40)
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00001-of", "00002-of"))
    seal(path)
    with pytest.raises(CorruptCheckpointError, match="index.json: its weight_map does not match"):
        load(path)
    path = make(run_dir / "twice", max_shard_size=40)
    first, second = sorted(path.glob("model-*.safetensors"))
    shutil.copy(first, second)
    seal(path)
    with pytest.raises(CorruptCheckpointError, match="is also in model-00001-of-00002.safetensors"):
        load(path)


def test_the_error_names_a_newer_format(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    seal(path, lambda manifest: manifest.update(format_version=99, files="another way"), measure=False)
    with pytest.raises(CheckpointError, match="newer trainkit") as caught:
        load(path)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert "newer" in (inspect_checkpoint(path)[1] or "")


def test_only_ordinary_files_are_opened(run_dir: Path) -> None:
    """A link may lead outside the folder, a pipe never ends, and a device may have side effects."""
    path = make(run_dir / "checkpoint")
    for name in names(path):
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
            except PermissionError:  # this container does not allow devices
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
    assert marker.exists()  # the pickle works
    marker.unlink()
    path = make(run_dir / "checkpoint")
    for name in names(path):
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
    """A header of a tensor file whose shape, offsets, dtype or length do not match the data is refused."""
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
    return make(tmp_path_factory.mktemp("mutated") / "checkpoint", max_shard_size=40)


@settings(max_examples=100)
@given(data=st.data())
def test_mutations_of_a_real_checkpoint(mutated: Path, data: st.DataObject) -> None:
    mutate(mutated, data)


@pytest.mark.slow
@settings(max_examples=examples(2_000))
@given(data=st.data())
def test_many_mutations_of_a_real_checkpoint(mutated: Path, data: st.DataObject) -> None:
    mutate(mutated, data)


def mutate(mutated: Path, data: st.DataObject) -> None:
    """Change a file and the digests that cover it, as an attacker could.

    Reading and verifying must have the same outcome: the same error of trainkit, or no error.
    """
    name = data.draw(st.sampled_from(names(mutated)))
    kept = {each: (mutated / each).read_bytes() for each in names(mutated)}
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
        # Only reading finds invalid bools, because verifying does not look at values; this checkpoint has no bools.
        assert outcomes[0] == outcomes[1]
        list_checkpoints(mutated.parent)
    finally:
        for each, before in kept.items():
            (mutated / each).write_bytes(before)
