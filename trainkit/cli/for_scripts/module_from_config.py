"""Creates a module from the configuration in a checkpoint that `TrainkitCLI` saved."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

import trainkit.cli.for_scripts.argument_parser  # noqa: F401 - sets what a configuration may create
from trainkit.cli.for_scripts.config_context import without_classes
from trainkit.errors import CheckpointError
from trainkit.module.hparams import configured

__all__ = ["module_from_config"]


def module_from_config(kind: type, class_path: str, values: Mapping[str, Any], source: str) -> Any:
    """A module, created with the arguments that a configuration describes.

    A checkpoint may come from anywhere. It names classes, but imports nothing: each class must be in a module that the program
    has imported.

    Args:
        kind: The class of the module.
        class_path: Its class path, as saved.
        values: The arguments of `__init__`, as in a configuration file: an object is `class_path` and `init_args`.
        source: The checkpoint, for messages.

    Raises:
        CheckpointError: A class is not imported, or a value does not fit the type of its argument.
    """
    for path in _class_paths(values):
        module = path.rpartition(".")[0]
        if module not in sys.modules:
            raise CheckpointError(
                f"{source} names the class {path}, whose module is not imported, and loading a checkpoint imports nothing. "
                f"If you trust the checkpoint, import it first: import {module or path}"
            )
    parser = ArgumentParser(exit_on_error=False)
    known = {name.split(".")[1] for name in parser.add_class_arguments(kind, "module", fail_untyped=False)}
    # jsonargparse knows no names for **kwargs that __init__ keeps: `dict_kwargs` of a configuration file
    keeps = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
    others = {name: value for name, value in values.items() if keeps and name not in known}
    try:
        config = parser.parse_object({"module": {name: value for name, value in values.items() if name not in others}})
    except ArgumentError as error:
        raise CheckpointError(
            f"{source}: the arguments do not fit {kind.__name__}. Expected the types of its annotations. Pass the arguments "
            f"that have changed: {kind.__name__}.load_from_checkpoint(path, name=value). {error}"
        ) from error

    def create(created: type, **arguments: Any) -> Any:
        with configured(kind, class_path, values):
            return created(**without_classes(arguments), **others)

    return parser.instantiate(config, instantiators=[(create, kind, False)]).module


def _class_paths(value: Any) -> Iterator[str]:
    """Every `class_path` in a configuration."""
    if isinstance(value, Mapping):
        if isinstance(path := value.get("class_path"), str):
            yield path
        for item in value.values():
            yield from _class_paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _class_paths(item)
