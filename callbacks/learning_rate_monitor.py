"""`LearningRateMonitor`: the learning rates that the optimizer steps used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.checks import choice
from trainkit.console import warn
from trainkit.errors import ConfigurationError
from trainkit.optim.joint_optimizer import optimizers_in

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Logs the learning rate of every optimizer, at log boundaries or once per epoch.

    By step it logs the rate that this optimizer step used, before a scheduler changes it; by epoch, the rate at its beginning.
    In epochs with fewer optimizer steps than `log_every_n_steps` it also logs the first step of each epoch.
    Names are `lr-AdamW`; `lr-AdamW` and `lr-AdamW-1` for two optimizers of a class; `lr-AdamW/pg1`, `lr-AdamW/pg2`
    for parameter groups, or `lr-AdamW/<name>` if a group has a `"name"`. A `"name"` in the scheduler's configuration
    replaces `lr-AdamW`.

    Args:
        logging_interval: `"step"`, `"epoch"`, or None: each optimizer at the interval of its scheduler (by step without
            one).
        log_momentum: Also log the momentum (or the first beta), as `<name>-momentum`.
        log_weight_decay: Also log the weight decay, as `<name>-weight_decay`.
        log_key_prefix: A text before each of these names: with `"optim/"` it is `optim/lr-AdamW`.

    Attributes:
        lrs: Name → the learning rates that were logged since training started in this process, the oldest first.
        last_momentum_values: `<name>-momentum` → the momentum that was logged last; None before the first.
        last_weight_decay_values: `<name>-weight_decay` → the weight decay that was logged last; None before the first.

    Raises:
        ConfigurationError: An unknown interval; a Trainer without a logger (when training starts).

    Example:
        ```python
        trainer = Trainer(callbacks=[LearningRateMonitor(logging_interval="step")])
        ```
    """

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        super().__init__()
        choice(logging_interval, "LearningRateMonitor(logging_interval=)", ("step", "epoch"), optional=True)
        if not isinstance(log_key_prefix, str | None):
            raise ConfigurationError(
                f"LearningRateMonitor(log_key_prefix=) must be a text, not {log_key_prefix!r}. Fix: "
                "LearningRateMonitor(log_key_prefix='optim/')"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._names: dict[int, list[str]] = {}  # Id of an optimizer → one name per parameter group.
        self._bases: dict[int, str] = {}  # Id of an optimizer → its name.
        self._intervals: dict[int, str] = {}
        self._first_steps: set[int] = set()  # optimizers whose first step of a short epoch is to be logged, by id

    @property
    def lr_names(self) -> list[str]:
        """The names of the metrics, in the order of the optimizers; known when training starts."""
        return [name for names in self._names.values() for name in names]

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:  # fast_dev_run disables the loggers
            raise ConfigurationError(
                "LearningRateMonitor needs a logger, but the Trainer has none. Fix: Trainer(logger=True), or remove "
                "LearningRateMonitor"
            )
        configs = {config.optimizer_index: config for config in trainer.lr_scheduler_configs}
        if not configs:
            warn(
                "LearningRateMonitor: no learning rate scheduler is configured, so the rates stay the same unless the module "
                "changes them."
            )
        if self.log_momentum:
            _warn_without_momentum(trainer.optimizers)
        bases = [
            getattr(configs.get(index), "name", None) or f"lr-{type(optimizer).__name__}"
            for index, optimizer in enumerate(trainer.optimizers)
        ]
        self._names.clear()
        self._bases.clear()
        self._intervals.clear()
        for index, (optimizer, name) in enumerate(zip(trainer.optimizers, _number_names(bases), strict=True)):
            base = self.log_key_prefix + name
            self._bases[id(optimizer)], self._names[id(optimizer)] = base, _group_names(optimizer, base)
            interval = configs[index].interval if index in configs else "step"
            self._intervals[id(optimizer)] = self.logging_interval or interval
        self.lrs = {name: [] for name in self.lr_names}
        self.last_momentum_values = {f"{name}-momentum": None for name in self.lr_names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in self.lr_names}

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        by_step = {id(optimizer) for optimizer in trainer.optimizers if self._intervals.get(id(optimizer)) == "step"}
        self._first_steps = by_step if _is_short(trainer) else set()
        values: dict[str, float] = {}
        for optimizer in trainer.optimizers:
            if self._intervals.get(id(optimizer)) == "epoch":
                values.update(self._values(optimizer))
        if values:
            self.log_dict(values, on_step=False, on_epoch=True)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        for one in optimizers_in(optimizer):
            first = id(one) in self._first_steps
            self._first_steps.discard(id(one))
            if trainer.should_log and self._intervals.get(id(one)) == "step":
                self.log_dict(self._values(one), on_step=True, on_epoch=False)
            elif first:  # passed to the loggers now, since this step is no log boundary
                trainer._run.emit(self._values(one), True, trainer.global_step + 1)

    def _values(self, optimizer: Optimizer) -> dict[str, float]:
        values: dict[str, float] = {}
        if len(self._names[id(optimizer)]) != len(optimizer.param_groups):  # a group was added, as BaseFinetuning does
            self._names[id(optimizer)] = _group_names(optimizer, self._bases[id(optimizer)])
        for name, group in zip(self._names[id(optimizer)], optimizer.param_groups, strict=True):
            values[name] = float(group["lr"])
            self.lrs.setdefault(name, []).append(values[name])
            if self.log_momentum:
                self.last_momentum_values[f"{name}-momentum"] = values[f"{name}-momentum"] = _momentum(group)
            if self.log_weight_decay:
                decay = float(group.get("weight_decay", 0.0))
                self.last_weight_decay_values[f"{name}-weight_decay"] = values[f"{name}-weight_decay"] = decay
        return values


def _is_short(trainer: Trainer) -> bool:
    """Whether an epoch that begins has fewer optimizer steps than `log_every_n_steps`."""
    every = trainer.log_every_n_steps
    if not every or trainer._run.progress.epoch_start > 0:
        return False
    return trainer.num_training_batches / trainer.accumulate_grad_batches < every


def _number_names(bases: list[str]) -> list[str]:
    """`[a, a, b]` as `[a, a-1, b]`."""
    seen: Counter[str] = Counter()
    names = []
    for base in bases:
        names.append(f"{base}-{seen[base]}" if seen[base] else base)
        seen[base] += 1
    return names


def _group_names(optimizer: Optimizer, base: str) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [f"{base}/{groups[0]['name']}" if "name" in groups[0] else base]
    names = [f"{base}/{group.get('name', f'pg{number}')}" for number, group in enumerate(groups, start=1)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigurationError(
            f"LearningRateMonitor: parameter groups of {type(optimizer).__name__} have the same name: {', '.join(twice)}. "
            "Fix: give each group its own 'name', or none"
        )
    return names


def _warn_without_momentum(optimizers: Iterable[Optimizer]) -> None:
    without = [type(o).__name__ for o in optimizers if not {"momentum", "betas"} & {*getattr(o, "defaults", ())}]
    if without:
        names, verb = ", ".join(without), "has" if len(without) == 1 else "have"
        warn(f"LearningRateMonitor(log_momentum=True): {names} {verb} no momentum, so 0 is logged.")


def _momentum(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    return float(betas[0] if betas is not None else group.get("momentum", 0.0))
