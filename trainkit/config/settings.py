"""`Settings`: the values of a configuration, and what they mean.

`trainkit launch` hands them to its processes in an environment variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainkit.config.keys import CONFIG_FILE, HOSTFILE, MULTINODE_LAUNCHER, SECTIONS
from trainkit.console import warn
from trainkit.errors import ConfigurationError
from trainkit.registry import StrategyInfo, find_info_by_type, load

__all__ = ["VARIABLE", "Plugin", "Settings", "carry", "debugging", "read_process_settings", "with_environment"]


_COMPILER = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "fullgraph": "dynamo_use_fullgraph",
    "dynamic": "dynamo_use_dynamic",
    "use_regional_compilation": "dynamo_use_regional_compilation",
}
_NOT_OF_PLUGIN = (CONFIG_FILE, HOSTFILE, MULTINODE_LAUNCHER)


class Plugin(Protocol):
    """The options of a strategy with its own backend, in Accelerate's form."""

    @property
    def strategy(self) -> str:
        """The short name of the strategy."""

    @property
    def source(self) -> str | None:
        """The file of the options, if they are from a file."""

    @property
    def divides_at_once(self) -> bool:
        """Whether models of `transformers` are sharded while they are built."""

    def loop_option(self, name: str) -> Any:
        """The value of an option for accumulation, clipping or activation checkpointing; `None`: not set."""

    def options_for(self, short: bool, processes: int, nodes: int | None, without: Collection[str]) -> dict[str, Any]:
        """The options of the strategy, for 16-bit or float32 parameters and a number of processes and of nodes.

        `without`: options of the loop that its arguments set.
        """

    def describe(self) -> dict[str, Any]:
        """The options to show to the user, by name."""


@dataclass(frozen=True)
class Settings:
    """The values of a configuration. Keys that are not set are not in the mappings.

    Attributes:
        values: Keys of `KEYS`, except `dynamo_backend`.
        backend: Keys of the sections of strategies, except `gradient_accumulation_steps`.
        dynamo: Keys of `DYNAMO`.
        source: The origin of the values, for messages.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    backend: Mapping[str, Any] = field(default_factory=dict)
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def out_of(cls, values: dict[str, Any], backend: dict[str, Any], dynamo: dict[str, Any], source: str) -> Settings:
        """Settings from parts of a file; a `ConfigurationError` if a key has different values in two parts."""
        for name, home, other in (("gradient_accumulation_steps", values, backend), ("dynamo_backend", dynamo, values)):
            if name in other:
                value = other.pop(name)
                if home.setdefault(name, value) != value:
                    raise ConfigurationError(f"{source} sets {name} twice, to {home[name]} and to {value}. Remove one of them.")
        return cls(values, backend, dynamo, source)

    def __bool__(self) -> bool:
        return bool(self.values or self.backend or self.dynamo)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, in any part."""
        return {**self.dynamo, **self.backend, **self.values}.get(name, default)

    def over(self, below: Settings) -> Settings:
        """These settings, completed by `below`.

        Keys of `below` for another backend are not used, nor is its `machine_rank` if these settings are for one machine.
        """
        theirs = dict(below.backend)
        if "distributed_type" in self.values:
            theirs = {name: value for name, value in theirs.items() if name in self.own_keys}
        if self.values.get("num_machines") == 1:
            below = below.without("machine_rank")
        return Settings(
            {**below.values, **self.values},
            theirs | dict(self.backend),
            {**below.dynamo, **self.dynamo},
            " and ".join(settings.source for settings in (self, below) if settings),
        )

    def without(self, *names: str) -> Settings:
        """These settings without some keys."""
        parts = (self.values, self.backend, self.dynamo)
        values, backend, dynamo = ({name: part[name] for name in part if name not in names} for part in parts)
        return replace(self, values=values, backend=backend, dynamo=dynamo)

    @contextmanager
    def attribute_errors(self, *names: str) -> Iterator[None]:
        """In this context an error names these keys as its cause, instead of arguments that the user did not write."""
        values = ((name, self.get(name)) for name in names)
        written = ", ".join(f"{name}: {_yaml_text(value)}" for name, value in values if value is not None)
        try:
            yield
        except ConfigurationError as error:
            if not written or str(error).startswith(self.source):
                raise
            raise type(error)(f"{self.source} ({written}): {str(error).removeprefix('config: ')}") from error

    @property
    def of_place(self) -> tuple[str, ...]:
        """The keys for the device and the strategy."""
        return ("distributed_type", "use_cpu", *self.backend)

    @property
    def info(self) -> StrategyInfo | None:
        """The declaration of the strategy that `distributed_type` means; `None` if it is not set."""
        return find_info_by_type(self.values.get("distributed_type"))

    @property
    def own_keys(self) -> Collection[str]:
        """The keys of the strategy's own sections in the file."""
        return () if self.info is None else {key for section in self.info.sections for key in SECTIONS[section]}

    @property
    def strategy(self) -> str | None:
        """The strategy that "auto" means; `None` if it is not set, or if `plugin` defines it."""
        info = self.info
        return None if info is None or info.plugin is not None else info.file_types[self.values["distributed_type"]]

    @property
    def devices(self) -> int | None:
        """The number of devices of this machine, for a strategy with one process per machine."""
        if self.info is None or not self.info.one_process or "num_processes" not in self.values:
            return None
        return int(self.values["num_processes"]) // int(self.values.get("num_machines", 1))

    @property
    def compiling(self) -> dict[str, Any]:
        """The arguments of `trainkit.utils.TorchDynamoPlugin`; empty if not set."""
        return {name: self.get(key) for name, key in _COMPILER.items() if self.get(key) not in (None, "default")}

    def plugin(self) -> Plugin | None:
        """The options of the strategy's sections, or `None` without one.

        Raises:
            ConfigurationError: Contradictory keys, or a file of the backend that cannot be read.
        """
        if self.info is None or self.info.plugin is None:
            return None
        options = {name: value for name, value in self.backend.items() if name not in _NOT_OF_PLUGIN and value != "auto"}
        file, steps = self.backend.get(CONFIG_FILE), self.values.get("gradient_accumulation_steps")
        if file is None and steps != "auto" and "gradient_accumulation_steps" in self.own_keys:
            options["gradient_accumulation_steps"] = steps
        plugin: Plugin = load(self.info.plugin)(*(() if file is None else (file,)), **options)
        return plugin


def _yaml_text(value: Any) -> str:
    """The value in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


VARIABLE = "TRAINKIT_SETTINGS"
_DEBUG = ("TRAINKIT_DEBUG_MODE", "ACCELERATE_DEBUG_MODE")
_YES = ("1", "true", "yes", "on", "y", "t")
_OF_ACCELERATE = (
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"),
)

# Keys for the launcher only.
_OF_LAUNCHER = (
    *("machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "num_cpu_threads_per_process", "debug"),
    *(HOSTFILE, MULTINODE_LAUNCHER),
)
_COUNTS = ("num_processes", "num_machines")


def carry(settings: Settings, always: bool = False) -> dict[str, str]:
    """The environment variables for the processes of a launch.

    Args:
        settings: The settings of the launch.
        always: Set the variable for empty settings too: for the launcher on another node, which would read its own file.
    """
    debug = settings.get("debug")
    variables = {} if debug is None else {_DEBUG[0]: str(int(debug))}
    carried = settings.without(*_OF_LAUNCHER, *(() if settings.devices else _COUNTS))
    if carried or always:
        parts = {"values": carried.values, "backend": carried.backend, "dynamo": carried.dynamo}
        variables[VARIABLE] = json.dumps({"source": carried.source, **{name: dict(part) for name, part in parts.items()}})
    return variables


def read_process_settings(env: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process; `env` defaults to `os.environ`."""
    env = os.environ if env is None else env
    if VARIABLE in env:
        return Settings(**json.loads(env[VARIABLE]))
    foreign = [name for name in _OF_ACCELERATE if env.get(name, "no").lower() not in ("", "no", "false")]
    if foreign:
        warn(
            f"accelerate launch has set {', '.join(foreign)}, which trainkit ignores. Start the script with: trainkit launch "
            "--config_file FILE script.py, which reads Accelerate's files."
        )
    return Settings()


def debugging(env: Mapping[str, str] | None = None) -> bool:
    """Whether to compare the calls of all processes: `TRAINKIT_DEBUG_MODE=1`, else `ACCELERATE_DEBUG_MODE=yes`."""
    return _debugging(os.environ if env is None else env) is True


def with_environment(settings: Settings, flags: Settings, env: Mapping[str, str]) -> Settings:
    """The settings with debug mode from the flags, else from the environment; otherwise unchanged (from a file)."""
    debug = _debugging(env)
    if debug is None or "debug" in flags.values:
        return settings
    return replace(settings, values={**settings.values, "debug": debug})


def _debugging(env: Mapping[str, str]) -> bool | None:
    """Debug mode in the environment; `None`: not set."""
    return next((env[name].lower() in _YES for name in _DEBUG if env.get(name)), None)
