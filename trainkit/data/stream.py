"""A source of batches for one rank: a `DataLoader` with keyed samplers, or any iterable, unchanged.

A stream knows the number of micro-batches in an epoch and the samples in each, if that is possible without fetching, and can
start at any micro-batch of any epoch. It yields the part of one process: all micro-batches, or every W-th.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.console import notice
from trainkit.data.loader_collections import is_plain_list, iterates_itself, resamples, restartable
from trainkit.data.loader_workers import end_workers, started, worker_failures
from trainkit.data.sampling import (
    CYCLE,
    KeyedBatches,
    KeyedDataset,
    KeyedSlots,
    UserWorkerInit,
    keyed_batches,
    length_of,
    user_epoch,
)
from trainkit.data.sharding import StreamSharder
from trainkit.data.state_history import StateHistory, notice_unsaved
from trainkit.distributed.world import World
from trainkit.errors import DataError, EmptyLoaderError
from trainkit.nested import batch_size
from trainkit.rng import KeyStream, Purpose, Stage, mix, seed_generators

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
        """Whether the length is certain; otherwise it is what the user's dataset or sampler states, and an upper bound."""

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

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        """Prepare to continue from a checkpoint.

        Args:
            splits: as it was when that was saved.
            epoch: the epoch of the checkpoint.
            limited: a limit ends the epochs.
        """

    def measure(self, epoch: int) -> bool:
        """Read the lengths of the user's objects again, for an epoch that begins; returns whether one changed. Collective."""

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """Run now the collectives that come before reading an epoch from `start` on; arguments as of `batches`."""

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """The micro-batches `start + turn`, `start + turn + step`, … (before `limit` and `length`) of an epoch, on the CPU."""

    def sharders(self) -> list[StreamSharder]:
        """What shards the streams in it, to compare further what the processes read."""

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
    if isinstance(source, DataLoader) and not iterates_itself(source):
        return LoaderStream(source, seed, stage, device, sequential, world)
    if not isinstance(source, Iterable) or isinstance(source, str):
        raise DataError(
            f"a loader must be a DataLoader or an iterable of batches, not {type(source).__name__}. "
            "For example: DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    return IterableStream(source, seed, stage, world, continues=Stage.TRAIN.has_key(stage) and not sequential)


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
        self._source, self._world, self._sequential = loader, world, sequential
        self._seed, self._stage = seed, stage
        self._iterable = isinstance(loader.dataset, IterableDataset)
        changes: dict[str, Any] = {"_iterator": None, "worker_init_fn": UserWorkerInit(loader.worker_init_fn)}
        if (
            device.type == "cuda" and loader.num_workers > 0
        ):  # without workers, tensors may be on CUDA already and cannot be pinned
            changes["pin_memory"] = True
        if self._iterable:
            self._batches: KeyedBatches | None = None
            self._slots = _Slots(loader.batch_size, seed, stage)
            changes |= self._changes_for_iterable(loader)
        else:
            self._batches = keyed_batches(loader, seed, stage, sequential, world)
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
        self._lengths = self._stated_lengths()
        self._refills = False
        self._sharder = self._sharder_of(loader, world)
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

    def _sharder_of(self, loader: DataLoader[Any], world: World) -> StreamSharder:
        """What shards an iterable dataset; a map-style one is sharded by its sampler."""
        if self._batches is not None:
            name = type(loader.dataset).__name__
            return StreamSharder.of_parts(world, name) if self._batches.of_parts else StreamSharder(_ONE_PROCESS, name)
        own, samples = length_of(loader), length_of(loader.dataset)
        self._refills = loader.num_workers > 1 and own is not None and loader.batch_size is not None and not loader.drop_last
        extra = loader.num_workers - 1 if self._refills else 0  # all workers but one may end with a short batch
        name, drawn = type(loader.dataset).__name__, resamples(loader)
        return StreamSharder(world, name, own, samples, extra, self._seen_end, resampled=drawn)

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
        """See `Stream`."""
        return None if self._batches is None else self._batches.sizes

    @property
    def exact(self) -> bool:
        """See `Stream`."""
        return self._batches is not None and self._batches.exact

    @property
    def samples(self) -> int | None:
        """See `Stream`."""
        return None if self._iterable else self._lengths[0]

    @property
    def length(self) -> int | None:
        """See `Stream`."""
        return self._sharder.length if self._batches is None else self._batches.length

    def _stated_lengths(self) -> tuple[int | None, int | None]:
        """Number of samples, and of batches or samples of an epoch, as the user's dataset and samplers state them now."""
        source = self._source
        counts = source if self._iterable else source.sampler if source.batch_sampler is None else source.batch_sampler
        return length_of(source.dataset, quiet=True), length_of(counts, quiet=True)

    def measure(self, epoch: int) -> bool:
        """See `Stream`."""
        source = self._source
        owners: list[Any] = [source.dataset, source.sampler, source.batch_sampler]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(user_epoch(epoch))
        lengths = self._stated_lengths()
        if not _any_changed(self._world, lengths != self._lengths):
            return False
        self._lengths = lengths
        if self._batches is None:
            self._sharder.restate(lengths[1], lengths[0])
            return True
        batches = keyed_batches(source, self._seed, self._stage, self._sequential, self._world)
        self._batches.__dict__.update(batches.__dict__)  # in place: workers that last iterate over this object
        if self._loader is not None:  # and have the dataset as it was when they started
            end_workers(self._loader._iterator)
            self._loader._iterator = None
        return True

    @property
    def splits(self) -> bool:
        """See `Stream`."""
        return self._sharder.splits if self._batches is None else self._batches.splits

    @property
    def counted(self) -> int:
        """See `Stream`."""
        return self._sharder.counted if self._batches is None else self._batches.counted

    def histories(self) -> list[StateHistory]:
        """See `Stream`."""
        return [] if self._history is None else [self._history]

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        """See `Stream`."""
        if self._batches is None:
            self._sharder.splits = splits
        elif self._batches.continues and epoch and limited:
            notice_unsaved(self._batches.name, "which a checkpoint does not contain")

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """See `Stream`."""
        if self._iterable:
            if self._primed is not None:
                end_workers(self._primed[0])
            self._primed = self._begin(epoch, start, limit, turn, step)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """See `Stream`."""
        if self._batches is not None:
            self._batches.epoch, self._batches.start, self._batches.limit = epoch, start, limit
            self._batches.turn, self._batches.step = turn, step
        begun, self._primed = self._primed, None
        iterator, batches, first = self._begin(epoch, start, limit, turn, step) if begun is None else begun
        try:
            if self._history is None:
                # the keyed sampler starts at the right place
                yield from batches if self._batches is None or not self._batches.of_parts else self._sharder.recorded(batches)
                return
            self._slots.allow(self._sharder.reads(first, limit, turn, step))
            reopen = partial(self._reopened, epoch)
            mine = self._sharder.rows(batches, self._history, first, start, limit, turn, step, reopen)
            yield from self._history.follow(mine, start, step, self._ended, lambda: self._sharder.record.last)
        finally:
            if not self._source.persistent_workers:
                end_workers(iterator)

    def sharders(self) -> list[StreamSharder]:
        """See `Stream`."""
        return [self._sharder]

    def _ended(self) -> bool:
        """Whether the epoch ends with the last batch that was read."""
        return self._sharder.ended or self._seen_end()

    def _seen_end(self) -> bool:
        """Whether the last batch was short because the stream has ended."""
        if self._history is not None and self._history.seen_end is not None:
            return self._history.seen_end
        return bool(getattr(getattr(self._running, "_dataset_fetcher", None), "ended", False))

    def spare(self, epoch: int) -> Any:
        """See `Stream`."""
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
            return *self._opened(loader, epoch, 0), 0
        first = self._sharder.place(self._history.begin(start), step)
        self._history.rewind()
        # until the processes have compared the first batches, only as many as each one's own stream would need
        left = self._sharder.reads(first, limit, turn, step, splits=True)
        self._slots.begin(epoch, first, left if left is None or step == 1 else max(1, left))
        iterator: Any = None
        batches: Iterator[Any] = iter(())
        if self._history.at_end:
            self._running = None
        else:
            iterator, batches = self._opened(loader, epoch, first)
        if self._history.active and self._sharder.sized and epoch > 0 == start:
            batches = _started_over(batches, lambda: self._opened(loader, epoch, first)[1])
        if step > 1:
            batches = self._sharder.begin(batches, self._history, epoch, first, start, step, limit)
        return iterator, batches, first

    def _reopened(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch from its beginning, for a dataset in this process."""
        assert self._loader is not None
        seed_generators(mix(self._seed, self._stage, Purpose.ORDER, epoch))
        self._slots.begin(epoch, 0, None)
        return self._opened(self._loader, epoch, 0)[1]

    def _opened(self, loader: DataLoader[Any], epoch: int, first: int) -> tuple[Any, Iterator[Any]]:
        iterator: Any = started(loader)
        self._running = iterator
        if loader.num_workers > 0:
            if self._iterable:
                self._slots.iterator = iterator
            return iterator, _explained(self._refilled(iterator) if self._refills else iterator)
        if self._iterable and loader.batch_size is None:
            return iterator, _seeded(iterator, KeyStream(self._seed, self._stage, Purpose.FETCH, epoch), first)
        return iterator, iterator

    def _refilled(self, iterator: Any) -> Iterator[Any]:
        """The batches of workers; where all that were asked for have come, but were short, more are asked for."""
        size, stated = self._source.batch_size, length_of(self._source.dataset)
        assert size is not None
        assert stated is not None
        samples = batches = 0
        while True:
            if batches == self._slots.left and samples < stated:
                self._slots.allow(batches - (samples - stated) // size)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            samples, batches = samples + batch_size(batch), batches + 1
            yield batch

    def close(self) -> None:
        """End the workers: persistent ones, and those of an epoch that an error interrupted."""
        end_workers(self._running)
        self._loader = self._running = self._primed = None


class _Slots:
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
        self._size, self._seed, self._stage = size, seed, stage
        self.begin(0, 0, None)

    def begin(self, epoch: int, start: int, left: int | None) -> None:
        """Begin an epoch at batch `start` of the stream that this process reads."""
        self._keys = KeyStream(self._seed, self._stage, Purpose.FETCH, epoch)
        self._start, self.left = start, left
        self.iterator: Any = None

    def __iter__(self) -> Iterator[KeyedSlots | None]:
        self._asked, self._lost, self._ended = 0, 0, set[int]()
        return self

    def __next__(self) -> KeyedSlots | None:
        if self.left is not None and self._asked - self._unanswered() >= self.left:
            raise StopIteration
        m = self._start + self._asked
        self._asked += 1
        return None if self._size is None else KeyedSlots(self._keys(m), self._size)

    def allow(self, left: int | None) -> None:
        """Let workers that wait, because no more batches were needed, begin with those that now are."""
        self.left, iterator = left, self.iterator
        if iterator is not None:
            for _ in range(iterator._prefetch_factor * iterator._num_workers - len(iterator._task_info)):
                iterator._try_put_index()

    def _unanswered(self) -> int:
        """Number of batches that were asked for in vain."""
        for worker, works in enumerate(getattr(self.iterator, "_workers_status", ())):
            if not works and worker not in self._ended:  # asked right after it has ended
                self._ended.add(worker)
                waiting = self.iterator._task_info.values()
                self._lost += sum(1 for task in waiting if len(task) == 1 and task[0] == worker)
        return self._lost


class IterableStream:
    """Any iterable of batches, unchanged.

    An iterator, such as `itertools.cycle(loader)`, cannot start again. If it has not ended, the next epoch reads on in it with
    `continues`; otherwise that is an error.
    """

    sizes: tuple[int, int] | None = None
    samples: int | None = None

    def __init__(
        self, source: Iterable[Any], seed: int, stage: int, world: World = _ONE_PROCESS, continues: bool = False
    ) -> None:
        self._source, self._continues = source, continues
        self._history = StateHistory(source, readable=True)
        self._seed, self._stage = seed, stage
        self._ready = is_plain_list(source)
        self._one_shot, self._read, self._exhausted = isinstance(source, Iterator), False, False
        self._said_that_it_continues = False
        self._primed: tuple[Iterator[Any], int] | None = None
        self.exact = self._ready
        name, whole = type(source).__name__, False
        what, better = "is", "wrap the data in a Dataset and a DataLoader."
        if isinstance(source, DataLoader):
            whole = not isinstance(source.dataset, IterableDataset) and not _knows_processes(source)
            what, better = "overrides __iter__, so it is", "use torch's DataLoader; persistent_workers=True keeps its workers."
        self._world, self._length = world, length_of(source)
        self._sharder = StreamSharder(world, name, self._length, whole=whole, resampled=resamples(source))
        if self._ready:
            self._history.stop()
            self._sharder.ready(source)  # type: ignore[arg-type]  # it is a list
            return
        notice(
            f"{name} {what} iterated as it is, without keyed shuffling"
            + ("." if self._history.active else ", and a resumed run has to skip through it.")
            + f" To get shuffling and exact resume, {better}"
        )

    @property
    def length(self) -> int | None:
        """See `Stream`."""
        return self._sharder.length

    @property
    def splits(self) -> bool:
        """See `Stream`."""
        return self._sharder.splits

    @property
    def counted(self) -> int:
        """See `Stream`."""
        return self._sharder.counted

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        """See `Stream`."""
        if not self._ready:
            self._sharder.splits = splits

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """See `Stream`."""
        if not self._ready:
            self._primed = self._begin(epoch, start, limit, step)

    def batches(self, epoch: int, start: int, limit: int | None, turn: int = 0, step: int = 1) -> Iterator[Any]:
        """See `Stream`."""
        begun, self._primed = self._primed, None
        if self._ready:  # nothing random happens when the next one is taken
            self._open(epoch)
            ready = iter(self._source)
            if step == 1:
                return islice(ready, start, limit)
            begun = ready, 0
        batches, first = self._begin(epoch, start, limit, step) if begun is None else begun
        sharder, reopen = self._sharder, partial(self._reopened, epoch)
        mine = sharder.rows(batches, self._history, first, start, limit, turn, step, reopen)
        return self._history.follow(mine, start, step, lambda: sharder.ended, lambda: sharder.record.last)

    def sharders(self) -> list[StreamSharder]:
        """See `Stream`."""
        return [self._sharder]

    def measure(self, epoch: int) -> bool:
        """See `Stream`."""
        self._set_epoch(epoch)
        length = length_of(self._source)
        if not _any_changed(self._world, length != self._length):
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
        """See `Stream`."""
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
        batches = _seeded(iterator, keys, first)
        if self._history.active and self._sharder.sized and epoch > 0 == start:
            batches = _started_over(batches, lambda: _seeded(iter(self._source), keys, 0))
        if step > 1:
            # what is read of an iterator that continues in the next epoch must be used in this one
            limit = 1 if self._one_shot else limit
            batches = self._sharder.begin(batches, self._history, epoch, first, start, step, limit)
        return batches, first

    def _reopened(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch from its beginning."""
        keys = self._seed_before_iter(epoch)
        return _seeded(iter(self._source), keys, 0)

    def _seed_before_iter(self, epoch: int) -> KeyStream:
        """Seed the generators for `__iter__`; returns the keys of the batches.

        An iterable with a state draws its order in `__iter__`, or only when the first batch is fetched. When it resumes from a
        state it may do the one where it did the other, such as `torchdata.nodes` over a `RandomSampler`. So both have one key.
        """
        keys = KeyStream(self._seed, self._stage, Purpose.FETCH, epoch)
        seed_generators(keys(0) if self._history.active else mix(self._seed, self._stage, Purpose.ORDER, epoch))
        return keys

    def histories(self) -> list[StateHistory]:
        """See `Stream`."""
        return [self._history]

    def close(self) -> None:
        """Do nothing: there are no workers."""


def _any_changed(world: World, changed: bool) -> bool:
    """Whether a length has changed on any process. Collective."""
    return any(world.exchange(changed))


def _explained(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches that workers fetch."""
    with worker_failures():
        yield from batches


def _seeded(batches: Iterator[Any], keys: KeyStream, m: int) -> Iterator[Any]:
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


def _started_over(batches: Iterator[Any], again: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The batches of an iterable that continues where it stopped; if that was its end, it is iterated `again`.

    It has not been asked for more batches than its length states, and may not know that it was at its end.
    """
    empty = True
    for batch in batches:
        empty = False
        yield batch
    if empty:
        yield from again()


def _knows_processes(sampler: Any, depth: int = 4) -> bool:
    """Whether a sampler, or one inside it, selects a part by rank, as `DistributedSampler` does."""
    if sampler is None or getattr(sampler, "num_replicas", 1) > 1:
        return sampler is not None
    inside = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return depth > 0 and any(_knows_processes(each, depth - 1) for each in inside)
