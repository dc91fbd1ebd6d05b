"""`Checkpoint`: the base class of callbacks that save checkpoints."""

from __future__ import annotations

from trainkit.callback import Callback

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints: `ModelCheckpoint`, `OnExceptionCheckpoint` and your own.

    It has no behavior. It lets code find such callbacks: `isinstance(callback, Checkpoint)`. The `Trainer` calls them after the
    others, whatever their place in `callbacks`, so that they save what the others have done. It adds its default
    `ModelCheckpoint` unless `callbacks` contains a `ModelCheckpoint`; a callback of another class does not replace it.

    To read a checkpoint use `trainkit.checkpoint.Checkpoint`, which is another class.

    Example:
        ```python
        class SaveAtStep(Checkpoint):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if trainer.global_step == 1000:
                    trainer.save_checkpoint("step-1000")

        Trainer(callbacks=[SaveAtStep()]).fit(module)
        ```
    """
