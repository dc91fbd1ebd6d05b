"""Takes apart the quantized tensors in the state of torchao's optimizers, and puts them together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.errors import missing_package
from trainkit.registry import load

__all__ = ["KINDS", "put_together", "taken_apart"]

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "OptimState4bit": ("torchao.optim.subclass_4bit:OptimState4bit", ("codes", "scale", "qmap")),
    "OptimState8bit": ("torchao.optim.subclass_8bit:OptimState8bit", ("codes", "scale", "qmap")),
    "OptimStateFp8": ("torchao.optim.subclass_fp8:OptimStateFp8", ("codes", "scale")),
}
"""Class → its path, and its inner tensors. A checkpoint names one of these, and never a path."""


def taken_apart(tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The inner tensors of a quantized tensor by name, and its description; `None` if it is none of `KINDS`."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor).__name__ not in KINDS:
        return None
    names, attributes = flatten()
    plain = [tuple(value) if isinstance(value, torch.Size) else value for value in attributes]
    about = {"class": type(tensor).__name__, "attributes": plain, "shape": tuple(tensor.shape)}
    return {name: getattr(tensor, name) for name in names}, about


def put_together(about: dict[str, Any], inner: dict[str, Tensor]) -> Tensor:
    """The inverse of `taken_apart`.

    Raises:
        MissingPackageError: torchao is not installed.
    """
    try:
        kind = load(KINDS[about["class"]][0])
    except ImportError as error:
        raise missing_package("torchao", "fp8", f"the state of this optimizer ({about['class']})") from error
    attributes = [torch.Size(value) if isinstance(value, tuple) else value for value in about["attributes"]]
    made: Tensor = kind.__tensor_unflatten__(inner, attributes)
    return made
