"""In what two checkpoints differ, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.checkpoint.reader import Checkpoint
from trainkit.cli.checkpoint.text import count_text, short
from trainkit.errors import CorruptCheckpointError

__all__ = ["Difference", "compare_checkpoints", "compare_tensors", "compare_values"]

# Of the run: when, where and how often something was written. Two runs that do the same differ in it.
_OF_THE_RUN = ("run_id", "save_counter", "saved_at", "saved_by", "trainkit_version", "format_version", "files", "aliases")
# Of the state: what holds paths and clocks.
_WITH_ALL = ("callbacks", "loggers", "metrics", "results")
_PIECE = 1 << 22  # elements that are compared at a time


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        part: "manifest", "model" (or another stem), "optimizer", "state".
        name: of the tensor, or the path in the state.
        text: how it differs.
    """

    part: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.part}: {self.name}: {self.text}"


def compare_checkpoints(first: Checkpoint, second: Checkpoint, *, everything: bool = False) -> Iterator[Difference]:
    """All differences; every file is read and verified. One part of the two is in memory at a time.

    Args:
        first: a checkpoint.
        second: another one.
        everything: compare the states of callbacks and loggers, and the logged metrics, too. They hold paths and clocks.

    Raises:
        CheckpointError: one of them is damaged.
    """
    manifests = [vars(one.manifest) for one in (first, second)]
    skipped = (*_OF_THE_RUN, *(() if everything else ("metrics",)))
    for name in manifests[0]:
        if name not in skipped:
            for path, text in compare_values(manifests[0][name], manifests[1][name], name):
                yield Difference("manifest", path, text)
    yield from _compare_stems(first, second)
    states = [one.read({"state"}, unregistered=True).state for one in (first, second)]
    for key in sorted({*states[0], *states[1]}):
        if everything or key not in _WITH_ALL:
            one, other = (state.get(key, _ABSENT) for state in states)
            for path, text in compare_values(one, other, key):
                yield Difference("state", path, text)


def _compare_stems(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    here, there = (dict.fromkeys(stem for stem in one.stems if stem != "state") for one in (first, second))
    for stem in {**here, **there}:
        if stem not in here or stem not in there:
            yield Difference(stem, "the whole part", "only in the second" if stem not in here else "only in the first")
            continue
        tensors = [_with_aliases(one, stem) for one in (first, second)]
        for name in {**tensors[0], **tensors[1]}:
            text = compare_tensors(tensors[0].get(name), tensors[1].get(name))
            if text is not None:
                yield Difference(stem, name, text)


def _with_aliases(checkpoint: Checkpoint, stem: str) -> dict[str, Tensor]:
    tensors = checkpoint.read({stem}).tensors.get(stem, {})
    aliases = checkpoint.manifest.aliases.get(stem, {})
    if missing := [stored for stored in aliases.values() if stored not in tensors]:
        raise CorruptCheckpointError(f"{checkpoint.path}: a tensor is said to be stored as {missing[0]!r}, which is not there")
    return {**tensors, **{alias: tensors[stored] for alias, stored in aliases.items()}}


def compare_tensors(first: Tensor | None, second: Tensor | None) -> str | None:
    """How two tensors differ; ``None`` if not at all: the same dtype, shape and bits, those of NaN and of zeros too."""
    if first is None or second is None:
        return "only in the second" if first is None else "only in the first"
    kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (first, second)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    one, other = first.detach().cpu().contiguous().reshape(-1), second.detach().cpu().contiguous().reshape(-1)
    count, at, largest = 0, -1, 0.0
    for start in range(0, one.numel(), _PIECE):
        a, b = one[start : start + _PIECE], other[start : start + _PIECE]
        unequal = (_bits(a) != _bits(b)).any(dim=1)
        if not bool(unequal.any()):
            continue
        if not count:
            at = start + int(unequal.int().argmax())
        count += int(unequal.sum())
        largest = _larger(largest, _largest_difference(_chosen(a, unequal), _chosen(b, unequal)))
    if not count:
        return None
    index = tuple(int(i) for i in np.unravel_index(at, tuple(first.shape) or (1,))) if first.dim() else ()
    values = f"{one[at].item()!r} and {other[at].item()!r}"
    size = "not a number" if math.isnan(largest) else f"{largest:.3g}"
    of = count_text(one.numel(), "element")
    return f"{count:,} of {of} differ{'s' if count == 1 else ''}, by at most {size}; the first at {list(index)}: {values}"


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).reshape(flat.numel(), -1)


def _chosen(flat: Tensor, mask: Tensor) -> Tensor:
    return _bits(flat)[mask].reshape(-1).view(flat.dtype)  # torch 2.9 has no indexing of float8


def _largest_difference(first: Tensor, second: Tensor) -> float:
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    gap = (first.double() - second.double()).abs()
    same = first.double() == second.double()  # inf - inf, and integers that float64 does not tell apart
    gap = torch.where(same, torch.zeros_like(gap), gap)
    return math.nan if bool(gap.isnan().any()) else float(gap.max())


def _larger(first: float, second: float) -> float:
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


_ABSENT = object()


def compare_values(first: Any, second: Any, path: str) -> Iterator[tuple[str, str]]:
    """The paths at which two states differ, each with a description; types, order of lists and bits of floats count."""
    if first is _ABSENT or second is _ABSENT:
        where, value = ("second", second) if first is _ABSENT else ("first", first)
        yield path, f"only in the {where}: {short(value)}"
    elif _both_are(Tensor, first, second):
        if (text := compare_tensors(first, second)) is not None:
            yield path, text
    elif _both_are(np.ndarray, first, second):
        yield from compare_values(torch.from_numpy(first), torch.from_numpy(second), path)
    elif type(first) is not type(second):
        yield path, f"{short(first)} and {short(second)}"
    elif isinstance(first, Mapping):
        for key in {**first, **second}:
            yield from compare_values(first.get(key, _ABSENT), second.get(key, _ABSENT), f"{path}[{key!r}]")
    elif isinstance(first, (list, tuple)):
        if len(first) != len(second):
            yield path, f"{count_text(len(first), 'item')} and {count_text(len(second), 'item')}"
        for index, (one, other) in enumerate(zip(first, second, strict=False)):
            yield from compare_values(one, other, f"{path}[{index}]")
    elif not _same(first, second):
        yield path, f"{short(first)} and {short(second)}"


def _both_are(kind: type, first: Any, second: Any) -> bool:
    return isinstance(first, kind) and isinstance(second, kind)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, (float, np.floating)):
        return np.asarray(first).tobytes() == np.asarray(second).tobytes()
    if isinstance(first, complex):
        return _same(first.real, second.real) and _same(first.imag, second.imag)
    return bool(first == second)
