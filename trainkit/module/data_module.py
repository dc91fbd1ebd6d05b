"""``DataModule``: loaders and their preparation in a class of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.module.hparams import HyperParametersMixin
from trainkit.module.overridable_hooks import DataHooks

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["DataModule"]


class DataModule(HyperParametersMixin, DataHooks):
    """Where the data of a run comes from: ``trainer.fit(module, datamodule=MyData())``.

    Define the loaders that you need; ``prepare_data`` (one process: download, tokenise), ``setup(stage)`` (every process:
    open, split) and ``teardown(stage)`` where that helps. The transfer hooks defined here go before the module's.

    Example::

        class Digits(DataModule):
            def setup(self, stage):
                self.train, self.val = random_split(load(), [0.8, 0.2])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=32)
    """

    trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; called after ``setup``."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}
