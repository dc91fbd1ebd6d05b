"""The settings of a launch in an environment variable, which its processes read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace

from trainkit.config.keys import HOSTFILE, MULTINODE_LAUNCHER
from trainkit.config.settings import Settings
from trainkit.console import warn

__all__ = ["VARIABLE", "Settings", "carry", "debugging", "inherited_settings", "with_environment"]

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
    found = {} if debug is None else {_DEBUG[0]: str(int(debug))}
    own = settings.without(*_OF_LAUNCHER, *(() if settings.devices else _COUNTS))
    if own or always:
        parts = {"values": own.values, "backend": own.backend, "dynamo": own.dynamo}
        found[VARIABLE] = json.dumps({"source": own.source, **{name: dict(part) for name, part in parts.items()}})
    return found


def inherited_settings(env: Mapping[str, str] | None = None) -> Settings:
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
