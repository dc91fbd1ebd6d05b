"""`DataModule`: a class for loaders and their preparation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.module.hparams import HyperParametersMixin
from trainkit.module.overridable_hooks import DataHooks

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["DataModule"]


class DataModule(HyperParametersMixin, DataHooks):
    """The data of a run: `trainer.fit(module, datamodule=MyData())`.

    Define the loaders that you need, and optionally `prepare_data` (one process: download, tokenize), `setup(stage)` (every
    process: open, split) and `teardown(stage)`. Its transfer hooks replace those of the module.

    Example:
        ```python
        class Digits(DataModule):
            def setup(self, stage):
                self.train, self.val = random_split(load(), [0.8, 0.2])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=32)
        ```
    """

    trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called after `setup`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}
