"""Every sample is counted: data of every shape, read on 1 and 2 processes, killed inside an epoch, and resumed.

Each case is a real run that is killed by SIGKILL, and a second one that resumes from its checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.data.every_shape import CHECKPOINT, PAGE, SHAPES, Shape, ids, updated
from helpers.resume.faulting import Child, tell, told
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import free_port
from torch import Tensor, nn

from trainkit import Accelerator, Callback, TrainModule, set_seed

SAVED_AFTER = 2  # batches of the last epoch, on each process


SAVED = None  # the record of a save


def tell_rank(value: Any) -> None:
    """Append a record to the file of this process, where it survives the kill."""
    tell(value, f"samples-{os.environ.get('RANK', '0')}")


def record(stage: str, epoch: int, batch: Any) -> None:
    """Write down the samples of a batch."""
    tell_rank([stage, epoch, ids(batch)])


class Counting(TrainModule):
    """Records the samples of each batch, and kills its process one batch after the checkpoint."""

    def __init__(self, kill_in: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.kill_in = kill_in

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        record("train", self.current_epoch, batch)
        if self.current_epoch == self.kill_in and batch_idx == SAVED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        record("validation", self.current_epoch, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SaveInside(Callback):
    """Saves inside the epoch that will be killed."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == module.kill_in and batch_idx == SAVED_AFTER - 1:
            trainer.save_checkpoint(CHECKPOINT)
            tell_rank(SAVED)


def by_fit(shape: Shape, workers: int, resumed: bool, killed: bool) -> None:
    trainer = make_trainer(
        SaveInside(),
        accelerator="cpu",
        max_epochs=shape.epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
    )
    module = Counting(shape.epochs - 1 if killed else None)
    trainer.fit(module, shape.make(workers), shape.make(workers), ckpt_path=CHECKPOINT if resumed else None)


def by_own_loop(shape: Shape, workers: int, resumed: bool, killed: bool) -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, shape.make(workers), shape.make(workers))
    if resumed:
        accelerator.load_state(CHECKPOINT, resume_loaders=True)
    for epoch in range(train.epoch, shape.epochs):
        model.train()
        last = killed and epoch == shape.epochs - 1
        for number, batch in enumerate(train):
            if not accelerator.open_loaders.padding:
                record("train", epoch, batch)
            if last and number == SAVED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(model(torch.zeros(1, 1)).sum())
            optimizer.step()
            if last and number == SAVED_AFTER - 1:
                accelerator.save_state(CHECKPOINT)
                tell_rank(SAVED)
        model.eval()
        for batch in validation:
            if not accelerator.open_loaders.padding:
                record("validation", epoch, batch)
    accelerator.end_training()


WAYS = {"fit": by_fit, "own loop": by_own_loop}


def be_a_rank(rank: int, size: int, port: int, work: Any) -> None:
    torch.set_num_threads(1)
    if size > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    work()


def start(size: int, shape: Shape, way: str, workers: int, *, resumed: bool = False, killed: bool = False) -> str:
    """Run a program on some processes, in the working directory; returns what the first one printed."""
    port = free_port()
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(
                    lambda rank=rank: be_a_rank(rank, size, port, lambda: WAYS[way](shape, workers, resumed, killed)),
                    f"rank-{rank}-{'resumed' if resumed else 'begun'}",
                )
            )
            for rank in range(size)
        ]
        codes = [child.code for child in children]
        assert (-signal.SIGKILL in codes) if killed else not any(codes), [child.output for child in children]
        return children[0].output


def read(size: int, begun: list[list[Any]]) -> dict[tuple[str, int], Counter[int]]:
    """The samples of each epoch over all processes. What the killed run read after its checkpoint does not count.

    Args:
        size: Number of processes.
        begun: What each process of the killed run has recorded; empty: there was none.
    """
    found: dict[tuple[str, int], Counter[int]] = {}
    for rank in range(size):
        records = told(f"samples-{rank}")
        if begun:
            records = begun[rank][: begun[rank].index(SAVED)] + records[len(begun[rank]) :]
        for stage, epoch, samples in records:
            found.setdefault((stage, epoch), Counter()).update(samples)
    return found


@cache
def alone(name: str, way: str, folder: Path) -> dict[tuple[str, int], Counter[int]]:
    """The samples of a run that is one process and is not killed."""
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        start(1, SHAPES[name], way, 0)
        return read(1, [])
    finally:
        os.chdir(before)


CASES = [(name, *case) for name, shape in SHAPES.items() for case in product(WAYS, (1, 2), shape.workers)]


@pytest.mark.grid
@pytest.mark.parametrize("name, way, size, workers", CASES)
def test_each_sample(name: str, way: str, size: int, workers: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = SHAPES[name]
    begun = start(size, shape, way, workers, killed=True)
    records = [told(f"samples-{rank}") for rank in range(size)]
    printed = start(size, shape, way, workers, resumed=True)
    found = read(size, records)
    copies = size if shape.epoch.repeats and size > 1 else 1
    for (stage, epoch), samples in found.items():
        if shape.epoch.drawn is not None:
            assert samples.total() == shape.epoch.drawn * max(1, workers) * size
            continue
        if shape.epoch.samples is None:
            expected = alone(name, way, tmp_path_factory.getbasetemp() / f"alone-{hash((name, way))}")[stage, epoch]
        else:
            expected = Counter(shape.epoch.samples(epoch) * copies)
        if stage == "train" and epoch == shape.epochs - 1 and shape.resumed.told is not None:
            assert samples.total() == expected.total()
        else:
            assert samples == expected, (stage, epoch)
    assert sorted(found) == sorted((stage, epoch) for stage in ("train", "validation") for epoch in range(shape.epochs))
    told_of = shape.resumed.told or "does not continue where"
    assert (told_of in printed) == (shape.resumed.told is not None)
    if shape.resumed.told is None:
        assert "did not continue where its state_dict was saved" not in printed
    for text in (begun, printed):
        assert ((shape.epoch.repeats or "the same samples on each process") in text) == (copies > 1)


def test_the_table_of_the_documentation() -> None:
    """`python tests/helpers/data/every_shape.py` writes it."""
    assert PAGE.read_text() == updated(PAGE.read_text())
