"""The user's optimizer, and its shadow that ZeRO steps instead, over flat shards of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.console import warn
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.optim.optimizer_copy import bare_copy, quantizes

if TYPE_CHECKING:
    from trainkit.strategies.zero.engine import TrainingEngine

__all__ = ["Shadow", "engine_over", "refuse_optimizer", "warn_slow_on_cpu"]

# Optimizers that need full parameters, with the reason. Under ZeRO each process has a flat shard of the parameters.
_FULL = {
    "Adafactor": "it averages over the rows and columns of each parameter",
    "LBFGS": "it runs a line search over all parameters together",
    "Muon": "it orthogonalizes each parameter as a matrix",
    "MuonWithAuxAdam": "it orthogonalizes each parameter as a matrix",
    "LAMB": "it scales the learning rate by the norm of each parameter",
    "FusedLamb": "it scales the learning rate by the norm of each parameter",
    "LARS": "it scales the learning rate by the norm of each parameter",
    "SparseAdam": "it needs sparse gradients",
}


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would give different results on flat shards of parameters."""
    for kind in type(optimizer).__mro__:
        reason = _FULL.get(kind.__name__)
        if quantizes(kind):
            reason = "it quantizes blocks of its state, which would be other blocks than in a checkpoint"
        if reason is not None:
            raise OptimizerError(
                f"{type(optimizer).__name__} does not work under ZeRO, where each process has a flat shard of the parameters: "
                f"{reason}. Use an elementwise optimizer, such as torch.optim.AdamW, or strategy='ddp'."
            )


def warn_slow_on_cpu(optimizer: Optimizer, device: torch.device) -> None:
    """Warn if an optimizer that is slow on the CPU is offloaded from a GPU.

    Args:
        optimizer: The offloaded optimizer.
        device: The device of the forward and the backward pass.
    """
    name = type(optimizer).__name__
    if device.type == "cpu" or name.startswith("DeepSpeedCPU"):
        return
    better = {"Adam": "Adam", "AdamW": "Adam", "Adagrad": "Adagrad", "Lion": "Lion"}.get(name.removeprefix("Fused"))
    fix = (
        f"Use deepspeed.ops.{better.lower()}.DeepSpeedCPU{better}, which does the same faster (DeepSpeed compiles it once)"
        if better is not None
        else "Keep the optimizer on the device if it fits: offload_optimizer=None"
    )
    warn(f"the optimizer is offloaded, so {name} runs its steps on the CPU, where it is slow. {fix}.")


class Shadow:
    """An optimizer of the same class as the user's, with its own parameter groups.

    ZeRO replaces the parameters of an optimizer by flat shards. It does so in the shadow: the user's optimizer keeps its groups
    and its parameters, and the options that a scheduler writes into them are copied to the shadow before each optimizer step.

    Attributes:
        inner: The optimizer that ZeRO steps; it holds the optimizer state.
        parameters: The trainable parameters, in the order of the groups.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        refuse_optimizer(optimizer)
        self.optimizer = optimizer
        inner = bare_copy(optimizer)
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            if trained:
                self._pairs.append((group, {**group, "params": trained}))
        if not self._pairs:
            raise OptimizerError(
                f"{type(optimizer).__name__} has no parameter to train: none of them requires a gradient. Call "
                "parameter.requires_grad_(True) on those to train before you create the optimizer."
            )
        inner.param_groups = [theirs for _, theirs in self._pairs]
        self.inner = inner
        self.parameters: list[Tensor] = [p for _, theirs in self._pairs for p in theirs["params"]]
        self._known = [p for group in optimizer.param_groups for p in group["params"]]
        self._flags = [p.requires_grad for p in self._known]

    @contextmanager
    def class_hidden(self) -> Iterator[None]:
        """Context manager that hides the class of an Adagrad from DeepSpeed.

        DeepSpeed would replace it by another Adagrad, with one group and default options.
        """
        kind = type(self.inner)
        if self.begins_with_state:
            self.inner.__class__ = Optimizer
        try:
            yield
        finally:
            self.inner.__class__ = kind

    @property
    def counts_in_ints(self) -> bool:
        """Whether `step` in the optimizer state is an int, as in DeepSpeed's optimizers; PyTorch uses a tensor."""
        return any(kind.__module__.startswith("deepspeed.") for kind in type(self.inner).__mro__)

    @property
    def begins_with_state(self) -> bool:
        """Whether the optimizer has state before its first step, like Adagrad."""
        return isinstance(self.inner, torch.optim.Adagrad)

    def make_state(self, flat: Tensor) -> None:
        """Create the initial optimizer state for a shard."""
        initial = self.inner.defaults["initial_accumulator_value"]
        total = torch.full_like(flat, initial, requires_grad=False)
        self.inner.state[flat] = {"step": torch.tensor(0.0), "sum": total}

    def refuse_changes(self) -> None:
        """Refuse parameters that were added, frozen or unfrozen after ZeRO has sharded the optimizer."""
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(now) != len(self._known):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has {len(now)} parameters, but had {len(self._known)} when ZeRO sharded "
                "them. Pass all parameters when you create the optimizer, in configure_optimizers."
            )
        flags = [p.requires_grad for p in self._known]
        if flags != self._flags:
            changed = sum(a != b for a, b in zip(flags, self._flags, strict=True))
            raise OptimizerError(
                f"requires_grad of {changed} parameters has changed since ZeRO sharded them. Freeze and unfreeze in __init__, "
                "configure_model or configure_optimizers, or use strategy='ddp'."
            )

    def copy_options(self) -> None:
        """Copy the options of the user's groups, such as the learning rate, and run the user's pre-step hooks."""
        for ours, theirs in self._pairs:
            for key, value in ours.items():
                if key != "params":
                    theirs[key] = value
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (), {})

    def after_step(self) -> None:
        """Run the post-step hooks of the user's optimizer."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})


def engine_over(parameters: Iterable[Tensor], engines: Iterable[TrainingEngine]) -> TrainingEngine:
    """Returns the engine whose parameters are all in `parameters`."""
    keys = {id(parameter) for parameter in parameters}
    for engine in engines:
        if {id(parameter) for parameter in engine.parameters} <= keys:
            return engine
    raise ConfigurationError(
        "ZeRO clips the gradients of all parameters of an optimizer together, but not all of them were passed. "
        "Pass them: clip_grad_norm_(model.parameters(), 1.0)"
    )
