"""`SavePolicy` without a Trainer: what a save contains, and what happens if it fails. Whole runs: `test_save_checkpoint`."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.bare import make_run
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit.checkpoint.folder import list_checkpoints
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.errors import CheckpointWriteError, ModuleError, Preempted
from trainkit.trainer.loaders import train_loader
from trainkit.trainer.progress import Phase
from trainkit.trainer.run import Run
from trainkit.trainer.save_policy import SavePolicy
from trainkit.trainer.setup import prepare_training


def fitting(**arguments: Any) -> tuple[Run, SavePolicy]:
    """A fit that is set up, at step 4 in its second epoch."""
    run = make_run(**arguments)
    saves = run.save_policy = SavePolicy(run)
    prepare_training(run, train_loader(run, tiny_loader()), saves.safe_points)
    run.progress.global_step, run.progress.current_epoch = 4, 1
    return run, saves


@pytest.fixture
def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


# --------------------------------------------------------------------------------------------------------------- contents


def test_a_save_holds_the_run(folder: Path) -> None:
    _, saves = fitting()
    saves.use_folder(folder)
    path = saves.save(folder, "one", blocking=True, saved_by="me", metrics={"loss": 0.5})
    saves.close()
    manifest = open_checkpoint(path).manifest
    assert (manifest.step, manifest.epoch, manifest.run_id) == (4, 1, saves.run_id)
    assert (manifest.saved_by, manifest.metrics) == ("me", {"loss": 0.5})
    assert saves.newest == path
    assert saves.last_counter() == 1


def test_saves_are_counted_and_names_are_never_taken_twice(folder: Path) -> None:
    _, saves = fitting()
    saves.use_folder(folder)
    paths = [saves.save(folder, "same", blocking=True) for _ in range(3)]
    assert [path.name for path in paths] == ["same", "same-v1", "same-v2"]
    assert saves.save(folder, "same", blocking=True, replace=True).name == "same"
    assert saves.last_counter() == 4
    saves.close()
    assert len(list_checkpoints(folder)) == 3


def test_hooks_change_what_is_saved(folder: Path) -> None:
    run, saves = fitting()
    seen: list[str] = []

    class Hooks:
        def run(self, name: str, checkpoint: dict[str, Any]) -> None:
            seen.append(name)
            checkpoint["mine"] = [1, 2]
            checkpoint["state_dict"]["layer.bias"] = torch.full((1,), 7.0)

    run.hooks = Hooks()  # type: ignore[assignment]
    content = saves.content()
    assert seen == ["on_save_checkpoint"]
    assert content.state["user"] == {"mine": [1, 2]}
    assert content.tensors["model"]["layer.bias"].item() == 7.0


def test_weights_alone_hold_no_position() -> None:
    _, saves = fitting()
    assert "loop" in saves.content().state
    assert "loop" not in saves.content(weights_only=True).state


# ---------------------------------------------------------------------------------------------------------------- failures


def broken(saves: SavePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **options: object) -> None:
        raise CheckpointWriteError("no space left")

    monkeypatch.setattr(saves._saver, "save", fail)


def test_the_third_failure_in_a_row_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saves = fitting()
    saves.use_folder(folder)
    good = saves.save(folder, "good", blocking=True)
    with monkeypatch.context() as patch:
        broken(saves, patch)
        for left in ("2 more failures", "1 more failure "):
            with pytest.warns(UserWarning, match=f"last good checkpoint is {re.escape(str(good))}. After {left}"):
                saves.save(folder, "bad")
        with pytest.raises(CheckpointWriteError, match="3 saves in a row have failed"):
            saves.save(folder, "bad")
    saves.close()


def test_a_save_that_succeeds_ends_the_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saves = fitting()
    saves.use_folder(folder)
    for _ in range(3):
        with monkeypatch.context() as patch:
            broken(saves, patch)
            with pytest.warns(UserWarning, match="After 2 more failures"):
                saves.save(folder, "bad")
        saves.save(folder, "good", blocking=True)
    saves.close()


def test_who_asked_for_the_save_is_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions passed to `save` are called before the capture, after the commit, and after a failure."""
    _, saves = fitting()
    saves.use_folder(folder)
    calls: list[Any] = []
    how: dict[str, Any] = {
        "committed": lambda written: calls.append(f"committed {written.path.name}"),
        "failed": lambda error: calls.append(str(error)),
    }
    path = saves.save(folder, "one", blocking=True, before_capture=calls.append, **how)
    broken(saves, monkeypatch)
    with pytest.warns(UserWarning, match="could not be saved"):
        saves.save(folder, "two", **how)
    assert calls == [path, "committed one", "no space left"]


# ---------------------------------------------------------------------------------------------- after an error, at the end


def test_why_a_save_after_an_error_would_be_of_no_use() -> None:
    run, saves = fitting()
    error = RuntimeError()
    assert saves.why_not_savable(error) is None
    run.accelerator.updating = True
    assert saves.why_not_savable(error) == "the step that failed had begun to change the parameters"
    run.accelerator.updating = False
    run.accelerator.updates = run.progress.steps_done + 1
    assert saves.why_not_savable(error) == "the step that failed had begun to change the parameters"
    run.progress.phase = Phase.UPDATED
    assert saves.why_not_savable(error) is None, "the step itself is complete"
    run.progress.first_step = 4
    assert saves.why_not_savable(error) == "no optimizer step was made yet"
    run.signals.received, run.signals.twice = signal.SIGINT, True
    assert saves.why_not_savable(Preempted("SIGINT")) == "Ctrl-C was pressed twice"


def test_the_position_changes_with_what_a_save_would_hold() -> None:
    """`position` differs if a save would contain another state of the run."""
    run, saves = fitting()
    before = saves.position
    assert saves.position == before
    run.progress.phase = Phase.UPDATED
    assert saves.position != before


def test_after_an_evaluation_what_is_saved_is_of_its_module() -> None:
    _, saves = fitting()
    other = make_run(TinyModule(learning_rate=0.5))
    with torch.no_grad():
        other.module.layer.bias.fill_(3.0)  # type: ignore[union-attr, operator]
    saves.continue_in(other)
    assert saves.content(weights_only=True).tensors["model"]["layer.bias"].item() == 3.0


def test_without_a_module_there_is_nothing_to_save() -> None:
    run, saves = fitting()
    run.given_module = None
    with pytest.raises(ModuleError):
        saves.content()
