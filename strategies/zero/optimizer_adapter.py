"""The user's optimizers, and their shadow that ZeRO steps instead, over flat shards of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.console import warn
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.optim.optimizer_copy import bare_copy, quantizes
from trainkit.optim.whole_parameters import StepTrial
from trainkit.strategies._whole_steps import try_whole

if TYPE_CHECKING:
    from trainkit.strategies.zero.engine import TrainingEngine

__all__ = ["Shadow", "engine_over", "of_deepspeed", "refuse_optimizer", "warn_slow_on_cpu"]

# Optimizers that do not work, with the reason. Under ZeRO each process has a flat shard of the parameters.
_UNSUPPORTED = {
    "Adafactor": "it averages over the rows and columns of each parameter",
    "LBFGS": "it runs a line search over all parameters together",
    "MuonWithAuxAdam": "DeepSpeed orthogonalizes its gradients before they are clipped. torch.optim.Muon is supported",
    "FusedLamb": "it scales the learning rate by the norm of each parameter",
    "SparseAdam": "it needs sparse gradients",
}


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would give different results on flat shards of parameters."""
    for kind in type(optimizer).__mro__:
        reason = _UNSUPPORTED.get(kind.__name__)
        if quantizes(kind):
            reason = "it quantizes blocks of its state, which would be other blocks than in a checkpoint"
        if reason is not None:
            raise OptimizerError(
                f"{type(optimizer).__name__} does not work under ZeRO, where each process has a flat shard of the parameters: "
                f"{reason}. Use an elementwise optimizer, such as torch.optim.AdamW, or strategy='ddp'."
            )


def of_deepspeed(optimizer: Optimizer) -> bool:
    """Whether it is an optimizer of DeepSpeed: made for flat shards, and perhaps not for the tensors of a trial."""
    return any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__)


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
    """Optimizers of the same classes as the user's, with their own parameter groups, as the one that ZeRO steps.

    ZeRO replaces the parameters of an optimizer by flat shards. It does so in the shadow: the user's optimizers keep their
    groups and their parameters, and the options that a scheduler writes into them are copied to the shadow before each
    optimizer step.

    Args:
        optimizers: The user's, one or several that step together.

    Attributes:
        optimizers: As above.
        inner: The optimizer that ZeRO steps; it holds the optimizer state.
        parameters: The trainable parameters, in the order of the groups.
        step_whole: Steps the parameters in a flat shard whole: called with an optimizer, its group, which has the flat shard,
            and what the state consists of. Set by the engine's owner.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._parts: list[
            tuple[Optimizer, StepTrial | None]
        ] = []  # of each group: its copy, and the trial if it needs whole ones
        copies = [self._copy(optimizer) for optimizer in self.optimizers]
        self.step_whole: Callable[[Optimizer, dict[str, Any], StepTrial], None] | None = None
        whole = any(trial is not None for _, trial in self._parts)
        self.inner = GroupSteps(self, self._pairs, self._parts) if whole or len(copies) > 1 else copies[0]
        self.parameters: list[Tensor] = [p for _, theirs in self._pairs for p in theirs["params"]]
        self._known = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._flags = [p.requires_grad for p in self._known]

    def _copy(self, optimizer: Optimizer) -> Optimizer:
        refuse_optimizer(optimizer)
        copy = bare_copy(optimizer)
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            if trained:
                pairs.append((group, {**group, "params": trained}))
                self._parts.append((copy, _whole_trial(optimizer, group, trained)))
        if not pairs:
            raise OptimizerError(
                f"{type(optimizer).__name__} has no parameter to train: none of them requires a gradient. Call "
                "parameter.requires_grad_(True) on those to train before you create the optimizer."
            )
        copy.param_groups = [theirs for _, theirs in pairs]
        self._pairs += pairs
        return copy

    @contextmanager
    def class_hidden(self) -> Iterator[None]:
        """Context manager that hides the class of an Adagrad from DeepSpeed.

        DeepSpeed would replace it by another Adagrad, with one group and default options.
        """
        kind = type(self.inner)
        if kind is not GroupSteps and self.begins_with_state(0):
            self.inner.__class__ = Optimizer
        try:
            yield
        finally:
            self.inner.__class__ = kind

    def counts_in_ints(self, group: int) -> bool:
        """Whether `step` in the optimizer state is an int, as in DeepSpeed's optimizers; PyTorch uses a tensor."""
        return of_deepspeed(self._parts[group][0])

    def begins_with_state(self, group: int) -> bool:
        """Whether the optimizer of a group has state before its first step, like Adagrad."""
        return isinstance(self._parts[group][0], torch.optim.Adagrad)

    def make_state(self, group: int, flat: Tensor) -> None:
        """Create the initial optimizer state for a shard."""
        initial = self._parts[group][0].defaults["initial_accumulator_value"]
        total = torch.full_like(flat, initial, requires_grad=False)
        self.inner.state[flat] = {"step": torch.tensor(0.0), "sum": total}

    @property
    def names(self) -> str:
        """The class names of the optimizers, for messages."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def refuse_changes(self) -> None:
        """Refuse parameters that were added, frozen or unfrozen after ZeRO has sharded the optimizer."""
        now = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(now) != len(self._known):
            raise OptimizerError(
                f"{self.names} has {len(now)} parameters, but had {len(self._known)} when ZeRO sharded "
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
        for optimizer in self.optimizers:
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (), {})

    def after_step(self) -> None:
        """Run the post-step hooks of the user's optimizers."""
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it
            for hook in optimizer._optimizer_step_post_hooks.values():
                hook(optimizer, (), {})


class GroupSteps(Optimizer):
    """Steps each parameter group with the optimizer that it belongs to, over flat shards or whole parameters.

    Args:
        shadow: Its `step_whole` is called for the groups with a trial.
        pairs: The user's groups, and those over flat shards.
        parts: The optimizer of each group, and the trial if it needs whole parameters.
    """

    def __init__(
        self,
        shadow: Shadow,
        pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]],
        parts: Sequence[tuple[Optimizer, StepTrial | None]],
    ) -> None:
        # Without Optimizer.__init__: DeepSpeed replaces the parameters of the groups, and the optimizers share their state.
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self.param_groups = [theirs for _, theirs in pairs]
        self._shadow = shadow
        self._parts = {id(group): part for group, part in zip(self.param_groups, parts, strict=True)}
        for optimizer, _ in parts:
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the groups in `param_groups`, of which DeepSpeed chooses one at a time."""
        for group in self.param_groups:
            optimizer, trial = self._parts[id(group)]
            if not group["params"]:
                continue
            if trial is None:
                optimizer.param_groups = [group]
                optimizer.step()
            else:
                assert self._shadow.step_whole is not None
                self._shadow.step_whole(optimizer, group, trial)


def _whole_trial(optimizer: Optimizer, group: dict[str, Any], parameters: Iterable[Any]) -> StepTrial | None:
    """The trial of a group that has to be stepped whole; `None`: its step is elementwise.

    Raises:
        OptimizerError: It works on one process only.
    """
    if of_deepspeed(optimizer):
        return None
    whole = None
    for dims in {len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in parameters}:
        trial = try_whole(optimizer, group, max(dims, 1), torch.float32, next(iter(parameters)).device)
        whole = whole if trial.elementwise else trial
    return whole


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
