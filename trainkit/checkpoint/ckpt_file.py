"""A `.ckpt` file next to a checkpoint: its weights in the form of Lightning, for programs that open it with `torch.load`.

The file `x.ckpt` names the checkpoint `x` that it was made of, so that trainkit uses the folder where it is given the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.checkpoint.manifest import checkpoint_identity
from trainkit.checkpoint.reader import Checkpoint
from trainkit.checkpoint.torch_file import note_in, plain, write_torch_file
from trainkit.checkpoint.urls import remote_sync
from trainkit.errors import CheckpointWriteError, UnsavableError
from trainkit.names import table

__all__ = [
    "SUFFIX",
    "checkpoint_of",
    "file_of",
    "folder_for",
    "is_of_others",
    "lightning_form",
    "link_last",
    "remove_file_of",
    "write_ckpt",
]

SUFFIX = ".ckpt"

_NOTE = "trainkit checkpoint "
# What hooks see of a checkpoint, and what a callback keeps there for a resume.
_NOT_OF_HOOKS = ("state_dict", "hyper_parameters", "epoch", "global_step", "current_model_state")


def file_of(checkpoint: Path) -> Path:
    """The file next to a checkpoint."""
    return checkpoint.with_name(checkpoint.name + SUFFIX)


def checkpoint_of(file: Path) -> Path | None:
    """The checkpoint that a file was made of, if it is still next to it and the same."""
    if not file.name.endswith(SUFFIX) or not file.is_file():
        return None
    if file.is_symlink():
        file = file.parent / os.readlink(file)
    note = note_in(file)
    for folder in (file.with_name(file.name.removesuffix(SUFFIX)), folder_for(file)):
        identity = checkpoint_identity(folder)
        if identity and note == _note(identity):
            return folder
    return None


def folder_for(file: Path) -> Path:
    """The checkpoint of a file whose own name without `.ckpt` is that of something else."""
    return file.with_name(f"{file.name}.folder")


def write_ckpt(checkpoint: Checkpoint, file: Path, changed: Mapping[str, Any] | None = None) -> list[str]:
    """Write the file of a checkpoint, atomically. An empty file, or one that was made of a checkpoint, is replaced.

    Args:
        checkpoint: The checkpoint.
        file: The file.
        changed: Other content than `lightning_form`. The file does not stand for the checkpoint then.

    Returns:
        What was omitted, with the reason.

    Raises:
        CheckpointWriteError: It cannot be written, or another file has its name.
        CheckpointError: The checkpoint is damaged.
    """
    if is_of_others(file):
        raise CheckpointWriteError(f"{file} exists, and was not made of a checkpoint. Fix: move it, or choose another name.")
    content, omitted = lightning_form(checkpoint) if changed is None else (changed, [])
    write_torch_file(file, content, note=_note(checkpoint.identity if changed is None else b""))
    remote_sync.note_change(file)
    return omitted


def link_last(file: Path) -> None:
    """Make `last.ckpt` a link to the file of a checkpoint, atomically; a copy where links cannot be created.

    Raises:
        OSError: It cannot be written.
        CheckpointWriteError: Another file has this name.
    """
    last = file.with_name(f"last{SUFFIX}")
    if os.path.lexists(last) and not last.is_symlink() and not is_ours(last):
        raise CheckpointWriteError(f"{last} exists, and was not made of a checkpoint. Fix: move it, or set save_last=False.")
    temporary = file.with_name(f".{last.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.symlink(file.name, temporary)
    except (NotImplementedError, OSError):
        shutil.copyfile(file, temporary)
    os.replace(temporary, last)


def remove_file_of(checkpoint: Path) -> None:
    """Remove the file that was made of a checkpoint; nothing else is removed."""
    file = file_of(checkpoint)
    if is_ours(file):
        with suppress(FileNotFoundError):
            file.unlink()
        remote_sync.note_change(file)


def is_ours(file: Path) -> bool:
    """Whether a file was made of a checkpoint, or is a link to such a file."""
    return note_in(file).startswith(_NOTE)


def is_of_others(file: Path) -> bool:
    """Whether there is something that is not to be replaced: not empty, and not made of a checkpoint."""
    return os.path.lexists(file) and not is_ours(file) and (not file.is_file() or file.stat().st_size > 0)


def lightning_form(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """The weights and hyper-parameters of a checkpoint as Lightning names them, and what is omitted, with the reason.

    What `on_save_checkpoint` of a module or callback added is there, too, under its own key.
    """
    loaded = checkpoint.read({"model", "state"}, mapped=True, unregistered=True)
    state, manifest, omitted = loaded.state, loaded.manifest, []

    def kept(values: Mapping[str, Any], where: str) -> dict[str, Any]:
        known = {}
        for name, value in values.items():
            try:
                known[name] = plain(value, f"{where}[{name!r}]")
            except UnsavableError as error:
                omitted.append(str(error).partition(". ")[0])
        return known

    content = {
        "state_dict": kept(loaded.state_dict(), "state_dict"),
        "hyper_parameters": kept(state.get("hyper_parameters") or {}, "hyper_parameters"),
        "epoch": manifest.epoch,
        "global_step": manifest.step,
        "pytorch-lightning_version": table("lightning")["version"],
    }
    if name := state.get("hyper_parameters_name"):
        content["hparams_name"] = name
    added = {name: value for name, value in (state.get("user") or {}).items() if name not in {*_NOT_OF_HOOKS, *content}}
    return {**kept(added, "checkpoint"), **content}, omitted


def _note(identity: bytes) -> str:
    return _NOTE + identity.partition(b" ")[0].decode("ascii", "replace")
