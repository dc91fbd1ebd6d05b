"""`TrainkitArgumentParser`: jsonargparse's parser, with what a `Trainer`, a module, data and callbacks need."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from inspect import cleandoc
from typing import Any, NoReturn

import docstring_parser
import torch
from jsonargparse import ArgumentParser, register_unresolvable_import_paths, set_parsing_settings
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.cli.for_scripts.argument_errors import readable
from trainkit.cli.for_scripts.masked_config import MASK
from trainkit.cli.for_scripts.optimizer_arguments import SCHEDULER_TYPES
from trainkit.errors import ConfigurationError
from trainkit.module.data_module import DataModule
from trainkit.module.train_module import TrainModule
from trainkit.trainer.trainer import Trainer

__all__ = ["AUTOMATIC", "LightningArgumentParser", "TrainkitArgumentParser", "class_of"]

AUTOMATIC = "AUTOMATIC"

# Functions such as torch.relu do not know the module that they are imported from.
register_unresolvable_import_paths(torch)
# A dict for an argument without a type stays a dict: otherwise a checkpoint could create an object of any class.
set_parsing_settings(instantiate_subclass_spec_in_any=False)

# Packages whose classes can be given by their names alone, which jsonargparse knows when they are imported.
_NAMED = ("trainkit.callbacks", "trainkit.loggers", "trainkit.strategies")

_TITLED = re.compile(r"^Args: .*\n", re.MULTILINE)


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
                action.required, action.default = True, None
        self.required_by_checkpoint[key] = reason

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, with the nearest name for an unknown one, and exit with code 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        message = readable(message, options, _known_classes())
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


def class_of(given: Callable[..., Any]) -> Any:
    """A class as it is; a function as a class whose constructor calls it. `None` if it has no return annotation."""
    if isinstance(given, type):
        return given
    try:
        return class_from_function(given)
    except ValueError:
        return None


def _import_named() -> None:
    """Import the callbacks, loggers and strategies of trainkit, so that `EarlyStopping` needs no path."""
    for package in map(import_module, _NAMED):
        for name in package.__all__:
            getattr(package, name)


def _known_classes() -> list[str]:
    """The names of classes that a command line can name without a path, those of the script too."""
    names = [name for package in map(import_module, _NAMED) for name in package.__all__]
    names += [name for place in (torch.optim, torch.optim.lr_scheduler) for name in dir(place) if name[0].isupper()]
    own: list[type] = [TrainModule, DataModule, Callback]
    for kind in own:  # which grows
        own += kind.__subclasses__()
    return [*names, *(kind.__name__ for kind in own)]
