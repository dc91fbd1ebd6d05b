"""Checkpoints of runs on several processes: which rank writes, resuming on another number of processes, and failures."""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import differences
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world, start_world
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainkit import Accelerator, Callback, Trainer, set_seed
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint import checkpoint_plan as drafts
from trainkit.checkpoint import commit as commits
from trainkit.checkpoint import ranks, saver
from trainkit.checkpoint.folder import list_checkpoints
from trainkit.checkpoint.reader import open_checkpoint

FOLDER = Path("runs/version_0/checkpoints")


class Wide(TinyModule):
    """A module with AdamW, a learning-rate schedule, a buffer, and enough parameters to be sharded in a checkpoint."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Linear(30, 30), nn.Dropout(0.2), nn.Linear(30, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Checkpointed(Wide):
    """Like `Wide`, with activation checkpointing of its two large layers."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.layer[0] = checkpoint_wrapper(self.layer[0])
        self.layer[2] = checkpoint_wrapper(self.layer[2])


class At(Callback):
    """Calls `act` in a hook when `step` optimizer steps have been made."""

    def __init__(self, hook: str, step: int, act: Callable[..., Any]) -> None:
        self.step, self.act = step, act
        setattr(self, hook, self._call)

    def _call(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act(trainer)


def make(*callbacks: Callback, **arguments: Any) -> Trainer:
    """A Trainer with strategy='ddp' on all processes of the world, which shards even small checkpoints."""
    drafts.SPLIT_ABOVE_BYTES = 2000
    defaults: dict[str, Any] = {
        "strategy": "ddp",
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "seed": 1,
        "default_root_dir": "runs",
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **arguments})


def fit(*callbacks: Callback, module: Any = None, samples: int = 48, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    trainer = make(*callbacks, **arguments)
    trainer.fit(module or Wide(), tiny_loader(samples, shuffle=True), tiny_loader(8), ckpt_path=ckpt_path)
    return trainer


def error_of(work: Callable[[], Any]) -> tuple[str, str]:
    """The class name and the message of the exception that `work` raises."""
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def saved(folder: Path = FOLDER) -> list[int]:
    """The steps of all checkpoints in a folder. All of them must be valid."""
    found = list_checkpoints(folder)
    assert not [one.problem for one in found if one.problem]
    return sorted(one.manifest.step for one in found if one.manifest is not None)


# ------------------------------------------------------------------------------------------- another number of processes


def train_and_save() -> list[str]:
    """Train, and save in the middle of the first epoch. Returns the names of the files that this process has written."""
    written: list[str] = []
    plain = commits.write_file
    commits.write_file = lambda path, *rest: (written.append(path.name), plain(path, *rest))[1]  # type: ignore[assignment]
    at = At("on_train_batch_end", 3, lambda trainer: trainer.save_checkpoint("first"))
    fit(at, enable_checkpointing=False, max_steps=4)
    return written


def resume_and_save() -> dict[str, Any]:
    """Resume from the checkpoint, and save again before the first step."""
    at = At("on_train_start", 3, lambda trainer: trainer.save_checkpoint("second"))
    trainer = fit(at, enable_checkpointing=False, max_steps=4, ckpt_path="first", module=Wide(seed=99))
    return {"step": trainer.global_step, "rank": trainer.global_rank}


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), (3, 3), (3, 2)])
def test_a_state_is_the_same_on_another_number_of_processes(run_dir: Path, before: int, after: int) -> None:
    written = run_world(before, train_and_save)
    run_world(after, resume_and_save)
    first, second = open_checkpoint("first"), open_checkpoint("second")
    assert (first.manifest.world_size, second.manifest.world_size) == (before, after)
    files = set(first.manifest.files) | {"manifest.json", "manifest.sha256"}
    assert sorted(name for names in written for name in names) == sorted(files)  # one process writes each file
    for names in written[1:]:
        assert names
        assert all(name.startswith(("model", "optimizer")) for name in names)
    assert len([name for name in files if name.startswith("optimizer-")]) == (before if before > 1 else 0)
    one, other = first.read(), second.read()
    assert differences(one.tensors, other.tensors) == []
    for part in ("models", "optimizers", "schedulers", "callbacks", "results"):
        assert differences(one.state[part], other.state[part], part) == []
    positions = [state["loop"]["position"] for state in (one.state, other.state)]
    assert [[p[key] for key in ("epoch", "samples", "batches")] for p in positions] == [[0, 12 * before, 3 * before]] * 2
    counters = ("global_step", "current_epoch", "phase", "stopping", "should_stop", "epoch_complete")
    assert [one.state["loop"][key] for key in counters] == [other.state["loop"][key] for key in counters]
    if before == after:
        assert differences(gathered(one.state), gathered(other.state)) == []


def gathered(state: dict[str, Any]) -> Any:
    """The values of each metric on each rank, without the entries that only a restored metric has."""
    kept = ("name", "total", "weight", "values", "weights", "step_value", "stamp")
    return [[{key: entry[key] for key in kept} for entry in own["metrics"]] for own in state["metrics"]]


def wrapped_and_save(before: type, after: type) -> list[str]:
    """Save in the middle with one class, and resume with the other one.

    Returns sums of the weights of an uninterrupted run and of this run.
    """
    at = At("on_train_batch_end", 3, lambda trainer: trainer.save_checkpoint("first"))
    fit(at, enable_checkpointing=False, max_steps=3, module=before())
    ends = [fit(enable_checkpointing=False, max_steps=6, module=Wide()).model]
    ends.append(fit(enable_checkpointing=False, max_steps=6, ckpt_path="first", module=after(seed=99)).model)
    return [" ".join(value.double().sum().item().hex() for value in model.state_dict().values()) for model in ends]


@pytest.mark.parametrize("before, after", [(Checkpointed, Wide), (Wide, Checkpointed)])
def test_activation_checkpointing_leaves_no_trace(run_dir: Path, before: type, after: type) -> None:
    for whole, resumed in run_world(2, wrapped_and_save, before, after):
        assert resumed == whole
    loaded = open_checkpoint("first").read()
    assert not [name for part in loaded.tensors.values() for name in part if "_checkpoint_wrapped_module" in name]


class Loop:
    """Your own training loop with an `Accelerator`."""

    def __init__(self, seed: int = 3) -> None:
        drafts.SPLIT_ABOVE_BYTES = 2000
        set_seed(5)
        self.accelerator = Accelerator(strategy="ddp")
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.plain = model
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, tiny_loader(48, shuffle=True))

    def run(self, updates: int) -> None:
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.mse_loss(self.model(inputs), targets))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.updates == updates:
                return


def loop_and_save() -> None:
    loop = Loop()
    loop.run(2)
    loop.accelerator.save_state("first", blocking=False)
    loop.accelerator.save_state("again")
    loop.accelerator.save_model(loop.model, "weights")
    loop.accelerator.free_memory()


def resume_loop() -> Any:
    loop = Loop(seed=99)
    loop.accelerator.load_state("first", resume_loaders=True)
    loop.accelerator.save_state("second")
    position = loop.loader.state_dict()
    return position["samples"], loop.accelerator.updates, [p.sum().item().hex() for p in loop.plain.parameters()]


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3)])
def test_own_loops(run_dir: Path, before: int, after: int) -> None:
    """The state of your own training loop is the same on another number of processes."""
    run_world(before, loop_and_save)
    ends = run_world(after, resume_loop)
    assert ends == [ends[0]] * after
    assert ends[0][:2] == (8 * before, 2)
    first, second = open_checkpoint("first").read(), open_checkpoint("second").read()
    assert differences(first.tensors, second.tensors) == []
    assert differences(first.tensors, open_checkpoint("again").read().tensors) == []
    assert sorted(os.listdir("weights")) == ["model.safetensors"]


# ------------------------------------------------------------------------------------------------- ModelCheckpoint


def rotated() -> Any:
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, keep_last=1, save_last=True, every_n_epochs=1)
    fit(best, max_epochs=5)
    scores = {Path(path).name: float(score).hex() for path, score in best.best_k_models.items()}
    return scores, best.last_model_path, best.best_model_path


def test_all_decide_the_same_and_one_deletes(run_dir: Path) -> None:
    """All ranks choose the same checkpoints to keep, and each of those is complete."""
    ends = run_world(3, rotated)
    assert ends == [ends[0]] * 3
    scores, last, _ = ends[0]
    kept = {path.name for path in FOLDER.iterdir()} - {"last", ".lock"}
    assert kept == {*scores, Path(last).name} | kept
    assert set(scores) <= kept
    assert len(kept) <= 3
    assert len(saved()) == len(kept)


def by_time() -> Any:
    class Slow(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            time.sleep(0.05)

    callback = ModelCheckpoint(train_time_interval=timedelta(seconds=0.2), keep_last=-1)
    trainer = fit(callback, Slow(), max_epochs=3)
    return callback.last_model_path, trainer.global_step


def test_main_process_decides_timed_saves(run_dir: Path) -> None:
    """The time interval of the main process decides when all ranks save."""
    ends = run_world(2, by_time)
    assert ends[0] == ends[1]
    assert len(saved()) > 2  # not only the last checkpoint


# ------------------------------------------------------------------------------------------------------------ failures


class Limited(Callback):
    """Simulates a full disk on one rank, from step `first` to step `last`: files cannot grow."""

    def __init__(self, rank: int, first: int, last: int, waits: bool = True) -> None:
        self.rank, self.first, self.last, self.collectives = rank, first, last, waits

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.collectives and trainer.global_step in (self.first, self.last):
            trainer._save_policy.wait()  # until the previous save is complete
        if trainer.global_rank == self.rank:
            full = self.first <= trainer.global_step < self.last
            resource.setrlimit(resource.RLIMIT_FSIZE, (500 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def with_a_full_disk(rank: int, last: int) -> Any:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = ModelCheckpoint(every_n_train_steps=1, keep_last=-1)
        error = error_of(lambda: fit(callback, Limited(rank, 2, last)))
        said = [str(warning.message) for warning in caught if "could not be saved" in str(warning.message)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return error, said, callback.last_model_path


def test_a_full_disk_of_one_process_is_tried_again(run_dir: Path) -> None:
    """A save fails on all ranks if one rank cannot write. The next save is made as usual."""
    ends = run_world(2, with_a_full_disk, 1, 3)
    assert [error for error, *_ in ends] == [("nothing", "")] * 2
    assert ends[0][2] == ends[1][2]
    [warning] = ends[0][1]
    assert "rank 1: " in warning
    assert "File too large" in warning
    assert ends[1][1] == []  # only the main process warns
    assert saved() == [1, 2, 4, 5, 6]
    assert [name for name in os.listdir(FOLDER) if name.startswith(".step")] == []


class Told(ModelCheckpoint):
    """Records the step at which a rank learns that a save has failed."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        super().setup(trainer, module, stage)
        self.trainer, self.steps = trainer, []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        end = time.monotonic() + 30
        while trainer.global_step == 3 and trainer.is_global_zero and not trainer._save_policy.safe_points._alerts:
            assert time.monotonic() < end
            time.sleep(0.01)

    def _on_failure(self, *given: Any) -> None:
        self.steps.append(self.trainer.global_step)
        super()._on_failure(*given)


def told(rank: int) -> list[int]:
    callback = Told(every_n_train_steps=3, keep_last=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(callback, Limited(rank, 2, 5, waits=False), samples=80)
    return callback.steps


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_reaches_all_ranks_at_the_same_step(run_dir: Path, rank: int) -> None:
    """They learn about it before the next save, which would find the failure in any case."""
    assert run_world(2, told, rank) == [[5], [5]]


@pytest.mark.parametrize("rank", [0, 1])
def test_three_failures_end_the_run_on_all(run_dir: Path, rank: int) -> None:
    ends = run_world(2, with_a_full_disk, rank, 99)
    assert {error[0] for error, *_ in ends} == {"CheckpointWriteError"}
    assert len({error[1] for error, *_ in ends}) == 1
    assert "3 saves in a row have failed" in ends[0][0][1]
    assert f"rank {rank}: " in ends[0][0][1]
    assert saved() == [1, 2]


def killed_while_saving(rank: int) -> None:
    plain = commits._write

    def write(draft: Any, partial: Path, checksum: str) -> Any:
        if "step-00000004" in partial.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(draft, partial, checksum)

    trainer = make(ModelCheckpoint(every_n_train_steps=2, keep_last=1))
    if trainer.global_rank == rank:
        commits._write = write
    trainer.fit(Wide(), tiny_loader(48, shuffle=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_while_saving_leaves_the_old_one(run_dir: Path, rank: int) -> None:
    """If a rank is killed during a save, the previous checkpoint stays valid, and the run resumes from it."""
    ends = start_world(2, killed_while_saving, rank).ends()
    assert ends[rank] == (False, "ended with -9")
    assert not ends[1 - rank][0]
    assert saved() == [2]
    assert run_world(2, goes_on) == [(2, 6), (2, 6)]
    assert saved() == [6]
    assert [name for name in os.listdir(FOLDER) if name.startswith(".step")] == []


def goes_on() -> tuple[int, int]:
    began: list[int] = []
    trainer = make(
        ModelCheckpoint(every_n_train_steps=2, keep_last=1),
        At("on_train_start", 2, lambda trainer: began.append(trainer.global_step)),
    )
    trainer.fit(Wide(), tiny_loader(48, shuffle=True), ckpt_path="auto")
    return began[0], trainer.global_step


def fit_without_shared_folder(rank: int) -> tuple[str, str]:
    ranks._VISIBLE_WITHIN_SECONDS = 0.2
    trainer = make()
    if trainer.global_rank == rank:
        plain = saver.wait_for_path
        saver.wait_for_path = lambda path: plain(Path("another machine") / path.name)
    return error_of(lambda: trainer.fit(Wide(), tiny_loader(), ckpt_path="auto"))


def test_a_folder_that_is_not_shared(run_dir: Path) -> None:
    """If a rank does not see the checkpoint folder, all ranks raise an error that names this rank."""
    ends = run_world(2, fit_without_shared_folder, 1)
    assert ends[0] == ends[1]
    assert ends[0][0] == "CheckpointWriteError"
    assert "rank 1 on " in ends[0][1]
    assert "same folder" in ends[0][1]


class Unsavable(Callback):
    """Has a state that cannot be saved, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"function": print} if int(os.environ["RANK"]) == self.rank else {}


def unsavable(rank: int) -> tuple[str, str]:
    return error_of(lambda: fit(Unsavable(rank)))


def test_what_cannot_be_saved_is_an_error_on_all_in_the_first_second(run_dir: Path) -> None:
    ends = run_world(2, unsavable, 0)
    assert ends[0] == ends[1]
    assert ends[0][0] == "UnsavableError"
    assert "Unsavable" in ends[0][1]
    # the state of the main process is saved; the state of other ranks may be unsavable
    assert run_world(2, unsavable, 1) == [("nothing", "")] * 2


def resumes(word: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = error_of(lambda: fit(max_epochs=2, ckpt_path=word))
    return error, [str(warning.message) for warning in caught if "damaged and skipped" in str(warning.message)]


def test_a_damaged_one_is_passed_over_by_all_or_is_an_error_on_all(run_dir: Path) -> None:
    """A damaged checkpoint is an error on all ranks if its path is passed. With ckpt_path='auto', all ranks skip it."""
    run_world(2, fit_and_keep)
    newest = sorted(FOLDER.glob("step-*"))[-1]
    path = newest / "optimizer-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    ends = run_world(2, resumes, str(newest))
    assert ends[0] == ends[1]
    assert ends[0][0][0] == "CorruptCheckpointError"
    assert path.name in ends[0][0][1]
    ends = run_world(3, resumes, "auto")
    assert [error for error, _ in ends] == [("nothing", "")] * 3
    assert [len(said) for _, said in ends] == [1, 0, 0]
    assert path.name in ends[0][1][0]


def fit_and_keep() -> None:
    fit(ModelCheckpoint(every_n_train_steps=2, keep_last=-1))


def fit_with_different_arguments(what: str) -> tuple[str, str]:
    """Fit with another argument or callback on rank 1 than on rank 0. Returns the error."""
    other = os.environ["RANK"] == "1"
    callbacks = [ModelCheckpoint(every_n_train_steps=2)] if other and what == "callbacks" else []
    trainer = make(*callbacks, enable_checkpointing=not (other and what == "checkpointing"), max_epochs=2)
    path = None if other and what == "ckpt_path" else FOLDER / "step-00000002" if other and what == "path" else "last"
    restore = {"model"} if other and what == "restore" else None
    strict = not (other and what == "strict")
    return error_of(lambda: trainer.fit(Wide(), tiny_loader(48, shuffle=True), ckpt_path=path, restore=restore, strict=strict))


@pytest.mark.parametrize(
    "what, said",
    [
        ("ckpt_path", "rank 0 has ckpt_path=last, but rank 1 has ckpt_path=None"),
        ("path", "rank 0 has ckpt_path=last, but rank 1 has ckpt_path=a path"),
        ("restore", "rank 1 has restore=['model']"),
        ("strict", "rank 0 has strict=True, but rank 1 has strict=False"),
        ("callbacks", "'every_n_train_steps': 2"),
        ("checkpointing", "rank 1 has callbacks=[]"),
    ],
)
def test_a_rank_that_asks_for_something_else_gets_an_error_and_no_rank_waits(run_dir: Path, what: str, said: str) -> None:
    run_world(2, fit_and_keep)
    ends = run_world(2, fit_with_different_arguments, what)
    assert ends[0] == ends[1]
    assert ends[0][0] == "ConfigurationError"
    assert said in ends[0][1]


@pytest.mark.parametrize("word", ["last", "nowhere"])
def test_no_checkpoint_is_an_error_on_all_ranks(run_dir: Path, word: str) -> None:
    """If there is no checkpoint, all ranks raise the same error."""
    ends = run_world(2, resumes, word)
    assert ends[0] == ends[1]
    assert ends[0][0][0] == "CheckpointNotFoundError"


def terminated(rank: int) -> Any:
    def act(trainer: Any) -> None:
        if trainer.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    callback = ModelCheckpoint(keep_last=-1)
    error = error_of(lambda: fit(callback, At("on_train_batch_start", 2, act)))
    return error[0], callback.last_model_path


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_saves_one_checkpoint(run_dir: Path, rank: int) -> None:
    ends = run_world(2, terminated, rank)
    assert ends[0] == ends[1]
    assert ends[0][0] == "Preempted"
    [step] = saved()
    assert step in (3, 4)
    assert Path(ends[0][1]).name == f"step-{step:08d}"
    assert run_world(2, resumes, "auto") == [(("nothing", ""), [])] * 2


def one_fails(rank: int) -> Any:
    class BadError(Exception):
        pass

    def act(trainer: Any) -> None:
        if trainer.global_rank == rank:
            raise BadError("mine")

    callback = ModelCheckpoint(every_n_train_steps=2, keep_last=-1)
    return error_of(lambda: fit(callback, At("on_train_batch_start", 3, act)))


def test_an_error_of_one_process_saves_nothing(run_dir: Path) -> None:
    """The other rank is in the middle of a step, so there is no point at which all ranks could save."""
    ends = start_world(2, one_fails, 1).ends()
    assert ends[1] == (True, ("BadError", "mine"))
    assert ends[0][1] != ("nothing", "")
    assert 3 not in saved()


def stop_at(steps: int, strategy: str, save: bool, batches: int | None = None) -> None:
    """Train up to a number of optimizer steps. With `save`, save to `there`; otherwise resume from `there`."""
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=steps, global_batch_size=batches, logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path=None if save else "there")
    if save:
        trainer.save_checkpoint("there")


SAVED_BY_DDP = "the checkpoint was saved with strategy='ddp' on 2 devices; this run uses strategy='single' on 1 device."
SAMPLES = (
    " Each optimizer step has batch_size × 1 × accumulate_grad_batches samples from now on. To have the same number on any "
    "number of devices: Trainer(global_batch_size=N)."
)


def test_another_strategy_and_number_of_processes_are_announced(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log message names the strategy and the number of devices that saved the checkpoint, if they differ."""
    run_world(2, stop_at, 1, "ddp", True)
    for batches, said in ((None, SAVED_BY_DDP + SAMPLES), (8, SAVED_BY_DDP)):
        caplog.clear()
        stop_at(2, "single", False, batches)
        assert [line for line in caplog.messages if "was saved with" in line] == [said]
    caplog.clear()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(TinyModule())
    accelerator.load_state("there", restore={"model"})
    assert SAVED_BY_DDP in caplog.messages


def test_the_same_strategy_is_not_announced(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop_at(1, "single", True)
    stop_at(2, "single", False)
    assert any(line.startswith("resuming from") for line in caplog.messages)
    assert not any("was saved with" in line for line in caplog.messages)
