"""A source of batches for one rank: a `DataLoader` with keyed samplers, or any iterable, unchanged.

A stream knows the number of micro-batches in an epoch and the samples in each, if that is possible without fetching, and can
start at any micro-batch of any epoch. It yields the part of one process: all micro-batches, or every W-th.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.console import notice
from trainkit.data.combined import (
    NO_BATCH_IN_LOADER,
    CombinedLoader,
    end_of,
    is_plain_list,
    iterates_itself,
    length_of,
    resamples,
    restartable,
)
from trainkit.data.keyed_sampler import (
    KeyedBatches,
    KeyedDataset,
    SlotSampler,
    UserWorkerInit,
    knows_processes,
    make_keyed_batches,
)
from trainkit.data.loader_workers import end_workers, explain_failures, start_iterator, worker_failures
from trainkit.data.order import CYCLE, user_epoch
from trainkit.data.stream_sharder import StateHistory, StreamSharder, notice_unsaved
from trainkit.distributed.world import World
from trainkit.errors import DataError, EmptyLoaderError
from trainkit.rng import KeyStream, Purpose, Stage, mix, seed_generators

__all__ = ["CombinedStream", "IterableStream", "LoaderStream", "Stream", "open_stream"]

_ONE_PROCESS = World()
_END = object()


class Stream(ABC):
    """What `trainkit.data.loader.PreparedLoader` reads from.

    Attributes:
        histories: the state histories of the iterables in it.
        sharders: what shards the streams in it, to compare further what the processes read.
    """

    histories: list[StateHistory]
    sharders: list[StreamSharder]

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Micro-batches of an epoch, over all processes; `None` if unknown."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the length is certain; otherwise it is what the user's dataset or sampler states, and an upper bound."""

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Samples of each micro-batch but the last, and of the last; `None` if unknown before fetching."""
        return None

    @property
    def samples(self) -> int | None:
        """Number of samples of the dataset, if it has a length; the order depends on it."""
        return None

    @property
    @abstractmethod
    def splits(self) -> bool:
        """Whether each process has its own part of the data and reads all of it."""

    @property
    @abstractmethod
    def last_length(self) -> int:
        """Number of micro-batches in the last epoch that several processes read to its end."""

    @abstractmethod
    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        """Prepare to continue from a checkpoint.

        Args:
            splits: as it was when that was saved.
            epoch: the epoch of the checkpoint.
            limited: a limit ends the epochs.
        """

    @abstractmethod
    def measure(self, epoch: int) -> bool:
        """Read the lengths of the user's objects again, for an epoch that begins; returns whether one changed. Collective."""

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """Run now the collectives that come before reading an epoch from `start` on; arguments as of `batches`."""
        return

    @abstractmethod
    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """The micro-batches `start + turn`, `start + turn + step`, … (before `limit` and `length`) of an epoch, on the CPU."""

    @abstractmethod
    def spare(self, epoch: int) -> Any:
        """A batch of the epoch for a process that has no data: the first one; `None` if the epoch is empty."""

    def close(self) -> None:
        """End the worker processes."""
        return


class _OneSource(Stream):
    """A stream of one loader or iterable.

    Attributes:
        _shares: what decides which of its batches a process has.
    """

    _shares: KeyedBatches | StreamSharder

    @property
    def length(self) -> int | None:
        return self._shares.length

    @property
    def splits(self) -> bool:
        return self._shares.splits

    @property
    def last_length(self) -> int:
        return self._shares.last_length


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
    if isinstance(source, DataLoader) and not iterates_itself(source):
        return LoaderStream(source, seed, stage, device, sequential, world)
    if not isinstance(source, Iterable) or isinstance(source, str):
        raise DataError(
            f"a loader must be a DataLoader or an iterable of batches, not {type(source).__name__}. "
            "For example: DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    return IterableStream(source, seed, stage, world, continues=Stage.TRAIN.has_key(stage) and not sequential)


class LoaderStream(_OneSource):
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
        self._world = world
        self._sequential = sequential
        self._seed, self._stage = seed, stage
        self._iterable = isinstance(loader.dataset, IterableDataset)
        changes: dict[str, Any] = {"_iterator": None, "worker_init_fn": UserWorkerInit(loader.worker_init_fn)}
        # Without workers, tensors may be on CUDA already and cannot be pinned.
        if device.type == "cuda" and loader.num_workers > 0:
            changes["pin_memory"] = True
        if self._iterable:
            self._batches: KeyedBatches | None = None
            self._slots = SlotSampler(loader.batch_size, seed, stage)
            changes |= self._changes_for_iterable(loader)
        else:
            self._batches = make_keyed_batches(loader, seed, stage, sequential, world)
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
        self._lengths = self._read_lengths()
        self._refills = False
        self._sharder = self._sharder_of(loader, world)
        self._history = StateHistory(loader.dataset, readable=loader.num_workers == 0) if self._iterable else None
        self._shares = self._sharder if self._batches is None else self._batches
        self.sharders = [self._sharder]
        self.histories = [] if self._history is None else [self._history]
        # The state of a worker must not depend on earlier epochs: workers of a stream, or of a dataset with set_epoch
        # (called here, in the main process), are restarted in each epoch.
        self._fresh_workers = self._iterable or hasattr(loader.dataset, "set_epoch")
        # DataLoader refuses to assign these, and creating a new one would need its constructor's arguments, which a subclass
        # may have changed. A shallow copy keeps whatever the user or their subclass has set.
        self._loader: DataLoader[Any] | None = copy.copy(loader)
        self._loader.__dict__.update(changes)
        self._running: Any = None  # the iterator of the current epoch, or of the last one
        self._primed: tuple[Any, Iterator[Any], int] | None = None

    def _sharder_of(self, loader: DataLoader[Any], world: World) -> StreamSharder:
        """What shards an iterable dataset; a map-style one is sharded by its sampler."""
        if self._batches is not None:
            name = type(loader.dataset).__name__
            return (
                StreamSharder.for_separate_datasets(world, name)
                if self._batches.separate_datasets
                else StreamSharder(_ONE_PROCESS, name)
            )
        length, samples = length_of(loader), length_of(loader.dataset)
        self._refills = loader.num_workers > 1 and length is not None and loader.batch_size is not None and not loader.drop_last
        extra = loader.num_workers - 1 if self._refills else 0  # all workers but one may end with a short batch
        name, drawn = type(loader.dataset).__name__, resamples(loader)
        return StreamSharder(world, name, length, samples, extra, self._saw_end, resampled=drawn)

    def _changes_for_iterable(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """The attributes to set on a copy of a loader over an iterable dataset, so that its micro-batches have keys."""
        if loader.num_workers > 1:
            notice(
                f"an IterableDataset with num_workers={loader.num_workers}: each worker iterates over the whole dataset unless "
                "its __iter__ selects the part of the worker with torch.utils.data.get_worker_info()."
            )
        # reading the length here must not make torch warn
        slots = "sampler" if loader.batch_size is None else "batch_sampler"
        return {"_IterableDataset_len_called": None, slots: self._slots}

    @property
    def sizes(self) -> tuple[int, int] | None:
        return None if self._batches is None else self._batches.sizes

    @property
    def exact(self) -> bool:
        return self._batches is not None and self._batches.exact

    @property
    def samples(self) -> int | None:
        return None if self._iterable else self._lengths[0]

    def _read_lengths(self) -> tuple[int | None, int | None]:
        """Number of samples, and of batches or samples of an epoch, as the user's dataset and samplers state them now."""
        source = self._source
        counts = source if self._iterable else source.sampler if source.batch_sampler is None else source.batch_sampler
        return length_of(source.dataset, quiet=True), length_of(counts, quiet=True)

    def measure(self, epoch: int) -> bool:
        source = self._source
        owners: list[Any] = [source.dataset, source.sampler, source.batch_sampler]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(user_epoch(epoch))
        lengths = self._read_lengths()
        if not any(self._world.exchange(lengths != self._lengths)):
            return False
        self._lengths = lengths
        if self._batches is None:
            self._sharder.restate(lengths[1], lengths[0])
            return True
        batches = make_keyed_batches(source, self._seed, self._stage, self._sequential, self._world)
        self._batches.__dict__.update(batches.__dict__)  # Changed in place: persistent workers iterate over this object.
        if self._loader is not None:  # These workers have the dataset as it was when they started.
            end_workers(self._loader._iterator)
            self._loader._iterator = None
        return True

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        if self._batches is None:
            self._sharder.splits = splits
        elif self._batches.continues and epoch and limited:
            notice_unsaved(self._batches.name, "which a checkpoint does not contain")

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        if self._iterable:
            if self._primed is not None:
                end_workers(self._primed[0])
            self._primed = self._begin(epoch, start, limit, turn, step)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        if self._batches is not None:
            self._batches.epoch = epoch
            self._batches.start = start
            self._batches.limit = limit
            self._batches.turn = turn
            self._batches.step = step
        begun, self._primed = self._primed, None
        iterator, batches, first = self._begin(epoch, start, limit, turn, step) if begun is None else begun
        try:
            if self._history is None:
                # The keyed sampler starts at the right place.
                separate = self._batches is not None and self._batches.separate_datasets
                yield from self._sharder.record_samples(batches) if separate else batches
                return
            self._slots.allow(self._sharder.reads(first, limit, turn, step))
            reopen = partial(self._reopen, epoch)
            mine = self._sharder.rows(batches, self._history, first, start, limit, turn, step, reopen)
            yield from self._history.follow(mine, start, step, self._has_ended, lambda: self._sharder.record.last)
        finally:
            if not self._source.persistent_workers:
                end_workers(iterator)

    def _has_ended(self) -> bool:
        """Whether the epoch ends with the last batch that was read."""
        return self._sharder.ended or self._saw_end()

    def _saw_end(self) -> bool:
        """Whether the last batch was short because the stream has ended."""
        if self._history is not None and self._history.saw_end is not None:
            return self._history.saw_end
        return bool(getattr(getattr(self._running, "_dataset_fetcher", None), "ended", False))

    def spare(self, epoch: int) -> Any:
        return self._sharder.padding if self._iterable else next(self.batches(epoch, 0, 1), None)

    def _begin(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> tuple[Any, Iterator[Any], int]:
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
        if self._history is None:
            return *self._open_iterator(loader, epoch, 0), 0
        first = self._sharder.place(self._history.begin(start), step)
        self._history.rewind()
        # until the processes have compared the first batches, only as many as each one's own stream would need
        left = self._sharder.reads(first, limit, turn, step, splits=True)
        self._slots.begin(epoch, first, left if left is None or step == 1 else max(1, left))
        iterator, batches = (None, iter(())) if self._history.at_end else self._open_iterator(loader, epoch, first)
        self._running = iterator
        if self._history.active and self._sharder.has_length and epoch > 0 == start:
            batches = _start_over_if_empty(batches, lambda: self._open_iterator(loader, epoch, first)[1])
        if step > 1:
            batches = self._sharder.begin(batches, self._history, epoch, first, start, step, limit)
        return iterator, batches, first

    def _reopen(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch from its beginning, for a dataset in this process."""
        assert self._loader is not None
        seed_generators(mix(self._seed, self._stage, Purpose.ORDER, epoch))
        self._slots.begin(epoch, 0, None)
        return self._open_iterator(self._loader, epoch, 0)[1]

    def _open_iterator(self, loader: DataLoader[Any], epoch: int, first: int) -> tuple[Any, Iterator[Any]]:
        iterator: Any = start_iterator(loader)
        self._running = iterator
        if loader.num_workers > 0:
            if self._iterable:
                self._slots.iterator = iterator
            return iterator, explain_failures(self._slots.refill(iterator, self._source) if self._refills else iterator)
        if self._iterable and loader.batch_size is None:
            return iterator, _seed_each(iterator, KeyStream(self._seed, self._stage, Purpose.FETCH, epoch), first)
        return iterator, iterator

    def close(self) -> None:
        """End the workers: persistent ones, and those of an epoch that an error interrupted."""
        end_workers(self._running)
        self._loader = self._running = self._primed = None


class IterableStream(_OneSource):
    """Any iterable of batches, unchanged.

    An iterator, such as `itertools.cycle(loader)`, cannot start again. If it has not ended, the next epoch reads on in it with
    `continues`; otherwise that is an error.
    """

    exact = False

    def __init__(
        self, source: Iterable[Any], seed: int, stage: int, world: World = _ONE_PROCESS, continues: bool = False
    ) -> None:
        self._source = source
        self._continues = continues
        self._history = StateHistory(source, readable=True)
        self._seed, self._stage = seed, stage
        self._ready = is_plain_list(source)
        self._one_shot = isinstance(source, Iterator)
        self._read = False
        self._exhausted = False
        self._said_that_it_continues = False
        self._primed: tuple[Iterator[Any], int] | None = None
        self.exact = self._ready
        name, whole = type(source).__name__, False
        what, better = "is", "wrap the data in a Dataset and a DataLoader."
        if isinstance(source, DataLoader):
            whole = not isinstance(source.dataset, IterableDataset) and not knows_processes(source)
            what, better = "overrides __iter__, so it is", "use torch's DataLoader; persistent_workers=True keeps its workers."
        self._world = world
        self._length = length_of(source)
        self._sharder = StreamSharder(world, name, self._length, whole=whole, resampled=resamples(source))
        self._shares = self._sharder
        self.sharders = [self._sharder]
        self.histories = [self._history]
        if self._ready:
            self._history.stop()
            self._sharder.ready(source)  # type: ignore[arg-type]  # it is a list
            return
        notice(
            f"{name} {what} iterated as it is, without keyed shuffling"
            + ("." if self._history.active else ", and a resumed run has to skip through it.")
            + f" To get shuffling and exact resume, {better}"
        )

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        if not self._ready:
            self._sharder.splits = splits

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        if not self._ready:
            self._primed = self._begin(epoch, start, limit, step)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        begun, self._primed = self._primed, None
        if self._ready:  # nothing random happens when the next one is taken
            self._open(epoch)
            ready = iter(self._source)
            if step == 1:
                return islice(ready, start, limit)
            begun = ready, 0
        batches, first = self._begin(epoch, start, limit, step) if begun is None else begun
        sharder, reopen = self._sharder, partial(self._reopen, epoch)
        mine = sharder.rows(batches, self._history, first, start, limit, turn, step, reopen)
        return self._history.follow(mine, start, step, lambda: sharder.ended, lambda: sharder.record.last)

    def measure(self, epoch: int) -> bool:
        self._set_epoch(epoch)
        length = length_of(self._source)
        if not any(self._world.exchange(length != self._length)):
            return False
        self._length = length
        self._sharder.restate(length)
        return True

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(user_epoch(epoch))

    def _open(self, epoch: int) -> None:
        if self._one_shot and self._read:
            if self._exhausted or not self._continues:
                raise self._cannot_restart(epoch)
            if not self._said_that_it_continues:
                self._said_that_it_continues = True
                notice(
                    f"{type(self._source).__name__} is an iterator, which cannot start again: each epoch continues where the "
                    "last one stopped."
                    + ("" if self._history.active else " A run that resumes in a later epoch reads it from its start.")
                )
        self._read = True
        self._set_epoch(epoch)

    def _cannot_restart(self, epoch: int) -> EmptyLoaderError:
        instead = "set max_epochs=1"
        if epoch >= CYCLE:
            instead = "use another mode than 'max_size_cycle'"
        elif not Stage.TRAIN.has_key(self._stage):
            instead = "validate once: Trainer(max_epochs=1, val_check_interval=1.0)"
        return EmptyLoaderError(
            f"{type(self._source).__name__} can be iterated only once, but is needed again in epoch {user_epoch(epoch)}. "
            f"Pass {restartable(self._source)}, or {instead}."
        )

    def _once(self, iterator: Iterator[Any], epoch: int, continued: bool) -> Iterator[Any]:
        """The batches of an iterator that cannot start again; an error if it has none for an epoch in which it continues."""
        number = 0
        for number, batch in enumerate(iterator, 1):  # noqa: B007 - used after the loop
            yield batch
        self._exhausted = True
        if continued and number == 0:
            raise self._cannot_restart(epoch)

    def spare(self, epoch: int) -> Any:
        return self._sharder.padding

    def _begin(self, epoch: int, start: int, limit: int | None, step: int) -> tuple[Iterator[Any], int]:
        """The batches, and the number of the first of them."""
        continued = self._read
        self._open(epoch)
        first = self._sharder.place(self._history.begin(start), step)
        keys = self._seed_before_iter(epoch)
        self._history.rewind()
        source = () if self._history.at_end else self._source
        with worker_failures():
            iterator = iter(source)
        if self._one_shot and not self._history.at_end:
            iterator = self._once(iterator, epoch, continued)
        batches = _seed_each(iterator, keys, first)
        if self._history.active and self._sharder.has_length and epoch > 0 == start:
            batches = _start_over_if_empty(batches, lambda: _seed_each(iter(self._source), keys, 0))
        if step > 1:
            # what is read of an iterator that continues in the next epoch must be used in this one
            limit = 1 if self._one_shot else limit
            batches = self._sharder.begin(batches, self._history, epoch, first, start, step, limit)
        return batches, first

    def _reopen(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch from its beginning."""
        return _seed_each(iter(self._source), self._seed_before_iter(epoch), 0)

    def _seed_before_iter(self, epoch: int) -> KeyStream:
        """Seed the generators for `__iter__`; returns the keys of the batches.

        An iterable with a state draws its order in `__iter__`, or only when the first batch is fetched. When it resumes from a
        state it may do the one where it did the other, such as `torchdata.nodes` over a `RandomSampler`. So both have one key.
        """
        keys = KeyStream(self._seed, self._stage, Purpose.FETCH, epoch)
        seed_generators(keys(0) if self._history.active else mix(self._seed, self._stage, Purpose.ORDER, epoch))
        return keys


class CombinedStream(Stream):
    """The stream of a `CombinedLoader`. The number of a loader is part of its random keys.

    Combined micro-batch m consists of the same batches on any number of processes.
    """

    last_length = 0

    def __init__(
        self,
        loader: CombinedLoader,
        seed: int,
        stage: Stage,
        index: int,
        device: torch.device,
        sequential: bool,
        world: World = _ONE_PROCESS,
    ) -> None:
        self._loader = loader
        # Batch m is not batch m of each loader, so a loader that cannot start in the middle is skipped through.
        self.histories = []
        # The processes read different numbers of rows of a loader, so only the first batches of each are compared.
        self.sharders = []
        # the first loader has the same keys as without the others; the others have keys that no loader of the stage has
        self._streams: list[Stream] = [
            open_stream(part, seed, stage.of_loader(index + (number << 20)), device, sequential, world)
            for number, part in enumerate(loader.flattened)
        ]
        for sharder in (each for stream in self._streams for each in stream.sharders):
            sharder.compares_later = False
        if stage is not Stage.TRAIN or sequential:
            for history in (each for stream in self._streams for each in stream.histories):
                history.stop()
        if loader.mode == "max_size_cycle" and any(stream.length == 0 for stream in self._streams):
            raise EmptyLoaderError(NO_BATCH_IN_LOADER)

    @property
    def splits(self) -> bool:
        return any(stream.splits for stream in self._streams)

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        # each stream finds out by itself whether it splits
        all_read = self._loader.mode in ("max_size", "sequential") and not limited
        for history in (each for stream in self._streams for each in stream.histories):
            if epoch and history.continues and not all_read:
                notice_unsaved(history.name, "which a checkpoint does not contain inside a CombinedLoader")

    @property
    def length(self) -> int | None:
        lengths = [stream.length for stream in self._streams]
        return None if None in lengths else end_of(self._loader.mode, lengths)

    @property
    def exact(self) -> bool:
        return all(stream.exact for stream in self._streams)

    def measure(self, epoch: int) -> bool:
        changed = [stream.measure(epoch) for stream in self._streams]
        return any(changed)

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Only if every micro-batch of every loader is full; otherwise the samples are counted when a batch is fetched."""
        sizes = [stream.sizes for stream in self._streams]
        if self._loader.mode == "max_size" and len(sizes) > 1:
            return None
        if any(size is None or size[0] != size[1] for size in sizes):
            return None
        full = [size[0] for size in sizes if size is not None]
        if self._loader.mode == "sequential":
            return (full[0], full[0]) if len(set(full)) == 1 else None
        return sum(full), sum(full)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        mode = self._loader.mode
        if step > 1:
            self._prime(epoch, start, limit, turn, step)
        # lengths are known only now, if each process has its own part of a stream
        ends = [end for end in (limit, end_of(mode, [stream.length for stream in self._streams])) if end is not None]
        end = min(ends, default=None)
        if end is not None and start + turn >= end:
            return iter(())
        batches: Iterator[Any]
        if mode in ("min_size", "max_size"):
            batches = self._side_by_side(epoch, start, end, turn, step)
        elif mode == "max_size_cycle":
            cycle = _Cycle if step == 1 else _ShardedCycle
            batches = self._until_all_wrapped([cycle(stream, epoch, start + turn, step, end) for stream in self._streams])
        elif step == 1:
            batches = self._sequential(epoch, start, end)
        else:
            batches = self._read_in_sequence(epoch, start + turn, end, step)
        return batches if end is None else islice(batches, len(range(start + turn, end, step)))

    def _prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """Run the collectives of all streams now: later each process would reach them at a different moment, or never."""
        lengths = [stream.length for stream in self._streams] if self._loader.mode == "min_size" else []
        end = min((each for each in (limit, *lengths) if each is not None), default=None)
        for stream in self._streams:
            stream.prime(epoch, 0 if self._loader.mode == "sequential" else start, end, turn, step)

    def spare(self, epoch: int) -> Any:
        return next(self.batches(epoch, 0, 1), None) if self.exact else None

    def _side_by_side(self, epoch: int, start: int, end: int | None, turn: int, step: int) -> Iterator[Any]:
        iterators = [iter(stream.batches(epoch, start, end, turn, step)) for stream in self._streams]
        shortest = self._loader.mode == "min_size"
        for batches in zip(*iterators) if shortest else zip_longest(*iterators):  # noqa: B905
            yield self._loader.assemble(list(batches))

    def _sequential(self, epoch: int, start: int, end: int | None) -> Iterator[Any]:
        before = 0  # Number of batches of the loaders before this one.
        for stream in self._streams:
            limit = None if end is None else end - before
            if limit is not None and limit <= 0:
                return
            if stream.length is None or not stream.exact:  # Only reading the stream shows where it ends.
                for number, batch in enumerate(stream.batches(epoch, 0, limit), before):
                    before = number + 1
                    if number >= start:
                        yield batch
                continue
            if start < before + stream.length:
                yield from stream.batches(epoch, max(0, start - before), limit)
            before += stream.length

    def _read_in_sequence(self, epoch: int, m: int, end: int | None, step: int) -> Iterator[Any]:
        before = 0
        for stream in self._streams:
            length = stream.length if stream.exact else None
            if length is None or m < before + length:
                for batch in stream.batches(epoch, m - before, None if end is None else end - before, 0, step):
                    yield batch
                    m += step
            if end is not None and m >= end:
                return
            before += stream.last_length if length is None else length

    def _until_all_wrapped(self, cycles: Sequence[_Cycle | _ShardedCycle]) -> Iterator[Any]:
        while True:
            before = [cycle.wrapped for cycle in cycles]  # these are only read if another loader still has batches
            batches = [_END if wrapped else cycle.next() for wrapped, cycle in zip(before, cycles, strict=True)]
            if all(cycle.wrapped for cycle in cycles):
                return
            rows = zip(before, batches, cycles, strict=True)
            batches = [cycle.next() if wrapped else batch for wrapped, batch, cycle in rows]
            pairs = zip(batches, cycles, strict=True)
            yield self._loader.assemble([cycle.again() if batch is _END else batch for batch, cycle in pairs])

    def close(self) -> None:
        """End the workers of every loader."""
        for stream in self._streams:
            stream.close()


class _Cycle:
    """A stream that restarts when it ends."""

    def __init__(self, stream: Stream, epoch: int, start: int, step: int, end: int | None) -> None:
        self._stream = stream
        self._epoch = epoch
        self._end = end
        self._number, rest = divmod(start, stream.length) if stream.exact and stream.length else (0, 0)
        self._m = start if stream.exact else 0  # Counts all batches, not only those of this cycle.
        self.wrapped = self._number > 0
        self._batches = self._open(rest)
        if not stream.exact:  # the end of a cycle is only known after reading it
            for _ in range(start):
                if self.next() is _END:
                    self.again()

    def _open(self, place: int) -> Iterator[Any]:
        limit = None if self._end is None else place + self._end - self._m
        return iter(self._stream.batches(self._epoch + self._number * CYCLE, place, limit))

    def next(self) -> Any:
        """The next batch, or `_END` at the end of a cycle."""
        batch = next(self._batches, _END)
        self.wrapped = self.wrapped or batch is _END
        self._m += batch is not _END
        return batch

    def again(self) -> Any:
        """The first batch of the next cycle."""
        self._number += 1
        self._batches = self._open(0)
        batch = next(self._batches, _END)
        if batch is _END:
            raise DataError("a loader inside a CombinedLoader yielded no batch. Remove it, or fill its dataset.")
        self._m += 1
        return batch


class _ShardedCycle:
    """The batches m, m + step, … of a stream that restarts when it ends."""

    def __init__(self, stream: Stream, epoch: int, m: int, step: int, end: int | None) -> None:
        self._stream = stream
        self._epoch = epoch
        self._step = step
        self._left = None if end is None else end - m  # Number of batches that are left, counted over all processes.
        self._number = 0  # The cycle of the next batch.
        self._m = m  # The place of the next batch in its cycle.
        self._batches: Iterator[Any] | None = None
        self.wrapped = False
        if stream.exact and stream.length:
            self._wrap(stream.length)
        else:
            self._open()

    def _open(self) -> None:
        limit = None if self._left is None else self._m + self._left
        self._batches = iter(self._stream.batches(self._epoch + self._number * CYCLE, self._m, limit, 0, self._step))

    def _wrap(self, length: int) -> None:
        """Advance to the cycle that contains the next batch, if all cycles have the known length."""
        cycles, self._m = divmod(self._m, length)
        if cycles:
            self._number = self._number + cycles
            self._batches = None
            self.wrapped = True

    def next(self) -> Any:
        """The next batch, or `_END` if `again` must return it."""
        if self._stream.exact and self._stream.length:
            self._wrap(self._stream.length)
            if self._batches is None and not self.wrapped:
                self._open()
        batch = _END if self._batches is None else next(self._batches, _END)
        if batch is _END:
            self.wrapped = True
        else:
            self._advance()
        return batch

    def _advance(self) -> None:
        self._m += self._step
        if self._left is not None:
            self._left -= self._step

    def again(self) -> Any:
        """The next batch, in a cycle that has not been opened yet."""
        while True:
            if self._batches is not None:  # it has ended: only its end shows where
                if self._stream.last_length == 0:
                    raise DataError("a loader inside a CombinedLoader yielded no batch. Remove it, or fill its dataset.")
                self._m = self._m - self._stream.last_length
                self._number = self._number + 1
            self._open()
            assert self._batches is not None
            batch = next(self._batches, _END)
            if batch is not _END:
                self._advance()
                return batch


def _seed_each(batches: Iterator[Any], keys: KeyStream, m: int) -> Iterator[Any]:
    """The batches of an iterator, beginning with number `m`; the generators are seeded by key before each is fetched."""
    with worker_failures():  # the user's loader may have workers
        while True:
            seed_generators(keys(m))
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            m += 1


def _start_over_if_empty(batches: Iterator[Any], again: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The batches of an iterable that continues where it stopped; if that was its end, it is iterated `again`.

    It has not been asked for more batches than its length states, and may not know that it was at its end.
    """
    empty = True
    for batch in batches:
        empty = False
        yield batch
    if empty:
        yield from again()
