"""The data that people train on, as loaders whose samples are numbers, and what trainkit promises for each.

The table in docs/how-to/streaming-data.md is made of it: `python tests/helpers/data/every_shape.py` writes it.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import datasets.distributed
import numpy
import PIL.Image
import torch
import webdataset
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from trainkit import CombinedLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it calls torch.jit.script
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.loader import DynamicBatchSampler

__all__ = ["CHECKPOINT", "PAGE", "SHAPES", "Epoch", "Resumed", "Shape", "ids", "table"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "streaming-data.md"
CHECKPOINT = "checkpoint"  # what a run saves in the working directory
HEADER = -1  # a sample that does not count
N = 23


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def ids(batch: Any) -> list[int]:
    """The numbers of the samples in a batch."""
    if isinstance(batch, Tensor):
        return [int(number) for number in batch.flatten() if number != HEADER]
    if isinstance(batch, int):
        return [batch]
    if isinstance(batch, Data):
        return ids(batch.number)
    if isinstance(batch, PIL.Image.Image):
        return ids(batch.getpixel((0, 0)))
    parts = batch.values() if isinstance(batch, Mapping) else () if batch is None else batch
    return [number for part in parts for number in ids(part)]


# ------------------------------------------------------------------------------------------------------------ the datasets


class Items(Dataset[Tensor]):
    """A map-style dataset."""

    def __init__(self, numbers: Iterable[int] = range(N)) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.numbers[index])


class Several(Items):
    """A map-style dataset that fetches a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Growing(Items):
    """A dataset with four samples more in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.numbers = list(range(N - 4 + 4 * epoch))


class Reader(IterableDataset[Tensor]):
    """A stream of numbers, of which each worker reads its part.

    Args:
        numbers: All of them.
        shuffle: Shuffles them in place at the beginning of an epoch.
    """

    def __init__(self, numbers: Iterable[int] = range(N), shuffle: Callable[[list[int]], None] | None = None) -> None:
        self.numbers, self.shuffle = list(numbers), shuffle

    def __iter__(self) -> Iterator[Tensor]:
        order = self.part_of_worker()
        if self.shuffle is not None:
            self.shuffle(order)
        for number in order:
            yield torch.tensor(number)

    def part_of_worker(self) -> list[int]:
        worker = get_worker_info()
        return list(self.numbers) if worker is None else self.numbers[worker.id :: worker.num_workers]


class HasState:
    """Has the attribute `next` as its state."""

    __slots__ = ()
    next: int

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Continuing(HasState, Reader):
    """A stream that continues from a state."""

    next = 0

    def __iter__(self) -> Iterator[Tensor]:
        order = self.part_of_worker()
        while self.next < len(order):
            self.next += 1
            yield torch.tensor(order[self.next - 1])
        self.next = 0


class Images(Reader):
    """A stream of images of one pixel, whose value is the number."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.part_of_worker():
            yield PIL.Image.new("L", (1, 1), number)


class Batches:
    """An iterable of batches."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from generated()


def generated() -> Iterator[Tensor]:
    for start in range(0, N, 2):
        yield torch.arange(start, min(start + 2, N))


class Shuffled(Sampler[int]):
    """A sampler of your own, which draws from torch's global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class Interrupted(HasState, Sampler[int]):
    """A sampler that continues from a state."""

    next = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0


class Buckets(Sampler[list[int]]):
    """A batch sampler of your own: batches of one to three samples, in an order that `random` draws."""

    def __len__(self) -> int:
        return len(self.groups())

    def groups(self) -> list[list[int]]:
        cuts = [0, 3, 5, 6, 9, 11, 12, 15, 17, 18, 21, N]
        return [list(range(first, last)) for first, last in itertools.pairwise(cuts)]

    def __iter__(self) -> Iterator[list[int]]:
        groups = self.groups()
        random.shuffle(groups)
        yield from groups


def without_broken(samples: list[Tensor]) -> Tensor | None:
    """Stacks the samples whose number is not a multiple of four; `None` if none is left."""
    kept = [sample for sample in samples if int(sample) % 4]
    return torch.stack(kept) if kept else None


def unseeded() -> int:
    """Stands for what the operating system seeds a generator with: another number on each process and in each run."""
    return 1 + rank() + size() * Path(CHECKPOINT).exists()


def mine(numbers: Iterable[int] = range(N)) -> list[int]:
    """The part of this process."""
    return list(numbers)[rank() :: size()]


def with_headers() -> Reader:
    """A part that begins with two batches that are equal on all processes."""
    return Reader([HEADER] * 4 + mine())


def rows(numbers: Iterable[int] = range(N)) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"number": list(numbers)}).with_format("torch")


def lines() -> datasets.IterableDataset:
    return rows().to_iterable_dataset(num_shards=4)


def shards() -> str:
    """Four tar files of six samples (five in the last) in the working directory, for webdataset."""
    for shard in range(4):
        with tarfile.open(f"{shard}.tar", "w") as tar:
            for number in range(6 * shard, min(6 * shard + 6, N)):
                text = str(number).encode()
                entry = tarfile.TarInfo(f"{number:04d}.txt")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    return "{0..3}.tar"


def tars(**options: Any) -> Any:
    options = {"shardshuffle": False, "nodesplitter": None, **options}
    return webdataset.WebDataset(shards(), **options).decode().map(_number)


def resampled() -> Any:
    """Draws shards with replacement: in a resumed run others, but the same whenever the test runs."""
    dataset = tars(resampled=True).with_epoch(24)
    dataset.pipeline[0].deterministic, dataset.pipeline[0].seed = True, 5 * unseeded()
    return dataset


def _number(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


def graphs() -> list[Data]:
    return [Data(number=torch.tensor([number]), num_nodes=1 + number % 3) for number in range(N)]


def node(sampler: Any) -> Any:
    return nodes.Loader(nodes.Batcher(nodes.Mapper(nodes.SamplerWrapper(sampler), torch.tensor), 2, drop_last=False))


# ------------------------------------------------------------------------------------------------------------ the promises


class Epoch(NamedTuple):
    """What the processes together read in an epoch.

    Attributes:
        text: For the table.
        samples: The samples of an epoch; `None`: those that one process reads.
        repeats: On several processes each sample comes once on each of them, with a warning that has these words.
        drawn: Number of samples that each worker of each process draws with replacement.
    """

    text: str
    samples: Callable[[int], list[int]] | None = lambda epoch: list(range(N))
    repeats: str | None = None
    drawn: int | None = None


class Resumed(NamedTuple):
    """What a run reads that was killed inside an epoch and resumed there.

    Attributes:
        text: For the table.
        told: Words of the message about other data; `None`: the epoch continues exactly.
    """

    text: str
    told: str | None = None


ONCE = Epoch("each sample once")
DRAWS = Epoch("the draws of one process", None)
RESAMPLED = Epoch("as many draws on each process as it states for each worker", drawn=24)
UNSEEDED = Epoch(
    "one process: each sample once. Several: each sample on each of them, and a warning", repeats="same samples on each"
)
EXACT = Resumed("exactly what was left")
INEXACT = Resumed("may repeat and skip data in this epoch, and a warning", "does not continue where the checkpoint was saved")


class Shape(NamedTuple):
    """A loader that people write.

    Attributes:
        make: Makes it with this number of workers.
        epoch: What is read in an epoch.
        resumed: What is read after a kill.
        workers: The numbers of workers to try.
        epochs: How often it can be read.
        part: Each process reads its own part, and a run resumes on as many processes.
    """

    make: Callable[[int], Any]
    epoch: Epoch = ONCE
    resumed: Resumed = EXACT
    workers: tuple[int, ...] = (0, 2)
    epochs: int = 2
    part: bool = False


def loader(make: Callable[[], Any], kind: Callable[..., Any] = DataLoader, **options: Any) -> Callable[[int], Any]:
    """Makes a loader of a dataset with a number of workers."""
    if not {"batch_size", "batch_sampler"} & options.keys():
        options["batch_size"] = 2
    return lambda workers: kind(make(), num_workers=workers, **options)


def sampled(sampler: Callable[[Any], Any], make: Callable[[], Any] = Items, **options: Any) -> Callable[[int], Any]:
    """The same with a sampler that is made for the dataset."""
    return lambda workers: loader(make, sampler=sampler(make()), **options)(workers)


def _plain(make: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda workers: make()


SHAPES: dict[str, Shape] = {
    "`DataLoader`, in order": Shape(loader(Items)),
    "`DataLoader(shuffle=True)`": Shape(loader(Items, shuffle=True)),
    "`DataLoader(drop_last=True)`": Shape(
        loader(Items, drop_last=True),
        Epoch("each sample once, but the last incomplete batch", lambda epoch: list(range(N - 1))),
    ),
    "`WeightedRandomSampler`": Shape(sampled(lambda data: WeightedRandomSampler(list(range(1, N + 1)), N)), DRAWS),
    "`RandomSampler(replacement=True)`": Shape(sampled(lambda data: RandomSampler(data, replacement=True)), DRAWS),
    "`DistributedSampler`": Shape(sampled(lambda data: DistributedSampler(data, size(), rank(), shuffle=True))),
    "sampler of your own": Shape(sampled(lambda data: Shuffled(len(data)))),
    "sampler of your own with a state": Shape(sampled(lambda data: Interrupted(len(data)))),
    "sampler of your own with a state, `batch_size=1`": Shape(sampled(lambda data: Interrupted(len(data)), batch_size=1)),
    "batch sampler of your own, batches of other sizes": Shape(lambda workers: loader(Items, batch_sampler=Buckets())(workers)),
    "`batch_size=None`, the sampler yields batches": Shape(
        lambda workers: DataLoader(
            _Fetched(), sampler=BatchSampler(RandomSampler(range(N)), 2, False), batch_size=None, num_workers=workers
        )
    ),
    "dataset with `__getitems__`": Shape(loader(Several, shuffle=True)),
    "`collate_fn` that drops broken samples": Shape(
        loader(Items, collate_fn=without_broken, batch_size=1),
        Epoch("each sample that is not broken once", lambda epoch: [number for number in range(N) if number % 4]),
    ),
    "dataset whose length changes in `set_epoch`": Shape(
        loader(Growing, shuffle=True), Epoch("each sample of that epoch once", lambda epoch: list(range(N - 4 + 4 * epoch)))
    ),
    "dataset that is each process's own part": Shape(loader(lambda: Items(mine()), shuffle=True), part=True),
    "parts of equal length": Shape(
        loader(lambda: Items(mine(range(N - 1))), shuffle=True),
        ONCE._replace(samples=lambda epoch: list(range(N - 1))),
        part=True,
    ),
    "list of batches": Shape(_plain(lambda: list(generated())), workers=(0,)),
    "iterable of batches": Shape(_plain(Batches), workers=(0,)),
    "generator, in one epoch": Shape(_plain(generated), workers=(0,), epochs=1),
    "`IterableDataset`": Shape(loader(Reader)),
    "`IterableDataset` with a state": Shape(loader(Continuing)),
    "`IterableDataset` that shuffles by `random`": Shape(loader(lambda: Reader(shuffle=random.shuffle))),
    "`IterableDataset` that shuffles by a generator without a seed": Shape(
        loader(lambda: Reader(shuffle=random.Random(unseeded()).shuffle)), UNSEEDED, INEXACT
    ),
    "`IterableDataset` that is each process's own part": Shape(loader(lambda: Reader(mine())), part=True),
    "parts of equal length, of PIL images": Shape(
        loader(lambda: Images(mine(range(N - 1))), collate_fn=list),
        ONCE._replace(samples=lambda epoch: list(range(N - 1))),
        part=True,
    ),
    "parts with equal headers": Shape(loader(with_headers), part=True),
    "`CombinedLoader`, all to their end": Shape(
        lambda workers: CombinedLoader([loader(Items, shuffle=True)(workers), _plain(lambda: [None] * 12)(0)], "max_size_cycle")
    ),
    "`CombinedLoader`, one after the other": Shape(
        lambda workers: CombinedLoader(
            [
                loader(lambda: Items(range(11)), shuffle=True)(workers),
                loader(lambda: Items(range(11, N)), shuffle=True)(workers),
            ],
            "sequential",
        )
    ),
    "`datasets.Dataset`": Shape(loader(rows, shuffle=True)),
    "`datasets.Dataset`, `split_dataset_by_node`": Shape(
        loader(lambda: datasets.distributed.split_dataset_by_node(rows(), rank(), size()), shuffle=True), part=True
    ),
    "`datasets.IterableDataset`": Shape(loader(lines)),
    "`datasets.IterableDataset.shuffle(seed=0)`": Shape(loader(lambda: lines().shuffle(seed=0, buffer_size=8))),
    "`datasets.IterableDataset.shuffle()`": Shape(
        loader(lambda: lines().shuffle(generator=numpy.random.default_rng(unseeded()), buffer_size=8)), UNSEEDED, INEXACT
    ),
    "`datasets.IterableDataset`, `split_dataset_by_node`": Shape(
        loader(lambda: datasets.distributed.split_dataset_by_node(lines(), rank(), size())), part=True
    ),
    "`torchdata` `StatefulDataLoader`": Shape(loader(Items, StatefulDataLoader, shuffle=True)),
    "`StatefulDataLoader`, `DistributedSampler`": Shape(
        sampled(lambda data: DistributedSampler(data, size(), rank()), kind=StatefulDataLoader)
    ),
    "`torchdata.nodes` over a `SequentialSampler`": Shape(_plain(lambda: node(SequentialSampler(range(N)))), workers=(0,)),
    "`torchdata.nodes` over a `RandomSampler`": Shape(_plain(lambda: node(RandomSampler(range(N)))), workers=(0,)),
    "`webdataset`": Shape(loader(tars)),
    "`webdataset`, `split_by_node`": Shape(loader(lambda: tars(nodesplitter=webdataset.split_by_node)), part=True),
    "`webdataset`, `shuffle(8)`": Shape(loader(lambda: tars().shuffle(8, rng=random.Random(unseeded()))), UNSEEDED, INEXACT),
    "`webdataset`, `resampled=True`, `with_epoch(24)`": Shape(
        loader(resampled),
        RESAMPLED,
        Resumed(
            "other draws, and a notice", "draws its samples with replacement: the resumed epoch continues with other draws"
        ),
    ),
    "`torch_geometric` `DataLoader`": Shape(loader(graphs, GraphLoader, shuffle=True)),
    "`torch_geometric` `DynamicBatchSampler`": Shape(
        lambda workers: GraphLoader(
            graphs(), batch_sampler=DynamicBatchSampler(graphs(), max_num=6, shuffle=True), num_workers=workers
        )
    ),
}


class _Fetched(Dataset[Tensor]):
    """A dataset whose items are batches."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices)


def table() -> str:
    """The shapes and promises as a table in Markdown."""
    lines = ["| data | in an epoch, all processes together | killed inside an epoch and resumed |", "|---|---|---|"]
    for name, shape in SHAPES.items():
        resumed = shape.resumed.text + ("; on as many processes" if shape.part else "")
        lines.append(f"| {name} | {shape.epoch.text} | {resumed} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with the table of today."""
    before, mark, rest = page.partition("<!-- shapes -->\n")
    _, end, after = rest.partition("<!-- end of shapes -->\n")
    return before + mark + table() + end + after


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
