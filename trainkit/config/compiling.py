"""`Compilation`: what a user asks of `torch.compile`, checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = ["Compilation", "known_backend", "refuse_compiled"]

_OURS = ("regional", "modules")


@dataclass(frozen=True)
class Compilation:
    """How to compile a model.

    Attributes:
        options: Arguments of `torch.compile`.
        regional: `True`: compile each repeated block; `False`: compile the whole model or step; `None`: the blocks if the
            model has some, otherwise the whole.
        modules: Compile these modules instead of the repeated blocks, see `trainkit.module.blocks.chosen_modules`.
        source: What the user wrote, for messages.

    Raises:
        ConfigurationError: `torch.compile` does not accept the options.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    regional: bool | None = None
    modules: Any = None
    source: str = "compile=True"

    def __post_init__(self) -> None:
        if self.modules is not None and self.regional is False:
            raise ConfigurationError(
                f"{self.source}: modules are compiled by themselves, and regional=False asks for the whole. Remove one of the "
                "two: compile={'modules': 'Block'} or compile={'regional': False}"
            )
        try:
            torch.compile(_nothing, **self.options)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{self.source}: torch.compile does not accept these arguments: {' '.join(str(error).split())} Expected "
                "arguments of torch.compile, such as compile={'mode': 'max-autotune'}"
            ) from error

    @classmethod
    def of_trainer(cls, value: Any) -> Compilation | None:
        """The argument `compile` of a `Trainer`; `None`: nothing is compiled.

        Raises:
            ConfigurationError: It is none of the values that are allowed.
        """
        if value is None or value is False:
            return None
        source = f"compile={value!r}"
        if value is True:
            return cls(source=source)
        if value in ("regional", "whole"):
            return cls(regional=value == "regional", source=source)
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"{source}: expected True, False, 'regional', 'whole' or a dict of arguments of torch.compile. For example: "
                "compile={'mode': 'max-autotune'}"
            )
        options = dict(value)
        known = [*_OURS, *list(inspect.signature(torch.compile).parameters)[1:]]
        for name in options:
            if name not in known:
                raise UnknownNameError(f"{source}: unknown key {name!r}; known: {', '.join(known)}.{nearest(str(name), known)}")
        regional, modules = options.pop("regional", None), options.pop("modules", None)
        if regional not in (True, False, None):
            raise ConfigurationError(f"{source}: expected True or False for regional, not {regional!r}: {{'regional': True}}")
        if isinstance(options.get("backend"), str):
            options["backend"] = known_backend(options["backend"], source)
        return None if options.get("disable") else cls(options, regional, modules, source)

    def __str__(self) -> str:
        options = {"backend": "inductor", **self.options}
        return ", ".join(f"{name} {_named(value)}" for name, value in options.items())


def known_backend(backend: Any, source: str | None = None) -> str:
    """The name of a backend of `torch.compile`; a `ConfigurationError` if torch does not know it.

    Args:
        backend: The name, in small letters or in capitals.
        source: What the user wrote; default: `dynamo_backend=`.
    """
    name, known = str(backend).lower(), torch._dynamo.list_backends(exclude_tags=None)
    if name not in known:
        raise ConfigurationError(
            f"{source or f'dynamo_backend={backend!r}'}: expected one of {', '.join(known)}.{nearest(name, known)}"
        )
    return name


def refuse_compiled(compilation: Compilation, strategy: Strategy, whole: bool = False) -> None:
    """Raise an `UnsupportedArgumentError` if the strategy does not support this.

    Args:
        compilation: What the user asks for.
        strategy: The strategy.
        whole: The model has no blocks, so that the whole would be compiled.
    """
    if strategy.compiles or (strategy.compiles_blocks and compilation.regional is not False and not whole):
        return
    raise UnsupportedArgumentError(f"{compilation.source} does not work with {type(strategy).__name__}, {_reason(strategy)}")


def _reason(strategy: Strategy) -> str:
    if strategy.compiles_blocks:
        return (
            "whose engine can run compiled blocks, but no compiled model or step. Compile the blocks: "
            "Trainer(compile='regional'), or TorchDynamoPlugin(use_regional_compilation=True)"
        )
    return "whose hooks and tensors do not support compiled code. Remove it, or use strategy='ddp'."


def _named(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else getattr(value, "__name__", type(value).__name__)
        if callable(value)
        else repr(value)
    )


def _nothing() -> None: ...
