"""`Gathering`: the part of an `Accelerator` that combines tensors and objects of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.console import counted, notice, with_article
from trainkit.distributed.world import World
from trainkit.errors import CollectiveError, ConfigurationError
from trainkit.nested import leaves, map_tensors
from trainkit.strategy import Strategy

__all__ = ["CurrentBatch", "Gathering"]

_REDUCTIONS = ("sum", "mean", "max", "none")


class CurrentBatch(Protocol):
    """The batch that the loop has read last."""

    @property
    def samples(self) -> int | None:
        """Number of its samples; `None`: no prepared loader is being read."""

    @property
    def padding(self) -> bool:
        """Whether it is padding: its outputs are ignored."""

    @property
    def padded(self) -> tuple[int, int] | None:
        """Its rows and its samples, if it was padded to the size of the others; otherwise `None`."""

    @property
    def full(self) -> int | None:
        """Number of samples of a full batch; `None`: unknown."""


class _NoBatch:
    """Stands for the batch where no prepared loader is being read."""

    samples, padding, padded, full = None, False, None, None


class Gathering:
    """Gathers, reduces, pads and broadcasts. All processes call each method, in the same order.

    Args:
        strategy: knows the processes and exchanges tensors.
        checks: compares what the processes call; default: those of `strategy.world`.
        batch: the batch that the loop has read last; default: none.
    """

    def __init__(self, strategy: Strategy, checks: CollectiveChecks | None = None, batch: CurrentBatch | None = None) -> None:
        self._strategy = strategy
        self._checks = CollectiveChecks.of(strategy.world) if checks is None else checks
        self._batch: CurrentBatch = _NoBatch() if batch is None else batch
        self._told: set[str] = set()  # notices are given once

    @property
    def world(self) -> World:
        """The processes that take part."""
        return self._strategy.world

    def wait(self, verb: str) -> None:
        """Wait until all processes have called `verb`.

        Raises:
            CollectiveError: another process called something else, waits for this one, or has ended.
        """
        self._checks.wait(verb)

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, concatenated in the order of the ranks.

        Raises:
            CollectiveError: containers, shapes or dtypes differ.
            ConfigurationError: `tensor` contains something else.
        """
        return self._concatenated("gather", tensor, drop=False)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without padding; or lists of objects, concatenated.

        What a process passes for a padding micro-batch is dropped. Otherwise rows are dropped only where the batch itself was
        padded, and there is a row for each of its rows. Nothing else is concluded from a length.

        Raises:
            CollectiveError, ConfigurationError: as `gather`.
        """
        if not use_gather_object and all(isinstance(leaf, Tensor) for leaf in leaves(input_data)):
            return self._concatenated("gather_for_metrics", input_data, drop=True)
        return self._concatenated_objects(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum over the processes, multiplied by `scale`; the same bits on all.

        Raises:
            CollectiveError: shapes or dtypes differ.
            ConfigurationError: unknown `reduction`.
        """
        if reduction not in _REDUCTIONS:
            raise ConfigurationError(f"reduce: reduction must be one of {', '.join(_REDUCTIONS)}, not {reduction!r}.")
        if self.world.size > 1 and reduction != "none":
            _check_same_shapes("reduce", self._exchanged_shapes("reduce", tensor))
            tensor = map_tensors(tensor, lambda t: self._reduced(t, reduction))
        else:
            tensor = map_tensors(tensor, torch.clone)
        return tensor if scale == 1.0 else map_tensors(tensor, lambda t: t * scale)

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        """Added in the order of the ranks, so that all processes get the same bits."""
        stacked: Tensor = self._strategy.all_gather(tensor.detach(), alike=True)
        if reduction == "max":
            return stacked.amax(0)
        return stacked.sum(0) / self.world.size if reduction == "mean" else stacked.sum(0)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded in dimension `dim` to the longest of all processes.

        Raises:
            CollectiveError: containers or numbers of dimensions differ.
        """
        if self.world.size == 1:
            return tensor
        by_rank = self._exchanged_shapes("pad_across_processes", tensor)
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
        """The tensors that process `source` has, on all processes.

        Raises:
            CollectiveError: shapes or dtypes differ.
            ConfigurationError: `source` differs.
        """
        if self.world.size == 1:
            return data
        by_rank = self._exchanged_shapes("broadcast", data, source=source)
        _check_same_shapes("broadcast", by_rank)
        sources = [its["source"] for its in by_rank]
        if any(other != sources[0] for other in sources):
            shown = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(sources))
            raise ConfigurationError(f"broadcast: from_process must be the same on all processes, but it is {shown}.")
        device = self._strategy.device
        return map_tensors(data, lambda t: self._strategy.all_gather(t.to(device).detach(), alike=True)[source])

    def _exchanged_shapes(self, verb: str, data: Any, **more: Any) -> list[Any]:
        """The dtypes and shapes that each process has called `verb` with, and `more` of each."""
        other = next((leaf for leaf in leaves(data) if not isinstance(leaf, Tensor)), None)
        if other is not None:
            raise ConfigurationError(
                f"{verb} takes tensors in lists, tuples and dicts, but found {with_article(type(other).__name__)}. For other "
                "objects: accelerator.gather_for_metrics([…], use_gather_object=True)"
            )
        tensors = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in leaves(data)]
        return self._checks.exchange(verb, {"tensors": tensors, **more})

    def _concatenated(self, verb: str, data: Any, drop: bool) -> Any:
        world, batch = self.world, self._batch
        if drop:
            data = map_tensors(data, lambda one: self._of_samples(one) if one.ndim else one)
        if world.size == 1:
            return data
        padding = batch.padding or self._strategy.repeats_data
        by_rank = self._exchanged_shapes(verb, data, samples=batch.samples, padding=padding)
        _check_samples(verb, by_rank)
        kept = self._kept([drop and its["padding"] for its in by_rank])
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
            self._tell(
                "padded batch",
                f"gather_for_metrics drops {counted(length - samples, 'row')} of {length}, because the batch was padded from "
                f"{counted(samples, 'sample')}. A tensor of {length} rows that are no samples loses them too: compute it with "
                "loader.sample_mask, and use accelerator.reduce(value).",
            )
            return rows[:samples]
        if batch.samples is not None and batch.samples < length == batch.full and not batch.padding:
            self._tell(
                "short batch",
                f"gather_for_metrics keeps all {length} rows where the batch has {counted(batch.samples, 'sample')}, fewer "
                "than the others: whether a row is a sample does not follow from a length. For a loss that counts once for "
                "each sample: accelerator.gather_for_metrics(loss.repeat(len(batch)))",
            )
        return rows

    def _kept(self, padding: Sequence[bool]) -> list[bool]:
        """Whether what each process passes is kept, given whether it is padding."""
        ranks = [str(rank) for rank, padded in enumerate(padding) if padded]
        if ranks and not self._strategy.repeats_data and self.world.is_main:
            self._tell(
                "padding",
                f"gather_for_metrics drops what rank {', '.join(ranks)} passes where only other ranks have a batch: it gets "
                "its last one again, so that all make the same number of iterations. So each sample is there once.",
            )
        return [not padded for padded in padding]

    def _tell(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            notice(text, everywhere=self.world.size > 1)

    def _concatenated_objects(self, data: Any) -> Any:
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
        return [item for its, keep in zip(by_rank, self._kept(padding), strict=True) if keep for item in its]


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
