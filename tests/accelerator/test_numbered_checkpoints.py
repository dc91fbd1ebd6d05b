"""Automatic names of checkpoints: `ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=...)`."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.resuming import forked
from helpers.worlds.threaded import run_threads
from helpers.worlds.worlds import run_world
from torch import nn

from trainkit import Accelerator
from trainkit.accelerator.checkpointing import NumberedCheckpoints, rotate
from trainkit.checkpoint import list_checkpoints, open_checkpoint
from trainkit.console import TrainkitWarning
from trainkit.distributed.world import World
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    UnknownNameError,
)
from trainkit.utils import ProjectConfiguration

FOLDER = Path("project", "checkpoints")


def loop(limit: int | None = None, iteration: int = 0, folder: str = "project", **options: Any) -> Accelerator:
    """An accelerator whose model has one weight; its value identifies the checkpoint."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit, iteration=iteration)
    accelerator = Accelerator(project_config=project, **options)
    model = nn.Linear(1, 1, bias=False)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator


def save(accelerator: Accelerator, *values: float, **options: Any) -> list[str]:
    names = []
    for value in values:
        put(accelerator, value)
        names.append(accelerator.save_state(**options).name)
    return names


def put(accelerator: Accelerator, value: float) -> None:
    with torch.no_grad():
        accelerator.unwrap_model(accelerator._models.wrapped[0]).weight.fill_(value)


def value(accelerator: Accelerator) -> float:
    return float(accelerator.unwrap_model(accelerator._models.wrapped[0]).weight.detach())


def names(folder: Path = FOLDER) -> list[str]:
    return sorted(os.listdir(folder))


def test_names_count_on_and_the_newest_is_loaded() -> None:
    first = loop()
    assert save(first, 1.0, 2.0) == ["checkpoint_0", "checkpoint_1"]
    assert first.save_state().is_absolute()
    assert first.save_iteration == 3
    second = loop()
    second.load_state()
    assert (value(second), second.save_iteration, second.run_id) == (2.0, 3, first.run_id)
    assert save(second, 4.0) == ["checkpoint_3"]
    third = loop()
    third.load_state(FOLDER / "checkpoint_0")
    assert value(third) == 1.0
    assert third.save_iteration == 4, "nothing that is there is written over, and the newest has the highest number"


def test_checkpoints_sort_by_number() -> None:
    """Checkpoints are sorted by number and not by name: checkpoint_10 is newer than checkpoint_9."""
    first = loop(limit=3, iteration=8)
    assert save(first, *range(8, 13))[-1] == "checkpoint_12"
    assert names() == ["checkpoint_10", "checkpoint_11", "checkpoint_12"]
    second = loop()
    second.load_state()
    assert (value(second), second.save_iteration) == (12.0, 13)


def test_the_oldest_go_when_the_new_one_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest checkpoint is removed once the new one is complete; a save that fails removes nothing."""
    accelerator = loop(limit=2)
    save(accelerator, 0.0, 1.0)
    seen: list[list[str]] = []
    monkeypatch.setattr("trainkit.accelerator.checkpointing.remove", lambda path: seen.append([path.name, *names()]))
    save(accelerator, 2.0)
    assert seen == [["checkpoint_0", "checkpoint_0", "checkpoint_1", "checkpoint_2"]]
    monkeypatch.undo()
    (FOLDER / "checkpoint_7").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"contains checkpoint_0 to checkpoint_7 of an earlier start"):
        save(accelerator, 3.0)
    assert names() == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_7"], "a save that fails removes nothing"


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("limit, kept", [(1, [1, 4]), (2, [1, 4]), (3, [0, 1, 4]), (None, [0, 1, 2, 3, 4])])
def test_what_is_not_finite_removes_nothing_that_is(
    limit: int | None, kept: list[int], blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; `load_state` uses the newest that is finite, and says so."""
    first = loop(limit=limit)
    warning = r"save_state: parameters in .*checkpoint_2 are not finite: weight.*NonFiniteGuard"
    with pytest.warns(TrainkitWarning, match=warning) as seen:
        save(first, 0.0, 1.0, math.nan, math.inf, math.nan, blocking=blocking)
    first.free_memory()
    assert len(seen) == 1
    assert names() == [f"checkpoint_{number}" for number in kept]
    second = loop(limit=limit)
    second.load_state()
    assert (value(second), second.save_iteration) == (1.0, 5)
    newer = ", ".join(f"checkpoint_{number}" for number in reversed(kept) if number > 1)
    assert f"skipped newer checkpoints whose parameters are not finite: {newer}. Using {FOLDER.absolute()}" in caplog.text
    assert save(second, 5.0)[-1] == "checkpoint_5"


def test_if_nothing_is_finite_the_newest_is_used() -> None:
    with pytest.warns(TrainkitWarning, match="are not finite"):
        save(loop(limit=2), math.nan, math.nan, math.inf)
    assert names() == ["checkpoint_1", "checkpoint_2"]
    second = loop()
    with pytest.warns(TrainkitWarning, match=r"checkpoint_2 are not finite, and there is no checkpoint with finite ones"):
        second.load_state()
    assert value(second) == math.inf


def test_saves_in_the_background() -> None:
    accelerator = loop(limit=2)
    assert save(accelerator, 0.0, 1.0, 2.0, blocking=False)[-1] == "checkpoint_2"
    put(accelerator, 9.0)
    accelerator.free_memory()
    assert names() == ["checkpoint_1", "checkpoint_2"]
    other = loop()
    other.load_state()
    assert value(other) == 2.0


def test_a_start_without_resuming() -> None:
    """A start without `load_state` does not overwrite the checkpoints of an earlier start: the error has the fix."""
    save(loop(limit=1), 1.0, 2.0)
    assert names() == ["checkpoint_1"], "checkpoint_0, which would be the next, is removed"
    accelerator = loop(limit=1)
    with pytest.raises(ConfigurationError) as caught:
        save(accelerator, 3.0)
    expected = (
        "project/checkpoints contains checkpoint_1 of an earlier start, and the next one would be checkpoint_0. To continue"
    )
    assert expected in str(caught.value)
    assert "accelerator.load_state() before the loop" in str(caught.value)
    assert names() == ["checkpoint_1"]
    accelerator.project_configuration.iteration = 2  # as the error advises
    assert save(accelerator, 3.0, 4.0) == ["checkpoint_2", "checkpoint_3"]
    assert names() == ["checkpoint_1", "checkpoint_3"], "those of another run are not removed"


def test_damaged_ones_are_named_and_passed_over() -> None:
    first = loop()
    save(first, 0.0, 1.0, 2.0, 3.0)
    (FOLDER / "checkpoint_3" / "manifest.json").write_text("{}")
    data = bytearray((FOLDER / "checkpoint_2" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (FOLDER / "checkpoint_2" / "model.safetensors").write_bytes(data)
    (FOLDER / "checkpoint_9").mkdir()  # not a checkpoint
    (FOLDER / "checkpoint_x").mkdir()
    (FOLDER / ".checkpoint_4.tmp-0123456789abcdef").mkdir()
    second = loop(limit=1)
    with pytest.warns(UserWarning, match="damaged and skipped") as said:
        second.load_state()
    assert [str(one.message).count("checkpoint_3") for one in said] == [1, 0]
    assert (value(second), second.save_iteration) == (1.0, 10)
    save(second, 10.0)
    # checkpoint_2 was removed: only file sizes are compared, so it counts as complete
    assert {name for name in names() if not name.startswith(".")} == {
        "checkpoint_10",
        "checkpoint_3",
        "checkpoint_9",
        "checkpoint_x",
    }, "what is damaged is no reason to remove others, and is not removed"
    (FOLDER / "checkpoint_10" / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"all checkpoints in .* are damaged:\n  .*checkpoint_10"):
        loop().load_state()


def test_a_checkpoint_that_does_not_fit_is_no_reason_for_an_older_one() -> None:
    """If the newest checkpoint does not fit the model, `load_state` raises instead of loading an older one."""
    save(loop(), 1.0)
    other = Accelerator(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True))
    other.prepare(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="checkpoint_0"):
        other.load_state()


def test_nothing_to_load() -> None:
    for _ in range(2):
        with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint in .*project/checkpoints. For a script"):
            loop().load_state()
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / ".checkpoint_0.tmp-0123456789abcdef").mkdir(exist_ok=True)  # left by a save that was killed
    assert not list_checkpoints(FOLDER), "what the message says to ask"


def test_a_folder_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    """As in Accelerate, `save_state` ignores a folder, with a notice, and `load_state` uses it."""
    accelerator = loop()
    assert accelerator.save_state("mine").name == "checkpoint_0"
    assert "save_state('mine'): automatic_checkpoint_naming is on, so it is written to" in caplog.text
    assert not Path("mine").exists()
    plain = Accelerator()
    plain.prepare(model := nn.Linear(1, 1, bias=False), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    plain.save_state("mine")
    accelerator.load_state("mine")
    assert accelerator.save_iteration == 1


def test_invalid_arguments() -> None:
    """A missing folder, pickle files and misspelled arguments are errors."""
    plain = Accelerator()
    for verb in (plain.save_state, plain.load_state):
        with pytest.raises(ConfigurationError, match="needs a folder: .*automatic_checkpoint_naming=True"):
            verb()
    nowhere = loop()
    nowhere.project.project_dir = None
    for verb in (nowhere.save_state, nowhere.load_state):
        with pytest.raises(ConfigurationError, match="needs a folder: Accelerator\\(project_dir="):
            verb()
    with pytest.raises(ConfigurationError, match="a pickle can run code"):
        loop().save_state(safe_serialization=False)
    with pytest.raises(UnknownNameError, match="Accelerator.load_state has no argument 'strickt'. Did you mean 'strict'"):
        loop().load_state("there", strickt=False)
    with pytest.raises(
        UnknownNameError, match="Accelerator.save_state has no argument 'output_folder'. Did you mean 'output_dir'"
    ):
        loop().save_state(output_folder="there")


def test_a_removal_that_fails_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an old checkpoint cannot be removed, the save succeeds with a notice, and the next save tries again."""

    def refuse(path: Path) -> None:
        raise CheckpointError(f"{path} could not be removed: made up")

    accelerator = loop(limit=1)
    monkeypatch.setattr("trainkit.accelerator.checkpointing.remove", refuse)
    save(accelerator, 1.0, 2.0)
    assert "save_state: the new checkpoint is complete, but old ones could not be removed: " in caplog.text
    assert names() == ["checkpoint_0", "checkpoint_1"]
    monkeypatch.undo()
    save(accelerator, 3.0)
    assert names() == ["checkpoint_2"], "the next one tries again"
    rotate(FOLDER, 1, None)  # on the other processes, which have no manifest, this does nothing


def killed(survived: int) -> None:
    """Save two more checkpoints; SIGKILL ends the process after `survived` changes to the disk."""
    accelerator = loop(limit=2)
    accelerator.load_state()
    left = [survived]

    def watch(event: str, args: Sequence[Any]) -> None:
        opened = event == "open" and isinstance(args[1], str) and args[1][:1] in "wxa"
        if opened or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(accelerator, value(accelerator) + 1, value(accelerator) + 2)


def test_a_kill_at_any_moment() -> None:
    """After a SIGKILL at any moment, `load_state` finds the newest complete checkpoint, and two complete ones exist."""
    save(loop(limit=2), 0.0, 1.0)
    known, survived, finished = 1.0, 0, False
    while not finished:
        status, _ = forked(lambda survived=survived: killed(survived))
        assert status in (signal.SIGKILL, 0)
        finished, survived = status == 0, survived + 1
        complete = [one for one in list_checkpoints(FOLDER) if one.problem is None]
        assert len(complete) >= 2
        accelerator = loop(limit=2)
        accelerator.load_state()
        newest = open_checkpoint(FOLDER / f"checkpoint_{accelerator.save_iteration - 1}")
        assert value(accelerator) == float(newest.read(["model"]).tensors["model"]["weight"])
        assert known <= value(accelerator) <= known + 2
        known = value(accelerator)
    assert survived > 30
    assert len(names()) == 2, "nothing is left"


def save_and_wait(accelerator: Accelerator) -> None:
    accelerator.save_state()
    accelerator.wait_for_everyone()


def on_two(folder: str) -> list[Any]:
    accelerator = loop(limit=2, folder=folder)
    rank = accelerator.strategy.rank
    accelerator.project.iteration += 0
    found = [*save(accelerator, 0.0, 1.0, 2.0, blocking=False), *save(accelerator, 3.0)]
    accelerator.free_memory()
    other = loop(limit=2, folder=folder)
    with pytest.raises(ConfigurationError, match="contains checkpoint_2 to checkpoint_3 of an earlier start"):
        save_and_wait(other)
    other.load_state()
    with pytest.raises(CheckpointNotFoundError):
        loop(folder=f"{folder}/{rank}").load_state()
    return [found, value(other), other.save_iteration, names(Path(folder, "checkpoints"))]


def test_on_two_processes(run_dir: Path) -> None:
    expected = [f"checkpoint_{number}" for number in range(4)]
    assert run_world(2, on_two, str(run_dir / "there")) == [[expected, 3.0, 4, expected[2:]]] * 2


def test_the_part_needs_no_accelerator(run_dir: Path) -> None:
    """The main process reads the folder, and all processes get its result."""
    for number in (0, 2):
        (FOLDER / f"checkpoint_{number}").mkdir(parents=True)

    def work(world: World) -> list[Any]:
        folder = "project" if world.is_main else "unseen"
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        numbered = NumberedCheckpoints(project, world)
        with pytest.raises(ConfigurationError, match="contains checkpoint_0 to checkpoint_2 of an earlier start"):
            numbered.next_path(world)
        numbered.continue_after(run_dir / "elsewhere")
        found: list[Any] = [project.iteration]
        numbered.continue_after(run_dir / FOLDER / "checkpoint_0")
        numbered.check()
        return [*found, project.iteration, numbered.next_path(world), numbered.newest_first()]

    assert run_threads(2, work) == [[0, 3, run_dir / FOLDER / "checkpoint_3", []]] * 2
