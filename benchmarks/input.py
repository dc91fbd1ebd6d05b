"""What reading batches costs, compared with a loop by hand over the same `DataLoader`.

    python benchmarks/input.py [--only shuffled weighted trainer_0 ...] [--repeats 5] [--chunks 16] [--json FILE]

Batches of 64 cheap samples, two ready tensors each, for a step of Linear(32, 64)-ReLU-Linear(64, 10) with AdamW, on one thread;
read in the process itself (`_0`) or by two workers (`_2`):

- shuffled: `DataLoader(shuffle=True)`.
- getitems: the same, with a dataset that has `__getitems__` and returns the samples of a batch at once.
- weighted: a `WeightedRandomSampler`.
- custom: a sampler of the user that computes each index when it is asked for it.
- batch_sampler: a batch sampler of the user.
- iterable: an `IterableDataset`, each worker of which reads its share.

`pairs.py` explains how it is measured; the clock is in the model's `forward`. The limits apply to processor time, in which that
of the workers counts: 1.10 without workers, 1.05 with two. Returns 1 if one is exceeded. Linux only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import Clock, Contender, adamw, argument_parser, compare
from report import Report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

KINDS = ("shuffled", "getitems", "weighted", "custom", "batch_sampler", "iterable")
BATCH, STEPS, DIFFERENT = 64, 100, 512
LIMITS = {0: 1.10, 2: 1.05}


# ------------------------------------------------------------------------------------------------ what is read


class Cheap(Dataset[Any]):
    """Ready samples, repeated."""

    def __init__(self, length: int) -> None:
        self._samples = [(torch.randn(32), torch.randint(10, ())) for _ in range(DIFFERENT)]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._samples[index % DIFFERENT]


class AtOnce(Cheap):
    """The same, for a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self._samples[index % DIFFERENT] for index in indices]


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, length: int) -> None:
        self._samples = Cheap(length)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, len(self._samples), step):
            yield self._samples[index]


class Computed(Sampler[int]):
    """Computes each index when it is asked for it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for place in range(self._length):
            yield place * 7919 % self._length


class ComputedBatches(Sampler[list[int]]):
    """Computes each batch when it is asked for it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self._length, BATCH):
            yield [place * 7919 % self._length for place in range(start, start + BATCH)]


def loader(kind: str, workers: int, length: int) -> DataLoader[Any]:
    """A loader over `length` samples."""
    data = Cheap(length)
    if kind == "getitems":
        return DataLoader(AtOnce(length), BATCH, shuffle=True, num_workers=workers)
    if kind == "weighted":
        weights = 1.0 + torch.arange(length) % 7
        return DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights.tolist(), length), num_workers=workers)
    if kind == "custom":
        return DataLoader(data, BATCH, sampler=Computed(length), num_workers=workers)
    if kind == "batch_sampler":
        return DataLoader(data, batch_sampler=ComputedBatches(length), num_workers=workers)
    if kind == "iterable":
        return DataLoader(Stream(length), BATCH, num_workers=workers)
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers)


# ------------------------------------------------------------------------------------------------ the loops


class Net(nn.Module):
    """The model, with the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.step()
        out: Tensor = self.layers(x)
        return out


def hand(batches: DataLoader[Any], clock: Clock) -> None:
    net = Net(clock)
    optimizer = adamw(net)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def trainer(batches: DataLoader[Any], clock: Clock) -> None:
    from trainkit import Trainer, TrainModule

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    Trainer(accelerator="cpu", max_epochs=1, **options).fit(Module(), batches)


def own_loop(batches: DataLoader[Any], clock: Clock) -> None:
    from trainkit import Accelerator

    accelerator, net = Accelerator(cpu=True), Net(clock)
    model, optimizer, batches = accelerator.prepare(net, adamw(net), batches)
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


LOOPS: dict[str, tuple[str, Callable[[DataLoader[Any], Clock], None]]] = {
    "hand": ("the loop by hand / itself", hand),
    "trainer": ("Trainer", trainer),
    "own_loop": ("Accelerator, own loop", own_loop),
}


def train(loop: str, workers: int, kind: str, clock: Clock) -> None:
    LOOPS[loop][1](loader(kind, workers, clock.batches * BATCH), clock)


CONTENDERS = {
    f"{loop}_{workers}": Contender(
        f"{title}, {workers} workers", partial(train, loop, workers), f"hand_{workers}", None if loop == "hand" else limit
    )
    for workers, limit in LIMITS.items()
    for loop, (title, _) in LOOPS.items()
}


# ------------------------------------------------------------------------------------------------ a process


def processor_time() -> float:
    """Processor time of this process and of its workers, whose threads copy batches, in seconds."""
    used = time.process_time()
    for worker in multiprocessing.active_children():
        for thread in Path(f"/proc/{worker.pid}/task").glob("*/schedstat"):
            used += int(thread.read_text().split()[0]) / 1e9
    return used


def work(arguments: argparse.Namespace) -> None:
    """Run one process."""
    workers = int(arguments.work.rpartition("_")[2])
    if not workers:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    clock = Clock(
        STEPS, arguments.chunks, arguments.turns, arguments.reports, cpu=processor_time if workers else time.process_time
    )
    CONTENDERS[arguments.work].train(arguments.model, clock)


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    arguments = argument_parser(__doc__, list(CONTENDERS), KINDS).parse_args()
    if arguments.work:
        work(arguments)
        return 0
    report = Report(batch=BATCH)
    compare(report, __file__, arguments, CONTENDERS, ranks=1, models=KINDS, steps=dict.fromkeys(KINDS, STEPS), clock="cpu")
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
