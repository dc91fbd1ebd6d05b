"""``trainkit checkpoint export``: the weights of a checkpoint in the forms that other programs open."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from trainkit._version import __version__
from trainkit.checkpoint.manifest import DIGEST, MANIFEST
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.weights import shard_size, write_weights
from trainkit.cli.checkpoint.formats import Folder, lay_out
from trainkit.cli.checkpoint.pieces import take
from trainkit.cli.checkpoint.text import bytes_text, count_text, say
from trainkit.errors import CheckpointWriteError, ConfigurationError

__all__ = ["export", "run"]

_MARK = "trainkit_export.json"
# What an export may have written: files that are left over from one would be read with the new ones.
_OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|config\.json|generation_config\.json|adapter_config\.json|trainkit_export\.json"
)


def run(args: argparse.Namespace) -> int:
    """Export what the arguments name; prints what was written."""
    kind, folders = export(
        args.path,
        args.out,
        attribute=args.attribute,
        kind=args.format,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        overwrite=args.overwrite,
    )
    for where, folder in folders.items():
        size = sum(tensor.nbytes for tensor in folder.tensors.values())
        say(f"Wrote {Path(args.out) / where}: {kind}, {count_text(len(folder.tensors), 'tensor')}, {bytes_text(size)}")
        say(*(f"  {note}" for note in folder.notes))
    return 0


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    attribute: str | None = None,
    kind: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> tuple[str, dict[str, Folder]]:
    """Write a module of a checkpoint to a folder. The checkpoint is verified before; after an error nothing is written.

    Args:
        path: the checkpoint.
        out: the folder to write to; it is made. An earlier export in it is replaced.
        attribute: only the module of this path, whose name its tensors then lack; ``None``: the whole model.
        kind: "safetensors", "transformers" or "peft"; ``None``: what the module is.
        dtype: "bf16", "fp16", "fp32" or "fp64", for floating-point tensors; ``None``: as they are.
        max_shard_size: larger models are written to several files, with an index.
        overwrite: write to ``out`` even if other things are in it. A checkpoint is never written to.

    Returns:
        The format, and the folders that were written by their path within ``out``.

    Raises:
        ConfigurationError: an unknown attribute, a format that the module has not, an ``out`` that holds something else.
        CheckpointError: the checkpoint is damaged or lacks what is needed, or ``out`` cannot be written.
    """
    size = shard_size(max_shard_size)
    target = Path(os.path.abspath(out))
    _check_target(target, overwrite)
    checkpoint = open_checkpoint(path)
    piece = take(checkpoint, attribute)
    chosen = kind or piece.kind
    folders = lay_out(piece, chosen, dtype)
    if not any(folder.tensors for folder in folders.values()):
        raise ConfigurationError(f"{path}: there is no tensor to export. Fix: name another checkpoint or attribute")
    about = {
        "checkpoint": checkpoint.path.name,  # not where it lies: an export is what people publish
        "run_id": checkpoint.manifest.run_id,
        "step": checkpoint.manifest.step,
        "attribute": attribute,
        "format": chosen,
        "dtype": dtype,
        "trainkit_version": __version__,
    }
    _write(target, folders, (json.dumps(about, indent=2) + "\n").encode(), size)
    return chosen, folders


def _check_target(target: Path, overwrite: bool) -> None:
    if any(os.path.lexists(target / name) for name in (MANIFEST, DIGEST, "state.json")):
        raise ConfigurationError(f"{target} is a checkpoint, and an export would damage it. Fix: choose another folder")
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigurationError(f"Expected a folder to write to, got {target}, which is a file. Fix: choose another name")
    try:
        there = sorted(os.listdir(target)) if target.exists() else []
    except OSError as error:
        raise CheckpointWriteError(f"{target} cannot be read: {error}. Fix: choose another folder") from error
    if there and _MARK not in there and not overwrite:
        raise ConfigurationError(
            f"{target} is not empty and no earlier export; it holds {', '.join(there[:5])}"
            f"{', …' if len(there) > 5 else ''}. Fix: choose another folder, or --overwrite"
        )


def _write(target: Path, folders: Mapping[str, Folder], mark: bytes, max_shard_size: int) -> None:
    """Write everything beside ``target`` first, so that what fails on the way changes nothing there."""
    made = [parent for parent in target.parents if not parent.exists()]
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        for where, folder in folders.items():
            attachments = folder.attachments if where else {**folder.attachments, _MARK: mark}
            write_weights(temporary / where, folder.tensors, attachments, max_shard_size=max_shard_size, stem=folder.stem)
        if "" not in folders:  # adapters in folders of their own only
            (temporary / _MARK).write_bytes(mark)
        if not target.exists():
            os.replace(temporary, target)
            return
        for where in folders:
            _move_into(temporary / where, target / where)
        if "" not in folders:
            os.replace(temporary / _MARK, target / _MARK)
    except OSError as error:
        raise CheckpointWriteError(f"{target} could not be written: {error}. Fix: choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():
            for parent in made:
                _remove_if_empty(parent)


def _move_into(source: Path, target: Path) -> None:
    """Put the files of a folder into another, and remove those of an earlier export that are not among them."""
    target.mkdir(exist_ok=True)
    names = [path.name for path in source.iterdir() if path.is_file()]
    for old in target.iterdir():
        if _OURS.fullmatch(old.name) and old.name not in names and not old.is_dir():
            old.unlink()
    for name in names:
        os.replace(source / name, target / name)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # there was more to it than what this export had made
        folder.rmdir()
