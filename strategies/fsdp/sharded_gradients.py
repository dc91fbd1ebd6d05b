"""Norms and clipping of gradients whose parts are on different ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainkit.errors import ConfigurationError
from trainkit.optim.gradient_norm import total_norm

__all__ = ["clip_norm", "clip_values", "global_norm"]


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _copies(gradient: Tensor, ranks: int) -> int:
    """The number of ranks that have the same part of a gradient."""
    if not isinstance(gradient, DTensor):
        return ranks
    mesh, copies = gradient.device_mesh, ranks // gradient.device_mesh.size()
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return copies


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of the gradients of all ranks together, the same on each rank. Collective.

    Each rank sums over its own parts, in float64 where the device has it; what several ranks have counts once. In a norm of
    order `inf` a NaN counts as infinity: the maximum over the ranks may ignore a NaN.

    Raises:
        ConfigurationError: `norm_type` is not a number > 0.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type!r}: expected a number > 0, or float('inf'). Use norm_type=2.0")
    gradients, ranks = _gradients(parameters), dist.get_world_size()
    dtype = max((g.dtype for g in gradients), key=lambda dtype: dtype.itemsize, default=torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        part = _local(gradient)
        if part.numel():
            by_copies.setdefault(_copies(gradient, ranks), []).append(part)
    for copies, parts in by_copies.items():
        norm = total_norm(parts, norm_type).to(device, torch.float64)
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm.pow(norm_type) / copies
    if math.isinf(norm_type):
        total.nan_to_num_(nan=math.inf, posinf=math.inf)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return (total if math.isinf(norm_type) else total.pow(1.0 / norm_type)).to(dtype)


@torch.no_grad()
def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is `norm`, down to `max_norm`, as `torch.nn.utils.clip_grads_with_norm_`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in _gradients(parameters):
        part = _local(gradient)
        part.mul_(factor.to(part.device))


@torch.no_grad()
def clip_values(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp each element of the gradients to [-clip_value, clip_value]."""
    for gradient in _gradients(parameters):
        _local(gradient).clamp_(-clip_value, clip_value)
