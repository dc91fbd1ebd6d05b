"""`trainkit checkpoint export`: write the weights of a checkpoint in the formats of other programs.

The files that other programs open: plain safetensors, a folder for `transformers`, a folder for PEFT, a `.ckpt` for Lightning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit._version import __version__
from trainkit.checkpoint.ckpt_file import SUFFIX, lightning_form, write_ckpt
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, TORCH_SUFFIXES
from trainkit.checkpoint.model_files import MODULE
from trainkit.checkpoint.plain_files import shard_size, write_weights
from trainkit.checkpoint.reader import STATE, Checkpoint, open_checkpoint
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checkpoint.urls import remote_sync
from trainkit.cli.checkpoint.text import bytes_text, print_lines
from trainkit.console import quantity
from trainkit.errors import (
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
    UnknownNameError,
    nearest,
)
from trainkit.paths import local_path
from trainkit.state.pretrained import adapter_config, adapter_names, adapters_of
from trainkit.state.training_objects import model_stems
from trainkit.tagged_json.codec import MAX_JSON_BYTES, strict_json

__all__ = [
    "DTYPES",
    "ExportFolder",
    "ExportedModule",
    "aliases_of",
    "cast",
    "export",
    "export_file",
    "export_folders",
    "read_module",
    "run",
]

_MARK = "trainkit_export.json"
# An attribute that names one of several models: the stem of its files, and a path in it.
_MODEL = re.compile(r"(model(?:_\d+)?)(?:/(.+))?")
# The files of an export. Those of an earlier export must not remain next to the new ones.
_OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|config\.json|generation_config\.json|adapter_config\.json|trainkit_export\.json"
)


def run(args: argparse.Namespace) -> int:
    """Export the weights; print what was written."""
    if args.out.endswith(SUFFIX):
        if args.format is not None:
            raise ConfigurationError(
                f"--format {args.format} writes a folder, and {args.out} is a file. Fix: remove one of them"
            )
        size, notes = export_file(args.path, args.out, attribute=args.attribute, dtype=args.dtype, overwrite=args.overwrite)
        print_lines(f"Wrote {args.out}: for torch.load, {bytes_text(size)}", *(f"  {note}" for note in notes))
        return 0
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
        about = f"{kind}, {quantity(len(folder.tensors), 'tensor')}, {bytes_text(size)}"
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
    if chosen != "safetensors" and "" in folders:
        folders[""].attachments = {**_processing_files(checkpoint, attribute), **folders[""].attachments}
    if not any(folder.tensors for folder in folders.values()):
        raise ConfigurationError(f"{path}: there is no tensor to export. Fix: choose another checkpoint or attribute")
    about = {
        "checkpoint": checkpoint.path.name,  # Only the name: an export may be published.
        "run_id": checkpoint.manifest.run_id,
        "step": checkpoint.manifest.step,
        "attribute": attribute,
        "format": chosen,
        "dtype": dtype,
        "trainkit_version": __version__,
        "files": sorted(folders[""].attachments) if "" in folders else [],
    }
    _write(target, folders, (json.dumps(about, indent=2) + "\n").encode(), size)
    remote_sync.add_log_folder(target)
    remote_sync.finish()
    return chosen, folders


def _processing_files(checkpoint: Checkpoint, attribute: str | None) -> dict[str, bytes]:
    """The files of the tokenizer or processor of a model, if the checkpoint has them next to its weights."""
    manifest = checkpoint.manifest
    prefixes = {str(file["prefix"]) for stem, file in manifest.model_files.items() if stem != MODULE}
    if f"{attribute}." not in prefixes:
        return {}
    others = [name for name in manifest.files if name != STATE and not name.endswith((".safetensors", ".index.json"))]
    return {name: checkpoint.attachment(name) for name in others if not _OURS.fullmatch(name)}


def export_file(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    attribute: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> tuple[int, list[str]]:
    """Verify a checkpoint, then write its weights and hyper-parameters to a `.ckpt` with Lightning's keys.

    Args:
        path: The checkpoint.
        out: The file. An earlier one of a checkpoint is replaced.
        attribute: Export only the module with this path, with names relative to it.
        dtype: As for `export`.
        overwrite: Replace any file.

    Returns:
        The size of the file in bytes, and notes for the user.

    Raises:
        ConfigurationError: The attribute is unknown.
        CheckpointError: The checkpoint is damaged, or `out` cannot be written.
    """
    target = Path(os.path.abspath(local_path(out, "OUT")))
    checkpoint = open_checkpoint(path)
    content, notes = lightning_form(checkpoint)
    if attribute is not None:
        module = read_module(checkpoint, attribute)
        content["state_dict"] = {**module.tensors, **{one: module.tensors[stored] for one, stored in module.aliases.items()}}
    if dtype is not None:
        weights = content["state_dict"].items()
        content["state_dict"] = {
            name: cast(value, DTYPES[dtype], name, notes) if isinstance(value, Tensor) else value for name, value in weights
        }
    if overwrite and target.is_file():
        target.unlink()
    write_ckpt(checkpoint, target, content if attribute or dtype else None)
    remote_sync.finish()
    return target.stat().st_size, notes


def _check_target(target: Path, overwrite: bool) -> None:
    if any(os.path.lexists(target / name) for name in (MANIFEST, DIGEST, "state.json")):
        raise ConfigurationError(f"{target} is a checkpoint, which an export would damage. Fix: choose another folder")
    if target.suffix in TORCH_SUFFIXES:
        raise ConfigurationError(f"Expected a folder or a file X.ckpt, got {target}. Fix: {target.with_suffix(SUFFIX)}")
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
        if "" not in folders:  # All adapters have names; each is in a folder.
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
                with contextlib.suppress(OSError):  # A folder that is not empty stays.
                    parent.rmdir()


def _move_into(source: Path, target: Path) -> None:
    """Move the files of a folder into another, and remove the other files of an earlier export."""
    target.mkdir(exist_ok=True)
    names = [path.name for path in source.iterdir() if path.is_file()]
    earlier = _files_of_earlier_export(target)
    for old in target.iterdir():
        if (_OURS.fullmatch(old.name) or old.name in earlier) and old.name not in names and not old.is_dir():
            old.unlink()
    for name in names:
        os.replace(source / name, target / name)


def _files_of_earlier_export(folder: Path) -> list[Any]:
    """The other files that an earlier export has written, as it says."""
    try:
        files = strict_json(read_small_file(folder / _MARK, MAX_JSON_BYTES), _MARK)["files"]
    except (CorruptCheckpointError, KeyError, TypeError):  # there is none, or an earlier version wrote it
        return []
    return files if isinstance(files, list) else []


@dataclass
class ExportedModule:
    """One module of a checkpoint. All names are relative to the module.

    Attributes:
        tensors: The stored tensors.
        aliases: Name of a tied tensor → the name in `tensors` under which it is stored.
        missing_frozen: Names of parameters that the checkpoint does not contain because they were frozen.
        configs: Configurations of the `transformers` and PEFT models inside, by path; `""` is the module itself.
        peft_parent: The PEFT model that contains this module, with adapters between its parameters; "" if there is none.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    missing_frozen: list[str]
    configs: dict[str, Mapping[str, Any]]
    peft_parent: str = ""

    @property
    def kind(self) -> str:
        """The default format of the module: "peft", "transformers" or "safetensors"."""
        config = self.configs.get("", {})
        if self.peft_parent:
            return "safetensors"
        return "peft" if config.get("kind") == "peft" or config.get("adapters") else str(config.get("kind", "safetensors"))


def read_module(checkpoint: Checkpoint, attribute: str | None) -> ExportedModule:
    """Read and verify the model's tensors, and keep those of one module.

    Args:
        checkpoint: The checkpoint.
        attribute: Path of a module, such as `"net"` or `"net.encoder"`. If your own training loop saved several models:
            `"model_1"` for the second, `"model_1/encoder"` for a module of it. `None`: the whole (first) model.

    Raises:
        UnknownNameError: The model has no such module; the message lists the modules.
        CheckpointError: The checkpoint is damaged.
    """
    stem, path = _split(checkpoint, attribute)
    loaded = checkpoint.read({stem, "state"}, unregistered=True)
    tensors = loaded.tensors.get(stem, {})
    aliases = aliases_of(checkpoint, stem, tensors)
    trained, configs = _split_adapters(loaded.state, stem)
    names = [*tensors, *aliases, *trained]
    if path and not any(name.startswith(f"{path}.") for name in names):
        raise UnknownNameError(_unknown(str(attribute), path, names, configs))
    inside, own_aliases = _tensors_inside(tensors, aliases, path)
    own_configs = {p.removeprefix(path).removeprefix("."): config for p, config in configs.items() if _within(p, path)}
    stored = {*inside, *own_aliases}
    missing_frozen = [name for name in _inside(trained, path) if name not in stored]
    return ExportedModule(inside, own_aliases, missing_frozen, own_configs, _enclosing_peft_model(configs, path))


def aliases_of(checkpoint: Checkpoint, stem: str, tensors: Container[str]) -> Mapping[str, str]:
    """Name of a tied tensor → the name under which it is stored, which must be in `tensors`."""
    aliases = checkpoint.manifest.aliases.get(stem, {})
    if missing := [stored for stored in aliases.values() if stored not in tensors]:
        raise CorruptCheckpointError(f"{checkpoint.path}: the manifest names the tensor {missing[0]!r}, which is missing")
    return aliases


def _inside(mapping: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The entries of a module, by their names within it."""
    start = f"{path}." if path else ""
    return {name.removeprefix(start): value for name, value in mapping.items() if name.startswith(start)}


def _tensors_inside(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str], path: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a module and its aliases, each with a name within the module."""
    inside, own_aliases = _inside(tensors, path), {}
    for alias, stored in _inside(aliases, path).items():
        if _within(stored, path):
            own_aliases[alias] = stored.removeprefix(f"{path}." if path else "")
        elif (first := next((name for name, tensor in inside.items() if tensor is tensors[stored]), None)) is not None:
            own_aliases[alias] = first
        else:  # tied to a tensor outside the module, under whose name it is stored
            inside[alias] = tensors[stored]
    return inside, own_aliases


def _enclosing_peft_model(configs: Mapping[str, Mapping[str, Any]], path: str) -> str:
    """The path of the PEFT model around a module; "" if there is none."""
    outer = [p for p, config in configs.items() if config.get("kind") == "peft" and p != path and _within(path, p)]
    return (outer[0] or "the model") if outer else ""


def _split(checkpoint: Checkpoint, attribute: str | None) -> tuple[str, str]:
    """The stem of the model's files, and the path of the module in the model."""
    match = None if attribute is None else _MODEL.fullmatch(attribute)
    stems = model_stems(checkpoint.manifest)
    if match and len(stems) > 1 and match[1] in stems:
        return match[1], match[2] or ""
    return "model", attribute or ""


def _split_adapters(state: Mapping[str, Any], stem: str) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """The trained parameters of a model and its configurations by path, as the state names them."""
    models, number = state.get("models"), int(stem.partition("_")[2] or 0)
    about = models[number] if isinstance(models, list) and number < len(models) else {}
    trained, configs = (_mapping(_mapping(about).get(key)) for key in ("trained", "configs"))
    return trained, {path: config for path, config in configs.items() if isinstance(config, Mapping)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _unknown(attribute: str, path: str, names: list[str], configs: Mapping[str, Any]) -> str:
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    tops = [*sorted({name.partition(".")[0] for name in names if "." in name}), *(p for p in configs if "." in p)]
    every = {".".join(module.split(".")[: depth + 1]) for module in modules for depth in range(module.count(".") + 1)}
    hint = nearest(path, tops) or nearest(path, sorted(every - {""}))
    is_tensor = " It is a parameter or buffer; expected a module." if path in names else ""
    return (
        f"The model has no module {attribute!r}.{is_tensor}{hint} Modules: {', '.join(tops) or 'none'}, and their submodules."
    )


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
    module_config = module.configs.get("", {})
    if module_config.get("kind") != "transformers":
        raise ConfigurationError(_wrong_module("a transformers model", "transformers", module))
    if module.peft_parent:
        raise ConfigurationError(
            f"Expected a whole model, got the base model inside a PEFT model ({module.peft_parent}), which contains adapters. "
            "Fix: export the PEFT model with --format peft, or merge the adapters in Python first: model.merge_and_unload()"
        )
    if module_config.get("adapters"):
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
    config = module_config.get("config")
    tensors = dict(module.tensors)
    # transformers ties the tensors that the class names; other tied tensors are written once for each name
    tied = _ties_of_class(config) if module.aliases else {}
    for alias, stored in module.aliases.items():
        if alias not in tied or tied[alias] != tied.get(stored):
            tensors[alias] = module.tensors[stored]
    dtype = next((str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()), None)
    if isinstance(config, Mapping) and dtype is not None:
        config = {**config, "dtype": dtype}
    files = {"config.json": config, "generation_config.json": module_config.get("generation_config")}
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
        names = adapter_names([*tensors, *module.missing_frozen], adapter, module.configs)
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
