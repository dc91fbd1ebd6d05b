"""The training script of the tests with two hosts: `two_hosts.py '{"folder": …}'` with the fields of `Task`.

At the gate (before an optimizer step of the first start), processes wait until the test has disturbed the hosts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.resume.elastic import Journal
from helpers.runs.parity import Case, train

from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.distributed.channel import Channel

__all__ = ["CASE", "Task"]

CASE = Case(samples=48, batch_size=2, window=4)  # six optimizer steps in each of two epochs


@dataclass
class Task:
    """Arguments of the script.

    Attributes:
        folder: Folder of the run.
        start: Number of this start by the test; each restart by the launcher adds one.
        gate: Optimizer step before which the processes of a first start wait for a file `open` in the folder; None: no wait.
        patience: Seconds without a heartbeat after which the other host counts as lost.
    """

    folder: str
    start: int = 0
    gate: int | None = None
    patience: float = 3.0


class Gate(Callback):
    """Writes a file with the rank, world size and node of this process, and waits at the gate."""

    def __init__(self, folder: Path, attempt: int, before: int | None) -> None:
        self.folder, self.attempt, self.before = folder, attempt, before

    def on_train_start(self, trainer: Any, module: Any) -> None:
        world = trainer.strategy.world
        facts = {
            name: getattr(world, name) for name in ("rank", "size", "local_rank", "local_size", "node", "nodes", "restarts")
        }
        self._write(f"world-{self.attempt}-{world.rank}", {**facts, "host": os.uname().nodename, "step": trainer.global_step})

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.before:
            self.before = None
            self._write(f"gate-{self.attempt}-{trainer.global_rank}", {})
            while not (self.folder / "open").exists():
                time.sleep(0.01)

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        file = self.folder / f"{name}.tmp"
        file.write_text(json.dumps(facts))
        file.rename(self.folder / name)


def main(task: Task) -> None:
    """Train."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    folder, attempt = Path(task.folder), task.start + restarts
    defaults = Channel.open.__kwdefaults__
    assert defaults is not None
    assert "silence_limit" in defaults
    defaults["silence_limit"] = task.patience
    train(
        CASE,
        Journal(folder, attempt),
        Gate(folder, attempt, None if restarts else task.gate),
        ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1),
        enable_checkpointing=True,
        ckpt_path="auto",
        default_root_dir=folder,
    )


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
