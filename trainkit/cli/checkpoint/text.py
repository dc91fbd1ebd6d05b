"""The output of `trainkit checkpoint`: lines, tables and JSON.

With names, dtypes and shapes of the tensors in a file, without reading the tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit.checkpoint.manifest import Manifest
from trainkit.errors import CorruptCheckpointError
from trainkit.masking import escape_controls

__all__ = [
    "TensorHeader",
    "about_manifest",
    "as_json",
    "bytes_text",
    "contents_text",
    "good_text",
    "on_one_line",
    "print_lines",
    "short",
    "table",
    "tensor_headers",
]


_FEW = 8  # a tensor with more elements is shown without values


def print_lines(*lines: str) -> None:
    """Print lines, with unprintable characters escaped."""
    for line in lines:
        print(escape_controls(line, keep=""))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """Lines in columns.

    Args:
        header: The titles of the columns.
        rows: The cells.
        right: The titles of right-aligned columns, separated by spaces.
    """
    cells = [list(header), *([escape_controls(cell, keep="") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    sides = [">" if title in right.split() else "<" for title in header]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, width, side in zip(row, widths, sides, strict=True)).rstrip()
        for row in cells
    ]


def bytes_text(size: int) -> str:
    """A number of bytes as text, such as `1.2 GB`, in powers of 1000."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def on_one_line(text: str, path: object) -> str:
    """A message on one line, in which the files of the checkpoint are named without its path."""
    for folder in (os.path.abspath(str(path)), str(path)):  # the absolute path first, which may end with the other
        text = text.replace(f"{folder}/", "").replace(f"{folder}\\", "")
    return "; ".join(text.splitlines())


def contents_text(manifest: Manifest) -> str:
    """What a checkpoint contains: `all`, `trainable`, `weights`, `trainable weights`, or `by hook`: a hook has the weights."""
    if manifest.by_hook:
        return "by hook"
    model = str(manifest.contents.get("model", "all"))
    if manifest.contents.get("resumable", False):
        return model
    return "weights" if model == "all" else f"{model} weights"


def good_text(manifest: Manifest | None) -> str:
    """The state of a checkpoint without a problem: `good`, or that its parameters are not finite."""
    return "good" if manifest is None or manifest.finite is not False else "not finite"


def about_manifest(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain values for `as_json`, with the total bytes under `size`."""
    values = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    for kind, files in (("files", manifest.files), ("hook_files", manifest.hook_files)):
        values[kind] = {name: {"size": entry.size, manifest.checksum: entry.digest} for name, entry in files.items()}
    return {**values, "size": manifest.total_size}


def as_json(value: Any) -> str:
    """Any value as strict JSON: other types as text, numbers that are not finite as `"nan"` or `"inf"`."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return short(value)


def short(value: Any) -> str:
    """A short text for a value: for a large tensor its dtype and shape, for a long text the beginning."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}" + (f" {value.tolist()}" if value.size <= _FEW else "")
    if isinstance(value, Tensor):
        kind = f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return f"{kind} {value.tolist()}" if value.numel() <= _FEW else kind
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:190]}… ({len(text)} characters)"


class TensorHeader(NamedTuple):
    """The entry of a tensor in the header of a safetensors file; `dtype` is spelled as in the file: `F32`, `BF16`, …"""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Name → header, in the order of the file. Raises a `CorruptCheckpointError` for a malformed header."""
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: TensorHeader(path.name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpointError(f"{path} has a malformed header: {error}") from error
