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
    values, of_sections = dict(settings.values), {**settings.backend, **settings.dynamo}
    if "gradient_accumulation_steps" in values and "gradient_accumulation_steps" in settings.own_keys:
        of_sections["gradient_accumulation_steps"] = values.pop("gradient_accumulation_steps")
    sections = {
        section: {name: value for name, value in of_sections.items() if name in keys} for section, keys in SECTIONS.items()
    }
    content = {"compute_environment": "LOCAL_MACHINE", **values, **{name: part for name, part in sections.items() if part}}
    return dict(sorted(content.items()))
