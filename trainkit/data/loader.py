"""`PreparedLoader`: reads a user's loader in keyed order, with keyed randomness, and moves the batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.console import counted, notice, warn
from trainkit.data.batches import BatchPadding, concatenated_groups, each_joined, joined, to_device
from trainkit.data.combined import CombinedLoader, batch_size_of
from trainkit.data.stream import CombinedStream, Stream, open_stream
from trainkit.data.stream_sharder import Resumption
from trainkit.data.windows import Piece, SharedWindow, collected, planned, windows
from trainkit.distributed.world import World
from trainkit.errors import DataError, StateMismatchError
from trainkit.micro_batch import NO_BATCH, MicroBatch, MicroBatchKind
from trainkit.nested import batch_size, copied, move
from trainkit.rng import KeyStream, Purpose, Stage, seed_generators

__all__ = ["Positions", "PreparedLoader", "Reader"]

_REPLAY = ("last", "before", "origin")


def _known(state: Any) -> bool:
    return state[0] is not None or state[1] is not None


class Reader(Protocol):
    """Your own training loop, as a loader sees it: it iterates over the loader and may leave a window open."""

    def open_window(self) -> int:
        """Number of micro-batches in the window that the next epoch completes; 0: none is open."""

    def read(self, loader: Any, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """The batches of an epoch."""

    def completed(self, loader: Any) -> int:
        """Number of micro-batches of the epoch that belong to complete windows."""


class Positions:
    """The part of `trainkit.data.PreparedLoader` that records its position.

    An index counts the micro-batches of one rank. A position counts samples and the micro-batches of all ranks, so that a run
    on another number of processes can resume from it.

    Attributes:
        exhausted: your own training loop has read the epoch to its end.
        last_position: the position in a checkpoint that was loaded, and its `start_of` (`None`: inside a micro-batch), until
            this loader is read: it begins the epoch at its beginning, unless `resume_at` is called.
    """

    source: Any
    limit: int | None
    micro_limit: int | None
    given: int
    _world: World
    _stream: Stream
    _reader: Reader | None
    _window_start: int  # index of the first micro-batch in the window of the last one yielded
    _inside_window: bool = False  # it is not the last of its window
    _seed: int
    _stage: int
    _epoch: int
    _next_epoch: int
    _next_start: int
    _begun: bool
    _resumed: tuple[int, int, int]
    exhausted: bool = False
    last_position: tuple[Mapping[str, Any], int | None] | None = None

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of an epoch over all processes; `None` if the length is unknown."""
        length, end = self._stream.length, self._end
        return length if length is None or end is None else min(length, end)

    @property
    def even(self) -> bool:
        """Whether all processes certainly have the same number of micro-batches in an epoch."""
        if self._world.size == 1:
            return True
        return self._stream.exact and self.micro_batches is not None and self.micro_batches % self._world.size == 0

    @property
    def total_batch_size(self) -> int:
        """The samples of a batch of all ranks together, unless it is short.

        Raises:
            AttributeError: the loader has no batch size.
        """
        whole = getattr(getattr(self.source, "batch_sampler", None), "size_of_all", None)  # of batches that are split
        if whole is not None:
            return int(whole)
        size = batch_size_of(self.source)
        if size is None:
            raise AttributeError(f"{type(self.source).__name__} has no batch_size")
        return size * self._world.width

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of the dataset over all processes: its `total_length`, or its length."""
        dataset = self.source.dataset
        return int(getattr(dataset, "total_length", None) or len(dataset))

    @property
    def length(self) -> int | None:
        """Micro-batches of this rank in an epoch; `None` if unknown."""
        length = self.micro_batches
        if length is None or self._world.width == 1:
            return length
        index, begin = self._resumed[1:] if self._resumed[0] == self._epoch else (0, 0)
        return index + -(-max(0, length - begin) // self._world.width)

    @property
    def _end(self) -> int | None:
        """The micro-batch at which the limits end an epoch."""
        limit = None if self.limit is None else self.limit * self._world.width
        return limit if self.micro_limit is None else self.micro_limit if limit is None else min(limit, self.micro_limit)

    @property
    def exact(self) -> bool:
        """Whether the length is certain; otherwise it is what the user's dataset or sampler returns."""
        return self._stream.exact

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration yields this epoch, from its first batch unless a checkpoint was loaded in the middle of it."""
        if epoch != self._next_epoch:
            self._next_start = 0
        self._next_epoch, self._begun = epoch, False

    def start_at(self, index: int) -> None:
        """The next iteration yields its epoch from index `index` on."""
        self._next_start, self._begun = index, False

    def state_dict(self) -> dict[str, Any]:
        """The position of a loop that reads this loader: the epoch, and the samples and micro-batches whose windows are full.

        Batches fetched in advance do not count, nor does an incomplete window: a resumed run repeats the whole window.
        """
        if not self._begun:
            left = None if self.last_position is None else self.last_position[0]
            if left is not None and left["iterable"] is None and (left["epoch"], 0) == (self._next_epoch, self._next_start):
                return dict(left)  # nothing has been read since it was loaded
            return self.position(self._next_epoch, self._next_start)
        done = self.given
        if self._reader is not None:
            done = self._reader.completed(self)
        elif self._inside_window:
            done = self._window_start
        # the length may only be known at the end of the epoch
        if (self.exhausted and done == self.given) or (done and done == self.length):
            return self.position(self._epoch + 1, 0)
        return self.position(self._epoch, done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration continue at the position in `state_dict`.

        Raises:
            StateMismatchError: the position is not the start of a micro-batch of this loader.
        """
        self.resume_at(state_dict, self.start_of(state_dict))

    def resume_at(self, position: Mapping[str, Any], start: int) -> None:
        """Let the next iteration begin at a position, whose `start_of` is `start`."""
        self._next_epoch = self._epoch = int(position["epoch"])
        self._next_start, self._begun, self.last_position = start, False, None
        self.resume(position, start)

    def restart_epoch(self, position: Mapping[str, Any]) -> None:
        """Let the next iteration yield the epoch of a position from its beginning, or the next one if it was complete.

        `last_position` then contains the arguments of `resume_at`, to continue in the middle of the epoch instead.
        """
        if not position["batches"]:
            self.resume_at(position, 0)
            return
        index = None
        with suppress(StateMismatchError):
            index = -(-self._start_in(position) // self._world.width)
        if position["complete"]:
            self.resume(position, index or 0)  # an iterable may need its state to begin the next epoch
        else:
            self.last_position = position, index
        self._next_epoch = self._epoch = int(position["epoch"]) + bool(position["complete"])
        self._next_start, self._begun, self._resumed = 0, False, (-1, 0, 0)

    def position(self, epoch: int, index: int) -> dict[str, Any]:
        """The position after `index` micro-batches of each rank in `epoch`, for a checkpoint.

        Returns:
            `epoch`; `batches`: micro-batches of all processes; `samples` (`None` if unknown); `complete`: whether
            the epoch is complete; `dataset`: number of samples of the dataset; `iterable`: the state of an iterable that
            has one. In the middle of a stream also `replay`: what `Resumption` has of it. With several devices also
            `processes` (number of micro-batches with the same index), `rank` (of the process whose `iterable` it is) and
            `splits` (each process has its own stream); see `gathered`.
        """
        sizes, length, world = self._stream.sizes, self._stream.length, self._world
        batches = whole = self._micro_batch(epoch, index)
        if length is not None and self._stream.exact:
            batches = min(batches, length)  # not all ranks may have one at the last index
        if self.micro_limit is not None:
            batches = min(batches, self.micro_limit)
        samples = None
        if sizes is not None:
            samples = batches * sizes[0] - (sizes[0] - sizes[1] if batches and batches == length else 0)
        kept = next((entry for history in self._stream.histories if (entry := history.at(whole)) is not None), None)
        found: dict[str, Any] = {
            "epoch": epoch,
            "batches": batches,
            "samples": samples,
            "complete": 0 < batches == length,
            "dataset": self._stream.samples,
            "iterable": None if kept is None else kept.state,
        }
        if kept is not None and kept.last is not None and not found["complete"]:
            found["replay"] = {"last": kept.last, "before": kept.before, "origin": kept.origin}
        if world.width > 1:
            found |= {"processes": world.width, "rank": world.rank, "splits": self._stream.splits}
        return found

    def gathered(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position with the states of the iterables of all processes, for a checkpoint. Collective."""
        active = any(history.active for history in self._stream.histories)
        if self._world.size == 1 or not (active or self._stream.splits):
            return position
        states = self._world.exchange_state([position["iterable"], position.get("replay")])
        # if all processes read the same stream, one state is enough
        iterable, replay = zip(*(states if self._stream.splits else [max(states, key=_known)]), strict=True)
        kept = {"iterable": list(iterable), "replay": list(replay)}
        if not self._stream.splits:
            kept = {"iterable": iterable[0], "replay": replay[0]}
        return {**position, **kept, "rank": None}

    def start_of(self, position: Mapping[str, Any]) -> int:
        """The index at which a position continues, in micro-batches of this loader's batch size.

        Raises:
            StateMismatchError: the position lies inside a micro-batch.
        """
        there, here = position["dataset"], self._stream.samples
        if position["batches"] and there is not None and here is not None and there != here:
            warn(
                f"the dataset has {here} samples, but had {there} when the checkpoint was saved: the rest of this epoch is in "
                "a different order and may repeat samples. The next epoch is not affected."
            )
        return -(-self._start_in(position) // self._world.width)

    def _start_in(self, position: Mapping[str, Any]) -> int:
        """The micro-batch that follows a position."""
        start, samples, sizes = int(position["batches"]), position["samples"], self._stream.sizes
        if position["complete"] and self._stream.length is not None:
            start = self._stream.length  # whatever the size of its last micro-batch
        elif samples is not None and sizes is not None:
            start, rest = divmod(samples, sizes[0])
            if rest:
                raise StateMismatchError(
                    f"the checkpoint was saved after {samples} samples of the epoch, which is inside a micro-batch of "
                    f"{sizes[0]}. Use a batch_size that divides {samples}, such as {gcd(samples, sizes[0])}, or a checkpoint "
                    "from the end of an epoch."
                )
        return start

    def resume(self, position: Mapping[str, Any], start: int) -> None:
        """Continue the epoch at a position, whose `start_of` is `start`, and iterables from their state."""
        micro_batch, self._epoch = self._start_in(position), int(position["epoch"])
        self._resumed = self._epoch, start, micro_batch
        state, replay, splits = position["iterable"], position.get("replay"), bool(position.get("splits", False))
        if splits and position["processes"] != self._world.size:
            state = replay = None
            if position["batches"]:
                notice(
                    f"the checkpoint was saved by {counted(position['processes'], 'process')}, each with its own stream of "
                    f"data; on {counted(self._world.size, 'process')} the streams differ. The epoch continues after the same "
                    "number of batches of the new streams."
                )
        elif splits:
            state, replay = (self._of_this_rank(value, position["rank"]) for value in (state, replay))
        self._stream.resume(splits and self._world.size > 1, self._epoch, self._end is not None)
        if state is not None or replay is not None:
            last, before, origin = (None, None, None) if replay is None else (replay[name] for name in _REPLAY)
            for history in self._stream.histories:
                history.resume(Resumption(micro_batch, state, last, None if before is None else tuple(before), origin))

    def _of_this_rank(self, value: Any, rank: int | None) -> Any:
        """This rank's part of what a position has for each rank, or for `rank` alone."""
        if value is None or rank not in (None, self._world.rank):
            return None
        return value[self._world.rank] if rank is None else value

    def forward_key(self, index: int) -> int:
        """The key of the random numbers of this rank's forward at an index of the current epoch."""
        m = self._micro_batch(self._epoch, index) + self._world.rank
        return KeyStream(self._seed, self._stage, Purpose.FORWARD, self._epoch)(m)

    def _micro_batch(self, epoch: int, index: int) -> int:
        """The first rank's micro-batch at an index. After a resume, indices count from the position that was resumed."""
        resumed, first, begin = self._resumed
        if epoch == resumed and index >= first:
            return begin + (index - first) * self._world.width
        return index * self._world.width


_ONE_PROCESS = World()


class PreparedLoader(Positions):
    """A loader that `Accelerator.prepare` returns: this rank's batches of one epoch per iteration, on the device.

    The generators are seeded for each batch. Iterating starts the next epoch, or the one given to `set_epoch`. Attributes
    that it does not define are those of the user's loader: `len(prepared.dataset)` works.

    Rank r of W has micro-batches r, r + W, … of the epoch. A process with several devices has one micro-batch for each,
    joined in one batch. Lengths, limits and the arguments of `iterate` count per rank, so they are the same on all ranks;
    positions in checkpoints count the micro-batches of all ranks.

    Args:
        source: A `DataLoader`, a `CombinedLoader`, or any iterable of batches.
        seed: The seed of the run.
        device: The device of the batches.
        stage: The stage, which random keys depend on.
        index: The loader's number in its stage.
        generators: The device's generators, seeded with the CPU's.
        window: Number of micro-batches in an accumulation window; `None` for evaluation.
        limit: Largest number of micro-batches in an epoch, for each rank.
        weigh: The user's `batch_weight`.
        transfer: `transfer(batch, m)` puts a batch on the device; the default moves every tensor in it.
        finish: Applied to a batch on the device after the generators are seeded for it.
        sequential: Do not shuffle.
        world: The processes over which the epoch is sharded; all of them make and read the same loaders in the same order.
        ahead: `ahead(items, load, start)` yields the items, each from `load(item, number)`, and may load some before they
            are needed; `load` is `None` if it would only move the tensors. Default: what suits the device.
        filled: Pads short batches to the size of the others.
        pads: Where only other ranks have a micro-batch, yield a padding micro-batch (this rank's last one again, or the
            first of the epoch). Otherwise yield one of kind `NONE` if this rank has none in a whole window.
        reader: Your own training loop, which iterates over this object.

    Attributes:
        limit: As above; may be changed between epochs.
        micro_limit: The largest number of micro-batches of all processes in an epoch.
        pads: As above; may be changed between epochs.
        window: As above; may be changed between epochs.
        limits: Called to set `limit` and `micro_limit` again when a length has changed, at the start of an epoch.
        length_changes: An epoch has had another length than the one before.
        given_source: The user's object, if `source` was made from it.
        given: Micro-batches of the epoch yielded so far; at the last one of a window the same on all ranks.

    Raises:
        DataError: The source cannot be read, or differs between processes.
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
        window: int | None = None,
        limit: int | None = None,
        weigh: Callable[[Any], float] | None = None,
        transfer: Callable[[Any, int], Any] | None = None,
        finish: Callable[[Any], Any] | None = None,
        sequential: bool = False,
        world: World = _ONE_PROCESS,
        ahead: Callable[..., Iterator[Any]] | None = None,
        filled: BatchPadding | None = None,
        pads: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self.source = source
        self._world, self.pads, self._reader = world, pads, reader
        self._seed, self._stage = seed, stage.of_loader(index)
        self._device, self.generators = device, generators
        self.window = window
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
        self.limits: Callable[[], None] | None = None
        self.length_changes = False
        self._epoch = 0
        self._next_epoch = 0
        self._next_start = 0
        self._begun = False  # the epoch, by an own loop
        self.given = 0
        self._resumed = (-1, 0, 0)  # epoch, index in it, and the micro-batch of all ranks there
        self._last: Any = NO_BATCH  # the last batch, where padding may need it
        for history in self._stream.histories:
            if window is None:
                history.stop()  # an evaluation always starts from the beginning
            else:
                history.keep((4 + 2 * window) * world.devices)  # the current window, and the next one fetched in advance

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet: an object that is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def weighs(self) -> bool:
        """Whether the user defines the weight of a batch."""
        return self._weigh is not None

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return length

    @property
    def samples(self) -> int | None:
        """The number of real samples in the last batch, if it may have been padded; otherwise `None`."""
        return None if self._filled is None else self._filled.samples

    @property
    def sample_mask(self) -> Tensor:
        """Which samples of the last batch are real, if short ones are padded: bool, [batch]."""
        if self._filled is None:
            raise DataError(
                "sample_mask: the batches of this loader are not padded. To pad them: XLAStrategy(pad_last_batch=True)."
            )
        return self._filled.mask()

    def __iter__(self) -> Iterator[Any]:
        if self._reader is None:
            return (micro.batch for micro in self.next_epoch())
        return self._reader.read(self, self.next_epoch(self._reader.open_window()))

    def next_epoch(self, taken: int = 0) -> Iterator[MicroBatch]:
        """Return the micro-batches of the next epoch; `taken` as in `iterate`."""
        epoch, start = self._next_epoch, self._next_start
        self._epoch, self._next_epoch, self._next_start, self._begun = epoch, epoch + 1, 0, True
        self.exhausted, self.last_position = False, None
        return self.iterate(epoch, start, taken)

    def iterate(self, epoch: int, start: int = 0, taken: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of an epoch; nothing before `start` is fetched from a map-style dataset.

        Args:
            epoch: Its number.
            start: Index of the first micro-batch to yield.
            taken: In your own training loop, micro-batches in a window that was left open and that this epoch completes.
        """
        if self._stream.measure(epoch):
            self.length_changes = True
            if self.limits is not None:
                self.limits()
        self.given = self._window_start = start
        self._inside_window = False
        keys = KeyStream(self._seed, self._stage, Purpose.FORWARD, epoch)
        if self._world.size > 1:
            return self._shared_by_processes(epoch, start, keys, taken)
        if self._world.devices > 1:
            return self._watched(self._concatenated(epoch, start, keys, taken))
        return self._watched(self._on_one_device(epoch, start, keys, taken))

    def _on_one_device(self, epoch: int, start: int, keys: KeyStream, taken: int) -> Iterator[MicroBatch]:
        raw = iter(self._stream.batches(epoch, start, self._end))
        sizes, length = self._stream.sizes, self.length
        if sizes is not None and length != self._stream.length:
            sizes = (sizes[0], sizes[0])  # the limit excludes the short last micro-batch
        return self._of_one_process(raw, keys, start, sizes, self._transfer, taken)

    def _of_one_process(
        self,
        raw: Iterator[Any],
        keys: Callable[[int], int],
        start: int,
        sizes: tuple[int, int] | None,
        transfer: Callable[[Any, int], Any],
        taken: int,
    ) -> Iterator[MicroBatch]:
        filled, window = self._filled, self.window
        if window is None or (window == 1 and self._weigh is None and not taken):
            return self._one_by_one(raw if filled is None else map(filled.fill, raw), keys, start, transfer)
        items = windows(
            raw,
            window,
            count=self._count,
            start=start,
            length=self.length,
            sizes=sizes,
            weigh=self._weigh,
            taken=taken,
        )
        if filled is not None:
            items = (micro._replace(batch=filled.fill(micro.batch)) for micro in items)
        return self._in_windows(items, keys, start, transfer)

    def _watched(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        filled = self._filled
        return micro_batches if filled is None or self.window is None else filled.watched(micro_batches)

    def _concatenated(self, epoch: int, start: int, keys: KeyStream, taken: int) -> Iterator[MicroBatch]:
        """An epoch in which each batch concatenates one micro-batch for each device of the process."""
        self._begin_epoch(epoch, start)
        devices, begin, end = self._world.devices, self._micro_batch(epoch, start), self.micro_batches
        raw = concatenated_groups(iter(self._stream.batches(epoch, begin, self._end)), devices, self._join)
        sizes = self._stream.sizes
        if sizes is not None and end is not None:
            last = sizes[1] if end == self._stream.length else sizes[0]
            sizes = (sizes[0] * devices, (end - begin - 1) % devices * sizes[0] + last)

        def first(index: int) -> int:
            return begin + (index - start) * devices

        def transfer(batch: Any, index: int) -> Any:
            return self._transfer(batch, first(index))

        return self._of_one_process(raw, lambda index: keys(first(index)), start, sizes, transfer, taken)

    def _begin_epoch(self, epoch: int, start: int) -> None:
        self._epoch = epoch
        if self._resumed[0] == epoch and start < self._resumed[1]:
            self._resumed = (-1, 0, 0)  # the epoch starts again

    def _one_by_one(
        self, raw: Iterator[Any], keys: Callable[[int], int], start: int, transfer: Callable[[Any, int], Any]
    ) -> Iterator[MicroBatch]:
        """Each micro-batch is one window."""
        device, generators, finish, moves = self._device, self.generators, self._finish, self._moves
        if self._ahead is not None:
            raw, moves, transfer = self._ahead(raw, self._loads(transfer), start=start), False, _unchanged_batch
        for m, batch in enumerate(raw, start):
            # move instead of self._transfer, if that does nothing else: one call less in each step
            batch = move(batch, device) if moves else transfer(batch, m)
            seed_generators(keys(m), generators)
            self.given = m + 1
            yield MicroBatch(batch if finish is None else finish(batch), m, True, True, 1.0)

    def _in_windows(
        self,
        items: Iterator[MicroBatch],
        keys: Callable[[int], int],
        start: int,
        transfer: Callable[[Any, int], Any],
    ) -> Iterator[MicroBatch]:
        ahead, finish = self._ahead is not None, self._finish
        if self._ahead is not None:
            load = self._loads(lambda micro, m: micro._replace(batch=transfer(micro.batch, m)))
            items = self._ahead(items, load, start=start)
        for m, micro in enumerate(items, start):
            batch = micro.batch if ahead else transfer(micro.batch, m)
            self._note(micro.last, m if micro.first else self._window_start, m + 1)
            seed_generators(keys(m), self.generators)
            yield micro._replace(batch=batch if finish is None else finish(batch))

    def _note(self, last: bool, begin: int, given: int) -> None:
        """Record the position for a checkpoint."""
        self._window_start, self._inside_window, self.given = begin, not last, given

    def _shared_by_processes(self, epoch: int, start: int, keys: KeyStream, taken: int) -> Iterator[MicroBatch]:
        """This process's part of an epoch."""
        world = self._world
        self._begin_epoch(epoch, start)
        begin = self._micro_batch(epoch, start)
        raw = iter(self._stream.batches(epoch, begin, self._end, world.rank, world.size))
        if self.window is not None:
            return self._in_shared_windows(self.window, raw, keys, start, begin, taken)
        return self._evaluated(raw, keys, begin + world.rank, start)

    def _evaluated(self, raw: Iterator[Any], keys: KeyStream, first: int, start: int) -> Iterator[MicroBatch]:
        """The micro-batches of this process, in an evaluation."""
        generators, finish, transfer, step = self.generators, self._finish, self._transfer, self._world.size
        if self._ahead is not None:
            raw = self._ahead(raw, self._loads(lambda batch, place: self._transfer(batch, first + place * step)), start=0)
            transfer = _unchanged_batch
        for index, (m, batch) in enumerate(zip(count(first, step), raw), start):
            batch = transfer(batch, m)
            seed_generators(keys(m), generators)
            batch = batch if finish is None else finish(batch)
            if self.pads:
                self._last = copied(batch)
            yield MicroBatch(batch, index, True, True, 1.0)

    def _in_shared_windows(
        self, window: int, raw: Iterator[Any], keys: KeyStream, start: int, begin: int, taken: int
    ) -> Iterator[MicroBatch]:
        """The micro-batches of this process in windows of all ranks, with padding where it has none."""
        world, begun = self._world, start
        without_data = MicroBatchKind.PADDING if self.pads else MicroBatchKind.NONE
        items = self._pieces(window, raw, start, begin, taken)
        if self._ahead is not None:
            items = self._ahead(items, self._loads(lambda piece, _: self._transferred(piece)), start=0)
        for piece in items:
            shared = piece.shared
            if not self._agree(shared):
                break
            index = start + piece.index
            if piece.first:
                begun = index
            end = begun + shared.per_rank
            # with padding, all ranks have the same number: users gather at each micro-batch, and so does a sharded forward
            later = range(index + 1, end) if piece.last else range(0)
            last = piece.last and not (later and self.pads)
            kind = MicroBatchKind.DATA if not piece.absent else without_data
            self._note(last, begun, end if last else index + 1)
            batch = self._batch_of(piece, keys)
            yield shared.micro_batch(batch, kind, (begun, index), piece.weight, last, world.size)
            # your own training loop may step after each micro-batch, so it decides whether to run those without data
            for index in later if self.pads or self._reader is not None else range(0):
                place, final = (begun, index), index == end - 1
                self._note(final, begun, index + 1)
                seed_generators(keys(begin + (index - start) * world.size + world.rank), self.generators)
                batch = self._batch_without_data()
                yield shared.micro_batch(batch, without_data, place, 0.0, final, world.size)

    def _agree(self, shared: SharedWindow) -> bool:
        """Exchange what all ranks know of a window; returns whether it has micro-batches, or else the epoch has ended."""
        if not shared.agree(self._world):
            raise self.different_streams()
        if shared.per_rank == 0 and self._stream.splits:  # otherwise each window has been compared
            self.end_epoch()
        return shared.per_rank > 0

    def _batch_of(self, piece: Piece, keys: KeyStream) -> Any:
        """The batch of a piece on the device, with the generators seeded for its forward."""
        batch = piece.batch if self._ahead is not None else self._transferred(piece).batch
        seed_generators(keys(piece.m), self.generators)
        if piece.absent:
            batch = self._batch_without_data()
        elif self._finish is not None:
            batch = self._finish(batch)
        if self.pads:
            self._last = copied(batch)
        return batch

    def _batch_without_data(self) -> Any:
        return self.padding() if self.pads else NO_BATCH

    def _pieces(self, size: int, raw: Iterator[Any], start: int, begin: int, left_open: int) -> Iterator[Piece]:
        sizes, length, world = self._stream.sizes, self.micro_batches, self._world
        taken = left_open if self._reader is not None and (size > 1 or left_open) else None
        if self._weigh is None and sizes is not None and length is not None:
            if length != self._stream.length:
                sizes = (sizes[0], sizes[0])  # the limit excludes the short last micro-batch
            return planned(raw, world, size, begin, length, sizes, taken)
        length = self.length if self.exact else None
        left = None if length is None else max(0, length - start)
        return collected(
            raw,
            world,
            size,
            begin,
            per_rank=left,
            count=self._count,
            weigh=self._weigh,
            taken=taken,
            chain=self.chain,
        )

    def why_empty(self) -> str:
        """Why an epoch of length 0 has no batch."""
        samples = self._stream.samples
        if not samples:
            return "its dataset is empty"
        size = getattr(self.source, "batch_size", None)
        return f"its {samples} samples do not fill one batch of {size}, and drop_last=True drops the rest"

    def chain(self) -> int | None:
        """A number that is equal on all ranks after the same rows, as they read the same stream; `None`: it tells nothing."""
        return next((sharder.chain for sharder in self._stream.sharders), None)

    def different_streams(self) -> DataError:
        """The error if the ranks have another `chain`."""
        return self._stream.sharders[0].different_streams()

    def end_epoch(self) -> None:
        """Compare what the ranks have read of streams, when all have read an epoch to its end. Collective."""
        for sharder in self._stream.sharders:
            sharder.end_epoch()

    def padding(self) -> Any:
        """A batch for a padding micro-batch: this rank's last one again, or the first of the epoch.

        Raises:
            DataError: This process has no batch at all.
        """
        if self._last is not NO_BATCH:
            return copied(self._last)
        batch = self._stream.spare(self._epoch)
        if batch is None:
            raise DataError(
                f"rank {self._world.rank} has no batch at all, so it cannot take part in the steps of the other ranks. "
                "Give every process some of the data."
            )
        batch = self._transfer(batch, 0)
        seed_generators(KeyStream(self._seed, self._stage, Purpose.FORWARD, self._epoch)(0), self.generators)
        return batch if self._finish is None else self._finish(batch)

    def close(self) -> None:
        """End the processes of persistent workers."""
        self._stream.close()

    def _move(self, batch: Any, m: int) -> Any:
        return move(batch, self._device, self._non_blocking)

    def _transferred(self, piece: Piece) -> Piece:
        return piece if piece.absent else piece._replace(batch=self._transfer(piece.batch, piece.m))

    def _loads(self, load: Callable[[Any, int], Any]) -> Callable[[Any, int], Any] | None:
        return None if self._moves and self._moves_ahead else load


def _unchanged_batch(batch: Any, m: int) -> Any:
    return batch
