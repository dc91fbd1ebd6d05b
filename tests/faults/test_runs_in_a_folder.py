"""Several runs that save to one folder, one after another or at the same time; and damaged checkpoints in it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.faulting import Child, checkpoints, tell, told
from helpers.resume.saving import saving
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.folder import list_checkpoints
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointLockedError, CheckpointNotFoundError, CorruptCheckpointError

FOLDER = Path("runs") / "checkpoints"


class At(Callback):
    """Calls `act` before the micro-batch that follows `step` optimizer steps."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer._save_policy.wait()
            self.act()


def fit(steps: int = 6, *more: Callback, ckpt_path: Any = None, keep: int = 2, **options: Any) -> Trainer:
    """A run that saves after every second optimizer step."""
    checkpoint = ModelCheckpoint(**{"dirpath": FOLDER, **options}, every_n_train_steps=2, keep_last=keep)
    trainer = saving(checkpoint, *more, max_steps=steps, max_epochs=None)
    trainer.fit(TinyModule(), tiny_loader(200), ckpt_path=ckpt_path)
    return trainer


def runs() -> dict[str, list[int]]:
    """Run id → the steps of its checkpoints, the newest first."""
    found: dict[str, list[int]] = {}
    for one in list_checkpoints(FOLDER):
        assert one.manifest is not None, one.problem
        found.setdefault(one.manifest.run_id, []).append(one.manifest.step)
    return found


# ----------------------------------------------------------------------------------------------------- one after another


def test_two_runs_do_not_prune_each_others_checkpoints() -> None:
    first = fit(6)._save_policy.run_id
    second = fit(8)._save_policy.run_id
    assert first != second
    assert runs() == {second: [8, 6], first: [6, 4]}
    third = fit(10, ckpt_path="auto")._save_policy.run_id
    assert third == second, "what resumes from a checkpoint of the folder is the same run"
    assert runs() == {second: [10, 8], first: [6, 4]}
    fit(3, keep=1)
    assert runs()[second] == [10, 8]
    assert runs()[first] == [6, 4]


def test_auto_takes_the_run_that_was_saved_last() -> None:
    fit(10)
    second = fit(4)._save_policy.run_id
    assert next(iter(runs().items())) == (second, [4, 2])
    trainer = fit(6, ckpt_path="auto")
    assert trainer._save_policy.resumed_from == FOLDER.absolute() / "step-00000004"
    assert trainer._save_policy.run_id == second


def test_auto_finds_the_newest_in_all_folders_of_a_run() -> None:
    """Two callbacks save to their own folders at different steps; "auto" resumes from the newest checkpoint of both."""

    def train(steps: int) -> Trainer:
        return fit(steps, ModelCheckpoint("often", every_n_train_steps=1), dirpath="seldom", ckpt_path="auto")

    assert train(3).global_step == 3
    shutil.rmtree("seldom/step-00000003")  # saved at the end of training by both
    assert train(5)._save_policy.resumed_from == Path("often/step-00000003").absolute()


# ------------------------------------------------------------------------------------------------------- at the same time


def test_a_second_live_run_is_refused() -> None:
    """A second process gets CheckpointLockedError; the first run continues, and unlocks its folder when it ends."""

    def first() -> Any:
        def hold() -> None:
            tell("holding")
            while not Path("go").exists():
                os.sched_yield()

        trainer = fit(8, At(4, hold))
        return trainer._save_policy.run_id

    def second() -> Any:
        try:
            fit(8)
        except CheckpointLockedError as error:
            return str(error)

    with Child(first, "first") as child:
        child.until(told, "step 4")
        before = checkpoints(FOLDER)
        with Child(second, "second") as other:
            assert socket.gethostname() in other.answer
            assert f"process {child.pid}" in other.answer
            assert str(FOLDER) in other.answer
        assert checkpoints(FOLDER) == before == ["step-00000004", "step-00000002"]
        Path("go").touch()
        run_id = child.answer
    assert runs() == {run_id: [8, 6]}
    fit(9, ckpt_path="auto")
    assert runs() == {run_id: [9, 8]}


@pytest.mark.parametrize("reaped", [True, False])
def test_the_lock_of_a_killed_run_is_taken_over_immediately(reaped: bool) -> None:
    with Child(lambda: fit(8, At(4, lambda: os.kill(os.getpid(), signal.SIGKILL)))) as child:
        if reaped:
            assert child.code == -signal.SIGKILL
        else:  # a zombie that no process has waited for
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        [run_id] = runs()
        with Child(lambda: fit(8, ckpt_path="auto")._save_policy.run_id, "next") as following:
            assert following.answer == run_id
        assert "locked" not in following.output
    assert runs() == {run_id: [8, 6]}


def test_a_folder_is_free_after_an_error() -> None:
    def fail() -> None:
        raise ArithmeticError("a test's")

    with pytest.raises(ArithmeticError, match="a test's"):
        fit(8, At(3, fail))
    fit(8, ckpt_path="auto")
    assert checkpoints(FOLDER)[0] == "step-00000008"


# ---------------------------------------------------------------------------------------------------------------- damage


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


DAMAGE = [emptied, halved, cut, flipped, longer, Path.unlink]
FILES = ["manifest.json", "manifest.sha256", "model.safetensors", "optimizer.safetensors", "state.json", "state.safetensors"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with undamaged checkpoints of steps 4 and 6."""
    here, there = Path.cwd(), tmp_path_factory.mktemp("sound")
    os.chdir(there)
    try:
        fit(6)
        files = {file.name for file in (FOLDER / "step-00000006").iterdir()}
    finally:
        os.chdir(here)
    assert files == set(FILES), "every file is damaged below"
    return there / FOLDER


@pytest.fixture
def saved(sound: Path) -> Path:
    """Copy the checkpoints of `sound` to the folder that the run saves to; returns the path of the newest."""
    shutil.copytree(sound, FOLDER)
    return FOLDER / "step-00000006"


@pytest.mark.parametrize("word", ["auto", "last"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_next_older_is_used(
    saved: Path, name: str, damage: Callable[[Path], None], word: str
) -> None:
    damage(saved / name)
    with pytest.warns(TrainkitWarning, match="damaged and skipped") as caught:
        trainer = fit(8, ckpt_path=word)
    assert trainer._save_policy.resumed_from is not None
    assert trainer._save_policy.resumed_from.name == "step-00000004"
    [text] = [str(warning.message) for warning in caught]
    assert str(saved) in text
    assert trainer.global_step == 8


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_that_is_requested_is_an_error(saved: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(saved / name)
    with pytest.raises(CorruptCheckpointError, match="step-00000006"):
        fit(8, ckpt_path=saved)
    if not name.startswith("optimizer"):  # an evaluation does not read the optimizer's file
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir="runs")
        with pytest.raises(CorruptCheckpointError, match="step-00000006"):
            trainer.validate(TinyModule(), tiny_loader(), ckpt_path=saved)
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == {"step-00000004", "step-00000006"}


@pytest.mark.parametrize("word", ["auto", "last"])
def test_all_checkpoints_damaged(saved: Path, word: str) -> None:
    """If all checkpoints are damaged, the error names each of them; nothing is removed or trained."""
    halved(saved / "model.safetensors")
    flipped(FOLDER / "step-00000004" / "model.safetensors")  # found only when the tensors are read
    with pytest.raises(CorruptCheckpointError) as caught:
        fit(8, ckpt_path=word)
    for name in ("step-00000004", "step-00000006"):
        assert str(caught.value).count(name) >= 1
    assert "there is no good checkpoint in" in str(caught.value)
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == {"step-00000004", "step-00000006"}


def test_a_bad_one_is_neither_counted_nor_removed_by_the_rotation(saved: Path) -> None:
    flipped(saved / "manifest.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainkitWarning)
        fit(12, ckpt_path="auto")
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == {"step-00000006", "step-00000010", "step-00000012"}


def test_last_without_a_checkpoint_is_an_error() -> None:
    with pytest.raises(CheckpointNotFoundError, match="To start from the beginning if there is none: ckpt_path='auto'"):
        fit(2, ckpt_path="last")
    trainer = fit(2, ckpt_path="auto")
    assert (trainer.global_step, trainer._save_policy.resumed_from) == (2, None)
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        fit(2, ckpt_path="nowhere/step-1")
