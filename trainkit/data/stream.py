"""One source of batches for one rank: a ``DataLoader`` taken under control, or any iterable as it is.

A stream knows how many micro-batches an epoch has and how many samples each holds, where that can be known without fetching,
and starts at any micro-batch of any epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.console import notice, warn
from trainkit.data.sampling import KeyedBatches, KeyedDataset, KeyedSlots, UserWorkerInit, keyed_batches, user_epoch
from trainkit.data.trail import Trail
from trainkit.errors import DataError, EmptyLoaderError
from trainkit.rng import KeyStream, Purpose, mix, seed_generators
from trainkit.signals import held_back

__all__ = ["IterableStream", "LoaderStream", "Stream", "open_stream"]


class Stream(Protocol):
    """What :class:`trainkit.data.loader.PreparedLoader` reads from."""

    length: int | None
    """Micro-batches of an epoch, ``None`` if only the end tells."""
    sizes: tuple[int, int] | None
    """Samples of each micro-batch but the last, and of the last; ``None`` if only the batches tell."""
    exact: bool
    """The length is certain; else it is what a dataset or sampler of the user's says of itself."""
    samples: int | None
    """Samples of the dataset, where it has a length; the order depends on it."""

    def trails(self) -> list[Trail]:
        """Where the iterables in it were, for those that can be resumed by a state of their own."""

    def batches(self, epoch: int, start: int, limit: int | None) -> Iterator[Any]:
        """The micro-batches ``start``, ``start + 1``, … (before ``limit``) of an epoch, on the CPU."""

    def close(self) -> None:
        """End the worker processes."""


def open_stream(source: Any, seed: int, stage: int, device: torch.device, sequential: bool = False) -> Stream:
    """The stream of a user's loader.

    Args:
        source: a ``DataLoader`` or any iterable of batches.
        seed: the seed of the run.
        stage: the stage part of the keys, see :meth:`trainkit.rng.Stage.of_loader`.
        device: where the batches will go: for CUDA, what workers fetch is read into pinned memory.
        sequential: do not shuffle (``overfit_batches``).

    Raises:
        DataError: the object cannot be iterated.
    """
    if isinstance(source, DataLoader):
        return LoaderStream(source, seed, stage, device, sequential)
    if not isinstance(source, Iterable):
        raise DataError(
            f"a loader must be a DataLoader or an iterable of batches, not {type(source).__name__}. "
            "For example: DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    return IterableStream(source, seed, stage)


class LoaderStream:
    """A ``DataLoader`` whose samplers are replaced, on a shallow copy, by keyed ones; everything else of it is kept."""

    def __init__(self, loader: DataLoader[Any], seed: int, stage: int, device: torch.device, sequential: bool = False) -> None:
        self._source = loader
        self._seed, self._stage = seed, stage
        self._iterable = isinstance(loader.dataset, IterableDataset)
        changes: dict[str, Any] = {"_iterator": None, "worker_init_fn": UserWorkerInit(loader.worker_init_fn)}
        if device.type == "cuda" and loader.num_workers > 0:  # without workers there may be tensors on CUDA: not to be pinned
            changes["pin_memory"] = True
        self.length: int | None
        self.sizes: tuple[int, int] | None
        if self._iterable:
            self._batches: KeyedBatches | None = None
            self.length, self.sizes, self.exact = _length_of(loader), None, False
            changes["_IterableDataset_len_called"] = None  # our asking for the length is not the user's
            if loader.batch_size is not None:
                size = loader.batch_size
                self._slots = changes["batch_sampler"] = _Slots(size, seed, stage)
            if loader.num_workers > 1:
                notice(
                    f"an IterableDataset with num_workers={loader.num_workers}: each worker iterates the whole dataset unless "
                    "its __iter__ takes its part by torch.utils.data.get_worker_info()."
                )
        else:
            self._batches = keyed_batches(loader, seed, stage, sequential)
            self.length, self.sizes, self.exact = self._batches.length, self._batches.sizes, self._batches.exact
            changes["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._batches
            changes["dataset"] = KeyedDataset(loader.dataset)
        if loader.num_workers > 1 and not loader.in_order:
            changes["in_order"] = True
            notice("in_order=False is not used: which batch came first would be a matter of time, in each run another.")
        self.samples: int | None = None if self._iterable else _length_of(loader.dataset)
        self._trail = Trail(loader.dataset, readable=loader.num_workers == 0) if self._iterable else None
        # What a worker has seen of earlier epochs must not matter: one that reads a stream, or whose dataset is told the
        # epoch (here, in the main process), starts anew in each.
        self._fresh_workers = self._iterable or hasattr(loader.dataset, "set_epoch")
        # DataLoader refuses to have these assigned, and building it anew would need its constructor's arguments, which a
        # subclass may have changed. A shallow copy keeps whatever the user or his subclass has set.
        self._loader: DataLoader[Any] | None = copy.copy(loader)
        self._loader.__dict__.update(changes)
        self._running: Any = None  # the iterator of the epoch that is being read, or was last

    def batches(self, epoch: int, start: int, limit: int | None) -> Iterator[Any]:
        """See :class:`Stream`."""
        loader = self._loader
        if loader is None:
            raise DataError("this loader has been closed. Prepare it again: accelerator.prepare(loader)")
        if hasattr(self._source.dataset, "set_epoch"):
            self._source.dataset.set_epoch(user_epoch(epoch))
        if self._fresh_workers:
            _end_workers(loader._iterator)
            loader._iterator = None
        # starting workers draws a seed, from the global generator or from the loader's
        generator = self._source.generator
        seed_generators(mix(self._seed, self._stage, Purpose.ORDER, epoch), () if generator is None else (generator,))
        if self._batches is not None:
            self._batches.epoch, self._batches.start, self._batches.limit = epoch, start, limit
        elif loader.batch_size is not None:
            self._slots.epoch = epoch
            self._slots.start = start if self._trail is not None and self._trail.resumes(start) else 0
        skipped = start if self._trail is None else self._trail.begin(start)
        with held_back():  # workers may be started
            iterator = self._running = iter(loader)
        try:
            yield from self._from_start(iterator, epoch, start, skipped, limit)
        finally:
            if not loader.persistent_workers:
                _end_workers(iterator)

    def trails(self) -> list[Trail]:
        """See :class:`Stream`."""
        return [] if self._trail is None else [self._trail]

    def _from_start(self, iterator: Iterator[Any], epoch: int, start: int, skipped: int, limit: int | None) -> Iterator[Any]:
        """What is asked for of an iterator over the copy of the loader."""
        if self._trail is None:
            return iterator  # starts where it should
        first = start - skipped  # the number of the batch that the iterator gives first
        if self._source.batch_size is None and self._source.num_workers == 0:
            iterator = _seeded(iterator, KeyStream(self._seed, self._stage, Purpose.FETCH, epoch), first)
        return self._trail.follow(islice(iterator, skipped, None if limit is None else max(limit - first, 0)), start)

    def close(self) -> None:
        """End the workers, persistent ones and those of an epoch that an error has left."""
        _end_workers(self._running)
        self._loader = self._running = None


def _end_workers(iterator: Any) -> None:
    """End the workers of an iterator over a loader now; a traceback can hold it for long, and its end then takes seconds."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
        for worker in getattr(iterator, "_workers", ()):
            if worker.is_alive():  # so busy that it does not even notice that it is to end
                worker.kill()


class _Slots:
    """An endless batch sampler for an iterable dataset, which only needs to know how many samples to take."""

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
    """Any iterable of batches, used as it is."""

    sizes: tuple[int, int] | None = None
    samples: int | None = None

    def __init__(self, source: Iterable[Any], seed: int, stage: int) -> None:
        self._source = source
        self._trail = Trail(source, readable=True)
        self._seed, self._stage = seed, stage
        self._ready = isinstance(source, list | tuple)
        self._one_shot, self._read = isinstance(source, Iterator), False
        self.length: int | None = _length_of(source)
        self.exact = self._ready
        if not self._ready:
            notice(
                f"{type(source).__name__} is iterated as it is: its order is its own (no keyed shuffling)"
                + ("." if self._trail.active else " and a resumed run has to skip through it.")
                + " Wrap the data in a Dataset and a DataLoader to get both."
            )

    def batches(self, epoch: int, start: int, limit: int | None) -> Iterator[Any]:
        """See :class:`Stream`."""
        if self._one_shot and self._read:
            raise EmptyLoaderError(
                f"{type(self._source).__name__} can be iterated only once, and is needed again (in epoch {user_epoch(epoch)}). "
                "Pass an object whose __iter__ starts anew (a list, a DataLoader, a class with __iter__), or set max_epochs=1."
            )
        self._read = True
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(user_epoch(epoch))
        if self._ready:  # ready batches: nothing random happens when the next one is taken
            return islice(iter(self._source), start, limit)
        seed_generators(mix(self._seed, self._stage, Purpose.ORDER, epoch))
        keys = KeyStream(self._seed, self._stage, Purpose.FETCH, epoch)
        skipped = self._trail.begin(start)
        first = start - skipped
        batches = islice(_seeded(iter(self._source), keys, first), skipped, None if limit is None else max(limit - first, 0))
        return self._trail.follow(batches, start)

    def trails(self) -> list[Trail]:
        """See :class:`Stream`."""
        return [self._trail]

    def close(self) -> None:
        """Nothing to end."""


def _seeded(batches: Iterator[Any], keys: KeyStream, m: int) -> Iterator[Any]:
    """The batches of an iterator, of which ``m`` is the first, the generators seeded by key before each is fetched."""
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
    except Exception as error:  # a user's __len__ that fails must not pass for a stream of unknown length
        warn(f"len() of {type(source).__name__} failed ({error!r}); its length counts as unknown.")
        return None
