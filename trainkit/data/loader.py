"""`PreparedLoader`: reads a user's loader in keyed order, with keyed randomness, and moves the batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import gcd
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from trainkit.console import notice, quantity, warn
from trainkit.data.batches import BatchPadding, concatenate, concatenate_each, concatenate_groups, to_device
from trainkit.data.combined import CombinedLoader, batch_size_of
from trainkit.data.comparison import comparable
from trainkit.data.micro_batches import NO_BATCH, MicroBatch, MicroBatchKind
from trainkit.data.stream import CombinedStream, Stream, open_stream
from trainkit.data.stream_sharder import Resumption
from trainkit.data.windows import Window, WindowPart, collect_windows, plan_windows
from trainkit.distributed.world import World
from trainkit.errors import DataError, StateMismatchError
from trainkit.nested import batch_size, copy_containers, move
from trainkit.rng import KeyStream, Purpose, Stage, seed_generators

__all__ = ["PreparedLoader", "Reader"]

_ONE_PROCESS = World()
_REPLAY = ("last", "before", "origin")


class Reader(Protocol):
    """Your own training loop, as a loader sees it: it iterates over the loader and may leave a window open."""

    def open_window(self) -> int:
        """Number of micro-batches in the window that the next epoch completes; 0: none is open."""

    def read(self, loader: Any, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """The batches of an epoch."""

    def count_complete(self, loader: Any) -> int:
        """Number of micro-batches of the epoch that belong to complete windows."""


class EpochReading(NamedTuple):
    """How far your own training loop has read an epoch of a loader.

    Attributes:
        phase: "exhausted": it has read the epoch to its end.
        left: While the epoch is unread, the position in a checkpoint that was loaded, and its `start_of` (`None`: inside a
            micro-batch): the epoch begins at its beginning, unless `resume_at` is called.
    """

    phase: Literal["unread", "reading", "exhausted"]
    left: tuple[Mapping[str, Any], int | None] | None = None


class PreparedLoader:
    """A loader that `Accelerator.prepare` returns: this rank's batches of one epoch per iteration, on the device.

    The generators are seeded for each batch. Iterating starts the next epoch, or the one given to `set_epoch`. Attributes
    that it does not define are those of the user's loader: `len(prepared.dataset)` works.

    Rank r of W has micro-batches r, r + W, … of the epoch. A process with several devices has one micro-batch for each,
    joined in one batch. Lengths, limits and the arguments of `iterate` count per rank, so they are the same on all ranks: an
    *index* is the number of a micro-batch of one rank. A *position* in a checkpoint counts samples and the micro-batches of
    all ranks, so that a run on another number of processes can resume from it.

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
        batch_padding: Pads short batches to the size of the others.
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
        reading: How far your own training loop has read the epoch.

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
        batch_padding: BatchPadding | None = None,
        pads: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self.source = source
        self.pads = pads
        self._world = world
        self._reader = reader
        self._seed, self._stage = seed, stage.of_loader(index)
        self._device = device
        self.generators = generators
        self.window = window
        self._weigh = weigh
        self._ahead = partial(to_device, device=device) if ahead is None and device.type == "cuda" else ahead
        self._moves, self._moves_ahead = transfer is None, ahead is not None
        self._transfer = self._move if transfer is None else transfer
        self._finish = finish
        if isinstance(source, CombinedLoader):
            self._stream: Stream = CombinedStream(source, seed, stage, index, device, sequential, world)
            self._count: Callable[[Any], int] = source.count
            self._join = concatenate if source.mode == "sequential" else concatenate_each
        else:
            self._count, self._join = batch_size, concatenate
            self._stream = open_stream(source, seed, self._stage, device, sequential, world)
        self._batch_padding = batch_padding
        self.given_source = source
        self.limit = limit
        self.micro_limit: int | None = None
        self.limits: Callable[[], None] | None = None
        self.length_changes = False
        self._epoch = 0
        self._next_epoch, self._next_start = 0, 0
        self.reading = EpochReading("unread")
        self.given = 0
        self._window_start: int | None = None  # index of the first micro-batch of a window whose last was not yielded yet
        self._resumed = (-1, 0, 0)  # epoch, index in it, and the micro-batch of all ranks at that index
        self._last: Any = NO_BATCH  # the last batch, where padding may need it
        for history in self._stream.histories:
            if window is None:
                history.stop()  # An evaluation always starts from the beginning.
            else:
                history.keep((4 + 2 * window) * world.devices)  # the current window, and the next one fetched in advance

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # An object that is being copied or unpickled has no source yet.
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
        return None if self._batch_padding is None else self._batch_padding.samples

    @property
    def sample_mask(self) -> Tensor:
        """Which samples of the last batch are real, if short ones are padded: bool, [batch]."""
        if self._batch_padding is None:
            raise DataError(
                "sample_mask: the batches of this loader are not padded. To pad them: XLAStrategy(pad_last_batch=True)."
            )
        return self._batch_padding.mask()

    def __iter__(self) -> Iterator[Any]:
        if self._reader is None:
            return (micro.batch for micro in self.next_epoch())
        return self._reader.read(self, self.next_epoch(self._reader.open_window()))

    def next_epoch(self, taken: int = 0) -> Iterator[MicroBatch]:
        """Return the micro-batches of the next epoch; `taken` as in `iterate`."""
        epoch, start = self._next_epoch, self._next_start
        self._epoch = epoch
        self._next_epoch = epoch + 1
        self._next_start = 0
        self.reading = EpochReading("reading")
        return self.iterate(epoch, start, taken)

    def iterate(self, epoch: int, start: int = 0, taken: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of an epoch; nothing before `start` is fetched from a map-style dataset.

        Args:
            epoch: Its number.
            start: Index of the first micro-batch to yield.
            taken: In your own training loop, micro-batches in a window that was left open and that this epoch completes.
        """
        self._begin_epoch(epoch, start)
        world, begin = self._world, self._micro_batch(epoch, start)
        batches: Iterator[Any] = iter(self._stream.batches(epoch, begin, self._end, world.rank, world.size))
        if world.devices > 1:
            batches = concatenate_groups(batches, world.devices, self._join)
        keys = KeyStream(self._seed, self._stage, Purpose.FORWARD, epoch)
        padding = self._batch_padding if world.size == 1 else None
        window = self.window
        if window is None or (window == 1 and self._weigh is None and world.size == 1 and not taken):
            if padding is not None:
                batches = map(padding.fill, batches)
            micro_batches = self._one_by_one(batches, start, begin + world.rank, keys)
        else:
            parts = self._window_parts(window, batches, start, begin, taken)
            if padding is not None:
                fill = padding.fill
                parts = (part._replace(batch=fill(part.batch)) for part in parts)
            micro_batches = self._in_windows(parts, start, begin + world.rank, keys)
        return micro_batches if padding is None or window is None else padding.watch(micro_batches)

    def _begin_epoch(self, epoch: int, start: int) -> None:
        if self._stream.measure(epoch):
            self.length_changes = True
            if self.limits is not None:
                self.limits()
        self._epoch = epoch
        self._note(start, start, last=True)
        if self._resumed[0] == epoch and start < self._resumed[1]:
            self._resumed = (-1, 0, 0)  # The epoch starts again.

    def _one_by_one(self, batches: Iterator[Any], start: int, first: int, keys: KeyStream) -> Iterator[MicroBatch]:
        """Each micro-batch is a window of its own, about which ranks need not agree: an evaluation, or one rank.

        Args:
            batches: On the CPU.
            start: Index of the first one.
            first: Its number among the micro-batches of all ranks.
            keys: The keys of the random numbers of the forward, by this number.
        """
        device, generators, finish, width = self._device, self.generators, self._finish, self._world.width
        one_rank, moves = self._world.size == 1, self._moves
        transfer: Callable[[Any, int], Any] | None = self._transfer
        if self._ahead is not None:
            load = self._loads(lambda batch, place: self._transfer(batch, first + place * width))
            batches, moves, transfer = self._ahead(batches, load, start=0), False, None
        for place, batch in enumerate(batches):
            number = first + place * width
            if moves:
                batch = move(batch, device)  # Not self._transfer, which would be one more call in each step.
            elif transfer is not None:
                batch = transfer(batch, number)
            seed_generators(keys(number), generators)
            if finish is not None:
                batch = finish(batch)
            if one_rank:
                self.given = start + place + 1
            elif self.pads:
                self._last = copy_containers(batch)
            yield MicroBatch(batch, start + place, True, True, 1.0)

    def _window_parts(self, window: int, batches: Iterator[Any], start: int, begin: int, taken: int) -> Iterator[WindowPart]:
        """The batches, on the CPU, with their places in windows of `window`; `begin` is the micro-batch of all ranks there."""
        sizes, length, world = self._stream.sizes, self.micro_batches, self._world
        # Your own training loop may enter a window in the middle, or complete one that it left.
        entries = self._reader is not None and (world.size == 1 or window > 1 or taken > 0)
        if self._weigh is None and sizes is not None and length is not None:
            if length != self._stream.length:
                sizes = (sizes[0], sizes[0])  # The limit excludes the short last micro-batch.
            if world.devices > 1:  # A joined batch counts as one micro-batch.
                sizes = (sizes[0] * world.devices, (length - begin - 1) % world.devices * sizes[0] + sizes[1])
                begin, length = start, start - (begin - length) // world.devices
            return plan_windows(batches, world, window, begin, length, sizes, index=start, taken=taken, entries=entries)
        left = None
        if world.size > 1 and self.exact and self.length is not None:
            left = max(0, self.length - start)
        return collect_windows(
            batches,
            world,
            window,
            per_rank=left,
            count=self._count,
            weigh=self._weigh,
            index=start,
            taken=taken,
            entries=entries,
            digest=self._stream_digest,
        )

    def _in_windows(self, parts: Iterator[WindowPart], start: int, first: int, keys: KeyStream) -> Iterator[MicroBatch]:
        """The micro-batches in windows of all ranks, with padding where only others have one; arguments: see `_one_by_one`."""
        ranks, width, ahead = self._world.size, self._world.width, self._ahead is not None
        for batch, index, ends, weight, window in self._read_ahead(parts, start, first):
            if not window.agreed and not self._agree(window):
                break
            begin, end, kind = window.begin, window.begin + window.per_rank, MicroBatchKind.DATA
            # With padding, all ranks have the same number: users gather at each micro-batch, and so does a sharded forward.
            later = range(index + 1, end) if ends else range(0)
            last = ends and not (later and self.pads)
            self._note(begin, end if last else index + 1, last)
            number = first + (index - start) * width
            if not ahead and batch is not NO_BATCH:
                batch = self._transfer(batch, number)
            seed_generators(keys(number), self.generators)
            if batch is NO_BATCH:
                batch, kind = self._batch_without_data(), self._kind_without_data
            elif self._finish is not None:
                batch = self._finish(batch)
            if ranks > 1 and self.pads:
                self._last = copy_containers(batch)
            yield window.micro_batch(batch, kind, index, weight, last, ranks)
            if later:
                yield from self._without_data(window, later, start, first, keys)

    def _without_data(self, window: Window, later: range, start: int, first: int, keys: KeyStream) -> Iterator[MicroBatch]:
        """The micro-batches at the end of a window in which only other ranks have data; arguments: see `_one_by_one`."""
        if not self.pads and self._reader is None:
            return  # Your own training loop may step after each micro-batch, so it decides whether to run those without data.
        for index in later:
            last = index == later[-1]
            self._note(window.begin, index + 1, last)
            seed_generators(keys(first + (index - start) * self._world.width), self.generators)
            yield window.micro_batch(self._batch_without_data(), self._kind_without_data, index, 0.0, last, self._world.size)

    @property
    def _kind_without_data(self) -> MicroBatchKind:
        return MicroBatchKind.PADDING if self.pads else MicroBatchKind.NONE

    def _read_ahead(self, parts: Iterator[WindowPart], start: int, first: int) -> Iterator[WindowPart]:
        if self._ahead is None:
            return parts
        return self._ahead(parts, self._loads(partial(self._load_part, start=start, first=first)), start=0)

    def _load_part(self, part: WindowPart, _: int, *, start: int, first: int) -> WindowPart:
        """A part of a window with its batch on the device, before its turn."""
        if part.batch is NO_BATCH:
            return part
        return part._replace(batch=self._transfer(part.batch, first + (part.index - start) * self._world.width))

    def _note(self, begin: int, count: int, last: bool) -> None:
        """Record the position for a checkpoint: that before the window that begins at `begin`, until its last micro-batch."""
        self.given = count
        self._window_start = None if last else begin

    def _agree(self, window: Window) -> bool:
        """Exchange what all ranks know of a window; returns whether it has micro-batches, or else the epoch has ended."""
        if not window.agree(self._world):
            raise self._stream.sharders[0].different_streams()
        if window.per_rank == 0 and self._stream.splits:  # Otherwise each window has been compared.
            self.end_epoch()
        return window.per_rank > 0

    def _batch_without_data(self) -> Any:
        return self.padding() if self.pads else NO_BATCH

    def _stream_digest(self) -> int | None:
        """What is equal on all ranks that have read the same of a stream; `None`: it need not be equal."""
        return next((sharder.chain for sharder in self._stream.sharders), None)

    def _move(self, batch: Any, number: int) -> Any:
        return move(batch, self._device, non_blocking=self._device.type == "cuda")

    def _loads(self, load: Callable[[Any, int], Any]) -> Callable[[Any, int], Any] | None:
        """What `ahead` gets: `None` if all it has to do is to move tensors."""
        return None if self._moves and self._moves_ahead else load

    def why_empty(self) -> str:
        """Why an epoch of length 0 has no batch."""
        samples = self._stream.samples
        if not samples:
            return "its dataset is empty"
        size = getattr(self.source, "batch_size", None)
        return f"its {samples} samples do not fill one batch of {size}, and drop_last=True drops the rest"

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
            return copy_containers(self._last)
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

    # ------------------------------------------------------------------------------------------------------- its length

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
        # A batch sampler that splits batches knows the size over all devices.
        whole = getattr(getattr(self.source, "batch_sampler", None), "size_of_all", None)
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

    # ----------------------------------------------------------------------------------------------------- its position

    def set_epoch(self, epoch: int) -> None:
        """The next iteration yields this epoch, from its first batch unless a checkpoint was loaded in the middle of it."""
        if epoch != self._next_epoch:
            self._next_start = 0
        self._next_epoch = epoch
        self.reading = EpochReading("unread", self.reading.left)

    def start_at(self, index: int) -> None:
        """The next iteration yields its epoch from index `index` on."""
        self._next_start = index
        self.reading = EpochReading("unread", self.reading.left)

    def end_reading(self) -> None:
        """Your own training loop has read the epoch to its end."""
        if self.reading.phase == "reading":  # If not, the loop has called set_epoch for the next epoch.
            self.reading = EpochReading("exhausted")

    def state_dict(self) -> dict[str, Any]:
        """The position of a loop that reads this loader: the epoch, and the samples and micro-batches whose windows are full.

        Batches fetched in advance do not count, nor does an incomplete window: a resumed run repeats the whole window.
        """
        if self.reading.phase == "unread":
            left = None if self.reading.left is None else self.reading.left[0]
            if left is not None and left["iterable"] is None and (left["epoch"], 0) == (self._next_epoch, self._next_start):
                return dict(left)  # nothing has been read since it was loaded
            return self.position(self._next_epoch, self._next_start)
        done = self.given
        if self._reader is not None:
            done = self._reader.count_complete(self)
        elif self._window_start is not None:
            done = self._window_start
        # The length may only be known at the end of the epoch.
        if (self.reading.phase == "exhausted" and done == self.given) or (done and done == self.length):
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
        self._next_start = start
        self.reading = EpochReading("unread")
        self.resume(position, start)

    def restart_epoch(self, position: Mapping[str, Any]) -> None:
        """Let the next iteration yield the epoch of a position from its beginning, or the next one if it was complete.

        `reading.left` then contains the arguments of `resume_at`, to continue in the middle of the epoch instead.
        """
        if not position["batches"]:
            self.resume_at(position, 0)
            return
        index = None
        with suppress(StateMismatchError):
            index = -(-self._start_in(position) // self._world.width)
        if position["complete"]:
            self.resume(position, index or 0)  # an iterable may need its state to begin the next epoch
        self.reading = EpochReading("unread", None if position["complete"] else (position, index))
        self._next_epoch = self._epoch = int(position["epoch"]) + bool(position["complete"])
        self._next_start = 0
        self._resumed = (-1, 0, 0)

    def position(self, epoch: int, index: int) -> dict[str, Any]:
        """The position after `index` micro-batches of each rank in `epoch`, for a checkpoint.

        Returns:
            `epoch`; `batches`: micro-batches of all processes; `samples` (`None` if unknown); `complete`: whether
            the epoch is complete; `dataset`: number of samples of the dataset; `iterable`: the state of an iterable that
            has one. In the middle of a stream also `replay`: what `Resumption` has of it. With several devices also
            `processes` (number of micro-batches with the same index), `rank` (of the process whose `iterable` it is) and
            `splits` (each process has its own stream); see `gather_position`.
        """
        sizes, length, world = self._stream.sizes, self._stream.length, self._world
        batches = whole = self._micro_batch(epoch, index)
        if length is not None and self._stream.exact:
            batches = min(batches, length)  # At the last index, some ranks may have none.
        if self.micro_limit is not None:
            batches = min(batches, self.micro_limit)
        samples = None
        if sizes is not None:
            samples = batches * sizes[0] - (sizes[0] - sizes[1] if batches and batches == length else 0)
        kept = next((entry for history in self._stream.histories if (entry := history.at(whole)) is not None), None)
        content: dict[str, Any] = {
            "epoch": epoch,
            "batches": batches,
            "samples": samples,
            "complete": 0 < batches == length,
            "dataset": self._stream.samples,
            "iterable": None if kept is None else kept.state,
        }
        if kept is not None and kept.last is not None and not content["complete"]:
            content["replay"] = {"last": kept.last, "before": kept.before, "origin": kept.origin}
        if world.width > 1:
            content |= {"processes": world.width, "rank": world.rank, "splits": self._stream.splits}
        return content

    @property
    def main_has_position(self) -> bool:
        """Whether the main process knows the positions of all: no iterable has a state or yields different batches on each."""
        return self._world.size == 1 or not (self._stream.splits or any(one.active for one in self._stream.histories))

    def gather_position(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position with the states of the iterables of all processes, for a checkpoint. Collective."""
        if self.main_has_position:
            return position
        states = self._world.exchange_state([position["iterable"], position.get("replay")])
        # if all processes read the same stream, one state is enough
        iterable, replay = zip(*(states if self._stream.splits else [max(states, key=_has_state)]), strict=True)
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
                    f"the checkpoint was saved by {quantity(position['processes'], 'process')}, each with its own stream of "
                    f"data; on {quantity(self._world.size, 'process')} the streams differ. The epoch continues after the same "
                    "number of batches of the new streams."
                )
        elif splits:
            state, replay = (self._of_this_rank(value, position["rank"]) for value in (state, replay))
        self._stream.resume(splits and self._world.size > 1, self._epoch, self._end is not None)
        if state is not None or replay is not None:
            last, before, origin = (None, None, None) if replay is None else (replay[name] for name in _REPLAY)
            for history in self._stream.histories:
                history.resume(
                    Resumption(micro_batch, state, comparable(last), None if before is None else tuple(before), origin)
                )

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


def _has_state(position: Any) -> bool:
    return position[0] is not None or position[1] is not None
