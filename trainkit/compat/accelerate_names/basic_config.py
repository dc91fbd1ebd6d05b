"""`write_basic_config`: write a configuration file for the devices of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainkit.config.keys import KEYS, convert_value
from trainkit.config.settings import Settings
from trainkit.config.settings_file import default_file, write_settings
from trainkit.console import notice
from trainkit.launch.environment import DEVICE, tpu_is_chosen
from trainkit.registry import automatic_info

__all__ = ["write_basic_config"]


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Write a configuration file of `trainkit launch` for the devices of this node. An existing file is not changed.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        save_location: The file: YAML, or JSON if its name ends with `.json`. Default: the default file of `trainkit
            launch` in the user's cache folder.

    Returns:
        The path of the file; `False` if it existed.

    Raises:
        ConfigurationError: The precision is another one, or the file cannot be written.
    """
    path = default_file() if save_location is None else Path(save_location)
    precision = convert_value("mixed_precision", mixed_precision, KEYS, "mixed_precision")
    if path.exists():
        notice(f"{path} exists and was not changed. Remove it, pass another save_location, or run: trainkit config")
        return False
    return write_settings(Settings({"mixed_precision": precision, **_devices()}), path)


def _devices() -> dict[str, Any]:
    """The settings for the devices of this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1:
        return {"distributed_type": "MULTI_GPU", "num_processes": gpus, "use_cpu": False}
    if gpus == 0 and tpu_is_chosen():
        return {"distributed_type": automatic_info(DEVICE).distributed_type, "use_cpu": False}
    return {"distributed_type": "NO", "num_processes": 1, "use_cpu": gpus == 0 and not torch.backends.mps.is_available()}
