"""What callbacks have in common that change which parameters are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Freezing", "parameters_of"]


class Freezing(Callback):
    """Changes which parameters are trained, at the start of an epoch or of an optimizer step.

    `requires_grad` and the groups of the optimizers are in every checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self._applied = -1  # the epoch or the key of a schedule that the last change was made for

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.strategy.shards_optimizer_state:  # A strategy cannot change its shards during a run.
            name = type(trainer.strategy).__name__
            raise ConfigurationError(
                f"{type(self).__name__} changes which parameters are trained during the run, but {name} shards the optimizer "
                "over the processes before training starts, so the trained parameters must stay the same. Use strategy='ddp'; "
                "or make two runs, the second with other frozen layers: fit(module, loader, ckpt_path='last', "
                "restore={'model'})"
            )
        self._applied = -1


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the parameters that optimizers have."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
