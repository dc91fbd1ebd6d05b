"""What callbacks that freeze and unfreeze layers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.trainer.trainer import Trainer

__all__ = ["BATCH_NORMS", "refuse_sharded_optimizer"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_sharded_optimizer(trainer: Trainer, callback: Callback) -> None:
    """Refuse a strategy that shards the optimizer state, before training.

    Raises:
        ConfigurationError: It does: what it has sharded cannot change during a run.
    """
    if trainer.strategy.shards_optimizer_state:
        name = type(trainer.strategy).__name__
        raise ConfigurationError(
            f"{type(callback).__name__} changes which parameters are trained during the run, but {name} shards the optimizer "
            "over the processes before training starts, so the trained parameters must stay the same. Use strategy='ddp'; or "
            "make two runs, the second with other frozen layers: fit(module, loader, ckpt_path='last', restore={'model'})"
        )
