"""Configuration file → `Settings`. The file may be Accelerate's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainkit.config.foreign import UNUSED, UNUSED_IN_SECTIONS, check_unused, is_off
from trainkit.config.keys import KEYS, SECTIONS, Key, checked
from trainkit.config.settings import Settings
from trainkit.console import notice
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest

__all__ = ["default_file", "read_settings"]

_OLD = {"fp16": "mixed_precision: fp16"}
_PREFIXES = {"dynamo_config": "dynamo_", "fsdp_config": "fsdp_"}
_NONE = ("", "none", "null")


def default_file() -> Path:
    """The default file: `$TRAINKIT_CONFIG_FILE`, else `trainkit/default_config.yaml` in the user's cache folder."""
    named = os.environ.get("TRAINKIT_CONFIG_FILE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trainkit", "default_config.yaml")


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a configuration file.

    Args:
        path: A YAML file, or JSON if its name ends with `.json`; trainkit's or Accelerate's.

    Raises:
        ConfigurationError: It cannot be read, or has an unknown key or a wrong value.
        UnsupportedArgumentError: A key or value that is not supported; the message says what to write.
    """
    source = str(path)
    content = _content(Path(path), source)
    name = "compute_environment"  # first: other environments have many unknown keys
    check_unused(f"{source}: {name}", content.get(name), *UNUSED[name])
    sections = {name: _section(content.pop(name, None), table, name, source) for name, table in SECTIONS.items()}
    for name in _OLD:
        if not is_off(content.pop(name, None)):
            raise UnsupportedArgumentError(f"{source}: {name} is a key of an old version of Accelerate; write {_OLD[name]}.")
    _check_float8(content.pop("fp8_config", None), source)
    values = _values(content, KEYS, UNUSED, source)
    dynamo = sections.pop("dynamo_config")
    backend = {key: value for section in sections.values() for key, value in section.items()}
    return Settings.out_of(values, backend, dynamo, source)


def _content(path: Path, source: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(
            f"the configuration file {source} does not exist. Create it with: trainkit config --config_file {source}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source} cannot be read: {error}.") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigurationError(f"{source} is not valid {kind}: {' '.join(str(error).split())}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigurationError(f"{source} must contain keys and values, such as num_processes: 2, not {str(content)[:60]!r}.")
    return content


def _section(section: Any, table: Mapping[str, Key], name: str, source: str) -> dict[str, Any]:
    """The values of a section such as `deepspeed_config`."""
    if not isinstance(section, Mapping):
        if is_off(section):
            return {}
        raise ConfigurationError(f"{source}: {name} must contain keys and values, not {section!r}.")
    keys = {str(key): value for key, value in section.items()}
    prefix = _PREFIXES.get(name, "")  # Accelerate allows keys without it
    keys = {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in keys.items()}
    return _values(keys, table, UNUSED_IN_SECTIONS, source, f"{name}: ")


def _check_float8(section: Any, source: str) -> None:
    """Refuse other backends than torchao in `fp8_config`; most of its keys are for these backends."""
    if is_off(section):
        return
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{source}: fp8_config must contain keys and values, not {section!r}. Write: backend: AO")
    keys = {str(key).removeprefix("fp8_"): value for key, value in section.items()}
    if str(backend := keys.get("backend", "AO")).upper() != "AO":
        raise UnsupportedArgumentError(
            f"{source}: fp8_config: backend: {backend} is not supported; write AO, which is torchao, or mixed_precision: bf16."
        )
    if keys.get("enable_fsdp_float8_all_gather"):
        notice(
            f"{source}: fp8_config: enable_fsdp_float8_all_gather has no effect in a file. In the script: "
            "precision=Float8Precision(all_gather=True), or AORecipeKwargs in kwargs_handlers."
        )


def _values(
    content: Mapping[str, Any],
    table: Mapping[str, Key],
    unused: Mapping[str, tuple[tuple[Any, ...] | str, str]],
    source: str,
    where: str = "",
) -> dict[str, Any]:
    """The converted values; keys without a value are skipped. A notice names unknown keys that turn something off."""
    found, off = {}, []
    for name, value in content.items():
        if name in unused:
            check_unused(f"{source}: {where}{name}", value, *unused[name])
        elif name not in table and is_off(value):
            off.append(f"{where}{name}")
        elif name not in table:
            known = [*table, *unused, *(() if where else SECTIONS)]
            raise UnknownNameError(f"{source}: {where}unknown key {name!r}.{nearest(name, known)}")
        elif value is not None and (table[name].none or str(value).strip().lower() not in _NONE):
            found[name] = checked(name, value, table, f"{source}: {where}{name}")
    if off:
        notice(f"these keys of {source} are unknown and have no effect: {', '.join(off)}.")
    return found
