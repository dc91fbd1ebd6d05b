"""The files that other programs open: plain safetensors, a folder for ``transformers``, a folder for PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.cli.checkpoint.pieces import Piece
from trainkit.errors import CheckpointError, ConfigurationError

__all__ = ["DTYPES", "Folder", "cast", "lay_out"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

# How PEFT names the parameters of its methods. Others keep what they learn in ways of their own, which it alone knows.
_PREFIXES = {
    "C3A": "c3a_",
    "FOURIERFT": "fourierft_",
    "HRA": "hra_",
    "IA3": "ia3_",
    "LN_TUNING": "ln_tuning_",
    "LOHA": "hada_",
    "LOKR": "lokr_",
    "LORA": "lora_",
    "MISS": "miss_",
    "OFT": "oft_",
    "ROAD": "road_",
    "TRAINABLE_TOKENS": "trainable_tokens_",
}
_TO_SAVE = "modules_to_save"
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
    own = piece.configs.get("", {})
    adapters = own.get("config") if own.get("kind") == "peft" else own.get("adapters")
    if not isinstance(adapters, Mapping) or not adapters:
        raise ConfigurationError(_not_that("a PEFT model", "peft", piece))
    inside = own.get("kind") == "peft"
    tensors = {**piece.tensors, **{alias: piece.tensors[stored] for alias, stored in piece.aliases.items()}}
    folders: dict[str, Folder] = {}
    lost: list[str] = []
    for adapter, config in adapters.items():
        others = [name for name in adapters if name != adapter]
        names = _adapter_names([*tensors, *piece.lacking], str(adapter), others, config)
        missing = [name for name in names if name not in tensors]
        if not names or len(missing) == len(names):
            lost.append(str(adapter))
            continue
        if missing:
            raise CheckpointError(
                f"The checkpoint holds only what was trained, and of the adapter {adapter!r} {len(missing)} parameters were "
                f"frozen and are not in it: {_some(missing)}. Fix: ModelCheckpoint(save='all')"
            )
        start = "" if inside else "base_model.model."
        weights = {start + new: tensors[name] for name, new in names.items()}
        where = "" if adapter == "default" else str(adapter)
        folders[where] = Folder(weights, "adapter_model", {"adapter_config.json": _adapter_config(config, piece)})
    if not folders:
        raise CheckpointError(f"The checkpoint holds nothing of the adapters {', '.join(lost)}. Fix: name another checkpoint")
    for adapter in lost:
        next(iter(folders.values())).notes.append(f"of the adapter {adapter!r}, which was frozen, nothing is in the checkpoint")
    return folders


def _adapter_names(names: list[str], adapter: str, others: list[str], config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of an adapter: name in the model → name in PEFT's file, which lacks the adapter's."""
    method = str(config.get("peft_type"))
    if method not in _PREFIXES or not re.fullmatch(r"[A-Za-z0-9_-]+", adapter):
        raise ConfigurationError(
            f"The adapter {adapter!r} is of the PEFT method {method}, which keeps its parameters in a way that only PEFT knows "
            f"(known here: {', '.join(sorted(_PREFIXES))}). Fix: load the model in Python and call its save_pretrained(folder)"
        )
    prefixes = {_PREFIXES[method], *(("trainable_tokens_",) if config.get("trainable_token_indices") else ())}
    found = {}
    for name in names:
        parts = name.split(".")
        if any(f".{other}." in f"{name}." for other in others):
            continue
        if _TO_SAVE in parts and parts[parts.index(_TO_SAVE) + 1 :][:1] == [adapter]:
            at = parts.index(_TO_SAVE)
            found[name] = ".".join(parts[:at] + parts[at + 2 :])
            continue
        for place in (len(parts) - 1, len(parts) - 2):
            if place > 0 and parts[place] == adapter and parts[place - 1].startswith(tuple(prefixes)):
                kept = parts[:place] + parts[place + 1 :]
                # DoRA's vector is kept without the name of the parameter that holds it
                found[name] = ".".join(kept[:-1] if kept[-2:] == ["lora_magnitude_vector", "weight"] else kept)
    return found | _biases(names, [*found], str(config.get("bias", "none")))


def _biases(names: list[str], found: list[str], bias: str) -> dict[str, str]:
    """The biases of the base that are trained with the adapter."""
    if bias == "none":
        return {}
    layers = tuple(f"{name.partition('.lora_')[0]}.base_layer." for name in found if ".lora_" in name)
    return {n: n for n in names if n.endswith(".bias") and n not in found and (bias == "all" or n.startswith(layers))}


def _adapter_config(config: Mapping[str, Any], piece: Piece) -> bytes:
    """What PEFT writes: the configuration, ready for use and not for training, with the base's name if it has one."""
    values = {**config, "inference_mode": True}
    if values.get("base_model_name_or_path") is None:
        bases = [other.get("config") for other in piece.configs.values() if other.get("kind") == "transformers"]
        values["base_model_name_or_path"] = next((b["_name_or_path"] for b in bases if b and b.get("_name_or_path")), None)
    return _json(values)


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
