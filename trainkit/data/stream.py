"""A source of batches for one rank: a `DataLoader` with keyed samplers, or any iterable, unchanged.

A stream knows the number of micro-batches in an epoch and the samples in each, if that is possible without fetching, and can
start at any micro-batch of any epoch. It yields the part of one process: all micro-batches, or every W-th.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.console import notice, warn
from trainkit.data.loader_workers import end_workers, started
from trainkit.data.sampling import KeyedBatches, KeyedDataset, KeyedSlots, UserWorkerInit, keyed_batches, user_epoch
from trainkit.data.sharding import StreamSharder
from trainkit.data.state_history import StateHistory
from trainkit.distributed.world import World
from trainkit.errors import DataError, EmptyLoaderError
from trainkit.rng import KeyStream, Purpose, mix, seed_generators

__all__ = ["IterableStream", "LoaderStream", "Stream", "open_stream"]

_ONE_PROCESS = World()


class Stream(Protocol):
    """What `trainkit.data.loader.PreparedLoader` reads from."""

    @property
    def length(self) -> int | None:
        """Micro-batches of an epoch, over all processes; `None` if unknown."""

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Samples of each micro-batch but the last, and of the last; `None` if unknown before fetching."""

    @property
    def exact(self) -> bool:
        """Whether the length is certain; otherwise it is what the user's dataset or sampler returns."""

    @property
    def samples(self) -> int | None:
        """Number of samples of the dataset, if it has a length; the order depends on it."""

    @property
    def splits(self) -> bool:
        """Whether each process has its own part of the data and reads all of it."""

    @property
    def counted(self) -> int:
        """Number of micro-batches in the last epoch that several processes read to its end."""

    def histories(self) -> list[StateHistory]:
        """The state histories of the iterables in it."""

    def resume(self, splits: bool) -> None:
        """Prepare to continue from a checkpoint; `splits` is as it was when that was saved."""

    def prime(self, epoch: int, start: int, step: int) -> None:
        """Run now the collectives that come before reading an epoch from `start` on."""

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """The micro-batches `start + turn`, `start + turn + step`, … (before `limit`) of an epoch, on the CPU."""

    def spare(self, epoch: int) -> Any:
        """A batch of the epoch for a process that has no data: the first one; `None` if the epoch is empty."""

    def close(self) -> None:
        """End the worker processes."""


def open_stream(
    source: Any, seed: int, stage: int, device: torch.device, sequential: bool = False, world: World = _ONE_PROCESS
) -> Stream:
    """The stream of a user's loader.

    Args:
        source: a `DataLoader` or any iterable of batches.
        seed: the seed of the run.
        stage: the stage part of the keys, see `trainkit.rng.Stage.of_loader`.
        device: where the batches will go; for CUDA, workers fetch into pinned memory.
        sequential: do not shuffle (`overfit_batches`).
        world: the processes over which it is sharded. Collective.

    Raises:
        DataError: the object cannot be iterated, or differs between processes.
    """
    if isinstance(source, DataLoader):
        return LoaderStream(source, seed, stage, device, sequential, world)
    if not isinstance(source, Iterable):
        raise DataError(
            f"a loader must be a DataLoader or an iterable of batches, not {type(source).__name__}. "
            "For example: DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    return IterableStream(source, seed, stage, world)


class LoaderStream:
    """A shallow copy of a `DataLoader` with keyed samplers; everything else of it is kept."""

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        stage: int,
        device: torch.device,
        sequential: bool = False,
        world: World = _ONE_PROCESS,
    ) -> None:
        self._source = loader
        self._seed, self._stage = seed, stage
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._sharder = StreamSharder(world, type(loader.dataset).__name__)
        changes: dict[str, Any] = {"_iterator": None, "worker_init_fn": UserWorkerInit(loader.worker_init_fn)}
        if (
            device.type == "cuda" and loader.num_workers > 0
        ):  # without workers, tensors may be on CUDA already and cannot be pinned
            changes["pin_memory"] = True
        if self._iterable:
            self._batches: KeyedBatches | None = None
            self._length = self._sharder.agreed(_length_of(loader))
            changes |= self._changes_for_iterable(loader)
        else:
            self._batches = keyed_batches(loader, seed, stage, sequential, world)
            self._sharder.splits = self._batches.splits
            changes["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._batches
            changes["dataset"] = KeyedDataset(loader.dataset)
        if loader.num_workers > 1 and not loader.in_order:
            changes["in_order"] = True
            notice("in_order=False is ignored: the order of batches would depend on timing and differ from run to run.")
        if self._batches is not None and isinstance(getattr(loader.sampler, "generator", None), torch.Generator):
            notice(
                "the generator of this DataLoader has no effect on its order, which is a function of the seed and the epoch, "
                "so that a run can resume anywhere. To choose another order: trainkit.set_seed(n), or Trainer(seed=n)."
            )
        self.sizes: tuple[int, int] | None = None if self._batches is None else self._batches.sizes
        self.exact: bool = self._batches is not None and self._batches.exact
        self.samples: int | None = None if self._iterable else _length_of(loader.dataset)
        self._history = StateHistory(loader.dataset, readable=loader.num_workers == 0) if self._iterable else None
        # The state of a worker must not depend on earlier epochs: workers of a stream, or of a dataset with set_epoch
        # (called here, in the main process), are restarted in each epoch.
        self._fresh_workers = self._iterable or hasattr(loader.dataset, "set_epoch")
        # DataLoader refuses to assign these, and creating a new one would need its constructor's arguments, which a subclass
        # may have changed. A shallow copy keeps whatever the user or their subclass has set.
        self._loader: DataLoader[Any] | None = copy.copy(loader)
        self._loader.__dict__.update(changes)
        self._running: Any = None  # the iterator of the current epoch, or of the last one
        self._primed: tuple[Any, Iterator[Any], int] | None = None

    def _changes_for_iterable(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """The attributes to set on a copy of a loader over an iterable dataset, so that its micro-batches have keys."""
        if loader.num_workers > 1:
            notice(
                f"an IterableDataset with num_workers={loader.num_workers}: each worker iterates over the whole dataset unless "
                "its __iter__ selects the part of the worker with torch.utils.data.get_worker_info()."
            )
        changes: dict[str, Any] = {"_IterableDataset_len_called": None}  # reading the length here must not make torch warn
        if loader.batch_size is not None:
            self._slots = changes["batch_sampler"] = _Slots(loader.batch_size, self._seed, self._stage)
        return changes

    @property
    def length(self) -> int | None:
        """See `Stream`."""
        return self._sharder.length(self._length) if self._batches is None else self._batches.length

    @property
    def splits(self) -> bool:
        """See `Stream`."""
        return self._sharder.splits

    @property
    def counted(self) -> int:
        """See `Stream`."""
        return self._sharder.counted if self._batches is None else self._batches.counted

    def histories(self) -> list[StateHistory]:
        """See `Stream`."""
        return [] if self._history is None else [self._history]

    def resume(self, splits: bool) -> None:
        """See `Stream`."""
        if self._batches is None:
            self._sharder.splits = splits

    def prime(self, epoch: int, start: int, step: int) -> None:
        """See `Stream`."""
        if self._iterable:
            if self._primed is not None:
                end_workers(self._primed[0])
            self._primed = self._begin(epoch, start, step)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """See `Stream`."""
        if self._batches is not None:
            self._batches.epoch, self._batches.start, self._batches.limit = epoch, start, limit
            self._batches.turn, self._batches.step = turn, step
        begun, self._primed = self._primed, None
        iterator, batches, first = self._begin(epoch, start, step) if begun is None else begun
        try:
            if self._history is None:
                yield from batches  # the keyed sampler starts at the right place
            elif step == 1:
                batches = islice(batches, start - first, None if limit is None else max(limit - first, 0))
                yield from self._history.follow(batches, start, skipped=start > first, ended=partial(self._ended, iterator))
            else:
                rows = self._sharder.rows(batches, first, start, limit, turn, step)
                yield from self._history.follow(rows, start, step, ended=partial(self._ended, iterator))
        finally:
            if not self._source.persistent_workers:
                end_workers(iterator)

    def _ended(self, iterator: Any) -> bool:
        """Whether the end of the stream has been read, with a short last batch or in an incomplete row."""
        return self._sharder.ended or bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))

    def spare(self, epoch: int) -> Any:
        """See `Stream`."""
        return self._sharder.spare if self._iterable else next(self.batches(epoch, 0, 1), None)

    def _begin(self, epoch: int, start: int, step: int) -> tuple[Any, Iterator[Any], int]:
        """An iterator over the copy of the loader, its batches, and the number of the first of them."""
        loader = self._loader
        if loader is None:
            raise DataError("this loader has been closed. Prepare it again: accelerator.prepare(loader)")
        if hasattr(self._source.dataset, "set_epoch"):
            self._source.dataset.set_epoch(user_epoch(epoch))
        if self._fresh_workers:
            end_workers(loader._iterator)
            loader._iterator = None
        # starting workers draws a seed, from the global generator or from the loader's
        generator = self._source.generator
        seed_generators(mix(self._seed, self._stage, Purpose.ORDER, epoch), () if generator is None else (generator,))
        first = 0
        if self._history is not None:
            first = self._sharder.place(start, step) if self._history.begin(start) == 0 else 0
            if loader.batch_size is not None:
                self._slots.epoch, self._slots.start = epoch, first
        over = self._history is not None and self._history.at_end
        iterator: Any = iter(()) if over else started(loader)
        self._running = iterator
        if self._history is None:
            return iterator, iterator, first
        batches: Iterator[Any] = iterator
        if loader.batch_size is None and loader.num_workers == 0:
            batches = _seeded(iterator, KeyStream(self._seed, self._stage, Purpose.FETCH, epoch), first)
        if step > 1:
            batches = self._sharder.begin(batches, self._history, epoch, first, start, step)
        return iterator, batches, first

    def close(self) -> None:
        """End the workers: persistent ones, and those of an epoch that an error interrupted."""
        end_workers(self._running)
        self._loader = self._running = self._primed = None


class _Slots:
    """An endless batch sampler for an iterable dataset, which only needs the number of samples in each batch."""

    def __init__(self, size: int, seed: int, stage: int) -> None:
        self._size, self._seed, self._stage = size, seed, stage
        self.epoch = self.start = 0

    def __iter__(self) -> Iterator[KeyedSlots]:
        keys = KeyStream(self._seed, self._stage, Purpose.FETCH, self.epoch)
        m = self.start
        while True:
            yield KeyedSlots(keys(m), self._size)
            m += 1


class IterableStream:
    """Any iterable of batches, unchanged."""

    sizes: tuple[int, int] | None = None
    samples: int | None = None

    def __init__(self, source: Iterable[Any], seed: int, stage: int, world: World = _ONE_PROCESS) -> None:
        self._source = source
        self._history = StateHistory(source, readable=True)
        self._seed, self._stage = seed, stage
        self._ready = isinstance(source, list | tuple)
        self._one_shot, self._read = isinstance(source, Iterator), False
        self._sharder = StreamSharder(world, type(source).__name__)
        self._primed: tuple[Iterator[Any], int] | None = None
        self.exact = self._ready
        if isinstance(source, list | tuple):
            self._length: int | None = len(source) if world.size == 1 else self._sharder.ready(source)
        else:
            self._length = self._sharder.agreed(_length_of(source))
            notice(
                f"{type(source).__name__} is iterated as it is, without keyed shuffling"
                + ("." if self._history.active else ", and a resumed run has to skip through it.")
                + " To get shuffling and exact resume, wrap the data in a Dataset and a DataLoader."
            )

    @property
    def length(self) -> int | None:
        """See `Stream`."""
        return self._sharder.length(self._length)

    @property
    def splits(self) -> bool:
        """See `Stream`."""
        return self._sharder.splits

    @property
    def counted(self) -> int:
        """See `Stream`."""
        return self._sharder.counted

    def resume(self, splits: bool) -> None:
        """See `Stream`."""
        if not self._ready:
            self._sharder.splits = splits

    def prime(self, epoch: int, start: int, step: int) -> None:
        """See `Stream`."""
        if not self._ready:
            self._primed = self._begin(epoch, start, step)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """See `Stream`."""
        if self._ready:  # nothing random happens when the next one is taken
            self._open(epoch)
            ready = iter(self._source)
            return islice(ready, start, limit) if step == 1 else self._sharder.rows(ready, 0, start, limit, turn, step)
        begun, self._primed = self._primed, None
        batches, first = self._begin(epoch, start, step) if begun is None else begun
        if step == 1:
            batches = islice(batches, start - first, None if limit is None else max(limit - first, 0))
            return self._history.follow(batches, start, skipped=start > first)
        rows = self._sharder.rows(batches, first, start, limit, turn, step)
        return self._history.follow(rows, start, step, ended=lambda: self._sharder.ended)

    def _open(self, epoch: int) -> None:
        if self._one_shot and self._read:
            raise EmptyLoaderError(
                f"{type(self._source).__name__} can be iterated only once, but is needed again in epoch {user_epoch(epoch)}. "
                "Pass an object whose __iter__ starts again (a list, a DataLoader, a class with __iter__), or set max_epochs=1."
            )
        self._read = True
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(user_epoch(epoch))

    def spare(self, epoch: int) -> Any:
        """See `Stream`."""
        return self._sharder.spare

    def _begin(self, epoch: int, start: int, step: int) -> tuple[Iterator[Any], int]:
        """The batches, and the number of the first of them."""
        self._open(epoch)
        seed_generators(mix(self._seed, self._stage, Purpose.ORDER, epoch))
        first = self._sharder.place(start, step) if self._history.begin(start) == 0 else 0
        source = () if self._history.at_end else self._source
        batches = _seeded(iter(source), KeyStream(self._seed, self._stage, Purpose.FETCH, epoch), first)
        if step > 1:
            batches = self._sharder.begin(batches, self._history, epoch, first, start, step)
        return batches, first

    def histories(self) -> list[StateHistory]:
        """See `Stream`."""
        return [self._history]

    def close(self) -> None:
        """Do nothing: there are no workers."""


def _seeded(batches: Iterator[Any], keys: KeyStream, m: int) -> Iterator[Any]:
    """The batches of an iterator, beginning with number `m`; the generators are seeded by key before each is fetched."""
    while True:
        seed_generators(keys(m))
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch
        m += 1


def _length_of(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
    except Exception as error:  # a __len__ that raises must not look like a stream without a length
        warn(f"len() of {type(source).__name__} failed ({error!r}); treating its length as unknown.")
        return None
