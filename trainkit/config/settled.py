"""Settings of all places put together → those that a run has: held against each other, with what one says for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.config.keys import CONFIG_FILE, HOSTFILE, NOT_IN_FILE
from trainkit.config.settings import Settings
from trainkit.errors import ConfigurationError

__all__ = ["settled"]


def settled(settings: Settings) -> Settings:
    """The settings of a run; ``auto`` and ``no`` of single keys, which leave things open, are gone.

    Raises:
        ConfigurationError: two keys contradict each other, or one lacks another.
    """
    if not settings:
        return settings
    _check_processes(settings)
    _check_backend(settings)
    values = {name: value for name, value in settings.values.items() if value != "auto"}
    backend = {name: value for name, value in settings.backend.items() if value != "auto"}
    file = backend.get(CONFIG_FILE)
    if file is not None and not Path(file).is_file():
        raise ConfigurationError(f"{settings.source}: deepspeed_config_file: there is no file {file!r}.")
    if file is not None:
        backend[CONFIG_FILE] = str(Path(file).absolute())  # the script may change the folder
    if values.get("distributed_type") == "MULTI_CPU":
        values["use_cpu"] = True
    found = Settings(values, backend, _dynamo(settings), settings.source)
    with found.blamed(*found.of_place):
        found.plugin()  # its own checks
    return found


def _check_processes(settings: Settings) -> None:
    kind, processes = settings.get("distributed_type"), settings.get("num_processes", 1)
    machines, rank = settings.get("num_machines", 1), settings.get("machine_rank", 0)
    if rank >= machines and "num_machines" in settings.values:
        raise ConfigurationError(
            f"{settings.source}: machine_rank: {rank}, and num_machines: {machines}. The numbers go from 0 to {machines - 1}."
        )
    if "num_processes" in settings.values and processes % machines:
        raise ConfigurationError(
            f"{settings.source}: num_processes: {processes} is of all machines together, and cannot be divided by "
            f"num_machines: {machines}. Write num_processes: {machines * max(1, round(processes / machines))}"
        )
    if machines > 1 and settings.get("main_process_port") == 0:
        raise ConfigurationError(
            f"{settings.source}: main_process_port: 0 is any free port, and num_machines: {machines} are to meet at one. Write "
            "main_process_port: 29500"
        )
    if kind == "NO" and (processes > 1 or machines > 1):
        more = f"num_processes: {processes}" if processes > 1 else f"num_machines: {machines}"
        raise ConfigurationError(
            f"{settings.source}: distributed_type: NO is one process, and {more}. Write distributed_type: MULTI_GPU or "
            "MULTI_CPU."
        )
    if kind == "MULTI_CPU" and settings.get("use_cpu") is False:
        raise ConfigurationError(
            f"{settings.source}: distributed_type: MULTI_CPU and use_cpu: false contradict each other. Leave use_cpu out, or "
            "write distributed_type: MULTI_GPU."
        )


def _check_backend(settings: Settings) -> None:
    given, kind = settings.backend, settings.get("distributed_type")
    if given and not settings.takes_section:
        said = "is not given" if kind is None else f"is {kind}"
        raise ConfigurationError(
            f"{settings.source}: {', '.join(given)} {'is' if len(given) == 1 else 'are'} for DeepSpeed, and distributed_type "
            f"{said}. Write distributed_type: DEEPSPEED (--use_deepspeed), or leave out what is for it."
        )
    if CONFIG_FILE in given:
        beside = [name for name, value in given.items() if name not in NOT_IN_FILE and value != "auto"]
        if beside:
            raise ConfigurationError(
                f"{settings.source}: deepspeed_config_file and {', '.join(beside)} both say it. Write it into "
                f"{given[CONFIG_FILE]}, or leave the file out."
            )
    if HOSTFILE in given and settings.get("num_machines") == 1:
        raise ConfigurationError(
            f"{settings.source}: deepspeed_hostfile names machines, and num_machines: 1. Leave one of them out."
        )


def _dynamo(settings: Settings) -> dict[str, Any]:
    dynamo = dict(settings.dynamo)
    backend = dynamo.get("dynamo_backend")
    if backend is None and dynamo:
        raise ConfigurationError(
            f"{settings.source}: {', '.join(dynamo)} without dynamo_backend compiles nothing. Add dynamo_backend: inductor"
        )
    return {} if backend == "no" else dynamo
