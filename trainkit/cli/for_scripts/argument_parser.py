"""`TrainkitArgumentParser`: jsonargparse's parser, with what a `Trainer`, a module, data and callbacks need.

In addition to the parser: its types for optimizers and learning-rate schedulers, its errors without what is inside
jsonargparse, the modules that it creates so that `save_hyperparameters` saves what the configuration says, and the masks of
what may be secret.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import cleandoc
from typing import Any, NoReturn, Protocol

import docstring_parser
import torch
import yaml
from jsonargparse import (
    ArgumentParser,
    Namespace,
    get_loader,
    register_unresolvable_import_paths,
    set_loader,
    set_parsing_settings,
)
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.callback import Callback
from trainkit.errors import ConfigurationError, TrainkitError, nearest
from trainkit.masking import HIDDEN, mask_value
from trainkit.module.data_module import DataModule
from trainkit.module.hparams import use_configured_values
from trainkit.module.train_module import TrainModule
from trainkit.names import our_path
from trainkit.trainer.trainer import Trainer

__all__ = [
    "AUTOMATIC",
    "MASK",
    "MODE",
    "SCHEDULER_TYPES",
    "ConfigContext",
    "LRSchedulerCallable",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "TrainkitArgumentParser",
    "class_of",
    "find_masked_keys",
    "instantiate_class",
    "mask_config",
    "needs_secrets",
    "readable",
    "report_errors",
    "with_class_path",
    "with_our_paths",
    "without_classes",
]


AUTOMATIC = "AUTOMATIC"

# Functions such as torch.relu do not know the module that they are imported from.
register_unresolvable_import_paths(torch)
# A dict for an argument without a type stays a dict: otherwise a checkpoint could create an object of any class.
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def with_our_paths(value: Any) -> Any:
    """A value of a configuration in which the paths of Lightning's classes are those of trainkit's.

    Args:
        value: What a file contains, or the arguments of a command line.

    Raises:
        UnknownNameError: trainkit has no such class; the message says what to use.
    """
    if isinstance(value, Namespace):
        copy = value.clone()
        vars(copy).update(with_our_paths(vars(value)))
        return copy
    if isinstance(value, dict):
        return {key: with_our_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_our_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    option, sign, path = value.rpartition("=")  # --trainer.logger=lightning.pytorch.loggers.CSVLogger
    return f"{option}{sign}{our_path(path)}" if option.startswith("--") else our_path(value)


MODE = "trainkit"
"""How the parser reads files and values: as YAML, with the classes of trainkit in place of Lightning's."""
set_loader(MODE, lambda text: with_our_paths(get_loader("yaml")(text)), (yaml.YAMLError,))

# Packages whose classes can be given by their names alone, which jsonargparse knows when they are imported.
_NAMED = ("trainkit.callbacks", "trainkit.loggers", "trainkit.strategies")

_TITLED = re.compile(r"^Args: .*\n", re.MULTILINE)


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau` with the name of the metric that it reads.

    On a command line there is no `configure_optimizers` to name the metric in.

    Args:
        optimizer: The optimizer.
        monitor: The name of the logged metric.
        *args: The other arguments of torch's class.
        **kwargs: The other arguments of torch's class, such as `mode`, `factor` and `patience`.

    Example:
        ```bash
        python train.py fit --lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=val_loss --lr_scheduler.patience=2
        ```
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# ReduceLROnPlateau of torch is a subclass of LRScheduler, but nothing on a command line says which metric it reads
SCHEDULER_TYPES = (LRScheduler, ReduceLROnPlateau)

LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
"""A learning-rate scheduler, as an annotation."""

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""An argument of a module that creates an optimizer from the parameters. `TrainkitCLI` makes it from a class and its arguments.

Example:
    ```python
    class Classifier(TrainModule):
        def __init__(self, optimizer: OptimizerCallable = torch.optim.AdamW):
            super().__init__()
            self.make_optimizer = optimizer

        def configure_optimizers(self):
            return self.make_optimizer(self.parameters())
    ```
"""

LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
"""An argument of a module that creates a learning-rate scheduler from the optimizer, as `OptimizerCallable` an optimizer."""


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Create an object of the class that a configuration names.

    Args:
        args: The first positional argument, or a tuple of them.
        init: The class under `"class_path"`, and its keyword arguments under `"init_args"`.

    Returns:
        The object.

    Example:
        ```python
        optimizer = instantiate_class(module.parameters(), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
        ```
    """
    module, _, name = our_path(init["class_path"]).rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **init.get("init_args", {}))


def with_class_path(kind: type, arguments: Any) -> dict[str, Any]:
    """The configuration that `instantiate_class` reads, for a class that the command line fixes."""
    values = {} if arguments is None else dict(arguments.as_dict() if hasattr(arguments, "as_dict") else arguments)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": values}


class TrainkitArgumentParser(ArgumentParser):
    """A parser that adds the arguments of a `Trainer`, a module, a data module, a callback, an optimizer or a scheduler.

    `TrainkitCLI` makes one for each subcommand, and passes it to `add_arguments_to_parser`. It is
    [jsonargparse's](https://jsonargparse.readthedocs.io) `ArgumentParser`: `add_argument`, `link_arguments` and `set_defaults`
    are documented there. `LightningArgumentParser` is the same class.

    Args:
        *args: Of `ArgumentParser`.
        description: What `--help` shows first.
        env_prefix: Prefix of environment variables.
        default_env: Read environment variables: `TRAINKIT_FIT__TRAINER__MAX_EPOCHS` is `fit --trainer.max_epochs`.
        **kwargs: Of `ArgumentParser`.

    Attributes:
        callback_keys: The keys of callbacks that were added; `TrainkitCLI` passes these callbacks to the Trainer.
        required_by_checkpoint: The arguments that are required because the checkpoint of `--ckpt_path` names code for them, and
            what to tell the user.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Train, validate, test or predict with a trainkit module.",
        env_prefix: str = "TRAINKIT",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("parser_mode", MODE)
        kwargs.setdefault("allow_abbrev", False)  # --trainer.max_epoch is a mistake, not --trainer.max_epochs
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self.required_by_checkpoint: dict[str, str] = {}
        self._optimizers: dict[str, tuple[type | tuple[type, ...], str]] = {}
        self._lr_schedulers: dict[str, tuple[type | tuple[type, ...], str]] = {}

    def add_lightning_class_args(
        self,
        lightning_class: Callable[..., Any],
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a class of trainkit, under a key.

        Args:
            lightning_class: A subclass of `Trainer`, `TrainModule`, `DataModule` or `Callback`, or a function whose return
                annotation is one.
            nested_key: The key, for example `"model"`.
            subclass_mode: Accept any subclass, which the command line or a file names by `class_path`.
            required: With `subclass_mode`, the class must be named.

        Returns:
            The names of the arguments.

        Raises:
            ConfigurationError: It is another class.
        """
        kind = class_of(lightning_class)
        if not (isinstance(kind, type) and issubclass(kind, (Trainer, TrainModule, DataModule, Callback))):
            raise ConfigurationError(
                f"add_lightning_class_args expected a subclass of Trainer, TrainModule, DataModule or Callback, or a function "
                f"whose return annotation is one, got {lightning_class!r}. For another class: "
                f"parser.add_class_arguments({getattr(lightning_class, '__name__', 'MyClass')}, {nested_key!r})"
            )
        if issubclass(kind, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        is_trainer = issubclass(kind, Trainer)
        if is_trainer:
            _import_named()
        added: list[str] = self.add_class_arguments(
            kind, nested_key, fail_untyped=False, instantiate=not is_trainer, sub_configs=True
        )
        if is_trainer:
            self._describe(Trainer, nested_key)
        return added

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer, without its parameters.

        Args:
            optimizer_class: One class, whose arguments are added; or a tuple, of which any subclass can be named.
            nested_key: The key.
            link_to: Argument of the module that receives a dict with `class_path` and `init_args`, such as
                `"model.optimizer_init"`. `"AUTOMATIC"`: `TrainkitCLI` defines `configure_optimizers` of the module.

        Raises:
            ConfigurationError: It is not an optimizer class.
        """
        self._add_created(optimizer_class, (Optimizer,), nested_key, {"params"})
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type | tuple[type, ...] = SCHEDULER_TYPES,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning-rate scheduler, without its optimizer.

        Args:
            lr_scheduler_class: One class, whose arguments are added; or a tuple, of which any subclass can be named.
            nested_key: The key.
            link_to: As in `add_optimizer_args`.

        Raises:
            ConfigurationError: It is not a class of schedulers.
        """
        self._add_created(lr_scheduler_class, SCHEDULER_TYPES, nested_key, {"optimizer"})
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def require(self, key: str, reason: str) -> None:
        """Make an argument required, without a default.

        Args:
            key: The argument.
            reason: What the message adds if it is not given.
        """
        for action in self._actions:
            if action.dest == key:
                action.required = True
                action.default = None
        self.required_by_checkpoint[key] = reason

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, with the nearest name for an unknown one, and exit with code 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        message = readable(message, options, _list_class_names())
        message += "".join(f". {text}" for key, text in self.required_by_checkpoint.items() if key in message)
        if MASK in message and ex is not None:  # a type that no mask has, such as the path of a file
            message += f". A saved configuration has {MASK!r} in place of a password or key. Fix: write it into the file"
        super().error(message, ex)

    def _add_created(self, kind: Any, bases: tuple[type, ...], nested_key: str, skip: set[str]) -> None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not all(isinstance(one, type) and issubclass(one, bases) for one in kinds):
            names = " or ".join(base.__name__ for base in bases)
            raise ConfigurationError(f"{nested_key}: expected a subclass of {names} or a tuple of them, got {kind!r}.")
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, nested_key, instantiate=False, fail_untyped=False, skip=skip)
        else:
            self.add_class_arguments(kind, nested_key, instantiate=False, fail_untyped=False, skip=skip, sub_configs=True)

    def _describe(self, kind: type, nested_key: str) -> None:
        """Set the help of arguments whose docstring has titles, `Args: Where it runs`, which jsonargparse does not read."""
        text = cleandoc(kind.__doc__ or "")
        first, *rest = _TITLED.split(text)
        described = docstring_parser.parse("Args:\n" + "".join(part.rstrip() + "\n" for part in rest) if rest else first)
        helps = {f"{nested_key}.{parameter.arg_name}": parameter.description for parameter in described.params}
        for action in self._actions:
            if action.dest in helps and not action.help:
                action.help = (helps[action.dest] or "").replace("%", "%%")


LightningArgumentParser = TrainkitArgumentParser


def class_of(target: Callable[..., Any]) -> Any:
    """A class as it is; a function as a class whose constructor calls it. `None` if it has no return annotation."""
    if isinstance(target, type):
        return target
    try:
        return class_from_function(target)
    except ValueError:
        return None


def _import_named() -> None:
    """Import the callbacks, loggers and strategies of trainkit, so that `EarlyStopping` needs no path."""
    for package in map(import_module, _NAMED):
        for name in package.__all__:
            getattr(package, name)


def _list_class_names() -> list[str]:
    """The names of classes that a command line can name without a path, those of the script too."""
    names = [name for package in map(import_module, _NAMED) for name in package.__all__]
    names += [name for place in (torch.optim, torch.optim.lr_scheduler) for name in dir(place) if name[0].isupper()]
    kinds: list[type] = [TrainModule, DataModule, Callback]
    for kind in kinds:  # The loop appends to this list.
        kinds += kind.__subclasses__()
    return [*names, *(kind.__name__ for kind in kinds)]


_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"')
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |Key '|does not accept option ')(?P<name>[^\s'=]+)")
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>\w+)")
_UNKNOWN_OF_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s+Option '(?P<name>[^']+)' is not accepted")
_UNKNOWN_PATH = re.compile(
    r"Problem with given class_path '(?P<module>[^']+)\.(?P<name>\w+)':\s+(?:No module named|module '[^']+' has no attribute)"
)
_WRONG_CLASS = re.compile(r"Import path (?P<path>\S+ )?does not correspond to a subclass of (?P<base>\w+)")
_GIVEN = re.compile(r"Given value: (?P<path>[\w.]+)$", re.MULTILINE)  # on the command line the path is only here
_EXAMPLES = {
    "Callback": "trainkit.callbacks.ModelCheckpoint",
    "LRScheduler": "torch.optim.lr_scheduler.StepLR",
    "Logger": "trainkit.loggers.CSVLogger",
    "Optimizer": "torch.optim.AdamW",
    "Profiler": "trainkit.profilers.SimpleProfiler",
}
_REQUIRED = re.compile(
    r"Problem with given class_path '(?P<path>[^']+)':\s+the following arguments are required: (?P<names>\w+(?:, \w+)*)"
)
_NESTED_TYPE = re.compile(r"^ *Given value type: .*NestedArg'>\n", re.MULTILINE)
_NESTED = re.compile(r"NestedArg\(key='(?P<name>[^']+)', val='?(?P<value>.*?)'?\)$", re.MULTILINE)


class _Parser(Protocol):
    """The part of a parser that is needed here."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, and exit with code 2."""


@contextmanager
def report_errors(parser: _Parser, kind: type[TrainkitError]) -> Iterator[None]:
    """Report a wrong value that only creating an object or starting a run shows, as the parser reports others.

    One of several processes raises it, so that the report names its rank. `JSONARGPARSE_DEBUG=1` shows the traceback.

    Args:
        parser: The parser of the subcommand.
        kind: The kind of error that a wrong value raises.
    """
    try:
        yield
    except (kind, ValueError) as error:
        # The cause is the error of the constructor that jsonargparse called.
        wrong = error if isinstance(error, kind) else error.__cause__
        if not isinstance(wrong, kind) or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise
        parser.error(str(wrong), wrong)


def readable(message: str, options: Iterable[str], classes: Iterable[str]) -> str:
    """A message of jsonargparse for a user.

    Args:
        message: The message.
        options: The options of the parser.
        classes: The names of classes that need no path.
    """
    key = match["key"] if (match := _KEY.search(message)) else "the argument"
    if (match := _UNKNOWN_OF_CLASS.search(message)) is not None:
        path, name = match["path"], match["name"]
        known = nearest(name, _arguments_of(path))
        return f"{key}: {path.rpartition('.')[2]} has no argument {name!r}.{known} All of them: --{key}.help={path}"
    if (match := _REQUIRED.search(message)) is not None:
        kind, names = match["path"].rpartition(".")[2], match["names"].split(", ")
        rest = " ".join(f"--{key}.{name}=…" for name in names)
        return f"{key}: {kind} has no default for {', '.join(names)}. Fix: --{key}={kind} {rest}"
    if (match := _UNKNOWN_PATH.search(message)) is not None:
        module, name = match["module"], match["name"]
        return f"{key}: There is no class {module}.{name}.{nearest(name, dir(sys.modules.get(module)))}"
    if (match := _UNKNOWN_CLASS.search(message)) is not None:
        name = match["name"]
        return (
            f"{key}: There is no class {name!r}.{nearest(name, classes)} Expected the name of a class of trainkit or torch, "
            "or the path of your own: mypackage.MyClass"
        )
    wrong = _WRONG_CLASS.findall(message)
    if wrong and "Problem with given class_path" not in message:  # a class of one type of a Union has a wrong argument
        (path, base), bases = wrong[0], " or ".join(dict.fromkeys(base for _, base in wrong))
        path = path.strip() or (given["path"] if (given := _GIVEN.search(message)) is not None else "the class")
        example = f", such as {_EXAMPLES[base]}" if base in _EXAMPLES else ""
        return f"{key}: {path} is not a subclass of {bases}. Expected the path of one{example}"
    if (match := _UNKNOWN.search(message)) is not None:
        return f"{message}.{nearest(match['name'], options)}"
    return _NESTED.sub(r"\g<name>=\g<value>", _NESTED_TYPE.sub("", message))


def _arguments_of(path: str) -> list[str]:
    """The names of the arguments of a class that is imported; with those of its base classes if it passes them on."""
    module, _, name = path.rpartition(".")
    names: list[str] = []
    for kind in getattr(getattr(sys.modules.get(module), name, None), "__mro__", ()):
        parameters = inspect.signature(kind.__init__).parameters.values()
        names += [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if all(one.kind != one.VAR_KEYWORD for one in parameters):
            break
    return names


_PLAIN = (bool, int, float, str)


class _CommandLine(Protocol):
    """The part of `TrainkitCLI` that is needed here."""

    parser: Any
    config: Namespace
    subcommand: str | None


class ConfigContext:
    """Creates the object of one key.

    Args:
        cli: The command line, after it has parsed.
        key: `"model"` or `"data"`.
        saves: `False`: `save_hyperparameters` saves the arguments of `__init__`.
    """

    def __init__(self, cli: _CommandLine, key: str, saves: bool) -> None:
        self._cli = cli
        self._key = key
        self._saves = saves

    def as_instantiator(self, kind: Any, subclasses: bool) -> tuple[Any, type, bool]:
        """What `ArgumentParser.instantiate` accepts.

        Args:
            kind: The class, or a function that creates the object; a function decides by itself what to save.
            subclasses: The configuration names a subclass.
        """
        return self._create, kind if isinstance(kind, type) else type(None), subclasses

    def _create(
        self, kind: Callable[..., Any], /, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        kwargs = without_classes(kwargs)
        config = self._read() or {} if self._saves else {}
        values = {**config.get("init_args", {}), **config.get("dict_kwargs", {})} if "class_path" in config else dict(config)
        for target, value in applied_instantiation_links.items():
            key, _, name = target.partition(".")
            if key == self._key:
                _assign(values, name.removeprefix("init_args."), value)
        path = config.get("class_path", f"{kind.__module__}.{kind.__qualname__}")
        # an argument of the module may be a module too, which this function creates first
        same = all(values.get(name, value) == value for name, value in kwargs.items() if isinstance(value, _PLAIN))
        if not self._saves or not same or path.rpartition(".")[2] != kind.__name__ or not isinstance(kind, type):
            return kind(*args, **kwargs)
        with use_configured_values(kind, path, values):
            return kind(*args, **kwargs)

    def _read(self) -> Any:
        """The part of the configuration under the key, as in a file."""
        cli = self._cli
        parser: ArgumentParser = cli.parser
        config = yaml.safe_load(parser.dump(cli.config, skip_link_targets=False, skip_unset=False, format="yaml"))
        return (config if cli.subcommand is None else config[cli.subcommand]).get(self._key)


def without_classes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a class, where `class_path` for an argument without a type is a dict, as in the configuration.

    jsonargparse makes it a `Namespace`, and passes the values in it under dotted names.
    """
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        _assign(values, name, value.as_dict() if isinstance(value, Namespace) else value)
    return values


def _assign(values: dict[str, Any], name: str, value: Any) -> None:
    """Assign `values["a"]["b"]` for the name `a.b`."""
    first, _, rest = name.partition(".")
    if rest:
        _assign(values.setdefault(first, {}), rest, value)
    else:
        values[first] = value


MASK = "***masked***"  # HIDDEN alone may be a value of the program.


def mask_config(config: Namespace) -> Any:
    """A copy of a configuration in which texts that may be secrets are masked. Numbers stay: `eot_token=50256` is no secret."""
    return _mask("", config)


def find_masked_keys(config: Namespace) -> list[str]:
    """The keys of the values that contain a mask, as on a command line; with an index for an item of a list."""
    return [key for key, text in _texts("", config) if MASK in text]


def needs_secrets(keys: list[str]) -> str:
    """What is wrong with a configuration that has a mask as the value of `keys`, and what to do."""
    options = " ".join(f'--{key}="$SECRET"' for key in keys if "[" not in key)
    return (
        f"{', '.join(keys)}: found {MASK!r}, which a saved configuration has in place of a password or key. "
        f"Expected the value, such as that of an environment variable. Fix: {options or 'write it into the file'}"
    )


def _mask(key: str, value: Any) -> Any:
    if isinstance(value, Namespace):
        copy = value.clone()
        vars(copy).update({name: _mask(f"{key}.{name}", item) for name, item in vars(value).items()})
        return copy
    if isinstance(value, dict):
        return {name: _mask(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(key, item) for item in value]
    if not isinstance(value, str | os.PathLike) or key.endswith(".class_path"):
        return value
    text = str(value)
    masked: str = mask_value(key, text)
    return value if masked == text else masked.replace(HIDDEN, MASK)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Namespace | dict):
        for name, item in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from _texts(f"{key}.{name}".removeprefix("."), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(f"{key}[{index}]", item)
    elif isinstance(value, str | os.PathLike):
        yield key, str(value)
