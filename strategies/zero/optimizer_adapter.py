"""The user's optimizer and the one that ZeRO steps in its stead, over flat partitions of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.console import warn
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.state.slots import bare_copy

if TYPE_CHECKING:
    from trainkit.strategies.zero.engine import Engine

__all__ = ["Shadow", "engine_over", "refuse_optimizer", "warn_of_slow_updates"]

# They look at a parameter as a whole, of which ZeRO has a flat part in each process.
_WHOLE = {
    "Adafactor": "its factors are means over the rows and columns of each parameter",
    "LBFGS": "it searches along a line over all parameters at once",
    "Muon": "it orthogonalises each parameter as a matrix",
    "MuonWithAuxAdam": "it orthogonalises each parameter as a matrix",
    "LAMB": "its rates depend on the norm of each parameter",
    "FusedLamb": "its rates depend on the norm of each parameter",
    "LARS": "its rates depend on the norm of each parameter",
    "SparseAdam": "its gradients are sparse",
}


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse what would be changed silently by working on flat parts of parameters.

    Raises:
        OptimizerError: it is one of those.
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _WHOLE:
            raise OptimizerError(
                f"{type(optimizer).__name__} does not work under ZeRO, which gives each process a flat part of the parameters: "
                f"{_WHOLE[kind.__name__]}. Use an elementwise one, such as torch.optim.AdamW, or strategy='ddp'."
            )


def warn_of_slow_updates(optimizer: Optimizer, device: torch.device) -> None:
    """Say so where updates are computed on the CPU by an optimizer that is not made for it.

    Args:
        optimizer: whose state and masters are offloaded.
        device: that the rest is computed on.
    """
    name = type(optimizer).__name__
    if device.type == "cpu" or name.startswith("DeepSpeedCPU"):
        return
    better = {"Adam": "Adam", "AdamW": "Adam", "Adagrad": "Adagrad", "Lion": "Lion"}.get(name.removeprefix("Fused"))
    fix = (
        f"deepspeed.ops.{better.lower()}.DeepSpeedCPU{better} does the same faster there (it is compiled when it is first used)"
        if better is not None
        else "keep the optimizer on the device if it fits: offload_optimizer=None"
    )
    warn(f"the optimizer is offloaded, so {name} computes its updates on the CPU, which is slow for it: {fix}.")


class Shadow:
    """An optimizer of the same kind as the user's, with groups of its own.

    ZeRO puts flat partitions in the place of an optimizer's parameters. That happens to the shadow: the user's optimizer keeps
    its groups, with his parameters in them, and what a scheduler writes into them is taken over before each step.

    Args:
        optimizer: the user's.

    Attributes:
        optimizer: as given.
        inner: what ZeRO steps; its state is the optimizer's.
        parameters: the trainable ones, in the order of the groups.
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
                f"{type(optimizer).__name__} has no parameter that requires a gradient, so there is nothing to train."
            )
        inner.param_groups = [theirs for _, theirs in self._pairs]
        self.inner = inner
        self.parameters: list[Tensor] = [p for _, theirs in self._pairs for p in theirs["params"]]
        self._known = [p for group in optimizer.param_groups for p in group["params"]]
        self._flags = [p.requires_grad for p in self._known]

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Within it DeepSpeed takes the inner optimizer over.

        DeepSpeed puts another Adagrad in the place of one, with one group and default options; so it is not to see that.
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
        """Whether its ``step`` is an int, as that of DeepSpeed's own optimizers is; torch's is a tensor."""
        return any(kind.__module__.startswith("deepspeed.") for kind in type(self.inner).__mro__)

    @property
    def begins_with_state(self) -> bool:
        """Whether it has state before its first step, as an Adagrad has."""
        return isinstance(self.inner, torch.optim.Adagrad)

    def make_state(self, flat: Tensor) -> None:
        """That state, for a partition."""
        initial = self.inner.defaults["initial_accumulator_value"]
        total = torch.full_like(flat, initial, requires_grad=False)
        self.inner.state[flat] = {"step": torch.tensor(0.0), "sum": total}

    def refuse_changes(self) -> None:
        """Refuse groups and parameters that came later, and others to be trained: the partitions are made.

        Raises:
            OptimizerError: there are such.
        """
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(now) != len(self._known):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has {len(now)} parameters, and had {len(self._known)} when ZeRO divided "
                "them. Give it all parameters in configure_optimizers."
            )
        flags = [p.requires_grad for p in self._known]
        if flags != self._flags:
            changed = sum(a != b for a, b in zip(flags, self._flags, strict=True))
            raise OptimizerError(
                f"requires_grad of {changed} parameters has changed since ZeRO divided them. Freeze and unfreeze in __init__, "
                "configure_model or configure_optimizers; or use strategy='ddp'."
            )

    def take_options(self) -> None:
        """What has been written into the user's groups, such as a learning rate."""
        for ours, theirs in self._pairs:
            for key, value in ours.items():
                if key != "params":
                    theirs[key] = value
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (), {})

    def stepped(self) -> None:
        """The step is made: tell those who want to know."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # by which schedulers see that there was a step
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})


def engine_over(parameters: Iterable[Tensor], engines: Iterable[Engine]) -> Engine:
    """The engine whose parameters are all among the given ones.

    Raises:
        ConfigurationError: there is none.
    """
    given = {id(parameter) for parameter in parameters}
    found = [engine for engine in engines if {id(parameter) for parameter in engine.parameters} <= given]
    if found:
        return found[0]
    raise ConfigurationError(
        "under ZeRO gradients are clipped for all parameters of an optimizer together, and these are not all of one. "
        "Write: clip_grad_norm_(model.parameters(), 1.0)"
    )
