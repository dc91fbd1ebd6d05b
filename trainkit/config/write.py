"""Settings → a configuration file, in Accelerate's form."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainkit.config.keys import KEYS, SECTIONS, checked
from trainkit.config.read import default_file
from trainkit.config.values import Settings
from trainkit.console import notice
from trainkit.errors import ConfigurationError
from trainkit.registry import automatic_info

__all__ = ["write_basic_config", "write_settings"]


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Write a configuration file for the devices of this machine; a file that is there is left as it is.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        save_location: the file, of YAML, or of JSON if its name ends so; default: that which ``trainkit launch`` reads where
            none is named, in the user's cache folder.

    Returns:
        Its path; ``False`` if there was one.

    Raises:
        ConfigurationError: the precision is none of these, or the file cannot be written.
    """
    path = default_file() if save_location is None else Path(save_location)
    precision = checked("mixed_precision", mixed_precision, KEYS, "mixed_precision")
    if path.exists():
        notice(f"{path} is there, and is left as it is. Remove it, give another save_location, or run: trainkit config")
        return False
    return write_settings(Settings({"mixed_precision": precision, **_devices()}), path)


def write_settings(settings: Settings, path: str | os.PathLike[str]) -> Path:
    """Write a configuration file; one that is there is replaced.

    Args:
        settings: what it is to say.
        path: the file; JSON if its name ends so. Its folder is made.

    Raises:
        ConfigurationError: it cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not target.is_file():
        raise ConfigurationError(f"{path} is there and is no file. Name another one.")
    content = _content(settings)
    text = json.dumps(content, indent=2) + "\n" if target.suffix == ".json" else yaml.safe_dump(content, allow_unicode=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}.") from error
    return Path(path)


def _content(settings: Settings) -> dict[str, Any]:
    """As Accelerate has it, which reads these files but for ``gradient_accumulation_steps`` outside of DeepSpeed."""
    values, backend = dict(settings.values), dict(settings.backend)
    if settings.takes_section and "gradient_accumulation_steps" in values:
        backend["gradient_accumulation_steps"] = values.pop("gradient_accumulation_steps")
    sections = dict(zip(SECTIONS, (backend, dict(settings.dynamo)), strict=True))
    content = {"compute_environment": "LOCAL_MACHINE", **values, **{name: part for name, part in sections.items() if part}}
    return dict(sorted(content.items()))


def _devices() -> dict[str, Any]:
    """What this machine has."""
    import torch

    from trainkit.launch.tpu import DEVICE, tpu_is_chosen

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1:
        return {"distributed_type": "MULTI_GPU", "num_processes": gpus, "use_cpu": False}
    if gpus == 0 and tpu_is_chosen():
        return {"distributed_type": automatic_info(DEVICE).distributed_type, "use_cpu": False}
    return {"distributed_type": "NO", "num_processes": 1, "use_cpu": gpus == 0 and not torch.backends.mps.is_available()}
