"""BatchNorm with statistics over all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.console import notice
from trainkit.distributed.world import World

__all__ = ["SyncedBatchNorms"]


class SyncedBatchNorms:
    """Replaces BatchNorm layers by `nn.SyncBatchNorm`, which communicates in every forward.

    In an accumulation window in which ranks have different numbers of micro-batches, each rank uses its own statistics, because
    ranks without a micro-batch run no forward.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []  # parent module, name, the user's layer
        self._layers: list[nn.SyncBatchNorm] = []
        self._local_group: Any = None  # a process group that contains only this rank
        self._local = False

    def __bool__(self) -> bool:
        return bool(self._layers)

    def convert(self, module: nn.Module, world: World) -> None:
        """Replace all BatchNorm layers by synchronized ones with the same parameters and buffers."""
        synced: dict[nn.Module, nn.SyncBatchNorm] = {}
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                    if layer not in synced:
                        synced[layer] = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
                    setattr(owner, name, synced[layer])
                    self._replaced.append((owner, name, layer))
        self._layers += [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
        if self._layers and self._local_group is None:
            self._local_group = [dist.new_group([rank]) for rank in range(world.size)][
                world.rank
            ]  # every rank must create every group
            notice(
                "sync_batchnorm: in an accumulation window in which some ranks have fewer micro-batches than others, such as "
                "the last one of an epoch, each rank uses its own BatchNorm statistics."
            )

    def select_statistics(self, uneven: bool) -> None:
        """Select synchronized or local statistics, before the first forward of an accumulation window."""
        if uneven is not self._local:
            self._local = uneven
            for layer in self._layers:
                layer.process_group = self._local_group if uneven else None

    def restore(self) -> None:
        """Restore the user's layers, with the parameters and buffers of the synchronized ones."""
        self.select_statistics(False)
        for owner, name, layer in self._replaced:
            synced = getattr(owner, name)
            layer._parameters.update(synced._parameters)
            layer._buffers.update(synced._buffers)
            layer.train(synced.training)
            setattr(owner, name, layer)
        self._replaced.clear()
        self._layers.clear()
