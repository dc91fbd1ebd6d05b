"""What `transformers` and PEFT need to open a saved model: its configurations and adapters, found without importing either."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.console import with_article
from trainkit.errors import ConfigurationError, UnsavableError
from trainkit.optim.parameter_names import clean_paths

if TYPE_CHECKING:
    from trainkit.state.model import ModelState

__all__ = [
    "adapter_config",
    "adapter_folders",
    "adapter_names",
    "adapters_of",
    "embedding_names",
    "has_adapters",
    "model_configs",
]


def has_adapters(module: nn.Module) -> bool:
    """Whether there is a PEFT adapter inside: a `PeftModel`, or layers added by `add_adapter`."""
    return any(_is_peft(part) for part in module.modules())


def model_configs(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The configurations of the `transformers` and PEFT models inside, by the path of the module (`""`: itself).

    Returns:
        JSON values. For a `transformers` model: `{"kind": "transformers", "config": content of config.json,
        "generation_config": content of generation_config.json or None}`, and `"adapters"` with their configurations by
        name if it has adapters itself. For a PEFT model: `{"kind": "peft", "config": {adapter: content of
        adapter_config.json}}`; the model in it has its own entry. Models inside a `transformers` model have no entry. A
        model with adapters whose vocabulary was resized has `"embeddings"`, the names of the parameters of its embeddings.

    Raises:
        UnsavableError: A configuration is not JSON.
    """
    models = dict(_models(module, ""))
    paths = clean_paths(module, models)
    configs = {}
    for raw, part in models.items():
        try:
            configs[paths[raw]] = _describe(part) | _describe_embeddings(part)
        except (TypeError, ValueError) as error:
            name = f"{raw} ({type(part).__name__})" if raw else type(part).__name__
            raise UnsavableError(
                f"the configuration of {name} cannot be written as JSON: {error}. Fix: keep only numbers, strings, "
                "lists and dicts in it."
            ) from error
    return configs


def _models(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if _is_peft_model(module) or _is_transformers(module):
        yield path, module
        if not _is_peft_model(module):
            return
    for name, child in module.named_children():
        yield from _models(child, f"{path}.{name}" if path else name)


def _is_peft(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def _is_peft_model(module: nn.Module) -> bool:
    # the tuner inside has the same configurations, but cannot be saved
    return _is_peft(module) and isinstance(getattr(module, "peft_config", None), Mapping) and _has(module, "save_pretrained")


def _is_transformers(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if _is_peft(module) or config is None:  # PEFT's modules forward attributes
        return False
    return _has(module, "save_pretrained") and _has(config, "to_dict") and _has(config, "to_json_string")


def _has(value: Any, method: str) -> bool:
    return callable(getattr(type(value), method, None))


def _describe(module: Any) -> dict[str, Any]:
    if _is_peft_model(module):
        return {"kind": "peft", "config": {name: _with_base(config, module) for name, config in _adapters(module).items()}}
    config = json.loads(module.config.to_json_string())
    # save_pretrained adds both before it saves the configuration
    config["architectures"] = [_class_of(module).__name__]
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    generation: Any = getattr(module, "generation_config", None)
    description = {
        "kind": "transformers",
        "config": config,
        "generation_config": json.loads(generation.to_json_string()) if _has(generation, "to_json_string") else None,
    }
    if getattr(module, "_hf_peft_config_loaded", False):
        description["adapters"] = _adapters(module)
    return description


def _describe_embeddings(module: Any) -> dict[str, list[str]]:
    """The embeddings of a model with adapters, if its vocabulary is not that of its base, whose weights lack the new rows."""
    adapters = getattr(module, "peft_config", None)
    if not isinstance(adapters, Mapping) or not _has(getattr(module, "config", None), "get_text_config"):
        return {}
    base = next((config.base_model_name_or_path for config in adapters.values()), None)
    size = _vocabulary(module.config)
    if size is None or not base or _vocabulary_of(type(module.config), str(base)) in (None, size):
        return {}
    layers = (module.get_input_embeddings(), module.get_output_embeddings())
    parameters = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
    names = [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in parameters]
    return {"embeddings": sorted(clean_paths(module, names).values())}


def _vocabulary(config: Any) -> int | None:
    return getattr(config.get_text_config(), "vocab_size", None)


def _vocabulary_of(kind: Any, base: str) -> int | None:
    """The size of the vocabulary of a base model; None if its configuration is not on this machine."""
    try:
        return _vocabulary(kind.from_pretrained(base, local_files_only=True))
    except (OSError, ValueError):
        return None


def _class_of(module: nn.Module) -> type:
    """The class of a model, without the one that `fully_shard` has derived from it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


def _with_base(config: dict[str, Any], model: Any) -> dict[str, Any]:
    """The configuration of an adapter with what `save_pretrained` of PEFT adds: the class of the base model."""
    if config.get("task_type") is not None or not _has(model, "get_base_model"):  # a PeftMixedModel has no such method
        return config
    base = _class_of(model.get_base_model())
    return {**config, "auto_mapping": {"base_model_class": base.__name__, "parent_library": base.__module__}}


def _adapters(module: Any) -> dict[str, Any]:
    return {str(name): _plain(config.to_dict()) for name, config in module.peft_config.items()}


def _plain(value: Any) -> Any:
    """The value as JSON would restore it, with sets as sorted lists."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} is {with_article(type(value).__name__)}")


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
        configs: The configurations of the models in it, see `model_configs`.

    Returns:
        The configurations by name of the adapter; empty if the model itself is not a `PeftModel` and has no adapters added.
    """
    of_model = configs.get("", {})
    is_peft = of_model.get("kind") == "peft"
    adapters = of_model.get("config") if is_peft else of_model.get("adapters")
    by_name = {str(name): config for name, config in adapters.items()} if isinstance(adapters, Mapping) else {}
    return by_name, "" if is_peft else "base_model.model."


def adapter_names(names: Collection[str], adapter: str, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The parameters of an adapter: name in the model → name in PEFT's file, which does not contain the adapter's name.

    Args:
        names: Names of all parameters of the model.
        adapter: Name of the adapter.
        configs: The configurations of the models in it, see `model_configs`.

    Raises:
        ConfigurationError: Trainkit does not know how this PEFT method names its parameters.
    """
    adapters, _ = adapters_of(configs)
    config, others = adapters[adapter], [name for name in adapters if name != adapter]
    method = str(config.get("peft_type"))
    if method not in _PREFIXES or not re.fullmatch(r"[A-Za-z0-9_-]+", adapter):
        raise ConfigurationError(
            f"The adapter {adapter!r} of the PEFT method {method} cannot be exported. Expected a name of letters, digits, '_' "
            f"and '-', and one of the methods {', '.join(sorted(_PREFIXES))}. Fix: load the model in Python and call its "
            "save_pretrained(folder)"
        )
    prefixes = (_PREFIXES[method], *(("trainable_tokens_",) if config.get("trainable_token_indices") else ()))
    of_adapter = [name for name in names if not any(f".{other}." in f"{name}." for other in others)]
    saved_names = {
        name: saved for name in of_adapter if (saved := _name_in_file(name.split("."), adapter, prefixes)) is not None
    }
    embeddings = {name: name for name in configs[""].get("embeddings", ()) if name in names}
    return embeddings | saved_names | _biases(names, [*saved_names], str(config.get("bias", "none")))


def _name_in_file(path: list[str], adapter: str, prefixes: tuple[str, ...]) -> str | None:
    """The name of a parameter in PEFT's file; `None` if it is not the adapter's.

    Args:
        path: Its name in the model, split at the dots.
        adapter: Name of the adapter.
        prefixes: Prefixes of the names of the method's parameters.
    """
    if _TO_SAVE in path and path[path.index(_TO_SAVE) + 1 :][:1] == [adapter]:
        at = path.index(_TO_SAVE)
        return ".".join(path[:at] + path[at + 2 :])
    for index in (len(path) - 2, len(path) - 1):
        if index > 0 and path[index] == adapter and path[index - 1].startswith(prefixes):
            rest = path[:index] + path[index + 1 :]
            # DoRA's vector is saved without the name of the parameter that contains it
            return ".".join(rest[:-1] if rest[-2:] == ["lora_magnitude_vector", "weight"] else rest)
    return None


def _biases(names: Collection[str], saved: list[str], bias: str) -> dict[str, str]:
    """The biases of the base model that are trained with the adapter."""
    if bias == "none":
        return {}
    layers = tuple(f"{name.partition('.lora_')[0]}.base_layer." for name in saved if ".lora_" in name)
    return {n: n for n in names if n.endswith(".bias") and n not in saved and (bias == "all" or n.startswith(layers))}


def embedding_names(configs: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The parameters of embeddings that a base does not have, because the vocabulary was resized; stored like trained ones.

    Args:
        configs: The configurations of the models in a module, see `model_configs`.
    """
    return {f"{path}.{name}" if path else name for path, one in configs.items() for name in one.get("embeddings", ())}


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
        ConfigurationError: Trainkit does not know how the PEFT method of an adapter names its parameters.
    """
    adapters, start = adapters_of(state.configs)
    tensors = {**state.tensors, **{alias: state.tensors[stored] for alias, stored in state.aliases.items()}}
    folders = {}
    for adapter, config in adapters.items():
        weights = {start + new: tensors[name] for name, new in adapter_names(tensors, adapter, state.configs).items()}
        folders["" if adapter == "default" else adapter] = weights, adapter_config(config, state.configs)
    return folders
