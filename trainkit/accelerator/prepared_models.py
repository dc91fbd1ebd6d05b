"""What `Accelerator.prepare` makes of a model: wrapped by the strategy, run under the precision, compiled in place."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.config.compiling import Compilation, refuse_compiled
from trainkit.data.loader import PreparedLoader
from trainkit.errors import ConfigurationError
from trainkit.module.activation_checkpointing import CheckpointedModules, checkpoint_activations
from trainkit.module.blocks import find_repeated_blocks, select_modules
from trainkit.nested import map_tensors
from trainkit.optim.joint_optimizer import JointOptimizer
from trainkit.optim.parameter_names import KnownParameters
from trainkit.optim.prepared import PreparedOptimizer, PreparedScheduler
from trainkit.precision import Precision
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.accelerator.options import Options

__all__ = [
    "CompiledModules",
    "PrecisionWrapper",
    "PreparedModels",
    "PreparedObjects",
    "Wrapped",
    "describe_modules",
    "find_modules_to_compile",
    "unwrap",
    "user_model",
]


class Wrapped(nn.Module):
    """A wrapper, used like the user's model `module` in it: it has its state, names and attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied  # The copy may be an average of weights, which is not trained itself.

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def unwrap(model: nn.Module, inside: Callable[[nn.Module], nn.Module], keep_compiled: bool = False) -> nn.Module:
    """The innermost model, where `inside(model)` is what is inside a model, or the model itself.

    With `keep_compiled` it is what `torch.compile` has returned for the innermost one.
    """
    inner = inside(model)
    if inner is model:
        return model
    innermost = unwrap(inner, inside, keep_compiled)
    compiled = isinstance(model, torch._dynamo.OptimizedModule)
    return model if keep_compiled and innermost is inner and compiled else innermost


class PrecisionWrapper(Wrapped):
    """A model whose forward runs under the precision, for loops that call the model themselves.

    Mixed precision gives float32 outputs, so that a loss computed outside autocast is not computed in half precision; within
    `accelerator.autocast()` outputs are as autocast makes them.

    Args:
        module: The user's model, or what a strategy has wrapped around it.
        precision: The precision of the run.
        autocast: Options of `torch.autocast` in a mixed precision: `enabled`, `cache_enabled`.
    """

    def __init__(self, module: nn.Module, precision: Precision, **autocast: Any) -> None:
        super().__init__(module)
        self._precision = precision
        self._autocast = autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._precision
        # under accelerator.autocast() the loss is computed in autocast too, as in a Trainer
        within = torch.is_autocast_enabled(precision.device_type)
        with precision.forward_context(**self._autocast):
            outputs = self.module(*precision.convert_input(args), **precision.convert_input(kwargs))
        if precision.autocast_dtype is None or within:
            return outputs
        return map_tensors(outputs, lambda t: t.float() if t.dtype is precision.autocast_dtype else t)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return PrecisionWrapper(copy.deepcopy(self.module, memo), self._precision, **self._autocast)


def user_model(model: nn.Module, strategy: Strategy, keep_compiled: bool = False) -> nn.Module:
    """The user's model, prepared or not, without the wrappers of `prepare` and `torch.compile`; see `unwrap`."""

    def inside(outer: nn.Module) -> nn.Module:
        return outer.module if isinstance(outer, PrecisionWrapper) else strategy.unwrap(outer)

    return unwrap(model, inside, keep_compiled)


@dataclass
class PreparedObjects:
    """The objects that were passed to `prepare`, in that order.

    Attributes:
        models: The user's own, without wrappers.
        known: The parameters that the optimizers had when training began.
        joint: The optimizers as one that steps them together, in a `Trainer` under automatic optimization.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    known: KnownParameters = field(default_factory=KnownParameters)
    joint: JointOptimizer | None = None

    @property
    def torch_optimizers(self) -> list[Optimizer]:
        """The optimizers, as torch's objects."""
        return [prepared.optimizer for prepared in self.optimizers]

    @property
    def stepped(self) -> list[Optimizer]:
        """What makes a step by itself: each of torch's objects, or all of them as one."""
        return self.torch_optimizers if self.joint is None else [self.joint]

    def stepping(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """What steps when these optimizers, prepared or torch's own, step."""
        return [getattr(one, "optimizer", one) for one in optimizers] if self.joint is None else [self.joint]

    def clear(self) -> None:
        """Release all of them."""
        self.joint = None
        for objects in (self.models, self.optimizers, self.schedulers, self.loaders):
            objects.clear()


class PreparedModels:
    """Prepares models: recomputes their activations, compiles and wraps them, and runs them under the precision.

    Attributes:
        originals: The user's own, without wrappers.
        wrapped: As the strategy has wrapped them.
        returned: What `prepare` has returned, by id.
        evaluated: Those of the user's own that are not trained.
        recomputed: The modules whose activations are recomputed.
        compiled: The modules that are compiled.
    """

    def __init__(self, options: Options, originals: list[nn.Module]) -> None:
        self._options = options
        self._strategy = options.strategy
        self.originals = originals
        self.wrapped: list[nn.Module] = []
        self.returned: dict[int, nn.Module] = {}
        self.evaluated: list[nn.Module] = []
        self.recomputed: list[CheckpointedModules] = []
        self.compiled = CompiledModules()

    def prepare(self, model: nn.Module, evaluation: bool) -> nn.Module:
        """Prepare a model; with `evaluation` it is not trained, and no wrapper exchanges gradients."""
        options, strategy = self._options, self._strategy
        if options.activation_checkpointing is not None and not evaluation:  # before it is compiled, wrapped or sharded
            self.recomputed.append(checkpoint_activations(user_model(model, strategy), options.activation_checkpointing))
        if options.compile is not None:
            self.compiled.add(model, options.compile, strategy)
        wrapped = strategy.prepare_module(model)
        wrapped = wrapped if evaluation else strategy.wrap(wrapped)
        self.wrapped.append(wrapped)
        self.originals.append(user_model(wrapped, strategy))
        if evaluation:
            self.evaluated.append(self.originals[-1])
        autocast = {} if options.autocast is None else vars(options.autocast)
        returned = wrapped if strategy.precision.plain else PrecisionWrapper(wrapped, strategy.precision, **autocast)
        self.returned[id(returned)] = returned
        return returned

    def find(self, model: nn.Module, evaluation: bool) -> nn.Module | None:
        """What `prepare` has returned for a model, given that or the model; `None`: it is not prepared.

        Raises:
            ConfigurationError: It was prepared for evaluation, and now it is to be trained: no wrapper would exchange its
                gradients.
        """
        original = user_model(model, self._strategy)
        place = next((place for place, one in enumerate(self.originals) if one is original), None)
        if place is None:
            return None
        if not evaluation and any(one is original for one in self.evaluated):
            raise ConfigurationError(
                f"prepare: the {type(original).__name__} was prepared with evaluation_mode=True, so its gradients would not be "
                "averaged over the processes. To train it: model = accelerator.prepare_model(model)"
            )
        return list(self.returned.values())[place]

    def check(self, verb: str, model: Any) -> None:
        """Refuse a model that was not prepared."""
        if not isinstance(model, nn.Module) or all(user_model(model, self._strategy) is not one for one in self.originals):
            raise ConfigurationError(
                f"{verb}: {type(model).__name__} has not been prepared. Pass what prepare returned: model = "
                "accelerator.prepare(model)"
            )

    def check_device(self, model: nn.Module) -> None:
        """Refuse a model that is not moved and has parameters on another device."""
        elsewhere = {p.device for p in model.parameters()} - {self._strategy.device}
        if elsewhere and not self._strategy.placement(model):
            raise ConfigurationError(
                f"device_placement=False, but the model has parameters on {elsewhere.pop()}, and the device of this process is "
                f"{self._strategy.device}. Move the model: model.to(accelerator.device); or remove device_placement."
            )

    def clear(self) -> None:
        """Release all models."""
        for models in (self.originals, self.wrapped, self.returned, self.evaluated):
            models.clear()


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
            ConfigurationError: See `find_modules_to_compile`.
        """
        if not _is_compiled(model):
            self.compile(find_modules_to_compile(model, compilation, strategy) or {"": model}, compilation)

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


def find_modules_to_compile(model: nn.Module, compilation: Compilation, strategy: Strategy) -> dict[str, nn.Module]:
    """The modules that are compiled by themselves: dotted name → module. Empty: the whole is compiled.

    Raises:
        ConfigurationError: The user asks for repeated blocks, and the model has none.
        UnknownNameError: A name that the user has given matches no module.
        UnsupportedArgumentError: The whole would be compiled, which the strategy does not support.
    """
    if compilation.modules is not None:
        return select_modules(model, compilation.modules, "compile['modules']")
    if compilation.regional is False:
        return {}
    blocks = find_repeated_blocks(model)
    if compilation.regional and not blocks:
        raise ConfigurationError(
            f"{compilation.source}: {type(model).__name__} has no repeated blocks. Expected an nn.ModuleList or nn.Sequential "
            "with two or more modules of one class, which have submodules. Compile the whole: compile='whole'; or name the "
            "modules: compile={'modules': 'Encoder'}"
        )
    if not blocks and not strategy.compiles:
        refuse_compiled(compilation, strategy, whole=True)
    return blocks


def describe_modules(modules: dict[str, nn.Module], whole: str) -> str:
    """What is compiled, in words: `12 × Block`, or `whole` if there are no modules."""
    counts = Counter(type(module).__name__ for module in modules.values())
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or whole
