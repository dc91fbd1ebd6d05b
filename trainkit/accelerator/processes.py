"""The processes of a run: which ones there are, in which order they run, and what they exchange."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.console import notice, quantity, with_article
from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import CollectiveError, ConfigurationError
from trainkit.launch.environment import read_ranks, runtime_is_loaded
from trainkit.launch.joining import joined_world
from trainkit.nested import leaves, map_tensors, rebuild
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator

__all__ = [
    "Gathering",
    "gathering",
    "latest",
    "only_where",
    "rank_and_size",
    "remember",
    "run_first",
    "share_of",
    "strategy_of",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_REDUCTIONS = ("sum", "mean", "max", "none")
_NO_BATCH = SimpleNamespace(samples=None, padding=False, padded=None, full=None)


# ------------------------------------------------------------------------------------------ order and division


@contextmanager
def run_first(checks: CollectiveChecks, verb: str, is_first: bool) -> Iterator[None]:
    """Run the block on processes with `is_first`, then on the others; `verb` is what the user has called."""
    if not is_first:
        checks.wait(verb)
    yield
    if is_first:  # After an error this is skipped: the other processes would continue as if there had been none.
        checks.wait(verb)


def share_of(inputs: Any, world: World, device: torch.device, apply_padding: bool) -> Any:
    """This process's contiguous part of `inputs`; see `Accelerator.split_between_processes`."""
    if world.size == 1:
        return inputs
    each, more = divmod(_length(inputs), world.size)
    start = world.rank * each + min(world.rank, more)
    end = start + each + (world.rank < more)
    missing = each + (more > 0) - (end - start) if apply_padding else 0
    part = _part(inputs, start, end, missing)
    return _on_device(part, device) if apply_padding else part


def only_where(here: Callable[[], bool], function: Function, verb: str) -> Function:
    """Return `function`, which does not run and returns `None` where `here()` is false; that is asked at each call."""
    if not callable(function):
        raise ConfigurationError(f"{verb} is a decorator: it needs a function, not {function!r}.")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return wrapper  # type: ignore[return-value]


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(
                "split_between_processes: the values of a dict must have the same length, but they have "
                f"{', '.join(f'{n} ({key!r})' for key, n in lengths.items())}."
            )
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, list | tuple) or (isinstance(inputs, Tensor | np.ndarray) and inputs.ndim > 0) or _is_dataset(inputs):
        return len(inputs)
    raise ConfigurationError(
        "split_between_processes splits lists, tuples, tensors, arrays, datasets and dicts of them, not a "
        f"{type(inputs).__name__}."
    )


def _is_dataset(inputs: Any) -> bool:
    """Whether it has the interface of a `datasets.Dataset`."""
    return hasattr(inputs, "select") and hasattr(inputs, "__len__") and not isinstance(inputs, Tensor)


def _part(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, Mapping):
        return rebuild(inputs, lambda value: _part(value, start, end, missing))
    places = [*range(start, end), *[len(inputs) - 1] * missing]
    if _is_dataset(inputs):
        return inputs.select(places)
    if not missing:
        return inputs[start:end]
    if isinstance(inputs, list | tuple):
        return type(inputs[:0])(inputs[place] for place in places)
    return inputs[places]


def _on_device(part: Any, device: torch.device) -> Any:
    if isinstance(part, Mapping):
        return rebuild(part, lambda value: _on_device(value, device))
    return part.to(device) if isinstance(part, Tensor) else part


# ------------------------------------------------------------------------------------------ exchange


class Gathering:
    """Gathers, reduces, pads and broadcasts. All processes call each method, in the same order.

    Args:
        strategy: The strategy of the run.
        batch: The batch that the loop has read last, such as an `OpenLoaders`. Default: none.
    """

    def __init__(self, strategy: Strategy, batch: Any = _NO_BATCH) -> None:
        self._strategy = strategy
        self._checks = CollectiveChecks.of(strategy.world)
        self._batch = batch
        self._notified: set[str] = set()  # notices are given once

    @property
    def world(self) -> World:
        """The processes that take part."""
        return self._strategy.world

    def wait(self, verb: str) -> None:
        """Wait until all processes have called `verb`."""
        self._checks.wait(verb)

    def gather(self, tensor: Any) -> Any:
        """See `Accelerator.gather`."""
        return self._concatenate("gather", tensor, drop=False)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See `Accelerator.gather_for_metrics`.

        What a process passes for a padding micro-batch is dropped. Otherwise rows are dropped only where the batch itself was
        padded, and there is a row for each of its rows. Nothing else is concluded from a length.
        """
        if not use_gather_object and all(isinstance(leaf, Tensor) for leaf in leaves(input_data)):
            return self._concatenate("gather_for_metrics", input_data, drop=True)
        return self._concatenate_objects(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `Accelerator.reduce`."""
        if reduction not in _REDUCTIONS:
            raise ConfigurationError(f"reduce: reduction must be one of {', '.join(_REDUCTIONS)}, not {reduction!r}.")
        if self.world.size > 1 and reduction != "none":
            _check_same_shapes("reduce", self._exchange_shapes("reduce", tensor))
            tensor = map_tensors(tensor, lambda t: self._reduce_one(t, reduction))
        else:
            tensor = map_tensors(tensor, torch.clone)
        return tensor if scale == 1.0 else map_tensors(tensor, lambda t: t * scale)

    def _reduce_one(self, tensor: Tensor, reduction: str) -> Tensor:
        """Added in the order of the ranks, so that all processes get the same bits."""
        stacked: Tensor = self._strategy.all_gather(tensor.detach(), alike=True)
        if reduction == "max":
            return stacked.amax(0)
        return stacked.sum(0) / self.world.size if reduction == "mean" else stacked.sum(0)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """See `Accelerator.pad_across_processes`."""
        if self.world.size == 1:
            return tensor
        by_rank = self._exchange_shapes("pad_across_processes", tensor)
        dims = [[len(shape) for _, shape in its["tensors"]] for its in by_rank]
        if any(other != dims[0] for other in dims):
            fix = "Pass tensors with the same number of dimensions on all processes."
            raise _mismatch("pad_across_processes", by_rank, fix)
        columns = zip(*(its["tensors"] for its in by_rank), strict=True)
        positions = iter([[shape for _, shape in column] for column in columns])

        def pad(one: Tensor) -> Tensor:
            column = next(positions)
            if not -one.ndim <= dim < one.ndim:
                return one
            missing = max(shape[dim] for shape in column) - one.shape[dim]
            if not missing:
                return one
            padding = one.new_full([missing if d == dim % one.ndim else n for d, n in enumerate(one.shape)], pad_index)
            return torch.cat([padding, one] if pad_first else [one, padding], dim)

        return map_tensors(tensor, pad)

    def broadcast(self, data: Any, source: int) -> Any:
        """Return the tensors that process `source` has, on all processes."""
        if self.world.size == 1:
            return data
        by_rank = self._exchange_shapes("broadcast", data, source=source)
        _check_same_shapes("broadcast", by_rank)
        sources = [its["source"] for its in by_rank]
        if any(other != sources[0] for other in sources):
            shown = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(sources))
            raise ConfigurationError(f"broadcast: from_process must be the same on all processes, but it is {shown}.")
        device = self._strategy.device
        return map_tensors(data, lambda t: self._strategy.all_gather(t.to(device).detach(), alike=True)[source])

    def _exchange_shapes(self, verb: str, data: Any, **more: Any) -> list[Any]:
        """The dtypes and shapes that each process has called `verb` with, and `more` of each."""
        other = next((leaf for leaf in leaves(data) if not isinstance(leaf, Tensor)), None)
        if other is not None:
            raise ConfigurationError(
                f"{verb} takes tensors in lists, tuples and dicts, but found {with_article(type(other).__name__)}. For other "
                "objects: accelerator.gather_for_metrics([…], use_gather_object=True)"
            )
        tensors = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in leaves(data)]
        return self._checks.exchange(verb, {"tensors": tensors, **more})

    def _concatenate(self, verb: str, data: Any, drop: bool) -> Any:
        world, batch = self.world, self._batch
        if drop:
            data = map_tensors(data, lambda one: self._of_samples(one) if one.ndim else one)
        if world.size == 1:
            return data
        padding = batch.padding or self._strategy.repeats_data
        by_rank = self._exchange_shapes(verb, data, samples=batch.samples, padding=padding)
        _check_samples(verb, by_rank)
        kept = self._keep_mask([drop and its["padding"] for its in by_rank])
        columns = iter([shape for _, shape in column] for column in zip(*(its["tensors"] for its in by_rank), strict=True))

        def gather(one: Tensor) -> Tensor:
            shapes = next(columns)
            if one.ndim == 0:
                one, shapes = one[None], [[1]] * world.size
            longest = max(shape[0] for shape in shapes)
            one = one.to(self._strategy.device).detach()
            if len(one) < longest:
                one = functional.pad(one, [0, 0] * (one.ndim - 1) + [0, longest - len(one)])
            stacked: Tensor = self._strategy.all_gather(one, alike=True)
            if all(kept) and all(shape[0] == longest for shape in shapes):
                return stacked.flatten(0, 1)
            parts = [part[: shape[0]] for part, shape, keep in zip(stacked, shapes, kept, strict=True) if keep]
            return torch.cat(parts) if parts else stacked[0, :0]

        return map_tensors(data, gather)

    def _of_samples(self, rows: Any) -> Any:
        """The rows of a tensor or list that belong to samples."""
        batch, length = self._batch, len(rows)
        if batch.padded is not None and length == batch.padded[0]:
            samples = batch.padded[1]
            self._notify_once(
                "padded batch",
                f"gather_for_metrics drops {quantity(length - samples, 'row')} of {length}, because the batch was padded from "
                f"{quantity(samples, 'sample')}. A tensor of {length} rows that are no samples loses them too: compute it with "
                "loader.sample_mask, and use accelerator.reduce(value).",
            )
            return rows[:samples]
        if batch.samples is not None and batch.samples < length == batch.full and not batch.padding:
            self._notify_once(
                "short batch",
                f"gather_for_metrics keeps all {length} rows where the batch has {quantity(batch.samples, 'sample')}, fewer "
                "than the others: whether a row is a sample does not follow from a length. For a loss that counts once for "
                "each sample: accelerator.gather_for_metrics(loss.repeat(len(batch)))",
            )
        return rows

    def _keep_mask(self, padding: Sequence[bool]) -> list[bool]:
        """Whether what each process passes is kept, given whether it is padding."""
        ranks = [str(rank) for rank, padded in enumerate(padding) if padded]
        if ranks and not self._strategy.repeats_data and self.world.is_main:
            self._notify_once(
                "padding",
                f"gather_for_metrics drops what rank {', '.join(ranks)} passes where only other ranks have a batch: it gets "
                "its last one again, so that all make the same number of iterations. So each sample is there once.",
            )
        return [not padded for padded in padding]

    def _notify_once(self, subject: str, text: str) -> None:
        if subject not in self._notified:
            self._notified.add(subject)
            notice(text, everywhere=self.world.size > 1)

    def _concatenate_objects(self, data: Any) -> Any:
        world = self.world
        if isinstance(data, list | tuple):
            data = self._of_samples(data)
        if world.size == 1:
            return data
        if not isinstance(data, list | tuple):
            raise ConfigurationError(
                f"gather_for_metrics concatenates lists of objects, but received {with_article(type(data).__name__)}. "
                "Pass an object in a list: accelerator.gather_for_metrics([value])"
            )
        padding = self._checks.exchange("gather_for_metrics", self._batch.padding or self._strategy.repeats_data)
        by_rank = world.exchange_user_objects(data)
        return [item for its, keep in zip(by_rank, self._keep_mask(padding), strict=True) if keep for item in its]


def _check_same_shapes(verb: str, by_rank: Sequence[Mapping[str, Any]]) -> None:
    if any(its["tensors"] != by_rank[0]["tensors"] for its in by_rank):
        raise _mismatch(verb, by_rank, "Pass tensors of the same shapes and dtypes on all processes.")


def _check_samples(verb: str, by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Tensors may differ in the first dimension only if it is the size of each process's micro-batch."""
    forms = [[(dtype, len(shape), shape[1:]) for dtype, shape in its["tensors"]] for its in by_rank]
    if any(form != forms[0] for form in forms):
        raise _mismatch(verb, by_rank, _PAD)
    for place in range(len(forms[0])):
        shapes = [its["tensors"][place][1] for its in by_rank]
        if any(shape != shapes[0] for shape in shapes) and any(
            shape[0] != its["samples"] for shape, its in zip(shapes, by_rank, strict=True)
        ):
            raise _mismatch(verb, by_rank, _EACH)


_PAD = (
    "Only the first dimension may differ, and only if it is the number of samples of each process's micro-batch. Pad the "
    "others: accelerator.gather(accelerator.pad_across_processes(x, dim=1))"
)


_EACH = (
    "The first dimension may differ only if it is the number of samples of each process's micro-batch. Gather each batch in "
    "the loop that reads it; or gather concatenated batches as one object: accelerator.gather_for_metrics([x], "
    "use_gather_object=True)"
)


def _mismatch(verb: str, by_rank: Sequence[Mapping[str, Any]], fix: str) -> CollectiveError:
    shown = "; ".join(
        f"rank {rank}: {', '.join(f'{dtype}{shape}' for dtype, shape in its['tensors']) or 'nothing'}"
        for rank, its in enumerate(by_rank)
    )
    return CollectiveError(f"{verb}: the tensors of the processes cannot be combined ({shown}). {fix}")


# ------------------------------------------------------------------------------------------ without an Accelerator


class _OfThread(threading.local):
    """The accelerators that this thread has created: on XLA, threads may take the place of processes."""

    def __init__(self) -> None:
        # Accelerators in the order in which they were created.
        self.alive: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()


_of_thread, _number = _OfThread(), count()
_of_process: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()


def remember(accelerator: Accelerator) -> None:
    """Record a new accelerator of a user's own training loop, by a weak reference."""
    number = next(_number)
    _of_thread.alive[number] = _of_process[number] = accelerator


def latest() -> Accelerator | None:
    """The accelerator that this thread has created last, otherwise the process; `None`: none is alive.

    One that has prepared something comes before one that was created to read a property, as in `Accelerator().process_index`.
    """
    for alive in (_of_thread.alive, _of_process):
        accelerators = list(alive.values())
        if accelerators:
            return next((one for one in reversed(accelerators) if one._models.wrapped or one.loaders), accelerators[-1])
    return None


def strategy_of(model: nn.Module) -> Strategy | None:
    """The strategy of the accelerator that has prepared a model of the user's; `None`: none has."""
    return next((one.strategy for one in _of_process.values() if any(model is known for known in one._models.originals)), None)


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and the world size; before the process group exists, as the launcher has set them."""
    accelerator = latest()
    if accelerator is not None:
        return accelerator.world.rank, accelerator.world.size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = read_ranks(os.environ)
    return (0, 1) if place is None else (place.rank, place.size)


def gathering(verb: str) -> Gathering:
    """The part of the latest `Accelerator` that exchanges tensors, for the function `verb`; a single process needs none."""
    accelerator = latest()
    if accelerator is not None:
        return accelerator._gathering
    if not runtime_is_loaded() and joined_world().size == 1:
        return Gathering(Strategy("cpu"))
    raise ConfigurationError(
        f"{verb} exchanges data between all processes, which needs an Accelerator. Create one first, and keep it: accelerator "
        "= Accelerator(). In a TrainModule, use self.all_gather."
    )
