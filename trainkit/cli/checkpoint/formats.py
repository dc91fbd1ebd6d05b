"""The files that other programs open: plain safetensors, a folder for ``transformers``, a folder for PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.cli.checkpoint.pieces import Piece
from trainkit.errors import CheckpointError, ConfigurationError
from trainkit.state.adapters import adapter_config, adapter_names, adapters_of

__all__ = ["DTYPES", "Folder", "cast", "lay_out"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_SHOWN = 10


@dataclass
class Folder:
    """One folder to be written.

    Attributes:
        tensors: by the name that they get.
        stem: of the files of tensors.
        attachments: further files.
        notes: what the user should know.
    """

    tensors: dict[str, Tensor]
    stem: str = "model"
    attachments: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def lay_out(piece: Piece, kind: str, dtype: str | None) -> dict[str, Folder]:
    """The folders to be written, by their path within the folder of the export; ``""`` is that itself.

    Raises:
        ConfigurationError: the module is not of this kind.
        CheckpointError: what the format needs is not in the checkpoint.
    """
    folders = {"safetensors": _plain, "transformers": _transformers, "peft": _peft}[kind](piece)
    if dtype is not None:
        for folder in folders.values():
            folder.tensors = {name: cast(tensor, DTYPES[dtype], name, folder.notes) for name, tensor in folder.tensors.items()}
        config = folders[""].attachments.get("config.json") if "" in folders else None
        if config is not None:
            folders[""].attachments["config.json"] = _with_dtype(config, str(DTYPES[dtype]).removeprefix("torch."))
    return folders


def cast(tensor: Tensor, dtype: torch.dtype, name: str, notes: list[str]) -> Tensor:
    """The tensor in another dtype if it holds floating-point numbers; a note of those that are too large for it."""
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


def _plain(piece: Piece) -> dict[str, Folder]:
    folder = Folder(dict(piece.tensors))
    if piece.lacking:
        folder.notes.append(f"the checkpoint holds only what was trained; {len(piece.lacking)} frozen parameters are not in it")
    if piece.aliases:
        tied = ", ".join(f"{alias} ({stored})" for alias, stored in list(piece.aliases.items())[:_SHOWN])
        folder.notes.append(f"tied tensors are written once; left out, each with the one that it is: {tied}")
    for path, config in piece.configs.items():
        if path and config.get("kind") in ("transformers", "peft") and ".base_model." not in f".{path}":
            folder.notes.append(f"{path} is a {config['kind']} model; for a folder that it opens: --attribute {path}")
    return {"": folder}


def _transformers(piece: Piece) -> dict[str, Folder]:
    own = piece.configs.get("", {})
    if own.get("kind") != "transformers":
        raise ConfigurationError(_not_that("a transformers model", "transformers", piece))
    if piece.within:
        raise ConfigurationError(
            f"What is exported is the base within a PEFT model ({piece.within}), whose adapters lie between its parameters. "
            "Fix: export the PEFT model with --format peft; or merge them in Python first: model.merge_and_unload()"
        )
    if own.get("adapters"):
        raise ConfigurationError(
            "The model has PEFT adapters, which a folder for transformers does not hold. Fix: --format peft; or, to have them "
            "in the weights, merge them in Python first: model.merge_and_unload() of a PeftModel"
        )
    if piece.lacking:
        raise CheckpointError(
            f"The checkpoint holds only what was trained: {len(piece.lacking)} frozen parameters are not in it ("
            f"{_some(piece.lacking)}), and transformers would fill them with random numbers. Fix: --format safetensors writes "
            "what there is; ModelCheckpoint(save='all') saves everything"
        )
    config = own.get("config")
    tensors = dict(piece.tensors)
    # transformers ties what the class says; anything else that was tied gets a copy of its own
    tied = _tied_by_class(config) if piece.aliases else {}
    for alias, stored in piece.aliases.items():
        if alias not in tied or tied[alias] != tied.get(stored):
            tensors[alias] = piece.tensors[stored]
    attachments = {"config.json": config, "generation_config.json": own.get("generation_config")}
    return {"": Folder(tensors, attachments={name: _json(c) for name, c in attachments.items() if isinstance(c, Mapping)})}


def _tied_by_class(config: Any) -> dict[str, int]:
    """The parameters that a model of this configuration has, those that ``transformers`` ties with the same number.

    Empty if it is not installed or does not know the class: then tied tensors are written under each name, which is right
    too, but larger.
    """
    try:
        import transformers

        cls = getattr(transformers, config["architectures"][0])
        if not issubclass(cls, transformers.PreTrainedModel):
            return {}
        with torch.device("meta"):
            model: Any = cls(cls.config_class.from_dict(dict(config)))
        return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    except Exception:  # whatever another package raises: it is asked only in order to write less
        return {}


def _peft(piece: Piece) -> dict[str, Folder]:
    adapters, start = adapters_of(piece.configs)
    if not adapters:
        raise ConfigurationError(_not_that("a PEFT model", "peft", piece))
    tensors = {**piece.tensors, **{alias: piece.tensors[stored] for alias, stored in piece.aliases.items()}}
    folders: dict[str, Folder] = {}
    lost: list[str] = []
    for adapter, config in adapters.items():
        names = adapter_names([*tensors, *piece.lacking], adapter, adapters)
        missing = [name for name in names if name not in tensors]
        if not names or len(missing) == len(names):
            lost.append(adapter)
            continue
        if missing:
            raise CheckpointError(
                f"The checkpoint holds only what was trained, and of the adapter {adapter!r} {len(missing)} parameters were "
                f"frozen and are not in it: {_some(missing)}. Fix: ModelCheckpoint(save='all')"
            )
        weights = {start + new: tensors[name] for name, new in names.items()}
        where = "" if adapter == "default" else adapter
        folders[where] = Folder(weights, "adapter_model", {"adapter_config.json": adapter_config(config, piece.configs)})
    if not folders:
        raise CheckpointError(f"The checkpoint holds nothing of the adapters {', '.join(lost)}. Fix: name another checkpoint")
    for adapter in lost:
        next(iter(folders.values())).notes.append(f"of the adapter {adapter!r}, which was frozen, nothing is in the checkpoint")
    return folders


def _not_that(what: str, kind: str, piece: Piece) -> str:
    there = [path for path, config in piece.configs.items() if path and config.get("kind") == kind]
    fix = f"--attribute {there[0]}" if there else "--format safetensors"
    return (
        f"--format {kind}: expected {what}, and what is exported is none"
        + (f"; inside it there is {', '.join(there)}" if there else "")
        + f". Fix: {fix}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
