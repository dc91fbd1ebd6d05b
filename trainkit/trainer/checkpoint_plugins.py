"""`TorchCheckpointIO`: Lightning's plugin for the file of a checkpoint, which other packages subclass when they are imported.

A file of its own because `trainkit.plugins` has the class too, and does not need the arguments of the Trainer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from trainkit.console import notice
from trainkit.errors import NotAvailableError, UnsupportedArgumentError

__all__ = ["TorchCheckpointIO", "without_checkpoint_io"]

_Path = str | os.PathLike[str]


class TorchCheckpointIO:
    """Stands for Lightning's class in code that subclasses it or passes it to `Trainer(plugins=)`.

    trainkit writes its checkpoints itself, and runs no code that is in one. A Trainer accepts an object whose class defines at
    most `load_checkpoint`, and does not call it; one that also writes or removes files is refused.
    """

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> NoReturn:
        """Raise an error that says how to save.

        Raises:
            NotAvailableError: Always.
        """
        raise NotAvailableError("TorchCheckpointIO writes no files here. Use trainer.save_checkpoint(path)")

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> NoReturn:
        """Raise an error that says how to read a checkpoint.

        Raises:
            NotAvailableError: Always.
        """
        raise NotAvailableError(
            "TorchCheckpointIO reads no files here. Use trainkit.checkpoint.open_checkpoint(path), or for a file of torch.save "
            "torch.load(path, weights_only=True)"
        )

    def remove_checkpoint(self, path: _Path) -> NoReturn:
        """Raise an error that says how checkpoints are removed.

        Raises:
            NotAvailableError: Always.
        """
        raise NotAvailableError("TorchCheckpointIO removes no files here. Use ModelCheckpoint(save_top_k=..., keep_last=...)")

    def teardown(self) -> None:
        """Do nothing."""


def without_checkpoint_io(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer without `plugins`, if these are objects of `TorchCheckpointIO` that change no file.

    Raises:
        UnsupportedArgumentError: One of them would write or remove checkpoints.
    """
    plugins = arguments.get("plugins")
    listed = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
    if not listed or not all(isinstance(plugin, TorchCheckpointIO) for plugin in listed):
        return dict(arguments)
    for plugin in listed:
        kind: type[Any] = type(plugin)
        for name in ("save_checkpoint", "remove_checkpoint"):
            if getattr(kind, name) is not getattr(TorchCheckpointIO, name):
                raise UnsupportedArgumentError(
                    f"plugins: {kind.__name__}.{name} would never be called, because trainkit writes checkpoints "
                    "itself. Change what is saved in on_save_checkpoint; or copy a checkpoint when it is complete, in "
                    "Logger.after_save_checkpoint."
                )
        if kind.load_checkpoint is not TorchCheckpointIO.load_checkpoint:
            notice(
                f"{kind.__name__}.load_checkpoint is not called: trainkit reads checkpoints itself and runs no code that is in "
                "them. To change what is loaded, define on_load_checkpoint."
            )
    return {name: value for name, value in arguments.items() if name != "plugins"}
