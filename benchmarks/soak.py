"""What a long run keeps: memory, objects, threads and open files over 100,000 optimizer steps.

    python benchmarks/soak.py [--only trainer own_loop] [--steps 100000] [--json FILE]

A perceptron, batches of 32. `Trainer` logs the loss in every step, writes it to a CSV file in every tenth, saves after every
500th, and validates after each epoch of 1,000 batches, which two workers of a new `DataLoader` iterator read. Your own training
loop with `Accelerator` saves and validates in the same steps. Each run has its own process, and is looked at 100 times: its
resident memory, the objects that the garbage collector knows after a full collection, its threads, its open files and its
child processes.

The growth is the median of the last tenth minus that of the second tenth: in the first, caches fill. Returns 1 if a run has
grown by more than the limits. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Column, Report, json_option
from resident import resident
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Callback, Trainer, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import CSVLogger

ROOT = Path(__file__).resolve().parent.parent
BATCH, EPOCH, SAVE_EVERY, LOOKS = 32, 1000, 500, 100
LIMITS = {"resident memory, MB": 8.0, "objects": 1000.0, "threads": 0.0, "open files": 0.0, "child processes": 0.0}


class Looks:
    """Looks at this process, a hundred times in a run of at least a thousand steps."""

    def __init__(self, steps: int) -> None:
        self._every = max(10, steps // LOOKS)  # a full collection takes as long as many steps
        self.found: dict[str, list[float]] = {name: [] for name in LIMITS}

    def step(self, number: int) -> None:
        """Call this after each optimizer step."""
        if number % self._every:
            return
        gc.collect()
        now = {
            "resident memory, MB": resident("VmRSS"),
            "objects": len(gc.get_objects()),
            "threads": len(os.listdir("/proc/self/task")),
            "open files": len(os.listdir("/proc/self/fd")),
            "child processes": len(multiprocessing.active_children()),
        }
        for name, value in now.items():
            self.found[name].append(value)


class Module(TrainModule):
    """A perceptron that logs its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(batches: int, workers: int = 0, shuffle: bool = False) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(BATCH * batches, 32), torch.randint(10, (BATCH * batches,)))
    return DataLoader(data, BATCH, shuffle=shuffle, num_workers=workers)


def train(steps: int, looks: Looks) -> None:
    """A run of `Trainer`."""

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            looks.step(trainer.global_step)

    Trainer(
        accelerator="cpu",
        max_steps=steps,
        log_every_n_steps=10,
        logger=CSVLogger("logs"),
        callbacks=[Look(), ModelCheckpoint("checkpoints", every_n_train_steps=SAVE_EVERY, save_top_k=1, monitor="loss")],
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader(min(EPOCH, steps), workers=2, shuffle=True), loader(10))


def own_loop(steps: int, looks: Looks) -> None:
    """Your own training loop."""
    accelerator, module = Accelerator(cpu=True), Module()
    net, optimizer, training, validation = accelerator.prepare(
        module.net, module.configure_optimizers(), loader(min(EPOCH, steps), workers=2, shuffle=True), loader(10)
    )
    done = 0
    while done < steps:
        for x, y in training:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done % SAVE_EVERY == 0:
                folder = Path(f"saved-{done // SAVE_EVERY % 2}")
                shutil.rmtree(folder, ignore_errors=True)
                accelerator.save_state(folder)
            looks.step(done)
            if done == steps:
                break
        with torch.no_grad():
            for x, y in validation:
                accelerator.gather_for_metrics(F.cross_entropy(net(x), y))


RUNS: dict[str, Callable[[int, Looks], None]] = {"trainer": train, "own_loop": own_loop}
TITLES = {"trainer": "Trainer", "own_loop": "Accelerator, own loop"}


def run(name: str, steps: int) -> dict[str, list[float]]:
    """A run in a process of its own; returns what was found at each look."""
    command = [sys.executable, __file__, "--run", name, f"--steps={steps}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, print, and return 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="some of the runs")
    parser.add_argument("--steps", type=int, default=100_000, help="optimizer steps of a run (default: 100000)")
    json_option(parser)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        torch.set_num_threads(1)
        looks = Looks(arguments.steps)
        with contextlib.redirect_stdout(sys.stderr):
            RUNS[arguments.run](arguments.steps, looks)
        print(json.dumps(looks.found))
        return 0
    report = Report(steps=arguments.steps)
    table = report.table("growth in a run", Column("after a tenth"), Column("at the end"), Column("growth"))
    for name in arguments.only:
        for what, values in run(name, arguments.steps).items():
            tenth = len(values) // 10
            early, late = statistics.median(values[tenth : 2 * tenth]), statistics.median(values[-tenth:])
            table.add(f"{TITLES[name]}: {what}", early, late, late - early, judged=late - early, most=LIMITS[what])
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
