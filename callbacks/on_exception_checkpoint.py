"""`OnExceptionCheckpoint`: saves the last complete step when a fit fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.checkpoint.commit import CommitResult
from trainkit.console import notice
from trainkit.errors import ConfigurationError
from trainkit.paths import local_path
from trainkit.state.pretrained import has_adapters

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["OnExceptionCheckpoint"]


class OnExceptionCheckpoint(Checkpoint):
    """Saves a checkpoint to a path of your choice when a fit ends with an exception, SIGTERM or Ctrl-C.

    `ModelCheckpoint`, which the `Trainer` adds by default, saves at such an end too, next to its other checkpoints. Use this
    callback if the checkpoint must be at a known path, or without a `ModelCheckpoint`.

    The checkpoint is that of the last complete optimizer step, so a run that resumes from it continues exactly. A checkpoint
    that exists at the path is replaced when the new one is complete. It is never removed; Lightning removes it when a later
    run ends without an exception. If its parameters are not finite and those of the existing one are, that one stays, and the
    new one is saved as `<filename>-nonfinite`.

    Nothing is saved, and a notice says why, before the first optimizer step, if the optimizer step itself failed and has
    changed some parameters, and with several processes if one of them failed: the others are in the middle of a step. After
    SIGTERM or Ctrl-C all processes finish the same step, so it is saved.

    Args:
        dirpath: The folder to save to. No other live run may save there.
        filename: Name of the checkpoint, a folder in `dirpath`.

    Raises:
        ConfigurationError: `filename` is empty, a path, or starts with `.`; or `dirpath` is a URL.
        CheckpointWriteError: `dirpath` cannot be written; when the fit starts.

    Example:
        ```python
        rescue = OnExceptionCheckpoint("rescue")
        Trainer(callbacks=[rescue]).fit(module)  # raises an exception
        Trainer(callbacks=[rescue]).fit(module, ckpt_path=rescue.ckpt_path)
        ```
    """

    FILE_EXTENSION: str = ""
    """Appended to `filename`. A checkpoint is a folder, so it needs none."""

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        plain = isinstance(filename, str) and filename != "" and not filename.startswith(".")
        if not plain or any(character in "/\\" or ord(character) < 32 for character in filename):
            raise ConfigurationError(
                f"OnExceptionCheckpoint(filename=...) expected a plain name that does not start with '.', got {filename!r}. "
                "Fix: OnExceptionCheckpoint('rescue', filename='on_exception')"
            )
        self.dirpath = str(local_path(dirpath, "dirpath").absolute())
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint, whether it exists or not; pass it to `fit(ckpt_path=...)`."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and not trainer.fast_dev_run:
            trainer._save_policy.use_folder(Path(self.dirpath))  # a folder that cannot be written is an error now

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if trainer.stage != "fit" or trainer.fast_dev_run:
            return
        reason = trainer._save_policy.why_not_savable(exception)
        outcome = f"nothing was saved, because {reason}" if reason is not None else self._save(trainer, module)
        notice(f"OnExceptionCheckpoint, after {type(exception).__name__}: {outcome}")

    def _save(self, trainer: Trainer, module: TrainModule) -> str:
        """Save; returns whether that worked, as text. A failure is a warning, because the exception must not be hidden."""
        saved: list[CommitResult] = []
        trainer._save_policy.save(
            Path(self.dirpath),
            os.path.basename(self.ckpt_path),
            save="trainable" if has_adapters(module) else "all",
            blocking=True,
            replace=True,
            committed=saved.append,
        )
        return f"saved {saved[0].path}" if saved else f"{self.ckpt_path} could not be saved"
