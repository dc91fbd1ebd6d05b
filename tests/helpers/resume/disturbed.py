"""A run on several processes that tests signal or kill at random moments, and that resumes each time.

It is also a script for `trainkit launch`: `disturbed.py '{"folder": "runs", "workers": 2}'`, with the fields of `Training`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.launch.members import as_script
from helpers.patience import PATIENCE
from helpers.resume.elastic import Journal
from helpers.runs.parity import Noisy, RegressionModule
from helpers.worlds.worlds import World, start_world
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.folder import candidates, folders_below, list_checkpoints
from trainkit.checkpoint.lock import LOCK
from trainkit.checkpoint.reader import Checkpoint, open_checkpoint
from trainkit.loggers import JSONLLogger

__all__ = [
    "EPOCHS",
    "MICRO_BATCHES",
    "SCRIPT",
    "Signal",
    "Started",
    "Training",
    "drawn_moments",
    "end_of",
    "lines",
    "logged",
    "newest",
    "started",
    "wait_until",
]

EPOCHS, SAMPLES, BATCH = 3, 98, 4
MICRO_BATCHES = 25  # in an epoch: the last accumulation window has only one, so one process has none
SCRIPT = str(Path(__file__).absolute())


class Normed(RegressionModule):
    """A `RegressionModule` with BatchNorm and a validation set."""

    def __init__(self) -> None:
        super().__init__("adamw", schedule=True)
        self.net.insert(1, nn.BatchNorm1d(16))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("validated", batch["x"].mean(), on_step=True)  # a repeated validation must not log a row twice

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(27), BATCH)


class Diary(Journal):
    """A `Journal` that also records the time after each micro-batch of the main process, and the state at the end."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self._tell_time(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        super().on_train_end(trainer, module)
        state = {name: value.double().tolist() for name, value in module.state_dict().items()}
        metrics = {name: float(value).hex() for name, value in trainer.callback_metrics.items()}
        end = {"state": state, "metrics": metrics, "step": trainer.global_step}
        (self.folder / f"end-{trainer.global_rank}.json").write_text(json.dumps(end))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._tell_time(trainer)

    def _tell_time(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            with (self.folder / "clock").open("a") as clock:
                clock.write(f"{time.monotonic()}\n")


class Ballast(Callback):
    """A callback with a large state, so that each save takes a while."""

    def __init__(self, numbers: int = 2_000_000) -> None:
        self.numbers = torch.arange(numbers, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["numbers"].equal(self.numbers)


class Signal(Callback):
    """One process sends itself a signal in a hook, once.

    Args:
        hook: Name of the hook.
        rank: Rank of the process.
        number: Number of the signal.
        received: Whether the run must already have received a signal, in any process, for this one to be sent.
    """

    def __init__(self, hook: str, rank: int, number: int, *, received: bool = False) -> None:
        self.hook, self.rank, self.number, self.received = hook, rank, number, received
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != self.hook}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        setattr(self, self.hook, self._send)

    def _send(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and self.number and bool(trainer._run.signals.received) == self.received:
            number, self.number = self.number, 0
            os.kill(os.getpid(), number)


@dataclass
class Training:
    """A run that resumes from the newest checkpoint in its folder.

    Attributes:
        folder: Folder for everything that it writes.
        workers: `num_workers` of the DataLoader.
        window: Number of micro-batches in an accumulation window, over all processes.
        keep: Number of checkpoints to keep.
        ckpt_path: Argument of `fit`.
        devices: Number of processes that the script starts, if no launcher does.
        attempt: Number of the first start, in the script.
    """

    folder: str
    workers: int = 0
    window: int = 4
    keep: int = 2
    ckpt_path: str | None = "auto"
    devices: int | str = "auto"
    attempt: int = 0

    def go(self, attempt: int, *more: Any) -> None:
        """Train in this process, which may be one of several.

        Args:
            attempt: Number of the start.
            more: More callbacks.
        """
        trainer = Trainer(
            accelerator="cpu",
            precision="64-true",
            seed=5,
            max_epochs=EPOCHS,
            global_batch_size=BATCH * self.window,
            gradient_clip_val=1.0,
            val_every_n_steps=3,
            default_root_dir=self.folder,
            logger=JSONLLogger(f"{self.folder}/logs"),
            log_every_n_steps=1,
            callbacks=[
                Diary(Path(self.folder), attempt),
                Ballast(),
                ModelCheckpoint(every_n_train_steps=1, keep_last=self.keep),
                ModelCheckpoint(monitor="val_loss", every_n_epochs=1, keep_last=1),
                *more,
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=1,
            devices=self.devices,
        )
        loader = DataLoader(Noisy(SAMPLES), BATCH, shuffle=True, num_workers=self.workers)
        trainer.fit(Normed(), loader, ckpt_path=self.ckpt_path)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


# -------------------------------------------------------------------------------------------------------- what it left


def lines(folder: str | Path, rank: int = 0) -> int:
    """Number of micro-batches that a process has recorded, in all starts."""
    return sum(path.read_bytes().count(b"\n") for path in Path(folder).glob(f"journal-*-{rank}.jsonl"))


def end_of(folder: str | Path, size: int = 2) -> dict[str, Any]:
    """The state dict, metrics and step at the end of the run, which must be the same on all processes."""
    ends = [json.loads((Path(folder) / f"end-{rank}.json").read_text()) for rank in range(size)]
    assert all(end == ends[0] for end in ends), "the processes have drifted apart"
    return ends[0]


def logged(folder: str | Path) -> list[dict[str, Any]]:
    """What the logger has written in the last run; a start that was killed before its first checkpoint was a run of its own."""
    files = sorted(Path(folder).rglob("metrics.jsonl"), key=lambda path: int(path.parent.name.split("_")[1]))
    return [json.loads(line) for line in files[-1].read_text().splitlines()]


def newest(folder: str | Path) -> Checkpoint:
    """The newest checkpoint. All checkpoints must be valid, without partial files next to them, and the folder unlocked."""
    folder = candidates(*folders_below(folder))[0].path.parent
    found = list_checkpoints(folder)
    assert not [one.problem for one in found if one.problem is not None]
    left = [name for name in os.listdir(folder) if name.startswith(".") and name != LOCK]
    assert not left, left
    assert (folder / LOCK).read_bytes() == b"", "a process still holds the folder"
    assert found, "no checkpoint at all"
    checkpoint = open_checkpoint(found[0].path)
    checkpoint.verify()
    return checkpoint


def drawn_moments(draw: random.Random, folder: str | Path, number: int, rows: int) -> list[tuple[int, float]]:
    """Random moments from the first optimizer step of an undisturbed run to its end.

    Args:
        draw: The random generator.
        folder: Folder of the undisturbed run.
        number: Number of moments.
        rows: Number of micro-batches of a process in an optimizer step.

    Returns:
        The moments in order, each as (number of micro-batches that the main process had done, seconds since the last of them).
    """
    clock = [float(line) for line in (Path(folder) / "clock").read_text().splitlines()]
    moments = sorted(draw.uniform(clock[rows - 1], clock[-1]) for _ in range(number))
    done = [sum(then <= moment for then in clock) for moment in moments]
    return [(batches, moment - clock[batches - 1]) for batches, moment in zip(done, moments, strict=True)]


# ----------------------------------------------------------------------------------------- processes started by a test


def _go(training: Training, attempt: int, more: Sequence[Any]) -> None:
    """In a process of a `World`: train like a script, in a new session."""
    os.setsid()
    training.folder = os.path.abspath(training.folder)
    os.chdir(training.folder)
    as_script(_body, training, attempt, more)


def _body(training: Training, attempt: int, more: Sequence[Any]) -> None:
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        training.go(attempt, *more)
    except KeyboardInterrupt:
        sys.exit(130)


class Started:
    """Two or more processes that train.

    Attributes:
        world: The processes.
        pids: Their process ids.
    """

    def __init__(self, training: Training, attempt: int, size: int, more: Sequence[Any]) -> None:
        self.folder, self.size = Path(training.folder), size
        self.world: World = start_world(size, _go, training, attempt, list(more))
        self.pids = [process.pid or 0 for process in self.world.processes]

    @property
    def output(self) -> str:
        """The output of the processes, in all starts."""
        return (self.folder / "terminal.txt").read_text()

    def ended(self) -> bool:
        """Whether at least one process has exited."""
        return any(not process.is_alive() for process in self.world.processes)

    def signal(self, rank: int, number: int, group: bool = False) -> None:
        """Send a signal to one process; with `group`, to its DataLoader workers too."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pids[rank], number)

    def codes(self, seconds: float = PATIENCE) -> list[int]:
        """Wait until all processes have exited, at most `seconds`; returns their exit codes."""
        deadline = time.monotonic() + seconds
        for process in self.world.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.world.processes) if process.is_alive()]
        if hung:
            for rank in hung:
                self.signal(rank, signal.SIGUSR2)  # makes it print its stacks
            time.sleep(1.0)
        assert not hung, f"ranks {hung} have not ended after {seconds} s:\n{self.output}"
        return [process.exitcode or 0 for process in self.world.processes]


@contextlib.contextmanager
def started(training: Training, attempt: int = 0, size: int = 2, more: Sequence[Any] = ()) -> Iterator[Started]:
    """Start `size` processes that train; at the end, kill those that still run."""
    Path(training.folder).mkdir(exist_ok=True)
    running = Started(training, attempt, size, more)
    try:
        yield running
    finally:
        running.world.kill()


def wait_until(condition: Callable[[], Any], what: Callable[[], str], seconds: float = PATIENCE) -> Any:
    """Wait until the condition holds; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.002)
    return found


def main(text: str) -> None:
    """Run the script: report the process id, then train."""
    training = Training(**json.loads(text))
    attempt = training.attempt + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if "RANK" in os.environ:
        new = Path(training.folder) / f"new-{attempt}-{os.environ['RANK']}"
        new.write_text(str(os.getpid()))
        new.rename(new.with_name(f"pid-{attempt}-{os.environ['RANK']}"))
    training.go(attempt)


if __name__ == "__main__":
    main(sys.argv[1])
