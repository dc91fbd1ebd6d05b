"""`trainkit checkpoint export`: write the weights of a checkpoint in the formats of other programs.

The files that other programs open: plain safetensors, a folder for `transformers`, a folder for PEFT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit._version import __version__
from trainkit.checkpoint.manifest import DIGEST, MANIFEST
from trainkit.checkpoint.plain_files import shard_size, write_weights
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.urls import remote_sync
from trainkit.cli.checkpoint.exported_module import ExportedModule, read_module
from trainkit.cli.checkpoint.text import bytes_text, print_lines
from trainkit.console import counted
from trainkit.errors import CheckpointError, CheckpointWriteError, ConfigurationError
from trainkit.paths import local_path
from trainkit.state.pretrained import adapter_config, adapter_names, adapters_of

__all__ = ["DTYPES", "ExportFolder", "cast", "export", "export_folders", "run"]


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
    remote_sync.add_log_folder(target)
    remote_sync.finish()
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


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_SHOWN = 10


@dataclass
class ExportFolder:
    """One folder of an export.

    Attributes:
        tensors: Name → tensor.
        stem: The stem of the tensor files.
        attachments: Other files, by name.
        notes: Notes for the user.
    """

    tensors: dict[str, Tensor]
    stem: str = "model"
    attachments: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def export_folders(module: ExportedModule, kind: str, dtype: str | None) -> dict[str, ExportFolder]:
    """The folders to write, by their path in the export; `""` is the export itself.

    Raises:
        ConfigurationError: The module cannot be exported in this format.
        CheckpointError: The checkpoint does not contain all parameters that the format needs.
    """
    folders = {"safetensors": _plain, "transformers": _transformers, "peft": _peft}[kind](module)
    if dtype is not None:
        for folder in folders.values():
            folder.tensors = {name: cast(tensor, DTYPES[dtype], name, folder.notes) for name, tensor in folder.tensors.items()}
        config = folders[""].attachments.get("config.json") if "" in folders else None
        if config is not None:
            folders[""].attachments["config.json"] = _with_dtype(config, str(DTYPES[dtype]).removeprefix("torch."))
    return folders


def cast(tensor: Tensor, dtype: torch.dtype, name: str, notes: list[str]) -> Tensor:
    """A floating-point tensor in another dtype; adds a note if values overflow. Other tensors are unchanged."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    overflown = int((result.isinf() & tensor.isfinite()).sum()) if dtype is not torch.float64 else 0
    if overflown:
        kind = str(dtype).removeprefix("torch.")
        notes.append(f"{name}: {overflown:,} of {tensor.numel():,} values are too large for {kind} and became infinite")
    return result


def _with_dtype(config: bytes, dtype: str) -> bytes:
    values = json.loads(config)
    for key in ("dtype", "torch_dtype"):
        if key in values or key == "dtype":
            values[key] = dtype
    return _json(values)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


# ------------------------------------------------------------------------------------------------------------ formats


def _plain(module: ExportedModule) -> dict[str, ExportFolder]:
    folder = ExportFolder(dict(module.tensors))
    if module.missing_frozen:
        folder.notes.append(
            f"the checkpoint contains only trained parameters; {len(module.missing_frozen)} frozen ones are missing"
        )
    if module.aliases:
        tied = ", ".join(f"{alias} ({stored})" for alias, stored in list(module.aliases.items())[:_SHOWN])
        folder.notes.append(f"tied tensors are written once; not written, each with the tensor that it is tied to: {tied}")
    for path, config in module.configs.items():
        if path and config.get("kind") in ("transformers", "peft") and ".base_model." not in f".{path}":
            folder.notes.append(f"{path} is a {config['kind']} model; to export it in that format: --attribute {path}")
    return {"": folder}


def _transformers(module: ExportedModule) -> dict[str, ExportFolder]:
    own = module.configs.get("", {})
    if own.get("kind") != "transformers":
        raise ConfigurationError(_wrong_module("a transformers model", "transformers", module))
    if module.peft_parent:
        raise ConfigurationError(
            f"Expected a whole model, got the base model inside a PEFT model ({module.peft_parent}), which contains adapters. "
            "Fix: export the PEFT model with --format peft, or merge the adapters in Python first: model.merge_and_unload()"
        )
    if own.get("adapters"):
        raise ConfigurationError(
            "The model has PEFT adapters, which the transformers format does not support. Fix: --format peft, or merge them "
            "into the weights in Python first: PeftModel.merge_and_unload()"
        )
    if module.missing_frozen:
        raise CheckpointError(
            f"The checkpoint contains only trained parameters: {len(module.missing_frozen)} frozen ones are missing ("
            f"{_some(module.missing_frozen)}), and transformers would initialize them at random. Fix: use --format safetensors "
            "to export the trained ones, or ModelCheckpoint(save='all') to save all"
        )
    config = own.get("config")
    tensors = dict(module.tensors)
    # transformers ties the tensors that the class names; other tied tensors are written once for each name
    tied = _ties_of_class(config) if module.aliases else {}
    for alias, stored in module.aliases.items():
        if alias not in tied or tied[alias] != tied.get(stored):
            tensors[alias] = module.tensors[stored]
    files = {"config.json": config, "generation_config.json": own.get("generation_config")}
    return {"": ExportFolder(tensors, attachments={name: _json(c) for name, c in files.items() if isinstance(c, Mapping)})}


def _ties_of_class(config: Any) -> dict[str, int]:
    """The parameters of a model of this configuration; those that `transformers` ties have the same number.

    Empty if `transformers` is not installed or does not have the class. Tied tensors are then written once for each name.
    """
    try:
        import transformers

        cls = getattr(transformers, config["architectures"][0])
        if not issubclass(cls, transformers.PreTrainedModel):
            return {}
        with torch.device("meta"):
            model: Any = cls(cls.config_class.from_dict(dict(config)))
        return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    except Exception:  # any error of the other package: the result is only an optimization
        return {}


def _peft(module: ExportedModule) -> dict[str, ExportFolder]:
    adapters, start = adapters_of(module.configs)
    if not adapters:
        raise ConfigurationError(_wrong_module("a PEFT model", "peft", module))
    tensors = {**module.tensors, **{alias: module.tensors[stored] for alias, stored in module.aliases.items()}}
    folders: dict[str, ExportFolder] = {}
    lost: list[str] = []
    for adapter, config in adapters.items():
        names = adapter_names([*tensors, *module.missing_frozen], adapter, adapters)
        missing = [name for name in names if name not in tensors]
        if not names or len(missing) == len(names):
            lost.append(adapter)
            continue
        if missing:
            raise CheckpointError(
                f"The checkpoint contains only trained parameters: {len(missing)} frozen ones of the adapter {adapter!r} are "
                f"missing ({_some(missing)}). Fix: save all of them with ModelCheckpoint(save='all')"
            )
        weights = {start + new: tensors[name] for name, new in names.items()}
        where = "" if adapter == "default" else adapter
        folders[where] = ExportFolder(weights, "adapter_model", {"adapter_config.json": adapter_config(config, module.configs)})
    if not folders:
        raise CheckpointError(f"The checkpoint does not contain the adapters {', '.join(lost)}. Fix: choose another checkpoint")
    for adapter in lost:
        next(iter(folders.values())).notes.append(f"the adapter {adapter!r} was frozen and is not in the checkpoint")
    return folders


def _wrong_module(what: str, kind: str, module: ExportedModule) -> str:
    there = [path for path, config in module.configs.items() if path and config.get("kind") == kind]
    fix = f"--attribute {there[0]}" if there else "--format safetensors"
    return (
        f"--format {kind}: expected {what}, but the module is not one"
        + (f"; it contains {', '.join(there)}" if there else "")
        + f". Fix: {fix}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
