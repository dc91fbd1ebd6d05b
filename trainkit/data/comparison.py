"""Compares what the processes of a run read: digests of batches and samples, and the loaders before they are sharded."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.nested import first_tensor, rebuild
from trainkit.rng import RandomState

__all__ = [
    "BatchDigest",
    "ReadRecord",
    "SeparateData",
    "comparable",
    "digest",
    "find_separate_data",
    "overlap",
    "preserve_state",
]

_ALGORITHM = "xxh3:"  # of a digest in a checkpoint: one of another algorithm cannot be compared
_PART = 1 << 20  # bytes at each end of an array that are hashed: enough to distinguish batches, and fast
_QUICK = 1 << 14  # The same for batches that are all recorded.
_HELD = 1 << 18  # Bytes of the largest tensor to which a digest that is computed later refers.
_COMMON = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})  # numpy has them, too
_DEEP = 20  # largest nesting depth; deeper objects count by their type
_SKETCH = 64  # samples that stand for all that were read: those with the smallest digests
_SAMPLES = 4096  # samples of an epoch from which they are chosen
_COMPARED = 8  # processes that are compared pair by pair
_DISTINCT = 0.9  # share of different samples from which on equal ones mean something: labels or single tokens repeat anyway


def digest(batch: Any, part: int = _PART) -> str:
    """A digest that is equal for equal batches in every process, and almost certainly different for different ones.

    Tensors, arrays, images, numbers and strings count by value, containers and objects by their contents, objects without
    attributes by what pickle would store of them, and what cannot be pickled by type.
    Of a large array, `part` bytes at each end count.
    """
    hasher = xxhash.xxh3_128()
    _add(_Hasher(hasher.update, part), batch, 0)
    return _ALGORITHM + hasher.hexdigest()


def comparable(saved: str | None) -> str | None:
    """The digest of a checkpoint, or `None` if an earlier version of trainkit has computed it in another way."""
    return saved if saved is not None and saved.startswith(_ALGORITHM) else None


class _Hasher(NamedTuple):
    update: Callable[[Any], None]
    part: int


@lru_cache(1024)
def _tensor_mark(dtype: torch.dtype, shape: torch.Size, layout: torch.layout) -> bytes:
    return f"{dtype}{tuple(shape)}{layout}".encode()


def _add(hasher: _Hasher, value: Any, depth: int) -> None:
    hasher.update(f"<{type(value).__qualname__}>".encode())
    if isinstance(value, Tensor):
        _add_tensor(hasher, value, depth)
    elif type(value) in (list, tuple):  # first, like tensors, because most batches are made of these
        _add_items(hasher, value, depth)
    elif isinstance(value, np.ndarray | np.generic):
        _add_array(hasher, np.asarray(value), depth)
    elif isinstance(value, str):
        hasher.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        hasher.update(value)
    elif isinstance(value, type):
        hasher.update(value.__qualname__.encode())
    elif isinstance(getattr(value, "__array_interface__", None), Mapping):  # an image of PIL has its pixels nowhere else
        _add_array(hasher, np.asarray(value), depth)
    elif value is None or isinstance(value, bool | int | float | complex):
        hasher.update(repr(value).encode())
    elif isinstance(value, Set) and depth < _DEEP:
        hasher.update("".join(sorted(map(digest, value))).encode())  # a set has no order
    else:
        _add_items(hasher, () if depth >= _DEEP else _parts(value), depth)


def _add_items(hasher: _Hasher, items: Iterable[Any], depth: int) -> None:
    if depth < _DEEP:
        for item in items:
            _add(hasher, item, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    """The keys and values of a mapping, the items of a list, the fields of a dataclass, or the parts of an object."""
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, list | tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if hasattr(value, "__dict__"):
        return [value.__dict__]
    return _pickle_parts(value)


def _pickle_parts(value: Any) -> Iterable[Any]:
    """What pickle would store of an object without attributes, such as one of a class with slots, a date, or a table."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled, and raises whatever it likes
        return ()
    return [list(part) if isinstance(part, Iterator) else part for part in reduced[1:]] if isinstance(reduced, tuple) else ()


def _add_tensor(hasher: _Hasher, tensor: Tensor, depth: int) -> None:
    if tensor.is_nested:
        return _add(hasher, list(tensor.unbind()), depth + 1)
    hasher.update(_tensor_mark(tensor.dtype, tensor.shape, tensor.layout))
    if tensor.layout is torch.sparse_coo:
        sparse = tensor.detach().coalesce()
        _add(hasher, [sparse.indices(), sparse.values()], depth + 1)
    elif tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta":
        if tensor.dtype in _COMMON and tensor.is_cpu and tensor.nbytes <= 2 * hasher.part:  # the same bytes as below, faster
            return hasher.update(np.ascontiguousarray(tensor.numpy(force=True)))
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() > 2 * hasher.part:  # before it is copied from a device
            flat = torch.cat([flat[: hasher.part], flat[-hasher.part :]])
        hasher.update(flat.cpu().numpy())
    return None


def _add_array(hasher: _Hasher, array: Any, depth: int) -> None:
    hasher.update(f"{array.dtype}{array.shape}".encode())
    if array.dtype.hasobject:
        _add(hasher, array.tolist(), depth + 1)
    else:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for piece in [data] if len(data) <= 2 * hasher.part else [data[: hasher.part], data[-hasher.part :]]:
            hasher.update(piece)


class BatchDigest:
    """The digest of a batch that was read, computed when a checkpoint asks for it: most batches are never asked for.

    Until then it refers to the batch. So that holds only for one of small tensors on the CPU, in a list, tuple or dict: they
    count how often they were changed in place. The digest of another one is computed at once.

    Args:
        batch: The batch.
        now: Compute it at once.
    """

    __slots__ = ("_batch", "_changed", "_text", "_values", "_versions")

    def __init__(self, batch: Any, now: bool = False) -> None:
        kind = type(batch)
        values = tuple(batch.values()) if kind is dict else tuple(batch) if kind is list or kind is tuple else ()
        self._versions = None if now or not values else _versions(values)
        self._changed = False
        self._text = digest(batch, _QUICK) if self._versions is None else None
        if self._versions is not None:
            self._batch = dict.fromkeys(batch) if kind is dict else kind  # A user may add or remove keys.
            self._values = values

    @property
    def changed(self) -> bool:
        """Whether the batch was changed in place before its digest was computed."""
        return self._changed or (self._versions is not None and _versions(self._values) != self._versions)

    def text(self) -> str | None:
        """The digest; `None` if the batch was changed before. From then on it does not refer to the batch."""
        if self._versions is not None:
            self._changed = self.changed
            if not self._changed:
                made, values = self._batch, self._values
                self._text = digest(dict(zip(made, values, strict=True)) if isinstance(made, dict) else made(values), _QUICK)
            self._versions, self._values = None, ()
        return self._text


def _versions(values: Iterable[Any]) -> list[int] | None:
    """How often each of some tensors was changed in place; `None` if one is no tensor, or not on the CPU, or large."""
    versions = []
    for value in values:
        if type(value) is not Tensor or not value.is_cpu or value.is_inference() or value.nbytes > _HELD:
            return None
        versions.append(value._version)
    return versions


class ReadRecord:
    """What a process has read of a stream since an epoch began, by content.

    Attributes:
        last: the digest of the last batch; `None` before the first one.
        chain: a number below 2^48, equal on processes that have read the same batches in the same order.
    """

    def __init__(self) -> None:
        self._now = False
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.last: BatchDigest | None = None
        self.chain = 0
        self._seen = 0
        self._samples: set[str] = set()

    def add(self, batch: Any) -> None:
        """Record a batch of a stream that other processes read, too."""
        self.last = BatchDigest(batch, now=True)
        self.chain = xxhash.xxh3_64_intdigest(str(self.last.text()).encode(), self.chain) >> 16

    def add_own(self, batch: Any) -> None:
        """Record a batch of a stream that only this process reads: `chain` does not change."""
        if self.last is not None and not self._now:
            self._now = self.last.changed  # A step that changes its batch changes the next ones, too.
        self.last = BatchDigest(batch, self._now)

    def add_samples(self, batch: Any) -> None:
        """Record the samples of a batch, up to a few thousand in an epoch."""
        for sample in _samples_of(batch) if self._seen < _SAMPLES and batch is not None else ():
            self._samples.add(digest(sample))
            self._seen += 1

    def sketch(self) -> list[str] | None:
        """The smallest digests of the samples; `None` if many samples are equal, so that digests tell nothing."""
        if len(self._samples) < _DISTINCT * self._seen:
            return None
        return sorted(self._samples)[:_SKETCH]


def overlap(sketches: Sequence[list[str] | None]) -> float:
    """The largest share of samples that two processes have in common, estimated from their sketches; 0 if unknown.

    The smallest digests of a union are a random sample of it (A. Broder, On the resemblance and containment of documents,
    1997): the share of them that both have is the share of all samples that both have.
    """
    known = [set(sketch) for sketch in sketches if sketch]
    shares = [0.0]
    for one, other in combinations(known[:_COMPARED], 2):
        smallest = sorted(one | other)[:_SKETCH]
        shares.append(sum(each in one and each in other for each in smallest) / len(smallest))
    return max(shares)


def _samples_of(batch: Any) -> Iterator[Any]:
    """The samples of a batch; a batch in which they cannot be separated counts as one."""
    tensor = first_tensor(batch)
    if tensor is None:
        yield from batch if isinstance(batch, list | tuple) else [batch]
    else:
        size = len(tensor)
        yield from (_sample_of(batch, row, size) for row in range(size))


def _sample_of(value: Any, row: int, size: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[row] if value.ndim and len(value) == size else value
    plain = isinstance(value, list | tuple) and len(value) == size and not isinstance(value[0], Tensor | np.ndarray | Mapping)
    return value[row] if plain else rebuild(value, lambda item: _sample_of(item, row, size))


_ENDS = 64  # indices at each end of a subset that are compared


class SeparateData(NamedTuple):
    """Each process reads its own part of the data.

    Attributes:
        lengths: the stated lengths of the loaders, by rank.
        datasets: the datasets differ; otherwise the user's sampler yields different indices on each process.
    """

    lengths: list[int | None]
    datasets: bool


def find_separate_data(
    world: World,
    loader: DataLoader[Any],
    samples: int | None,
    length: int | None,
    order: Any,
    first: str | None,
    whole: bool = False,
) -> SeparateData | None:
    """Whether each process reads its own part, else `None`. Collective.

    Args:
        world: the processes.
        loader: the user's loader, over a map-style dataset.
        samples: number of samples of the dataset, if it has a length.
        length: micro-batches of an epoch, if known.
        order: what the order of an epoch depends on; `None` if a sampler of the user decides it.
        first: the digest of the first micro-batch that such a sampler yields.
        whole: the user's sampler says that the dataset is to be sharded, so its samples are not compared.

    Raises:
        DataError: the loaders differ.
    """
    if world.size == 1:
        return None
    settings = {"samples": samples, "batch_size": loader.batch_size, "batches": length, "order": order}
    content = None if whole else _content(loader, samples)
    mine = [first, settings, _subset(loader.dataset), content]
    number = xxhash.xxh3_64_intdigest(json.dumps(mine).encode()) >> 8
    highest, lowest = world.largest([number, -number])
    if highest == -lowest:  # as almost always; what the processes have is gathered only where it differs
        return None
    said = world.exchange(mine)
    lengths = [settings["batches"] for _, settings, *_ in said]
    firsts, _, subsets, contents = zip(*said, strict=True)
    if set(firsts) != {first}:
        return SeparateData(lengths, datasets=False)
    if len(set(subsets)) > 1:
        raise DataError(
            "each process has different samples in its Subset. If random_split drew them, use the same seed on all processes: "
            "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)). If each process selects its own part, "
            "pass the whole dataset instead: it is sharded over the processes."
        )
    alike = _equal_but_for_lengths([settings for _, settings, *_ in said])
    # samples that are random in themselves, from a generator that is not seeded, are other ones when they are fetched again
    if alike and _differ(list(contents)) and all(world.exchange(_content(loader, samples) == content)):
        return SeparateData(lengths, datasets=True)
    if any(other[1] != said[0][1] for other in said):
        raise _different_loaders([settings for _, settings, *_ in said])
    return None


def _equal_but_for_lengths(settings: list[dict[str, Any]]) -> bool:
    lengths = {"samples": None, "batches": None}
    return all({**one, **lengths} == {**settings[0], **lengths} for one in settings)


def _different_loaders(settings: list[dict[str, Any]]) -> DataError:
    shown = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in one.items() if value is not None)
        for rank, one in enumerate(settings)
    )
    return DataError(
        f"the processes have different loaders ({shown}). Create the same DataLoader over the whole dataset on every "
        "process: it is sharded over them."
    )


def _differ(contents: list[Any]) -> bool:
    """Whether datasets of one length have different samples at one place, or those of other lengths begin differently."""
    known = [content for content in contents if content is not None]
    if len(known) < len(contents):
        return False
    if len({samples for samples, _ in known}) > 1:
        return len({digests[0] for _, digests in known}) == len(known)
    return any(digests != known[0][1] for _, digests in known)


class _Digests(Dataset[str]):
    """The digests of the samples of a dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> str:
        return str(RandomState.draw_with_key(0, lambda: digest(self._dataset[index])))


def _content(loader: DataLoader[Any], samples: int | None) -> list[Any] | None:
    """The number of samples, and the digests of the first, the middle and the last; `None` if they cannot be fetched.

    If the loader has workers, a worker fetches them: a dataset may open its files where it is first used.
    """
    if not samples:
        return None
    places = sorted({0, samples // 2, samples - 1})
    fetching: DataLoader[str] = DataLoader(
        _Digests(loader.dataset),
        batch_size=None,
        sampler=places,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    try:
        return [samples, list(fetching)]
    except Exception:
        return None  # training will show the error, where the user expects it


def _subset(dataset: Any) -> str | None:
    """A digest of the indices of a `Subset`; `None` for other datasets."""
    if not isinstance(dataset, Subset):
        return None
    ends = [*dataset.indices[:_ENDS], *dataset.indices[-_ENDS:]]
    return digest([*ends, _subset(dataset.dataset)])


@contextmanager
def preserve_state(sampler: Any) -> Iterator[None]:
    """Restore a sampler, the sampler inside it, and their random generators when the block ends.

    A sampler that continues where it stopped, or that shuffles with its own generator, then yields the same indices on any
    number of processes.
    """
    attributes = [vars(each) for each in (sampler, getattr(sampler, "sampler", None)) if hasattr(each, "__dict__")]
    before = [(present, dict(present)) for present in attributes]
    states = [(value, _state_of(value)) for _, kept in before for value in kept.values()]
    try:
        yield
    finally:
        for present, kept in before:
            present.clear()
            present.update(kept)
        for value, state in states:
            if isinstance(value, torch.Generator):
                value.set_state(state)
            elif isinstance(value, random.Random):
                value.setstate(state)
            elif isinstance(value, np.random.RandomState):
                value.set_state(state)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = state


def _state_of(value: Any) -> Any:
    """The state of a random generator; `None` for anything else."""
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else None
