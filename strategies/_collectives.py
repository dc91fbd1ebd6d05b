"""Collectives over lists of tensors, over the buffers of modules that every rank has a copy of, and over nested data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.nested import leaves, map_tensors

__all__ = [
    "Buffers",
    "all_gather_nested",
    "average_gradients",
    "broadcast",
    "check_modules_match",
    "empty_sparse_gradient",
    "mean",
    "sparse_parameters",
]


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
        parameters: The same parameters on all ranks, in the same order.
        bucket_mb: Bucket size in MB.
        wire: Dtype in which floating-point values are sent, if it has fewer bytes than theirs.
        sparse: Ids of the parameters with sparse gradients.

    Raises:
        ModuleError: A sparse gradient cannot be averaged.
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


class Buffers:
    """The buffers of modules. Looks them up at each use, because a module may replace a buffer."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._world: World | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, module: nn.Module, world: World) -> None:
        """Add the buffers of a module that every rank has a copy of."""
        self._world = world
        self._places += [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]

    def present(self) -> list[Tensor]:
        """The current buffers, without those that are `None`."""
        buffers = [owner.get(name) for owner, name in self._places]
        return [buffer for buffer in buffers if buffer is not None]

    def sync(self) -> None:
        """Broadcast the buffers from rank 0."""
        present = self.present()
        if present and self._world is not None:
            with self._world.collectives:
                broadcast(present)


def check_modules_match(module: nn.Module, world: World, backend: str) -> None:
    """Check that the modules of all ranks have parameters and buffers of the same names, shapes and dtypes. Collective.

    Args:
        backend: Name of the backend, for the error message.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ModuleError(
            f"{lazy[0]} is uninitialized, but {backend} needs the shapes of all parameters and buffers. Run a batch through "
            "the module in configure_model: self(batch)"
        )
    mine = [f"{name}: {str(t.dtype).removeprefix('torch.')}{list(getattr(t, 'ds_shape', t.shape))}" for name, t in named]
    by_rank = world.exchange(mine)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            differing = [line for line in [*by_rank[0], *other] if (line in by_rank[0]) != (line in other)]
            raise ModuleError(
                f"rank 0 and rank {rank} have different modules, but all ranks must have the same module. Different: "
                f"{'; '.join(differing[:4]) or 'the order of parameters'}. Build the module the same way on all ranks."
            )


def all_gather_nested(data: Any, world: World, device: torch.device, sync_grads: bool, alike: bool = False) -> Any:
    """Gather tensors in nested containers from all ranks, each stacked along a new first dimension: (world size, *shape).

    Args:
        data: Tensors in nested containers.
        device: The device of the results.
        sync_grads: Let gradients flow back to the inputs of all ranks.
        alike: The shapes are known to be the same on all ranks.

    Raises:
        CollectiveError: Not all ranks call it.
        ConfigurationError: Ranks pass different containers, shapes or dtypes.
    """
    if not alike:
        _check_same_shapes(data, world)

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        if sync_grads and tensor.requires_grad:
            joined: Tensor = _Gather.apply(tensor, world.rank)  # type: ignore[no-untyped-call]
            return joined
        return _gather(tensor.detach())

    return map_tensors(data, gather)


def _check_same_shapes(data: Any, world: World) -> None:
    tensors = [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]
    mine = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    by_rank = CollectiveChecks.of(world).exchange("all_gather", mine)
    if any(other != by_rank[0] for other in by_rank):
        lines = [f"rank {rank}: {', '.join(f'{dtype}{shape}' for dtype, shape in each)}" for rank, each in enumerate(by_rank)]
        raise ConfigurationError(
            f"all_gather needs tensors of the same shapes and dtypes on all ranks, but got {'; '.join(lines)}. Pad them first: "
            "torch.nn.functional.pad(x, (0, n - len(x)))"
        )


def _gather(tensor: Tensor) -> Tensor:
    joined = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    dist.all_gather(list(joined.unbind(0)), tensor.contiguous())
    return joined


class _Gather(torch.autograd.Function):
    """All-gather. In backward, the gradient of a rank's input is the sum of the gradients that all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return _gather(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.rank], None
