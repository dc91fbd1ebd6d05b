"""BatchNorm with statistics over all processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.console import notice
from trainkit.distributed.world import World

__all__ = ["SyncedBatchNorms"]


class SyncedBatchNorms:
    """The layers that talk to the other processes in every forward, in place of the user's.

    In a window in which the processes have different numbers of micro-batches they use the statistics of their own process,
    as some of the others do not compute anything then.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []  # owner, name, the user's layer
        self._layers: list[nn.SyncBatchNorm] = []
        self._own: Any = None  # a group of this process alone
        self._local = False

    def __bool__(self) -> bool:
        return bool(self._layers)

    def put_in(self, module: nn.Module, world: World) -> None:
        """Put synchronized layers in place of the BatchNorms; they have the same parameters and buffers."""
        twins: dict[nn.Module, nn.SyncBatchNorm] = {}
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                    if layer not in twins:
                        twins[layer] = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
                    setattr(owner, name, twins[layer])
                    self._replaced.append((owner, name, layer))
        self._layers += [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
        if self._layers and self._own is None:
            self._own = [dist.new_group([rank]) for rank in range(world.size)][world.rank]  # all processes make all groups
            notice(
                "sync_batchnorm: in a window in which some processes have fewer micro-batches than others, such as the last of "
                "an epoch, BatchNorm uses the statistics of each process."
            )

    def follow(self, uneven: bool) -> None:
        """Before the first forward of a window."""
        if uneven is not self._local:
            self._local = uneven
            for layer in self._layers:
                layer.process_group = self._own if uneven else None

    def take_out(self) -> None:
        """Put the user's layers back, with what the others have learnt."""
        self.follow(False)
        for owner, name, layer in self._replaced:
            synced = getattr(owner, name)
            layer._parameters.update(synced._parameters)
            layer._buffers.update(synced._buffers)
            layer.train(synced.training)
            setattr(owner, name, layer)
        self._replaced.clear()
        self._layers.clear()
