"""Runs that are killed and resume, also on a different number of processes; see `parity.py` for what they train."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from helpers.runs.parity import Case, Record, Recorder, train
from helpers.worlds.worlds import run_world, start_world

from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint

__all__ = ["Journal", "journal", "killed", "resumed", "undisturbed"]


class Journal(Callback):
    """Writes a line about each micro-batch to a file immediately, so that it survives a kill of the process.

    Args:
        folder: Folder for the files.
        attempt: Number of the start.
        kill: (rank, optimizer step): the process of this rank kills itself before the first micro-batch of this step.
    """

    def __init__(self, folder: Path, attempt: int, kill: tuple[int, int] | None = None) -> None:
        self.folder, self.attempt, self.kill = folder, attempt, kill
        self._file: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._file = (self.folder / f"journal-{self.attempt}-{trainer.global_rank}.jsonl").open("w")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step - (trainer.accelerator.sync_gradients)
        line = {
            "step": step,
            "m": trainer.current_epoch * 10**6 + batch_idx * trainer.world_size + trainer.strategy.data_world.rank,
            "loss": float(outputs["loss"]).hex(),
            "ids": batch["id"].tolist(),
            "seen": [value.hex() for value in batch["x"].sum(1).tolist()],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.kill == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._file.close()
        with trainer.strategy.gathered_parameters(module):
            parameters = {name: p.detach().double().tolist() for name, p in module.named_parameters()}
        if trainer.is_global_zero:
            (self.folder / "parameters.json").write_text(json.dumps(parameters))


def journal(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(optimizer step, global micro-batch) → the last line about it, as a dict."""
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    attempts = sorted(folder.glob("journal-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    for path in attempts:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            lines[entry.pop("step"), entry.pop("m")] = entry
    return lines


def _run(case: Case, folder: Path, attempt: int, kill: tuple[int, int] | None, arguments: dict[str, Any]) -> Record:
    saving = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1, save_top_k=0)
    recorder = Recorder()
    train(
        case,
        Journal(folder, attempt, kill),
        saving,
        recorder,
        enable_checkpointing=True,
        ckpt_path="auto",
        default_root_dir=folder,
        **arguments,
    )
    return recorder.record


def undisturbed(case: Case, folder: Path, size: int, **arguments: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Train on `size` processes without interruption; returns the journal."""
    run_world(size, _run, case, folder, 0, None, arguments)
    return journal(folder)


def killed(case: Case, folder: Path, size: int, attempt: int, kill: tuple[int, int], **arguments: Any) -> list[Any]:
    """Train until one process kills itself; returns how each process ended."""
    world = start_world(size, _run, case, folder, attempt, kill, arguments)
    ends = world.ends(30)
    assert not any(fine for fine, _ in ends), ends
    assert ends[kill[0]] == (False, "ended with -9"), ends
    return ends


def resumed(case: Case, folder: Path, size: int, attempt: int, **arguments: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Resume on `size` processes and train to the end; returns the journal of all starts."""
    run_world(size, _run, case, folder, attempt, None, arguments)
    return journal(folder)


def parameters(folder: Path) -> list[torch.Tensor]:
    """The parameters at the end of training."""
    values = json.loads((folder / "parameters.json").read_text())
    return [torch.tensor(value, dtype=torch.float64) for value in values.values()]
