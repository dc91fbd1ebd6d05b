"""`ModelCheckpoint`, one hook at a time, with a placeholder for `trainer._save_policy` that writes small real checkpoints.

Whole runs are tested in `test_model_checkpoint_runs.py`.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.resume.checkpoints import draft

from trainkit.callbacks import ModelCheckpoint, model_checkpoint
from trainkit.checkpoint.ckpt_file import write_ckpt
from trainkit.checkpoint.commit import CommitResult, commit
from trainkit.checkpoint.folder import free_name, list_checkpoints
from trainkit.checkpoint.pointers import read_pointer
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.console import TrainkitWarning
from trainkit.distributed.world import World
from trainkit.errors import (
    CheckpointWriteError,
    ConfigurationError,
    MissingMetricError,
    Preempted,
    UnsavableError,
    UnsupportedArgumentError,
)


class Checkpointing:
    """A placeholder for the save policy of a trainer.

    A save is complete at once, or, while `hold` is set, at the next `wait`, like an asynchronous save in progress. `fail`
    makes the next save fail.
    """

    def __init__(self, trainer: Any, run_id: str = "a" * 16) -> None:
        self.trainer, self.run_id = trainer, run_id
        self.folders: list[Path] = []
        self.saves: list[dict[str, Any]] = []
        self.values: dict[str, tuple[float, int]] = {}
        self.batches = 0
        self.total_limit: int | None = None
        self.reason: str | None = None
        self.hold = self.fail = self.break_capture = False
        self.nonfinite: set[int] = set()  # steps whose parameters are NaN
        self._requests: list[Callable[[], None]] = []
        self._steps: list[tuple[int, Callable[[], None]]] = []
        self.intervals: list[tuple[timedelta, Callable[[], None]]] = []
        self._in_flight: Callable[[], None] | None = None

    def tell_loggers(self, callback: ModelCheckpoint) -> None:
        """There are none."""

    @property
    def save_folders(self) -> Checkpointing:
        return self

    @property
    def safe_points(self) -> Checkpointing:
        return self

    def use_of_run(self, placed: Callable[[Path], None]) -> None:
        folder = Path("runs", "version_0", "checkpoints").absolute()
        self.use_folder(folder)
        placed(folder)

    def use_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in self.folders:
            self.folders.append(folder)

    def reserve(self, *, weights_only: bool, save: str | None) -> None:
        """There is nothing to allocate."""

    def every_n_steps(self, n: int, due: Callable[[], None]) -> None:
        self._steps.append((n, due))

    def every(self, interval: timedelta, due: Callable[[], None]) -> None:
        self.intervals.append((interval, due))

    def request(self, due: Callable[[], None]) -> None:
        self._requests.append(due)

    def attend(self, updated: bool) -> None:
        requests, self._requests = self._requests, []
        due = requests + [due for n, due in self._steps if updated and self.trainer.global_step % n == 0]
        for call in due:
            call()

    def metrics(self) -> dict[str, tuple[float, bool]]:
        return {name: (value, step == self.trainer.global_step) for name, (value, step) in self.values.items()}

    @property
    def position(self) -> tuple[int, ...]:
        return self.trainer.global_step, self.trainer.current_epoch, self.batches

    def why_not_savable(self, exception: BaseException) -> str | None:
        return self.reason

    @property
    def newest(self) -> Path | None:
        paths = [save["path"] for save in self.saves if save["path"].exists()]
        return paths[-1] if paths else None

    def wait(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight()

    def save(
        self,
        folder: Path,
        name: str,
        *,
        weights_only: bool,
        save: str | None,
        saved_by: str,
        metrics: dict[str, float],
        replace: bool,
        blocking: bool,
        before_capture: Callable[[Path], None],
        committed: Callable[[CommitResult], None],
        failed: Callable[[Exception], None],
        checksum: str | None,
    ) -> Path:
        self.wait()
        path = folder / (name if replace else free_name(folder, name))
        before_capture(path)
        if self.break_capture:
            raise UnsavableError("state['x']")
        trainer = self.trainer
        self.saves.append(
            {"step": trainer.global_step, "path": path, "weights_only": weights_only, "save": save, "blocking": blocking}
            | {"metrics": metrics, "replace": replace}
        )
        state = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        made = draft(
            len(self.saves),
            tensors={"model": {"weight": torch.full((1,), math.nan if trainer.global_step in self.nonfinite else 0.0)}},
            parameters={"model": {"weight": True}},
            state=state,
            run_id=self.run_id,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            metrics=metrics,
            saved_by=saved_by,
        )
        fails, self.fail = self.fail, False

        def finish() -> None:
            if fails:
                failed(CheckpointWriteError("disk full"))
                return
            committed(commit(made, path, replace=replace))

        if self.hold and not blocking:
            self._in_flight = finish
        else:
            finish()
        return path


class Run:
    """A fit that the test moves on: ten batches in an epoch, with one optimizer step for each batch."""

    def __init__(
        self, trainer: Any, module: Any, *callbacks: ModelCheckpoint, run_id: str = "a" * 16, start: bool = True
    ) -> None:
        self.trainer, self.module, self.callbacks = trainer, module, callbacks
        self.checkpointing = trainer._save_policy = Checkpointing(trainer, run_id)
        trainer.callbacks, trainer.callback_metrics = list(callbacks), {}
        trainer.default_root_dir, trainer.is_last_batch = "runs", False
        trainer.global_step = trainer.current_epoch = 0
        for callback in callbacks:
            callback.setup(trainer, module, "fit")
        if start:
            self.start()

    def start(self) -> None:
        self.hook("on_train_start")
        self.hook("on_train_epoch_start")

    def hook(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self.trainer, self.module, *arguments)

    def log(self, **values: float) -> None:
        for name, value in values.items():
            self.trainer.callback_metrics[name] = torch.tensor(value)
            self.checkpointing.values[name] = (value, self.trainer.global_step)

    def step(self, count: int = 1, validation: dict[str, float] | None = None, **values: float) -> None:
        """Make optimizer steps. The last one is followed by a validation that logs the given values."""
        for index in range(count):
            self.trainer.global_step += 1
            self.checkpointing.batches += 1
            self.trainer.is_last_batch = self.checkpointing.batches == 10
            self.log(**values)
            if validation is not None and index == count - 1:
                self.log(**validation)
                self.hook("on_validation_end")
            self.checkpointing.attend(updated=True)

    def epoch(self, validation: dict[str, float] | None = None, **values: float) -> None:
        """Finish the epoch: its remaining steps, the validation, and the values that are logged at the end of the epoch."""
        self.step(10 - self.checkpointing.batches, validation)
        self.log(**values)
        self.hook("on_train_epoch_end")
        self.trainer.current_epoch += 1
        self.checkpointing.batches, self.trainer.is_last_batch = 0, False
        self.checkpointing.attend(updated=False)
        self.hook("on_train_epoch_start")

    @property
    def names(self) -> list[str]:
        """The names of all entries in the folders."""
        return sorted(path.name for folder in self.checkpointing.folders for path in folder.iterdir())

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints that exist."""
        found = [found for folder in self.checkpointing.folders for found in list_checkpoints(folder)]
        return sorted(found.manifest.step for found in found if found.manifest is not None)

    @property
    def saved(self) -> list[int]:
        """The steps of all saves, also of checkpoints that have been removed since."""
        return [save["step"] for save in self.checkpointing.saves]


@pytest.fixture
def begin(trainer, module) -> Callable[..., Run]:
    def begin(*callbacks: ModelCheckpoint, **options: Any) -> Run:
        return Run(trainer, module, *callbacks, **options)

    return begin


def names_of(callback: ModelCheckpoint) -> dict[str, float]:
    return {Path(path).name: score.item() for path, score in callback.best_k_models.items()}


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"monitor": ""}, ["monitor='val_loss'", "self.log"]),
        ({"monitor": 3}, ["name of a logged metric"]),
        ({"mode": "maximum"}, ["'min', 'max'", "Did you mean 'max'"]),
        ({"save": "trainabel"}, ["'all', 'trainable' or None", "Did you mean 'trainable'"]),
        ({"save_last": "copy"}, ["'link'", "save_last=True", "nothing is copied"]),
        ({"save_top_k": -2}, ["save_top_k", "≥ -1"]),
        ({"save_top_k": 3}, ["monitor='val_loss'", "keep_last=3"]),
        ({"keep_last": -2}, ["keep_last", "≥ -1"]),
        ({"keep_last": True}, ["keep_last", "True"]),
        (
            {"keep_last": 0},
            ["keeps only the best checkpoints, which need a monitor and save_top_k", "keep_last=1", "monitor='val_loss'"],
        ),
        ({"keep_last": 0, "monitor": "a", "save_top_k": 0}, ["keep_last=1"]),
        ({"every_n_train_steps": -1}, ["every_n_train_steps"]),
        ({"every_n_epochs": 1.5}, ["every_n_epochs", "1.5"]),
        ({"train_time_interval": 60}, ["timedelta(hours=1)", "60"]),
        ({"train_time_interval": timedelta(-1)}, ["not negative", "timedelta(hours=1)"]),
        ({"dirpath": "nothing://bucket/x"}, ["dirpath", "fsspec", "nothing://"]),
        ({"dirpath": ""}, ["dirpath"]),
        ({"dirpath": 3}, ["dirpath"]),
        ({"filename": ""}, ["a template or None"]),
        ({"filename": "a/b"}, ["plain name", "dirpath"]),
        ({"filename": "a\\b"}, ["plain name"]),
        ({"filename": "..{epoch}"}, ["plain name"]),
        ({"filename": ".hidden"}, ["hidden"]),
        ({"filename": "last"}, ["pointer of save_last"]),
        ({"filename": "{epoch"}, ["expected '}'"]),
        ({"filename": "{}"}, ["a field is a name"]),
        ({"filename": "{epoch!r}"}, ["{epoch!r}", "a field is a name"]),
        ({"filename": "{loss:{width}}"}, ["a field is a name"]),
        ({"filename": "{val_loss:d}"}, ["{val_loss:d}", "a float", "{val_loss:.2f}"]),
        ({"filename": "{epoch:x.y}"}, ["{epoch:x.y}", "a whole number"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelCheckpoint(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "given, steps, epochs, interval",
    [
        ({}, 0, 1, timedelta(minutes=30)),
        ({"every_n_train_steps": 5}, 5, 0, None),
        ({"every_n_epochs": 2}, 0, 2, None),
        ({"every_n_epochs": 0}, 0, 0, None),
        ({"train_time_interval": timedelta(hours=1)}, 0, 0, timedelta(hours=1)),
        ({"train_time_interval": 0, "every_n_train_steps": 0, "every_n_epochs": 3}, 0, 3, None),
        ({"every_n_train_steps": 5, "every_n_epochs": 1, "train_time_interval": timedelta(1)}, 5, 1, timedelta(1)),
    ],
)
def test_when_saves_are_due(given: dict[str, Any], steps: int, epochs: int, interval: timedelta | None) -> None:
    callback = ModelCheckpoint(**given)
    assert (callback.every_n_train_steps, callback.every_n_epochs, callback.train_time_interval) == (steps, epochs, interval)


def test_state_keys_tell_callbacks_apart_and_know_nothing_of_the_machine() -> None:
    same = {ModelCheckpoint(dirpath=path, filename="x", save_last=True).state_key for path in ("a", "b", None)}
    assert len(same) == 1
    arguments: list[dict[str, Any]] = [
        {"monitor": "a"},
        {"monitor": "a", "mode": "max"},
        {"every_n_train_steps": 5},
        {"every_n_epochs": 5},
        {"train_time_interval": timedelta(1)},
    ]
    assert len({ModelCheckpoint(**given).state_key for given in [{}, *arguments]}) == 6
    assert ModelCheckpoint(monitor="a", every_n_epochs=2).state_key == (
        "ModelCheckpoint{'monitor': 'a', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 2, "
        "'train_time_interval': None}"
    )


@pytest.mark.parametrize(
    "filename, insert, expected",
    [
        (None, True, "step-00000120"),
        ("{epoch}", True, "epoch=3"),
        ("{epoch:03d}-{step}", True, "epoch=003-step=120"),
        ("{epoch:03d}-{val_loss:.2f}", True, "epoch=003-val_loss=0.31"),
        ("e{epoch}-l{val_loss:.3f}", False, "e3-l0.312"),
        ("{val/acc:.1f}", True, "val_acc=0.9"),
        ("{val.f1:.1f}", True, "val.f1=0.5"),
        ("best-{epoch_loss:.1f}-{epoch}", True, "best-epoch_loss=2.0-epoch=3"),
        ("{val_loss:/>6.2f}", False, "__0.31"),
        ("plain", True, "plain"),
        ("{{x}}{epoch}", False, "{x}3"),
    ],
)
def test_names(filename: str | None, insert: bool, expected: str) -> None:
    """The name of a checkpoint for a template in `filename`."""
    metrics = {"epoch": 3, "step": torch.tensor(120), "val_loss": torch.tensor(0.3125), "val/acc": 0.9, "val.f1": 0.5}
    callback = ModelCheckpoint(filename=filename, auto_insert_metric_name=insert)
    assert callback.format_checkpoint_name({**metrics, "epoch_loss": 2.0}) == expected
    assert callback.format_checkpoint_name({**metrics, "epoch_loss": 2.0}, ver=2) == f"{expected}-v2"


def test_a_name_has_the_folder_and_may_have_another_template(run_dir) -> None:
    callback = ModelCheckpoint("some/folder", "{epoch}")
    assert callback.format_checkpoint_name({"epoch": 1, "a": 0.5}, "{a}") == str(run_dir / "some" / "folder" / "a=0.5")


def test_a_name_without_its_metric_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(MissingMetricError) as caught:
        ModelCheckpoint(filename="{val_los:.2f}").format_checkpoint_name({"epoch": 1, "val_loss": 0.5})
    for word in ("'val_los'", "'epoch', 'val_loss'", "Did you mean 'val_loss'?", "self.log('val_los', value)"):
        assert word in str(caught.value)


# ---------------------------------------------------------------------------------------------------- when and what


def test_by_default_the_ends_of_epochs_are_saved_and_the_two_newest_kept(begin, run_dir) -> None:
    callback = ModelCheckpoint()
    run = begin(callback)
    assert run.checkpointing.folders == [run_dir / "runs" / "version_0" / "checkpoints"]
    assert [interval for interval, _ in run.checkpointing.intervals] == [timedelta(minutes=30)]
    for _ in range(4):
        run.epoch({"val_loss": 1.0})
    assert run.saved == [10, 20, 30, 40]
    assert run.names == ["step-00000030", "step-00000040"]
    newest = str(run_dir / "runs" / "version_0" / "checkpoints" / "step-00000040")
    assert callback.last_model_path == callback.best_model_path == newest
    assert (callback.best_model_score, callback.current_score, callback.best_k_models) == (None, None, {})
    assert not any(save["blocking"] for save in run.checkpointing.saves)


def test_each_trigger_counts_and_one_place_is_saved_once(begin) -> None:
    run = begin(ModelCheckpoint(every_n_train_steps=4, every_n_epochs=2, train_time_interval=timedelta(1), keep_last=-1))
    due = run.checkpointing.intervals[0][1]
    run.step(5)
    due()
    due()
    run.epoch()
    run.step(2)
    due()
    run.epoch()
    assert run.saved == [4, 5, 8, 12, 16, 20]
    assert run.names == [f"step-{step:08d}" for step in (4, 5, 8, 12, 16, 20)]  # 20 was due twice and is saved once


def test_what_is_due_at_the_last_batch_waits_for_the_end_of_the_epoch(begin) -> None:
    callback = ModelCheckpoint(every_n_train_steps=5, keep_last=-1)
    run = begin(callback)
    run.step(10)
    assert run.saved == [5]
    run.epoch()
    assert run.saved == [5, 10]
    assert open_checkpoint(callback.last_model_path).manifest.epoch == 1
    run.epoch()
    assert run.saved == [5, 10, 15, 20]


@pytest.mark.parametrize(
    "arguments, saved",
    [
        ({}, [10, 20]),
        ({"save_on_train_epoch_end": False}, [5, 10, 15, 20]),
        ({"monitor": "val_loss"}, [5, 10, 15, 20]),
        ({"monitor": "val_loss", "every_n_epochs": 2}, [15, 20]),
        ({"monitor": "val_loss", "save_on_train_epoch_end": True}, [10, 20]),
        ({"monitor": "val_loss", "every_n_train_steps": 10}, [10, 20]),
        ({"monitor": "val_loss", "every_n_epochs": 0}, []),
    ],
)
def test_where_in_an_epoch(begin, arguments: dict[str, Any], saved: list[int]) -> None:
    """The steps of the saves, if each epoch has a validation in the middle and one at the end."""
    run = begin(ModelCheckpoint(keep_last=-1, **arguments))
    for _ in range(2):
        run.step(5, {"val_loss": 1.0})
        run.epoch({"val_loss": 1.0})
    assert run.saved == saved


@pytest.mark.parametrize("batches", [[], [0]])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_without_validation_it_is_the_end_of_the_epoch(begin, trainer, batches: list[int], wanted: bool | None) -> None:
    trainer.num_val_batches = batches
    run = begin(ModelCheckpoint(monitor="loss", save_on_train_epoch_end=wanted))
    run.epoch(loss=1.0)
    assert run.saved == [10]


def test_nothing_is_saved_in_the_sanity_check_and_outside_of_a_fit(begin, trainer) -> None:
    run = begin(ModelCheckpoint(monitor="val_loss"))
    for stage, sanity in (("fit", True), ("validate", False)):
        trainer.stage, trainer.sanity_checking = stage, sanity
        run.log(val_loss=1.0)
        run.hook("on_validation_end")
        run.checkpointing.attend(updated=False)
    assert run.saved == []


def test_fast_dev_run_touches_no_disk_but_tells_of_a_missing_metric(begin, trainer, run_dir) -> None:
    trainer.fast_dev_run = True
    run = begin(ModelCheckpoint(monitor="val_loss", every_n_train_steps=1))
    run.step()
    run.epoch({"val_loss": 1.0})
    run.hook("on_train_end")
    run.hook("on_exception", KeyboardInterrupt())
    assert (run.saved, list(run_dir.iterdir())) == ([], [])
    run = begin(ModelCheckpoint(monitor="valloss"))
    run.epoch({"val_loss": 1.0})
    with pytest.raises(MissingMetricError, match="Did you mean 'val_loss'"):
        run.hook("on_train_end")


@pytest.mark.parametrize(
    "given, adapters, content",
    [(None, False, None), (None, True, "trainable"), ("all", True, "all"), ("trainable", False, "trainable")],
)
def test_what_of_the_model_is_saved(begin, monkeypatch, caplog, given, adapters: bool, content: str | None) -> None:
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr(model_checkpoint, "has_adapters", lambda module: adapters)
    run = begin(ModelCheckpoint(save=given, save_weights_only=True))
    run.epoch()
    run.epoch()
    assert [(save["save"], save["weights_only"]) for save in run.checkpointing.saves] == [(content, True)] * 2
    assert len(caplog.messages) == (given is None and adapters)
    assert all("ModelCheckpoint(save='all')" in message for message in caplog.messages)


def test_verbose_says_what_was_saved(begin, caplog, run_dir) -> None:
    caplog.set_level("INFO", "trainkit")
    run = begin(ModelCheckpoint("c", monitor="val_loss", verbose=True))
    run.epoch({"val_loss": 0.5})
    run.epoch({"val_loss": 0.75})
    assert caplog.messages == [
        f"epoch 0, step 10, val_loss = 0.5 (best: 0.5): saving to {run_dir / 'c' / 'step-00000010'}",
        f"epoch 1, step 20, val_loss = 0.75 (best: 0.5): saving to {run_dir / 'c' / 'step-00000020'}",
    ]


def test_names_of_a_run(begin) -> None:
    run = begin(ModelCheckpoint(filename="{epoch}-{step}-{val_loss:.2f}", monitor="val_loss", keep_last=-1))
    run.step(5, {"val_loss": 0.75})
    run.epoch({"val_loss": 0.5})
    run.epoch({"val_loss": math.nan})
    assert run.names == [
        "epoch=0-step=10-val_loss=0.50",
        "epoch=0-step=5-val_loss=0.75",
        "epoch=1-step=20-val_loss=nan",
    ]


def test_the_metrics_of_the_step_are_in_the_manifest(begin) -> None:
    callback = ModelCheckpoint(every_n_train_steps=5)
    run = begin(callback)
    run.step(4, old=1.0)
    run.step(1, loss=2.0)
    assert open_checkpoint(callback.last_model_path).manifest.metrics == {"loss": 2.0}


# ------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "mode, values, best, kept",
    [
        ("min", [5, 1, 4, 2, 3], {2: 1, 4: 2}, [1, 2, 3, 4, 5]),
        ("min", [5, 1, 4, 2, 3, 6], {2: 1, 4: 2}, [2, 3, 4, 5, 6]),
        ("max", [5, 1, 4, 2, 3, 6], {6: 6, 1: 5}, [1, 3, 4, 5, 6]),
        ("min", [3, 3, 3, 3, 3, 3], {1: 3, 2: 3}, [1, 2, 4, 5, 6]),
        ("min", [math.nan, math.nan, math.inf, 9, math.nan, 8], {6: 8, 4: 9}, [2, 3, 4, 5, 6]),
        ("max", [math.nan, -math.inf, math.nan], {2: -math.inf}, [1, 2, 3]),
    ],
)
def test_the_best_are_kept_and_the_newest_of_the_rest(begin, mode: str, values: list[float], best, kept) -> None:
    callback = ModelCheckpoint("c", "{step}", "val_loss", save_top_k=2, keep_last=3, mode=mode)
    run = begin(callback)
    for value in values:
        run.epoch({"val_loss": float(value)})
    found = names_of(callback)
    assert list(found) == [f"step={10 * step}" for step in best]
    assert [math.isnan(value) or value for value in found.values()] == [math.isnan(value) or value for value in best.values()]
    assert run.steps == [10 * step for step in kept]
    assert Path(callback.best_model_path).name == next(iter(found))
    assert Path(callback.kth_best_model_path).name == (list(found)[-1] if len(found) == 2 else "")
    first, score = next(iter(found.values())), callback.best_model_score
    assert score is not None
    assert (score.item() == first or math.isnan(first), score.dtype, score.ndim) == (True, torch.float64, 0)


@pytest.mark.parametrize(
    "arguments, kept",
    [
        ({"keep_last": -1}, [10, 20, 30, 40]),
        ({"save_top_k": -1}, [10, 20, 30, 40]),
        ({"keep_last": 1}, [40]),
        ({"save_top_k": 0, "keep_last": 1}, [40]),
        ({"monitor": "val_loss", "save_top_k": -1, "keep_last": 0}, [10, 20, 30, 40]),
        ({"save_top_k": -1, "keep_last": 0}, [10, 20, 30, 40]),
        ({"monitor": "val_loss", "save_top_k": 0, "keep_last": 1}, [40]),
        ({"monitor": "val_loss", "save_top_k": 1, "keep_last": 1}, [10, 40]),
        ({"monitor": "val_loss", "save_top_k": 1, "keep_last": 0}, [10]),
    ],
)
def test_how_many_are_kept(begin, arguments: dict[str, Any], kept: list[int]) -> None:
    run = begin(ModelCheckpoint(**arguments))
    for index in range(4):
        run.epoch({"val_loss": 1.0 + index})
    assert run.steps == kept


@pytest.mark.parametrize(
    "arguments, nonfinite, kept, best",
    [
        ({"keep_last": 2}, {20, 30, 40}, [10, 40], 10),
        ({"keep_last": 1}, {20, 30, 40}, [10, 40], 10),
        ({"keep_last": 1}, {10, 20}, [40], 40),
        ({"keep_last": 2}, {10, 20, 30}, [30, 40], 40),
        ({"keep_last": 2}, {30}, [20, 40], 40),
        ({"keep_last": 2}, {10, 20, 30, 40}, [30, 40], 40),
        ({"save_top_k": -1}, {20, 30, 40}, [10, 20, 30, 40], 10),
        ({"monitor": "val_loss", "save_top_k": 1, "keep_last": 1}, {20, 30, 40}, [10, 40], 10),
        ({"monitor": "val_loss", "save_top_k": 2, "keep_last": 1}, {30, 40}, [10, 20, 40], 20),
        ({"monitor": "val_loss", "save_top_k": 1, "keep_last": 0}, {20, 30}, [40], 40),
        ({"monitor": "val_loss", "save_top_k": 0, "keep_last": 2}, {20, 30, 40}, [10, 40], None),
    ],
)
@pytest.mark.parametrize("hold", [False, True])
def test_what_is_not_finite_is_never_the_best_and_removes_nothing_that_is(
    begin, arguments: dict[str, Any], nonfinite: set[int], kept: list[int], best: int | None, hold: bool
) -> None:
    """The metric improves in each epoch, so that by it the newest would be the best."""
    callback = ModelCheckpoint("c", save_last=True, **arguments)
    run = begin(callback)
    run.checkpointing.nonfinite, run.checkpointing.hold = nonfinite, hold
    for epoch in range(4):
        run.epoch({"val_loss": 4.0 - epoch})
    run.checkpointing.wait()
    assert run.steps == kept
    assert Path(callback.best_model_path).name == ("" if best is None else f"step-{best:08d}")
    assert Path(callback.last_model_path).name == "step-00000040"
    finite = [step for step in kept if step not in nonfinite]
    assert read_pointer(Path("c")) == f"step-{max(finite or kept):08d}"


@pytest.mark.parametrize("arguments", [{}, {"monitor": "val_loss"}, {"enable_version_counter": False}])
def test_what_is_not_finite_replaces_nothing_that_is(begin, arguments: dict[str, Any]) -> None:
    callback = ModelCheckpoint("c", "model", **arguments)
    run = begin(callback)
    run.checkpointing.nonfinite = {20, 30}
    for epoch, expected in enumerate([(10, None), (10, 20), (10, 30)]):
        run.epoch({"val_loss": 4.0 - epoch})
        found = {one.path.name: one.manifest.step for one in list_checkpoints("c") if one.manifest is not None}
        assert (found["model"], found.get("model-nonfinite")) == expected
        assert Path(callback.best_model_path).name == "model"
    run.epoch({"val_loss": 1.0})
    assert open_checkpoint("c/model").manifest.step == 40
    assert Path(callback.best_model_path).name == Path(callback.last_model_path).name == "model"


def test_a_name_that_is_taken_by_what_is_not_finite_is_free(begin) -> None:
    callback = ModelCheckpoint("c", "best", "val_loss", keep_last=0)
    run = begin(callback)
    run.checkpointing.nonfinite = {10}
    for _ in range(2):
        run.epoch({"val_loss": 1.0})
    assert (run.names, open_checkpoint("c/best").manifest.step) == (["best"], 20)


def test_a_checkpoint_that_is_not_finite_does_not_come_back_as_the_best(begin) -> None:
    """Its own state was captured before its parameters were checked."""
    for monitor in ("val_loss", None):
        callback = ModelCheckpoint(f"{monitor}", monitor=monitor)
        run = begin(callback)
        run.checkpointing.nonfinite = {20}
        run.epoch({"val_loss": 2.0})
        run.epoch({"val_loss": 1.0})
        state = saved_state(callback)
        assert "step-00000020" in (state["best_k_models"] if monitor else state["finite_paths"])
        again = ModelCheckpoint(f"{monitor}", monitor=monitor)
        again.load_state_dict(state)
        assert Path(again.best_model_path).name == "step-00000010"
        assert Path(again.best_in(list_checkpoints(f"{monitor}"))).name == "step-00000010"


def test_a_metric_that_is_nan_ranks_nothing(begin, caplog: pytest.LogCaptureFixture) -> None:
    callback = ModelCheckpoint("c", "best", "val_loss", keep_last=1)
    run = begin(callback)
    for value in (math.nan, math.nan, 3.0, math.nan):
        run.epoch({"val_loss": value})
    assert names_of(callback) == {"best": 3.0}
    assert run.names == ["best", "step-00000040"]
    assert (
        sum("'val_loss' is NaN. Such a checkpoint is not ranked; keep_last=1 decides" in text for text in caplog.messages) == 1
    )


def test_without_a_rest_only_the_best_are_saved_but_an_ending_still_is(begin) -> None:
    """With `keep_last=0` only the best checkpoints are saved; a stop request still saves the last step."""
    callback = ModelCheckpoint(monitor="val_loss", keep_last=0)
    run = begin(callback)
    for value in (3.0, 4.0, 2.0, 5.0):
        run.epoch({"val_loss": value})
    run.hook("on_train_end")
    assert (run.saved, run.steps) == ([10, 30], [30])
    run.step()
    run.hook("on_exception", Preempted())
    assert (run.saved, run.steps) == ([10, 30, 41], [30, 41])
    run.epoch({"val_loss": 1.0})
    assert run.steps == [50]


def test_a_checkpoint_is_deleted_when_a_newer_one_is_complete_and_not_before(begin) -> None:
    callback = ModelCheckpoint(monitor="val_loss", keep_last=1)
    run = begin(callback)
    run.epoch({"val_loss": 2.0})
    run.epoch({"val_loss": 3.0})
    run.checkpointing.hold = True
    run.epoch({"val_loss": 1.0})
    assert (run.steps, Path(callback.best_model_path).name) == ([10, 20], "step-00000030")
    run.checkpointing.wait()
    assert run.steps == [20, 30]  # 10 is no longer the best, and not the newest of the others


def test_only_what_this_callback_saved_in_this_run_is_deleted(begin, run_dir) -> None:
    first = begin(ModelCheckpoint(filename="{epoch}"))
    first.epoch()
    first.epoch()
    second = begin(ModelCheckpoint(keep_last=1), ModelCheckpoint(every_n_train_steps=5, keep_last=1), run_id="b" * 16)
    folder = run_dir / "runs" / "version_0" / "checkpoints"
    (folder / "mine").mkdir()
    second.epoch()
    damaged = folder / "step-00000010"
    (damaged / "state.json").unlink()
    second.epoch()
    second.epoch()
    assert second.names == ["epoch=0", "epoch=1", "mine", "step-00000010", "step-00000030", "step-00000030-v1"]


def test_one_that_cannot_be_deleted_or_pointed_to_does_not_undo_the_save(begin, run_dir, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    (run_dir / "c" / "last").mkdir(parents=True)  # a folder at the path of the pointer
    callback = ModelCheckpoint("c", save_last=True)
    run = begin(callback)
    run.epoch()
    assert Path(callback.last_model_path).is_dir()
    assert "step-00000010 is saved, but: " in caplog.messages[0]


def test_a_file_of_another_program_takes_its_name(begin, run_dir, caplog, monkeypatch) -> None:
    """Paths that name files never name it, whatever says that names are used again."""
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr("trainkit.checkpoint.ckpt_file.lightning_form", lambda *args: ({}, []))
    (run_dir / "c").mkdir()
    (run_dir / "c" / "best.ckpt").write_bytes(b"of another program")
    for counter in (True, False):
        run = begin(ModelCheckpoint("c", filename="best", also="ckpt", enable_version_counter=counter), run_id=str(counter) * 4)
        run.epoch()
        run.epoch()
    assert not [text for text in caplog.messages if "is saved, but" in text]
    assert run.names == ["best-v1", "best-v1.ckpt", "best.ckpt"]
    assert (run_dir / "c" / "best.ckpt").read_bytes() == b"of another program"


def test_a_file_that_cannot_be_written_stops_nothing_else(begin, run_dir, caplog, monkeypatch) -> None:
    """What is outdated is still removed, such as on a full disk; nor does an older file of the same name stay."""
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr("trainkit.checkpoint.ckpt_file.lightning_form", lambda *args: ({}, []))
    run = begin(ModelCheckpoint("c", filename="model", also="ckpt", save_last=True))
    run.epoch()
    assert run.names == ["last", "last.ckpt", "model", "model.ckpt"]

    def refuse(*arguments: Any) -> list[str]:
        raise CheckpointWriteError("disk full")

    monkeypatch.setattr("trainkit.callbacks._checkpoint_history.write_ckpt", refuse)
    run.epoch()
    assert run.names == ["last", "model"], "nor does a link to it stay"
    assert "model is saved, but: disk full" in caplog.messages[-1]
    run = begin(ModelCheckpoint("d", also="ckpt", keep_last=1))
    run.epoch()
    run.epoch()
    assert run.steps == [20]


def test_a_file_is_written_when_there_is_room(begin, run_dir, caplog, monkeypatch) -> None:
    """On a full disk, after what is outdated was removed."""
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr("trainkit.checkpoint.ckpt_file.lightning_form", lambda *args: ({}, []))
    run = begin(ModelCheckpoint("c", also="ckpt", save_last=True, keep_last=1))
    run.epoch()

    def full(checkpoint: Any, file: Path) -> list[str]:
        if (run_dir / "c" / "step-00000010").exists():
            raise CheckpointWriteError("disk full")
        return write_ckpt(checkpoint, file)

    monkeypatch.setattr("trainkit.callbacks._checkpoint_history.write_ckpt", full)
    run.epoch()
    assert run.names == ["last", "last.ckpt", "step-00000020", "step-00000020.ckpt"]
    assert os.readlink(run_dir / "c" / "last.ckpt") == "step-00000020.ckpt"
    assert not [text for text in caplog.messages if "is saved, but" in text]


def test_last_of_another_program_is_kept_and_named_once(begin, run_dir, caplog, monkeypatch) -> None:
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr("trainkit.checkpoint.ckpt_file.lightning_form", lambda *args: ({}, []))
    (run_dir / "c").mkdir()
    (run_dir / "c" / "last.ckpt").write_bytes(b"of another program")
    run = begin(ModelCheckpoint("c", also="ckpt", save_last=True))
    for _ in range(3):
        run.epoch()
    assert (run_dir / "c" / "last.ckpt").read_bytes() == b"of another program"
    (text,) = [text for text in caplog.messages if "is saved, but" in text]
    assert "last.ckpt exists and is not replaced, because trainkit did not write it: ckpt_path=" in text
    assert "Fix: move it, save to another folder, or set save_last=False." in text


def test_the_pointer_names_the_newest(begin, run_dir) -> None:
    run = begin(ModelCheckpoint("c", save_last=True, keep_last=1))
    run.epoch()
    assert read_pointer(run_dir / "c") == "step-00000010"
    run.epoch()
    assert read_pointer(run_dir / "c") == "step-00000020"
    run = begin(ModelCheckpoint("d"))
    run.epoch()
    assert run.names == ["step-00000010"]


def test_the_link_leads_to_the_newest(begin, run_dir) -> None:
    """It is replaced at once, and never by a copy; a file and a link replace each other."""
    run = begin(ModelCheckpoint("c", save_last="link", keep_last=1))
    for step in (10, 20):
        run.epoch()
        assert os.readlink(run_dir / "c" / "last") == f"step-000000{step}"
        assert open_checkpoint(run_dir / "c" / "last").manifest.step == step
    assert [one.path.name for one in list_checkpoints(run_dir / "c")] == ["step-00000020"]  # not the link
    assert sorted(path.name for path in (run_dir / "c").iterdir() if path.name != ".lock") == ["last", "step-00000020"]
    for kind, linked in [(True, False), ("link", True)]:
        begin(ModelCheckpoint("c", save_last=kind, keep_last=1)).epoch()
        assert os.path.islink(run_dir / "c" / "last") is linked


def test_where_links_cannot_be_created_it_is_a_file(begin, run_dir, monkeypatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("a privilege is needed")

    monkeypatch.setattr(os, "symlink", refuse)
    begin(ModelCheckpoint("c", save_last="link")).epoch()
    assert read_pointer(run_dir / "c") == "step-00000010"


@pytest.mark.parametrize(
    "monitor, mode, best", [("step", "max", [50, 40]), ("epoch", "max", [50, 40]), ("step", "min", [10, 20])]
)
def test_the_counters_rank_too(begin, monitor: str, mode: str, best: list[int]) -> None:
    callback = ModelCheckpoint(monitor=monitor, mode=mode, save_top_k=2, keep_last=0)
    run = begin(callback)
    for _ in range(5):
        run.epoch()
    assert [int(path[-8:]) for path in callback.best_k_models] == best
    assert [one.path.name[-2:] for one in list_checkpoints(run.checkpointing.folders[0])] == sorted(map(str, best))[::-1]
    scores = [float(score) for score in callback.best_k_models.values()]
    assert scores == ([float(step) for step in best] if monitor == "step" else [4.0, 3.0])
    assert callback.best_in(list_checkpoints(run.checkpointing.folders[0])) == callback.best_model_path


def test_what_lightning_code_asks_for(begin, run_dir) -> None:
    callback = ModelCheckpoint("c", monitor="val_loss", save_top_k=2)
    assert float(callback.kth_value) == math.inf
    assert float(ModelCheckpoint(monitor="val_loss", mode="max").kth_value) == -math.inf
    run = begin(callback)
    run.epoch({"val_loss": 2.0})
    assert (callback.kth_best_model_path, float(callback.kth_value)) == ("", math.inf)
    run.epoch({"val_loss": 3.0})
    assert (Path(callback.kth_best_model_path).name, float(callback.kth_value)) == ("step-00000020", 3.0)
    for value, among in [(2.5, True), (4.0, False), (math.nan, False)]:
        assert callback.check_monitor_top_k(run.trainer, torch.tensor(value)) is among
    assert not callback.check_monitor_top_k(run.trainer)
    assert callback.file_exists(callback.best_model_path, run.trainer)
    assert not callback.file_exists("nothing", run.trainer)
    callback.to_yaml()
    callback.to_yaml(run_dir / "best.yaml")
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    assert yaml.safe_load((run_dir / "c" / "best_k_models.yaml").read_text()) == scores
    assert list(yaml.safe_load((run_dir / "best.yaml").read_text())) == list(scores)  # the best first


def test_constants_of_lightning(begin) -> None:
    class Own(ModelCheckpoint):
        CHECKPOINT_EQUALS_CHAR = "_"

    callback = Own("c", filename="{epoch}-{val_loss:.1f}")
    run = begin(callback)
    run.epoch({"val_loss": 0.5})
    assert run.names == ["epoch_0-val_loss_0.5"]
    assert callback.format_checkpoint_name({"epoch": 1, "val_loss": 0.25}, prefix="a").endswith("/a-epoch_1-val_loss_0.2")
    other = {"CHECKPOINT_JOIN_CHAR": "_", "CHECKPOINT_NAME_LAST": "{epoch}", "FILE_EXTENSION": ".pt", "STARTING_VERSION": 0}
    for name, value in other.items():
        changed = ModelCheckpoint("d")
        setattr(changed, name, value)
        with pytest.raises(UnsupportedArgumentError, match=rf"ModelCheckpoint\.{name} is .*Fix: "):
            begin(changed)


def test_a_private_method_of_lightning_that_is_overridden(begin) -> None:
    """As scvi-tools does; it would never be called."""

    class Own(ModelCheckpoint):
        def _update_best_and_save(self, *arguments: Any) -> None: ...

    with pytest.raises(UnsupportedArgumentError, match=r"Own\._update_best_and_save would never be called: .*Fix: "):
        begin(Own("c"))


def test_without_version_counter_a_name_is_used_again(begin) -> None:
    run = begin(ModelCheckpoint(filename="newest", enable_version_counter=False))
    run.epoch()
    run.epoch()
    assert (run.names, run.steps) == (["newest"], [20])


@pytest.mark.parametrize("enable_version_counter", [True, False])
def test_a_fixed_name_is_always_the_best(begin, enable_version_counter: bool) -> None:
    callback = ModelCheckpoint(filename="best", monitor="val_loss", enable_version_counter=enable_version_counter, keep_last=1)
    run = begin(callback)
    for value, names in [
        (3.0, ["best"]),
        (4.0, ["best", "step-00000020"]),
        (2.0, ["best", "step-00000020"]),
        (5.0, ["best", "step-00000040"]),
    ]:
        run.epoch({"val_loss": value})
        assert run.names == names
    assert open_checkpoint(callback.best_model_path).manifest.step == 30
    assert names_of(callback) == {"best": 2.0}
    run.checkpointing.fail = True
    run.epoch({"val_loss": 1.0})
    assert open_checkpoint(callback.best_model_path).manifest.step == 30
    assert names_of(callback) == {"best": 2.0}
    run.checkpointing.fail = False
    run.epoch({"val_loss": 1.5})
    assert open_checkpoint(callback.best_model_path).manifest.step == 60
    assert names_of(callback) == {"best": 1.5}


@pytest.mark.parametrize(
    "arguments, names",
    [
        ({"filename": "model"}, ["model"]),
        ({"filename": "model", "keep_last": 1}, ["model"]),
        ({"filename": "{epoch}", "every_n_train_steps": 6, "every_n_epochs": 1}, ["epoch=0", "epoch=1"]),
        ({"filename": "model", "keep_last": -1}, ["model", "model-v1", "model-v2"]),
        ({"filename": "model", "save_top_k": -1}, ["model", "model-v1", "model-v2"]),
    ],
)
def test_without_a_monitor_a_name_is_that_of_the_newest(begin, arguments: dict[str, Any], names: list[str]) -> None:
    callback = ModelCheckpoint(**arguments)
    run = begin(callback)
    for _ in range(2 if "every_n_epochs" in arguments else 3):
        run.epoch()
    assert run.names == names
    newest = open_checkpoint(callback.last_model_path).manifest
    assert (newest.step, Path(callback.last_model_path).name) == (max(run.steps), names[-1])


def test_fixed_names_of_the_best_two(begin) -> None:
    callback = ModelCheckpoint(filename="best", monitor="val_loss", save_top_k=2, keep_last=0)
    run = begin(callback)
    for value in (3.0, 4.0, 2.0, 1.0, 5.0):
        run.epoch({"val_loss": value})
    assert (run.names, names_of(callback)) == (["best", "best-v1"], {"best": 1.0, "best-v1": 2.0})


def test_a_fixed_name_that_another_run_has_used_is_kept(begin) -> None:
    begin(ModelCheckpoint(filename="best", monitor="val_loss")).epoch({"val_loss": 1.0})
    run = begin(ModelCheckpoint(filename="best", monitor="val_loss", keep_last=0), run_id="b" * 16)
    run.epoch({"val_loss": 3.0})
    run.epoch({"val_loss": 2.0})
    assert (run.names, run.steps) == (["best", "best-v1"], [10, 20])


def test_a_run_that_restored_the_state_of_another_does_not_replace_its_best(begin) -> None:
    first = ModelCheckpoint("there", filename="best", monitor="val_loss")
    begin(first).epoch({"val_loss": 3.0})
    second = ModelCheckpoint("there", filename="best", monitor="val_loss")
    run = begin(second, run_id="b" * 16)
    second.load_state_dict(first.state_dict())
    run.step(5)
    run.epoch({"val_loss": 1.0})
    assert open_checkpoint("there/best").manifest.run_id == "a" * 16
    assert names_of(second) == {"best-v1": 1.0}


def test_a_name_with_a_value_of_an_earlier_step_is_not_used(begin) -> None:
    run = begin(ModelCheckpoint(filename="{val_loss:.1f}", every_n_train_steps=5, keep_last=-1))
    run.epoch({"val_loss": 3.0})
    run.epoch({"val_loss": 2.0})
    assert run.names == ["step-00000005", "step-00000015", "val_loss=2.0", "val_loss=3.0"]


def test_two_callbacks_that_would_delete_each_others_checkpoints(begin) -> None:
    with pytest.raises(ConfigurationError, match="two callbacks are ModelCheckpoint.*another dirpath"):
        begin(ModelCheckpoint("there"), ModelCheckpoint("there", filename="x"))
    with pytest.raises(ConfigurationError, match="two callbacks are ModelCheckpoint.*the folder of the run"):
        begin(ModelCheckpoint(), ModelCheckpoint(filename="x"))
    begin(ModelCheckpoint(), ModelCheckpoint("elsewhere"), ModelCheckpoint(every_n_train_steps=1))


# ---------------------------------------------------------------------------------------------------------- the metric


def test_a_value_of_an_earlier_step_is_not_ranked_which_is_said_once(begin) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=3)
    run = begin(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(3, {"val_loss": 1.0})
    assert callback.current_score is not None
    with pytest.warns(TrainkitWarning, match="'val_loss' was logged before step 6.*every_n_epochs=1.*val_every_n_steps"):
        run.step(3)
    assert callback.current_score is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(3)
    assert names_of(callback) == {"step-00000003": 1.0}
    assert run.steps == [3, 6, 9]


def test_the_half_hourly_save_and_the_last_one_are_not_ranked_without_a_word(begin) -> None:
    """Saves by time and at the end of training have no value of their step: they are not ranked, without a warning."""
    callback = ModelCheckpoint(monitor="val_loss")
    run = begin(callback)
    run.epoch({"val_loss": 1.0})
    run.step(2)
    run.checkpointing.intervals[0][1]()
    run.step(1)
    run.hook("on_train_end")
    assert run.saved == [10, 12, 13]
    assert names_of(callback) == {"step-00000010": 1.0}


def test_the_last_save_is_ranked_if_its_step_has_the_metric(begin) -> None:
    callback = ModelCheckpoint(monitor="loss", every_n_epochs=0)
    run = begin(callback)
    run.step(3, loss=1.0)
    run.hook("on_train_end")
    assert names_of(callback) == {"step-00000003": 1.0}


def test_a_missing_metric_is_an_error_once_it_could_have_been_logged(begin) -> None:
    callback = ModelCheckpoint(monitor="valloss", every_n_train_steps=3, every_n_epochs=1)
    run = begin(callback)
    run.step(3)
    run.step(3, {"val_loss": 1.0})
    assert run.saved == [3, 6]
    with pytest.raises(MissingMetricError) as caught:
        run.epoch({"val_loss": 1.0})
    for word in ("'valloss'", "Logged so far: 'val_loss'", "Did you mean 'val_loss'?", "self.log('valloss', value)"):
        assert word in str(caught.value)


def test_before_the_first_validation_nothing_is_missing(begin) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_epochs=1, every_n_train_steps=5)
    run = begin(callback)
    run.epoch()  # an epoch without validation, as with check_val_every_n_epoch=2
    run.epoch({"val_loss": 1.0})
    assert run.saved == [5, 10, 15, 20]
    assert names_of(callback) == {"step-00000020": 1.0}


def test_training_that_ends_too_early_to_tell_is_saved_and_then_tells(begin, trainer) -> None:
    """If training ends before the metric must have been logged, the last step is saved and then an error is raised."""
    trainer.num_val_batches = []
    callback = ModelCheckpoint(monitor="absent", every_n_epochs=0)
    run = begin(callback)
    run.step(3)
    run.hook("on_train_epoch_end")
    with pytest.raises(MissingMetricError):
        run.hook("on_train_end")
    assert run.steps == [3]


def test_a_metric_of_training_is_looked_for_at_the_end_of_the_epoch(begin, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = ModelCheckpoint(monitor="train_loss", save_top_k=5)
    run = begin(callback)
    for value in (3.0, 2.0):
        run.step(5, {"val_loss": 1.0})
        run.epoch({"val_loss": 1.0}, train_loss=value)
    assert run.saved == [10, 20]
    assert names_of(callback) == {"step-00000020": 2.0, "step-00000010": 3.0}
    assert len(caplog.messages) == 1
    assert "'train_loss' was not logged before the end of validation" in caplog.messages[0]


def test_a_metric_of_training_that_validation_finds_is_one_of_validation(begin) -> None:
    callback = ModelCheckpoint(monitor="train_loss", save_top_k=5)
    run = begin(callback)
    run.step(5, {}, train_loss=3.0)
    run.epoch({"train_loss": 2.0})
    assert names_of(callback) == {"step-00000010": 2.0, "step-00000005": 3.0}


def test_epochs_that_do_not_count_do_not_make_it_a_metric_of_training(begin) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_epochs=2, save_top_k=5)
    run = begin(callback)
    for _ in range(2):
        run.step(5, {"val_loss": 1.0})
        run.epoch({"val_loss": 1.0})
    assert run.saved == [15, 20]


def test_a_name_whose_metric_is_not_known_yet_is_the_default_said_once(begin, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    run = begin(ModelCheckpoint(filename="{val_loss:.2f}", every_n_train_steps=4, keep_last=-1))
    run.epoch({"val_loss": 0.5})
    run.step(2, val_loss=0.25)
    assert run.names == ["step-00000004", "step-00000008", "val_loss=0.25"]
    assert caplog.messages == [
        "ModelCheckpoint: val_loss in filename was not logged yet, so the default name is used. "
        "It must be logged by the end of the first epoch with a validation."
    ]


def test_a_name_whose_metric_was_never_logged_is_an_error_but_not_at_the_end(begin, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    run = begin(ModelCheckpoint(filename="{val_los:.2f}"))
    with pytest.raises(MissingMetricError, match="'val_los', which was not logged.*Did you mean 'val_loss'"):
        run.epoch({"val_loss": 0.5})
    assert not caplog.messages
    run.hook("on_train_end")
    assert run.names == ["step-00000010"]
    assert caplog.messages == ["ModelCheckpoint: val_los in filename was never logged, so the default name is used."]


# --------------------------------------------------------------------------------------------------- the end of a run


def test_the_last_state_is_saved_blocking_unless_it_is_already(begin) -> None:
    callback = ModelCheckpoint()
    run = begin(callback)
    run.hook("on_train_end")
    assert run.saved == []  # no optimizer step was made
    run.epoch()
    run.hook("on_train_end")
    assert run.saved == [10]
    run.step(3)
    run.hook("on_train_end")
    assert [(save["step"], save["blocking"]) for save in run.checkpointing.saves] == [(10, False), (13, True)]


def test_a_save_in_flight_that_fails_at_the_end_is_made_up_for(begin) -> None:
    """If the last asynchronous save fails, the same step is saved again at the end of training."""
    callback = ModelCheckpoint()
    run = begin(callback)
    run.checkpointing.hold = run.checkpointing.fail = True
    run.epoch()
    run.hook("on_train_end")
    assert [(save["step"], save["blocking"]) for save in run.checkpointing.saves] == [(10, False), (10, True)]
    assert run.steps == [10]


@pytest.mark.parametrize(
    "exception, always",
    [(Preempted(), True), (KeyboardInterrupt(), True), (ValueError(), False), (SystemExit(), False)],
)
@pytest.mark.parametrize("wanted", [True, False])
def test_save_after_an_exception(begin, caplog, exception: BaseException, always: bool, wanted: bool) -> None:
    """A stop request and Ctrl-C always save; other exceptions save if `save_on_exception` is True."""
    caplog.set_level("INFO", "trainkit")
    callback = ModelCheckpoint(save_on_exception=wanted)
    run = begin(callback)
    run.step(3)
    run.hook("on_exception", exception)
    assert run.saved == ([3] if always or wanted else [])
    if run.saved:
        assert run.checkpointing.saves[0]["blocking"]
        assert caplog.messages == [
            f"ModelCheckpoint, after {type(exception).__name__}: the newest checkpoint is {callback.last_model_path}"
        ]
    else:
        assert caplog.messages == []


def test_what_cannot_be_saved_after_an_error_is_said(begin, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = ModelCheckpoint()
    run = begin(callback)
    run.checkpointing.reason = "no optimizer step was made yet"
    run.hook("on_exception", ValueError())
    run.checkpointing.reason = None
    run.epoch()
    run.checkpointing.reason = "half a step"
    run.hook("on_exception", ValueError())
    assert run.saved == [10]
    assert caplog.messages == [
        "ModelCheckpoint, after ValueError: nothing was saved, because no optimizer step was made yet; this run has saved no "
        "checkpoint",
        "ModelCheckpoint, after ValueError: nothing was saved, because half a step; the newest checkpoint is "
        f"{callback.last_model_path}",
    ]


@pytest.mark.parametrize("processes, step", [(1, 20), (2, 10)])
def test_a_save_in_flight_is_not_called_a_checkpoint(begin, caplog, processes: int, step: int) -> None:
    """After an error, the message names the newest complete checkpoint.

    A single process completes the save in progress. With several processes another one may have failed in the middle of the
    save, so the message names the checkpoint before it.
    """
    caplog.set_level("INFO", "trainkit")
    run = begin(ModelCheckpoint())
    run.trainer.strategy.world = World(size=processes)
    run.epoch()
    run.checkpointing.hold = True
    run.epoch()
    run.checkpointing.reason = "half a step"
    run.hook("on_exception", ValueError())
    [said] = caplog.messages
    assert said.startswith(
        "ModelCheckpoint, after ValueError: nothing was saved, because half a step; the newest checkpoint is "
    )
    assert said.endswith(f"step-{step:08}")


def test_an_error_before_training_is_not_commented_on(begin, caplog) -> None:
    run = begin(ModelCheckpoint(), start=False)
    run.checkpointing.reason = "no optimizer step was made yet"
    run.hook("on_exception", ConfigurationError())
    assert (run.saved, caplog.messages) == ([], [])


def test_a_state_that_is_saved_is_not_saved_again_after_an_error(begin, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = ModelCheckpoint()
    run = begin(callback)
    run.checkpointing.hold = True
    run.epoch()
    run.hook("on_exception", KeyboardInterrupt())
    assert (run.saved, run.steps) == ([10], [10])
    assert "after KeyboardInterrupt: the newest checkpoint is " in caplog.messages[0]


def test_a_save_that_fails_after_an_error_is_not_called_a_checkpoint(begin, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    run = begin(ModelCheckpoint())
    run.step(3)
    run.checkpointing.fail = True
    run.hook("on_exception", ValueError())
    assert caplog.messages == ["ModelCheckpoint, after ValueError: this run has saved no checkpoint"]


@pytest.mark.parametrize("exception, saver", [(KeyboardInterrupt(), 1), (ValueError(), 2)])
def test_one_callback_saves_after_an_error(begin, exception: BaseException, saver: int) -> None:
    """Only one callback saves: the first one that is not weights-only and, after an error, has `save_on_exception=True`."""
    callbacks = [
        ModelCheckpoint("weights", save_weights_only=True),
        ModelCheckpoint("silent", save_on_exception=False),
        ModelCheckpoint("first"),
        ModelCheckpoint("second"),
    ]
    run = begin(*callbacks)
    run.step(3)
    run.hook("on_exception", exception)
    assert [bool(callback.last_model_path) for callback in callbacks] == [index == saver for index in range(4)]


def test_an_exception_outside_of_a_fit_saves_nothing(begin, trainer) -> None:
    run = begin(ModelCheckpoint())
    run.step(3)
    trainer.stage = "test"
    run.hook("on_exception", KeyboardInterrupt())
    assert run.saved == []


def test_a_missing_metric_ends_a_run_which_is_saved(begin) -> None:
    callback = ModelCheckpoint(monitor="absent")
    run = begin(callback)
    with pytest.raises(MissingMetricError) as caught:
        run.epoch({"val_loss": 1.0})
    run.hook("on_exception", caught.value)
    assert run.steps == [10]


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failed_save_leaves_no_trace_and_is_tried_again(begin) -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=1, every_n_epochs=1)
    run = begin(callback)
    run.epoch({"val_loss": 2.0})
    before = callback.state_dict()
    run.checkpointing.fail = True
    run.epoch({"val_loss": 1.0})
    assert callback.state_dict() == before
    assert names_of(callback) == {"step-00000010": 2.0}
    run.hook("on_train_end")
    assert names_of(callback) == {"step-00000020": 1.0}
    assert run.steps == [10, 20]


def test_a_failure_that_is_reported_late_takes_back_its_own_entry_only(begin) -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=2)
    run = begin(callback)
    run.epoch({"val_loss": 4.0})
    run.epoch({"val_loss": 3.0})
    run.checkpointing.hold = run.checkpointing.fail = True
    run.epoch({"val_loss": 1.0})
    assert names_of(callback) == {"step-00000030": 1.0, "step-00000020": 3.0}
    late = run.checkpointing._in_flight
    run.checkpointing._in_flight, run.checkpointing.hold = None, False
    run.epoch({"val_loss": 5.0})
    assert run.steps == [10, 20, 40]
    assert late is not None
    late()
    assert names_of(callback) == {"step-00000020": 3.0, "step-00000010": 4.0}
    assert Path(callback.last_model_path).name == "step-00000040"


@pytest.mark.parametrize("blocking", [False, True])
def test_a_state_that_cannot_be_captured_leaves_no_trace(begin, blocking: bool) -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    run = begin(callback)
    run.epoch({"val_loss": 2.0})
    before = callback.state_dict()
    run.checkpointing.break_capture = True
    run.step(5)
    with pytest.raises(UnsavableError):
        run.hook("on_train_end") if blocking else run.epoch({"val_loss": 1.0})
    assert callback.state_dict() == before


# ------------------------------------------------------------------------------------------------------------- state


def saved_state(callback: ModelCheckpoint) -> dict[str, Any]:
    return open_checkpoint(callback.last_model_path).read().state[callback.state_key]


def three_epochs(begin: Callable[..., Run], **arguments: Any) -> ModelCheckpoint:
    callback = ModelCheckpoint("c", monitor="val_loss", save_top_k=2, **arguments)
    run = begin(callback)
    for value in (1.0, 3.0, 2.0):
        run.epoch({"val_loss": value})
    return callback


def test_a_checkpoint_knows_of_itself(begin, run_dir) -> None:
    callback = three_epochs(begin)
    assert saved_state(callback) == callback.state_dict()
    assert saved_state(callback) == {
        "dirpath": str(run_dir / "c"),
        "best_k_models": {"step-00000010": 1.0, "step-00000030": 2.0},
        "displaced": {"step-00000020": 3.0},
        "last_model_path": "step-00000030",
        "finite_paths": ["step-00000030", "step-00000020"],
        "current_score": 2.0,
    }


def test_a_resumed_run_continues_with_the_same_best(begin) -> None:
    first = three_epochs(begin)
    state = saved_state(first)
    second = ModelCheckpoint("c", monitor="val_loss", save_top_k=2, keep_last=1)
    run = begin(second, start=False)
    second.load_state_dict(state)
    run.start()
    assert second.state_dict() == first.state_dict()
    assert second.best_k_models == first.best_k_models
    assert second.best_model_path == first.best_model_path
    run.checkpointing.saves = [{}] * 3
    run.trainer.global_step, run.trainer.current_epoch = 30, 3
    run.epoch({"val_loss": 1.5})
    assert list(names_of(second)) == ["step-00000010", "step-00000040"]
    assert run.steps == [10, 30, 40]  # step 20, not one of the best of the first run, is removed


def test_a_checkpoint_that_was_resumed_from_is_not_saved_again(begin) -> None:
    run = begin(ModelCheckpoint(), start=False)
    run.trainer.global_step, run.trainer.current_epoch = 30, 3
    run.start()
    run.hook("on_train_end")
    assert run.saved == []


def test_checkpoints_that_are_gone_are_forgotten(begin) -> None:
    callback = three_epochs(begin)
    state = saved_state(callback)
    shutil.rmtree(callback.best_model_path)
    shutil.rmtree(callback.last_model_path)
    again = ModelCheckpoint("c", monitor="val_loss", save_top_k=2)
    again.load_state_dict(state)
    assert (again.best_k_models, again.last_model_path, again.best_model_path) == ({}, "", "")


@pytest.mark.parametrize("way, folder", [("move", "d"), ("copy", "d"), ("copy elsewhere", "c"), ("pipe", "c")])
def test_a_folder_that_was_moved_or_copied(begin, run_dir, way: str, folder: str) -> None:
    callback = three_epochs(begin)
    state = saved_state(callback)
    if way == "move":
        (run_dir / "c").rename(run_dir / "d")
    elif way in ("copy", "pipe"):
        shutil.copytree(run_dir / "c", run_dir / "d")
        if way == "pipe":  # nothing writes to it
            for digest in (run_dir / "d").glob("*/manifest.sha256"):
                digest.unlink()
                os.mkfifo(digest)
    else:  # the new folder contains another checkpoint of the same name
        other = begin(ModelCheckpoint("d"), run_id="b" * 16)
        other.epoch()
    again = ModelCheckpoint("d", monitor="val_loss", save_top_k=2)
    again.load_state_dict(state)
    assert again.best_model_path == str(run_dir / folder / "step-00000010")
    assert again.last_model_path == str(run_dir / folder / "step-00000030")


def test_a_best_checkpoint_in_another_folder_keeps_its_whole_path(begin, run_dir) -> None:
    state = saved_state(three_epochs(begin))
    again = ModelCheckpoint("d", monitor="val_loss", save_top_k=2)
    again.load_state_dict(state)
    assert list(again.state_dict()["best_k_models"]) == [
        str(run_dir / "c" / "step-00000010"),
        str(run_dir / "c" / "step-00000030"),
    ]


def test_a_smaller_save_top_k_and_nan_and_none_come_back(begin) -> None:
    state = saved_state(three_epochs(begin))
    again = ModelCheckpoint("c", monitor="val_loss", save_top_k=1)
    again.load_state_dict({**state, "current_score": None})
    assert (list(names_of(again)), again.current_score) == (["step-00000010"], None)
    again.load_state_dict({**state, "best_k_models": {"step-00000010": math.nan, "step-00000030": 7.0}})
    assert names_of(again) == {"step-00000030": 7.0}


def test_each_fit_starts_again(begin) -> None:
    callback = three_epochs(begin)
    run = begin(callback, run_id="b" * 16)
    assert (callback.best_k_models, callback.last_model_path, callback.current_score) == ({}, "", None)
    run.epoch({"val_loss": 9.0})
    assert names_of(callback) == {"step-00000010-v1": 9.0}
    assert len(run.steps) == 4


def test_an_evaluation_keeps_what_a_fit_has_found(begin, trainer, module) -> None:
    callback = three_epochs(begin)
    best = callback.best_model_path
    callback.setup(trainer, module, "test")
    assert callback.best_model_path == best


def test_what_is_read_between_saves_is_a_copy_of_nothing_that_changes(begin) -> None:
    """`best_k_models` returns a copy, which a later fit does not change."""
    callback = three_epochs(begin)
    kept = callback.best_k_models
    before = dict(kept)
    callback.setup(SimpleNamespace(default_root_dir=".", callbacks=[], fast_dev_run=True), None, "fit")
    assert (kept, callback.best_k_models) == (before, {})
