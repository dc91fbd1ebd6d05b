"""Saves in a thread on several ranks: each rank copies only its own tensors, and all ranks get the same result."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import content, names
from helpers.worlds.threaded import run_groups, try_groups

from trainkit.checkpoint import checkpoint_plan as drafts
from trainkit.checkpoint import commit as commits
from trainkit.checkpoint.checkpoint_plan import CheckpointPlan
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.saver import Saver
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointWriteError, UnsavableError

TENSORS = {"model": {f"w{n}": torch.arange(1000.0) + n for n in range(12)}}


@pytest.fixture(autouse=True)
def _divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "SPLIT_ABOVE_BYTES", 8000)


def drafted(group: ThreadExchange, counter: int = 1) -> CheckpointPlan:
    made = content(counter, tensors={stem: {k: t.clone() for k, t in tensors.items()} for stem, tensors in TENSORS.items()})
    return CheckpointPlan(made, rank=group.rank, ranks=group.size)


class Saving:
    """A saver of one rank that records the results it reports."""

    def __init__(self, group: ThreadExchange) -> None:
        self.failures: list[str] = []
        self.committed = 0
        self.alerts = threading.Event()
        self.saver = Saver(self.alerts.set, group)

    def save(self, draft: CheckpointPlan, name: str = "a", **options: Any) -> None:
        def committed(manifest: Any) -> None:
            self.committed += 1

        self.saver.save(
            draft,
            Path(name),
            blocking=False,
            committed=committed,
            failed=lambda error: self.failures.append(f"{type(error).__name__}: {error}"),
            **options,
        )


@pytest.mark.parametrize("size", [2, 3])
def test_saves_one_after_the_other(run_dir: Path, size: int) -> None:
    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        for counter in (1, 2, 3):
            draft = drafted(group, counter)
            own.save(draft, f"a{counter}")
        own.saver.close()
        return own.committed, own.failures

    assert run_groups(size, work) == [(3, [])] * size
    assert names(run_dir) == ["a1", "a2", "a3"]
    for name in names(run_dir):
        loaded = open_checkpoint(name).read()
        assert all(loaded.tensors["model"][key].equal(tensor) for key, tensor in TENSORS["model"].items())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_copies_its_own_part_only(run_dir: Path, size: int) -> None:
    """Each rank copies its share: the host memory is about the size of the state divided by the number of ranks."""

    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        own.save(drafted(group))
        held = own.saver._buffers.nbytes
        own.saver.close()
        return held

    held = run_groups(size, work)
    state = 12 * 4000
    assert max(held) <= 1.1 * state / size
    assert sum(held) >= state


def test_what_changes_after_the_copy_is_not_saved(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    plain = commits._Commit.write
    monkeypatch.setattr(commits._Commit, "write", lambda self: (go.wait(30), plain(self))[1])

    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        tensors = {"model": {key: tensor.clone() for key, tensor in TENSORS["model"].items()}}
        made = content(tensors=tensors)
        own.save(CheckpointPlan(made, rank=group.rank, ranks=group.size))
        for tensor in tensors["model"].values():
            tensor.zero_()
        group.__class__("after", group._channel, group.rank, group.size).exchange(None)
        go.set()
        own.saver.close()

    run_groups(2, work)
    loaded = open_checkpoint("a").read()
    assert all(loaded.tensors["model"][key].equal(tensor) for key, tensor in TENSORS["model"].items())


def test_a_full_disk_on_one_rank_is_the_same_error_on_all(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        bad, good = drafted(group), drafted(group, 2)
        if group.rank == 1:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            bad.files = lambda: (_ for _ in ()).throw(error)
        own.save(bad)
        own.saver.wait()
        alerted = own.alerts.is_set()
        own.save(good)
        own.saver.close()
        return own.failures, own.committed, alerted

    ends = run_groups(3, work)
    assert all(end == ends[0] for end in ends)
    ([failure], committed, alerted) = ends[0]
    assert (committed, alerted) == (1, True)
    assert failure.startswith("CheckpointWriteError: rank 1: ")
    assert "No space left" in failure
    assert names(run_dir) == ["a"]
    assert open_checkpoint("a").manifest.save_counter == 2


def test_a_copy_that_fails_is_an_error_of_the_call_on_all(run_dir: Path) -> None:
    """`save` raises the same error on all ranks if a tensor of one rank has changed its shape since the draft was created."""

    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        tensors = {"model": {key: tensor.clone() for key, tensor in TENSORS["model"].items()}}
        made = content(tensors=tensors)
        draft = CheckpointPlan(made, rank=group.rank, ranks=group.size)
        if group.rank == 1:
            for _, tensors in draft._tensors.values():
                for tensor in tensors.values():
                    tensor.resize_(7)
        try:
            own.save(draft)
        finally:
            own.saver.close()

    ends = try_groups(2, work)
    assert {type(end) for end in ends} == {UnsavableError}
    assert all("rank 1" in str(end) for end in ends)
    assert names(run_dir) == []


def test_a_thread_that_cannot_start_on_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot start a thread saves in its main thread, because the other ranks' threads wait for it."""
    start, mine = threading.Thread.start, threading.local()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "trainkit-save" and mine.rank == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def work(group: ThreadExchange) -> Any:
        mine.rank = group.rank
        own = Saving(group)
        own.save(drafted(group))
        own.saver.close()
        return own.committed

    assert run_groups(2, work) == [1, 1]
    open_checkpoint("a").read()


@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_dies_in_the_middle(run_dir: Path, monkeypatch: pytest.MonkeyPatch, dead: int) -> None:
    """If a rank dies during a save, the saves of the other ranks fail with an error that names it, and do not hang."""

    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        if group.rank == dead:
            group.collect(
                [None, None], lambda values: [None, None]
            )  # takes part in the round after copying, and in no later one
            raise SystemExit
        own.save(drafted(group))
        own.saver.close()
        return own.failures

    ends = try_groups(3, work)
    for rank in {0, 1, 2} - {dead}:
        [failure] = ends[rank]
        assert failure == f"GoneError: rank {dead} has ended"
    assert names(run_dir) == []


def test_a_blocking_save_that_fails(run_dir: Path) -> None:
    def work(group: ThreadExchange) -> Any:
        own = Saving(group)
        draft = drafted(group)
        if group.rank == 0:
            draft.files = lambda: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO)))
        own.saver.save(draft, Path("a"), blocking=True)

    ends = try_groups(2, work)
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert names(run_dir) == []
