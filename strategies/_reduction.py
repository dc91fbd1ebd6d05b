"""Collectives over lists of tensors, which combine many small tensors into a few large buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.errors import ModuleError

__all__ = ["average_gradients", "broadcast", "empty_sparse_gradient", "mean", "sparse_parameters"]

_BROADCAST_MB = 64.0


def mean(tensor: Tensor) -> Tensor:
    """The mean of a tensor over all ranks, detached from the graph."""
    result = tensor.detach() / dist.get_world_size()
    dist.all_reduce(result)
    return result


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0. All ranks must pass tensors of the same shapes and dtypes in the same order."""
    main = dist.get_rank() == 0
    for some in _buckets(tensors, _BROADCAST_MB):
        if len(some) == 1 and some[0].is_contiguous():
            dist.broadcast(_real(some[0]), 0)
            continue
        flat = torch.cat([_real(tensor).reshape(-1) for tensor in some])
        dist.broadcast(flat, 0)
        if not main:
            _copy_out(flat, [_real(tensor) for tensor in some])


def average_gradients(
    parameters: Iterable[Tensor], bucket_mb: float, *, wire: torch.dtype | None = None, sparse: Collection[int] = ()
) -> None:
    """Average the gradient of each parameter over all ranks, in place.

    A gradient that is missing on some ranks counts as zeros there. One that is missing on all ranks stays `None`: each bucket
    also contains a flag for each parameter that shows whether its gradient exists.

    Args:
        parameters: the same parameters on all ranks, in the same order.
        bucket_mb: bucket size in MB.
        wire: dtype in which floating-point values are sent, if it has fewer bytes than theirs.
        sparse: ids of the parameters with sparse gradients.

    Raises:
        ModuleError: a sparse gradient cannot be averaged.
    """
    distinct = {id(parameter): parameter for parameter in parameters}
    dense = [parameter for key, parameter in distinct.items() if key not in sparse]
    reductions = [_BucketReduction(bucket, wire) for bucket in _buckets(dense, bucket_mb)]
    for reduction in reductions:
        reduction.finish()
    for key, parameter in distinct.items():
        if key in sparse:
            _average_sparse(parameter)


class _BucketReduction:
    """An all-reduce in flight: the gradients of some parameters, and a flag for each gradient that exists."""

    def __init__(self, parameters: Sequence[Tensor], wire: torch.dtype | None) -> None:
        self._parameters = parameters
        self._missing = [parameter.grad is None for parameter in parameters]
        first = _real(parameters[0].detach())
        if any(self._missing):
            there = torch.tensor([float(not missing) for missing in self._missing], dtype=first.dtype, device=first.device)
        else:
            # no copy from the host, which would synchronize
            there = torch.ones(len(parameters), dtype=first.dtype, device=first.device)
        pieces = [_gradient_or_zeros(parameter) for parameter in parameters]
        self._flat = torch.cat([*pieces, there]).div_(dist.get_world_size())
        self._dtype = self._flat.dtype
        if wire is not None and wire.itemsize < self._dtype.itemsize:
            self._flat = self._flat.to(wire)
        self._work: Any = dist.all_reduce(self._flat, async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce, and write the means to the gradients."""
        self._work.wait()
        flat = self._flat.to(self._dtype)
        *values, there = flat.split([*(_real(p.detach()).numel() for p in self._parameters), len(self._parameters)])
        known = there.tolist() if any(self._missing) else None  # synchronizes, so only if a gradient is missing
        for place, (parameter, value) in enumerate(zip(self._parameters, values, strict=True)):
            if parameter.grad is None:
                assert known is not None
                if known[place] == 0.0:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            target = _real(parameter.grad.detach())
            target.copy_(value.view(target.shape))


def _gradient_or_zeros(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        like = _real(parameter.detach())
        return torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
    if gradient.is_sparse:
        raise ModuleError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, but only nn.Embedding and nn.EmbeddingBag "
            "with sparse=True may have one. Make it dense: torch.nn.functional.embedding(x, weight, sparse=False)"
        )
    return _real(gradient.detach()).reshape(-1)


def _average_sparse(parameter: Tensor) -> None:
    if parameter.device.type != "cpu" and dist.get_backend() != "gloo":
        raise ModuleError(
            f"the backend {dist.get_backend()!r} cannot average sparse gradients on {parameter.device.type!r}. Use "
            "nn.Embedding(..., sparse=False), or DDPStrategy(process_group_backend='gloo')."
        )
    gradient = parameter.grad
    if gradient is None:
        gradient = empty_sparse_gradient(parameter.detach())
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    gradient = (gradient.detach() / dist.get_world_size()).coalesce()
    dist.all_reduce(gradient)
    if gradient._nnz() or parameter.grad is not None:
        parameter.grad = gradient


def sparse_parameters(module: nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return {id(part.weight) for part in module.modules() if isinstance(part, kinds) and part.sparse}


def empty_sparse_gradient(like: Tensor) -> Tensor:
    """A sparse zero gradient of the shape of `like`, with no entries."""
    nowhere = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(nowhere, like[:0], like.shape)


def _buckets(tensors: Iterable[Tensor], bucket_mb: float) -> Iterator[list[Tensor]]:
    """Group tensors by dtype and device into lists of at most `bucket_mb` MB; a larger tensor has its own list."""
    open_buckets: dict[Any, list[Tensor]] = {}
    sizes: dict[Any, float] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size() / 2**20
        if key in open_buckets and sizes[key] + size > bucket_mb:
            yield open_buckets.pop(key)
        if key not in open_buckets:
            open_buckets[key], sizes[key] = [], 0.0
        open_buckets[key].append(tensor)
        sizes[key] += size
    yield from open_buckets.values()


def _copy_out(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy the parts of a flat tensor to the tensors that were concatenated in it."""
    for target, value in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
        target.copy_(value.view(target.shape))


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which every backend can send."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
