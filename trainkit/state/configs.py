"""The configurations that `transformers` and PEFT need to open a model, found without importing either."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from trainkit.console import with_article
from trainkit.errors import UnsavableError
from trainkit.optim.parameter_names import clean_paths

__all__ = ["has_adapters", "model_configs"]


def has_adapters(module: nn.Module) -> bool:
    """Whether there is a PEFT adapter inside: a `PeftModel`, or layers added by `add_adapter`."""
    return any(_is_peft(part) for part in module.modules())


def model_configs(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The configurations of the `transformers` and PEFT models inside, by the path of the module (`""`: itself).

    Returns:
        JSON values. For a `transformers` model: `{"kind": "transformers", "config": content of config.json,
        "generation_config": content of generation_config.json or None}`, and `"adapters"` with their configurations by
        name if it has adapters itself. For a PEFT model: `{"kind": "peft", "config": {adapter: content of
        adapter_config.json}}`; the model in it has its own entry. Models inside a `transformers` model have no entry.

    Raises:
        UnsavableError: a configuration is not JSON.
    """
    found = dict(_models(module, ""))
    paths = clean_paths(module, found)
    configs = {}
    for raw, part in found.items():
        try:
            configs[paths[raw]] = _describe(part)
        except (TypeError, ValueError) as error:
            place = f"{raw} ({type(part).__name__})" if raw else type(part).__name__
            raise UnsavableError(
                f"the configuration of {place} cannot be written as JSON: {error}. Fix: keep only numbers, strings, "
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
        return {"kind": "peft", "config": _adapters(module)}
    config = json.loads(module.config.to_json_string())
    # save_pretrained adds both before it saves the configuration
    config["architectures"] = [type(module).__name__]
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    generation: Any = getattr(module, "generation_config", None)
    described = {
        "kind": "transformers",
        "config": config,
        "generation_config": json.loads(generation.to_json_string()) if _has(generation, "to_json_string") else None,
    }
    if getattr(module, "_hf_peft_config_loaded", False):
        described["adapters"] = _adapters(module)
    return described


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
