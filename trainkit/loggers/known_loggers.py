"""Loggers by name: `"tensorboard"`, `"wandb"`, `"mlflow"`, …"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.errors import ConfigurationError, UnknownNameError, missing_package, nearest
from trainkit.loggers.base import is_installed

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger

__all__ = ["LOGGERS", "Kind", "NotLoggedInError", "check_logger", "load_logger", "make_logger"]


class NotLoggedInError(ConfigurationError):
    """A service needs an API key, but none is set; `log_with="all"` skips the service."""


class Kind(NamedTuple):
    """A logger that has a name: the path of its class, the package that it needs, and the extra that installs it.

    `project` is the argument that names the project; empty for a logger of files, whose `name` is a folder.
    """

    path: str
    package: str = ""
    extra: str = ""
    project: str = ""


LOGGERS: dict[str, Kind] = {
    "comet_ml": Kind("trainkit.loggers.comet_logs:CometLogger", "comet_ml", "comet", "project"),
    "csv": Kind("trainkit.loggers.csv_logs:CSVLogger"),
    "jsonl": Kind("trainkit.loggers.jsonl:JSONLLogger"),
    "mlflow": Kind("trainkit.loggers.mlflow_logs:MLFlowLogger", "mlflow", "mlflow", "experiment_name"),
    "tensorboard": Kind("trainkit.loggers.tensorboard:TensorBoardLogger", "tensorboard", "tensorboard"),
    "wandb": Kind("trainkit.loggers.wandb_logs:WandbLogger", "wandb", "wandb", "project"),
}


def check_logger(name: str, argument: str = "logger", also: Sequence[str] = ()) -> None:
    """Raise if no logger has this name, or its package is not installed.

    Args:
        name: the value of `argument`.
        argument: the name of the argument, for the message.
        also: further allowed values.

    Raises:
        UnknownNameError: no logger has this name.
        MissingPackageError: its package is not installed.
    """
    if name not in LOGGERS:
        raise UnknownNameError(
            f"{argument}: expected {''.join(f'{one!r} or ' for one in also)}one of {', '.join(LOGGERS)}, got {name!r}."
            f"{nearest(name, [*LOGGERS, *also])} Fix: {argument}='tensorboard'"
        )
    kind = LOGGERS[name]
    if kind.package and not is_installed(kind.package):
        raise missing_package(kind.package, kind.extra, kind.path.partition(":")[2])


def load_logger(name: str) -> type[Logger]:
    """The class of that name; raises like `check_logger`."""
    check_logger(name)
    module, _, attribute = LOGGERS[name].path.partition(":")
    loaded: type[Logger] = getattr(import_module(module), attribute)
    return loaded


def make_logger(name: str, /, **options: Any) -> Logger:
    """A logger of that name.

    Raises:
        UnknownNameError: no logger has this name, or it has no such option.
        MissingPackageError: its package is not installed.
    """
    kind = load_logger(name)
    parameters = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in options:
            if option not in parameters:
                raise UnknownNameError(
                    f"{kind.__name__} has no argument {option!r}.{nearest(option, parameters)} "
                    f"It has: {', '.join(parameters)}. Fix: remove it"
                )
    return kind(**options)
