"""What ``trainkit launch`` tells the processes that it starts: the settings, in an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace

from trainkit.config.keys import HOSTFILE, MULTINODE_LAUNCHER
from trainkit.config.settings import Settings
from trainkit.console import warn

__all__ = ["VARIABLE", "Settings", "carried", "carry", "debugging", "with_environment"]

VARIABLE = "TRAINKIT_SETTINGS"
_DEBUG = ("TRAINKIT_DEBUG_MODE", "ACCELERATE_DEBUG_MODE")
_YES = ("1", "true", "yes", "on", "y", "t")
_OF_ACCELERATE = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")

# What says where processes run is for the launcher, and nothing for them.
_OF_LAUNCHER = (
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "debug",
    HOSTFILE,
    MULTINODE_LAUNCHER,
)
_COUNTS = ("num_processes", "num_machines")


def carry(settings: Settings, always: bool = False) -> dict[str, str]:
    """The environment variables for processes that are to run with these settings.

    Args:
        settings: of the launch.
        always: also where nothing is left to be said, for a launcher elsewhere, which would look for a file of its own.
    """
    debug = settings.get("debug")
    found = {} if debug is None else {_DEBUG[0]: str(int(debug))}
    told = settings.without(*_OF_LAUNCHER, *(() if settings.devices else _COUNTS))
    if told or always:
        parts = {"values": told.values, "backend": told.backend, "dynamo": told.dynamo}
        found[VARIABLE] = json.dumps({"source": told.source, **{name: dict(part) for name, part in parts.items()}})
    return found


def carried(env: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process.

    Args:
        env: the environment variables; default: ``os.environ``.
    """
    env = os.environ if env is None else env
    if VARIABLE in env:
        return Settings(**json.loads(env[VARIABLE]))
    foreign = [name for name in _OF_ACCELERATE if env.get(name, "no").lower() not in ("", "no", "false")]
    if foreign:
        warn(
            f"accelerate launch has set {', '.join(foreign)}, which are not read. Start the script with: trainkit launch "
            "--config_file FILE script.py, which reads Accelerate's files."
        )
    return Settings()


def debugging(env: Mapping[str, str] | None = None) -> bool:
    """Whether the calls of all processes are to be compared: ``TRAINKIT_DEBUG_MODE=1``, or ``ACCELERATE_DEBUG_MODE=yes``.

    Where both are set, the first one counts.
    """
    return _debugging(os.environ if env is None else env) is True


def with_environment(settings: Settings, flags: Settings, env: Mapping[str, str]) -> Settings:
    """The settings of a launch: of debug mode what an option says, else the environment, else a file.

    Args:
        settings: of the options and the file.
        flags: of the options.
        env: the environment variables.
    """
    debug = _debugging(env)
    if debug is None or "debug" in flags.values:
        return settings
    return replace(settings, values={**settings.values, "debug": debug})


def _debugging(env: Mapping[str, str]) -> bool | None:
    """What the environment says of it; ``None``: nothing."""
    return next((env[name].lower() in _YES for name in _DEBUG if env.get(name)), None)
