"""Reading on several ranks: each file is hashed by one rank, and damage that one rank finds is an error on all ranks."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import make, seal
from helpers.worlds.threaded import GoneError, run_groups, try_groups

from trainkit.checkpoint import reader
from trainkit.checkpoint.reader import open_checkpoint, read_on_all_ranks
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError

TENSORS = {
    "model": {f"w{n}": torch.arange(500.0) + n for n in range(6)},
    "optimizer": {f"0/w{n}/exp_avg": torch.arange(500.0) * n for n in range(6)},
}


@pytest.fixture
def checkpoint(run_dir: Path) -> Path:
    """A checkpoint with several tensor files, like that of a run on several ranks."""
    return make(run_dir / "a", tensors=TENSORS, max_shard_size=5000)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, with a `+` behind those that were also hashed."""
    seen: list[str] = []
    read_file = reader.read_file

    def spied(path: Path, size: int, digest: str | None, what: str, mapped: bool, *, checksum: str) -> Any:
        seen.append(path.name + ("" if digest is None else "+"))
        return read_file(path, size, digest, what, mapped, checksum=checksum)

    monkeypatch.setattr(reader, "read_file", spied)
    return seen


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_all_ranks_read_everything(checkpoint: Path, size: int, mapped: bool) -> None:
    alone = open_checkpoint(checkpoint).read()
    for loaded in run_groups(size, lambda group: read_on_all_ranks(checkpoint, group, mapped=mapped)):
        assert loaded.manifest.to_bytes() == alone.manifest.to_bytes()
        for stem, tensors in TENSORS.items():
            assert all(loaded.tensors[stem][name].equal(tensor) for name, tensor in tensors.items())
        assert loaded.state["mine"] == alone.state["mine"]


def test_each_file_is_hashed_once(checkpoint: Path, hashed: list[str]) -> None:
    files = open_checkpoint(checkpoint).manifest.files
    run_groups(3, lambda group: read_on_all_ranks(checkpoint, group))
    assert sorted(name for name in hashed if name.endswith("+")) == sorted(f"{name}+" for name in files)
    for name in files:
        attached = name == "config.json"  # its content is not requested
        assert hashed.count(name) == (0 if attached else 2)


def test_only_requested_stems_are_read_on_all_ranks(checkpoint: Path, hashed: list[str]) -> None:
    ends = run_groups(2, lambda group: read_on_all_ranks(checkpoint, group, lambda manifest: {"model"}))
    assert all(loaded.tensors.keys() == {"model"} and loaded.state == {} for loaded in ends)
    assert all(name.startswith("model") for name in hashed)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "state.json", "config.json", "manifest.json"])
def test_damage_is_the_same_error_on_all_ranks(checkpoint: Path, name: str, mapped: bool) -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[-2] ^= 1
    (checkpoint / name).write_bytes(data)
    ends = try_groups(3, lambda group: read_on_all_ranks(checkpoint, group, mapped=mapped))
    assert {type(end) for end in ends} == {CorruptCheckpointError}
    assert len({str(end) for end in ends}) == 1
    assert name in str(ends[0])
    assert str(ends[0]).startswith("rank ") == (name != "manifest.json")  # all ranks read the manifest


def test_nothing_is_used_before_the_verdict(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank loads values before all ranks have verified their files."""
    monkeypatch.setattr(reader.Checkpoint, "_load", lambda *_: pytest.fail("used"))
    path = checkpoint / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    ends = try_groups(3, lambda group: read_on_all_ranks(checkpoint, group))
    assert {type(end) for end in ends} == {CorruptCheckpointError}


def test_malformed_state_is_the_same_error_on_all_ranks(checkpoint: Path) -> None:
    """A state that matches its digest but is malformed is found by all ranks, so the error names no rank."""
    (checkpoint / "state.json").write_bytes(b"[]")
    seal(checkpoint)
    ends = try_groups(2, lambda group: read_on_all_ranks(checkpoint, group))
    assert {type(end) for end in ends} == {CorruptCheckpointError}
    assert not str(ends[0]).startswith("rank")


def test_error_in_selection(checkpoint: Path) -> None:
    # An error of the function that chooses what to read is raised on all ranks, and so is a choice that does not exist.

    def refuse(manifest: Any) -> None:
        raise CheckpointError("weights only")

    ends = try_groups(2, lambda group: read_on_all_ranks(checkpoint, group, refuse))
    assert [str(end) for end in ends] == ["weights only"] * 2
    ends = try_groups(2, lambda group: read_on_all_ranks(checkpoint, group, lambda manifest: {"nonsense"}))
    assert {type(end) for end in ends} == {StateMismatchError}


def test_the_main_processs_path_counts(checkpoint: Path) -> None:
    """All ranks read the path that the main process was given."""
    run_groups(2, lambda group: read_on_all_ranks("a" if group.rank == 0 else "elsewhere", group))


def test_a_process_that_does_not_see_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = try_groups(3, blind(monkeypatch, "nowhere"))
    assert {type(end) for end in ends} == {CheckpointNotFoundError}
    assert all(str(end).startswith("rank 1:") for end in ends)


def test_a_rank_that_sees_another_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise an error if one node has a different checkpoint at the same path."""
    shutil.copytree(checkpoint, checkpoint.parent / "b")
    seal(checkpoint.parent / "b", lambda manifest: manifest.update(step=99))
    ends = try_groups(3, blind(monkeypatch, "b"))
    assert {type(end) for end in ends} == {CheckpointError}
    assert all("rank 1 sees a different checkpoint than rank 0" in str(end) for end in ends)


def test_one_that_is_replaced_after_the_verdict(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise an error if the checkpoint is replaced between hashing and reading, by one with the same sizes."""
    others = {stem: {name: tensor + 1 for name, tensor in tensors.items()} for stem, tensors in TENSORS.items()}
    make(checkpoint.parent / "b", tensors=others, max_shard_size=5000)
    plain, once = reader.Checkpoint._load, threading.Lock()

    def load(self: Any, *given: Any) -> Any:
        with once:
            if (checkpoint.parent / "b").exists():
                os.rename(checkpoint, checkpoint.parent / "old")
                os.rename(checkpoint.parent / "b", checkpoint)
        return plain(self, *given)

    monkeypatch.setattr(reader.Checkpoint, "_load", load)
    ends = try_groups(2, lambda group: read_on_all_ranks(checkpoint, group))
    assert {type(end) for end in ends} == {CheckpointError}
    assert all("was replaced by another checkpoint while it was read" in str(end) for end in ends)


def blind(monkeypatch: pytest.MonkeyPatch, instead: str) -> Any:
    """Return a function that reads the checkpoint "a", but opens `instead` on rank 1."""
    plain, ranks = reader.open_checkpoint, threading.local()

    def work(group: ThreadExchange) -> Any:
        ranks.own = group.rank
        return read_on_all_ranks("a", group)

    def opened(path: str) -> Any:
        return plain(path if ranks.own != 1 else os.path.join(os.path.dirname(path), instead))

    monkeypatch.setattr(reader, "open_checkpoint", opened)
    return work


def test_one_that_has_died(checkpoint: Path) -> None:
    # If a rank dies, reading on the other ranks raises an error instead of waiting.

    def work(group: ThreadExchange) -> Any:
        if group.rank == 2:
            raise SystemExit
        return read_on_all_ranks(checkpoint, group)

    assert [type(end) for end in try_groups(3, work)] == [GoneError, GoneError, SystemExit]
