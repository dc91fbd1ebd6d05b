"""`trainkit checkpoint export`: write the weights of a checkpoint in the formats of other programs."""

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
from trainkit.checkpoint.staging import staging
from trainkit.checkpoint.weights import shard_size, write_weights
from trainkit.cli.checkpoint.exported_module import read_module
from trainkit.cli.checkpoint.formats import ExportFolder, export_folders
from trainkit.cli.checkpoint.text import bytes_text, print_lines
from trainkit.console import counted
from trainkit.errors import CheckpointWriteError, ConfigurationError
from trainkit.paths import local_path

__all__ = ["export", "run"]

_MARK = "trainkit_export.json"
# The files of an export. Those of an earlier export must not remain next to the new ones.
_OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|config\.json|generation_config\.json|adapter_config\.json|trainkit_export\.json"
)


def run(args: argparse.Namespace) -> int:
    """Export the weights; print what was written."""
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
        about = f"{kind}, {counted(len(folder.tensors), 'tensor')}, {bytes_text(size)}"
        print_lines(f"Wrote {os.path.join(args.out, where) if where else args.out}: {about}")
        print_lines(*(f"  {note}" for note in folder.notes))
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
) -> tuple[str, dict[str, ExportFolder]]:
    """Verify a checkpoint, then write one of its modules to a folder. Writes nothing if there is an error.

    Args:
        path: The checkpoint.
        out: The folder to write to, created if needed. An earlier export in it is replaced.
        attribute: Export only the module with this path, with names relative to it. `None`: the whole model.
        kind: "safetensors", "transformers" or "peft"; `None`: the module's own.
        dtype: "bf16", "fp16", "fp32" or "fp64", for floating-point tensors; `None`: unchanged.
        max_shard_size: Larger models are written to several files with an index.
        overwrite: Write to `out` even if it contains other files. A checkpoint is never overwritten.

    Returns:
        The format, and the written folders by their path in `out`.

    Raises:
        ConfigurationError: The attribute is unknown, the module does not support the format, or `out` contains other files.
        CheckpointError: The checkpoint is damaged or incomplete, or `out` cannot be written.
    """
    size = shard_size(max_shard_size)
    target = Path(os.path.abspath(local_path(out, "OUT")))
    _check_target(target, overwrite)
    checkpoint = open_checkpoint(path)
    module = read_module(checkpoint, attribute)
    chosen = kind or module.kind
    folders = export_folders(module, chosen, dtype)
    if not any(folder.tensors for folder in folders.values()):
        raise ConfigurationError(f"{path}: there is no tensor to export. Fix: choose another checkpoint or attribute")
    about = {
        "checkpoint": checkpoint.path.name,  # not its whole path: an export may be published
        "run_id": checkpoint.manifest.run_id,
        "step": checkpoint.manifest.step,
        "attribute": attribute,
        "format": chosen,
        "dtype": dtype,
        "trainkit_version": __version__,
    }
    _write(target, folders, (json.dumps(about, indent=2) + "\n").encode(), size)
    staging.add_log_folder(target)
    staging.finish()
    return chosen, folders


def _check_target(target: Path, overwrite: bool) -> None:
    if any(os.path.lexists(target / name) for name in (MANIFEST, DIGEST, "state.json")):
        raise ConfigurationError(f"{target} is a checkpoint, which an export would damage. Fix: choose another folder")
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigurationError(f"Expected a folder to write to, got {target}, which is a file. Fix: choose another name")
    try:
        there = sorted(os.listdir(target)) if target.exists() else []
    except OSError as error:
        raise CheckpointWriteError(f"{target} cannot be read: {error}. Fix: choose another folder") from error
    if there and _MARK not in there and not overwrite:
        raise ConfigurationError(
            f"{target} is neither empty nor an earlier export; it contains {', '.join(there[:5])}"
            f"{', …' if len(there) > 5 else ''}. Fix: choose another folder, or pass --overwrite"
        )


def _write(target: Path, folders: Mapping[str, ExportFolder], mark: bytes, max_shard_size: int) -> None:
    """Write everything next to `target` first, so that an error changes nothing there."""
    made = [parent for parent in target.parents if not parent.exists()]
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        for where, folder in folders.items():
            attachments = folder.attachments if where else {**folder.attachments, _MARK: mark}
            write_weights(temporary / where, folder.tensors, attachments, max_shard_size=max_shard_size, stem=folder.stem)
        if "" not in folders:  # only named adapters, each in a folder
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
                with contextlib.suppress(OSError):  # not empty
                    parent.rmdir()


def _move_into(source: Path, target: Path) -> None:
    """Move the files of a folder into another, and remove the other files of an earlier export."""
    target.mkdir(exist_ok=True)
    names = [path.name for path in source.iterdir() if path.is_file()]
    for old in target.iterdir():
        if _OURS.fullmatch(old.name) and old.name not in names and not old.is_dir():
            old.unlink()
    for name in names:
        os.replace(source / name, target / name)
