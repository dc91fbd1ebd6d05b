"""Names, dtypes and shapes of the tensors in a file, without reading the tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from trainkit.errors import CorruptCheckpointError

__all__ = ["TensorHeader", "tensor_headers"]


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
