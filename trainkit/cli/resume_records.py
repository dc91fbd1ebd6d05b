"""The records of `verify-resume`: a run writes one for each micro-batch, and the records of two runs are compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RunDifference", "fingerprint", "first_difference", "loss_of", "read_records"]

_DEEPEST = 12  # maximum depth of nested containers
_MOST_ROWS = 4096  # larger batches are compared as a whole
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NOT_COMPARED = "not compared"


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """The first difference between two runs.

    Attributes:
        kind: "order", "batch", "rate", "loss" or "length".
        step: The optimizer step, from 1.
        text: The place and the values.
    """

    kind: str
    step: int
    text: str


# ---------------------------------------------------------------------------------------------------------- recording


def fingerprint(batch: Any) -> dict[str, list[str]]:
    """Path of each tensor, array or value in a batch → its digest, then the digest of each sample along dimension 0.

    For a value of an unknown type, there is only the text "not compared" with the type.
    """
    return {path or "batch": _digests(value) for path, value in _leaves(batch, "", 0)}


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    items = None if depth >= _DEEPEST else _items(value)
    if items is None:
        yield path, value
    else:
        for name, item in items:
            yield from _leaves(item, path + name, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The items of a container or an object, each with its relative path; `None` for a value without items."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        plain = all(isinstance(item, _PLAIN) for item in value)
        return None if plain else ((f"[{index}]", item) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name))
    if not isinstance(value, (Tensor, np.ndarray, np.generic, *_PLAIN)) and getattr(value, "__dict__", None):
        return ((f".{name}", item) for name, item in vars(value).items() if not callable(item))
    return None


def _digests(value: Any) -> list[str]:
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        own = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # as bytes: numpy does not have all of torch's dtypes
        raw = own.reshape(-1).view(torch.uint8).numpy()
        return _digests_of_rows(f"{own.dtype} {tuple(own.shape)}", raw, len(own) if own.dim() else 0)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        raw = np.frombuffer(value.tobytes(), np.uint8)
        return _digests_of_rows(f"{value.dtype} {value.shape}", raw, len(value) if value.ndim else 0)
    if isinstance(value, (list, tuple, np.generic, *_PLAIN)):
        items = value if isinstance(value, (list, tuple)) else ()
        return [_digest(_text((type(value).__name__, value))), *(_digest(_text(item)) for item in items[:_MOST_ROWS])]
    return [f"{_NOT_COMPARED}: {type(value).__name__}"]


def _digests_of_rows(kind: str, raw: np.ndarray[Any, Any], rows: int) -> list[str]:
    if 0 < rows <= _MOST_ROWS and raw.size:
        own = [_digest(np.ascontiguousarray(row)) for row in raw.reshape(rows, -1)]
        return [_digest(_text((kind, own))), *own]
    return [_digest(_text((kind, _digest(raw))))]


def _text(value: Any) -> bytes:
    return repr(value).encode("utf-8", "backslashreplace")


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def loss_of(outputs: Any) -> dict[str, str] | None:
    """The loss that `training_step` returned: its value, and its dtype and bits; `None` without a loss."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    value = loss.detach().cpu().reshape(1)
    return {"value": repr(value.item()), "bits": f"{value.dtype} {value.view(torch.uint8).numpy().tobytes().hex()}"}


# ---------------------------------------------------------------------------------------------------------- comparing


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run, without an incomplete last line, which a kill may leave."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1]]


def first_difference(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], *, name: str, killed: bool
) -> RunDifference | None:
    """The first micro-batch in which two runs differ.

    Args:
        first: Records of the uninterrupted run, from the first step of `second`.
        second: Records of the other run.
        name: The name of the other run, such as "the resumed run".
        killed: `second` may end earlier.
    """
    for one, other in zip(first, second, strict=False):
        if (difference := _compare(one, other, name)) is not None:
            return difference
    if len(second) > len(first) or (len(second) < len(first) and not killed):
        step = (first if len(first) > len(second) else second)[min(len(first), len(second))]["step"]
        text = f"the uninterrupted run had {len(first)} micro-batches in the compared steps, {name} had {len(second)}"
        return RunDifference("length", step, f"step {step}: {text}")
    return None


def _compare(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> RunDifference | None:
    step = one["step"]
    place = f"step {step} (epoch {one['epoch']}, batch {one['batch']})"
    for key in ("step", "epoch", "batch"):
        if one[key] != other[key]:
            there = f"step {other['step']} (epoch {other['epoch']}, batch {other['batch']})"
            return RunDifference("order", step, f"{place}: {name} was at {there}")
    if (text := _compare_batches(one["leaves"], other["leaves"])) is not None:
        return RunDifference("batch", step, f"{place}: the batch differs: {text}")
    if one["rates"] != other["rates"]:
        return RunDifference("rate", step, f"{place}: the learning rates are {one['rates']}, in {name} {other['rates']}")
    if one["loss"] != other["loss"]:
        values = [record["loss"]["value"] if record["loss"] else "none" for record in (one, other)]
        return RunDifference("loss", step, f"{place}: the loss is {values[0]}, in {name} {values[1]}")
    if one["parameters"] != other["parameters"]:
        return RunDifference("loss", step, f"{place}: the parameters differ after this step")
    return None


def _compare_batches(one: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> str | None:
    for path in {**one, **other}:
        if path not in one or path not in other:
            return f"only one of the batches has {path}"
        if one[path] == other[path]:
            continue
        here, there = one[path][1:], other[path][1:]
        if len(here) != len(there) or not here:
            return f"{path}" if not (here or there) else f"{path} has {len(here)} and {len(there)} samples"
        differing = [index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
        if not differing:
            return f"{path} has a different dtype or shape"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return f"{path}, sample {differing[0]}{more} of {len(here)}"
    return None
