"""Which hyper-parameters of a checkpoint a parser may see: those that it cannot follow to an import or a file.

jsonargparse follows strings: it imports them for `Callable`, `type[...]` and classes, reads a file of that name for a class,
and parses YAML in them. A checkpoint may come from anywhere. So a parser sees a value only if nothing that its argument accepts
can be followed, or if the class that it names is that of the default, or is trusted.

`checkpoint_defaults` makes them defaults of a command line; `module_from_config` creates a module from the configuration that
`TrainkitCLI` saved.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import abc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from inspect import isclass, isroutine
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import Path as PathType
from jsonargparse.typing import get_registered_type

import trainkit.cli.for_scripts.argument_parser  # noqa: F401 - sets what a configuration may create
from trainkit.checkpoint.manifest import is_checkpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.cli.for_scripts.argument_parser import MODE, TrainkitArgumentParser, class_of, without_classes
from trainkit.console import notice
from trainkit.errors import CheckpointError
from trainkit.launch.environment import option, options
from trainkit.module.from_checkpoint import Trust
from trainkit.module.hparams import use_configured_values
from trainkit.paths import local_path
from trainkit.trainer.resume import WORDS

__all__ = ["SavedArguments", "Sorted", "checkpoint_defaults", "import_object", "module_from_config", "sort_for"]


_NUMBERS = (type(None), bool, int, float)
_LISTS = (list, tuple, set, frozenset)
_SEQUENCES = {*_LISTS, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set, abc.MutableSet}
_MAPPINGS = {dict, abc.Mapping, abc.MutableMapping}
_SPEC = {"class_path", "init_args", "dict_kwargs"}
_MODES = {"yaml", "json", "toml", MODE}  # jsonnet and OmegaConf, which are other modes, evaluate strings.
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_MAPPING_IN_YAML = re.compile(r":(\s|$)")
_REFUSED: Any = object()


class Sorted(NamedTuple):
    """The hyper-parameters of a checkpoint by what may be done with them.

    Attributes:
        values: What the parser may see.
        data: What the parser may not see, for an argument that accepts any value: for the class, as it is.
        refused: The other values, by the path to their argument. They are not what the default is.
        unknown: What the parser has no argument for.
    """

    values: dict[str, Any]
    data: dict[str, Any]
    refused: dict[str, Any]
    unknown: dict[Any, Any]


class SavedArguments:
    """Sorts the hyper-parameters of a checkpoint by what the arguments of a parser accept.

    Args:
        parser: The parser, with the arguments of a class under a key.
        trust: What may be imported.
    """

    def __init__(self, parser: ArgumentParser, trust: Trust) -> None:
        self._parser = parser
        self._trust = trust
        self._actions = {action.dest: action for action in parser._actions if not action.dest.endswith(".help")}
        self._evaluates = parser.parser_mode not in _MODES

    def sort(self, key: str, saved: Mapping[Any, Any]) -> Sorted:
        """Sort the values of the arguments under a key.

        Args:
            key: The key, such as `"model"`.
            saved: The hyper-parameters.
        """
        result = Sorted({}, {}, {}, {})
        for name, value in saved.items():
            dest = f"{key}.{name}"
            if not isinstance(name, str) or not name.isidentifier() or dest not in self._actions:
                result.unknown[name] = value
            elif any(other.startswith(f"{dest}.") for other in self._actions):  # a dataclass: a group of arguments
                self._sort_group(name, dest, value, result)
            elif (seen := self._convert(value, dest)) is not _REFUSED:
                result.values[name] = seen
            elif _is_data(value) and _takes_data(value, _kind(self._actions[dest])):
                result.data[name] = value
            elif value != self._default(dest):
                result.refused[name] = value
        return result

    def _spec(self, value: Mapping[Any, Any], kind: Any, class_path: str) -> Any:
        """A class path with the arguments in `value`, for a class or function that the program has or trusts; or `_REFUSED`."""
        arguments, more = value.get("init_args") or {}, value.get("dict_kwargs") or {}
        if type(arguments) is not dict or type(more) is not dict:
            return _REFUSED
        known, others = sort_for(kind, arguments, self._trust), sort_for(kind, more, self._trust)
        if known.data or known.refused or known.unknown or others.values or others.data or others.refused:
            return _REFUSED
        if not all(isinstance(name, str) and name.isidentifier() for name in others.unknown):
            return _REFUSED
        spec = {"class_path": class_path, "init_args": known.values}
        return {**spec, "dict_kwargs": others.unknown} if others.unknown else spec

    def _sort_group(self, name: str, dest: str, value: Any, result: Sorted) -> None:
        if type(value) is not dict or not _SPEC.isdisjoint(value):
            result.refused[name] = value
            return
        inner = self.sort(dest, value)
        result.values[name] = inner.values
        result.refused.update({f"{name}.{one}": item for part in inner[1:] for one, item in part.items()})

    def _convert(self, value: Any, dest: str) -> Any:
        """The value for the parser, or `_REFUSED`."""
        action = self._actions[dest]
        kind = _kind(action)
        if type(value) in _NUMBERS:
            return _by_name(value, kind)
        if kind is None or not _is_data(value) or (self._evaluates and any(type(leaf) is str for leaf in _leaves(value))):
            return _REFUSED
        return self._of_type(value, kind, lambda: self._default(dest), getattr(action, "_enable_path", True))

    def _of_type(self, value: Any, kind: Any, default: Callable[[], Any], opens: bool) -> Any:
        """The value for the parser, or `_REFUSED`; `opens`: the parser reads a file whose name is the value."""
        if type(value) in _NUMBERS:
            return value
        if _anything_in(kind) and not _has_no_class(value):
            return _REFUSED
        if _is_plain(kind) and not opens:
            return _by_name(value, kind)
        alternatives = list(_alternatives(kind))
        if type(value) is str:
            return self._resolve_name(value, alternatives)
        if type(value) is dict:
            return self._mapping(value, alternatives, default)
        lists = [one for one in alternatives if _origin(one) in _SEQUENCES]
        if type(value) not in _LISTS or len(lists) != 1:
            return _REFUSED
        kinds = _of_items(lists[0], len(value))
        items = [self._of_type(item, one, lambda: None, opens) for item, one in zip(value, kinds, strict=True)]
        return _REFUSED if any(item is _REFUSED for item in items) else items

    def _resolve_name(self, value: str, alternatives: Sequence[Any]) -> Any:
        """What a string names: a dtype of torch, or a class or function that is trusted."""
        if value in _DTYPES and torch.dtype in alternatives:
            return _DTYPES[value]
        target = self._trust.find(value)
        if target is None:
            return _REFUSED
        if isroutine(target) or any(_origin(one) is type for one in alternatives):
            return target  # the object itself, so that nothing has to be imported
        return {"class_path": _path_of(target)}

    def _mapping(self, value: dict[Any, Any], alternatives: Sequence[Any], default: Callable[[], Any]) -> Any:
        if "class_path" in value:
            return self._object(value, default()) if _SPEC.issuperset(value) else _REFUSED
        followed = [one for one in alternatives if not _is_plain(one) and _origin(one) not in _SEQUENCES]
        if not _SPEC.isdisjoint(value) or len(followed) != 1:
            return _REFUSED
        if isclass(followed[0]) and is_dataclass(followed[0]):
            made = self._spec({"init_args": value}, followed[0], "")
            return made if made is _REFUSED else made["init_args"]
        if _origin(followed[0]) not in _MAPPINGS:
            return _REFUSED
        items = {key: self._of_type(item, get_args(followed[0])[1], lambda: None, True) for key, item in value.items()}
        return _REFUSED if any(item is _REFUSED for item in items.values()) else items

    def _object(self, value: dict[Any, Any], default: Any) -> Any:
        """The configuration of an object, if its class is that of the default or is trusted."""
        path = value["class_path"]
        if isinstance(default, dict) and default.get("class_path") == path:
            return self._spec(value, import_object(path), path)
        target = self._trust.find(path)
        return _REFUSED if target is None else self._spec(value, target, _path_of(target))

    def _default(self, dest: str) -> Any:
        """The default of an argument as in a configuration file, and so as in a checkpoint; `None` if it has none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Some defaults have no form in a file.
            try:
                defaults = self._parser.get_defaults(skip_validation=True)
                value: Any = yaml.safe_load(self._parser.dump(defaults, skip_validation=True, skip_unset=False, format="yaml"))
            except (TypeError, ValueError, yaml.YAMLError):
                return None
        for name in dest.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def sort_for(kind: Any, saved: Mapping[Any, Any], trust: Trust) -> Sorted:
    """Sort the hyper-parameters of a checkpoint by what the arguments of a class or function accept."""
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isclass(kind) else parser.add_function_arguments
    add(kind, "it", fail_untyped=False, sub_configs=True)
    return SavedArguments(parser, trust).sort("it", saved)


def import_object(path: str) -> Any:
    """The object with a path of the program's own; `None` if it does not exist."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name, None)


def _kind(action: Any) -> Any:
    """The type of an argument; `None` if the parser converts its values by a function."""
    return getattr(action, "_typehint", None)


def _path_of(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _alternatives(kind: Any) -> Iterator[Any]:
    """The types of a union, with those of unions in it."""
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _alternatives(one)
    else:
        yield kind


def _is_anything(kind: Any) -> bool:
    """Whether a type accepts every value: `Any`, or jsonargparse's type for an argument without one that it can find."""
    return kind in (Any, object) or any(one.__name__ == "UnvalidatedType" for one in type(kind).__mro__)


def _anything_in(kind: Any) -> bool:
    """Whether part of a value may be anything, also the values of a `dict` that names no types."""
    origin = _origin(kind)
    if _is_anything(kind) or (origin in _MAPPINGS and not get_args(kind)):
        return True
    return (origin in (Union, UnionType) or origin in _SEQUENCES | _MAPPINGS) and any(map(_anything_in, get_args(kind)))


def _is_plain(kind: Any) -> bool:
    """Whether jsonargparse makes the values of a type without an import, whatever it is given."""
    origin = _origin(kind)
    if _is_anything(kind) or kind in (*_NUMBERS, str) or origin is Literal or kind is Ellipsis:
        return True
    if origin in (Union, UnionType) or origin in _SEQUENCES | _MAPPINGS:
        return all(map(_is_plain, get_args(kind)))
    return isclass(kind) and _is_plain_class(kind)


def _is_plain_class(kind: type) -> bool:
    """Whether jsonargparse makes the values of a class that is no container without an import."""
    if is_typeddict(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        try:
            return all(map(_is_plain, get_type_hints(kind).values()))
        except Exception:  # an annotation that names nothing
            return False
    if issubclass(kind, PathType):
        return not set("us") & set(getattr(kind, "_mode", "u"))  # addresses, which it connects to
    if kind.__module__.partition(".")[0] == "pydantic":  # pydantic's ImportString imports.
        return False
    return issubclass(kind, Enum) or get_registered_type(kind) is not None


def _takes_data(value: Any, kind: Any) -> bool:
    """Whether a class expects a value as it is: what accepts anything, or a text that is no import path."""
    alternatives = list(_alternatives(kind))
    if type(value) is str and str in alternatives:
        return "." not in value or not all(map(str.isidentifier, value.split(".")))
    return all(_is_plain(one) for one in alternatives) and any(map(_anything_in, alternatives))


def _leaves(value: Any) -> Iterator[Any]:
    """The keys and values in dicts and lists."""
    if type(value) is dict:
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif type(value) in _LISTS:
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_data(value: Any) -> bool:
    """Whether a value consists of numbers, text, lists and dicts, or is of another type that a checkpoint stores."""
    texts = [leaf for leaf in _leaves(value) if isinstance(leaf, str)]
    return not any(isinstance(leaf, Mapping) for leaf in _leaves(value)) and not any(
        type(text) is not str or text in ("__path__", "$schema") for text in texts
    )


def _has_no_class(value: Any) -> bool:
    """Whether jsonargparse finds no class path in a value of any type. It reads YAML in strings."""
    return not any(
        type(leaf) is str and ("class_path" in leaf or "{" in leaf or _MAPPING_IN_YAML.search(leaf)) for leaf in _leaves(value)
    )


def _of_items(kind: Any, count: int) -> Sequence[Any]:
    """The types of the items of a list, tuple or set of this type."""
    types = get_args(kind)
    if _origin(kind) is tuple and Ellipsis not in types:
        # For another length the parser raises an error, or nothing passes.
        return types if len(types) == count else [Callable] * count
    return [types[0] if types else Any] * count


def _by_name(value: Any, kind: Any) -> Any:
    """The name of a member of an enumeration, which a checkpoint that no command line saved stores by value."""
    for one in _alternatives(kind):
        if type(value) in (str, bool, int, float) and isclass(one) and issubclass(one, Enum) and value not in one.__members__:
            return next((name for name, member in one.__members__.items() if member.value == value), value)
    return value


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
    chosen = option(arguments, "model") or option(arguments, "model.class_path") or in_files.get("class_path")
    name = str(class_path).rpartition(".")[2]
    if chosen is not None and chosen.rpartition(".")[2] != name:
        return  # another class, which has other arguments
    own_class = _own_class(kind, chosen or kind.__name__, name) or trust.find(class_path)
    if not isclass(own_class) or not issubclass(own_class, kind):
        parser.error(
            f"the checkpoint of --ckpt_path has a module of the class {class_path!r:.200}, and a checkpoint imports nothing. "
            "Expected the class on the command line: --model=mypackage.MyModule. If you trust the checkpoint, name the package "
            "of the class: --trust mypackage."
        )
    saved = sort_for(own_class, values, trust)
    for one, value in {**saved.data, **saved.refused}.items():
        if one not in (in_files.get("init_args") or {}) and not _is_given(one, arguments):
            parser.error(f"--model.{one} is required: {_not_followed(one, value)}")
    parser.set_defaults(
        {"model": _configuration(own_class, chosen or f"{own_class.__module__}.{own_class.__qualname__}", saved)}
    )


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


def _own_class(kind: Any, value: str, name: str) -> Any:
    """The class of the program with a name or path that the command line gives; `None` if it has another name than `name`."""
    if value.rpartition(".")[2] != name:
        return None
    if "." in value:
        try:
            return import_object(value)
        except ImportError:
            return None
    kinds = [kind]
    for one in kinds:  # The loop appends to this list.
        kinds += one.__subclasses__()
    return next((one for one in kinds if one.__name__ == value), None)


def _in_files(arguments: Sequence[str]) -> dict[str, Any]:
    """What the configuration files of a command line say of the module."""
    content_of_model: dict[str, Any] = {}
    for config in [*options(arguments, "config"), *(two for one, two in pairwise(arguments) if one == "-c")]:
        try:
            text = Path(config).read_text("utf-8") if Path(config).is_file() else config
            content = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # the parser says what is wrong
        content = content.get(arguments[0], content) if isinstance(content, dict) else {}
        if isinstance(content.get("model"), dict):
            content_of_model.update(content["model"])
        elif isinstance(content.get("model"), str):
            content_of_model["class_path"] = content["model"]
    return content_of_model


def _not_followed(name: str, value: Any) -> str:
    """What a user can do about the value of an argument that is not taken from a checkpoint."""
    return (
        f"The checkpoint of --ckpt_path has {value!r:.100} for {name}, which may name code, and a checkpoint imports nothing. "
        f"Expected the value on the command line: --model.{name}=VALUE. If you trust the checkpoint, name the packages whose "
        "classes and functions it may create: --trust mypackage."
    )


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
    kept = {name: one for name, one in saved.items() if name not in overrides}
    restored = SavedArguments(parser, trust).sort("module", kept)
    if restored.refused:
        raise _refusal(kind, restored.refused, source)
    # jsonargparse knows no names for **kwargs that __init__ keeps: `dict_kwargs` of a configuration file
    keeps = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
    known = {action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("module.")}
    others = {**restored.unknown, **{name: value for name, value in overrides.items() if name not in known}}
    _do_not_require(parser, restored.data)
    try:
        if others and not keeps:
            raise ArgumentError(None, f"It has no arguments {', '.join(map(repr, others)):.200}")
        values = {**restored.values, **{name: value for name, value in overrides.items() if name in known}}
        config = parser.parse_object({"module": values})
    except ArgumentError as error:
        raise CheckpointError(
            f"{source}: the arguments do not fit {kind.__name__}. Expected the types of its annotations. Pass the arguments "
            f"that have changed: {kind.__name__}.load_from_checkpoint(path, name=value). {error}"
        ) from error

    def create(created: type, /, **arguments: Any) -> Any:
        with use_configured_values(kind, class_path, {**saved, **overrides}):
            return created(**{**without_classes(arguments), **restored.data, **others})

    return parser.instantiate(config, instantiators=[(create, kind, False)]).module


def _do_not_require(parser: ArgumentParser, names: Container[str]) -> None:
    """Let a parser do without arguments that the class gets and the parser does not see."""
    for action in parser._actions:
        if action.dest.removeprefix("module.") in names:
            action.required = False


def _refusal(kind: type, refused: Mapping[str, Any], source: str) -> CheckpointError:
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
