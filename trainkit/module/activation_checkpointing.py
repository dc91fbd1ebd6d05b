"""Activation checkpointing: the backward pass recomputes what chosen modules have computed, instead of keeping it.

The `forward` of a chosen module is replaced by one that calls the original through `torch.utils.checkpoint`. The modules
themselves stay, and so do the names of parameters, the keys of state dicts, and hooks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainkit.checks import choice, whole_number
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.module.blocks import Choice, describe_modules, find_repeated_blocks, select_modules

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = [
    "CheckpointedModules",
    "CheckpointingChoice",
    "checkpoint_activations",
    "checkpointing_choice",
    "refuse_checkpointing",
    "refuse_eager_backend",
]

_Policy = Callable[..., CheckpointPolicy]
_Context = AbstractContextManager[Any]

_NULL = nullcontext()
_ARGUMENT = "activation_checkpointing"
_KEYS = ("modules", "policy", "every")


@dataclass(frozen=True)
class CheckpointingChoice:
    """The value of `activation_checkpointing=`, checked.

    Attributes:
        modules: Which modules; `None`: the repeated blocks.
        policy: `"full"` recomputes everything, `"selective"` keeps the outputs of expensive operations.
        every: Every n-th of the modules, beginning with the first.
    """

    modules: Choice | Sequence[Choice] | None = None
    policy: str = "full"
    every: int = 1

    def __str__(self) -> str:
        modules = "the repeated blocks" if self.modules is None else _format_modules(self.modules)
        return modules + (f", one in {self.every}" if self.every > 1 else "") + self.policy_note

    @property
    def policy_note(self) -> str:
        """What the policy keeps, for messages."""
        return "; matrix products, convolutions and attention are kept" if self.policy == "selective" else ""

    def of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules to checkpoint: dotted name → module.

        Raises:
            ConfigurationError: There are none, or one of them has no `forward`.
        """
        modules = find_repeated_blocks(model) if self.modules is None else select_modules(model, self.modules, _ARGUMENT)
        if not modules:
            raise ConfigurationError(
                f"{_ARGUMENT}: {type(model).__name__} has no repeated blocks, which are modules of one class in an "
                f"nn.ModuleList or nn.Sequential. Name the modules to recompute: {_ARGUMENT}=Block, a class of yours"
            )
        for name, module in modules.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise ConfigurationError(
                    f"{_ARGUMENT}: {name} is a {type(module).__name__}, which has no forward to recompute. Choose the modules "
                    f"in it: {_ARGUMENT}={f'{name}.*'!r}"
                )
        return {name: modules[name] for name in list(modules)[:: self.every]}


def checkpointing_choice(value: Any) -> CheckpointingChoice | None:
    """The argument `activation_checkpointing=`, checked as far as that is possible without a model; `None`: it is off.

    Raises:
        ConfigurationError: The value is wrong.
    """
    if value is None or value is False:
        return None
    if value is True:
        return CheckpointingChoice()
    if isinstance(value, str) and value == "selective":
        return CheckpointingChoice(policy="selective")
    if isinstance(value, Mapping):
        return _from_dict(value)
    if not (isinstance(value, str | list | tuple | set | frozenset) or callable(value)) or value in ("", [], ()):
        raise ConfigurationError(
            f"{_ARGUMENT}={value!r}: expected True, 'selective', a class of nn.Module, the name of a class or a module, a "
            f"function (name, module) -> bool, a list of these, or a dict with keys of {', '.join(_KEYS)}. For example: "
            f"{_ARGUMENT}=True"
        )
    return CheckpointingChoice(value)


def _from_dict(value: Mapping[str, Any]) -> CheckpointingChoice:
    for key in value:
        if key not in _KEYS:
            raise UnknownNameError(f"{_ARGUMENT} has no key {key!r}; known: {', '.join(_KEYS)}.{nearest(str(key), _KEYS)}")
    policy = choice(value.get("policy", "full"), f"{_ARGUMENT}['policy']", ("full", "selective"))
    modules = value.get("modules")
    return CheckpointingChoice(modules, policy, whole_number(value.get("every", 1), f"{_ARGUMENT}['every']", 1))


def _format_modules(modules: Any) -> str:
    if isinstance(modules, list | tuple | set | frozenset):
        return ", ".join(map(_format_modules, modules))
    return str(getattr(modules, "__qualname__", modules))


def refuse_checkpointing(value: Any, strategy: Strategy) -> None:
    """Raise an `UnsupportedArgumentError` if activations are to be recomputed, and the strategy does not support that."""
    if strategy.lazy_tensors and checkpointing_choice(value) is not None:
        raise UnsupportedArgumentError(
            f"{_ARGUMENT} does not work with {type(strategy).__name__}: torch.utils.checkpoint does not support XLA "
            f"devices. Remove {_ARGUMENT}, and call torch_xla.utils.checkpoint.checkpoint in your module."
        )


def refuse_eager_backend(value: Any, backend: str | None) -> None:
    """Raise an `UnsupportedArgumentError` if activations are to be recomputed in a model that this backend compiles.

    This backend runs the traced operations as they are, where torch does not keep the generator for the recomputation.
    """
    if backend == "eager" and checkpointing_choice(value) is not None:
        raise UnsupportedArgumentError(
            f"{_ARGUMENT} does not work with torch.compile's backend 'eager': with dropout the gradients would be wrong. Use "
            "the backend 'inductor' or 'aot_eager', or remove one of the two."
        )


class CheckpointedModules:
    """What `checkpoint_activations` has changed.

    Attributes:
        classes: Dotted name of each module whose activations are recomputed → the name of its class.
    """

    def __init__(self) -> None:
        self.classes: dict[str, str] = {}
        self._undo: list[Callable[[], Any]] = []

    def __str__(self) -> str:
        return describe_modules(self.classes)

    def record(self, modules: Mapping[str, nn.Module], undo: Callable[[], Any]) -> None:
        """Record that the activations of these modules are recomputed until `undo` is called."""
        self.classes |= {name: type(module).__name__ for name, module in modules.items()}
        self._undo.append(undo)

    def restore(self) -> None:
        """Undo the changes: the modules keep their activations again."""
        while self._undo:
            self._undo.pop()()


def checkpoint_activations(model: nn.Module, chosen: CheckpointingChoice) -> CheckpointedModules:
    """Let the backward pass recompute the activations of modules inside a model. Call it before the model is sharded.

    Random numbers are drawn again as in the forward pass: torch's, the device's, numpy's and those of `random`. In a model
    of `transformers`, its own implementation recomputes the layers, because it turns off their key-value cache.

    Args:
        model: The user's model, without wrappers.
        chosen: What to recompute.

    Returns:
        What was changed; its `restore` undoes that.

    Raises:
        ConfigurationError: The model has no such modules, or recomputes activations already.
    """
    modules, result = chosen.of(model), CheckpointedModules()
    policy = _keep_expensive if chosen.policy == "selective" else None
    try:
        for part in _transformers_models(model):
            inside = set(part.modules())
            layers = {name: module for name, module in modules.items() if module in inside and _is_transformers_layer(module)}
            if layers:
                modules = {name: module for name, module in modules.items() if name not in layers}
                _enable_in(part, set(layers.values()), policy)
                result.record(layers, partial(_disable_in, part))
        for name, module in modules.items():
            result.record({name: module}, _recompute(module, policy))
    except BaseException:
        result.restore()
        raise
    return result


def _recompute(module: nn.Module, policy: _Policy | None) -> Callable[[], Any]:
    """Replace the `forward` of a module; returns what restores it."""
    before = vars(module).get("forward")  # another library may have replaced it
    module.forward = _RecomputedForward(module, policy)
    return partial(delattr, module, "forward") if before is None else partial(setattr, module, "forward", before)


class _RecomputedForward:
    """The `forward` of a module, whose activations the backward pass recomputes.

    An object with a bound method, and not a closure, so that the `forward` of a copy of the module belongs to the copy.
    """

    def __init__(self, module: nn.Module, policy: _Policy | None) -> None:
        update_wrapper(self, module.forward)  # This also copies the signature.
        self._forward = module.forward
        self._policy = policy
        self._normalized = _select_batchnorm(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def run(named: dict[str, Any], *args: Any) -> Any:
            return forward(*args, **named)

        # The keywords are an argument of `run` because torch looks in its arguments only for devices with generators.
        plain = self._policy is None and torch.compiler.is_compiling()
        contexts: dict[str, Any] = {} if plain else {"context_fn": partial(_contexts, self._policy, self._normalized)}
        return checkpoint(run, kwargs, *args, use_reentrant=False, **contexts)


def _contexts(policy: _Policy | None, normalized: nn.Module | None) -> tuple[_Context, _Context]:
    """The contexts of a forward and of its recomputation."""
    compiling = _is_traced()
    if policy is None and not compiling:
        return _NULL, _Recomputation(normalized)
    forward, recomputation = create_selective_checkpoint_contexts(policy or _keep_nothing)
    if not compiling:  # the compiler accepts only torch's own contexts, and its graphs keep the generators
        recomputation = _Recomputation(normalized, recomputation)
    return forward, recomputation


def _is_traced() -> bool:
    """Whether the compiler traces this call. In torch 2.9 `is_compiling` misses passes in which operations are recorded."""
    recording = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)  # There is no public function for it.
    return torch.compiler.is_compiling() or recording is not None


def _select_batchnorm(module: nn.Module) -> nn.Module | None:
    """The module if BatchNorm layers are in it, which must not count a batch twice."""
    return module if any(isinstance(part, _BatchNorm) for part in module.modules()) else None


class _Recomputation:
    """The context of a recomputation: as in the forward, numpy and `random` draw the same numbers. torch keeps its own.

    BatchNorm layers normalize with the batch as before, and leave their running statistics alone.

    Args:
        normalized: The module in which they are; `None`: there are none.
        inner: A context around the recomputation.
    """

    def __init__(self, normalized: nn.Module | None, inner: _Context = _NULL) -> None:
        self._states = _host_states()
        self._normalized = normalized
        self._inner = inner

    def __enter__(self) -> None:
        self._before, parts = _host_states(), () if self._normalized is None else self._normalized.modules()
        _set_host_states(self._states)
        self._layers = [(part, part.momentum, part.num_batches_tracked) for part in parts if isinstance(part, _BatchNorm)]
        for layer, *_ in self._layers:  # a momentum of 0 keeps the statistics; without them torch saves fewer tensors, an error
            layer.momentum, layer.num_batches_tracked = 0.0, None
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for layer, momentum, tracked in self._layers:
            layer.momentum, layer.num_batches_tracked = momentum, tracked
        _set_host_states(self._before)


def _host_states() -> tuple[Any, Any]:
    return np.random.get_state(legacy=False), random.getstate()


def _set_host_states(states: tuple[Any, Any]) -> None:
    np.random.set_state(states[0])
    random.setstate(states[1])


# ----------------------------------------------------------------------------------------------------------- selective

_ATEN = torch.ops.aten
_EXPENSIVE = frozenset(
    getattr(_ATEN, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_ATEN, name)
)


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of matrix products, convolutions and attention, and recompute the rest.

    Attention with dropout is recomputed: otherwise the recomputation would not advance the generator, and all dropout after
    it would draw other numbers than in the forward pass.
    """
    if operation not in _EXPENSIVE or _dropout_of(operation, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _dropout_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value)
    return 0.0


# -------------------------------------------------------------------------------------------------------- transformers


def _transformers_models(model: nn.Module) -> Iterator[Any]:
    """The outermost models of `transformers` in a model that can recompute their layers."""
    if getattr(type(model), "supports_gradient_checkpointing", False):
        yield model
    else:
        for child in model.children():
            yield from _transformers_models(child)


def _is_transformers_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _enable_in(model: Any, layers: set[nn.Module], policy: _Policy | None) -> None:
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise ConfigurationError(
            f"{_ARGUMENT} was given, and {type(model).__name__} recomputes activations already. Remove one of the two: the "
            f"argument, or the model's gradient_checkpointing_enable()"
        )
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    with _hooks_of_inputs_kept(model):
        enable({"use_reentrant": False, "context_fn": partial(_contexts, policy, _select_batchnorm(model))})
    for part in model.modules():
        if _is_transformers_layer(part):
            part.gradient_checkpointing = part in layers


def _disable_in(model: Any) -> None:
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    with _hooks_of_inputs_kept(model):
        disable()


@contextmanager
def _hooks_of_inputs_kept(model: Any) -> Iterator[None]:
    """Within it, the model adds and removes no hooks that let its inputs require gradients.

    Only reentrant checkpoints need such hooks: here they would only cost a backward. Those that are there are the user's.
    """
    names = ("enable_input_require_grads", "disable_input_require_grads")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    vars(model).update(dict.fromkeys(names, lambda: None))
    try:
        yield
    finally:
        for name in names:
            del vars(model)[name]
        vars(model).update(before)
