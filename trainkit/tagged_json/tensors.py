"""Which tensors can be stored: those with a dense layout, a dtype that safetensors supports, and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainkit.console import with_article

__all__ = ["DTYPES", "NAMES", "ShardedTensor", "is_sharded_tensor", "tensor_problem"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes of the safetensors format by their names in it."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names of these dtypes."""


class ShardedTensor(Tensor):
    """A tensor of a checkpoint that is sharded over the ranks: its shape and dtype on the meta device, and how to gather it.

    Attributes:
        collect: Collective; called on all ranks with the rank that needs the tensor. Returns the tensor there and `None` on
            the others. With `None` instead of a rank it returns the tensor on all ranks.
    """

    collect: Callable[[int | None], Tensor | None]

    @staticmethod
    def __new__(cls, shape: Iterable[int], dtype: torch.dtype, collect: Callable[[int | None], Tensor | None]) -> ShardedTensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        tensor.collect = collect
        return tensor

    def detach(self) -> ShardedTensor:
        """The tensor itself: it has no graph."""
        return self

    resolve_conj = resolve_neg = detach


def is_sharded_tensor(tensor: Any) -> bool:
    """Whether the values of a tensor must be gathered from several ranks."""
    return isinstance(tensor, ShardedTensor)


def tensor_problem(tensor: Tensor) -> str | None:
    """Why a tensor cannot be stored, with the fix; `None` if it can."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"it is {with_article(type(tensor).__name__)}, a tensor subclass that wraps other tensors; store those"
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        return "it has no values yet; run one batch through the module first"
    if tensor.is_quantized:
        return "it is quantized; store its int_repr(), scale and zero point, or dequantize() it"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; store to_dense(), or its indices and values"
    if tensor.is_meta and not is_sharded_tensor(tensor):
        return "it is on the meta device, so it has no values; load a checkpoint, or call module.to_empty(device=...)"
    if tensor.is_nested:
        return "it is a nested tensor; store unbind() of it"
    if tensor.dtype not in NAMES:
        fix = (
            "its real and imaginary parts" if tensor.is_complex() else "a copy with a supported dtype, or its view(torch.uint8)"
        )
        return f"safetensors does not support {tensor.dtype}; store {fix}"
    return None
