"""`Trainer.save_checkpoint(blocking=False)`: when it returns, and where a failed write is reported. What can never be saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import IMPORTABLE
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.support import run_python
from helpers.worlds.worlds import run_world
from torch import Tensor, nn

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint import open_checkpoint, saver
from trainkit.checkpoint.pointers import resolve_pointer
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointError, CheckpointWriteError, OptimizerError, StateMismatchError, UnsavableError


class Saves(Callback):
    """Calls `save(trainer)` after some micro-batches, and records the errors that it raises."""

    def __init__(self, save: Callable[[Trainer], None], *after: int) -> None:
        self.save, self.after = save, after
        self.errors: list[Exception] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.after:
            try:
                self.save(trainer)
            except CheckpointError as error:
                self.errors.append(error)


def fit(callback: Callback, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **quiet, **arguments)
    trainer.fit(TinyModule(), tiny_loader())
    return trainer


@pytest.mark.parametrize("blocking", [True, False])
def test_blocking_decides_when_it_returns(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `blocking=False` the call returns before the checkpoint is on the disk, otherwise afterwards."""
    training_went_on = threading.Event()
    commit, seen = saver.commit, []

    def late(*given: Any, **options: Any) -> Any:
        if not blocking:
            assert training_went_on.wait(60)
        seen.append(threading.current_thread() is threading.main_thread())
        return commit(*given, **options)

    def save(trainer: Trainer) -> None:
        trainer.save_checkpoint("there", blocking=blocking)
        assert Path("there").exists() is blocking
        training_went_on.set()

    monkeypatch.setattr(saver, "commit", late)
    callback = Saves(save, 1)
    fit(callback)
    assert seen == [blocking]
    assert open_checkpoint("there").manifest.step == 2


def _elsewhere(trainer: Trainer) -> None:
    trainer.save_checkpoint("mine", blocking=False)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_folder_that_is_no_checkpoint_is_an_error_of_the_call(blocking: bool) -> None:
    """In both cases the call raises the error, and not a later step."""
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    callback = Saves(lambda trainer: trainer.save_checkpoint("mine", blocking=blocking), 1)
    trainer = fit(callback)
    assert ["expected a checkpoint to replace" in str(error) for error in callback.errors] == [True]
    assert trainer.global_step == 4
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        trainer.save_checkpoint("mine", blocking=blocking)  # after the fit too


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `import lightning` gives trainkit."""
    monkeypatch.setattr("trainkit.trainer.save_policy.is_open", lambda door: True)


@pytest.mark.usefixtures("door")
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("name", ["x.ckpt", "x.pt", "x.pth", "x.bin", "x.tar", "x.PT", "x.pth.tar"])
def test_behind_the_door_a_name_of_a_file_is_a_file(name: str, weights_only: bool) -> None:
    """Which other programs open, and which stands for its checkpoint."""
    trainer = fit(Saves(lambda trainer: None))
    trainer.save_checkpoint(name, weights_only=weights_only)
    read = torch.load(name, weights_only=True)
    assert (read["global_step"], same(read["state_dict"], parameters_of(trainer.model))) == (4, True)
    checkpoint = open_checkpoint(resolve_pointer(Path(name)))
    assert (checkpoint.manifest.step, bool(checkpoint.manifest.contents["resumable"])) == (4, not weights_only)


@pytest.mark.usefixtures("door")
def test_behind_the_door_a_file_replaces_only_its_own_checkpoint() -> None:
    trainer = fit(Saves(lambda trainer: None))
    for name in ("x.ckpt", "x.pt", "x.ckpt"):
        trainer.save_checkpoint(name, weights_only=name == "x.pt")
    assert [open_checkpoint(resolve_pointer(Path(name))).path.name for name in ("x.ckpt", "x.pt")] == ["x", "x.pt.folder"]
    torch.save({"mine": 1}, "y.pt")
    with pytest.raises(CheckpointWriteError, match=r"y.pt exists, and was not made of a checkpoint. Fix: move it"):
        trainer.save_checkpoint("y.pt")
    assert not Path("y").exists()
    assert torch.load("y.pt") == {"mine": 1}


@pytest.mark.usefixtures("door")
def test_a_run_cannot_resume_from_a_file_alone() -> None:
    fit(Saves(lambda trainer: None)).save_checkpoint("x.pt")
    Path("runs").mkdir()
    Path("x").rename("runs/x")
    Path("last.ckpt").symlink_to("gone.ckpt")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_epochs=2, **quiet)
    with pytest.raises(CheckpointError, match=r"To resume, put the folder of the checkpoint that it was made of next to it\."):
        trainer.fit(TinyModule(), tiny_loader(), ckpt_path="x.pt")
    with pytest.raises(CheckpointError, match=r"last.ckpt: expected a checkpoint, but this is a link to gone.ckpt, which does"):
        trainer.fit(TinyModule(), tiny_loader(), ckpt_path="last.ckpt")


@pytest.mark.usefixtures("door")
def test_behind_the_door_a_finite_file_is_kept() -> None:
    """As its checkpoint is."""
    trainer = fit(Saves(lambda trainer: None))
    trainer.save_checkpoint("x.pt")
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.warns(TrainkitWarning, match="x-nonfinite are not finite"):
        trainer.save_checkpoint("x.pt")
    finite = [all(t.isfinite().all() for t in torch.load(name)["state_dict"].values()) for name in ("x.pt", "x-nonfinite.pt")]
    assert finite == [True, False]
    assert open_checkpoint(resolve_pointer(Path("x.pt"))).manifest.finite


@pytest.mark.usefixtures("door")
def test_behind_the_door_a_folder_stays_one(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO", "trainkit")
    trainer = fit(Saves(lambda trainer: None))
    with monkeypatch.context() as closed:
        closed.setattr("trainkit.trainer.save_policy.is_open", lambda door: False)
        trainer.save_checkpoint("x.pt")
    trainer.save_checkpoint("x.pt")
    assert open_checkpoint("x.pt").manifest.step == 4
    assert "x.pt is the folder of a checkpoint, and remains one." in caplog.messages[-1]


def _two_ranks(folder: str) -> tuple[list[str], int]:
    callback = Saves(_elsewhere, 1)
    trainer = fit(callback, strategy="ddp")
    return [str(error) for error in callback.errors], trainer.global_step


def test_a_folder_that_is_no_checkpoint_on_two_ranks(run_dir: Path) -> None:
    """On two processes both ranks raise the error, and training continues."""
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    for errors, steps in run_world(2, _two_ranks, str(run_dir)):
        assert len(errors) == 1
        assert "rank 0: " in errors[0]
        assert "expected a checkpoint to replace" in errors[0]
        assert steps == 2


def _broken(monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
    """Make the commits with these numbers, counted from 0, fail as with a full disk."""
    commit, calls = saver.commit, []

    def sometimes(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) - 1 in failing:
            raise CheckpointWriteError("the disk is full")
        return commit(*given, **options)

    monkeypatch.setattr(saver, "commit", sometimes)


def test_what_cannot_be_written_is_a_warning_and_training_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, 0)
    callback = Saves(lambda trainer: trainer.save_checkpoint("there", blocking=False), 0)
    with pytest.warns(UserWarning, match="a checkpoint could not be saved: the disk is full. Training continues"):
        trainer = fit(callback)
    assert (callback.errors, trainer.global_step, Path("there").exists()) == ([], 4, False)


def test_with_blocking_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, 0)
    callback = Saves(lambda trainer: trainer.save_checkpoint("there"), 0)
    fit(callback)
    assert [str(error) for error in callback.errors] == ["the disk is full"]


@pytest.mark.filterwarnings("ignore:a checkpoint could not be saved")
def test_saves_that_succeed_end_a_row_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three failures end a run only if nothing was saved between them."""
    _broken(monkeypatch, 0, 2, 4)
    names = iter("abcdefgh")
    callback = Saves(lambda trainer: trainer.save_checkpoint(next(names), blocking=False), 0, 1, 2, 3)
    trainer = fit(callback)
    trainer.save_checkpoint("last", blocking=False)  # the third failure
    trainer.save_checkpoint("and_one")
    assert [name for name in "abcd" if Path(name).exists()] == ["b", "d"]
    assert Path("and_one").exists()


def test_after_the_fit_a_failure_is_reported_at_the_end_of_the_program(run_dir: Path) -> None:
    """No step follows that could report it, so it is printed when the program ends."""
    done = run_python(
        "from pathlib import Path; from helpers.runs.tiny import TinyModule, tiny_loader; from trainkit import Trainer\n"
        "from trainkit.checkpoint import saver\n"
        "from trainkit.errors import CheckpointWriteError\n"
        "trainer = Trainer(accelerator='cpu', max_epochs=1, logger=False, enable_checkpointing=False)\n"
        "trainer.fit(TinyModule(), tiny_loader())\n"
        "def full(*given, **options): raise CheckpointWriteError('the disk is full')\n"
        "saver.commit = full\n"
        "trainer.save_checkpoint('there', blocking=False)\n"
        "print('goes on')",
        env=IMPORTABLE,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "goes on")
    assert f"saving {run_dir / 'there'} failed" in done.stderr
    assert "CheckpointWriteError: the disk is full" in done.stderr


# ------------------------------------------------------------------------------------------- what can never be saved


class Replacing(TinyModule):
    """Replaces its layer after the optimizer was created."""

    hook = "on_fit_start"

    def replace(self) -> None:
        self.layer = nn.Linear(self.layer.in_features, self.layer.out_features)

    def on_fit_start(self) -> None:
        if self.hook == "on_fit_start":
            self.replace()

    def on_train_start(self) -> None:
        if self.hook == "on_train_start":
            self.replace()

    def on_train_epoch_start(self) -> None:
        if self.hook == "on_train_epoch_start" and self.current_epoch == 1:
            self.replace()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_train_batch_start" and batch_idx == 1:
            self.replace()


@pytest.mark.parametrize("hook, steps", [("on_fit_start", 0), ("on_train_start", 0), ("on_train_epoch_start", 4)])
@pytest.mark.parametrize("callbacks", [[], [ModelCheckpoint()]], ids=["without checkpoints", "with checkpoints"])
def test_an_optimizer_of_a_replaced_layer_is_refused_at_the_next_step(hook: str, steps: int, callbacks: list[Any]) -> None:
    module, trainer = Replacing(), make_trainer(*callbacks, max_epochs=3, enable_checkpointing=bool(callbacks))
    module.hook = hook
    text = r"trains 2 parameters that the model does not have \(the first of shape .*from configure_optimizers: torch.optim."
    with pytest.raises(OptimizerError, match=text):
        trainer.fit(module, tiny_loader())
    assert trainer.global_step == steps


def test_the_first_save_says_what_can_never_be_saved() -> None:
    """A layer is replaced in the middle of an epoch: the save at its end stops the run, and not the third one."""
    module, trainer = Replacing(), make_trainer(ModelCheckpoint(), max_epochs=3, enable_checkpointing=True)
    module.hook = "on_train_batch_start"
    with pytest.raises(UnsavableError, match="belongs to no module of the run.*If its layer was replaced"):
        trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4


def test_a_state_that_becomes_unsavable_ends_the_run_at_its_first_save() -> None:
    class Odd(Callback):
        value: Any = 1

        def on_train_batch_end(self, *args: Any) -> None:
            self.value = print

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

    trainer = make_trainer(Odd(), ModelCheckpoint(), max_epochs=3, enable_checkpointing=True)
    with pytest.raises(UnsavableError, match="value"):
        trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4


def test_a_hook_that_removes_a_tied_tensor() -> None:
    """The checkpoint can be read: no name refers to a tensor that is not stored."""

    class Tied(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.layer

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["layer.weight"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["layer.weight"] = torch.ones(1, 4)

    trainer = make_trainer()
    module = Tied()
    trainer.fit(module, tiny_loader())
    trainer.save_checkpoint("there")
    again = Tied.load_from_checkpoint("there")
    assert again.layer.weight.equal(torch.ones(1, 4))
    assert again.layer.bias.equal(module.layer.bias)


class Followed(TinyModule):
    """A frozen copy of the layer takes its values at the end of the third epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Linear(4, 1).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.copy(batch[0]).mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.copy.load_state_dict(self.layer.state_dict())


def test_frozen_parameters_that_change_are_not_taken_for_the_first_ones() -> None:
    """A checkpoint without them says which values it needs, and a warning says that these are stored nowhere."""
    torch.manual_seed(0)
    save = ModelCheckpoint(dirpath="kept", save="trainable", save_top_k=-1, filename="{epoch}")
    with pytest.warns(TrainkitWarning, match=r"copy\.weight, copy\.bias changed since the checkpoint before.*save='all'"):
        make_trainer(save, enable_checkpointing=True, max_epochs=3).fit(Followed(), tiny_loader())
    torch.manual_seed(0)
    make_trainer(max_epochs=3).fit(Followed(), tiny_loader(), ckpt_path="kept/epoch=1")
    torch.manual_seed(0)
    with pytest.raises(StateMismatchError, match="of a model with another base"):
        make_trainer(max_epochs=4).fit(Followed(), tiny_loader(), ckpt_path="kept/epoch=2")
