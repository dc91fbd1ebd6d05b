"""What the template uses of Hydra: objects from `_target_`, recursively."""

from functools import partial
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, ListConfig


def instantiate(config: Any, **more: Any) -> Any:
    if isinstance(config, DictConfig):
        values = {key: instantiate(value) for key, value in config.items()}
        if "_target_" not in values:
            return values
        module, _, name = values.pop("_target_").rpartition(".")
        target = getattr(import_module(module), name)
        return partial(target, **values) if values.pop("_partial_", False) else target(**values, **more)
    if isinstance(config, ListConfig):
        return [instantiate(value) for value in config]
    return config
