"""``PreparedLoader``: a user's loader as the loop reads it, in keyed order, under keyed randomness, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from trainkit.data.assembling import Filled, each_joined, joined, side_by_side
from trainkit.data.combined import CombinedLoader, CombinedStream
from trainkit.data.position import Positions
from trainkit.data.prefetch import to_device
from trainkit.data.shared_window import Piece, collected, planned
from trainkit.data.stream import Stream, open_stream
from trainkit.data.window import NOTHING, MicroBatch, Window, windows
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.nested import batch_size, copied, move
from trainkit.rng import KeyStream, Purpose, Stage, seed_generators

__all__ = ["PreparedLoader"]

_ONE_PROCESS = World()


class PreparedLoader(Positions):
    """Gives the batches of one epoch per iteration, each on the device, the generators seeded for the work on it.

    Iterating it starts the next epoch, or the one given to :meth:`set_epoch`. What it does not define is the user's
    loader's: ``len(prepared.dataset)`` works.

    Of W processes, process r has micro-batches r, r + W, … of the epoch; W of them, one for each, are a row. A process that
    drives several devices has a micro-batch for each, side by side in one batch: that is a row too. Lengths, limits and what
    :meth:`iterate` takes are in rows, and so the same in all processes; positions are in micro-batches of all.

    Args:
        source: a ``DataLoader``, a :class:`~trainkit.data.CombinedLoader`, or any iterable of batches.
        seed: of the run.
        device: where the batches go.
        stage: which keys are used.
        index: the loader's number in its stage.
        generators: the device's generators, seeded with the CPU's.
        window: told, before each batch, which place it has in its accumulation window; ``None`` for evaluation.
        limit: the number of rows of an epoch at most.
        weigh: the user's ``batch_weight``.
        transfer: ``transfer(batch, m)`` puts a batch on the device; the default moves every tensor in it.
        finish: applied to a batch on the device after the generators are seeded for the work on it.
        sequential: do not shuffle.
        world: the processes that the epoch is dealt out to; all of them make and read the same loaders in the same order.
        ahead: ``ahead(items, load, start)`` gives the items, each out of ``load(item, number)``, and may load some ahead of
            their time; ``load`` is ``None`` where it would but move the tensors. Default: what suits the device.
        filled: fills short batches up to the size of the others.
        repeat_filler: where only others have a micro-batch, this process is given one that counts nothing (its last one again,
            or the first of the epoch). Otherwise it is given none, and ``NOTHING`` where it has none in a whole window.
        follow: ``follow(loader, batches)`` gives the batches of an epoch to one who iterates over this object.

    Attributes:
        limit: as above; may be changed between epochs.
        micro_limit: the number of micro-batches of all processes in an epoch at most.
        repeat_filler: as above; may be changed between epochs.
        given_source: the user's object, if ``source`` was made of it.
        given: rows of the epoch that have been given out; at the last micro-batch of a window the same in all processes.

    Raises:
        DataError: the source cannot be read, or differs from process to process.
    """

    def __init__(
        self,
        source: Any,
        *,
        seed: int,
        device: torch.device,
        stage: Stage = Stage.TRAIN,
        index: int = 0,
        generators: tuple[torch.Generator, ...] = (),
        window: Window | None = None,
        limit: int | None = None,
        weigh: Callable[[Any], float] | None = None,
        transfer: Callable[[Any, int], Any] | None = None,
        finish: Callable[[Any], Any] | None = None,
        sequential: bool = False,
        world: World = _ONE_PROCESS,
        ahead: Callable[..., Iterator[Any]] | None = None,
        filled: Filled | None = None,
        repeat_filler: bool = False,
        follow: Callable[[PreparedLoader, Iterator[Any]], Iterator[Any]] | None = None,
    ) -> None:
        self.source = source
        self._world, self.repeat_filler, self._follow = world, repeat_filler, follow
        self._seed, self._stage = seed, stage.of_loader(index)
        self._device, self._generators = device, generators
        self._window = window
        self._weigh = weigh
        self._non_blocking = device.type == "cuda"
        self._ahead = partial(to_device, device=device) if ahead is None and device.type == "cuda" else ahead
        self._moves, self._moves_ahead = transfer is None, ahead is not None
        self._transfer = self._move if transfer is None else transfer
        self._finish = finish
        if isinstance(source, CombinedLoader):
            self._stream: Stream = CombinedStream(source, seed, stage, index, device, sequential, world)
            self._count: Callable[[Any], int] = source.count
            self._join = joined if source.mode == "sequential" else each_joined
        else:
            self._count, self._join = batch_size, joined
            self._stream = open_stream(source, seed, self._stage, device, sequential, world)
        self._filled, self.given_source = filled, source
        self.limit = limit
        self.micro_limit: int | None = None
        self._epoch = 0
        self._next_epoch = 0
        self._next_start = 0
        self._begun = False  # the epoch, by an own loop
        self.given = 0
        self._resumed = (-1, 0, 0)  # an epoch, and a row of it with the micro-batch that it begins with
        self._last: Any = NOTHING  # the batch that was given last, where it may be needed again
        for trail in self._stream.trails():
            if window is None:
                trail.stop()  # an evaluation begins anew each time
            else:
                trail.keep((4 + 2 * window.size) * world.devices)  # a window that is worked on, and the next one fetched ahead

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet: an object that is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def weighs(self) -> bool:
        """Whether the user says how much a batch counts."""
        return self._weigh is not None

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return length

    @property
    def samples(self) -> int | None:
        """The samples of the batch that was given last that count, where it may have been filled up; else ``None``."""
        return None if self._filled is None else self._filled.samples

    @property
    def sample_mask(self) -> Tensor:
        """Which samples of the batch that was given last count, where short ones are filled up: bool, [batch]."""
        if self._filled is None:
            raise DataError(
                "sample_mask: this loader's batches are not filled up. They are with XLAStrategy(pad_last_batch=True)."
            )
        return self._filled.mask()

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._next_epoch, self._next_start
        self._epoch, self._next_epoch, self._next_start, self._begun = epoch, epoch + 1, 0, True
        self.exhausted, self.left_off = False, None
        batches = self.iterate(epoch, start)
        return batches if self._follow is None else self._follow(self, batches)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from row ``start`` on; nothing before it is fetched from a map-style dataset."""
        self.given = self._window_start = start
        self._seen = -1
        keys = KeyStream(self._seed, self._stage, Purpose.FORWARD, epoch)
        if self._world.size > 1:
            return self._in_rows(epoch, start, keys)
        if self._world.devices > 1:
            return self._watched(self._in_wide_rows(epoch, start, keys))
        return self._watched(self._in_rows_of_one(epoch, start, keys))

    def _in_rows_of_one(self, epoch: int, start: int, keys: KeyStream) -> Iterator[Any]:
        raw = iter(self._stream.batches(epoch, start, self._end))
        sizes, length = self._stream.sizes, self.length
        if sizes is not None and length != self._stream.length:
            sizes = (sizes[0], sizes[0])  # the limit leaves the short last micro-batch out
        return self._of_one_process(raw, keys, start, sizes, self._transfer)

    def _of_one_process(
        self,
        raw: Iterator[Any],
        keys: Callable[[int], int],
        start: int,
        sizes: tuple[int, int] | None,
        transfer: Callable[[Any, int], Any],
    ) -> Iterator[Any]:
        filled, window = self._filled, self._window
        if window is None or (window.size == 1 and self._weigh is None and not window.rows):
            return self._one_by_one(raw if filled is None else map(filled.fill, raw), keys, start, transfer)
        items = windows(
            raw,
            window.size,
            count=self._count,
            start=start,
            length=self.length,
            sizes=sizes,
            weigh=self._weigh,
            taken=window.rows,
        )
        if filled is not None:
            items = (micro._replace(batch=filled.fill(micro.batch)) for micro in items)
        return self._in_windows(window, items, keys, start, transfer)

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        filled, window = self._filled, self._window
        return batches if filled is None or window is None else filled.watched(batches, window)

    def _in_wide_rows(self, epoch: int, start: int, keys: KeyStream) -> Iterator[Any]:
        """An epoch of which a process takes a micro-batch for each of its devices at a time."""
        self._begin_rows(epoch, start)
        devices, begin, end = self._world.devices, self._micro_batch(epoch, start), self.micro_batches
        raw = side_by_side(iter(self._stream.batches(epoch, begin, self._end)), devices, self._join)
        sizes = self._stream.sizes
        if sizes is not None and end is not None:
            last = sizes[1] if end == self._stream.length else sizes[0]
            sizes = (sizes[0] * devices, (end - begin - 1) % devices * sizes[0] + last)

        def first(row: int) -> int:
            return begin + (row - start) * devices

        def transfer(batch: Any, row: int) -> Any:
            return self._transfer(batch, first(row))

        return self._of_one_process(raw, lambda row: keys(first(row)), start, sizes, transfer)

    def _begin_rows(self, epoch: int, start: int) -> None:
        self._epoch = epoch
        if self._resumed[0] == epoch and start < self._resumed[1]:
            self._resumed = (-1, 0, 0)  # the epoch begins anew

    def _one_by_one(
        self, raw: Iterator[Any], keys: Callable[[int], int], start: int, transfer: Callable[[Any, int], Any]
    ) -> Iterator[Any]:
        """Every micro-batch is a window of its own that counts in full, so there is nothing to say about it."""
        if self._window is not None:
            self._window.take(MicroBatch(None, True, True, 1.0))
        device, generators, finish, moves = self._device, self._generators, self._finish, self._moves
        if self._ahead is not None:
            raw, moves, transfer = self._ahead(raw, self._loads(transfer), start=start), False, _as_it_is
        for m, batch in enumerate(raw, start):
            # move itself where it is all that self._transfer does: at every step, a call counts
            batch = move(batch, device) if moves else transfer(batch, m)
            seed_generators(keys(m), generators)
            self.given = m + 1
            yield batch if finish is None else finish(batch)
        if self._window is not None:
            self._window.driven = False  # what is read next may be a loader that was not prepared

    def _in_windows(
        self,
        window: Window,
        items: Iterator[MicroBatch],
        keys: Callable[[int], int],
        start: int,
        transfer: Callable[[Any, int], Any],
    ) -> Iterator[Any]:
        ahead = self._ahead is not None
        if self._ahead is not None:
            load = self._loads(lambda micro, m: micro._replace(batch=transfer(micro.batch, m)))
            items = self._ahead(items, load, start=start)
        offers, begin = window.offers, start
        for m, item in enumerate(items, start):
            batch = item.batch if ahead else transfer(item.batch, m)
            if item.first:
                begin = m
            if offers:
                self._offer(window, item.offer((id(self), begin, m)))
            else:
                window.take(item)
                self._window_start = begin
            self.given = m + 1
            seed_generators(keys(m), self._generators)
            yield batch if self._finish is None else self._finish(batch)
        window.driven, window.offered = False, None

    def _in_rows(self, epoch: int, start: int, keys: KeyStream) -> Iterator[Any]:
        """This process's part of an epoch."""
        world = self._world
        self._begin_rows(epoch, start)
        begin = self._micro_batch(epoch, start)
        raw = iter(self._stream.batches(epoch, begin, self._end, world.rank, world.size))
        if self._window is not None:
            return self._in_shared_windows(self._window, raw, keys, start, begin)
        return self._own(raw, keys, begin + world.rank)

    def _own(self, raw: Iterator[Any], keys: KeyStream, first: int) -> Iterator[Any]:
        """The micro-batches of this process, in an evaluation."""
        generators, finish, transfer, step = self._generators, self._finish, self._transfer, self._world.size
        if self._ahead is not None:
            raw = self._ahead(raw, self._loads(lambda batch, place: self._transfer(batch, first + place * step)), start=0)
            transfer = _as_it_is
        for m, batch in zip(count(first, step), raw):
            batch = transfer(batch, m)
            seed_generators(keys(m), generators)
            batch = batch if finish is None else finish(batch)
            if self.repeat_filler:
                self._last = copied(batch)
            yield batch

    def _in_shared_windows(self, window: Window, raw: Iterator[Any], keys: KeyStream, start: int, begin: int) -> Iterator[Any]:
        """The micro-batches of this process in windows that all work on; one that counts nothing where it has none."""
        world, begun = self._world, start
        offers = window.offers
        items = self._pieces(window, raw, start, begin)
        if self._ahead is not None:
            items = self._ahead(items, self._loads(lambda piece, _: self._transferred(piece)), start=0)
        for piece in items:
            shared = piece.shared
            shared.settle(world)
            if shared.rows == 0:
                break
            row = start + piece.row
            if piece.first:
                begun = row
            end = begun + shared.rows
            # with fillers all processes have as many: users gather at each of them, and so does a forward that is sharded
            later = range(row + 1, end) if piece.full else range(0)
            fillers = later if self.repeat_filler else range(0)
            share = piece.weight * world.size / shared.total if shared.total > 0.0 else 0.0
            empty = shared.total <= 0.0
            full = piece.full and not fillers
            if offers:
                offer = shared.offer(piece.weight, full, world.size, (id(self), begun, row))
                self._offer(window, offer, uneven=shared.uneven, filler=piece.filler)
            else:
                window.deal(piece.first, full, share, empty=empty, uneven=shared.uneven, filler=piece.filler)
                self._window_start = begun
            window.alike = shared.alike
            self.given = end if full else row + 1
            batch = piece.batch if self._ahead is not None else self._transferred(piece).batch
            seed_generators(keys(piece.m), self._generators)
            if piece.filler:
                batch = self.filler() if self.repeat_filler else NOTHING
            elif self._finish is not None:
                batch = self._finish(batch)
            if self.repeat_filler:
                self._last = copied(batch)
            yield batch
            if later and window.by_hand:  # it updates with each row, as the others do
                fillers = later
            for row in fillers:
                if offers:
                    offer = shared.offer(0.0, row == end - 1, world.size, (id(self), begun, row))
                    self._offer(window, offer, uneven=True, filler=True)
                else:
                    window.deal(False, row == end - 1, 0.0, empty=empty, uneven=True, filler=True)
                self.given = row + 1
                seed_generators(keys(begin + (row - start) * world.size + world.rank), self._generators)
                yield self.filler() if self.repeat_filler else NOTHING
        window.driven = window.uneven = window.filler = False
        window.offered = None

    def _pieces(self, window: Window, raw: Iterator[Any], start: int, begin: int) -> Iterator[Piece]:
        sizes, length, world, size = self._stream.sizes, self.micro_batches, self._world, window.size
        taken = window.rows if window.offers else None
        if self._weigh is None and sizes is not None and length is not None:
            if length != self._stream.length:
                sizes = (sizes[0], sizes[0])  # the limit leaves the short last micro-batch out
            return planned(raw, world, size, begin, length, sizes, taken)
        rows = self.length if self.exact else None
        left = None if rows is None else max(0, rows - start)
        return collected(raw, world, size, begin, rows=left, count=self._count, weigh=self._weigh, taken=taken)

    def filler(self) -> Any:
        """A batch to take part with in what the others do: the last one again, or the first of the epoch.

        Raises:
            DataError: this process has no batch at all.
        """
        if self._last is not NOTHING:
            return copied(self._last)
        batch = self._stream.spare(self._epoch)
        if batch is None:
            raise DataError(
                f"process {self._world.rank} has no batch at all, and so nothing to take part with in a step of the others. "
                "Give every process a part of the data."
            )
        batch = self._transfer(batch, 0)
        seed_generators(KeyStream(self._seed, self._stage, Purpose.FORWARD, self._epoch)(0), self._generators)
        return batch if self._finish is None else self._finish(batch)

    def close(self) -> None:
        """End the worker processes of persistent workers."""
        self._stream.close()

    def _move(self, batch: Any, m: int) -> Any:
        return move(batch, self._device, self._non_blocking)

    def _transferred(self, piece: Piece) -> Piece:
        return piece if piece.filler else piece._replace(batch=self._transfer(piece.batch, piece.m))

    def _loads(self, load: Callable[[Any, int], Any]) -> Callable[[Any, int], Any] | None:
        return None if self._moves and self._moves_ahead else load


def _as_it_is(batch: Any, m: int) -> Any:
    return batch
