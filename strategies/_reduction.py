"""Collectives over lists of tensors: many small tensors travel as a few large ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.errors import ModuleError

__all__ = ["average_gradients", "broadcast", "mean", "no_rows", "sparse_parameters"]

_BROADCAST_MB = 64.0


def mean(tensor: Tensor) -> Tensor:
    """The mean of a tensor over all processes, without its graph."""
    result = tensor.detach() / dist.get_world_size()
    dist.all_reduce(result)
    return result


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Rank 0's values, on every process; the tensors are alike in number, order, shape and dtype."""
    main = dist.get_rank() == 0
    for some in _buckets(tensors, _BROADCAST_MB):
        if len(some) == 1 and some[0].is_contiguous():
            dist.broadcast(_real(some[0]), 0)
            continue
        flat = torch.cat([_real(tensor).reshape(-1) for tensor in some])
        dist.broadcast(flat, 0)
        if not main:
            _scatter(flat, [_real(tensor) for tensor in some])


def average_gradients(
    parameters: Iterable[Tensor], bucket_mb: float, *, wire: torch.dtype | None = None, sparse: Collection[int] = ()
) -> None:
    """The mean of each parameter's gradient over all processes, in place.

    A process without a gradient counts as one of zeros. A parameter that has none on any process keeps having none: which have
    one travels beside the values.

    Args:
        parameters: the same on all processes, in the same order.
        bucket_mb: size of what is sent at once, in MB.
        wire: a shorter dtype that floating-point values are sent in.
        sparse: ids of the parameters whose gradients are sparse.

    Raises:
        ModuleError: a sparse gradient that cannot be reduced.
    """
    distinct = {id(parameter): parameter for parameter in parameters}
    sent = [_Sent(some, wire) for some in _buckets([p for i, p in distinct.items() if i not in sparse], bucket_mb)]
    for one in sent:
        one.receive()
    for key, parameter in distinct.items():
        if key in sparse:
            _average_sparse(parameter)


class _Sent:
    """Gradients of some parameters, and which of them there are, on their way."""

    def __init__(self, parameters: Sequence[Tensor], wire: torch.dtype | None) -> None:
        self._parameters = parameters
        self._missing = [parameter.grad is None for parameter in parameters]
        first = _real(parameters[0].detach())
        if any(self._missing):
            there = torch.tensor([float(not missing) for missing in self._missing], dtype=first.dtype, device=first.device)
        else:
            there = torch.ones(len(parameters), dtype=first.dtype, device=first.device)  # does not wait for the device
        pieces = [_gradient_or_zeros(parameter) for parameter in parameters]
        self._flat = torch.cat([*pieces, there]).div_(dist.get_world_size())
        self._dtype = self._flat.dtype
        if wire is not None and wire.itemsize < self._dtype.itemsize:
            self._flat = self._flat.to(wire)
        self._work: Any = dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        """Wait for them, and give them to the parameters."""
        self._work.wait()
        flat = self._flat.to(self._dtype)
        *values, there = flat.split([*(_real(p.detach()).numel() for p in self._parameters), len(self._parameters)])
        known = there.tolist() if any(self._missing) else None  # waits for the device: only where something is missing
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
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient and does not belong to an nn.Embedding or "
            "nn.EmbeddingBag with sparse=True, so the other processes do not expect it. Make it dense."
        )
    return _real(gradient.detach()).reshape(-1)


def _average_sparse(parameter: Tensor) -> None:
    if parameter.device.type != "cpu" and dist.get_backend() != "gloo":
        raise ModuleError(
            f"sparse gradients on {parameter.device.type!r} cannot be averaged over the backend {dist.get_backend()!r}. Use "
            "nn.Embedding(..., sparse=False), or DDPStrategy(process_group_backend='gloo')."
        )
    gradient = parameter.grad
    if gradient is None:
        gradient = no_rows(parameter.detach())
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


def no_rows(like: Tensor) -> Tensor:
    """A sparse gradient of nothing."""
    nowhere = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(nowhere, like[:0], like.shape)


def _buckets(tensors: Iterable[Tensor], bucket_mb: float) -> Iterator[list[Tensor]]:
    """The tensors by dtype and device, in lists of at most so many MB, or of one tensor."""
    open_ones: dict[Any, list[Tensor]] = {}
    sizes: dict[Any, float] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size() / 2**20
        if key in open_ones and sizes[key] + size > bucket_mb:
            yield open_ones.pop(key)
        if key not in open_ones:
            open_ones[key], sizes[key] = [], 0.0
        open_ones[key].append(tensor)
        sizes[key] += size
    yield from open_ones.values()


def _scatter(flat: Tensor, targets: Sequence[Tensor]) -> None:
    for target, value in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
        target.copy_(value.view(target.shape))


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which every backend can send."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
