"""The settings of a command: a configuration file, and a flag for each of its keys."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from trainkit.config.keys import (
    BACKEND,
    DYNAMO,
    FLAGS,
    FSDP,
    IGNORED_FLAGS,
    KEYS,
    PARALLELISM,
    UNUSED,
    check_unused,
    convert_value,
)
from trainkit.config.settings import VARIABLE, Settings, read_process_settings
from trainkit.console import notice
from trainkit.errors import ConfigurationError, nearest

__all__ = ["add_config_file", "add_flags", "allow_both_spellings", "settings_from_file", "settings_from_flags", "with_nearest"]

_FSDP = {**FSDP, **PARALLELISM}
_ALL = {**BACKEND, **_FSDP, **DYNAMO, **KEYS}
_SHORT = {  # Accelerate's short flags
    "cpu": ("use_cpu", True),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
    "tpu": ("distributed_type", "XLA"),
    "use_deepspeed": ("distributed_type", "DEEPSPEED"),
    "use_fsdp": ("distributed_type", "FSDP"),
}


def add_config_file(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `--config_file`."""
    parser.add_argument("--config_file", metavar="FILE", help=help)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each key, and Accelerate's short flags."""
    seen = set()
    tables = {"": KEYS, " for DeepSpeed": BACKEND, " for FSDP": _FSDP, " for torch.compile": DYNAMO}
    for title, table in tables.items():
        group = parser.add_argument_group(f"settings{title}")
        for name, key in table.items():
            if name in seen:
                continue
            seen.add(name)
            if key.switch:
                group.add_argument(f"--{name}", action="store_const", const="true", help=key.help)
                group.add_argument(f"--no-{name}", dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
            else:
                group.add_argument(f"--{name}", metavar=key.metavar, help=key.help)
    short = parser.add_argument_group("short flags")
    for flag, (name, value) in _SHORT.items():
        short.add_argument(f"--{flag}", action="store_true", help=f"same as {_flag_text(name, value)}")
    ignored = parser.add_argument_group("flags of accelerate launch without an effect")
    for flag, metavar in IGNORED_FLAGS.items():
        if metavar:
            ignored.add_argument(f"--{flag}", metavar=metavar, help="no effect")
        else:
            ignored.add_argument(f"--{flag}", action="store_true", help="no effect")


def settings_from_flags(args: argparse.Namespace) -> Settings:
    """The settings that were set by flags.

    Raises:
        ConfigurationError: A value is wrong, or flags contradict each other.
    """
    for flag in IGNORED_FLAGS:
        check_unused(f"--{flag}", getattr(args, flag, None), *UNUSED[flag])
    parts: dict[str, dict[str, Any]] = {"values": {}, "backend": {}, "dynamo": {}}
    short = {name: (f"--{flag}", value) for flag, (name, value) in _SHORT.items() if getattr(args, flag, False)}
    for flag, (name, value) in _SHORT.items():
        if getattr(args, flag, False) and short[name][1] != value:
            raise ConfigurationError(f"--{flag} and {short[name][0]} contradict each other. Pass only one of them.")
    for name in _ALL:
        text = getattr(args, name, None)
        value = None if text is None else convert_value(name, text, _ALL, f"--{name}")
        if name in short and value not in (None, short[name][1]):
            raise ConfigurationError(
                f"{_flag_text(name, value)} and {short[name][0]} contradict each other. Pass only one of them."
            )
        if name in short:
            value = short[name][1]
        if value is not None:
            parts["dynamo" if name in DYNAMO else "values" if name in KEYS else "backend"][name] = value
    return Settings(**parts, source="the command line")


def _flag_text(name: str, value: Any) -> str:
    return f"--{name} {value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"


def settings_from_file(args: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    """The settings of `--config_file` or of the default file, if it exists.

    On a node that `trainkit launch --hostfile` started by ssh: the settings of that command.

    Raises:
        ConfigurationError: The file cannot be read, or has a wrong value.
    """
    from trainkit.config.settings_file import default_file, read_settings

    if args.config_file is not None:
        return read_settings(args.config_file)
    if VARIABLE in env and not (env.get("LOCAL_RANK") and env.get("TORCHELASTIC_RUN_ID")):
        return read_process_settings(env)
    default = default_file()
    settings = read_settings(default) if default.exists() else Settings()
    if settings:
        notice(f"using the settings in {default}. For other settings: --config_file FILE; for none: --config_file {os.devnull}")
    return settings


def allow_both_spellings(parser: argparse.ArgumentParser) -> None:
    """Accept every option with underscores or hyphens; `--help` shows one spelling."""
    known = parser._option_string_actions
    for option, action in list(known.items()):
        if option.startswith("--"):
            for other in (option[2:].replace("_", "-"), option[2:].replace("-", "_")):
                known.setdefault(f"--{other}", action)


def with_nearest(
    parser: argparse.ArgumentParser, error: Callable[[str], NoReturn], more: str = ""
) -> Callable[[str], NoReturn]:
    """Extends argparse's function for errors: for an unknown option, it says what to write instead, or the nearest name."""

    def complain(message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if words and words[0] != message.split()[0]:
            known = [option for option in parser._option_string_actions if option.startswith("--")]
            name = words[0].partition("=")[0]
            plain = name.replace("-", "_")
            fix = next((fix for begin, fix in FLAGS.items() if plain.startswith(f"__{begin}")), None)
            message += f": {fix}." if fix else f".{nearest(name, known)}{more}"
        error(message.removesuffix(", ARGS"))

    return complain
