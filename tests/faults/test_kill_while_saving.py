"""SIGKILL while a checkpoint of 60 MB is written: the next start resumes, at most one save is lost, no partial files remain.

Half of the kills come from the process itself, right before one of the file operations of a save. The other kills come from
the test, when a random fraction of the bytes has been written.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.faulting import Child, checkpoints, left_over, tell, told
from helpers.resume.saving import saving
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Callback, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.reader import open_checkpoint

NUMBERS = 7_500_000  # in the parameter, and as many in the optimizer's state: 60 MB together
FOLDER = Path("runs") / "checkpoints"  # the same for all starts: the first process may be killed before its first save
# Audit events of the file operations of a save, in addition to opening files for writing. OPERATIONS is the number of all of
# them in one save, with the removal of the oldest checkpoint.
CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
OPERATIONS = 18


class Fat(TrainModule):
    """A module with 60 MB of state, in which each number shows the step at which it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMBERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.sum()  # its gradient is 1 everywhere

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=1.0)

    def is_of(self, step: int) -> bool:
        """Whether every number has its value after `step` steps: the checkpoint is complete and from one moment."""
        expected = -step * (step + 1) / 2
        [state] = self.trainer.optimizers[0].state.values() if step else [{"momentum_buffer": torch.zeros(1)}]
        return bool((self.weight == expected).all()) and bool((state["momentum_buffer"] == step).all())


class Blocking(Callback):
    """Makes every save blocking: it returns when the checkpoint is complete."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        save = trainer._save_policy.save
        trainer._save_policy.save = lambda *given, **options: save(*given, **{**options, "blocking": True})


class Saving(Callback):
    """Saves to one path after each step, which replaces the checkpoint at that path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


class Telling(Callback):
    """Reports the step at which the process starts and each save that it requests; can kill the process during a save.

    Args:
        save: Number of the save in which to kill the process, from 1; 0: never.
        operation: Number of the file operation before which to kill it, from 0. If the save has fewer operations, the kill
            comes before the first operation of the next save.
    """

    def __init__(self, save: int = 0, operation: int = 0) -> None:
        self.save, self.operation = save, operation
        self.saves = 0
        self.armed = False
        self.started = False
        self.counts: list[int] = []
        sys.addaudithook(self._operation)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.started = True
        start = trainer.global_step
        there = {"names": checkpoints(FOLDER), "left": left_over(FOLDER)} if FOLDER.is_dir() else {"names": [], "left": []}
        tell({"start": start, "right": module.is_of(start), **there})

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if not self.started:  # the trial save before training
            return
        self.saves += 1
        tell({"asked": trainer.global_step, "names": checkpoints(FOLDER) if FOLDER.is_dir() else []})
        self.counts.append(0)
        self.armed = 0 < self.save <= self.saves

    def _operation(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not self.counts or (event not in CHANGES and not writes):
            return
        if self.armed and (self.counts[-1] == self.operation or self.saves > self.save):
            os.kill(os.getpid(), signal.SIGKILL)
        self.counts[-1] += 1


def work(
    keep: int, blocking: bool, *, steps: int = -1, save: int = 0, operation: int = 0, path: Path | None = None
) -> Callable[[], Any]:
    """Returns a function that trains from the newest checkpoint and saves after each step."""

    def train() -> Any:
        telling = Telling(save, operation)
        saves = Saving(path) if path else ModelCheckpoint(FOLDER, every_n_train_steps=1, keep_last=keep)
        callbacks: list[Callback] = [telling, saves, *([Blocking()] if blocking else [])]
        trainer = saving(*callbacks, max_steps=steps, max_epochs=-1, enable_checkpointing=path is None)
        resumed = path if path is not None and path.exists() else None
        trainer.fit(Fat(), DataLoader(list(range(1000))), ckpt_path="auto" if path is None else resumed)
        assert trainer.lightning_module.is_of(trainer.global_step)
        return telling.counts

    return train


def start_of(child: Child, number: int) -> dict[str, Any]:
    """Wait for what process `number` reports when it starts."""
    return child.until(lambda: [event for event in told() if "start" in event][number:], "its start")[0]


def written(step: int) -> int | None:
    """Size in bytes of the unfinished checkpoint of a step; None if there is none."""
    sizes = None
    for partial in FOLDER.glob(f".step-{step:08d}.tmp-*"):
        try:
            sizes = sum(entry.stat().st_size for entry in os.scandir(partial))
        except OSError:  # the save has just finished
            sizes = None
    return sizes


def kill_while_writing(child: Child, step: int, share: float) -> None:
    """Kill the process when the fraction `share` of a step's checkpoint is on disk, or when the save has already finished."""

    def reached() -> bool:
        now = written(step)
        return (now is not None and now >= share * 8 * NUMBERS) or any(name >= f"step-{step:08d}" for name in names())

    def names() -> list[str]:
        return [name for name in os.listdir(FOLDER) if name.startswith("step-")]

    child.until(reached, f"the save of step {step}")
    child.kill()


def check_start(start: dict[str, Any], asked: int, keep: int) -> None:
    """Check what a process reported when it resumed after a kill; `asked`: step of the last save that was requested."""
    assert asked - 1 <= start["start"] <= asked, f"at most one save may be lost: {asked} was asked for; {start}"
    assert start["right"], "the state is that of one step"
    assert start["left"] == []
    assert len(start["names"]) <= keep + 1, "one more than is kept, if the kill came before the oldest was removed"


def kill_again_and_again(kills: int, keep: int, blocking: bool, seed: int) -> None:
    """Kill a run `kills` times while it saves; each new process must resume with at most one save lost."""
    draw = random.Random(seed)
    asked = 0
    for number in range(kills):
        save = draw.choice([1, 2, 2, 3])
        by_operation = draw.random() < 0.5
        operation, share = draw.randrange(OPERATIONS), draw.random()
        killing = {"save": save, "operation": operation} if by_operation else {}
        with Child(work(keep, blocking, **killing)) as child:
            start = start_of(child, number)
            check_start(start, asked, keep)
            if not by_operation:
                kill_while_writing(child, start["start"] + save, share)
            assert child.code == -signal.SIGKILL, child.output
        events = told()
        saves = [event for event in events[events.index(start) + 1 :] if "asked" in event]
        for event in saves[1:]:  # by then, the save before it was complete
            assert len(event["names"]) <= keep
        asked = saves[-1]["asked"] if saves else asked
    with Child(work(keep, blocking, steps=asked + 2)) as child:
        check_start(start_of(child, kills), asked, keep)
        assert max(child.answer) == OPERATIONS
    assert (len(checkpoints(FOLDER)), left_over(FOLDER)) == (keep, [])


@pytest.mark.parametrize("keep, blocking", [(1, False), (2, False), (1, True), (2, True)])
def test_killed_while_saving(keep: int, blocking: bool) -> None:
    kill_again_and_again(3, keep, blocking, seed=10 * keep + blocking)


@pytest.mark.slow
@pytest.mark.parametrize("keep, blocking", [(1, False), (2, False), (1, True), (2, True)])
def test_killed_while_saving_a_hundred_times(keep: int, blocking: bool) -> None:
    kill_again_and_again(25, keep, blocking, seed=100 * keep + blocking)


def kill_while_replacing(operations: list[int]) -> None:
    path = FOLDER / "mine"
    asked = 0
    for number, operation in enumerate(operations):
        with Child(work(1, True, save=2, operation=operation, path=path)) as child:
            start = start_of(child, number)
            assert child.code == -signal.SIGKILL, child.output
        assert start["right"]
        assert asked - 1 <= start["start"] <= asked
        open_checkpoint(path).verify()
        asked = start["start"] + 2
    assert asked > len(operations)


def test_killed_while_replacing() -> None:
    """After a kill, the checkpoint at a fixed path is either the complete old one or the complete new one."""
    kill_while_replacing(random.Random(7).sample(range(OPERATIONS), 3))


@pytest.mark.slow
def test_killed_at_each_operation_of_replacing() -> None:
    kill_while_replacing(list(range(OPERATIONS)))
