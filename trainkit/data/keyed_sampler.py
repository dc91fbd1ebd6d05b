"""Which samples are in which micro-batch, and the key with which each is fetched.

A `DataLoader` iterates its batch sampler in the main process and fetches in its workers. The batch sampler in trainkit's copy
of the user's loader therefore yields `(fetch key, indices)`, and a thin wrapper around the dataset seeds the generators of
the fetching process from that key before it fetches. So it does not matter which process fetches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from trainkit.console import notice, quantity, warn, with_article
from trainkit.data.combined import iterates_itself, length_of
from trainkit.data.comparison import digest, find_separate_data, preserve_state
from trainkit.data.loader_workers import ignore_group_signals
from trainkit.data.order import Permutation, user_epoch
from trainkit.data.stream_sharder import has_state, rewind
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, DataError
from trainkit.nested import batch_size
from trainkit.rng import KeyStream, Purpose, RandomState, Stage, mix, seed_generators

__all__ = [
    "KeyedBatches",
    "KeyedDataset",
    "KeyedSlots",
    "SlotSampler",
    "UserWorkerInit",
    "is_distributed",
    "knows_processes",
    "make_keyed_batches",
    "split_batches",
]

Draw = Callable[[int, int, int], Generator[Any, int | None, int]]
"""(epoch, first, step) → the indices of the micro-batches first, first + step, …; returns the number in the whole epoch.

`send(n)` draws `n` more micro-batches instead, of which it yields the last."""

_AT_A_TIME = 4096  # positions of the order that are computed together
_ONE_PROCESS = World()

_TORCHDATA = "torchdata.stateful_dataloader.sampler"


class KeyedBatches:
    """Replaces the batch sampler of a loader: yields `(fetch key, indices)` of each micro-batch.

    `epoch`, `start` (the first micro-batch), `limit` (the number of micro-batches of an epoch), `turn` and `step`
    (those of this process: start + turn, start + turn + step, …) are set before each iteration.

    Attributes:
        length: micro-batches of an epoch, over all processes.
        stated: micro-batches of an epoch that the sampler of this process yields at most; it is not asked for more.
        exact: the length is certain; otherwise it is what the user's sampler returns.
        sizes: samples of every micro-batch but the last, and of the last.
        name: of the sampler, for messages.
        splits: the sampler yields different indices on each process, and each process reads all of its own.
        separate_datasets: each process has its own dataset, and reads all of it; then `splits` too.
        last_length: number of micro-batches in the last epoch that was read to its end.
        continues: the sampler has a state, from which it may continue in the next epoch.
    """

    continues = False

    def __init__(
        self,
        draw: Draw,
        length: int | None,
        sizes: tuple[int, int] | None,
        seed: int,
        stage: int,
        exact: bool = True,
        name: str = "",
    ) -> None:
        self._draw = draw
        self.name = name
        self._seed, self._stage = seed, stage
        self.length = self.stated = length
        self.exact = exact and length is not None
        self.sizes = sizes if self.exact else None
        self.splits = self.separate_datasets = False
        self.epoch = self.start = self.turn = 0
        self.step = 1
        self.limit: int | None = None
        self.last_length = 0
        self._said_that_it_ended = False

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("this loader's sampler has no length")
        return self.length if self.limit is None else min(self.length, self.limit)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        keys = KeyStream(self._seed, self._stage, Purpose.FETCH, self.epoch)
        m, step, turn = self.start + self.turn, self.step, self.turn
        stated = self.stated
        if self.splits:  # The i-th micro-batch of this process is number i·step + turn of all.
            first = self.start // step
            m, drawn = first * step + turn, self._draw(self.epoch, first, 1)
            stated = None if stated is None else stated * step
        else:
            drawn = self._draw(self.epoch, m, step)
        end = min((each for each in (self.limit, stated) if each is not None), default=math.inf)
        while m < end:
            try:
                indices = next(drawn)
            except StopIteration as stop:
                self.last_length = stop.value * step if self.splits else stop.value
                if stated is not None:
                    self._say_that_it_ended(stop.value, m, end)
                return
            yield keys(m), indices
            m += step
        if stated is not None and m >= stated:
            self.last_length = stated
        if self.continues and not self.splits and end < math.inf:
            self._draw_the_rest(drawn, m - step, int(end) + (end == stated))

    def _draw_the_rest(self, drawn: Generator[Any, int | None, int], last: int, end: int) -> None:
        """Draw the micro-batches after number `last` and before `end`, which other processes have, and discard them.

        A sampler that continues where it stopped is then at the same place on all processes. After a whole epoch it is asked
        once more, as torch does, since it may begin again in the code after its last `yield`.
        """
        with suppress(StopIteration):
            if last >= self.start:
                if end - last > 1:
                    drawn.send(end - last - 1)
            elif end > self.start:  # this process has none
                next(self._draw(self.epoch, end - 1, 1))

    def _say_that_it_ended(self, count: int, m: int, end: float) -> None:
        """Say once that the sampler has ended after `count` micro-batches, before number `m`, although `end` were expected."""
        if self._said_that_it_ended:
            return
        self._said_that_it_ended = True
        # in the last row, only the processes whose turn comes later see the end: the first of them says it
        alone = m == count and m - self.turn + self.step >= end
        notice(
            f"{self.name} ended after {quantity(count, 'batch')}, but its __len__ states {self.stated}: the epoch ends there.",
            everywhere=self.splits or (self.turn > 0 and alone),
        )


class KeyedDataset(Dataset[Any]):
    """A map-style dataset indexed with `(key, index or indices)`; it seeds the generators from the key first."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # pickle looks these up on this class, before the dataset is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, Any]) -> Any:
        key, index = item
        seed_generators(key)
        return self.dataset[index]

    def __getitems__(self, item: tuple[int, Sequence[Any]]) -> Any:
        key, indices = item
        seed_generators(key)
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if fetch_many:
            return fetch_many(indices)
        dataset = self.dataset
        return [dataset[index] for index in indices]


class KeyedSlots(list[None]):
    """The slots of one micro-batch of an iterable dataset; iterating over them seeds the generators from the key first."""

    def __init__(self, key: int, size: int) -> None:
        super().__init__([None] * size)
        self._key = key

    def __iter__(self) -> Iterator[None]:
        seed_generators(self._key)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedSlots, (self._key, len(self))


class SlotSampler:
    """A sampler for an iterable dataset, which only needs the number of samples in each batch; it may ask for fewer batches.

    A worker whose part of the stream has ended answers none of the batches that it still is asked for. The others are asked
    for as many more, while the loader's iterator runs.

    Args:
        size: samples in a batch; `None`: the dataset yields batches.
        seed: of the run.
        stage: of the keys.

    Attributes:
        left: number of batches to ask for; `None`: as many as there are.
        iterator: the loader's, if it has workers.
    """

    def __init__(self, size: int | None, seed: int, stage: int) -> None:
        self._size = size
        self._seed = seed
        self._stage = stage
        self.begin(0, 0, None)

    def begin(self, epoch: int, start: int, left: int | None) -> None:
        """Begin an epoch at batch `start` of the stream that this process reads."""
        self._keys = KeyStream(self._seed, self._stage, Purpose.FETCH, epoch)
        self._start = start
        self.left = left
        self.iterator: Any = None

    def __iter__(self) -> Iterator[KeyedSlots | None]:
        self._asked = 0
        self._lost = 0
        self._ended = set[int]()
        return self

    def __next__(self) -> KeyedSlots | None:
        if self.left is not None and self._asked - self._count_lost() >= self.left:
            raise StopIteration
        m = self._start + self._asked
        self._asked += 1
        return None if self._size is None else KeyedSlots(self._keys(m), self._size)

    def allow(self, left: int | None) -> None:
        """Let workers that wait, because no more batches were needed, begin with those that now are."""
        self.left, iterator = left, self.iterator
        if iterator is not None:
            # Counted like the iterator does: it never gets an answer to some tasks of a worker that has ended.
            waiting = sum(1 for task in iterator._task_info.values() if len(task) > 1)
            places = iterator._prefetch_factor * iterator._num_workers - iterator._tasks_outstanding - waiting
            for _ in range(places):
                iterator._try_put_index()

    def refill(self, iterator: Iterator[Any], loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of workers; where all that were asked for have come, but were short, more are asked for."""
        size, stated = loader.batch_size, length_of(loader.dataset)
        assert size is not None
        assert stated is not None
        samples = batches = 0
        while True:
            if batches == self.left and samples < stated:
                self.allow(batches - (samples - stated) // size)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            samples, batches = samples + batch_size(batch), batches + 1
            yield batch

    def _count_lost(self) -> int:
        """Number of batches that were asked for in vain."""
        for worker, works in enumerate(getattr(self.iterator, "_workers_status", ())):
            if not works and worker not in self._ended:  # asked right after it has ended
                self._ended.add(worker)
                waiting = self.iterator._task_info.values()
                self._lost += sum(1 for task in waiting if len(task) == 1 and task[0] == worker)
        return self._lost


class UserWorkerInit:
    """The user's `worker_init_fn`; in the worker `get_worker_info().dataset` is the user's dataset, not the wrapper.

    Signals to the whole process group are handled by the main process only, unless the user's function sets handlers.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            ignore_group_signals()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            # WorkerInfo refuses plain assignment
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._function is not None:
            self._function(worker_id)


def make_keyed_batches(
    loader: DataLoader[Any], seed: int, stage: int, sequential: bool, world: World = _ONE_PROCESS
) -> KeyedBatches:
    """The keyed batch sampler that replaces the samplers of a loader over a map-style dataset. Collective.

    Args:
        loader: The user's loader. `shuffle=True`, `shuffle=False` and `DistributedSampler` are recognized. Other samplers
            and batch samplers are iterated in the main process, with generators seeded by key.
        seed: Seed of the run; a `DistributedSampler` has its own seed. Warns if its `num_replicas` is not the world size.
        stage: The stage part of the keys.
        sequential: Do not shuffle; the user's own sampler yields the order of epoch 0 (`overfit_batches`).
        world: The processes that the micro-batches are distributed over.

    Raises:
        DataError: The loaders differ between processes.
    """
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is not None and _torch_class(batch_sampler) is not BatchSampler:
        length = length_of(batch_sampler)
        count = _counter(length, lambda: length_of(batch_sampler))
        draw = _draw_from_sampler(batch_sampler, seed, stage, lambda iterator: next(iterator), count, sequential)
        batches = KeyedBatches(draw, length, None, seed, stage, exact=False, name=type(batch_sampler).__name__)
        return _compare_loaders(batches, world, batch_sampler, loader, None)
    sampler: Any = loader.sampler if batch_sampler is None else batch_sampler.sampler
    size = None if batch_sampler is None else batch_sampler.batch_size
    width, drop_last = 1 if size is None else size, batch_sampler is not None and batch_sampler.drop_last
    samples, shuffle = length_of(sampler), _shuffles(sampler)
    dropped = 0
    seed_of_order = seed
    if is_distributed(sampler):
        seed_of_order, samples = sampler.seed, len(sampler.dataset)
        dropped = _count_dropped(sampler, samples, world.size)
    of_torch = _torch_class(sampler) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if shuffle is None:
        take = partial(_next_indices, size=size, drop_last=drop_last)
        count = _counter(samples, lambda: _arithmetic(length_of(sampler), width, drop_last)[0])
        draw = _draw_from_sampler(sampler, seed, stage, take, count, sequential, draws_at_once=of_torch)
    else:
        samples = len(loader.dataset) if samples is None else samples  # type: ignore[arg-type]
        draw = _draw_in_order(samples, dropped, size, drop_last, bool(shuffle) and not sequential, seed_of_order, stage)
    length, sizes = _arithmetic(None if samples is None else samples - dropped, width, drop_last)
    name, exact = type(sampler).__name__, shuffle is not None or of_torch
    batches = KeyedBatches(draw, length, sizes if size is not None else None, seed, stage, exact, name)
    return _compare_loaders(
        batches, world, sampler, loader, None if shuffle is None else {"shuffle": shuffle, "seed": seed_of_order}
    )


def is_distributed(sampler: Any) -> bool:
    """Whether a sampler shards as torch's `DistributedSampler` does, or is of a class derived from it."""
    kind = type(sampler)
    of_torch = (DistributedSampler.__iter__, DistributedSampler.__len__)
    return isinstance(sampler, DistributedSampler) and (
        (kind.__iter__, kind.__len__) == of_torch or kind.__module__ == _TORCHDATA
    )


def knows_processes(sampler: Any, depth: int = 4) -> bool:
    """Whether a sampler, or one inside it, selects a part by rank, as `DistributedSampler` does."""
    if sampler is None or getattr(sampler, "num_replicas", 1) > 1:
        return sampler is not None
    inside = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return depth > 0 and any(knows_processes(each, depth - 1) for each in inside)


def _compare_loaders(batches: KeyedBatches, world: World, sampler: Any, loader: DataLoader[Any], order: Any) -> KeyedBatches:
    """The batches, after comparing the loaders of all processes. Sets `continues`, and `splits` if the sampler differs
    between processes.

    Args:
        batches: the batches of this process.
        world: the processes.
        sampler: the user's sampler.
        loader: the user's loader.
        order: what the order depends on; `None` if the sampler decides it: then its first micro-batch is compared.

    Raises:
        DataError: the loaders differ.
    """
    batches.continues = order is None and has_state(sampler)
    first = None
    if world.size > 1 and order is None and not isinstance(sampler, Iterator):  # an iterator cannot be started twice
        random_state = RandomState()
        with preserve_state(sampler):
            drawn = batches._draw(0, 0, 1)
            first = digest(next(drawn, None))
            drawn.close()
        random_state.restore()
    separate = find_separate_data(
        world, loader, length_of(loader.dataset), batches.length, order, first, is_distributed(sampler)
    )
    if separate is not None:
        known = [length for length in separate.lengths if length is not None]
        batches.splits = True
        batches.exact = False
        batches.sizes = None
        batches.length = world.size * max(known) if len(known) == len(separate.lengths) else None
        batches.separate_datasets = separate.datasets
        _notice_separate_data(type(loader.dataset if separate.datasets else sampler).__name__, separate.datasets)
    return batches


def _notice_separate_data(name: str, datasets: bool) -> None:
    if datasets:
        notice(
            f"{name} has different samples on each process (the first, the middle and the last were compared): each process "
            "reads its own dataset to the end, so the order of the data depends on the number of processes. If all processes "
            "should have the same dataset, create it with the same seed and from a sorted list of files: then it is sharded "
            "over them."
        )
    else:
        notice(
            f"{name} yields different indices on each process, which are used unchanged: the order of the data depends on the "
            "number of processes. To avoid that, let the sampler draw from the whole dataset on every process: "
            f"{name} without rank and num_replicas, over a RandomSampler instead of a DistributedSampler."
        )


def _count_dropped(sampler: DistributedSampler[Any], samples: int, processes: int) -> int:
    """Number of samples that `drop_last=True` drops so that all ranks get the same number; warns of other `num_replicas`."""
    if sampler.num_replicas != processes:
        _warn_of_replicas(sampler, samples, processes)
        return 0
    return samples % processes if sampler.drop_last else 0


def _warn_of_replicas(sampler: DistributedSampler[Any], samples: int, processes: int) -> None:
    if processes > 1:
        text = f"processes: they read all {samples} samples of an epoch together, each about {-(-samples // processes)}"
    elif sampler.num_replicas > 1:
        text = f"process: the process reads all {samples} samples of an epoch"
    else:
        return
    warn(
        f"DistributedSampler(num_replicas={sampler.num_replicas}) in a run of {processes} {text}, not {sampler.num_samples}. "
        f"Fix: remove the sampler, DataLoader(dataset, shuffle={bool(sampler.shuffle)}); to use a part of the data: "
        "torch.utils.data.Subset(dataset, indices)"
    )


def _torch_class(sampler: Any) -> type:
    """The class of a sampler; for those of torchdata's StatefulDataLoader the class of torch that they add a state to."""
    kind = type(sampler)
    return getattr(torch.utils.data, kind.__name__, kind) if kind.__module__ == _TORCHDATA else kind


def _shuffles(sampler: Any) -> bool | None:
    """Whether a sampler shuffles all samples; `None` for a custom sampler."""
    kind = _torch_class(sampler)
    if kind is SequentialSampler:
        return False
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return True
    if is_distributed(sampler):
        return bool(sampler.shuffle)
    return None


def _arithmetic(samples: int | None, size: int, drop_last: bool) -> tuple[int | None, tuple[int, int] | None]:
    """Number of micro-batches, and the samples of each but the last and of the last."""
    if samples is None:
        return None, None
    length, rest = divmod(samples, size)
    if rest == 0 or drop_last:
        return length, (size, size)
    return length + 1, (size, rest)


def _draw_in_order(samples: int, dropped: int, size: int | None, drop_last: bool, shuffle: bool, seed: int, stage: int) -> Draw:
    """Micro-batch m is positions [m·size, (m+1)·size) of the order of the epoch, which is a function of (seed, epoch)."""
    width = 1 if size is None else size
    end = samples - dropped
    if drop_last:
        end -= end % width

    def draw(epoch: int, first: int, step: int) -> Generator[Any, int | None, int]:
        order = Permutation(samples, mix(seed, stage, Purpose.ORDER, epoch)) if shuffle else None
        if order is not None and step > 1:
            for indices in _pick(order, range(first * width, end, step * width), width, end):
                yield indices[0] if size is None else indices
            return -(-end // width)
        for position in range(first * width, end, step * width):
            stop = min(position + width, end)
            indices = list(range(position, stop)) if order is None else order.block(position, stop).tolist()
            yield indices[0] if size is None else indices
        return -(-end // width)

    return draw


def _pick(order: Permutation, begins: range, width: int, end: int) -> Iterator[list[int]]:
    """The indices of the micro-batches that begin at these positions, many at a time; positions between are not computed."""
    many = max(1, _AT_A_TIME // width)
    for at in range(0, len(begins), many):
        group = begins[at : at + many]
        positions = np.add.outer(np.asarray(group, dtype=np.int64), np.arange(width, dtype=np.int64)).reshape(-1)
        positions = positions[positions < end]  # the last one may be short
        indices = order.at(positions).tolist()
        for begin in range(0, len(indices), width):
            yield indices[begin : begin + width]


def _counter(first: int | None, count: Callable[[], int | None]) -> Callable[[], int]:
    """Counts what a sampler yields in an epoch, which may change; 0 if that was unknown at first: asking again would warn."""
    return lambda: 0 if first is None else count() or 0


def _draw_from_sampler(
    sampler: Any,
    seed: int,
    stage: int,
    take: Callable[[Iterator[Any]], Any],
    count: Callable[[], int],
    same_each_epoch: bool,
    draws_at_once: bool = False,
) -> Draw:
    """Micro-batches drawn from a user's sampler, each with generators seeded by its own key.

    The generators are seeded again before the fetch and the forward of each micro-batch, so the state before a draw has no use.
    Only after the last one nothing seeds them, and hooks at the end of the epoch may draw: it is restored there.

    Args:
        sampler: The user's.
        seed: Seed of the run.
        stage: The stage part of the keys.
        take: Takes a micro-batch from the iterator of the sampler.
        count: Returns the number of micro-batches in the next epoch; 0: it is unknown, so that each may be the last.
        same_each_epoch: Each epoch is that of epoch 0.
        draws_at_once: The sampler draws all random numbers of an epoch with the first index, as those of torch do.
    """
    evaluates = same_each_epoch or not Stage.TRAIN.has_key(stage)

    def draw(epoch: int, first: int, step: int) -> Generator[Any, int | None, int]:
        epoch = 0 if same_each_epoch else epoch
        keys = KeyStream(seed, stage, Purpose.ORDER, epoch)
        order = keys(0)
        samplers: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for each in samplers:
            if evaluates:
                rewind(each)
            if hasattr(each, "set_epoch"):
                each.set_epoch(user_epoch(epoch))
            generator = getattr(each, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(order)
        iterator = RandomState.draw_with_key(order, lambda: iter(sampler))
        length, m = count(), 0
        while True:
            try:
                if draws_at_once and m > 0:
                    indices = take(iterator)
                elif m < length:
                    seed_generators(keys(m + 1))
                    indices = take(iterator)
                else:
                    indices = RandomState.draw_with_key(keys(m + 1), lambda: take(iterator))
            except StopIteration:
                return m
            rest: int | None = None
            if m >= first and (m - first) % step == 0:
                rest = yield indices
            m += 1
            if rest is not None:  # the number of those that are drawn and not used: the last one of them is yielded
                first, step = m + rest - 1, 1

    return draw


def _next_indices(iterator: Iterator[Any], size: int | None, drop_last: bool) -> Any:
    """The next index, or the next `size` indices; StopIteration at the end."""
    if size is None:
        return next(iterator)
    indices = list(islice(iterator, size))
    if not indices or (drop_last and len(indices) < size):
        raise StopIteration
    return indices


def split_batches(loader: Any, processes: int) -> tuple[DataLoader[Any], int | None]:
    """A loader like this one that yields each batch in `processes` micro-batches.

    Args:
        loader: the user's loader, which is not changed.
        processes: number of processes, each of which gets one micro-batch of a batch.

    Returns:
        The loader of micro-batches, and their number in an epoch if `drop_last` drops micro-batches of a short last batch;
        otherwise `None`.

    Raises:
        ConfigurationError: the loader cannot be split.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or iterates_itself(loader):
        raise ConfigurationError(
            f"split_batches=True divides the batch_size of a DataLoader, but this is {_describe(loader)}. Let it yield one "
            "micro-batch for each process, and remove split_batches."
        )
    changes: dict[str, Any] = {"_iterator": None}
    sampler, end = loader.batch_sampler, None
    if isinstance(loader.dataset, IterableDataset):
        if loader.drop_last:
            raise ConfigurationError(
                "split_batches=True with drop_last=True: the last batch of a stream is not known in advance. Remove "
                "drop_last: a short last batch counts by its samples."
            )
        changes["batch_size"] = _size(loader.batch_size, processes)
    elif type(sampler) is BatchSampler:
        size = _size(sampler.batch_size, processes)
        changes["batch_sampler"] = BatchSampler(sampler.sampler, size, sampler.drop_last)
        if loader.batch_size is not None:
            changes["batch_size"] = size
        end = _whole(sampler, processes) if sampler.drop_last else None
    else:
        changes["batch_sampler"] = _SplitBatches(sampler, processes)
    split = copy.copy(loader)
    split.__dict__.update(changes)  # DataLoader refuses to assign them
    return split, end


def _size(batch_size: Any, processes: int) -> int:
    """Samples of a micro-batch."""
    if batch_size % processes:
        nearest = max(1, batch_size // processes) * processes
        raise ConfigurationError(
            f"split_batches=True: a batch_size of {batch_size} cannot be divided by {processes} processes. Use {nearest}, or "
            "remove split_batches: batch_size is then that of one process."
        )
    return int(batch_size // processes)


def _whole(sampler: BatchSampler, processes: int) -> int:
    """Micro-batches of the batches that are not short."""
    inner: Any = sampler.sampler
    try:
        samples = len(inner.dataset) if is_distributed(inner) else len(inner)
    except TypeError:
        raise ConfigurationError(
            f"split_batches=True with drop_last=True: {type(inner).__name__} has no length. Define __len__, or remove "
            "drop_last."
        ) from None
    return samples // sampler.batch_size * processes


def _describe(loader: Any) -> str:
    if isinstance(loader, DataLoader) and iterates_itself(loader):
        return f"{with_article(type(loader).__name__)}, which overrides __iter__"
    return "one with batch_size=None" if isinstance(loader, DataLoader) else with_article(type(loader).__name__)


class _SplitBatches:
    """The batches of a user's batch sampler, each divided into `processes` parts whose sizes differ by at most 1."""

    def __init__(self, sampler: Any, processes: int) -> None:
        self.sampler = sampler
        self._processes = processes

    def __getattr__(self, name: str) -> Any:
        if name == "sampler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property
    def size_of_all(self) -> Any:
        """Samples of a whole batch; `None` if the batch sampler has no `batch_size`."""
        return getattr(self.sampler, "batch_size", None)

    def __len__(self) -> int:
        return len(self.sampler) * self._processes

    def __iter__(self) -> Iterator[Sequence[Any]]:
        short = 0
        for batch in self.sampler:
            if short:
                raise DataError(
                    f"split_batches=True: {type(self.sampler).__name__} yielded {short} samples for {self._processes} "
                    "processes, which only the last batch of an epoch may do. Yield at least one sample for each process in "
                    "each batch."
                )
            indices = list(batch)
            short = len(indices) if len(indices) < self._processes else 0
            each, more = divmod(len(indices), self._processes)
            begin = 0
            for part in range(self._processes):
                end = begin + each + (part < more)
                if end > begin:
                    yield indices[begin:end]
                begin = end
