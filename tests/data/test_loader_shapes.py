"""Loaders of every shape, in `fit` and in your own training loop: the samples that come, and how often a source is asked.

`len()` of a loader and every limit are upper bounds that the loop itself enforces, and it never asks for more than it uses.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from typing import Any, NamedTuple

import pytest
import torch
from helpers.data.dealt import Alike, heard, joined, prepared
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info
from torchdata import nodes

from trainkit import Accelerator, CombinedLoader, TrainModule, set_seed
from trainkit.data.combined import iterates_itself
from trainkit.distributed.world import World
from trainkit.errors import DataError, EmptyLoaderError

EPOCHS = 2


class Asked:
    """How often a source was asked, by any process."""

    def __init__(self) -> None:
        self.counter = multiprocessing.get_context("fork").Value("i", 0)

    def once(self) -> None:
        with self.counter.get_lock():
            self.counter.value += 1


def batch_of(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


class Numbers(Asked):
    """Yields batches of one number each, `yielded` of them (`None`: endlessly), and states that there are `stated`."""

    def __init__(self, stated: int, yielded: int | None = None) -> None:
        super().__init__()
        self.stated, self.yielded = stated, yielded

    def __len__(self) -> int:
        return self.stated

    def __iter__(self) -> Iterator[Tensor]:
        for number in islice(count(), self.yielded):
            self.once()
            yield batch_of(number)


class Strict(Numbers):
    """Two loaders read together, which may not be asked once more than the longer one has batches."""

    def __iter__(self) -> Iterator[Tensor]:
        for number, _ in zip(range(self.stated), cycle((0, 1)), strict=True):
            self.once()
            yield batch_of(number)


class ListLike(list[Tensor], Asked):  # type: ignore[misc]
    """A list whose items are loaded when they are needed."""

    def __init__(self, stated: int) -> None:
        list.__init__(self)
        Asked.__init__(self)
        self.stated = stated

    def __len__(self) -> int:
        return self.stated

    def __iter__(self) -> Iterator[Tensor]:
        return Numbers.__iter__(self)  # type: ignore[arg-type]

    yielded = None


class Stream(IterableDataset[Tensor], Asked):
    """A stream of numbers, `yielded` of them, of which each worker reads its part; it states that there are `stated`."""

    def __init__(self, stated: int, yielded: int | None = None) -> None:
        Asked.__init__(self)
        self.stated, self.yielded = stated, yielded

    def __len__(self) -> int:
        return self.stated

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in islice(count(), first, self.yielded, step):
            self.once()
            yield batch_of(number)[0]


class Fetched(Dataset[Tensor], Asked):
    """A map-style dataset that counts what is fetched."""

    def __init__(self, length: int) -> None:
        Asked.__init__(self)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.once()
        return batch_of(index)[0]


class Repeated:
    """A sampler that begins again and again, as that of timm and other image projects."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader):
    """The multi-epoch loader of image projects: its workers are started once, and its batch sampler begins again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeated(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class EndlessLoader(DataLoader):
    """A `DataLoader` that begins again and again in one epoch."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


class EndlessSampler(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class EndsEarly(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), 8)


class Shape(NamedTuple):
    """A loader, and the batches of an epoch."""

    make: Callable[[], Any]
    batches: list[list[int]]
    told: str | None = None
    whole: bool = True  # on several processes, each asks for the batches of all


def pairs(numbers: range | list[int]) -> list[list[int]]:
    return [list(numbers[place : place + 2]) for place in range(0, len(numbers), 2)]


def singles(length: int) -> list[list[int]]:
    return [[number] for number in range(length)]


STATED_WRONGLY = "Stream states 8 samples in its __len__, so each epoch ends after 4 batches"
SHAPES = {
    "endless iterable": Shape(lambda: Numbers(6), singles(6)),
    "zip of loaders": Shape(lambda: Strict(6), singles(6)),
    "list-like": Shape(lambda: ListLike(6), singles(6)),
    "iterable that ends early": Shape(
        lambda: Numbers(6, 4), singles(4), told="Numbers ended after 4 batches, but its __len__ states 6"
    ),
    "stream": Shape(
        lambda: DataLoader(Stream(12, 12), 2), pairs(range(12)), told="each epoch ends after 6 batches, and nothing is read"
    ),
    "stream that shows its end": Shape(lambda: DataLoader(Stream(11, 11), 2), [*pairs(range(10)), [10]]),
    "stream longer than it states": Shape(lambda: DataLoader(Stream(8, 12), 2), pairs(range(8)), told=STATED_WRONGLY),
    "endless stream, two workers": Shape(
        lambda: DataLoader(Stream(8), 2, num_workers=2), [[0, 2], [1, 3], [4, 6], [5, 7]], told=STATED_WRONGLY
    ),
    "stream that ends early": Shape(
        lambda: DataLoader(Stream(12, 8), 2), pairs(range(8)), told="Stream ended after 4 batches, but its __len__ states 6"
    ),
    "class that begins again": Shape(lambda: EndlessLoader(Fetched(8), 2), pairs(range(8))),
    "multi-epoch loader": Shape(lambda: MultiEpochs(Fetched(8), 2), pairs(range(8))),
    "endless sampler": Shape(lambda: DataLoader(Fetched(8), 2, sampler=EndlessSampler(range(8))), pairs(range(8)), whole=False),
    "sampler that ends early, two workers": Shape(
        lambda: DataLoader(Fetched(12), batch_sampler=BatchSampler(EndsEarly(range(12)), 2, False), num_workers=2),
        pairs(range(8)),
        told="EndsEarly ended after 4 batches, but its __len__ states 6",
        whole=False,
    ),
    "combined, shortest": Shape(lambda: CombinedLoader([Numbers(6)], "min_size"), singles(6)),
    "combined, one after another": Shape(lambda: CombinedLoader([Numbers(6)], "sequential"), singles(6)),
}


def asked_of(source: Any) -> int:
    """How often the source was asked."""
    if isinstance(source, CombinedLoader):
        return sum(asked_of(part) for part in source.flattened)
    return int(getattr(source, "dataset", source).counter.value)


class Module(TrainModule):
    """Records the samples of each training batch and of each evaluated batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "evaluation": []}

    def record(self, stage: str, batch: Any) -> Tensor:
        (batch,) = batch if isinstance(batch, list) else (batch,)
        self.seen[stage].append(batch[:, 0].int().tolist())
        return self.layer(batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.record("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record("evaluation", batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Found(NamedTuple):
    trained: list[list[int]]
    asked: int
    validated: list[list[int]]
    asked_to_validate: int
    told: list[str]


def by_fit(shape: str, limit: int | None) -> Found:
    """Two epochs with validation; `limit` counts the micro-batches of this process."""
    train, validation, module = SHAPES[shape].make(), SHAPES[shape].make(), Module()
    trainer = make_trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        limit_train_batches=limit,
        limit_val_batches=limit,
        enable_checkpointing=False,
    )
    with heard() as told:
        trainer.fit(module, train, validation)
    return Found(module.seen["train"], asked_of(train), module.seen["evaluation"], asked_of(validation), told)


def by_own_loop(shape: str) -> Found:
    train, validation, module = SHAPES[shape].make(), SHAPES[shape].make(), Module()
    with heard() as told:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(module.layer, module.configure_optimizers(), train)
        evaluated = accelerator.prepare(validation)
        for _ in range(EPOCHS):
            model.train()
            for batch in loader:
                if not accelerator.open_loaders.padding:
                    module.record("train", batch)
                accelerator.backward(model(batch[0] if isinstance(batch, list) else batch).mean())
                optimizer.step()
            model.eval()
            for batch in evaluated:
                module.record("evaluation", batch)
        accelerator.end_training()
    return Found(module.seen["train"], asked_of(train), module.seen["evaluation"], asked_of(validation), told)


def _is_map_style(source: Any) -> bool:
    return isinstance(source, DataLoader) and isinstance(source.dataset, Fetched) and not iterates_itself(source)


def check(shape: Shape, by_rank: list[Found], limit: int | None = None, notices: int = 1) -> None:
    """Each process saw its batches once in each epoch, and its source was not asked for more than was used.

    A wrong length leads to one notice in a fit, and to one for each prepared loader.
    """
    size = len(by_rank)
    batches = shape.batches if limit is None else shape.batches[: limit * size]
    for rank, found in enumerate(by_rank):
        mine = batches[rank::size]
        assert found.trained == mine * EPOCHS
        assert found.validated == mine * EPOCHS
        used = EPOCHS * sum(map(len, batches if shape.whole else mine))
        used += 3 if size > 1 and _is_map_style(shape.make()) else 0  # to compare the datasets
        assert (found.asked, found.asked_to_validate) == (used, used)
    texts = [text for text in by_rank[0].told if "__len__ states" in text or "in its __len__" in text]
    if shape.told is None or limit is not None:
        assert texts == []
    else:
        assert len(texts) == notices
        assert all(shape.told in text for text in texts)


def limited(limit: int | None) -> list[str]:
    """The shapes to read with this limit: after it, a multi-epoch loader continues in the next epoch where it stopped."""
    return [shape for shape in SHAPES if limit is None or shape != "multi-epoch loader"]


@pytest.mark.parametrize("shape, limit", [(shape, limit) for limit in (None, 2) for shape in limited(limit)])
def test_fit(shape: str, limit: int | None) -> None:
    check(SHAPES[shape], [by_fit(shape, limit)], limit)


@pytest.mark.parametrize("shape", SHAPES)
def test_own_loop(shape: str) -> None:
    check(SHAPES[shape], [by_own_loop(shape)], notices=2)


LENGTH_ENDS = (  # shapes whose epoch ends only because the loop counts; two processes resume these
    "endless iterable",
    "stream longer than it states",
    "endless stream, two workers",
    "class that begins again",
    "combined, shortest",
)


def every_shape(limit: int | None) -> tuple[dict[str, tuple[Found, Found | None]], dict[str, tuple[list[list[int]], ...]]]:
    found = {shape: (by_fit(shape, limit), by_own_loop(shape) if limit is None else None) for shape in limited(limit)}
    resumed = {shape: (resumed_fit(shape, 1), resumed_own_loop(shape, 1)) for shape in LENGTH_ENDS if limit is None}
    return found, resumed


@pytest.mark.parametrize("limit", [None, 1])
def test_two_processes(limit: int | None) -> None:
    """Each takes every second batch, also where it resumes. All shapes in one pair of processes, which take long to start."""
    by_rank = run_world(2, every_shape, limit)
    for shape in limited(limit):
        fitted, own = zip(*(found[shape] for found, _ in by_rank), strict=True)
        check(SHAPES[shape], fitted, limit)
        if limit is None:
            check(SHAPES[shape], own, notices=2)
    for rank, (_, resumed) in enumerate(by_rank):
        for shape, runs in resumed.items():
            assert runs == (SHAPES[shape].batches[rank::2] * EPOCHS,) * 2, shape


# ------------------------------------------------------------------------------------------------- evaluation, and resume


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation(shape: str, verb: str) -> None:
    """A list-like is not read before the run either."""
    source, module = SHAPES[shape].make(), Module()
    getattr(make_trainer(accelerator="cpu"), verb)(module, source)
    assert module.seen["evaluation"] == SHAPES[shape].batches
    assert asked_of(source) == sum(map(len, SHAPES[shape].batches))


def test_the_sanity_check_asks_for_its_batches_only() -> None:
    source = Numbers(6)
    trainer = make_trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=2, limit_val_batches=3)
    trainer.fit(Module(), Numbers(1), source)
    assert asked_of(source) == 2 + 3


def resumed_fit(shape: str, steps: int) -> list[list[int]]:
    """The batches of two epochs in two runs: the first is stopped after `steps` optimizer steps."""
    first, second = Module(), Module()
    folder = f"fit {shape}"
    make_trainer(accelerator="cpu", max_steps=steps, enable_checkpointing=True, default_root_dir=folder).fit(
        first, SHAPES[shape].make()
    )
    trainer = make_trainer(accelerator="cpu", max_epochs=EPOCHS, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(second, SHAPES[shape].make(), ckpt_path="last")
    assert len(first.seen["train"]) == steps
    return first.seen["train"] + second.seen["train"]


def resumed_own_loop(shape: str, steps: int) -> list[list[int]]:
    """The same in two training loops, of which the first one ends in its epoch."""
    module = Module()
    for resumed in (False, True):
        set_seed(0)
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(module.layer, module.configure_optimizers(), SHAPES[shape].make())
        if resumed:
            accelerator.load_state(f"loop {shape}", resume_loaders=True)
        for _ in range(EPOCHS if resumed else 1):
            for batch in loader:
                if not accelerator.open_loaders.padding:
                    module.record("train", batch)
                accelerator.backward(model(batch[0] if isinstance(batch, list) else batch).mean())
                optimizer.step()
                if not resumed and len(module.seen["train"]) == steps:
                    accelerator.save_state(f"loop {shape}")
                    break
        accelerator.end_training()
    return module.seen["train"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_resumes_inside_an_epoch(shape: str) -> None:
    assert resumed_fit(shape, 2) == SHAPES[shape].batches * EPOCHS
    assert resumed_own_loop(shape, 2) == SHAPES[shape].batches * EPOCHS


class Tail(IterableDataset[Tensor]):
    """A stream that keeps its place, and begins again after it was asked once more than it has numbers."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 8:
            self.place += 1
            yield batch_of(self.place - 1)[0]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_stream_that_begins_again_when_it_is_asked_once_more(steps: int) -> None:
    """It is not asked once more in its epoch, so it is iterated again in the next one; also in a run that resumes there."""
    first, second = Module(), Module()
    make_trainer(accelerator="cpu", max_steps=steps, enable_checkpointing=True).fit(first, DataLoader(Tail(), 2))
    make_trainer(accelerator="cpu", max_epochs=3, enable_checkpointing=True).fit(
        second, DataLoader(Tail(), 2), ckpt_path="last"
    )
    assert first.seen["train"] + second.seen["train"] == pairs(range(8)) * 3


# ------------------------------------------------------------------------------------------------------------- iterators


def numbers_of(length: int | None) -> Iterator[Tensor]:
    return map(batch_of, islice(count(), length))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("length, batches", [(None, 6), (4, 4)])
def test_an_iterator_continues_in_the_next_epoch(length: int | None, batches: int, by_hand: bool) -> None:
    """As in plain torch, where `limit_train_batches` or a `break` has ended the epoch before."""
    module, source = Module(), numbers_of(length)
    with heard() as notices:
        if by_hand:
            *_, loader = Accelerator(cpu=True).prepare(module.layer, module.configure_optimizers(), source)
            for _ in range(EPOCHS):
                for number, batch in enumerate(loader, 1):
                    module.record("train", batch)
                    if number == 3:
                        break
        else:
            make_trainer(accelerator="cpu", max_epochs=EPOCHS, limit_train_batches=3).fit(module, source)
    assert module.seen["train"] == singles(batches)
    assert sum("map is an iterator, which cannot start again: each epoch continues where" in text for text in notices) == 1


@pytest.mark.parametrize("options", [{"limit_train_batches": 4}, {}, {"overfit_batches": 2}])
def test_an_iterator_that_has_ended(options: dict[str, Any]) -> None:
    with heard() as notices, pytest.raises(EmptyLoaderError, match="map can be iterated only once, but is needed again in epo"):
        make_trainer(accelerator="cpu", max_epochs=EPOCHS, **options).fit(Module(), numbers_of(4))
    said = any("map is an iterator: the first epoch lasts until it ends" in text for text in notices)
    assert said == (not options)


def test_a_bare_node_of_torchdata() -> None:
    """It is an iterator; its loader begins again."""
    node = nodes.Batcher(nodes.Mapper(nodes.SamplerWrapper(SequentialSampler(range(4))), batch_of), 1)
    instead = r"Pass torchdata.nodes.Loader\(node\), which begins again and has a state"
    with heard() as notices, pytest.raises(EmptyLoaderError, match=f"Batcher can be iterated only once.* {instead}"):
        make_trainer(accelerator="cpu", max_epochs=EPOCHS).fit(Module(), node)
    assert any(re.search(f"Batcher is an iterator: the first epoch lasts until it ends.* {instead}", text) for text in notices)


def test_an_iterator_is_validated_once() -> None:
    with pytest.raises(EmptyLoaderError, match=r"map can be iterated only .* Trainer\(max_epochs=1, val_check_interval=1\.0\)"):
        make_trainer(accelerator="cpu", max_epochs=2, limit_val_batches=2).fit(Module(), Numbers(1), numbers_of(4))
    module = Module()
    make_trainer(accelerator="cpu", max_epochs=1, val_check_interval=1.0).fit(module, Numbers(1), numbers_of(4))
    assert module.seen["evaluation"] == singles(4)


def test_an_iterator_that_must_cycle() -> None:
    with pytest.raises(EmptyLoaderError, match="map can be iterated only once.*or use another mode than 'max_size_cycle'"):
        list(prepared(CombinedLoader([numbers_of(2), Numbers(4)], "max_size_cycle"), World()).iterate(0))


def test_the_path_of_a_dataset_is_no_loader() -> None:
    with pytest.raises(DataError, match="must be a DataLoader or an iterable of batches, not str"):
        make_trainer(accelerator="cpu").fit(Module(), "data/train")


# ------------------------------------------------------------------------------------------------------- combined loaders


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "mode, expected, asked",
    [
        ("min_size", [[0, 0], [1, 1], [2, 2]], (3, 3)),
        ("max_size_cycle", [[0, 0], [1, 1], [2, 2], [0, 3], [1, 4]], (5, 5)),
        ("max_size", [[0, 0], [1, 1], [2, 2], [None, 3], [None, 4]], (3, 5)),
        ("sequential", [0, 1, 2, 0, 1, 2, 3, 4], (3, 5)),
    ],
)
@pytest.mark.parametrize("kind", ["iterable", "stream", "stream of workers"])
def test_combined_loaders(kind: str, mode: str, expected: list[Any], asked: tuple[int, int], size: int) -> None:
    """No part is asked for more than the combined batches need, whichever process reads them."""
    parts: list[Any] = [Numbers(3), Numbers(5)]
    if kind != "iterable":
        parts = [DataLoader(Stream(each.stated), 1, num_workers=int("workers" in kind)) for each in parts]
    for rank in range(size):
        before = tuple(map(asked_of, parts))
        loader = prepared(CombinedLoader(parts, mode), World() if size == 1 else Alike(rank, size), window=None)
        found = [micro.batch for micro in loader.iterate(0)]
        loader.close()
        assert [numbers_in(batch) for batch in found] == expected[rank::size]
        assert all(now - old <= most for now, old, most in zip(map(asked_of, parts), before, asked, strict=True))


def numbers_in(batch: Any) -> Any:
    return [numbers_in(part) for part in batch] if isinstance(batch, list) else None if batch is None else int(batch)


@pytest.mark.parametrize(
    "mode, asked", [("min_size", [3, 3]), ("max_size_cycle", [5, 5]), ("max_size", [3, 5]), ("sequential", [3, 5])]
)
def test_a_combined_loader_that_your_own_code_reads(mode: str, asked: list[int]) -> None:
    parts = [Numbers(3), Numbers(5)]
    loader = CombinedLoader(parts, mode)
    assert len(list(loader)) == len(loader)
    assert [asked_of(part) for part in parts] == asked


def test_a_notice_names_samples_that_each_process_repeats() -> None:
    """Each process shuffles the whole dataset by itself: nothing can be sharded, and the notice says so."""
    told, _ = run_world(2, repeated)  # the main process prints
    assert sum("samples are repeated, up to 2 times in an epoch" in text for text in told) == 1


def repeated() -> list[str]:
    world = joined()
    generator = torch.Generator().manual_seed(world.rank)
    with heard() as texts:
        loader = prepared(MultiEpochs(Fetched(8), 2, shuffle=True, generator=generator), world)
        assert len(list(loader.iterate(0))) == 4
    return texts
