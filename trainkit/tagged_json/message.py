"""One value as bytes, for exchange between ranks: tagged JSON, followed by its tensors in the safetensors format."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from trainkit.tagged_json.encode import dumps, loads

__all__ = ["from_bytes", "to_bytes"]

_FILE = "tensors"
_HEAD = 8  # bytes of the length of the JSON


def to_bytes(value: Any) -> bytes:
    """A value, as `trainkit.tagged_json.encode.dumps` describes it, with its tensors.

    Raises:
        UnsavableError: something in it cannot be encoded; the message names the path to it.
    """
    tensors: dict[str, Tensor] = {}
    text = dumps(value, tensors, file=_FILE, where="a value for other ranks")
    # safetensors rejects tensors that share memory
    copies = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    return len(text).to_bytes(_HEAD, "little") + text + save(copies)


def from_bytes(data: bytes | memoryview) -> Any:
    """The value that was passed to `to_bytes`; its tensors are copies on the CPU."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    return loads(data[_HEAD:end], {_FILE: load(bytes(data[end:]))}, "a value of another rank")
