"""Creates a module from the configuration in a checkpoint that `TrainkitCLI` saved."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

import trainkit.cli.for_scripts.argument_parser  # noqa: F401 - sets what a configuration may create
from trainkit.cli.for_scripts.config_context import without_classes
from trainkit.cli.for_scripts.saved_arguments import SavedArguments
from trainkit.errors import CheckpointError
from trainkit.module.hparams import configured
from trainkit.module.trusted import Trust

__all__ = ["module_from_config"]


def module_from_config(
    kind: type, class_path: str, saved: Mapping[str, Any], overrides: Mapping[str, Any], trust: Trust, source: str
) -> Any:
    """A module, created with the arguments that a configuration describes.

    A checkpoint may come from anywhere: a class or a function that it names is that of the default, or is in a package that is
    trusted, or the caller passes it.

    Args:
        kind: The class of the module.
        class_path: Its class path, as saved.
        saved: The arguments of `__init__` in the checkpoint, as in a configuration file.
        overrides: The arguments of the caller.
        trust: What may be imported.
        source: The checkpoint, for messages.

    Raises:
        CheckpointError: An argument was a class, a function or an object, or a value does not fit the type of its argument.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "module", fail_untyped=False)
    given = SavedArguments(parser, trust).sort("module", {name: one for name, one in saved.items() if name not in overrides})
    if given.refused:
        raise _not_followed(kind, given.refused, source)
    # jsonargparse knows no names for **kwargs that __init__ keeps: `dict_kwargs` of a configuration file
    keeps = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
    known = {action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("module.")}
    others = {**given.unknown, **{name: value for name, value in overrides.items() if name not in known}}
    _do_not_require(parser, given.data)
    try:
        if others and not keeps:
            raise ArgumentError(None, f"It has no arguments {', '.join(map(repr, others)):.200}")
        values = {**given.values, **{name: value for name, value in overrides.items() if name in known}}
        config = parser.parse_object({"module": values})
    except ArgumentError as error:
        raise CheckpointError(
            f"{source}: the arguments do not fit {kind.__name__}. Expected the types of its annotations. Pass the arguments "
            f"that have changed: {kind.__name__}.load_from_checkpoint(path, name=value). {error}"
        ) from error

    def create(created: type, /, **arguments: Any) -> Any:
        with configured(kind, class_path, {**saved, **overrides}):
            return created(**{**without_classes(arguments), **given.data, **others})

    return parser.instantiate(config, instantiators=[(create, kind, False)]).module


def _do_not_require(parser: ArgumentParser, names: Container[str]) -> None:
    """Let a parser do without arguments that the class gets and the parser does not see."""
    for action in parser._actions:
        if action.dest.removeprefix("module.") in names:
            action.required = False


def _not_followed(kind: type, refused: Mapping[str, Any], source: str) -> CheckpointError:
    """An error for arguments whose saved values name classes, functions or objects."""
    names = list(dict.fromkeys(path.partition(".")[0] for path in refused))
    saved = ", ".join(f"{path} ({value!r:.100})" for path, value in refused.items())
    passed = ", ".join(f"{name}=..." for name in names)
    return CheckpointError(
        f"{source}: the saved values of these arguments of {kind.__name__} may name code, and loading a checkpoint imports "
        f"nothing: {saved:.500}. Expected the class, function or object itself. "
        f"Fix: {kind.__name__}.load_from_checkpoint(path, {passed}). "
        "If you trust the checkpoint, name the packages whose classes and functions it may create: "
        f"{kind.__name__}.load_from_checkpoint(path, trust=['mypackage.'])"
    )
