"""What `Trainer(compile=)`, the settings and `torch.compile(module)` compile in a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainkit.accelerator.compiled import compiled_parts, described_parts
from trainkit.config.compiling import Compilation, compilation_of, refuse_compiled
from trainkit.config.settings import inherited_settings
from trainkit.console import notice
from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.strategy import Strategy
    from trainkit.trainer.run import Run

__all__ = ["begin_compiling", "described_compilation", "requested_compilation", "step_function", "uncompiled"]


def requested_compilation(given: Any, strategy: Strategy) -> Compilation | None:
    """How the argument `compile` of a `Trainer`, or else the settings, compile its modules; `None`: they do not.

    Raises:
        ConfigurationError: the argument or the backend of the settings is wrong.
        UnsupportedArgumentError: it does not work with the strategy.
    """
    settings = inherited_settings()
    with settings.attribute_errors(*(("dynamo_backend", *settings.of_place) if given is None else ())):
        found = compilation_of(None, None, settings) if given is None else Compilation.of_trainer(given)
        if found is not None:
            refuse_compiled(found, strategy)
    return found


def uncompiled(module: Any, compilation: Compilation | None) -> tuple[Any, Callable[..., Any] | None]:
    """The module inside `torch.compile(module)`, and what compiles its steps in the same way.

    Raises:
        ConfigurationError: `Trainer(compile=)` is given too.
    """
    inner = getattr(module, "_orig_mod", None)
    if inner is None:
        return module, None
    if compilation is not None and compilation.source.startswith("compile="):
        raise ConfigurationError(
            f"Trainer({compilation.source}) and torch.compile(module) both compile the module. Pass the module itself: "
            f"trainer.fit({type(inner).__name__}(...)); or remove compile."
        )
    return inner, module.dynamo_ctx


def begin_compiling(run: Run) -> None:
    """Compile the module's blocks in place, or its steps from now on. What the user has compiled replaces the settings."""
    compilation = run.compilation
    if compilation is None or run.compiler is not None:
        return
    parts = compiled_parts(run.module, compilation, run.strategy)
    run.compiled.compile(parts, compilation)
    if not parts:
        run.compiler = partial(torch.compile, **compilation.options)
    notice(f"compile: {described_parts(parts, 'the steps')}, {compilation}.")


def step_function(run: Run, name: str) -> Callable[..., Any]:
    """The step of this name, as the strategy runs it. What compiled code has logged is recorded after the step."""
    step = run.strategy.step_function(run.wrapped_module, run.module, name, run.compiler)
    if not run.compiles:
        return step

    def compiled_step(*given: Any) -> Any:
        outputs = step(*given)
        run.metrics.record_deferred()
        return outputs

    return compiled_step


def described_compilation(compilation: Compilation, module: TrainModule | None, strategy: Strategy) -> str:
    """What is compiled of a module, or the user's request if there is no module yet; and the options."""
    if module is None:
        return f"{compilation.source}, {compilation}"
    return f"{described_parts(compiled_parts(module, compilation, strategy), 'the steps')}, {compilation}"
