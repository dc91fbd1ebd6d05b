"""Check the combined settings of a run for contradictions, and complete them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.config.keys import CONFIG_FILE, HOSTFILE, NOT_IN_FILE, SECTIONS
from trainkit.config.settings import Settings
from trainkit.errors import ConfigurationError
from trainkit.registry import find_info_by_section

__all__ = ["checked_settings"]


def checked_settings(settings: Settings) -> Settings:
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
    found = Settings(values, backend, dynamo, settings.source)
    with found.attribute_errors(*found.of_place):
        found.plugin()  # runs its own checks
    return found


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
    given = settings.backend
    file = given.get(CONFIG_FILE)
    twice = [name for name, value in given.items() if name not in NOT_IN_FILE and value != "auto"]
    if file is not None and twice:
        yield (
            f"deepspeed_config_file and {', '.join(twice)} both set the same options. Write them into {file}, or remove "
            "deepspeed_config_file."
        )
    if HOSTFILE in given and settings.get("num_machines") == 1:
        yield "deepspeed_hostfile is for several machines, but num_machines: 1. Remove one of the two keys."
    if file is not None and file != "auto" and not Path(file).is_file():
        yield f"deepspeed_config_file: the file {file!r} does not exist. Write the path of a JSON file for DeepSpeed."


def _dynamo_problems(settings: Settings) -> Iterator[str]:
    if settings.dynamo and settings.dynamo.get("dynamo_backend") is None:
        yield f"{', '.join(settings.dynamo)}: without dynamo_backend nothing is compiled. Add dynamo_backend: inductor"
