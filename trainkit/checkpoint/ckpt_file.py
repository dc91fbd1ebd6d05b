"""A `.ckpt` file next to a checkpoint: its weights in the form of Lightning, for programs that open it with `torch.load`.

The file contains the digest of the checkpoint that it was made of, so that trainkit uses the folder where it is given the file.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.checkpoint.commit import replacing
from trainkit.checkpoint.manifest import TORCH_SUFFIXES, Manifest, is_checkpoint
from trainkit.checkpoint.pointers import checkpoint_of, is_ours, note_of, own_folder
from trainkit.checkpoint.reader import Checkpoint, LoadedCheckpoint
from trainkit.checkpoint.torch_file import plain, write_torch_file
from trainkit.checkpoint.urls import remote_sync
from trainkit.errors import CheckpointWriteError, UnsavableError
from trainkit.names import table

__all__ = [
    "SUFFIX",
    "check_replaceable",
    "file_of",
    "folder_for",
    "is_named_so",
    "is_of_others",
    "lightning_form",
    "link_last",
    "remove_file_of",
    "write_ckpt",
]

SUFFIX = ".ckpt"

# What hooks see of a checkpoint, and what a callback keeps there for a resume.
_NOT_OF_HOOKS = ("state_dict", "hyper_parameters", "epoch", "global_step", "current_model_state")


def file_of(checkpoint: Path) -> Path:
    """The file next to a checkpoint."""
    return checkpoint.with_name(checkpoint.name + SUFFIX)


def is_named_so(file: Path) -> bool:
    """Whether a path ends like the name of a file that `torch.load` opens."""
    return file.suffix.lower() in TORCH_SUFFIXES


def folder_for(file: Path) -> Path:
    """The folder of the checkpoint that a file is to be made of: `x` for `x.ckpt`, or else `own_folder`.

    The latter if `x` is something else or the checkpoint of another file, such as `x.pt`, or if it is the name of such a file.
    """
    folder = file.with_suffix("")
    others = [folder.with_name(folder.name + suffix) for suffix in TORCH_SUFFIXES if suffix != file.suffix]
    free = not os.path.lexists(folder) or (is_checkpoint(folder) and all(checkpoint_of(one) != folder for one in others))
    return folder if free and not is_named_so(folder) else own_folder(file)


def write_ckpt(
    checkpoint: Checkpoint, file: Path, changed: Mapping[str, Any] | None = None, *, resumable: bool = False
) -> list[str]:
    """Write the file of a checkpoint, atomically. An empty file, or one that was made of a checkpoint, is replaced.

    Args:
        checkpoint: The checkpoint.
        file: The file.
        changed: Other content than `lightning_form`. The file does not stand for the checkpoint then.
        resumable: The checkpoint will not be kept: the file also has the state of optimizers and schedules.

    Returns:
        What is not in it, or has another type there, with the reason.

    Raises:
        CheckpointWriteError: It cannot be written, or another file has its name.
        CheckpointError: The checkpoint is damaged.
    """
    check_replaceable(file)
    content, notes = lightning_form(checkpoint, resumable) if changed is None else (changed, [])
    write_torch_file(file, content, note=note_of(checkpoint.identity if changed is None else b""))
    remote_sync.note_change(file)
    return notes


def link_last(file: Path) -> None:
    """Make `last.ckpt` a link to the file of a checkpoint, atomically; a copy where links cannot be created, and at a URL.

    Raises:
        OSError: It cannot be written.
        CheckpointWriteError: Another file has this name.
    """
    last = file.with_name(f"last{SUFFIX}")
    if _is_taken(last) and not last.is_symlink() and not is_ours(last):
        raise CheckpointWriteError(
            f"{last} exists and is not replaced, because trainkit did not write it: ckpt_path='{last}' would resume from "
            "that file. Fix: move it, save to another folder, or set save_last=False."
        )
    with replacing(last) as temporary:
        try:
            os.symlink(file.name, temporary)
        except (NotImplementedError, OSError):
            shutil.copyfile(file, temporary)
    remote_sync.note_change(last)


def remove_file_of(checkpoint: Path) -> None:
    """Remove the file that was made of a checkpoint, and `last.ckpt` if it is a link to it; nothing else is removed."""
    file = file_of(checkpoint)
    last = file.with_name(f"last{SUFFIX}")
    of_last = [last] if last.is_symlink() and os.readlink(last) == file.name else []
    for path in [*of_last, file] if is_ours(file) else []:
        path.unlink(missing_ok=True)
        remote_sync.note_change(path)


def check_replaceable(file: Path) -> None:
    """Check that nothing is lost if a file is written.

    Raises:
        CheckpointWriteError: There is something that was not made of a checkpoint.
    """
    if is_of_others(file):
        raise CheckpointWriteError(f"{file} exists, and was not made of a checkpoint. Fix: move it, or choose another name.")


def is_of_others(file: Path) -> bool:
    """Whether there is something, here or at the URL, that is not to be replaced: not empty, and not made of a checkpoint."""
    return _is_taken(file) and not is_ours(file) and (not file.is_file() or file.stat().st_size > 0)


def _is_taken(file: Path) -> bool:
    return os.path.lexists(file) or file.name in remote_sync.names(file.parent)


def lightning_form(checkpoint: Checkpoint, resumable: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The weights and hyper-parameters of a checkpoint as Lightning names them, and notes on what is omitted or changed.

    What `on_save_checkpoint` of a module or callback added is there, too, under its own key; with `resumable` also the state of
    optimizers and schedules, if the checkpoint has it.
    """
    stems = {"model", "state", "optimizer"} if resumable else {"model", "state"}
    loaded = checkpoint.read(stems, mapped=True, unregistered=True)
    state, manifest = loaded.state, loaded.manifest
    notes: list[str] = []

    def kept(values: Mapping[str, Any], where: str) -> dict[str, Any]:
        known = {}
        for name, value in values.items():
            try:
                known[name] = plain(value, f"{where}[{name!r}]", notes)
            except UnsavableError as error:
                notes.append(f"omitted: {str(error).partition('. ')[0]}")
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
    if resumable and "optimizers" in state:
        content["loops"] = {"fit_loop": _epoch_progress(manifest)}
        if all(map(_has_plain_slots, state["optimizers"])):
            content |= kept({"optimizer_states": _optimizer_states(loaded), "lr_schedulers": _schedules(state)}, "checkpoint")
        else:
            notes.append("omitted: the state of the optimizer, which has lists, quantized tensors or a form of its own")
    added = {name: value for name, value in (state.get("user") or {}).items() if name not in {*_NOT_OF_HOOKS, *content}}
    return {**kept(added, "checkpoint"), **content}, notes


def _epoch_progress(manifest: Manifest) -> dict[str, Any]:
    """How many epochs have begun and ended, as Lightning counts them."""
    begun = manifest.epoch + bool(manifest.position.get("batches"))
    return {
        "epoch_progress": {"current": {"ready": begun, "completed": manifest.epoch}},
        "epoch_loop.batch_progress": {"is_last_batch": bool(manifest.position.get("complete"))},
    }


def _has_plain_slots(saved: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer consists of numbers and tensors for each parameter."""
    if "opaque" in saved or saved["entries"]:
        return False
    return all(slots.keys() <= {"values", "irregular"} for slots in saved["state"].values())


def _optimizer_states(loaded: LoadedCheckpoint) -> list[Any]:
    """The state of each optimizer in the form of torch's `state_dict()`."""
    tensors: dict[str, dict[str, Any]] = {}
    for key, tensor in loaded.tensors.get("optimizer", {}).items():
        owner, _, slot = key.rpartition("/")
        tensors.setdefault(owner, {})[slot] = tensor
    states = []
    for index, saved in enumerate(loaded.state["optimizers"]):
        groups: list[Any] = []
        state: dict[int, Any] = {}
        numbers = itertools.count()
        for group in saved["groups"]:
            numbered = {name: next(numbers) for name in group["parameters"]}
            groups.append({**group["options"], "params": [*numbered.values()], "param_names": [*numbered]})
            for name, slots in saved["state"].items():
                if name in numbered:
                    state[numbered[name]] = {**slots.get("values", {}), **tensors.get(f"{index}/{name}", {})}
        states.append({"state": state, "param_groups": groups, **saved["more"]})
    return states


def _schedules(state: Mapping[str, Any]) -> list[Any]:
    return [saved["state"] for saved in state["schedulers"]]
