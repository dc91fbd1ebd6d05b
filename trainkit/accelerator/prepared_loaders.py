"""Loaders of your own training loop: which are prepared, and which of them the loop is reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainkit.accelerator.gradients import AccumulationState, CallWindow, Place, Snapshot
from trainkit.checks import whole_number
from trainkit.console import notice, warn, with_article
from trainkit.data.batches import BatchPadding
from trainkit.data.combined import CombinedLoader, batch_size_of, is_plain_list
from trainkit.data.keyed_sampler import split_batches
from trainkit.data.loader import PreparedLoader
from trainkit.data.micro_batches import MicroBatch, MicroBatchKind, WindowEntry
from trainkit.errors import ConfigurationError
from trainkit.nested import batch_size, copy_containers
from trainkit.rng import Stage, resolve_seed

if TYPE_CHECKING:
    from trainkit.accelerator.options import Options

__all__ = ["OpenLoaders", "PreparedLoaders", "SkippedLoader", "is_loader", "skip_first_batches"]

_CHECKED = 16  # number of items of a list to check: it may be a long list of batches, or a list of objects to prepare


class LoaderSource(NamedTuple):
    """What is read of a loader that was passed to `prepare`.

    Attributes:
        loader: The loader to read.
        limit: Number of its micro-batches to use; `None`: all.
        skipped: Number of batches of its next epoch to skip.
    """

    loader: Any
    limit: int | None
    skipped: int


class PreparedLoaders:
    """Prepares loaders: each process reads its share of them, in an order that depends on the seed and the epoch.

    Args:
        options: The options of the accelerator.
        accumulation: The accumulation window.
        prepared: The prepared loaders, in the order in which they were prepared.
    """

    def __init__(self, options: Options, accumulation: AccumulationState, prepared: list[PreparedLoader]) -> None:
        self._options = options
        self._strategy = options.strategy
        self._accumulation = accumulation
        self._prepared = prepared
        self._seed: int | None = None
        self.padding: BatchPadding | None = None  # The padding of the first loader, which is trained on.

    @property
    def seed(self) -> int:
        """See `Accelerator.seed`."""
        if self._seed is None:
            self._seed = int(self._strategy.world.from_main(self.own_seed))
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def own_seed(self) -> int:
        """See `Accelerator.own_seed`."""
        return resolve_seed(None) if self._seed is None else self._seed

    def source(self, loader: Any) -> LoaderSource:
        """What is read of a loader of the user's; refuses one that the strategy cannot use."""
        skipped = 0
        if isinstance(loader, SkippedLoader):
            skipped = loader.skipped
            loader = loader.loader
        limit = None
        if self._options.loaders.split_batches:
            loader, limit = split_batches(loader, self._strategy.world_size)
        if not self._prepared:  # the first one is what is trained on
            self._strategy.check_batches(batch_size_of(loader), self._accumulation.size)
        return LoaderSource(loader, limit, skipped)

    def prepare(self, loader: Any, *, window: bool, **options: Any) -> PreparedLoader:
        """See `Accelerator.prepare_loader`."""
        batch_padding, strategy = None, self._strategy
        if strategy.pad_last_batch and window and not options.get("index"):  # the first one is what is trained on
            batch_padding = BatchPadding.of(loader, batch_size_of(loader), strategy.data_world.devices, strategy.move)
            self.padding = batch_padding
        prepared = PreparedLoader(
            loader,
            device=strategy.device,
            generators=strategy.generators(),
            window=self._accumulation.size if window else None,
            world=strategy.data_world,
            ahead=strategy.ahead,
            batch_padding=batch_padding,
            **{"seed": self.seed, "stage": Stage.TRAIN, **options},
        )
        self._prepared.append(prepared)
        return prepared

    def prepare_source(self, original: Any, source: LoaderSource, placed: bool, **options: Any) -> PreparedLoader:
        """Prepare a loader of your own training loop; `original` is the object that was passed to `prepare`."""
        if not placed:
            options["transfer"] = lambda batch, micro: batch
        # Loaders that are read at the same time must not have the same order and the same augmentation.
        pads = self._options.loaders.even_batches or self._strategy.shards_parameters
        prepared = self.prepare(source.loader, window=True, index=len(self._prepared), pads=pads, **options)
        prepared.micro_limit = source.limit
        prepared.given_source = original
        if source.skipped:
            prepared.start_at(source.skipped)
        return prepared

    def release(self, loader: PreparedLoader) -> None:
        """See `Accelerator.release_loader`."""
        loader.close()
        self._prepared[:] = [other for other in self._prepared if other is not loader]

    def clear(self) -> None:
        """Forget the padding of the first loader, which has been released."""
        self.padding = None

    @contextmanager
    def set_padding(self, even: bool) -> Iterator[None]:
        """Within it, loaders that are started have the same number of batches on all processes if `even`."""
        before = [(loader, loader.pads) for loader in self._prepared]
        for loader in self._prepared:
            loader.pads = even or self._strategy.shards_parameters
        try:
            yield
        finally:
            for loader, pads in before:
                loader.pads = pads


class _OpenLoader:
    """A loader with its current batch, and the accumulation state from before it was read."""

    def __init__(self, loader: PreparedLoader, before: Snapshot, number: int, devices: int) -> None:
        self.loader = loader
        self.before = before
        self.number = number
        self.ahead = 0  # batches that were read since a backward pass
        self.window: list[MicroBatch] = []  # what has been read of the window of the batch, without the batches themselves
        self.weights_differ = False  # Whether these batches have different weights.
        self.worked = False  # Whether a backward pass has begun.
        self.batch: Any = None
        self.index = 0  # Index of the batch.
        self.place: Place | None = None  # It is set when the first batch is read.
        size = batch_size_of(loader.source)
        self.full = None if size is None else size * devices
        self.padding = False


class OpenLoaders:
    """The loaders that are being read, one inside the other, as an evaluation is inside an epoch.

    Args:
        accumulation: Each loader changes it, and restores it for the outer loader when it ends.
        models: The user's models; while none of them is in training mode, an evaluation is running.
        devices: Number of devices of a process: its batch is the concatenation of a micro-batch for each.
        processes: Number of micro-batches of all processes that are read at the same time.
        end_late: Called with each window of calls that is open where its loader ends.
        begin_epoch: Called where the loop begins to read a loader.

    Attributes:
        loaded: A checkpoint has been loaded since the last backward pass, so the loop may skip batches by reading them.
        read_ahead: Loaders of which the loop reads all batches of a step before it trains on them, to divide its losses itself.
    """

    def __init__(
        self,
        accumulation: AccumulationState,
        models: Sequence[nn.Module],
        devices: int,
        processes: int,
        end_late: Callable[[CallWindow], None],
        begin_epoch: Callable[[], None],
    ) -> None:
        self._accumulation = accumulation
        self._models = models
        self._devices = devices
        self._processes = processes
        self._end_late = end_late
        self._begin_epoch = begin_epoch
        self._numbers = count()
        self.loaded = False
        self.read_ahead: WeakSet[PreparedLoader] = WeakSet()
        # number of batches that the loop may skip by reading them: up to where a loaded checkpoint was saved
        self._skips_to: WeakKeyDictionary[PreparedLoader, int] = WeakKeyDictionary()
        self._lining: _OpenLoader | None = None  # the one whose batches `accumulate` enters in the order of the queue
        # the last one whose epoch has ended, if it is of `read_ahead` and has batches that were not trained on
        self._ended: _OpenLoader | None = None
        self._places: list[_OpenLoader] = []  # The loader that has yielded a batch last is the last one.
        # of each loader: what accumulate had entered when it yielded a batch, and the index with which that window begins
        self._marks: WeakKeyDictionary[PreparedLoader, tuple[int, int]] = WeakKeyDictionary()
        # Loader → the place where it was read last.
        self._opened: WeakKeyDictionary[PreparedLoader, Place] = WeakKeyDictionary()

    def note_load(self, loaders: Sequence[PreparedLoader], read_ahead: Sequence[int]) -> None:
        """A checkpoint has been loaded, with positions of these loaders: the loop may skip batches by reading them.

        `read_ahead` are numbers of loaders.
        """
        self.loaded = True
        self.read_ahead.update(loaders[number] for number in read_ahead if number < len(loaders))
        positions = {one: 0 if one.reading.left is None else one.reading.left[1] for one in loaders}
        self._skips_to = WeakKeyDictionary({one: at for one, at in positions.items() if at is not None})

    def open_window(self) -> int:
        """See `trainkit.data.loader.Reader`."""
        return self._accumulation.open

    def read(self, loader: PreparedLoader, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """The batches of a loader, as your own training loop reads them.

        Where only other ranks have a batch, there is a padding batch, for the collectives of a training. In an evaluation
        there is none, unless the loader itself yields one.
        """
        self._marks.pop(loader, None)
        if loader.length == 0:
            warn(f"this loader has no batch: {loader.why_empty()}. Nothing is read in this epoch.")
        self._begin_epoch()
        return self._batches(loader, micro_batches)

    def count_complete(self, loader: PreparedLoader) -> int:
        """See `trainkit.data.loader.Reader`."""
        mark, state = self._marks.get(loader), self._accumulation
        if mark is None:
            return loader.given
        entered, begin = mark
        unfinished = state.entered == entered and state.by_hand is not True
        # of a loader that was read to its end nothing is left: in an evaluation the loop enters no batch
        if loader.reading.phase != "exhausted" and (unfinished or (state.open > 0 and state.follows_loader)):
            return begin
        called = state.resumes_at(self._opened[loader])
        return loader.given if called is None else min(called, loader.given)

    def _batches(self, loader: PreparedLoader, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        places, state = self._places, self._accumulation
        place = _OpenLoader(loader, state.snapshot(), next(self._numbers), self._devices)
        places.append(place)
        pending = state.collects()
        try:
            for micro in micro_batches:
                if self._skips(micro):
                    continue
                place.index = micro.index
                if place.place is None:
                    place.place = self._opened[loader] = Place(id(loader), place.number, micro.index)
                if pending and micro.entry is not None:
                    alone = self._receive(place, micro, micro.entry)
                else:
                    alone = micro.share
                    state.begin(micro)
                batch, without_data = micro.batch, micro.kind is not MicroBatchKind.DATA
                if micro.kind is MicroBatchKind.NONE:
                    if not any(model.training for model in self._models):
                        continue
                    batch = loader.padding() if place.batch is None else copy_containers(place.batch)
                place.batch = copy_containers(batch)  # The loop may modify its own batch.
                place.padding = without_data
                place.ahead += 1
                place.weights_differ = place.weights_differ or alone != 1.0
                if places[-1] is not place:
                    places.remove(place)
                    places.append(place)
                yield batch
            loader.end_reading()
            self._note_ended(place)
            if loader.window is None:
                loader.end_epoch()
            for window in state.ending(id(loader)):
                self._end_late(window)
            state.end_loader()
        finally:
            self._end(place)

    def _skips(self, micro: MicroBatch) -> bool:
        """Whether a rank without data skips this: other ranks have more micro-batches in its window, and it has had some.

        With `backward` outside of `accumulate` all ranks step after each micro-batch, and with several calls of `accumulate`
        for a batch in the middle of it.
        """
        state = self._accumulation
        return micro.kind is MicroBatchKind.NONE and not micro.first and state.by_hand is not True and state.follows_loader

    def _receive(self, place: _OpenLoader, micro: MicroBatch, entry: WindowEntry) -> float:
        """Let `accumulate` enter a micro-batch; returns its share outside of a window."""
        self._check_queue(place)
        state, loader = self._accumulation, place.loader
        begin = self._marks.get(loader, (0, micro.index))[1]
        if state.open == 0:
            begin = micro.index  # if the loop enters it, a window begins here
        state.receive(micro)
        self._marks[loader] = state.entered, begin
        if micro.first:
            place.window.clear()
        place.window.append(micro._replace(batch=None))
        return entry.alone

    def _note_ended(self, place: _OpenLoader) -> None:
        self._ended = place if place.ahead and place.loader in self.read_ahead else None

    def _check_queue(self, place: _OpenLoader) -> None:
        """Refuse to read on before `accumulate` has entered what was read ahead."""
        state = self._accumulation
        if state.queue and place is self._lining:
            raise ConfigurationError(
                f"{len(state.queue)} of {state.ahead} batches that were read ahead have not been trained on. Expected: "
                "accumulate() is called once for each, in the order in which they were read, and then the next batches are "
                "read. To skip a batch, call accelerator.backward(None)."
            )

    def place(self) -> Place | None:
        """Where the loop reads, or where it has read ahead; `None`: no loader is being read."""
        place = self._places[-1] if self._places else self._lining
        return None if place is None else place.place

    def remaining(self) -> int | None:
        """Number of batches that follow in the epoch of the loader that is being read; `None`: unknown."""
        place = self._places[-1]
        length = place.loader.length if place.loader.exact else None
        return None if length is None else length - 1 - place.index

    @property
    def reading(self) -> list[PreparedLoader]:
        """The loaders that are being read; the last one has yielded the current batch."""
        return [place.loader for place in self._places]

    def _end(self, place: _OpenLoader) -> None:
        """A loader has been read: restore the state from before it.

        An evaluation that the loop leaves early is over: the next one begins at the first batch, in a resumed run too.
        """
        evaluates = bool(self._models) and not any(model.training for model in self._models)
        if evaluates and place.batch is not None and not place.worked:
            place.loader.end_reading()
        if self._places[-1] is place:
            self._accumulation.restore(place.before)
        self._places.remove(place)
        if not self._places:
            self._accumulation.leave()
        later = [other for other in self._places if other.number > place.number]
        if later:  # read at the same time: the state from before this one is the state from before all of them
            min(later, key=lambda other: other.number).before = place.before

    def working(self) -> None:
        """The loop works on the batch that was read last; refuses that if it is unclear which one that is."""
        if not self._places:
            return
        place = self._places[-1]
        ahead, differ, skips = place.ahead, place.weights_differ, self.loaded
        self._begin_work(place)
        if ahead > 1 and not skips and self._accumulation.size > 1 and self._accumulation.by_hand is True:
            self._check_read_ahead(place)
            self.read_ahead.add(place.loader)
        elif ahead > 1 and not skips and (differ or self._accumulation.size > 1):
            raise ConfigurationError(
                f"{ahead} batches have been read since the last one that was trained on, so it is unclear which of them the "
                "loss belongs to and how much it counts. Train on each batch before reading the next one, or read all batches "
                "of an optimizer step and then call accumulate() for each. To skip a batch, call accelerator.backward(None); "
                "to begin in the middle of an epoch, use accelerator.skip_first_batches(loader, n). "
                "If batches are read ahead to count what is in them: accelerator.backward(loss, weight=count), or "
                "prepare(loader, batch_weight=function)."
            )
        if self.read_ahead and place.loader in self.read_ahead and self._accumulation.by_hand is True:
            self._check_read_ahead(place)
            self._accumulation.count_equally()

    def _begin_work(self, place: _OpenLoader) -> None:
        place.ahead = 0
        place.weights_differ = False
        place.worked = True
        self.loaded = False

    def accumulating(self) -> None:
        """The loop calls `accumulate`: it enters the batch that was read last, or the batches of a window that was read ahead.

        As in Accelerate each of these counts the same, because the loop divides its losses by what is in all of them; unless
        their weights are known.
        """
        state, place = self._accumulation, self._places[-1] if self._places else self._ended
        if place is None or not self._has_whole_window(place):
            self.working()
            return
        self._begin_work(place)
        self._ended = self._lining = None
        if not place.loader.weighs:
            self._check_read_ahead(place)
            if not self.read_ahead:
                notice(
                    f"batches are read ahead of accumulate(): as in Accelerate, each loss is divided by {state.size}, because "
                    "the loop itself divides it by what is in all batches of the optimizer step. If a loss is the mean of its "
                    "batch, read one batch at a time."
                )
        self.read_ahead.add(place.loader)
        self._lining = place
        self._marks[place.loader] = state.entered, place.window[0].index
        state.line_up(place.window)

    def _has_whole_window(self, place: _OpenLoader) -> bool:
        """Whether all batches of an accumulation window have been read, and none of them is trained on."""
        window, ahead = place.window, place.ahead
        known = place.loader in self.read_ahead
        if self._accumulation.size == 1 or self._accumulation.open or not window or (len(window) == 1 and not known):
            return False
        skipped = self._skips_to.get(place.loader) if self.loaded else 0
        if not known and (skipped is None or (skipped and ahead == skipped + 1)):
            return False  # the loop has skipped all but the last, to continue where the checkpoint was saved
        return ahead in (len(window), len(window) + (skipped or 0)) and window[0].first and window[-1].last

    def weighs_equally(self) -> bool:
        """Whether the current batch was read ahead, and the loop divides its loss."""
        return self._accumulation.ahead > 0 and self._lining is not None and not self._lining.loader.weighs

    def _check_read_ahead(self, place: _OpenLoader) -> None:
        """Refuse a loop that reads ahead, to divide its losses by what it counts, where it would count padding."""
        loader, processes = place.loader, self._processes
        whole = loader.micro_batches
        if not place.padding and (whole is None or whole % processes == 0):
            return
        which = "this batch is padding" if place.padding else f"an epoch has {whole} batches"
        raise ConfigurationError(
            f"batches are read ahead, so the loop itself divides its losses, but {which} for "
            f"{processes} processes, of which some have no data at the end: it would count samples twice. Use a number of "
            "samples that gives all processes the same number of batches; or let trainkit count, with "
            "prepare(loader, batch_weight=function) and a loss that is the mean of its batch."
        )

    @property
    def samples(self) -> int | None:
        """Number of samples of the micro-batch that was read last; `None`: no loader is being read."""
        return batch_size(self._places[-1].batch) if self._places else None

    @property
    def padding(self) -> bool:
        """Whether that one is padding: only other ranks have data."""
        return bool(self._places) and self._places[-1].padding

    @property
    def padded(self) -> tuple[int, int] | None:
        """Rows and samples of the batch that was read last, if it was padded to the size of the others; otherwise `None`."""
        if not self._places:
            return None
        place = self._places[-1]
        samples = place.loader.samples
        return None if samples is None or samples >= (rows := batch_size(place.batch)) else (rows, samples)

    @property
    def full(self) -> int | None:
        """Number of samples of a full batch; `None`: unknown, or no loader is being read."""
        return self._places[-1].full if self._places else None


def is_loader(item: Any, place: int) -> bool:
    """Whether argument `place` of `prepare` is a loader; refuses what is no model, optimizer, scheduler or `None` either."""
    if item is None or isinstance(item, nn.Module | Optimizer) or (hasattr(item, "step") and hasattr(item, "state_dict")):
        return False
    first = islice(item, _CHECKED) if is_plain_list(item) else ()
    lists_objects = any(isinstance(one, nn.Module | Optimizer | DataLoader) for one in first)
    if lists_objects or isinstance(item, str | bytes | Mapping):
        raise ConfigurationError(
            f"prepare: argument {place} is {with_article(type(item).__name__)}. Pass the objects one by one: prepare(model, "
            "optimizer, loader). To read several loaders together, pass a CombinedLoader."
        )
    if isinstance(item, CombinedLoader | Iterable | SkippedLoader):
        return True
    raise ConfigurationError(
        f"prepare: argument {place} is {with_article(type(item).__name__)}; expected a model, an optimizer, a loader "
        "or a scheduler."
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that skips the first batches of its epochs, to resume in the middle of an epoch.

    A prepared loader does not fetch the samples of a map-style dataset that it skips. After
    `accelerator.load_state(folder)` count the batches from the start of the checkpoint's epoch. `load_state(folder,
    resume_loaders=True)` needs no skipping.

    Args:
        dataloader: The loader, prepared or not.
        num_batches: Number of batches of this process to skip.

    Raises:
        ConfigurationError: The number is not an integer ≥ 0.
    """
    return SkippedLoader(dataloader, num_batches)


class SkippedLoader:
    """A loader without the first `skipped` batches of its epochs; other attributes are those of the loader."""

    def __init__(self, loader: Any, skipped: int) -> None:
        fix = "skip_first_batches(loader, num_batches=100)"
        self.loader = loader
        self.skipped = whole_number(skipped, "skip_first_batches: num_batches", fix=fix)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skipped)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            self.loader.start_at(self.skipped)
            return iter(self.loader)
        return islice(iter(self.loader), self.skipped, None)
