"""``--deepspeed_config FILE``: how scripts for DeepSpeed get their configuration from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkit.errors import ConfigurationError
from trainkit.launch.script_options import option

__all__ = ["deepspeed_config", "options"]


def deepspeed_config(argv: Sequence[str]) -> str | None:
    """The file that a command line gives as ``--deepspeed_config FILE`` or ``--deepspeed_config=FILE``.

    ``deepspeed.add_config_arguments`` adds that option to a script's parser.

    Args:
        argv: the arguments of the script, as ``sys.argv[1:]``.

    Returns:
        The path as it was given; of several the last one, as in argparse; ``None`` if there is none.

    Raises:
        ConfigurationError: the option has no value.
    """
    path = option(argv, "deepspeed_config")
    if path == "":
        raise ConfigurationError("--deepspeed_config needs the path of a file: --deepspeed_config ds_config.json")
    return path


def options(argv: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of ``ZeROStrategy`` that a command line gives; ``None`` if it gives no configuration."""
    path = deepspeed_config(argv)
    return None if path is None else {"config": path}
