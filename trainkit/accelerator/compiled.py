"""`CompiledModules`: modules that are compiled in place for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from trainkit.config.compiling import Compilation, refuse_compiled
from trainkit.errors import ConfigurationError
from trainkit.module.blocks import chosen_modules, repeated_blocks
from trainkit.strategy import Strategy

__all__ = ["CompiledModules", "compiled_parts", "described_parts"]


class CompiledModules:
    """Modules that `add` compiles in place, so that their names and types stay. `undo` ends it: the modules are the user's.

    It compiles `forward`, and not the call as `nn.Module.compile` does, which compiles nothing of torch's own layers: a
    `nn.TransformerEncoderLayer` would run as it is, silently. Hooks of a module run outside of its compiled code.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def add(self, model: nn.Module, compilation: Compilation, strategy: Strategy) -> None:
        """Compile the blocks of a model, or the whole model. What the user has compiled stays as it is.

        Raises:
            ConfigurationError: See `compiled_parts`.
        """
        if not _is_compiled(model):
            self.compile(compiled_parts(model, compilation, strategy) or {"": model}, compilation)

    def compile(self, modules: dict[str, nn.Module], compilation: Compilation) -> None:
        """Compile these modules, each by itself. What the user has compiled stays as it is."""
        for module in modules.values():
            if not _is_compiled(module):
                module.forward = _CompiledForward(module.forward, compilation)
                self._modules.append(module)

    def undo(self) -> None:
        """Let the modules run without `torch.compile` again."""
        while self._modules:
            module = self._modules.pop()
            compiled = vars(module).get("forward")
            if not isinstance(compiled, _CompiledForward):
                continue  # the user has assigned another one since
            del module.forward
            if getattr(compiled.replaced, "__self__", None) is not module:  # the user had assigned a function
                module.forward = compiled.replaced


class _CompiledForward:
    """Replaces the `forward` of a module. A copy of the module, or one that is unpickled, has the original `forward`."""

    def __init__(self, forward: Callable[..., Any], compilation: Compilation) -> None:
        self.replaced = forward
        self._compiled = torch.compile(forward, **compilation.options)
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.replaced,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is compiled here, comes from `torch.compile(module)`, or `module.compile()` was called.

    Torch has no public query.
    """
    ours = isinstance(vars(module).get("forward"), _CompiledForward)
    return ours or isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def compiled_parts(model: nn.Module, compilation: Compilation, strategy: Strategy) -> dict[str, nn.Module]:
    """The modules that are compiled by themselves: dotted name → module. Empty: the whole is compiled.

    Raises:
        ConfigurationError: The user asks for repeated blocks, and the model has none.
        UnknownNameError: A name that the user has given matches no module.
        UnsupportedArgumentError: The whole would be compiled, which the strategy does not support.
    """
    if compilation.modules is not None:
        return chosen_modules(model, compilation.modules, "compile['modules']")
    if compilation.regional is False:
        return {}
    found = repeated_blocks(model)
    if compilation.regional and not found:
        raise ConfigurationError(
            f"{compilation.source}: {type(model).__name__} has no repeated blocks. Expected an nn.ModuleList or nn.Sequential "
            "with two or more modules of one class, which have submodules. Compile the whole: compile='whole'; or name the "
            "modules: compile={'modules': 'Encoder'}"
        )
    if not found and not strategy.compiles:
        refuse_compiled(compilation, strategy, whole=True)
    return found


def described_parts(parts: dict[str, nn.Module], whole: str) -> str:
    """What is compiled, in words: `12 × Block`, or `whole` if there are no parts."""
    counts = Counter(type(module).__name__ for module in parts.values())
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or whole
