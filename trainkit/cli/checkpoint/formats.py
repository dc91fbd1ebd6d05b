"""The files that other programs open: plain safetensors, a folder for `transformers`, a folder for PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.cli.checkpoint.exported_module import ExportedModule
from trainkit.errors import CheckpointError, ConfigurationError
from trainkit.state.adapters import adapter_config, adapter_names, adapters_of

__all__ = ["DTYPES", "ExportFolder", "cast", "export_folders"]

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
    tied = _tied_by_class(config) if module.aliases else {}
    for alias, stored in module.aliases.items():
        if alias not in tied or tied[alias] != tied.get(stored):
            tensors[alias] = module.tensors[stored]
    files = {"config.json": config, "generation_config.json": own.get("generation_config")}
    return {"": ExportFolder(tensors, attachments={name: _json(c) for name, c in files.items() if isinstance(c, Mapping)})}


def _tied_by_class(config: Any) -> dict[str, int]:
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
