"""Each run has its own checkpoint folder, and a resume finds the newest checkpoint of the same module in all of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.faulting import At, Child, tell, told
from helpers.resume.saving import Adam, saving
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory
from helpers.worlds.worlds import run_world

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.folder import candidates, folders_below, list_checkpoints
from trainkit.checkpoint.lock import FolderLock
from trainkit.errors import CheckpointNotFoundError
from trainkit.loggers import CSVLogger, JSONLLogger, Logger


class Another(TinyModule):
    """A module of another class."""


def fit(*callbacks: Callback, module: Any = None, ckpt_path: Any = None, restore: Any = None, **arguments: Any) -> Trainer:
    trainer = saving(*callbacks, **{"max_epochs": 1, **arguments})
    trainer.fit(module or TinyModule(), tiny_loader(), ckpt_path=ckpt_path, restore=restore)
    return trainer


def folder(trainer: Trainer) -> str:
    """The checkpoint folder of the run, relative to the working directory."""
    callback: Any = trainer.checkpoint_callback
    return os.path.relpath(callback.dirpath)


def resumed(trainer: Trainer) -> str | None:
    path = trainer._save_policy.resumed_from
    return None if path is None else os.path.relpath(path)


# -------------------------------------------------------------------------------------------------- where checkpoints are


def test_checkpoints_are_in_the_folder_of_the_run() -> None:
    trainer = fit(logger=CSVLogger())
    assert folder(trainer) == "runs/logs/default/version_0/checkpoints"
    assert folder(fit(logger=CSVLogger("elsewhere", name="mine"))) == "elsewhere/mine/version_0/checkpoints"
    assert folder(fit(logger=CSVLogger(version="third"))) == "runs/logs/default/third/checkpoints"
    assert folder(fit(logger=[Memory(), JSONLLogger()])) == "runs/logs/default/version_1/checkpoints"


def test_without_files_of_a_logger_the_run_has_a_version_of_its_own() -> None:
    assert [folder(fit(logger=logger)) for logger in (False, Memory(), False)] == [
        f"runs/version_{number}/checkpoints" for number in range(3)
    ]


def test_explicit_dirpath_is_used() -> None:
    """A folder passed to ModelCheckpoint is used instead of the folder of the run."""
    trainer = fit(ModelCheckpoint("mine"), logger=CSVLogger())
    assert folder(trainer) == "mine"
    assert folders_below("runs") == []


def test_the_folder_is_known_when_training_begins() -> None:
    class Asking(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.seen = trainer.checkpoint_callback.dirpath

    asking = Asking()
    fit(asking)
    assert asking.seen == str(Path("runs/version_0/checkpoints").absolute())


def test_a_fit_that_fails_before_training_leaves_no_folder() -> None:
    class Failing(TinyModule):
        def setup(self, stage: str) -> None:
            raise ArithmeticError("a test's")

    with pytest.raises(ArithmeticError):
        fit(module=Failing(), logger=False)
    assert not Path("runs").exists()


def test_a_trial_run_makes_no_folder() -> None:
    fit(fast_dev_run=True, logger=CSVLogger())
    assert not Path("runs").exists()


def test_two_callbacks_of_a_run_share_its_folder() -> None:
    first, second = ModelCheckpoint(), ModelCheckpoint(every_n_train_steps=3)
    fit(first, second)
    assert first.dirpath == second.dirpath == str(Path("runs/version_0/checkpoints").absolute())


@pytest.mark.parametrize("logger", [True, False])
def test_the_same_trainer_fit_twice_is_two_runs(logger: bool) -> None:
    """Each fit has its own log version and checkpoint folder. A test after a fit logs to the version of that fit."""
    trainer = saving(logger=CSVLogger() if logger else False, max_epochs=1, log_every_n_steps=1)
    seen: list[tuple[str | None, str]] = []
    for _ in range(2):
        trainer.fit(Adam(), tiny_loader())
        trainer.test(Adam(), tiny_loader(8), verbose=False)
        seen.append((trainer.log_dir, folder(trainer)))
    place = "runs/logs/default" if logger else "runs"
    assert [at for _, at in seen] == [f"{place}/version_{number}/checkpoints" for number in range(2)]
    if logger:
        assert [log for log, _ in seen] == ["runs/logs/default/version_0", "runs/logs/default/version_1"]
        first, second = (Path(str(log), "metrics.csv").read_text() for log, _ in seen)
        assert first == second, "the second run has the same rows, and no row of the first"
    assert len({one.manifest.run_id for one in candidates(*folders_below("runs")) if one.manifest is not None}) == 2


def test_the_same_trainer_that_resumes_stays_in_its_version() -> None:
    trainer = saving(logger=CSVLogger(), max_epochs=1, log_every_n_steps=1)
    trainer.fit(Adam(), tiny_loader())
    trainer._arguments.max_epochs = 2
    trainer.fit(Adam(), tiny_loader(), ckpt_path="last")
    assert (trainer.log_dir, folder(trainer)) == ("runs/logs/default/version_0", "runs/logs/default/version_0/checkpoints")
    assert sorted(path.name for path in Path("runs/logs/default").iterdir()) == ["version_0"]


def test_a_version_that_was_given_stays_for_the_second_fit() -> None:
    trainer = saving(logger=CSVLogger(version=3), max_epochs=1)
    for _ in range(2):
        trainer.fit(Adam(), tiny_loader())
        assert trainer.log_dir == "runs/logs/default/version_3"
    names = {path.name for path in Path("runs/logs/default/version_3/checkpoints").glob("step-*")}
    assert names == {"step-00000004", "step-00000004-v1"}, "the second run removes nothing of the first"


def test_a_logger_without_a_save_dir() -> None:
    class Printing(Logger):
        save_dir = None  # type: ignore[assignment]

        def write_metrics(self, metrics: Any, step: int) -> None:
            rows.append(step)

    rows: list[int] = []
    trainer = fit(logger=Printing(), module=Adam(), log_every_n_steps=1)
    assert rows
    assert trainer.log_dir is None
    assert folder(trainer) == "runs/version_0/checkpoints"
    assert [path.name for path in Path("runs").iterdir()] == ["version_0"]
    assert fit(logger=[Printing(), CSVLogger()], ckpt_path="auto", module=Adam(), max_epochs=2).global_step == 8
    assert "Printing" in trainer.explain()


# ---------------------------------------------------------------------------------------------------- finding checkpoints


def test_auto_finds_the_newest_run_and_continues_in_its_folder() -> None:
    fit(logger=CSVLogger(), max_epochs=2)
    newest = fit(logger=CSVLogger())
    trainer = fit(logger=CSVLogger(), ckpt_path="auto", max_epochs=3)
    assert resumed(trainer) == "runs/logs/default/version_1/checkpoints/step-00000004"
    assert folder(trainer) == "runs/logs/default/version_1/checkpoints"
    assert trainer.log_dir == "runs/logs/default/version_1"
    assert trainer._save_policy.run_id == newest._save_policy.run_id
    assert not Path("runs/logs/default/version_2").exists()
    assert len(list_checkpoints("runs/logs/default/version_0/checkpoints")) == 2


@pytest.mark.parametrize("word", ["auto", "last"])
def test_what_earlier_versions_wrote_is_found(word: str) -> None:
    """Earlier versions of trainkit saved to `runs/checkpoints`."""
    fit()
    shutil.move("runs/version_0/checkpoints", "runs/checkpoints")
    shutil.rmtree("runs/version_0")
    trainer = fit(ckpt_path=word, max_epochs=2)
    assert resumed(trainer) == "runs/checkpoints/step-00000004"
    assert folder(trainer) == "runs/checkpoints"
    named = fit(ckpt_path=word, max_epochs=3, logger=CSVLogger(name="mine"))
    assert resumed(named) == "runs/checkpoints/step-00000008"


def test_a_checkpoint_of_another_module_is_skipped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fit()
    fit(module=Another(), max_epochs=2)
    trainer = fit(ckpt_path="auto", max_epochs=2)
    assert resumed(trainer) == "runs/version_0/checkpoints/step-00000004"
    assert (
        caplog.text.count("skipped newer checkpoints of another module") == caplog.text.count("test_run_folder.Another)") == 1
    )


def test_only_checkpoints_of_another_module() -> None:
    # ckpt_path='last' is an error, and 'auto' starts a new run.
    fit(module=Another())
    with pytest.raises(CheckpointNotFoundError):
        fit(ckpt_path="last")
    trainer = fit(ckpt_path="auto")
    assert (resumed(trainer), folder(trainer)) == (None, "runs/version_1/checkpoints")


def test_a_manifest_that_names_no_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions of trainkit did not save the name of the module. Such a checkpoint is found for any module."""
    from trainkit.trainer import save_policy as checkpointing

    class Forgetful(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if key != "module":
                super().__setitem__(key, value)

    plain = checkpointing.manifest_fields
    monkeypatch.setattr(
        checkpointing, "manifest_fields", lambda *a, **k: (made := plain(*a, **k)) | {"contents": Forgetful(made["contents"])}
    )
    path = fit().checkpoint_callback.last_model_path  # type: ignore[union-attr]
    [found] = list_checkpoints(Path(path).parent)
    assert found.manifest is not None
    assert "module" not in found.manifest.contents
    assert resumed(fit(module=Another(), ckpt_path="auto", max_epochs=2)) == "runs/version_0/checkpoints/step-00000004"


@pytest.mark.parametrize("given", ["name", "version"])
def test_folds_do_not_continue_each_other(given: str) -> None:
    """When a cross-validation is started again, each fold resumes from its own checkpoint."""

    def fold(number: int, epochs: int) -> Trainer:
        return fit(logger=CSVLogger(**{given: f"fold{number}"}), ckpt_path="auto", max_epochs=epochs)

    assert [resumed(fold(number, 1)) for number in range(3)] == [None] * 3
    again = [str(resumed(fold(number, 2))) for number in range(3)]
    assert [f"/fold{number}/" in path for number, path in enumerate(again)] == [True] * 3


def test_without_a_checkpoint_path_folds_are_runs_of_their_own() -> None:
    assert len({folder(fit()) for _ in range(3)}) == 3


def test_a_path_in_the_folder_of_a_run_continues_that_run() -> None:
    first = fit(max_epochs=2)
    fit()
    trainer = fit(ckpt_path="runs/version_0/checkpoints/step-00000004", max_epochs=3)
    assert folder(trainer) == "runs/version_0/checkpoints"
    assert trainer._save_policy.run_id == first._save_policy.run_id


def test_restoring_only_the_model_starts_a_new_run() -> None:
    """A fit that restores only the model is a new run with its own folder."""
    first = fit()
    trainer = fit(ckpt_path="auto", restore={"model"})
    assert folder(trainer) == "runs/version_1/checkpoints"
    assert trainer._save_policy.run_id != first._save_policy.run_id


def test_a_run_that_saves_to_two_folders_continues_in_both() -> None:
    def train(steps: int, ckpt_path: str | None = None) -> Trainer:
        often = ModelCheckpoint("often", every_n_train_steps=1, keep_last=-1)
        return fit(often, ModelCheckpoint(every_n_train_steps=2), max_steps=steps, ckpt_path=ckpt_path)

    train(3)
    shutil.rmtree("runs/version_0/checkpoints/step-00000003")  # the newest checkpoint is in the other folder
    trainer = train(4, "auto")
    assert resumed(trainer) == "often/step-00000003"
    assert [callback.dirpath for callback in trainer.checkpoint_callbacks] == [  # type: ignore[attr-defined]
        str(Path(place).absolute()) for place in ("often", "runs/version_0/checkpoints")
    ]


def test_the_best_is_that_of_the_newest_run_of_the_module() -> None:
    def experiment(max_epochs: int) -> Trainer:
        logger = CSVLogger("runs", name="mine")
        return saving(ModelCheckpoint(monitor="val_loss", keep_last=1), max_epochs=max_epochs, logger=logger)

    def best(module: Any) -> Trainer:
        trainer = experiment(2)
        trainer.fit(module, tiny_loader(), tiny_loader(8))
        return trainer

    best(TinyModule())
    expected = best(TinyModule()).checkpoint_callback
    best(Another())
    trainer = experiment(3)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader(8), ckpt_path="best")
    assert str(trainer._save_policy.resumed_from) == expected.best_model_path  # type: ignore[union-attr]
    assert folder(trainer) == "runs/mine/version_1/checkpoints"


def test_damage_in_an_older_run_is_not_reported() -> None:
    """If a newer run is resumed, a damaged checkpoint of an older run causes no warning (pytest makes warnings errors)."""
    fit(max_epochs=2)
    fit()
    Path("runs/version_0/checkpoints/step-00000008/manifest.json").unlink()
    assert resumed(fit(ckpt_path="auto", max_epochs=2)) == "runs/version_1/checkpoints/step-00000004"


def test_no_whole_tree_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for checkpoints does not read folders deeper than those of runs."""
    for deep in ("runs/data/images/cats/black", "runs/logs/a/b/c/d"):
        Path(deep).mkdir(parents=True)
    read: list[str] = []
    plain = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(str(path)) or plain(path))
    assert folders_below("runs") == []
    assert not [path for path in read if path.endswith(("cats", "images", "c"))]


# --------------------------------------------------------------------------------------------- two runs at the same time


def holding(step: int) -> At:
    """A callback that waits before a step until the file "go" exists."""

    def hold() -> None:
        tell("holding")
        while not Path("go").exists():
            os.sched_yield()

    return At("on_train_batch_start", hold, step)


@pytest.mark.parametrize("word", [None, "auto"])
def test_two_runs_at_a_time(word: str | None) -> None:
    """The second run gets its own folder. With ckpt_path='auto' it does not resume from the live first run, and says so."""
    each = {"max_steps": 6, "max_epochs": None}

    def first() -> Any:
        return folder(fit(ModelCheckpoint(every_n_train_steps=1), holding(3), **each))

    def second() -> Any:
        trainer = fit(ModelCheckpoint(every_n_train_steps=1), ckpt_path=word, **each)
        return [resumed(trainer), folder(trainer)]

    with Child(first, "first") as child:
        child.until(told, "step 3")
        with Child(second, "second") as other:
            assert other.answer == [None, "runs/version_1/checkpoints"]
        assert ("another live run saves there" in other.output) == (word is not None)
        Path("go").touch()
        assert child.answer == "runs/version_0/checkpoints"
    assert [len(list_checkpoints(place)) for place in folders_below("runs")] == [2, 2]


def test_a_path_in_the_folder_of_a_live_run_begins_another_one() -> None:
    each = {"max_steps": 6, "max_epochs": None}

    def second() -> Any:
        path = next(Path("runs/version_0/checkpoints").glob("step-*2"))
        trainer = fit(ckpt_path=path, **each)
        return [resumed(trainer), folder(trainer), trainer.global_step]

    with Child(lambda: fit(ModelCheckpoint(every_n_train_steps=1), holding(3), **each).global_step, "first") as child:
        child.until(told, "step 3")
        with Child(second, "second") as other:
            assert other.answer == ["runs/version_0/checkpoints/step-00000002", "runs/version_1/checkpoints", 6]
        assert "is in use by another live run" in other.output
        Path("go").touch()
        assert child.answer == 6


# --------------------------------------------------------------------------------------------------- over several processes


def over_processes(word: str | None, epochs: int) -> list[Any]:
    trainer = saving(logger=CSVLogger() if word != "none" else False, max_epochs=epochs, devices=2)
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path=word if word in ("auto", "last") else None)
    return [folder(trainer), resumed(trainer), trainer._save_policy.run_id]


def test_all_processes_save_to_the_folder_of_the_main_one(run_dir: Path) -> None:
    each = [run_world(2, over_processes, word, epochs) for word, epochs in ((None, 1), ("auto", 2), ("none", 1))]
    assert all(first == second for first, second in each)
    (new, again, own) = (answers[0] for answers in each)
    place = "runs/logs/default/version_0/checkpoints"
    assert new[:2] == [place, None]
    assert again == [place, f"{place}/step-00000002", new[2]]
    assert own[:2] == ["runs/version_0/checkpoints", None]


def test_what_a_run_killed_in_its_first_save_has_left_is_removed() -> None:
    """The next run removes a partial checkpoint, unless its run is still running or has another checkpoint to resume from."""

    def left(number: int) -> Path:
        partial = Path(f"runs/version_{number}/checkpoints/.step-00000004.tmp-0123456789abcdef")
        partial.mkdir(parents=True)
        (partial / "model.safetensors").write_bytes(b"half")
        return partial

    dead, live = left(0), left(1)
    lock = FolderLock(live.parent, "another")
    lock.acquire()
    try:
        assert folder(fit(ckpt_path="auto")) == "runs/version_2/checkpoints"
    finally:
        lock.release()
    assert (dead.exists(), live.exists()) == (False, True)
    resumable = left(3)
    shutil.copytree("runs/version_2/checkpoints/step-00000004", resumable.with_name("step-00000003"))
    fit(ckpt_path="auto", module=Another())
    assert (live.exists(), resumable.exists()) == (False, True)
