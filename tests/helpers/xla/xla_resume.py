"""Trainings under XLA that are killed from outside and resume: `from helpers.xla.xla_resume import Life, journal, lived`."""

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
    """Writes down each row at once, so that a process that is killed leaves what it has done; and the parameters at the end.

    Args:
        folder: where to.
        attempt: the number of the start.
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
    """One training; what it does is in its folder.

    Attributes:
        folder: of its journals and checkpoints.
        samples: of the data set.
        batch_size: of a micro-batch.
        workers: of the loader.
        dropout: a share.
        arguments: of the Trainer.
        options: of the strategy.
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
    """The process, on as many devices as the configuration has unless another number is given."""
    life.folder.mkdir(exist_ok=True)
    return start_xla(live, kind, life, attempt, devices=count or devices(kind), env=QUICK)


def lived(kind: str, life: Life, attempt: int = 0, count: int | None = None) -> list[Any]:
    """To the end; the journal. `count` as in `start`; for DDP the processes."""
    life.folder.mkdir(exist_ok=True)
    if kind in KINDS:
        with start(kind, life, attempt, count) as run:
            run.result()
    else:
        start_world(count or 1, live, kind, life, attempt).results()
    return journal(life.folder)


def lives(kind: str, life: Life, kills: int, seed: int, workers: tuple[int, ...] = (0,), count: int | None = None) -> int:
    """Killed by SIGKILL after rows drawn by the seed, so often; the number of the attempt that is to end it."""
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
    """What was written of each row last, in order, or by one attempt; of a line that is not whole nothing."""
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
    """Those at the end."""
    return {name: torch.tensor(v) for name, v in json.loads((folder / "parameters.json").read_text()).items()}


def by_update(lines: list[Any], what: int) -> dict[int, list[Any]]:
    """For each update what its rows had of `ids` (2) or `seen` (3), in order."""
    found: dict[int, list[Any]] = {}
    for line in lines:
        found.setdefault(line[1], []).extend(line[what])
    return found
