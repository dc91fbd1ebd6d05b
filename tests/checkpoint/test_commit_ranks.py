"""A commit by several processes: each writes its own files, and all ranks succeed or raise the same error."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import content, names
from helpers.worlds.threaded import GoneError, run_groups, try_groups
from safetensors.torch import load_file

from trainkit.checkpoint import checkpoint_plan as drafts
from trainkit.checkpoint import commit as module
from trainkit.checkpoint import ranks
from trainkit.checkpoint.checkpoint_plan import CheckpointPlan
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointError, CheckpointWriteError

GENERATOR = torch.Generator().manual_seed(3)
TENSORS = {
    "model": {f"layers.{n}.weight": torch.randn(30 + n, 20, generator=GENERATOR) for n in range(6)},
    "optimizer": {"0/w/step": torch.tensor(3.0), "0/w/exp_avg": torch.randn(30, 20, generator=GENERATOR)},
}


@pytest.fixture(autouse=True)
def _divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "SPLIT_ABOVE_BYTES", 8000)


def drafted(group: ThreadExchange, **changes: Any) -> CheckpointPlan:
    """A draft with the same tensors on all ranks and a different state on each."""
    made = content(2, **{"tensors": TENSORS, "state": {"rank": group.rank}, **changes})
    return CheckpointPlan(made, rank=group.rank, ranks=group.size)


def written_by(draft: CheckpointPlan) -> list[str]:
    """Names of the files that the rank of this draft writes."""
    return [name for name, _ in draft.files()]


class Failing(CheckpointPlan):
    """A draft whose files cannot be written."""

    error: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def files(self) -> Iterator[Any]:
        raise self.error


def failing(group: ThreadExchange, ranks: tuple[int, ...], error: BaseException | None = None) -> CheckpointPlan:
    """A draft that cannot be written on the given ranks, by default because the disk is full."""
    made = drafted(group)
    if group.rank in ranks:
        made.__class__ = Failing
        made.error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(group.rank))
    return made


# -------------------------------------------------------------------------------------------------------- distributed


def test_the_main_process_names_the_checksum(run_dir: Path) -> None:
    kinds = ("sha256", "xxh3-128", "xxh3-128")
    run_groups(3, lambda group: commit(drafted(group, checksum=kinds[group.rank]), Path("a"), group=group))
    checkpoint = open_checkpoint("a")
    assert checkpoint.manifest.checksum == "sha256"
    checkpoint.verify()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_content_is_the_same_whichever_rank_writes_it(run_dir: Path, size: int) -> None:
    written = run_groups(size, lambda group: commit(drafted(group), Path("a"), group=group))
    manifests = [one.manifest for one in written]
    assert manifests[0].to_bytes() == Path("a/manifest.json").read_bytes()
    assert manifests[1:] == [None] * (size - 1)
    assert names(run_dir) == ["a"]
    read = open_checkpoint("a").read()
    assert read.state == {"rank": 0}
    plain: dict[str, torch.Tensor] = {}
    for path in Path("a").glob("*.safetensors"):
        plain.update(load_file(path))
    for stem, tensors in TENSORS.items():
        assert read.tensors[stem].keys() == tensors.keys()
        assert all(read.tensors[stem][name].equal(tensor) for name, tensor in tensors.items())
        assert all(plain[name].equal(tensor) for name, tensor in tensors.items())
    assert len(list(Path("a").glob("model-*"))) == (size if size > 1 else 0)
    assert Path("a/model.safetensors.index.json").exists() == (size > 1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_process_writes_about_as_much_and_no_two_the_same(size: int) -> None:
    made = [drafted(ThreadExchange("", None, rank, size)) for rank in range(size)]
    own = [written_by(draft) for draft in made]
    assert sorted(name for names in own for name in names if name.endswith(".safetensors")) == sorted(
        name for name in made[0].sizes if name.endswith(".safetensors")
    )
    assert [name for names in own[1:] for name in names if not name.endswith(".safetensors")] == []
    bytes_of = [sum(made[0].sizes[name] for name in names if name.endswith(".safetensors")) for names in own]
    assert max(bytes_of) - min(bytes_of) < 36 * 20 * 4  # the size of the largest tensor
    assert len({draft.layout for draft in made}) == 1


def test_small_stems_are_distributed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the tensors are small, each group of tensors (model, optimizer) is written by one rank."""
    monkeypatch.setattr(drafts, "SPLIT_ABOVE_BYTES", 10**6)
    first, second = (drafted(ThreadExchange("", None, rank, 2)) for rank in range(2))
    assert "model.safetensors" in written_by(first)
    assert written_by(second) == ["optimizer.safetensors"]


def test_files_are_no_larger_than_asked_for_on_any_number_of_processes() -> None:
    draft = drafted(ThreadExchange("", None, 0, 2), max_shard_size=6000)
    files = {name: size for name, size in draft.sizes.items() if name.startswith("model") and name.endswith("s")}
    assert len(files) == 4
    assert max(files.values()) <= 6000


def test_a_stem_without_tensors_is_written_once() -> None:
    made = [
        drafted(ThreadExchange("", None, rank, 3), tensors={"model": TENSORS["model"], "optimizer": {}}) for rank in range(3)
    ]
    assert [name for draft in made for name in written_by(draft)].count("optimizer.safetensors") == 1


def test_the_order_of_the_tensors_makes_no_difference() -> None:
    turned = {stem: dict(reversed(tensors.items())) for stem, tensors in TENSORS.items()}
    for rank in range(3):
        first, second = drafted(ThreadExchange("", None, rank, 3)), drafted(ThreadExchange("", None, rank, 3), tensors=turned)
        assert written_by(first) == written_by(second)
        assert first.layout == second.layout


@pytest.mark.parametrize(
    "other",
    [
        {"0/w/step": torch.tensor(3.0)},
        {"0/w/step": torch.tensor(3.0), "0/w/exp_avg": torch.zeros(20, 30)},
        {"0/w/step": torch.tensor(3), "0/w/exp_avg": torch.zeros(30, 20)},
        {"0/v/step": torch.tensor(3.0), "0/w/exp_avg": torch.zeros(30, 20)},
    ],
)
def test_other_tensors_on_one_process_are_an_error_on_all(run_dir: Path, other: dict[str, torch.Tensor]) -> None:
    # All ranks raise the same error if the names, dtypes or shapes of the tensors differ on one rank.

    def work(group: ThreadExchange) -> Any:
        tensors = {**TENSORS, "optimizer": other} if group.rank == 1 else TENSORS
        return commit(drafted(group, tensors=tensors), Path("a"), group=group)

    ends = try_groups(3, work)
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert all("the tensors on rank 1 differ from those on rank 0" in str(end) for end in ends)
    assert names(run_dir) == []


# ---------------------------------------------------------------------------------------- the same result on all ranks


@pytest.mark.parametrize("ranks", [(0,), (2,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("replace", [False, True])
def test_a_disk_that_fails_is_the_same_error_on_all(run_dir: Path, ranks: tuple[int, ...], replace: bool) -> None:
    if replace:
        commit(drafted(ThreadExchange(), state={"old": 1}), Path("a"))
    ends = try_groups(3, lambda group: commit(failing(group, ranks), Path("a"), replace=True, group=group))
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert len({str(end) for end in ends}) == 1
    assert f"rank {ranks[0]}" in str(ends[0])
    assert "No space left" in str(ends[0])
    assert ("more)" in str(ends[0])) == (len(ranks) > 1)
    assert names(run_dir) == (["a"] if replace else [])
    if replace:
        assert open_checkpoint("a").read().state == {"old": 1}


def test_an_error_of_another_class_is_the_same_on_all_too(run_dir: Path) -> None:
    ends = try_groups(2, lambda group: commit(failing(group, (1,), RuntimeError("odd")), Path("a"), group=group))
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert {str(end) for end in ends} == {"rank 1: RuntimeError: odd"}
    assert names(run_dir) == []


@pytest.mark.parametrize("size", [2, 5])
def test_a_commit_takes_two_rounds(run_dir: Path, size: int) -> None:
    """Names and checksums of files go to the main process only; what every rank receives does not grow with their number."""

    def work(group: ThreadExchange) -> tuple[int, int]:
        channel: Any = group._channel
        collect, received = channel.collect, []

        def counted(*args: Any) -> Any:
            received.append(collect(*args))
            return received[-1]

        channel.collect = counted
        commit(drafted(group), Path("a"), group=group)
        return group.completed, len(json.dumps(received).replace(str(run_dir), ""))

    rounds, received = zip(*run_groups(size, work), strict=True)
    assert set(rounds) == {2}
    assert max(received) < 100


def test_an_interrupt_of_one_process(run_dir: Path) -> None:
    ends = try_groups(2, lambda group: commit(failing(group, (0,), KeyboardInterrupt()), Path("a"), group=group))
    assert [type(end) for end in ends] == [KeyboardInterrupt, CheckpointWriteError]
    assert "rank 0: KeyboardInterrupt" in str(ends[1])
    assert names(run_dir) == []


def test_what_is_there_already_is_an_error_on_all(run_dir: Path) -> None:
    """All ranks raise the same error if the folder contains other files; the files are kept."""
    Path("a").mkdir()
    Path("a/mine").touch()
    ends = try_groups(2, lambda group: commit(drafted(group), Path("a"), replace=True, group=group))
    assert {type(end) for end in ends} == {CheckpointError}
    assert all("has other files" in str(end) for end in ends)
    assert names(run_dir / "a") == ["mine"]


def test_too_little_space_for_all_together(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drafted(ThreadExchange("", None, 0, 2)).size
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: (10**9, 0, whole // 2))
    ends = try_groups(2, lambda group: commit(drafted(group), Path("a"), group=group))
    assert all(isinstance(end, CheckpointWriteError) and "not enough disk space" in str(end) for end in ends)


@pytest.mark.parametrize("where", ["manifest", "in place"])
def test_the_main_process_fails_when_the_others_are_done(run_dir: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "_write_manifest" if where == "manifest" else "_put_in_place", fail)
    ends = try_groups(3, lambda group: commit(drafted(group), Path("a"), group=group))
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert all("rank 0" in str(end) for end in ends)
    assert names(run_dir) == []


def test_a_process_that_dies_leaves_the_old_one(run_dir: Path) -> None:
    commit(drafted(ThreadExchange(), state={"old": 1}), Path("a"))
    reached = threading.Event()

    def work(group: ThreadExchange) -> Any:
        if group.rank == 1:
            group.collect([["", drafted(group).layout, ""], None], lambda values: None)
            reached.set()
            raise SystemExit  # without telling the other ranks
        return commit(drafted(group), Path("a"), replace=True, group=group)

    ends = try_groups(3, work)
    assert reached.is_set()
    assert [type(end) for end in ends] == [GoneError, SystemExit, GoneError]
    assert names(run_dir) == ["a"]
    assert open_checkpoint("a").read().state == {"old": 1}


def test_a_process_that_does_not_see_the_folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_VISIBLE_WITHIN_SECONDS", 0.2)
    monkeypatch.setattr(module._Commit, "write", elsewhere(module._Commit.write))
    ends = try_groups(2, lambda group: commit(drafted(group), Path("a"), group=group))
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert all("rank 1" in str(end) and "same checkpoint folder" in str(end) for end in ends)
    assert names(run_dir) == []


def elsewhere(write: Any) -> Any:
    # Make all ranks except the main process write to a folder that does not exist, as on a node without the shared disk.

    def wrapped(self: Any) -> Any:
        if not self._main:
            self.partial = Path("another machine") / self.partial.name
        return write(self)

    return wrapped


def test_the_main_processs_path_counts(run_dir: Path) -> None:
    """All ranks save to the path that the main process was given."""
    run_groups(2, lambda group: commit(drafted(group), run_dir / ("a" if group.rank == 0 else "b"), group=group))
    assert names(run_dir) == ["a"]
    open_checkpoint("a").read()


@pytest.mark.parametrize("bad", ["first", "last"])
def test_all_ranks_know_what_one_has_found(run_dir: Path, bad: str) -> None:
    """Each rank checks the parameters that it writes; the verdict comes with the digests."""
    tensors = {"model": {name: torch.ones(1000) for name in ("first", "middle", "last")}}
    tensors["model"][bad][7] = math.nan
    parameters = {"model": dict.fromkeys(tensors["model"], True)}
    commit(drafted(ThreadExchange()), Path("a"))
    written = run_groups(
        3, lambda group: commit(drafted(group, tensors=tensors, parameters=parameters), Path("a"), replace=True, group=group)
    )
    assert {(one.path, one.nonfinite, one.kept) for one in written} == {(Path("a-nonfinite"), (bad,), Path("a"))}
    assert [one.manifest and one.manifest.finite for one in written] == [False, None, None]
    assert [open_checkpoint(name).manifest.finite for name in ("a", "a-nonfinite")] == [True, False]
