"""Creates the module and the data module so that `save_hyperparameters` saves what the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import yaml
from jsonargparse import ArgumentParser, Namespace

from trainkit.module.hparams import configured

__all__ = ["ConfigContext", "without_classes"]

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
        self._cli, self._key, self._saves = cli, key, saves

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
        with configured(kind, path, values):
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
