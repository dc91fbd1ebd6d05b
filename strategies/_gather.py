"""`all_gather`, which users call on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.nested import leaves, map_tensors

__all__ = ["gathered"]


def gathered(data: Any, world: World, device: torch.device, sync_grads: bool, alike: bool = False) -> Any:
    """Gather tensors in nested containers from all ranks, each stacked along a new first dimension: (world size, *shape).

    Args:
        data: tensors in nested containers.
        world: the ranks of the run.
        device: the device of the results.
        sync_grads: let gradients flow back to the inputs of all ranks.
        alike: the shapes are known to be the same on all ranks.

    Raises:
        CollectiveError: not all ranks call it.
        ConfigurationError: ranks pass different containers, shapes or dtypes.
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
