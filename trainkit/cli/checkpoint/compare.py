"""`trainkit checkpoint diff`: the differences between two checkpoints, bit for bit."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.checkpoint.reader import Checkpoint, open_checkpoint
from trainkit.cli.checkpoint.export import aliases_of
from trainkit.cli.checkpoint.text import print_lines, short
from trainkit.console import quantity

__all__ = ["CheckpointDifference", "compare_checkpoints", "compare_tensors", "compare_values", "run"]

# Entries of the manifest in which even two identical runs differ.
_NOT_COMPARED = (
    "run_id",
    "save_counter",
    "saved_at",
    "saved_by",
    "trainkit_version",
    "format_version",
    "checksum",
    "files",
    "model_files",
    "aliases",
)
# Parts of the state that contain paths and times; compared with --all.
_ONLY_WITH_ALL = ("callbacks", "loggers", "metrics", "results")
_CHUNK = 1 << 22  # elements to compare at a time


def run(args: argparse.Namespace) -> int:
    """Print one line for each difference; 0 if there is none, else 1."""
    first, second = open_checkpoint(args.first), open_checkpoint(args.second)
    counts: Counter[str] = Counter()
    for difference in compare_checkpoints(first, second, everything=args.all):
        print_lines(str(difference))
        counts[difference.part] += 1
    if not counts:
        skipped = "" if args.all else " (not compared without --all: callbacks, loggers, logged metrics)"
        print_lines(f"equal, bit for bit: {', '.join(first.stems)}{skipped}")
        return 0
    print_lines(f"{quantity(counts.total(), 'difference')}: " + ", ".join(f"{part} {n}" for part, n in counts.items()))
    return 1


@dataclass(frozen=True)
class CheckpointDifference:
    """One difference.

    Attributes:
        part: "manifest", "model" (or another stem), "optimizer" or "state".
        name: The name of the tensor, or the path in the state.
        text: The two values.
    """

    part: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.part}: {self.name}: {self.text}"


def compare_checkpoints(first: Checkpoint, second: Checkpoint, *, everything: bool = False) -> Iterator[CheckpointDifference]:
    """All differences. Every file is read and verified; one part of each checkpoint is in memory at a time.

    Args:
        first: A checkpoint.
        second: The checkpoint to compare it with.
        everything: Also compare the states of callbacks and loggers, and the logged metrics. They contain paths and times.

    Raises:
        CheckpointError: A checkpoint is damaged.
    """
    manifests = [vars(one.manifest) for one in (first, second)]
    skipped = (*_NOT_COMPARED, *(() if everything else ("metrics",)))
    for name in manifests[0]:
        if name not in skipped:
            for path, text in compare_values(manifests[0][name], manifests[1][name], name):
                yield CheckpointDifference("manifest", path, text)
    yield from _compare_stems(first, second)
    states = [one.read({"state"}, unregistered=True).state for one in (first, second)]
    for key in sorted({*states[0], *states[1]}):
        if everything or key not in _ONLY_WITH_ALL:
            one, other = (state.get(key, _ABSENT) for state in states)
            for path, text in compare_values(one, other, key):
                yield CheckpointDifference("state", path, text)


def _compare_stems(first: Checkpoint, second: Checkpoint) -> Iterator[CheckpointDifference]:
    here, there = (dict.fromkeys(stem for stem in one.stems if stem != "state") for one in (first, second))
    for stem in {**here, **there}:
        if stem not in here or stem not in there:
            yield CheckpointDifference(
                stem, "the whole part", "only in the second" if stem not in here else "only in the first"
            )
            continue
        tensors = [_with_aliases(one, stem) for one in (first, second)]
        for name in {**tensors[0], **tensors[1]}:
            text = compare_tensors(tensors[0].get(name), tensors[1].get(name))
            if text is not None:
                yield CheckpointDifference(stem, name, text)


def _with_aliases(checkpoint: Checkpoint, stem: str) -> dict[str, Tensor]:
    tensors = checkpoint.read({stem}).tensors.get(stem, {})
    return {**tensors, **{alias: tensors[stored] for alias, stored in aliases_of(checkpoint, stem, tensors).items()}}


def compare_tensors(first: Tensor | None, second: Tensor | None) -> str | None:
    """How two tensors differ, or `None` if dtype, shape and all bits are equal, including those of NaN and of zeros."""
    if first is None or second is None:
        return "only in the second" if first is None else "only in the first"
    kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (first, second)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    one, other = first.detach().cpu().contiguous().reshape(-1), second.detach().cpu().contiguous().reshape(-1)
    count, at, largest = 0, -1, 0.0
    for start in range(0, one.numel(), _CHUNK):
        a, b = one[start : start + _CHUNK], other[start : start + _CHUNK]
        unequal = (_bits(a) != _bits(b)).any(dim=1)
        if not bool(unequal.any()):
            continue
        at = at if count else start + int(unequal.int().argmax())
        count += int(unequal.sum())
        gap = _largest_difference(_select(a, unequal), _select(b, unequal))
        largest = float(np.maximum(largest, gap))  # NaN if one of them is
    if not count:
        return None
    index = tuple(int(i) for i in np.unravel_index(at, tuple(first.shape) or (1,))) if first.dim() else ()
    values = f"{one[at].item()!r} and {other[at].item()!r}"
    size = "NaN" if math.isnan(largest) else f"{largest:.3g}"
    of = quantity(one.numel(), "element")
    return f"{count:,} of {of} differ{'s' if count == 1 else ''}, by at most {size}; the first at {list(index)}: {values}"


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).reshape(flat.numel(), -1)


def _select(flat: Tensor, mask: Tensor) -> Tensor:
    return _bits(flat)[mask].reshape(-1).view(flat.dtype)  # torch 2.9 has no indexing of float8


def _largest_difference(first: Tensor, second: Tensor) -> float:
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    gap = (first.double() - second.double()).abs()
    same = first.double() == second.double()  # inf - inf, and large integers that are equal in float64
    gap = torch.where(same, torch.zeros_like(gap), gap)
    return math.nan if bool(gap.isnan().any()) else float(gap.max())


_ABSENT = object()


def compare_values(first: Any, second: Any, path: str) -> Iterator[tuple[str, str]]:
    """The paths at which two states differ, each with a description. Types, the order of lists and bits of floats count."""
    if first is _ABSENT or second is _ABSENT:
        where, value = ("second", second) if first is _ABSENT else ("first", first)
        yield path, f"only in the {where}: {short(value)}"
    elif type(first) is not type(second):
        yield path, f"{short(first)} and {short(second)}"
    elif isinstance(first, Tensor):
        if (text := compare_tensors(first, second)) is not None:
            yield path, text
    elif isinstance(first, np.ndarray):
        yield from _compare_arrays(first, second, path)
    elif isinstance(first, Mapping):
        for key in {**first, **second}:
            yield from compare_values(first.get(key, _ABSENT), second.get(key, _ABSENT), f"{path}[{key!r}]")
    elif isinstance(first, (list, tuple)):
        if len(first) != len(second):
            yield path, f"{quantity(len(first), 'item')} and {quantity(len(second), 'item')}"
        for index, (one, other) in enumerate(zip(first, second, strict=False)):
            yield from compare_values(one, other, f"{path}[{index}]")
    elif not _same(first, second):
        yield path, f"{short(first)} and {short(second)}"


def _compare_arrays(first: Any, second: Any, path: str) -> Iterator[tuple[str, str]]:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        yield path, f"{short(first)} and {short(second)}"
    elif first.dtype.kind in "OSU":
        yield from compare_values(first.ravel().tolist(), second.ravel().tolist(), path)
    else:
        yield from compare_values(torch.from_numpy(first), torch.from_numpy(second), path)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, (float, np.floating)):
        return np.asarray(first).tobytes() == np.asarray(second).tobytes()
    if isinstance(first, complex):
        return _same(first.real, second.real) and _same(first.imag, second.imag)
    return bool(first == second)
