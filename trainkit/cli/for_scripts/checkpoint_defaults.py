"""The hyper-parameters of a checkpoint as defaults of a command line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from inspect import isclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from trainkit.checkpoint.identify import is_checkpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.cli.for_scripts.argument_parser import TrainkitArgumentParser, class_of
from trainkit.cli.for_scripts.saved_arguments import SavedArguments, Sorted, imported, sort_for
from trainkit.console import notice
from trainkit.launch.script_options import option, options
from trainkit.module.trusted import Trust
from trainkit.paths import local_path
from trainkit.trainer.find_checkpoint import WORDS

__all__ = ["checkpoint_defaults"]


def checkpoint_defaults(parser: TrainkitArgumentParser, arguments: Sequence[str], kind: Any, subclass_mode: bool) -> None:
    """Set the defaults of the module's arguments to those that the checkpoint of `--ckpt_path` was saved with.

    The checkpoint imports nothing: an argument whose saved value names a class or a function must be given, unless that is the
    default, or `--trust` names its package.

    Args:
        parser: The parser of the subcommand.
        arguments: The command line.
        kind: The class of the module, or what creates it.
        subclass_mode: The module's class is an argument too.
    """
    trust = Trust(options(arguments, "trust"), "--trust")
    path = option(arguments, "ckpt_path")
    if not path or path in WORDS or not is_checkpoint(local_path(path, "ckpt_path")):
        if trust:
            parser.error(f"--trust is for the hyper-parameters of --ckpt_path=PATH, and --ckpt_path={path} is no checkpoint")
        return  # the Trainer finds it, or says what is wrong
    state = open_checkpoint(path).read({"state"}).state
    values: dict[str, Any] = dict(state.get("hyper_parameters", {}))
    if not values:
        return
    if subclass_mode:
        class_path = state.get("hyper_parameters_class") or state["module"]
        _set_class(parser, arguments, kind, class_path, values, trust)
    else:
        _set_arguments(parser, values, trust, path)


def _set_arguments(parser: TrainkitArgumentParser, values: Mapping[Any, Any], trust: Trust, path: str) -> None:
    saved = SavedArguments(parser, trust).sort("model", values)
    unused = list(map(str, saved.unknown))
    for name, value in saved.values.items():
        try:
            parser.set_defaults({f"model.{name}": value})
        except KeyError:  # a link sets it
            unused.append(name)
    if unused:
        notice(f"the command line sets these hyper-parameters of {path} itself: {', '.join(unused)}.")
    for name, value in {**saved.data, **saved.refused}.items():
        parser.require(f"model.{name}", _not_followed(name, value))


def _set_class(
    parser: TrainkitArgumentParser,
    arguments: Sequence[str],
    kind: Any,
    class_path: Any,
    values: Mapping[Any, Any],
    trust: Trust,
) -> None:
    """Set the class of the module, which is that of the command line or is trusted, and its arguments."""
    kind = class_of(kind)
    in_files = _in_files(arguments)
    given = option(arguments, "model") or option(arguments, "model.class_path") or in_files.get("class_path")
    name = str(class_path).rpartition(".")[2]
    if given is not None and given.rpartition(".")[2] != name:
        return  # another class, which has other arguments
    found = _own_class(kind, given or kind.__name__, name) or trust.find(class_path)
    if not isclass(found) or not issubclass(found, kind):
        parser.error(
            f"the checkpoint of --ckpt_path has a module of the class {class_path!r:.200}, and a checkpoint imports nothing. "
            "Expected the class on the command line: --model=mypackage.MyModule. If you trust the checkpoint, name the package "
            "of the class: --trust mypackage."
        )
    saved = sort_for(found, values, trust)
    for one, value in {**saved.data, **saved.refused}.items():
        if one not in (in_files.get("init_args") or {}) and not _is_given(one, arguments):
            parser.error(f"--model.{one} is required: {_not_followed(one, value)}")
    parser.set_defaults({"model": _configuration(found, given or f"{found.__module__}.{found.__qualname__}", saved)})


def _is_given(name: str, arguments: Sequence[str]) -> bool:
    """Whether a command line has an argument of the module."""
    return any(argument.startswith((f"--model.{name}", f"--model.init_args.{name}")) for argument in arguments)


def _configuration(kind: type, class_path: str, saved: Sorted) -> dict[str, Any]:
    """The class of the module and what a parser may see of its arguments; a notice names those that the class has not."""
    init: dict[str, Any] = {"class_path": class_path, "init_args": saved.values}
    more = {one: value for one, value in saved.unknown.items() if isinstance(one, str) and one.isidentifier()}
    if more and any(one.kind is one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values()):
        init["dict_kwargs"] = more
    elif saved.unknown:
        notice(f"ignoring hyper-parameters that {kind.__name__} does not accept: {', '.join(map(str, saved.unknown))}.")
    return init


def _own_class(kind: Any, given: str, name: str) -> Any:
    """The class of the program with a name or path that the command line gives; `None` if it has another name than `name`."""
    if given.rpartition(".")[2] != name:
        return None
    if "." in given:
        try:
            return imported(given)
        except ImportError:
            return None
    kinds = [kind]
    for one in kinds:  # which grows
        kinds += one.__subclasses__()
    return next((one for one in kinds if one.__name__ == given), None)


def _in_files(arguments: Sequence[str]) -> dict[str, Any]:
    """What the configuration files of a command line say of the module."""
    found: dict[str, Any] = {}
    for given in [*options(arguments, "config"), *(two for one, two in pairwise(arguments) if one == "-c")]:
        try:
            text = Path(given).read_text("utf-8") if Path(given).is_file() else given
            content = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # the parser says what is wrong
        content = content.get(arguments[0], content) if isinstance(content, dict) else {}
        if isinstance(content.get("model"), dict):
            found.update(content["model"])
        elif isinstance(content.get("model"), str):
            found["class_path"] = content["model"]
    return found


def _not_followed(name: str, value: Any) -> str:
    """What a user can do about the value of an argument that is not taken from a checkpoint."""
    return (
        f"The checkpoint of --ckpt_path has {value!r:.100} for {name}, which may name code, and a checkpoint imports nothing. "
        f"Expected the value on the command line: --model.{name}=VALUE. If you trust the checkpoint, name the packages whose "
        "classes and functions it may create: --trust mypackage."
    )
