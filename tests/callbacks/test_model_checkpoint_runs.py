"""`ModelCheckpoint` in whole runs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, same
from helpers.worlds.worlds import run_world
from torch.utils.data import DataLoader, IterableDataset

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.folder import ListedCheckpoint, list_checkpoints
from trainkit.checkpoint.pointers import read_pointer
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointError, ConfigurationError, MissingMetricError, Preempted

FOLDER = Path("trainkit_runs") / "version_0" / "checkpoints"


def fit(
    *callbacks: Callback, module: Any = None, validation: bool = True, ckpt_path: str | None = None, **arguments: Any
) -> Any:
    """Fit with four batches per epoch; returns the trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "max_epochs": 1,
        "seed": 1,
    }
    loaders = arguments.pop("loaders", [tiny_loader(), tiny_loader(8)] if validation else [tiny_loader()])
    trainer = Trainer(callbacks=list(callbacks), **{**defaults, **arguments})
    trainer.fit(module or TinyModule(), *loaders, ckpt_path=ckpt_path)
    return trainer


def found(folder: str | Path = FOLDER) -> list[ListedCheckpoint]:
    return sorted(list_checkpoints(folder), key=lambda found: found.path.name)


def steps(folder: str | Path = FOLDER) -> list[int]:
    return sorted(found.manifest.step for found in list_checkpoints(folder) if found.manifest is not None)


def names(callback: ModelCheckpoint) -> list[str]:
    return [Path(path).name for path in callback.best_k_models]


class Losses(TinyModule):
    """Logs one given value in each epoch as the validation loss."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(0.01)
        self.values = list(values)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.values[self.trainer.current_epoch])


class StoppedError(Exception):
    """The error with which a test ends a run."""


class Failing(Callback):
    """Calls `act` when `step` optimizer steps have been made."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.act()


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# ------------------------------------------------------------------------------------------------------- when and what


def test_a_trainer_saves_without_being_asked(caplog) -> None:
    trainer = fit(max_epochs=4)
    own = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
    assert len(own) == 1
    assert [found.path.name for found in found()] == ["step-00000012", "step-00000016"]
    assert own[0].best_model_path == own[0].last_model_path == str(FOLDER.absolute() / "step-00000016")
    about = open_checkpoint(own[0].last_model_path).manifest
    assert (about.step, about.epoch, about.saved_by) == (16, 4, own[0].state_key)
    assert about.metrics.keys() >= {"val_loss"}


class Told(Memory):
    """Records how many checkpoints were complete at each call of `after_save_checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert self.status is None, "before the end of the run"
        self.told.append(len(steps(Path(checkpoint_callback.last_model_path).parent)))


def test_loggers_are_told_of_complete_checkpoints() -> None:
    logger = Told()
    fit(ModelCheckpoint(every_n_train_steps=3, save_top_k=-1), logger=[Memory(), logger], loaders=[tiny_loader(28)])
    assert steps("trainkit_runs/version_0/checkpoints") == [3, 6, 7]
    assert logger.told == [1, 2, 3]


def test_a_callback_of_the_users_takes_the_place_of_the_default_one() -> None:
    trainer = fit(ModelCheckpoint("mine", every_n_train_steps=3, keep_last=-1))
    assert sum(isinstance(callback, ModelCheckpoint) for callback in trainer.callbacks) == 1
    assert not FOLDER.exists()
    assert steps("mine") == [3, 4]


@pytest.mark.parametrize(
    "arguments, run, saved",
    [
        ({}, {"max_epochs": 2}, [4, 8]),
        ({"every_n_epochs": 2}, {"max_epochs": 3}, [8, 12]),
        ({"every_n_train_steps": 2}, {}, [2, 4]),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, {"max_epochs": 2}, [2, 4, 6, 8]),
        ({"every_n_train_steps": 1}, {"accumulate_grad_batches": 2, "max_epochs": 2}, [1, 2, 3, 4]),
        ({}, {"max_steps": 6, "max_epochs": 9}, [4, 6]),
        ({"every_n_epochs": 0}, {"max_epochs": 2}, [8]),
        ({"monitor": "val_loss"}, {"val_check_interval": 2, "max_epochs": 2}, [2, 4, 6, 8]),
        ({"monitor": "val_loss"}, {"check_val_every_n_epoch": 2, "max_epochs": 3}, [8, 12]),
        ({"monitor": "val_loss"}, {"val_every_n_steps": 3, "max_epochs": 2}, [3, 6, 8]),
        ({"monitor": "val_loss"}, {"limit_val_batches": 0, "max_epochs": 2, "callback": "logs"}, [4, 8]),
        ({"monitor": "val_loss", "save_on_train_epoch_end": True}, {"val_check_interval": 2}, [4]),
    ],
)
@pytest.mark.filterwarnings("ignore:ModelCheckpoint monitors 'val_loss', but this fit has no validation")
def test_what_is_saved(arguments: dict[str, Any], run: dict[str, Any], saved: list[int]) -> None:
    class Logs(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("val_loss", 1.0)

    others = [Logs()] if run.pop("callback", None) else []
    fit(ModelCheckpoint(keep_last=-1, **arguments), *others, **run)
    assert steps() == saved
    assert not any("-v" in found.path.name for found in found())  # no step is saved twice


def test_an_epoch_whose_length_is_not_known() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.ones(4) * index, torch.ones(1)) for index in range(6)])

    callback = ModelCheckpoint(monitor="val_loss", keep_last=-1)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
    )
    trainer.fit(TinyModule(0.001), DataLoader(Stream(), batch_size=2), tiny_loader(8))
    assert steps() == [3, 6]
    assert len(callback.best_k_models) == 1


def test_no_time_between_two_saves() -> None:
    fit(ModelCheckpoint(train_time_interval=timedelta(0), keep_last=-1))
    assert steps() == [1, 2, 3, 4]


def test_by_time() -> None:
    class Waiting(Callback):
        """Waits until the time interval has passed, so that the test does not depend on the speed of the machine."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            end = time.monotonic() + 60
            while not trainer._save_policy.safe_points._alerts and time.monotonic() < end:
                time.sleep(0.001)

    fit(ModelCheckpoint(train_time_interval=timedelta(microseconds=1), keep_last=-1), Waiting())
    assert steps() == [1, 2, 3, 4]


def test_weights_only_and_a_file_that_names_the_newest() -> None:
    fit(ModelCheckpoint("weights", save_weights_only=True, save_last=True), max_epochs=3)
    assert [found.manifest.contents["resumable"] for found in found("weights") if found.manifest] == [False, False]
    assert read_pointer(Path("weights")) == "step-00000012"
    for word in ("auto", "last"):
        with pytest.raises(CheckpointError, match=r"contains weights-only checkpoints.*restore=\{'model'\}"):
            fit(ModelCheckpoint("weights"), ckpt_path=word)
    with pytest.raises(CheckpointError, match="is a weights-only checkpoint"):
        fit(ckpt_path="weights/last")  # `last` is followed to the checkpoint that it names


class WithAdam(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Buffers(Callback):
    """Records the bytes of the host buffers after each training batch, and then saves asynchronously or frees them."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer._save_policy.wait()
        self.held.append(trainer._save_policy._saver._buffers.nbytes)
        if trainer.global_step == 3:
            trainer.save_checkpoint("by hand", blocking=False)
        elif trainer.global_step == 4:
            trainer.release_save_buffers()


def test_host_memory_is_allocated_after_the_first_step_and_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.checkpoint.saver._RESERVE_FROM_BYTES", 1)
    buffers = Buffers()
    trainer = fit(buffers, ModelCheckpoint("a", every_n_train_steps=100), module=WithAdam(), validation=False, max_epochs=2)
    before, reserved, same, saved, *freed = buffers.held
    assert before == 0  # the optimizer has no state before its first step
    tensors = [
        *trainer.model.parameters(),
        *(slot for state in trainer.optimizers[0].state.values() for slot in state.values()),
    ]
    assert reserved == same == sum(tensor.nbytes for tensor in tensors)
    assert saved >= reserved
    assert freed == [0] * 4
    without = Buffers()
    fit(without, validation=False, enable_checkpointing=False)
    assert without.held[:3] == [0, 0, 0]


def test_the_checksum_is_the_callbacks_or_the_trainers() -> None:
    fit(ModelCheckpoint("a", checksum="sha256"), ModelCheckpoint("b", every_n_epochs=1))
    fit(ModelCheckpoint("c", checksum="xxh3-128"), ModelCheckpoint("d", every_n_epochs=1), checksum="sha256").save_checkpoint(
        "e"
    )
    kinds = {folder: {one.manifest.checksum for one in found(folder) if one.manifest} for folder in "abcd"}
    assert kinds == {"a": {"sha256"}, "b": {"xxh3-128"}, "c": {"xxh3-128"}, "d": {"sha256"}}
    assert open_checkpoint("e").manifest.checksum == "sha256"
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint\(checksum=\) must be one of 'xxh3-128', 'sha256' or None"):
        ModelCheckpoint(checksum="md5")
    with pytest.raises(ConfigurationError, match="checksum must be one of 'xxh3-128', 'sha256', not 'md5'"):
        fit(checksum="md5")


# ------------------------------------------------------------------------------------------------ ranking by a metric


def test_the_best_has_the_value_that_it_is_ranked_by() -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=3, keep_last=1)
    trainer = fit(callback, module=TinyModule(0.4), val_check_interval=1, max_epochs=2)
    assert len(callback.best_k_models) == 3
    assert list(callback.best_k_models.values()) == sorted(callback.best_k_models.values())
    for path, score in callback.best_k_models.items():
        manifest = open_checkpoint(path).manifest
        assert manifest.metrics["val_loss"] == score.item()
        [metrics] = trainer.validate(TinyModule(), tiny_loader(8), ckpt_path=path, verbose=False)
        assert metrics["val_loss"] == score.item()


def test_the_best_and_the_newest_of_the_rest_are_kept() -> None:
    callback = ModelCheckpoint(filename="{epoch}-{val_loss:.1f}", monitor="val_loss", save_top_k=2, keep_last=1)
    fit(callback, module=Losses([0.5, 0.25, 3.0, 0.75, 2.0]), max_epochs=5)
    assert names(callback) == ["epoch=1-val_loss=0.2", "epoch=0-val_loss=0.5"]
    kept = [found.path.name for found in found()]
    assert kept == ["epoch=0-val_loss=0.5", "epoch=1-val_loss=0.2", "epoch=4-val_loss=2.0"]
    assert callback.best_model_score is not None
    assert (callback.best_model_score.item(), float(callback.current_score or 0)) == (0.25, 2.0)


def test_a_metric_of_the_training_epoch() -> None:
    class Epochs(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train/loss", loss, on_step=False, on_epoch=True)
            return loss

    callback = ModelCheckpoint(filename="{train/loss:.3f}", monitor="train/loss", save_top_k=9)
    trainer = fit(callback, module=Epochs(), max_epochs=3)
    assert steps() == [4, 8, 12]
    assert min(score.item() for score in callback.best_k_models.values()) == pytest.approx(
        trainer.callback_metrics["train/loss"].item()
    )
    assert all(name.startswith("train_loss=") for name in names(callback))


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize(
    "arguments, accumulate, saved",
    [({}, 1, [4, 8]), ({}, 2, [2, 4]), ({"every_n_train_steps": 3}, 1, [3, 6, 8]), ({"every_n_train_steps": 2}, 2, [2, 4])],
)
def test_a_metric_of_the_training_step(arguments: dict[str, Any], accumulate: int, saved: list[int], validation: bool) -> None:
    """Checkpoints are ranked by the value of the step that is saved, the mean over its window, with and without validation."""
    logged: dict[int, list[float]] = {}

    class Steps(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            logged.setdefault(self.global_step + 1, []).append(loss.item())
            return loss

    callback = ModelCheckpoint(monitor="train_loss", save_top_k=-1, **arguments)
    fit(callback, module=Steps(), validation=validation, accumulate_grad_batches=accumulate, max_epochs=2)
    scores = {int(Path(path).name.removeprefix("step-")): score.item() for path, score in callback.best_k_models.items()}
    assert {len(losses) for losses in logged.values()} == {accumulate}
    assert scores == {step: pytest.approx(sum(logged[step]) / accumulate) for step in saved}


def test_steps_without_a_validation_are_not_ranked() -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=1, save_top_k=9)
    with pytest.warns(TrainkitWarning, match="'val_loss' was logged before step 3"):
        fit(callback, val_check_interval=2)
    assert sorted(names(callback)) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("validation", [True, False])
def test_a_metric_that_is_never_logged_ends_the_run_which_is_saved(validation: bool) -> None:
    told = "Did you mean 'val_loss'" if validation else "no validation loader was given"
    with (
        pytest.warns(TrainkitWarning, match=told),  # warns before training begins
        pytest.raises(MissingMetricError, match="'val_los', which was not logged"),
    ):
        fit(ModelCheckpoint(monitor="val_los"), validation=validation, max_epochs=3)
    assert steps() == [4]


def test_a_metric_that_is_never_logged_is_found_by_a_trial_run() -> None:
    with pytest.raises(MissingMetricError, match="Did you mean 'val_loss'"):
        fit(ModelCheckpoint(monitor="val_los"), fast_dev_run=True)
    assert not FOLDER.exists()


# ---------------------------------------------------------------------------------------------------- the end of a run


@pytest.mark.parametrize("error, saved", [(StoppedError(), True), (KeyboardInterrupt(), True), (StoppedError(), False)])
def test_the_last_complete_step_is_saved_when_a_run_fails(error: BaseException, saved: bool, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = ModelCheckpoint(save_on_exception=saved)
    with pytest.raises(type(error)):
        fit(callback, Failing(6, raising(error)), max_epochs=3)
    assert steps() == [4, 6] if saved else [4]
    said = f"ModelCheckpoint, after {type(error).__name__}: the newest checkpoint is {callback.last_model_path}"
    assert (said in caplog.messages) == saved


def test_before_the_first_update_there_is_nothing_to_save(caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    with pytest.raises(StoppedError):
        fit(ModelCheckpoint(), Failing(0, raising(StoppedError())))
    assert steps() == []
    assert "after StoppedError: nothing was saved, because no optimizer step was made yet" in caplog.text


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_lets_the_step_be_finished_and_saved(number: str) -> None:
    callback = ModelCheckpoint(save_on_exception=False)
    send = Failing(5, lambda: os.kill(os.getpid(), getattr(signal, number)))
    with pytest.raises(KeyboardInterrupt if number == "SIGINT" else Preempted):
        fit(callback, send, max_epochs=3)
    assert steps() == [4, 6]
    assert Path(callback.last_model_path).name == "step-00000006"


def test_one_of_several_saves_at_the_end_by_an_error_and_all_at_a_good_end() -> None:
    def callbacks() -> list[ModelCheckpoint]:
        return [
            ModelCheckpoint("weights", save_weights_only=True, every_n_epochs=0),
            ModelCheckpoint("first", every_n_epochs=0),
            ModelCheckpoint("second", every_n_epochs=0),
        ]

    with pytest.raises(StoppedError):
        fit(*callbacks(), Failing(2, raising(StoppedError())))
    assert [steps(folder) for folder in ("weights", "first", "second")] == [[], [2], []]
    fit(*callbacks())
    assert [steps(folder) for folder in ("weights", "first", "second")] == [[4], [2, 4], [4]]


# -------------------------------------------------------------------------------------------------------------- resume


def test_a_resumed_run_keeps_its_best_and_removes_old_checkpoints() -> None:
    """A resumed run knows its best and its last checkpoint, and removes older ones that it saved before."""
    values = [0.5, 0.25, 3.0, 0.75, 2.0, 0.125]
    with pytest.raises(StoppedError):
        fit(
            ModelCheckpoint(monitor="val_loss", keep_last=1),
            Failing(13, raising(StoppedError())),
            module=Losses(values),
            max_epochs=6,
        )
    assert steps() == [8, 13]
    callback = ModelCheckpoint(monitor="val_loss", keep_last=1)
    seen: list[Any] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if not seen:
                seen.append((trainer.global_step, callback.best_k_models, callback.last_model_path))

    fit(callback, Look(), module=Losses(values), max_epochs=6, ckpt_path="auto")
    best = str(FOLDER.absolute() / "step-00000008")
    assert seen == [(13, {best: torch.tensor(0.25, dtype=torch.float64)}, str(FOLDER.absolute() / "step-00000013"))]
    assert names(callback) == ["step-00000024"]
    assert steps() == [20, 24]
    assert len({found.manifest.run_id for found in found() if found.manifest}) == 1


def test_a_resumed_run_that_has_nothing_to_train_saves_nothing() -> None:
    fit(max_epochs=2)
    before = {path: path.stat().st_mtime_ns for path in FOLDER.iterdir() if path.name != ".lock"}
    fit(max_epochs=2, ckpt_path="last")
    assert {path: path.stat().st_mtime_ns for path in FOLDER.iterdir() if path.name != ".lock"} == before


def test_a_link_to_the_newest_is_a_checkpoint_to_resume_from(caplog) -> None:
    """A run that resumes from the link names the checkpoint; `ckpt_path="last"` is the newest with and without a link."""
    caplog.set_level("INFO", "trainkit")
    fit(ModelCheckpoint("c", save_last="link", keep_last=1), max_epochs=2)
    newest = str(Path("c/step-00000008").absolute())
    for ckpt_path in ("c/last", "last"):
        caplog.clear()
        callback = ModelCheckpoint("c", save_last="link", keep_last=1)
        trainer = fit(callback, max_epochs=2, ckpt_path=ckpt_path)
        assert trainer.global_step == 8
        assert any("step-00000008 (step 8" in message for message in caplog.messages)
    assert callback.last_model_path == newest
    fit(ModelCheckpoint("c", save_last="link", keep_last=1), max_epochs=3, ckpt_path="c/last")
    assert (os.readlink("c/last"), steps("c")) == ("step-00000012", [12])


def test_two_runs_in_one_folder_do_not_delete_each_others_checkpoints() -> None:
    fit(ModelCheckpoint("mine", keep_last=1), max_epochs=2)
    fit(ModelCheckpoint("mine", keep_last=1), max_epochs=3)
    fit(ModelCheckpoint("mine", keep_last=1), max_epochs=2)
    assert [found.path.name for found in found("mine")] == ["step-00000008", "step-00000008-v1", "step-00000012"]


def test_a_folder_that_was_moved_still_has_its_best() -> None:
    fit(ModelCheckpoint("old", monitor="val_loss"), module=Losses([0.25, 0.5]), max_epochs=2)
    shutil.move("old", "new")
    callback = ModelCheckpoint("new", monitor="val_loss")
    trainer = fit(callback, module=Losses([0.25, 0.5, 0.75]), max_epochs=3, ckpt_path="last")
    assert callback.best_model_path == str(Path("new").absolute() / "step-00000004")
    trainer.validate(TinyModule(), tiny_loader(8), ckpt_path="best", verbose=False)


def test_a_validation_that_a_signal_ended_is_ranked_after_the_resume() -> None:
    class Ended(Losses):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.trainer.global_step == 8:
                os.kill(os.getpid(), signal.SIGTERM)

    values = [0.5, 0.25, 0.75]
    with pytest.raises(Preempted):
        fit(ModelCheckpoint(monitor="val_loss"), module=Ended(values), max_epochs=3)
    callback = ModelCheckpoint(monitor="val_loss")
    fit(callback, module=Losses(values), max_epochs=3, ckpt_path="auto")
    assert callback.best_model_score is not None
    assert callback.best_model_score.item() == 0.25
    assert open_checkpoint(callback.best_model_path).manifest.step == 8


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_next_to_each_checkpoint_is_kept_and_removed_with_it() -> None:
    callback = ModelCheckpoint("c", monitor="val_loss", save_top_k=1, keep_last=1, also="ckpt", save_last=True)
    trainer = fit(callback, module=Losses([1.0, 3.0, 2.0, 4.0]), max_epochs=4)
    assert sorted(os.listdir("c")) == [
        ".lock", "last", "last.ckpt", "step-00000004", "step-00000004.ckpt", "step-00000016", "step-00000016.ckpt"
    ]  # fmt: skip
    assert callback.best_model_path == str(Path("c/step-00000004").absolute()), "the paths are those of the folders"
    for name, step in (("step-00000004", 4), ("step-00000016", 16), ("last", 16)):
        read = torch.load(f"c/{name}.ckpt", weights_only=True)
        assert read["global_step"] == step
        assert same(read["state_dict"], open_checkpoint(f"c/step-{step:08}").state_dict())
    again = fit(module=Losses([1.0] * 6), max_epochs=6, ckpt_path="c/last.ckpt")
    assert (trainer.global_step, again.global_step) == (16, 24)


def test_a_resumed_run_writes_the_files_that_are_missing() -> None:
    """Of the checkpoints that paths name: the run was killed before it wrote one, or it kept none until then."""
    losses = [1.0, 3.0, 2.0]
    fit(ModelCheckpoint("c", monitor="val_loss", keep_last=1), module=Losses(losses), max_epochs=3)
    torch.save({"mine": 1}, "c/step-00000012.ckpt")
    again = ModelCheckpoint("c", monitor="val_loss", keep_last=1, also="ckpt")
    fit(again, module=Losses([*losses, 4.0]), max_epochs=4, ckpt_path="last")
    assert torch.load(f"{again.best_model_path}.ckpt")["global_step"] == 4
    assert torch.load("c/step-00000012.ckpt") == {"mine": 1}

    os.remove("c/step-00000016.ckpt")
    torch.save(torch.load("c/step-00000004.ckpt"), "c/step-00000004.ckpt")  # edited by the user
    fit(again, module=Losses([*losses, 4.0]), max_epochs=4, ckpt_path="last")
    assert torch.load("c/step-00000016.ckpt")["global_step"] == 16


def test_no_file_unless_asked() -> None:
    fit(ModelCheckpoint("c"))
    assert sorted(os.listdir("c")) == [".lock", "step-00000004"]
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint\(also=\) must be 'ckpt', False or None, not 'pt'"):
        ModelCheckpoint(also="pt")  # type: ignore[arg-type]


def test_the_name_of_a_file_of_another_program_is_taken() -> None:
    os.mkdir("c")
    Path("c/step-00000004.ckpt").write_text("mine")
    callback = ModelCheckpoint("c", also="ckpt", keep_last=2)
    fit(callback, max_epochs=2)
    assert Path("c/step-00000004.ckpt").read_text() == "mine"
    kept = [f"step-00000004-v1{end}" for end in ("", ".ckpt")] + ["step-00000004.ckpt"]
    assert sorted(os.listdir("c")) == [".lock", *kept, "step-00000008", "step-00000008.ckpt"]


def ranks_keep_files() -> list[Any]:
    callback = ModelCheckpoint("c", also="ckpt")
    trainer = fit(callback, strategy="ddp", devices=2)
    with open("empty", "ab"):
        pass
    trainer.strategy.world.exchange(None)
    trainer.save_checkpoint("empty")
    read = [torch.load(path, weights_only=True) for path in (f"{callback.last_model_path}.ckpt", "empty")]
    return [[one["global_step"], same(one["state_dict"], trainer.model.state_dict())] for one in read]


def test_two_processes_keep_one_file() -> None:
    first, second = run_world(2, ranks_keep_files)
    assert first == second == [[2, True], [2, True]]
    assert [name for name in os.listdir() if name.startswith("empty")] == ["empty"]
