"""Names, dtypes and shapes of the tensors in a file, without reading them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from trainkit.errors import CorruptCheckpointError
from trainkit.tagged_json.strict_json import MAX_JSON_BYTES, strict_json

__all__ = ["TensorHeader", "tensor_headers"]


class TensorHeader(NamedTuple):
    """What the header of a safetensors file says of a tensor; ``dtype`` as the format writes it: ``F32``, ``BF16``, …"""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Name → header, in the order of the file, whose content is not verified.

    Raises:
        CorruptCheckpointError: it is malformed.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_JSON_BYTES, path.stat().st_size - 8):
                raise CorruptCheckpointError(f"{path}: a header of {length:,} bytes, which the file has not")
            header = strict_json(file.read(length), f"{path}: header")
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{path}: header: expected an object, got {type(header).__name__}")
    found = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = (about.get("dtype"), about.get("shape")) if isinstance(about, dict) else (None, None)
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise CorruptCheckpointError(f"{path}: header: expected dtype and shape of {name!r:.200}, got {about!r:.200}")
        found[name] = TensorHeader(path.name, dtype, tuple(shape))
    return found
