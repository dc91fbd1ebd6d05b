"""The state of an iterable or a sampler: where it begins an evaluation, and where it resumes after the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.data.dealt import heard, joined, prepared
from helpers.data.every_shape import Continuing, HasState, Interrupted, Items, Reader, ids
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from trainkit import CombinedLoader, TrainModule
from trainkit.data import PreparedLoader
from trainkit.distributed.world import World
from trainkit.micro_batch import MicroBatchKind


class Sized(Continuing):
    """A stream with a state and a length, so it is not asked for its end."""

    def __len__(self) -> int:
        return len(self.numbers)


class Slotted(HasState):
    """A loader of your own with a state, which cannot be referenced weakly."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < len(self):
            self.next += 1
            yield torch.tensor([self.next - 1])
        self.next = 0


class Batched(BatchSampler):
    """A batch sampler of your own over a sampler with a state."""


LOADERS: dict[str, Any] = {
    "stream": lambda: DataLoader(Continuing(), batch_size=2),
    "stream with a length": lambda: DataLoader(Sized(), batch_size=1),
    "loader of your own": Slotted,
    "sampler": lambda: DataLoader(Items(), batch_size=1, sampler=Interrupted(23)),
    "combined": lambda: CombinedLoader([DataLoader(Continuing(), batch_size=2)], "max_size"),
    "batch sampler": lambda: DataLoader(Items(), batch_sampler=Batched(Interrupted(23), 2, False)),
}


class Validated(TrainModule):
    """Records the samples of each validation, of which the sanity check is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def on_validation_start(self) -> None:
        self.seen.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen[-1].extend(ids(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("limit", [1.0, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_each_validation_reads_the_same(name: str, limit: float | int) -> None:
    """A validation begins at the beginning, although the sanity check or a limit has ended the one before early."""
    module = Validated()
    trainer = make_trainer(
        accelerator="cpu", max_epochs=2, num_sanity_val_steps=2, limit_val_batches=limit, enable_checkpointing=False
    )
    trainer.fit(module, [torch.zeros(1)], LOADERS[name]())
    sanity, first, second = module.seen
    assert first == second == list(range(len(first)))
    assert first[: len(sanity)] == sanity
    assert len(first) == (23 if limit == 1.0 else 6 if name in ("stream", "combined", "batch sampler") else 3)


def samples(loader: PreparedLoader) -> list[int]:
    """The samples of the next epoch on this process."""
    return [number for micro in loader.next_epoch() if micro.kind is MicroBatchKind.DATA for number in ids(micro.batch)]


def parts(lengths: tuple[int, int]) -> Any:
    """On one of two processes: what a loader of parts reads that resumes after the last batch of an epoch."""
    world = joined()
    numbers = [range(lengths[0]), range(100, 100 + lengths[1])][world.rank]

    def loader() -> Any:
        return prepared(DataLoader(Continuing(numbers), batch_size=2), world)

    one, begun = loader(), 0
    for begun, _ in enumerate(one.next_epoch(), 1):
        if begun == -(-max(lengths) // 2):
            break
    position = one.gather_position(one.state_dict())
    other = loader()
    other.load_state_dict(position)
    return [samples(other) for _ in range(2)]


@pytest.mark.parametrize("lengths", [(12, 11), (11, 12), (11, 11), (12, 12), (3, 12)])
def test_parts_resume_after_the_last_batch(lengths: tuple[int, int]) -> None:
    """The state of one part may be that after its end, as its last batch was short, and that of the other not."""
    found = run_world(2, parts, lengths)
    assert found == [[[], list(range(lengths[0]))], [[], list(range(100, 100 + lengths[1]))]]


def ended_part(kind: type[Reader]) -> list[int]:
    """On one of two processes: what an own loop trains on that resumes after the part of the first process has ended."""
    world = joined()
    numbers = [range(3), range(100, 109)][world.rank]

    def loader() -> PreparedLoader:
        return prepared(DataLoader(kind(numbers), batch_size=1), world, pads=True)

    one = loader()
    for _ in islice(one.next_epoch(), 6):
        pass
    position = one.gather_position(one.state_dict())
    other = loader()
    other.load_state_dict(position)
    return samples(other)


@pytest.mark.parametrize("kind", [Reader, Continuing])
def test_a_part_that_has_ended_is_padded_after_a_resume(kind: type[Reader]) -> None:
    """Its process has no batch left in the epoch, but takes part in the steps of the other one."""
    first, second = run_world(2, ended_part, kind)
    assert (first, second) == ([], [106, 107, 108])


def epochs(length: int, limit: int | None) -> list[list[int]]:
    """On one of several processes: the samples of two epochs of a sampler with a state."""
    world = joined()
    loader = prepared(DataLoader(Items(), batch_size=1, sampler=Interrupted(length)), world, limit=limit)
    return [samples(loader) for _ in range(2)]


@pytest.mark.parametrize("length, limit, second", [(9, None, range(9)), (8, None, range(8)), (9, 2, range(4, 8))])
def test_a_sampler_with_a_state_is_at_the_same_place_on_all_processes(length: int, limit: int | None, second: range) -> None:
    """All draw what one of them uses: the next epoch has each sample once, and continues after a limit as on one process."""
    found = run_world(2, epochs, length, limit)
    assert sorted(found[0][0] + found[1][0]) == list(range(4 if limit else length))
    assert sorted(found[0][1] + found[1][1]) == list(second)


UNSAVED = {
    "sampler": (
        lambda: DataLoader(Items(), batch_size=1, sampler=Interrupted(23)),
        "Interrupted has a state, which a checkpoint",
    ),
    "combined": (
        lambda: CombinedLoader([DataLoader(Continuing(), batch_size=2), [torch.zeros(1)] * 3], "min_size"),
        "Continuing has a state, which a checkpoint does not contain inside a CombinedLoader",
    ),
    "whole": (lambda: CombinedLoader([DataLoader(Continuing(), batch_size=2)], "max_size"), None),
    "map": (lambda: DataLoader(Items(), batch_size=1), None),
}


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", UNSAVED)
def test_a_state_that_no_checkpoint_contains(name: str, epoch: int) -> None:
    """It is said if the resumed epoch would have begun where the one before stopped."""
    make, text = UNSAVED[name]
    limit = 4 if name in ("sampler", "map") else None
    one, other = prepared(make(), World(), limit=limit), prepared(make(), World(), limit=limit)
    with heard() as texts:
        other.load_state_dict(one.position(epoch, 2))
    told = [each for each in texts if "has a state" in each]
    assert len(told) == (text is not None and epoch == 1)
    assert all(str(text) in each for each in told)
