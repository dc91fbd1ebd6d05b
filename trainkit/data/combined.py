"""Combines several loaders: a batch has the form of their collection, or the loaders are read one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import torch

from trainkit.data.loader_collections import filled, is_loader, loaders_in, parts_of_batch
from trainkit.data.sampling import CYCLE, length_of
from trainkit.data.sharding import StreamSharder
from trainkit.data.state_history import StateHistory, notice_unsaved
from trainkit.data.stream import Stream, open_stream
from trainkit.distributed.world import World
from trainkit.errors import DataError, EmptyLoaderError, UnknownNameError, nearest
from trainkit.nested import batch_size
from trainkit.rng import Stage

__all__ = ["MODES", "CombinedLoader", "CombinedStream"]

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_END = object()
_ONE_PROCESS = World()
_NO_BATCH = "a loader inside a CombinedLoader has no batch. Remove it, or fill its dataset."


class CombinedLoader:
    """Several loaders that are read together as one.

    Args:
        iterables: Loaders in a dict, list or tuple, which may contain others. A batch has the same form. Inside, a list or
            tuple in which not everything is a loader counts as a loader: a list of batches. One loader without a collection
            yields its own batches.
        mode: `"min_size"` stops with the shortest loader; `"max_size_cycle"` continues until the longest ends, and restarts
            shorter ones, reshuffled; `"max_size"` continues until the longest ends, with `None` as the batch of those that
            have ended; `"sequential"` yields the batches of one loader after the other, each unchanged.

    Raises:
        UnknownNameError: The mode is unknown.
        DataError: There are no loaders, or one of them is a `CombinedLoader`.

    Example:
        ```python
        trainer.fit(module, CombinedLoader({"labeled": a, "unlabeled": b}, mode="max_size_cycle"))
        ```

    The weight of a combined micro-batch in its accumulation window is the number of all samples in it.

    In your own code, `for batch, batch_idx, dataloader_idx in loader` reads the loaders as they are, without the order and
    the random numbers that they have in a run.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise UnknownNameError(f"unknown mode {mode!r}; known: {', '.join(MODES)}.{nearest(mode, MODES)}")
        if not (isinstance(iterables, Mapping | list | tuple) or is_loader(iterables)):
            raise _no_loaders(iterables)
        self._iterables, self.mode = iterables, mode
        if not self.flattened:
            raise _no_loaders(iterables)
        if any(isinstance(part, CombinedLoader) for part in self.flattened):
            raise DataError(
                "CombinedLoader: a CombinedLoader inside it is not supported. Put its loaders into the collection: "
                "CombinedLoader([a, [b, c]])"
            )

    @property
    def iterables(self) -> Any:
        """The collection of loaders, or the one loader."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """The loaders in order, without the collections around them. Assign as many to replace them."""
        return list(loaders_in(self._iterables))

    @flattened.setter
    def flattened(self, loaders: Sequence[Any]) -> None:
        if len(loaders) != len(self.flattened):
            raise DataError(
                f"CombinedLoader: flattened must have as many loaders as before, {len(self.flattened)}, not {len(loaders)}. "
                "For others, make another one: CombinedLoader(loaders)"
            )
        self._iterables = filled(self._iterables, iter(loaders))

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch that `assemble` made."""
        if self.mode == "sequential":
            return batch_size(batch)
        return sum(batch_size(part) for part in parts_of_batch(self._iterables, batch) if part is not None)

    def assemble(self, batches: list[Any]) -> Any:
        """Build a batch of the form of `iterables` from one batch of each loader."""
        return filled(self._iterables, iter(batches))

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        loaders = self.flattened
        lengths = [length_of(loader) for loader in loaders]
        parts = [_Bounded(loader, length) for loader, length in zip(loaders, lengths, strict=True)]
        if self.mode == "sequential":
            for number, part in enumerate(parts):
                yield from ((batch, index, number) for index, batch in enumerate(part))
            return
        rows: Iterator[Any] = _restarting(parts)
        if self.mode != "max_size_cycle":
            rows = zip(*parts) if self.mode == "min_size" else zip_longest(*parts)  # noqa: B905 - ends with the shortest
        for index, batches in enumerate(islice(rows, _end_of(self.mode, lengths))):
            yield self.assemble(list(batches)), index, 0

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.flattened]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)


class _Bounded:
    """A loader that ends after its stated length."""

    def __init__(self, loader: Any, length: int | None) -> None:
        self._loader, self._length = loader, length

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._length)


def _end_of(mode: str, lengths: Sequence[int | None]) -> int | None:
    """The largest number of batches of several loaders in one mode, each with its stated length; `None` if unknown."""
    known = [length for length in lengths if length is not None]
    if mode == "min_size":
        return min(known, default=None)
    if len(known) < len(lengths):
        return None
    return sum(known) if mode == "sequential" else max(known)


def _restarting(loaders: Sequence[Any]) -> Iterator[list[Any]]:
    """One batch of each loader, until all have ended; those that end earlier restart."""
    iterators, ended = [iter(loader) for loader in loaders], [False] * len(loaders)
    while True:
        batches = [next(iterator, _END) for iterator in iterators]
        ended = [before or batch is _END for before, batch in zip(ended, batches, strict=True)]
        if all(ended):
            return
        for place, batch in enumerate(batches):
            if batch is _END:
                iterators[place] = iter(loaders[place])
                batches[place] = next(iterators[place], _END)
                if batches[place] is _END:
                    raise EmptyLoaderError(_NO_BATCH)
        yield batches


def _no_loaders(iterables: Any) -> DataError:
    return DataError(
        f"CombinedLoader needs a loader, or a dict or list with at least one in it, not {iterables!r}. "
        "For example: CombinedLoader({'a': loader_a, 'b': loader_b})"
    )


class CombinedStream:
    """The stream of a `CombinedLoader`. The number of a loader is part of its random keys.

    Combined micro-batch m consists of the same batches on any number of processes.
    """

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
        # the first loader has the same keys as without the others; the others have keys that no loader of the stage has
        self._streams: list[Stream] = [
            open_stream(part, seed, stage.of_loader(index + (number << 20)), device, sequential, world)
            for number, part in enumerate(loader.flattened)
        ]
        for sharder in (each for stream in self._streams for each in stream.sharders()):
            sharder.compares_later = False
        if stage is not Stage.TRAIN or sequential:
            for history in (each for stream in self._streams for each in stream.histories()):
                history.stop()
        if loader.mode == "max_size_cycle" and any(stream.length == 0 for stream in self._streams):
            raise EmptyLoaderError(_NO_BATCH)
        self.samples: int | None = None  # of several datasets
        self.counted = 0

    @property
    def splits(self) -> bool:
        """See `trainkit.data.stream.Stream`."""
        return any(stream.splits for stream in self._streams)

    def sharders(self) -> list[StreamSharder]:
        """None: the processes read other numbers of rows of a loader. Its first batches are compared nevertheless."""
        return []

    def resume(self, splits: bool, epoch: int, limited: bool) -> None:
        """See `trainkit.data.stream.Stream`: each stream finds out by itself whether it splits."""
        all_read = self._loader.mode in ("max_size", "sequential") and not limited
        for history in (each for stream in self._streams for each in stream.histories()):
            if epoch and history.continues and not all_read:
                notice_unsaved(history.name, "which a checkpoint does not contain inside a CombinedLoader")

    def prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """See `trainkit.data.stream.Stream`."""

    def histories(self) -> list[StateHistory]:
        """None: batch m is not batch m of each loader, so a loader that cannot start in the middle is skipped through."""
        return []

    @property
    def length(self) -> int | None:
        """See `trainkit.data.stream.Stream`."""
        lengths = [stream.length for stream in self._streams]
        return None if None in lengths else _end_of(self._loader.mode, lengths)

    @property
    def exact(self) -> bool:
        """See `trainkit.data.stream.Stream`."""
        return all(stream.exact for stream in self._streams)

    def measure(self, epoch: int) -> bool:
        """See `trainkit.data.stream.Stream`."""
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
        """See `trainkit.data.stream.Stream`."""
        mode = self._loader.mode
        if step > 1:
            self._prime(epoch, start, limit, turn, step)
        # lengths are known only now, if each process has its own part of a stream
        ends = [end for end in (limit, _end_of(mode, [stream.length for stream in self._streams])) if end is not None]
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
            batches = self._sharded_sequential(epoch, start + turn, end, step)
        return batches if end is None else islice(batches, len(range(start + turn, end, step)))

    def _prime(self, epoch: int, start: int, limit: int | None, turn: int, step: int) -> None:
        """Run the collectives of all streams now: later each process would reach them at a different moment, or never."""
        lengths = [stream.length for stream in self._streams] if self._loader.mode == "min_size" else []
        end = min((each for each in (limit, *lengths) if each is not None), default=None)
        for stream in self._streams:
            stream.prime(epoch, 0 if self._loader.mode == "sequential" else start, end, turn, step)

    def spare(self, epoch: int) -> Any:
        """See `trainkit.data.stream.Stream`."""
        return next(self.batches(epoch, 0, 1), None) if self.exact else None

    def _side_by_side(self, epoch: int, start: int, end: int | None, turn: int, step: int) -> Iterator[Any]:
        iterators = [iter(stream.batches(epoch, start, end, turn, step)) for stream in self._streams]
        shortest = self._loader.mode == "min_size"
        for batches in zip(*iterators) if shortest else zip_longest(*iterators):  # noqa: B905
            yield self._loader.assemble(list(batches))

    def _sequential(self, epoch: int, start: int, end: int | None) -> Iterator[Any]:
        before = 0  # batches of the loaders before
        for stream in self._streams:
            limit = None if end is None else end - before
            if limit is not None and limit <= 0:
                return
            if stream.length is None or not stream.exact:  # only reading it shows where it ends
                for number, batch in enumerate(stream.batches(epoch, 0, limit), before):
                    before = number + 1
                    if number >= start:
                        yield batch
                continue
            if start < before + stream.length:
                yield from stream.batches(epoch, max(0, start - before), limit)
            before += stream.length

    def _sharded_sequential(self, epoch: int, m: int, end: int | None, step: int) -> Iterator[Any]:
        before = 0
        for stream in self._streams:
            length = stream.length if stream.exact else None
            if length is None or m < before + length:
                for batch in stream.batches(epoch, m - before, None if end is None else end - before, 0, step):
                    yield batch
                    m += step
            if end is not None and m >= end:
                return
            before += stream.counted if length is None else length

    def _until_all_wrapped(self, cycles: Sequence[_Cycle | _ShardedCycle]) -> Iterator[Any]:
        while True:
            before = [cycle.wrapped for cycle in cycles]  # these are only read if another loader still has batches
            batches = [_END if wrapped else cycle.next() for wrapped, cycle in zip(before, cycles, strict=True)]
            if all(cycle.wrapped for cycle in cycles):
                return
            asked = zip(before, batches, cycles, strict=True)
            batches = [cycle.next() if wrapped else batch for wrapped, batch, cycle in asked]
            pairs = zip(batches, cycles, strict=True)
            yield self._loader.assemble([cycle.again() if batch is _END else batch for batch, cycle in pairs])

    def close(self) -> None:
        """End the workers of every loader."""
        for stream in self._streams:
            stream.close()


class _Cycle:
    """A stream that restarts when it ends."""

    def __init__(self, stream: Stream, epoch: int, start: int, step: int, end: int | None) -> None:
        self._stream, self._epoch, self._end = stream, epoch, end
        self._number, rest = divmod(start, stream.length) if stream.exact and stream.length else (0, 0)
        self._m = start if stream.exact else 0  # of all batches, not only those of this cycle
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
        self._stream, self._epoch, self._step = stream, epoch, step
        self._left = None if end is None else end - m  # places of all batches, from the next one on
        self._number, self._m = 0, m  # the next batch: its cycle, and its place in it
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
            self._number, self._batches, self.wrapped = self._number + cycles, None, True

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
                if self._stream.counted == 0:
                    raise DataError("a loader inside a CombinedLoader yielded no batch. Remove it, or fill its dataset.")
                self._m, self._number = self._m - self._stream.counted, self._number + 1
            self._open()
            assert self._batches is not None
            batch = next(self._batches, _END)
            if batch is not _END:
                self._advance()
                return batch
