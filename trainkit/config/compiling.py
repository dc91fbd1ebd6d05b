"""`Compilation`: what a user asks of `torch.compile`, checked; and Accelerate's class for it, `TorchDynamoPlugin`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, make_instance, nearest

if TYPE_CHECKING:
    from trainkit.strategy import Strategy
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.config.settings import Settings

__all__ = ["Compilation", "TorchDynamoPlugin", "backend_name", "compilation_of", "refuse_compiled"]


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
            options["backend"] = backend_name(options["backend"], source)
        return None if options.get("disable") else cls(options, regional, modules, source)

    def __str__(self) -> str:
        options = {"backend": "inductor", **self.options}
        return ", ".join(f"{name} {_name_of(value)}" for name, value in options.items())


def backend_name(backend: Any, source: str | None = None) -> str:
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


def _name_of(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else getattr(value, "__name__", type(value).__name__)
        if callable(value)
        else repr(value)
    )


def _nothing() -> None: ...


@dataclass
class TorchDynamoPlugin:
    """How `Accelerator(dynamo_plugin=)` compiles the models that it prepares. Names in checkpoints do not change.

    An argument that is not given has the value of the file of `trainkit launch --config_file`, if the process was started so.

    Args:
        backend: A backend of `torch.compile` such as `"inductor"`, a `DynamoBackend`, or a function. `"no"`: nothing is
            compiled.
        mode: `"default"`, `"reduce-overhead"` (CUDA graphs), `"max-autotune"` or `"max-autotune-no-cudagraphs"`.
        fullgraph: A graph break is an error.
        dynamic: `True`: compile for all sizes from the start; `False`: compile for each size. Default: compile for the first
            size, and for all sizes when there is a second one.
        options: Options of the backend, instead of `mode`.
        disable: Compile nothing, for a test.
        use_regional_compilation: `True`: compile each repeated block, such as the layers of a transformer; `False`: compile
            the whole model. Default: the blocks if the model has some, which takes less time to compile.

    Example:
        ```python
        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        accelerator = Accelerator(dynamo_plugin=plugin)
        ```
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        for name in ("fullgraph", "dynamic", "disable", "use_regional_compilation"):
            value = getattr(self, name)
            if value not in (True, False) and not (value is None and name != "disable"):
                raise ConfigurationError(f"TorchDynamoPlugin({name}=...) must be True or False, not {value!r}.")


def compilation_of(backend: Any, plugin: Any, settings: Settings) -> Compilation | None:
    """How models are compiled, from two arguments of `Accelerator` and the settings; `None`: they are not compiled.

    Args:
        backend: The argument `dynamo_backend`.
        plugin: The argument `dynamo_plugin`.
        settings: The settings.

    Raises:
        ConfigurationError: An argument is wrong, or both are given.
    """
    _check(backend, plugin)
    of_plugin = {} if plugin is None else {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    options = {**settings.compiling, **{name: value for name, value in of_plugin.items() if value is not None}}
    regional = options.pop("use_regional_compilation", None)
    disabled = options.pop("disable", False)
    if backend is not None:
        options["backend"] = backend
    chosen = options.get("backend")
    if chosen is None:
        if plugin is not None and not disabled:
            raise ConfigurationError(
                "TorchDynamoPlugin without a backend compiles nothing. Name one: TorchDynamoPlugin(backend='inductor')"
            )
        return None
    chosen = getattr(chosen, "value", chosen)
    if disabled or str(chosen).lower() == "no":
        return None
    options["backend"] = chosen if callable(chosen) else backend_name(chosen)
    if options.get("mode") == "default":
        del options["mode"]
    return Compilation(options, regional, source=f"dynamo_backend={chosen!r}")


def _check(backend: Any, plugin: Any) -> None:
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigurationError(
            f"dynamo_plugin must be a TorchDynamoPlugin, not {plugin!r}: from trainkit.utils import TorchDynamoPlugin"
            f"{make_instance(plugin, TorchDynamoPlugin)}"
        )
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend= and dynamo_plugin= were given. Give one of them: TorchDynamoPlugin(backend='inductor')"
        )
