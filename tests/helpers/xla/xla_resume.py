"""Runs on XLA that a test kills and resumes: `from helpers.xla.xla_resume import Life, journal, lived`."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from helpers.worlds.worlds import start_world
from helpers.xla.xla_cases import KINDS, QUICK, Net, Numbers, devices, quiet
from helpers.xla.xla_runs import start_xla
from torch.utils.data import DataLoader

from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint

__all__ = ["Life", "by_update", "journal", "lived", "lives", "parameters"]


class Journal(Callback):
    """Writes a line about each micro-batch to a file immediately, so that it survives a kill; and the parameters at the end.

    Args:
        folder: Folder for the files.
        attempt: Number of the start.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self.folder, self.attempt, self._file = folder, attempt, None
        self._seen: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._file = (self.folder / f"journal-{self.attempt}-{trainer.global_rank}.jsonl").open("w")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._seen = [batch["id"].tolist(), [value.hex() for value in batch["x"].cpu().double().sum(1).tolist()]]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        update = trainer.global_step - trainer.accelerator.sync_gradients
        place = [trainer.current_epoch, batch_idx, trainer.global_rank]
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        line = [place, update, *self._seen, float(outputs["loss"]).hex(), float(rate).hex()]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        parameters = {name: p.detach().cpu().double().flatten().tolist() for name, p in module.named_parameters()}
        (self.folder / "parameters.json").write_text(json.dumps(parameters))


@dataclass(frozen=True)
class Life:
    """A run, over all its starts.

    Attributes:
        folder: Folder for its journals and checkpoints.
        samples: Number of samples of the dataset.
        batch_size: Number of samples in a micro-batch.
        workers: `num_workers` of the DataLoader.
        dropout: Dropout probability.
        arguments: Arguments of the Trainer.
        options: Arguments of the strategy.
    """

    folder: Path
    samples: int = 75
    batch_size: int = 2
    workers: int = 0
    dropout: float = 0.2
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def falling(step: int) -> float:
    return max(0.0, 1.0 - step / 18)


def live(kind: str, life: Life, attempt: int) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    trainer = quiet(
        kind,
        Journal(life.folder, attempt),
        ModelCheckpoint(dirpath=life.folder / "checkpoints", every_n_train_steps=2, save_top_k=0),
        options=life.options,
        default_root_dir=life.folder,
        enable_checkpointing=True,
        **{"max_epochs": 2, "gradient_clip_val": 1.0, **life.arguments},
    )
    data = DataLoader(Numbers(life.samples, noise=True), life.batch_size, shuffle=True, num_workers=life.workers)
    trainer.fit(Net("adamw", falling, dropout=life.dropout), data, DataLoader(Numbers(6), life.batch_size), ckpt_path="auto")


def start(kind: str, life: Life, attempt: int, count: int | None = None) -> Any:
    """Start a process that trains, on `count` devices; default: the number of devices of the configuration."""
    life.folder.mkdir(exist_ok=True)
    return start_xla(live, kind, life, attempt, devices=count or devices(kind), env=QUICK)


def lived(kind: str, life: Life, attempt: int = 0, count: int | None = None) -> list[Any]:
    """Train to the end; returns the journal. `count`: number of devices, or of processes for strategies other than XLA."""
    life.folder.mkdir(exist_ok=True)
    if kind in KINDS:
        with start(kind, life, attempt, count) as run:
            run.result()
    else:
        start_world(count or 1, live, kind, life, attempt).results()
    return journal(life.folder)


def lives(kind: str, life: Life, kills: int, seed: int, workers: tuple[int, ...] = (0,), count: int | None = None) -> int:
    """Start the run `kills` times and kill it after a random number of micro-batches; returns the number of the next start."""
    draw = random.Random(seed)
    for attempt in range(kills):
        rows = draw.randrange(2, 6)
        path = life.folder / f"journal-{attempt}-0.jsonl"
        with start(kind, replace(life, workers=workers[attempt % len(workers)]), attempt, count) as run:
            run.until(lambda path=path, rows=rows: path.exists() and path.read_text().count("\n") >= rows, f"row {rows}")
            run.signal(signal.SIGKILL)
            assert run.end() == (False, f"ended with -{int(signal.SIGKILL)}"), f"attempt {attempt}"
    return kills


def journal(folder: Path, attempt: int | None = None) -> list[Any]:
    """The last line about each micro-batch, of all starts or of one, in order; incomplete lines are skipped."""
    lines: dict[tuple[int, ...], Any] = {}
    number = "*" if attempt is None else attempt
    paths = sorted(folder.glob(f"journal-{number}-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    for path in paths:
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                line = json.loads(text)
                lines[tuple(line[0])] = line
    return [lines[place] for place in sorted(lines)]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters at the end."""
    return {name: torch.tensor(v) for name, v in json.loads((folder / "parameters.json").read_text()).items()}


def by_update(lines: list[Any], what: int) -> dict[int, list[Any]]:
    """Optimizer step → the sample indices (`what=2`) or sums of inputs (`what=3`) of its micro-batches, in order."""
    found: dict[int, list[Any]] = {}
    for line in lines:
        found.setdefault(line[1], []).extend(line[what])
    return found
