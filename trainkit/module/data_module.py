"""`DataModule`: a class for loaders and their preparation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.module.hparams import HyperParametersMixin
from trainkit.module.overridable_hooks import DataHooks

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["DataModule"]


class DataModule(HyperParametersMixin, DataHooks):
    """The loaders of a run and their preparation, in one class.

    Define the loaders that you need, and optionally `prepare_data` (one process: download, tokenize), `setup(stage)` (every
    process: open, split) and `teardown(stage)`. A transfer hook that it defines replaces that of the module.

    Attributes:
        trainer: The trainer of the run; `None` before.
        prepare_data_per_node: Call `prepare_data` in one process of each node; `False`: in one process of the run.

    Example:
        ```python
        class Digits(DataModule):
            def setup(self, stage):
                self.train, self.val = random_split(load(), [0.8, 0.2])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=32)

        trainer.fit(module, datamodule=Digits())
        ```
    """

    trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `setup`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}
