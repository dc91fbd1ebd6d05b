"""Reads and writes configuration files, which may be Accelerate's, and checks the combined settings of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainkit.config.keys import (
    CONFIG_FILE,
    HOSTFILE,
    KEYS,
    NOT_IN_FILE,
    SECTIONS,
    UNUSED,
    UNUSED_IN_SECTIONS,
    Key,
    check_unused,
    convert_value,
    is_off,
)
from trainkit.config.settings import Settings
from trainkit.console import notice
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.registry import find_info_by_section

__all__ = [
    "check_settings",
    "default_file",
    "read_content",
    "read_settings",
    "shard_with_version_2",
    "write_content",
    "write_settings",
]


_OLD = {"fp16": "mixed_precision: fp16"}
_PREFIXES = {"dynamo_config": "dynamo_", "fsdp_config": "fsdp_"}
_NONE = ("", "none", "null")
_SHARDING_KEYS = ("fsdp_reshard_after_forward", "fsdp_sharding_strategy")
_RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")
_FIRST_VERSION_ONLY = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")


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
    content = read_content(path)
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


def read_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys and values of a configuration file as they are; empty for an empty file.

    Raises:
        ConfigurationError: It cannot be read, or has no keys.
    """
    path, source = Path(path), str(path)
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
    backend = keys.get("backend", "AO")
    if str(backend).upper() != "AO":
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
    values, off = {}, []
    for name, value in content.items():
        if name in unused:
            check_unused(f"{source}: {where}{name}", value, *unused[name])
        elif name not in table and is_off(value):
            off.append(f"{where}{name}")
        elif name not in table:
            known = [*table, *unused, *(() if where else SECTIONS)]
            raise UnknownNameError(f"{source}: {where}unknown key {name!r}.{nearest(name, known)}")
        elif value is not None and (table[name].none or str(value).strip().lower() not in _NONE):
            values[name] = convert_value(name, value, table, f"{source}: {where}{name}")
    if off:
        notice(f"these keys of {source} are unknown and have no effect: {', '.join(off)}.")
    return values


def write_settings(settings: Settings, path: str | os.PathLike[str]) -> Path:
    """Write or replace a configuration file, JSON if its name ends with `.json`; its folder is created.

    Raises:
        ConfigurationError: It cannot be written.
    """
    return write_content(_content_of(settings), path)


def write_content(content: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write or replace a file with these keys and values; as `write_settings`."""
    target = Path(os.path.realpath(path))  # keep a symbolic link
    if target.exists() and not target.is_file():
        raise ConfigurationError(f"{path} exists and is not a file. Choose another path.")
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


def _content_of(settings: Settings) -> dict[str, Any]:
    """The content, which Accelerate reads except for `gradient_accumulation_steps` without DeepSpeed."""
    values, of_sections = dict(settings.values), {**settings.backend, **settings.dynamo}
    if "gradient_accumulation_steps" in values and "gradient_accumulation_steps" in settings.own_keys:
        of_sections["gradient_accumulation_steps"] = values.pop("gradient_accumulation_steps")
    sections = {
        section: {name: value for name, value in of_sections.items() if name in keys} for section, keys in SECTIONS.items()
    }
    content = {"compute_environment": "LOCAL_MACHINE", **values, **{name: part for name, part in sections.items() if part}}
    return dict(sorted(content.items()))


def shard_with_version_2(content: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """The content of a file of Accelerate for FSDP1 with the keys for FSDP2, and a text about each difference.

    Raises:
        UnsupportedArgumentError: A sharding strategy that FSDP2 does not have.
    """
    section = content.get("fsdp_config")
    if not isinstance(section, Mapping) or not section:
        return dict(content), ["no fsdp_config, so nothing was changed"]
    keys = {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in section.items()}
    if str(keys.get("fsdp_version", 1)) == "2":
        return dict(content), ["it is of FSDP2, so nothing was changed"]
    new = {name: value for name, value in keys.items() if name not in (*_FIRST_VERSION_ONLY, *_SHARDING_KEYS)}
    notes = [f"without {name}: FSDP2 does not have it" for name in _FIRST_VERSION_ONLY if name in keys]
    for name in _SHARDING_KEYS:
        if keys.get(name) is not None:
            read = convert_value(name, keys[name], SECTIONS["fsdp_config"], f"{source}: fsdp_config: {name}")
            new["fsdp_reshard_after_forward"] = reshard = read if isinstance(read, bool) else read in _RESHARDING
            notes.append(f"fsdp_reshard_after_forward: {str(reshard).lower()}, which was {name}: {keys[name]}")
            if str(read).startswith("HYBRID"):
                notes.append("one replica on each node, as before, needs parallelism_config_dp_replicate_size: number of nodes")
    return {**content, "fsdp_config": {**new, "fsdp_version": 2}}, notes


def check_settings(settings: Settings) -> Settings:
    """The settings of a run, without the values `auto` and `no`, which mean that a key is not set.

    Raises:
        ConfigurationError: Two keys contradict each other, or a key needs another one.
    """
    if not settings:
        return settings
    for problem in (
        *_contradictions(settings),
        *_section_problems(settings),
        *_backend_problems(settings),
        *_dynamo_problems(settings),
    ):
        raise ConfigurationError(f"{settings.source}: {problem}")
    values = {name: value for name, value in settings.values.items() if value != "auto"}
    backend = {name: value for name, value in settings.backend.items() if value != "auto"}
    if CONFIG_FILE in backend:
        backend[CONFIG_FILE] = str(Path(backend[CONFIG_FILE]).absolute())  # the script may change the working folder
    if values.get("distributed_type") == "MULTI_CPU":
        values["use_cpu"] = True
    dynamo: dict[str, Any] = {} if settings.dynamo.get("dynamo_backend") == "no" else dict(settings.dynamo)
    checked = Settings(values, backend, dynamo, settings.source)
    with checked.attribute_errors(*checked.of_place):
        checked.plugin()  # runs its own checks
    return checked


def _contradictions(settings: Settings) -> Iterator[str]:
    kind, processes = settings.get("distributed_type"), settings.get("num_processes", 1)
    machines, rank = settings.get("num_machines", 1), settings.get("machine_rank", 0)
    if rank >= machines and "num_machines" in settings.values:
        yield f"machine_rank: {rank} is too large for num_machines: {machines}. Write a number from 0 to {machines - 1}."
    if "num_processes" in settings.values and processes % machines:
        yield (
            f"num_processes: {processes} is the total of all machines, and is not divisible by num_machines: {machines}. "
            f"Write num_processes: {machines * max(1, round(processes / machines))}"
        )
    if machines > 1 and settings.get("main_process_port") == 0:
        yield (
            f"main_process_port: 0 means any free port, but num_machines: {machines} needs a fixed port. Write "
            "main_process_port: 29500"
        )
    if kind == "NO" and (processes > 1 or machines > 1):
        more = f"num_processes: {processes}" if processes > 1 else f"num_machines: {machines}"
        yield f"distributed_type: NO means one process, but {more}. Write distributed_type: MULTI_GPU or MULTI_CPU."
    if kind == "MULTI_CPU" and settings.get("use_cpu") is False:
        yield (
            "distributed_type: MULTI_CPU and use_cpu: false contradict each other. Remove use_cpu, or write "
            "distributed_type: MULTI_GPU."
        )


def _section_problems(settings: Settings) -> Iterator[str]:
    kind = settings.get("distributed_type") or "not set"
    for section, keys in SECTIONS.items():
        strange = [name for name in settings.backend if name in keys and name not in settings.own_keys]
        if strange:
            names, belong = ", ".join(strange), "belongs" if len(strange) == 1 else "belong"
            owner = find_info_by_section(section).distributed_type
            yield (
                f"{names} {belong} to {section}, but distributed_type is {kind}. Write distributed_type: {owner} "
                f"(--use_{str(owner).lower()}), or remove {names}."
            )


def _backend_problems(settings: Settings) -> Iterator[str]:
    options = settings.backend
    file = options.get(CONFIG_FILE)
    twice = [name for name, value in options.items() if name not in NOT_IN_FILE and value != "auto"]
    if file is not None and twice:
        yield (
            f"deepspeed_config_file and {', '.join(twice)} both set the same options. Write them into {file}, or remove "
            "deepspeed_config_file."
        )
    if HOSTFILE in options and settings.get("num_machines") == 1:
        yield "deepspeed_hostfile is for several machines, but num_machines: 1. Remove one of the two keys."
    if file is not None and file != "auto" and not Path(file).is_file():
        yield f"deepspeed_config_file: the file {file!r} does not exist. Write the path of a JSON file for DeepSpeed."


def _dynamo_problems(settings: Settings) -> Iterator[str]:
    if settings.dynamo and settings.dynamo.get("dynamo_backend") is None:
        yield f"{', '.join(settings.dynamo)}: without dynamo_backend nothing is compiled. Add dynamo_backend: inductor"
