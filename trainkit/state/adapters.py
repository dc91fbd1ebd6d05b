"""The names of adapter parameters in PEFT's own files, found without importing PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from trainkit.errors import ConfigurationError
from trainkit.state.model import ModelState

__all__ = ["adapter_config", "adapter_folders", "adapter_names", "adapters_of"]

# Prefixes of the parameter names of PEFT's methods. Other methods store their parameters in other ways.
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


def adapters_of(configs: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Mapping[str, Any]], str]:
    """The adapters of a model, and the prefix of PEFT's names for its parameters.

    Args:
        configs: the configurations of the models in it, see `trainkit.state.configs.model_configs`.

    Returns:
        The configurations by name of the adapter; empty if the model itself is not a `PeftModel` and has no adapters added.
    """
    own = configs.get("", {})
    inside = own.get("kind") == "peft"
    adapters = own.get("config") if inside else own.get("adapters")
    known = {str(name): config for name, config in adapters.items()} if isinstance(adapters, Mapping) else {}
    return known, "" if inside else "base_model.model."


def adapter_names(names: Collection[str], adapter: str, adapters: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The parameters of an adapter: name in the model → name in PEFT's file, which does not contain the adapter's name.

    Args:
        names: Names of all parameters of the model.
        adapter: Name of the adapter.
        adapters: The configurations of all adapters, by name.

    Raises:
        ConfigurationError: trainkit does not know how this PEFT method names its parameters.
    """
    config, others = adapters[adapter], [name for name in adapters if name != adapter]
    method = str(config.get("peft_type"))
    if method not in _PREFIXES or not re.fullmatch(r"[A-Za-z0-9_-]+", adapter):
        raise ConfigurationError(
            f"The adapter {adapter!r} of the PEFT method {method} cannot be exported. Expected a name of letters, digits, '_' "
            f"and '-', and one of the methods {', '.join(sorted(_PREFIXES))}. Fix: load the model in Python and call its "
            "save_pretrained(folder)"
        )
    prefixes = (_PREFIXES[method], *(("trainable_tokens_",) if config.get("trainable_token_indices") else ()))
    own = [name for name in names if not any(f".{other}." in f"{name}." for other in others)]
    found = {name: saved for name in own if (saved := _saved_name(name.split("."), adapter, prefixes)) is not None}
    return found | _biases(names, [*found], str(config.get("bias", "none")))


def _saved_name(parts: list[str], adapter: str, prefixes: tuple[str, ...]) -> str | None:
    """The name of a parameter in PEFT's file; `None` if it is not the adapter's.

    Args:
        parts: Its name in the model, split at the dots.
        adapter: Name of the adapter.
        prefixes: Prefixes of the names of the method's parameters.
    """
    if _TO_SAVE in parts and parts[parts.index(_TO_SAVE) + 1 :][:1] == [adapter]:
        at = parts.index(_TO_SAVE)
        return ".".join(parts[:at] + parts[at + 2 :])
    for place in (len(parts) - 2, len(parts) - 1):
        if place > 0 and parts[place] == adapter and parts[place - 1].startswith(prefixes):
            kept = parts[:place] + parts[place + 1 :]
            # DoRA's vector is saved without the name of the parameter that contains it
            return ".".join(kept[:-1] if kept[-2:] == ["lora_magnitude_vector", "weight"] else kept)
    return None


def _biases(names: Collection[str], found: list[str], bias: str) -> dict[str, str]:
    """The biases of the base model that are trained with the adapter."""
    if bias == "none":
        return {}
    layers = tuple(f"{name.partition('.lora_')[0]}.base_layer." for name in found if ".lora_" in name)
    return {n: n for n in names if n.endswith(".bias") and n not in found and (bias == "all" or n.startswith(layers))}


def adapter_config(config: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The content of PEFT's `adapter_config.json`: for inference, with the name of the base model if it has one."""
    values = {**config, "inference_mode": True}
    if values.get("base_model_name_or_path") is None:
        bases = [other.get("config") for other in configs.values() if other.get("kind") == "transformers"]
        values["base_model_name_or_path"] = next((b["_name_or_path"] for b in bases if b and b.get("_name_or_path")), None)
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def adapter_folders(state: ModelState) -> dict[str, tuple[dict[str, Tensor], bytes]]:
    """The adapters of a model that was captured with all parameters.

    Returns:
        path within the folder that PEFT opens (`""`: the folder itself, for the adapter "default") → tensors and content of
        `adapter_config.json`; empty if the model itself has no adapters.

    Raises:
        ConfigurationError: trainkit does not know how the PEFT method of an adapter names its parameters.
    """
    adapters, start = adapters_of(state.configs)
    tensors = {**state.tensors, **{alias: state.tensors[stored] for alias, stored in state.aliases.items()}}
    folders = {}
    for adapter, config in adapters.items():
        weights = {start + new: tensors[name] for name, new in adapter_names(tensors, adapter, adapters).items()}
        folders["" if adapter == "default" else adapter] = weights, adapter_config(config, state.configs)
    return folders
