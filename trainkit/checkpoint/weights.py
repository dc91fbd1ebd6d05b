"""`load_state_dict`: the weights of a checkpoint, or of a file of another program, by the user's names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint.pointers import resolve_pointer
from trainkit.checkpoint.read_foreign import read_foreign
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.urls import remote_sync
from trainkit.distributed.requested_devices import find_device
from trainkit.errors import StateMismatchError
from trainkit.nested import map_tensors
from trainkit.paths import local_path

__all__ = ["load_state_dict"]


def load_state_dict(
    path: str | os.PathLike[str], *, model: int = 0, map_location: str | torch.device | None = None
) -> dict[str, Any]:
    """The weights of a checkpoint, by the names of the module's `state_dict()`: for `module.load_state_dict`.

    The file or folder is verified, and no content is ever code.

    Args:
        path: A checkpoint, its `last` or its URL; a `.safetensors` file; or a `.ckpt`, `.pt`, `.pth` or `.bin` file of torch,
            which is read in a process of its own.
        model: Which one, if your own training loop saved several: 0, 1, …
        map_location: The device of the tensors; default: the CPU.

    Returns:
        The state dict. Tied names have the same tensor. A checkpoint of `save="trainable"` has no frozen parameters: load it
        with `strict=False`.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        CorruptCheckpointError: It is damaged; the message names the file.
        StateMismatchError: It has no such model.
        ConfigurationError: The format is not known, or the device is not available.

    Example:
        ```python
        module.load_state_dict(trainkit.load_state_dict(trainer.checkpoint_callback.best_model_path))
        ```
    """
    device = None if map_location is None else find_device(map_location)
    local = local_path(path, "path")
    remote_sync.fetch(local)
    local = resolve_pointer(Path(os.path.abspath(local)))
    if local.is_file():
        with tempfile.TemporaryDirectory(prefix="trainkit-load-") as scratch:
            foreign = read_foreign(local, Path(scratch))
            if not 0 <= model < len(foreign.models):
                raise StateMismatchError(f"{path}: expected a file with a model {model}, but it has {len(foreign.models)}.")
            # a copy: a safetensors file is read where it lies
            weights: dict[str, Any] = map_tensors(dict(foreign.models[model]), torch.Tensor.clone)
    else:
        weights = open_checkpoint(local).state_dict(model)
    return weights if device is None else map_tensors(weights, lambda tensor: tensor.to(device))
