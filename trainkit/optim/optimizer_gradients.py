"""Gradients of a whole optimizer: their norm, accurate for tensors of any size, clamping, clearing, and where they flow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import ModuleError

__all__ = ["clamp_gradient", "clear_gradients", "toggle", "total_norm", "untoggle"]

# torch sums this number of elements on a CPU in float32 with an error in the last digit only.
_ROW_NUMEL = 4096


def total_norm(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the vector of all elements of `gradients`, a scalar on the device of the first one.

    On a CPU torch sums the squares of a tensor sequentially: in float32 the norm of 5 million elements has an error of 3e-4, of
    50 million elements 4e-3. So large tensors are split into rows; the norm of the norms of the rows is the norm of the tensor.

    Args:
        gradients: Tensors of any shapes, on any devices; only the values of sparse ones count.
        norm_type: The p of the p-norm.
    """
    gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    tensors = gradients if not 1 <= norm_type < math.inf else [p for g in gradients for p in _rows(g, norm_type)]
    norm: Tensor = torch.nn.utils.get_total_norm(tensors, norm_type)
    return norm


def clamp_gradient(gradient: Tensor, limit: float) -> Tensor:
    """A sparse gradient with each element clamped to [-limit, limit].

    Raises:
        ModuleError: It is complex, so that its elements have no order.
    """
    if gradient.is_complex():
        raise ModuleError(
            "gradients of complex parameters cannot be clipped by value. Fix: clip by norm, "
            "Trainer(gradient_clip_algorithm='norm') or clip_grad_norm_(parameters, max_norm)"
        )
    gradient = gradient.coalesce()
    values = gradient.values().clamp(-limit, limit)
    return torch.sparse_coo_tensor(gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False)


def toggle(optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> dict[Tensor, bool]:
    """Let gradients flow only into this optimizer's parameters, not into those of the other `optimizers`.

    Returns:
        The other parameters, each with its `requires_grad` before; `untoggle` restores it.
    """
    own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for o in optimizers for group in o.param_groups for p in group["params"] if id(p) not in own_ids]
    before = {p: p.requires_grad for p in others}
    for p in before:
        p.requires_grad = False
    return before


def untoggle(before: Mapping[Tensor, bool]) -> None:
    """Undo `toggle`, given what it returned."""
    for parameter, requires_grad in before.items():
        parameter.requires_grad = requires_grad


def clear_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad()`, but without its record for torch's profiler, which takes longer than clearing the gradients.

    For an optimizer that overrides `zero_grad`, calls it.
    """
    method = optimizer.zero_grad
    if getattr(method, "__func__", None) is not Optimizer.zero_grad:
        method()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _rows(gradient: Tensor, norm_type: float) -> Iterator[Tensor]:
    if gradient.device.type != "cpu" or gradient.layout != torch.strided or gradient.numel() <= _ROW_NUMEL:
        yield gradient
        return
    flat = gradient.detach().reshape(-1)
    rows = flat.numel() // _ROW_NUMEL
    yield torch.linalg.vector_norm(flat[: rows * _ROW_NUMEL].view(rows, _ROW_NUMEL), norm_type, dim=1)
    yield flat[rows * _ROW_NUMEL :]
