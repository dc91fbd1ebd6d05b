"""Values sent to other ranks as bytes are restored unchanged, including tensors, without pickle."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.errors import UnsavableError
from trainkit.tagged_json.codec import from_bytes, to_bytes


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_values_are_restored_with_their_types() -> None:
    value: dict[str, Any] = {
        "tuple": (1, (2.5, None), [True, "x"]),
        "by number": {1: "one", (2, 3): "pair"},
        "bytes": b"\0\xff",
        "large": 2**130,
        "set": {1, 2},
        "empty": [{}, [], (), ""],
    }
    read = from_bytes(memoryview(to_bytes(value)))
    assert read == value
    assert repr(read) == repr(value)


def test_floats_are_restored_bit_by_bit() -> None:
    values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1 / 3]
    assert [bits(value) for value in from_bytes(to_bytes(values))] == [bits(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_tensors_are_restored_bit_by_bit(dtype: torch.dtype) -> None:
    base = torch.arange(24).to(dtype).view(4, 6)
    value = {"view": base[1:, ::2], "same": base, "transposed": base.t(), "scalar": base[0, 1], "none": base[:0]}
    read = from_bytes(to_bytes(value))
    for name, tensor in value.items():
        assert read[name].dtype == dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)
    read["same"].zero_()
    assert base.count_nonzero() > 0


def test_nan_in_tensors_and_arrays() -> None:
    tensor, array = torch.tensor([math.nan, -0.0, math.inf]), np.array([math.nan, 1e-300])
    read = from_bytes(to_bytes([tensor, array]))
    assert read[0].view(torch.int32).tolist() == tensor.view(torch.int32).tolist()
    assert read[1].tobytes() == array.tobytes()


def test_what_cannot_be_encoded_is_named() -> None:
    with pytest.raises(UnsavableError, match=r'^a value for other ranks\["fn"\] cannot be stored: it is code'):
        to_bytes({"fn": lambda: 0})
