"""Settings → configuration file, in Accelerate's form."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainkit.config.keys import SECTIONS
from trainkit.config.settings import Settings
from trainkit.errors import ConfigurationError

__all__ = ["write_settings"]


def write_settings(settings: Settings, path: str | os.PathLike[str]) -> Path:
    """Write or replace a configuration file, JSON if its name ends with `.json`; its folder is created.

    Raises:
        ConfigurationError: It cannot be written.
    """
    target = Path(os.path.realpath(path))  # keep a symbolic link
    if target.exists() and not target.is_file():
        raise ConfigurationError(f"{path} exists and is not a file. Choose another path.")
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
    """The content, which Accelerate reads except for `gradient_accumulation_steps` without DeepSpeed."""
    values, backend = dict(settings.values), dict(settings.backend)
    if settings.takes_section and "gradient_accumulation_steps" in values:
        backend["gradient_accumulation_steps"] = values.pop("gradient_accumulation_steps")
    sections = dict(zip(SECTIONS, (backend, dict(settings.dynamo)), strict=True))
    content = {"compute_environment": "LOCAL_MACHINE", **values, **{name: part for name, part in sections.items() if part}}
    return dict(sorted(content.items()))
