"""Verbs that put together what the processes have: gather, reduce, pad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.accelerator.meeting import Meeting
from trainkit.accelerator.reading import Reading
from trainkit.console import with_article
from trainkit.errors import CollectiveError, ConfigurationError
from trainkit.nested import leaves, map_tensors
from trainkit.strategy import Strategy

__all__ = ["GatherVerbs"]

_REDUCTIONS = ("sum", "mean", "max", "none")


class GatherVerbs:
    """The verbs of :class:`trainkit.Accelerator` that exchange tensors and objects; all processes call them."""

    strategy: Strategy
    meeting: Meeting
    reading: Reading

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, one after the other in the order of the ranks; scalars become a vector.

        The micro-batches of an epoch may end with a short one, so tensors may differ in the first dimension if it is the size
        of the micro-batch that each process works on. With one process they are returned as they are.

        Args:
            tensor: a tensor, or tensors in lists, tuples and dicts; the same containers on all processes.

        Raises:
            CollectiveError: other containers, shapes or dtypes on other processes; the message names them.
            ConfigurationError: something in it is no tensor.
        """
        return self._gathered("gather", tensor, drop=False)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :meth:`gather`, without what was only filled up: each sample of an epoch is there once, in the order of the data.

        Args:
            input_data: tensors in containers; or lists of objects that can be pickled, which are put together.
            use_gather_object: take tensors for objects, too: they may then have any shape, and come on the CPU.

        Raises:
            CollectiveError, ConfigurationError: as of :meth:`gather`.
        """
        if not use_gather_object and all(isinstance(leaf, Tensor) for leaf in leaves(input_data)):
            return self._gathered("gather_for_metrics", input_data, drop=True)
        return self._gathered_objects(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, the mean or the largest over the processes, the same on all of them; never the tensor that was given.

        Args:
            tensor: a tensor, or tensors in lists, tuples and dicts; of the same shapes on all processes.
            reduction: ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which only scales.
            scale: the result is multiplied by it.

        Raises:
            CollectiveError: other shapes or dtypes on other processes.
            ConfigurationError: another reduction.
        """
        if reduction not in _REDUCTIONS:
            raise ConfigurationError(f"reduce: reduction must be one of {', '.join(_REDUCTIONS)}, not {reduction!r}.")
        size = self.strategy.world.size
        if size > 1 and reduction != "none":
            said = self._said("reduce", tensor)
            _check_alike("reduce", said)
            tensor = map_tensors(tensor, lambda t: self._reduced(t, reduction))
        else:
            tensor = map_tensors(tensor, torch.clone)
        return tensor if scale == 1.0 else map_tensors(tensor, lambda t: t * scale)

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        """Added up in the order of the ranks: the same bits on all of them."""
        stacked: Tensor = self.strategy.all_gather(tensor.detach(), alike=True)
        if reduction == "max":
            return stacked.amax(0)
        return stacked.sum(0) / self.strategy.world.size if reduction == "mean" else stacked.sum(0)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors that are in one dimension as long as the longest of all processes, so that they can be gathered.

        Args:
            tensor: a tensor, or tensors in lists, tuples and dicts. One that does not have the dimension is left as it is.
            dim: which one.
            pad_index: what is filled in.
            pad_first: in front instead of behind.

        Raises:
            CollectiveError: other containers or numbers of dimensions on other processes.
        """
        if self.strategy.world.size == 1:
            return tensor
        said = self._said("pad_across_processes", tensor)
        ranks = [[len(shape) for _, shape in its["tensors"]] for its in said]
        if any(other != ranks[0] for other in ranks):
            raise _unlike("pad_across_processes", said, "Give tensors of as many dimensions on all processes.")
        columns = zip(*(its["tensors"] for its in said), strict=True)
        shapes = [[shape for _, shape in column] for column in columns]
        positions = iter(shapes)

        def pad(one: Tensor) -> Tensor:
            column = next(positions)
            if not -one.ndim <= dim < one.ndim:
                return one
            missing = max(shape[dim] for shape in column) - one.shape[dim]
            if not missing:
                return one
            filled = one.new_full([missing if d == dim % one.ndim else n for d, n in enumerate(one.shape)], pad_index)
            return torch.cat([filled, one] if pad_first else [one, filled], dim)

        return map_tensors(tensor, pad)

    def _broadcast(self, data: Any, source: int) -> Any:
        """Of tensors that are alike on all processes, those of one of them, for ``trainkit.utils.broadcast``."""
        if self.strategy.world.size == 1:
            return data
        said = self._said("broadcast", data, source=source)
        _check_alike("broadcast", said)
        sources = [its["source"] for its in said]
        if any(other != sources[0] for other in sources):
            shown = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(sources))
            raise ConfigurationError(f"broadcast: from_process must be the same on all processes; {shown}.")
        return map_tensors(data, lambda t: self.strategy.all_gather(t.to(self.strategy.device).detach(), alike=True)[source])

    def _said(self, verb: str, data: Any, **more: Any) -> list[Any]:
        """What each process has come with to a verb: dtypes and shapes."""
        odd = next((leaf for leaf in leaves(data) if not isinstance(leaf, Tensor)), None)
        if odd is not None:
            raise ConfigurationError(
                f"{verb} takes tensors, in lists, tuples and dicts, and there is {with_article(type(odd).__name__)} "
                f"in it. Objects: "
                "accelerator.gather_for_metrics([…], use_gather_object=True)"
            )
        tensors = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in leaves(data)]
        return self.meeting.exchange(verb, {"tensors": tensors, **more})

    def _gathered(self, verb: str, data: Any, drop: bool) -> Any:
        world, reading = self.strategy.world, self.reading
        if drop:
            data = map_tensors(data, reading.cut)
        if world.size == 1:
            return data
        said = self._said(verb, data, samples=reading.samples, padding=reading.padding)
        _check_rows(verb, said)
        kept = [not (drop and its["padding"]) for its in said]
        columns = iter([shape for _, shape in column] for column in zip(*(its["tensors"] for its in said), strict=True))

        def gather(one: Tensor) -> Tensor:
            shapes = next(columns)
            if one.ndim == 0:
                one, shapes = one[None], [[1]] * world.size
            longest = max(shape[0] for shape in shapes)
            one = one.to(self.strategy.device).detach()
            if len(one) < longest:
                one = functional.pad(one, [0, 0] * (one.ndim - 1) + [0, longest - len(one)])
            stacked: Tensor = self.strategy.all_gather(one, alike=True)
            if all(kept) and all(shape[0] == longest for shape in shapes):
                return stacked.flatten(0, 1)
            parts = [part[: shape[0]] for part, shape, keep in zip(stacked, shapes, kept, strict=True) if keep]
            return torch.cat(parts) if parts else stacked[0, :0]

        return map_tensors(data, gather)

    def _gathered_objects(self, data: Any) -> Any:
        world = self.strategy.world
        if world.size == 1:
            return data
        if not isinstance(data, list | tuple):
            raise ConfigurationError(
                f"gather_for_metrics puts lists of objects together, and this is {with_article(type(data).__name__)}. "
                f"Give one object of "
                "each process as a list: accelerator.gather_for_metrics([value])"
            )
        padding = self.meeting.exchange("gather_for_metrics", self.reading.padding)
        said = world.exchange_objects(data)
        return [item for its, padded in zip(said, padding, strict=True) if not padded for item in its]


def _check_alike(verb: str, said: Sequence[Mapping[str, Any]]) -> None:
    if any(its["tensors"] != said[0]["tensors"] for its in said):
        raise _unlike(verb, said, "Give tensors of the same shapes and dtypes on all processes.")


def _check_rows(verb: str, said: Sequence[Mapping[str, Any]]) -> None:
    """Tensors may differ in the first dimension where that is the size of each process's micro-batch."""
    forms = [[(dtype, len(shape), shape[1:]) for dtype, shape in its["tensors"]] for its in said]
    if any(form != forms[0] for form in forms):
        raise _unlike(verb, said, _PAD)
    for place in range(len(forms[0])):
        shapes = [its["tensors"][place][1] for its in said]
        if any(shape != shapes[0] for shape in shapes) and any(
            shape[0] != its["samples"] for shape, its in zip(shapes, said, strict=True)
        ):
            raise _unlike(verb, said, _EACH)


_PAD = (
    "Only the first dimension may differ, where it is that of the samples of each process's micro-batch. Pad the others: "
    "accelerator.gather(accelerator.pad_across_processes(x, dim=1))"
)


_EACH = (
    "The first dimension may differ only where it is that of the samples of each process's micro-batch. Gather each batch in "
    "the loop that reads it; or what was put together, as a list: accelerator.gather_for_metrics([x], use_gather_object=True)"
)


def _unlike(verb: str, said: Sequence[Mapping[str, Any]], fix: str) -> CollectiveError:
    shown = "; ".join(
        f"rank {rank}: {', '.join(f'{dtype}{shape}' for dtype, shape in its['tensors']) or 'nothing'}"
        for rank, its in enumerate(said)
    )
    return CollectiveError(f"{verb}: the processes have tensors that do not go together ({shown}). {fix}")
