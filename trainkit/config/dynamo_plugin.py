"""`TorchDynamoPlugin`: arguments of `torch.compile` in Accelerate's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trainkit.config.compiling import Compilation, known_backend
from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.config.settings import Settings

__all__ = ["TorchDynamoPlugin", "compilation_of"]


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
    given = {} if plugin is None else {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    options = {**settings.compiling, **{name: value for name, value in given.items() if value is not None}}
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
    options["backend"] = chosen if callable(chosen) else known_backend(chosen)
    if options.get("mode") == "default":
        del options["mode"]
    return Compilation(options, regional, source=f"dynamo_backend={chosen!r}")


def _check(backend: Any, plugin: Any) -> None:
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigurationError(
            f"dynamo_plugin must be a TorchDynamoPlugin, not {plugin!r}: from trainkit.utils import TorchDynamoPlugin"
        )
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend= and dynamo_plugin= were given. Give one of them: TorchDynamoPlugin(backend='inductor')"
        )
