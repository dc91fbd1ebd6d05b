"""`LayerFreezing`: a schedule of which parameters are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainkit.callbacks._freezing import Freezing, parameters_of
from trainkit.checks import choice, is_whole
from trainkit.console import join_names
from trainkit.errors import ConfigurationError, ModuleError, OptimizerError, nearest
from trainkit.optim.parameter_names import parameter_names

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["LayerFreezing"]


class LayerFreezing(Freezing):
    """Freezes and unfreezes layers by a schedule of names: from an epoch or an optimizer step on, only these are trained.

    `configure_optimizers` passes all parameters to the optimizer, in any groups; a frozen parameter has no gradient, so the
    optimizer skips it. The groups do not change, so all schedulers work. What is trained depends only on the epoch or the
    step, so a resumed run needs no state. Under DDP the buckets are rebuilt when the trained parameters change. ZeRO is
    refused: it shards the optimizer over the processes before training starts.

    A BatchNorm layer whose parameters are frozen still updates its running statistics; call `eval()` on it to stop that.

    Args:
        schedule: Epoch or optimizer step → the names of what is trained from then on. A name is that of a parameter or of a
            module with all parameters in it, such as `"backbone.layer4"`, or a pattern of parameter names with `*`, `?` or
            `[...]` as in `fnmatch`, such as `"*.bias"`. `"*"` is everything. Before the first key, `requires_grad` is as
            you set it.
        interval: What the keys are: `"epoch"` or `"step"`; both count from 0. `"step"` needs automatic optimization.

    Raises:
        ConfigurationError: An argument is wrong, or the strategy shards the optimizer state.
        ModuleError: A name matches no parameter of the module. Raised before training starts.
        OptimizerError: No optimizer has a parameter of the schedule. Raised before training starts.

    Example:
        ```python
        freezing = LayerFreezing({0: ["head"], 3: ["head", "backbone.layer4"], 6: ["*"]})
        trainer = Trainer(callbacks=[freezing])
        ```
    """

    def __init__(self, schedule: Mapping[int, Sequence[str]], interval: str = "epoch") -> None:
        super().__init__()
        _check_schedule(schedule)
        choice(interval, "LayerFreezing(interval=)", ("epoch", "step"))
        self.schedule = {key: list(schedule[key]) for key in sorted(schedule)}
        self.interval = interval
        self._trained: dict[int, set[str]] = {}  # key → the names of the parameters

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit" and self.interval == "step" and not module.automatic_optimization:
            raise ConfigurationError(
                "LayerFreezing(interval='step') needs automatic optimization. Count epochs, interval='epoch', or set "
                "requires_grad in training_step, before the forward."
            )

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        names = list(parameter_names([module]).parameters)
        self._trained = {key: _matches(patterns, names, module) for key, patterns in self.schedule.items()}
        self._check_optimizers(trainer, module)
        self._apply(module, trainer.current_epoch if self.interval == "epoch" else trainer.global_step)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.interval == "epoch":
            self._apply(module, trainer.current_epoch)

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        if self.interval == "step":  # the start of an accumulation window, on all processes
            self._apply(module, trainer.global_step)

    def _apply(self, module: TrainModule, now: int) -> None:
        key = max((key for key in self.schedule if key <= now), default=None)
        if key is None or key == self._applied:
            return
        self._applied, trained = key, self._trained[key]
        for name, parameter in parameter_names([module]).parameters.items():
            parameter.requires_grad = name in trained

    def _check_optimizers(self, trainer: Trainer, module: TrainModule) -> None:
        known = parameters_of(trainer.optimizers)
        trained = set().union(*self._trained.values())
        parameters = parameter_names([module]).parameters
        missing = [name for name, parameter in parameters.items() if name in trained and id(parameter) not in known]
        if missing and trainer.optimizers:
            shown = join_names(missing)
            raise OptimizerError(
                f"LayerFreezing trains parameters that no optimizer has: {shown}. Pass all parameters in configure_optimizers, "
                "also those that are frozen at the start: torch.optim.AdamW(self.parameters(), lr=1e-3)"
            )


def _check_schedule(schedule: Any) -> None:
    fix = "Fix: LayerFreezing({0: ['head'], 3: ['*']})"
    if not isinstance(schedule, Mapping) or not schedule:
        raise ConfigurationError(f"LayerFreezing expected a dict of epoch or step → list of names, got {schedule!r}. {fix}")
    for key, names in schedule.items():
        if not is_whole(key) or key < 0:
            raise ConfigurationError(f"LayerFreezing: a key must be an integer of at least 0, not {key!r}. {fix}")
        if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"LayerFreezing: expected a list of names for {key}, got {names!r}. {fix}")


def _matches(patterns: Sequence[str], names: Sequence[str], module: nn.Module) -> set[str]:
    """The names of the parameters that are meant by a list of names and patterns."""
    matches: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if name.startswith(f"{pattern}.") or name == pattern or fnmatchcase(name, pattern)}
        if not matching:
            parts = [part for name in names for part in (name, name.rpartition(".")[0])]
            raise ModuleError(
                f"LayerFreezing: {pattern!r} matches no parameter of {type(module).__name__}.{nearest(pattern, parts)} "
                "To list the names: [name for name, _ in module.named_parameters()]"
            )
        matches |= matching
    return matches
