"""Saves in a thread: one at a time, with the values at the call, always finished, and with every failure reported."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import IMPORTABLE, draft, verified
from helpers.runs.leaks import held
from helpers.support import run_python

from trainkit.checkpoint.checkpoint_plan import CheckpointPlan
from trainkit.checkpoint.commit import CommitResult
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.saver import Saver
from trainkit.checkpoint.tensor_file import tensors_in
from trainkit.errors import CheckpointError, CheckpointWriteError


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Verify a checkpoint and return its model tensors."""
    verified(path)
    return tensors_in(bytearray((path / "model.safetensors").read_bytes()), "model.safetensors")


@pytest.fixture
def saver() -> Iterator[Saver]:
    made = Saver(notify=lambda: None)
    yield made
    made.close()


class Gate:
    """Blocks the writing of a draft until it is opened; opens by itself after `seconds`."""

    def __init__(self, held: CheckpointPlan, monkeypatch: pytest.MonkeyPatch, seconds: float = 30.0) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        files = held.files

        def waiting() -> Iterator[Any]:
            self.reached.set()
            self._open.wait(seconds)
            yield from files()

        monkeypatch.setattr(held, "files", waiting)

    def open(self) -> None:
        self._open.set()


def fail(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: object) -> Any:
        raise error

    return raise_it


# ------------------------------------------------------------------------------------------------------- the normal case


@pytest.mark.parametrize("blocking", [False, True])
def test_a_save_is_committed(run_dir: Path, saver: Saver, blocking: bool) -> None:
    manifests: list[Manifest | None] = []
    threads: list[threading.Thread] = []

    def committed(written: CommitResult) -> None:
        manifests.append(written.manifest)
        threads.append(threading.current_thread())
        verified(run_dir / "a")

    saver.save(draft(4), run_dir / "a", blocking=blocking, committed=committed)
    assert not blocking or manifests
    saver.wait()
    assert [manifest and manifest.save_counter for manifest in manifests] == [4]
    assert (threads[0] is threading.main_thread()) == blocking
    assert weights(run_dir / "a")["weight"].unique().tolist() == [4.0]


def test_what_changes_right_after_save_is_not_written(run_dir: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(300, 300)
    layer.weight.data = layer.weight.data.t()  # also a tensor that is not contiguous
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    held = draft(tensors={"model": {**layer.state_dict(), "scalar": torch.tensor(3)}})
    gate = Gate(held, monkeypatch)
    saver.save(held, run_dir / "a", blocking=False)
    assert gate.reached.wait(30)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.add_(1.0)
    gate.open()
    saver.wait()
    after = weights(run_dir / "a")
    assert {name: torch.equal(after[name], before[name]) for name in before} == {"weight": True, "bias": True}


def test_a_blocking_save_writes_the_tensors_from_where_they_are(
    run_dir: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blocking save writes the tensors without copying them first."""
    made = draft(2)
    monkeypatch.setattr(made, "detach", lambda buffers: pytest.fail("a copy"))
    saver.save(made, run_dir / "a", blocking=True)
    assert weights(run_dir / "a")["weight"][0] == 2


@pytest.mark.parametrize("blocking", [False, True])
def test_one_save_is_in_flight(run_dir: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch, blocking: bool) -> None:
    first, second = draft(1), draft(2)
    gate = Gate(first, monkeypatch)
    saver.save(first, run_dir / "a", blocking=False)
    assert gate.reached.wait(30)
    assert not (run_dir / "a").exists()
    entered = threading.Event()
    wait = saver.wait
    monkeypatch.setattr(saver, "wait", lambda: (entered.set(), wait()))

    def let_go() -> None:  # opens the gate after the second save has begun
        entered.wait(30)
        gate.open()

    helper = threading.Thread(target=let_go)
    helper.start()

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (verified(run_dir / "a"), original(*arguments))[1]

    # The second save uses the buffers or the disk only after the first is committed.
    monkeypatch.setattr(second, "detach", seen(second.detach))
    monkeypatch.setattr(second, "files", seen(second.files))
    saver.save(second, run_dir / "b", blocking=blocking)
    helper.join()
    saver.wait()
    assert weights(run_dir / "a")["weight"][0] == 1
    assert weights(run_dir / "b")["weight"][0] == 2


def test_many_saves_one_after_the_other(run_dir: Path, saver: Saver) -> None:
    weight = torch.zeros(5000)
    for counter in range(1, 9):
        weight.fill_(counter)
        saver.save(
            draft(counter, tensors={"model": {"weight": weight}}), run_dir / f"step-{counter}", blocking=counter % 3 == 0
        )
    weight.fill_(99)
    saver.wait()
    for counter in range(1, 9):
        assert weights(run_dir / f"step-{counter}")["weight"].unique().tolist() == [counter]


def test_replace_is_passed_to_commit(run_dir: Path, saver: Saver) -> None:
    saver.save(draft(1), run_dir / "a", blocking=True)
    saver.save(draft(2), run_dir / "a", blocking=False, replace=True)
    saver.wait()
    assert weights(run_dir / "a")["weight"][0] == 2
    with pytest.raises(CheckpointError, match="not empty"):
        saver.save(draft(3), run_dir / "a", blocking=True)


def test_a_relative_path_is_that_of_the_moment_of_save(run_dir: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is resolved when `save` is called, not when the file is written."""
    held = draft(1)
    gate = Gate(held, monkeypatch)
    saver.save(held, Path("a"), blocking=False)
    (run_dir / "elsewhere").mkdir()
    monkeypatch.chdir(run_dir / "elsewhere")
    gate.open()
    saver.wait()
    verified(run_dir / "a")


def test_memory_is_reserved_before_the_first_save(run_dir: Path, saver: Saver) -> None:
    made = draft(size=20 * 2**20)
    sizes = {"model.safetensors": 20 * 2**20, "optimizer.safetensors": 20 * 2**20}
    saver.reserve({"model.safetensors": 2**20}, torch.device("cpu"))
    saver.wait()
    assert saver._buffers.nbytes == 0  # so little is not worth a thread
    saver.reserve(sizes, torch.device("cpu"))
    saver.reserve({"model.safetensors": 2**30}, torch.device("cpu"))  # it has begun already
    saver.wait()
    before = {name: buffer.data_ptr() for name, buffer in saver._buffers._buffers.items()}
    assert saver._buffers.nbytes == sum(sizes.values())
    saver.save(made, run_dir / "a", blocking=False)
    assert {name: buffer.data_ptr() for name, buffer in saver._buffers._buffers.items()} == before
    saver.close()
    verified(run_dir / "a")


def test_memory_that_cannot_be_reserved_is_left_to_the_save(run_dir: Path, saver: Saver) -> None:
    saver.reserve({"model.safetensors": 2**60}, torch.device("cpu"))
    saver.wait()
    assert saver._buffers.nbytes == 0
    saver.save(draft(), run_dir / "a", blocking=False)
    saver.close()
    verified(run_dir / "a")


def test_close_frees_copies(run_dir: Path, saver: Saver) -> None:
    """A closed saver frees the copies of the tensors even if the caller keeps the draft."""
    made = draft()
    saver.save(made, run_dir / "a", blocking=False)
    copies = weakref.ref(saver._buffers._buffers["model.safetensors"])
    saver.close()
    gc.collect()
    assert copies() is None
    assert made.size == sum(path.stat().st_size for path in (run_dir / "a").iterdir())


def test_close_ends_the_thread_and_frees_the_buffers(run_dir: Path) -> None:
    saver = Saver(notify=lambda: None)
    saver.close()
    before = held()
    for counter in (1, 2):  # a closed saver can be used again
        saver.save(draft(counter), run_dir / f"{counter}", blocking=False)
        saver.close()
        saver.close()
        verified(run_dir / f"{counter}")
        assert not held() - before
        assert saver._buffers.nbytes == 0


# ---------------------------------------------------------------------------------------------------------------- failures


def test_a_failure_comes_with_the_next_poll(run_dir: Path) -> None:
    (run_dir / "file").touch()
    told = threading.Event()
    threads: list[threading.Thread] = []
    saver = Saver(notify=lambda: (threads.append(threading.current_thread()), told.set()))
    errors: list[Exception] = []
    saver.save(
        draft(), run_dir / "file" / "a", blocking=False, failed=errors.append, committed=lambda _: pytest.fail("committed")
    )
    assert told.wait(30)
    assert threads[0] is not threading.main_thread()
    assert errors == []  # the saving thread does not call `failed`; poll does, in the main thread
    saver.poll()
    saver.poll()
    assert [type(error) for error in errors] == [CheckpointWriteError]
    # The failure has no further effect: the next save is written.
    saver.save(draft(2), run_dir / "a", blocking=False, failed=errors.append)
    saver.close()
    assert len(errors) == 1
    verified(run_dir / "a")


@pytest.mark.parametrize("how", ["poll", "wait", "save", "close"])
def test_a_failure_that_was_not_collected_is_raised(run_dir: Path, how: str) -> None:
    (run_dir / "file").touch()
    told = threading.Event()
    saver = Saver(notify=told.set)
    saver.save(draft(), run_dir / "file" / "a", blocking=False)
    assert told.wait(30)
    act = {"save": lambda: saver.save(draft(), run_dir / "b", blocking=True)}.get(how) or getattr(saver, how)
    with pytest.raises(CheckpointWriteError, match="file"):
        act()
    saver.close()
    assert not (run_dir / "b").exists()
    assert all(thread.name != "trainkit-save" for thread in threading.enumerate())


def test_what_failed_raises_comes_out(run_dir: Path, saver: Saver) -> None:
    """An error that the `failed` callback raises leaves `wait`, so that a callback can end the run after several failures."""
    (run_dir / "file").touch()
    saver.save(draft(), run_dir / "file" / "a", blocking=False, failed=fail(RuntimeError("enough")))
    with pytest.raises(RuntimeError, match="enough"):
        saver.wait()
    saver.poll()


def test_an_error_of_committed_is_a_failure_too(run_dir: Path, saver: Saver) -> None:
    errors: list[Exception] = []
    saver.save(draft(), run_dir / "a", blocking=False, committed=fail(ValueError("pruning")), failed=errors.append)
    saver.wait()
    assert [str(error) for error in errors] == ["pruning"]
    verified(run_dir / "a")


def test_an_exit_in_the_thread_is_not_swallowed(run_dir: Path, saver: Saver) -> None:
    # A SystemExit in the saving thread is raised by `wait` and is not reported as a failed save.

    def leave(_: Manifest) -> None:
        raise SystemExit(7)

    saver.save(draft(), run_dir / "a", blocking=False, committed=leave, failed=lambda _: pytest.fail("taken"))
    with pytest.raises(SystemExit, match="7"):
        saver.wait()


def test_a_blocking_save_raises(run_dir: Path, saver: Saver) -> None:
    (run_dir / "file").touch()
    with pytest.raises(CheckpointWriteError):
        saver.save(draft(), run_dir / "file" / "a", blocking=True, failed=lambda _: pytest.fail("told of twice"))
    saver.poll()


def test_a_thread_that_cannot_start_is_a_failed_save(run_dir: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail(RuntimeError("can't start new thread")))
        with pytest.raises(CheckpointWriteError, match="can't start new thread.*blocking=True"):
            saver.save(draft(), run_dir / "a", blocking=False)
    saver.save(draft(), run_dir / "a", blocking=False)
    saver.wait()
    verified(run_dir / "a")


def test_a_failure_keeps_no_draft(run_dir: Path, saver: Saver) -> None:
    """The reported error does not reference the draft, whose copies may take gigabytes."""
    (run_dir / "file").touch()
    errors: list[Exception] = []
    made = draft()
    gone = weakref.ref(made)
    saver.save(made, run_dir / "file" / "a", blocking=False, failed=errors.append)
    del made
    saver.wait()
    gc.collect()
    assert len(errors) == 1
    assert gone() is None


# -------------------------------------------------------------------------------------------------------- interpreter exit

CHILD = """
import sys, threading, time
from pathlib import Path
from helpers.resume.checkpoints import draft
from trainkit.checkpoint.saver import Saver

def after_the_main_thread(held):
    # Nothing is written before the script has run to its end.
    files = held.files
    def waiting():
        deadline = time.monotonic() + 60
        while threading.main_thread().is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not threading.main_thread().is_alive()
        yield from files()
    held.files = waiting
    return held

saver = Saver(notify=lambda: None)
held = after_the_main_thread(draft(3, size=12_000_000))
"""


@pytest.mark.parametrize(
    "end, code",
    [("", 0), ("del saver, held", 0), ("sys.exit(5)", 5), ("raise ValueError('the script fails')", 1)],
    ids=["end", "dropped", "exit", "error"],
)
def test_the_interpreter_finishes_a_save_in_flight(run_dir: Path, end: str, code: int) -> None:
    done = run_python(f"{CHILD}\nsaver.save(held, Path('a'), blocking=False)\n{end}", env=IMPORTABLE)
    assert done.returncode == code, done.stderr
    assert "trainkit" not in done.stderr.replace("trainkit/", "")
    assert weights(run_dir / "a")["weight"].unique().tolist() == [3.0]
    assert [path.name for path in run_dir.iterdir()] == ["a"]


@pytest.mark.parametrize("end", ["", "del saver, held"], ids=["end", "dropped"])
def test_a_failure_after_the_end_is_printed(run_dir: Path, end: str) -> None:
    done = run_python(f"{CHILD}\nPath('file').touch()\nsaver.save(held, Path('file/a'), blocking=False)\n{end}", env=IMPORTABLE)
    assert done.returncode == 0, done.stderr
    line = f"trainkit: saving {run_dir / 'file' / 'a'} failed. The error was not reported during training:"
    assert done.stderr.count(f"{line}\nTraceback") == 1
    assert "CheckpointWriteError: " in done.stderr


def test_a_failure_that_was_reported_is_not_printed_again(run_dir: Path) -> None:
    program = "saver.save(draft(), Path('file/a'), blocking=False, failed=lambda e: print('told'))\nsaver.close()"
    done = run_python(f"{CHILD}\nPath('file').touch()\n{program}", env=IMPORTABLE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n", "")
