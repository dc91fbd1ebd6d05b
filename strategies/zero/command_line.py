"""`--deepspeed_config FILE`: the command-line option of DeepSpeed scripts for their configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkit.errors import ConfigurationError
from trainkit.launch.script_options import option

__all__ = ["deepspeed_config", "options"]


def deepspeed_config(argv: Sequence[str]) -> str | None:
    """Returns the file in `--deepspeed_config FILE` or `--deepspeed_config=FILE` on a command line.

    `deepspeed.add_config_arguments` adds that option to a script's parser.

    Args:
        argv: the arguments of the script, such as `sys.argv[1:]`.

    Returns:
        The unchanged path, or `None` without the option. If the option occurs several times, the last one counts, as in
        argparse.

    Raises:
        ConfigurationError: the option has no value.
    """
    path = option(argv, "deepspeed_config")
    if path == "":
        raise ConfigurationError("--deepspeed_config has no value. Pass the path of a file: --deepspeed_config ds_config.json")
    return path


def options(argv: Sequence[str]) -> dict[str, Any] | None:
    """Returns the arguments of `ZeROStrategy` for a command line; `None` without `--deepspeed_config`."""
    path = deepspeed_config(argv)
    return None if path is None else {"config": path}
