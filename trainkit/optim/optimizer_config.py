"""Checks what `configure_optimizers` returned, and converts it to a list of optimizers and a list of schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.checks import whole_number
from trainkit.console import quantity, with_article
from trainkit.errors import OptimizerError, nearest
from trainkit.optim.parameter_names import foreign_parameters, parameter_names
from trainkit.optim.schedules import make_schedule

__all__ = ["SchedulerConfig", "needs_closure", "read_optimizers"]

_FORMS = (
    "an optimizer; a list of optimizers; ([optimizers], [schedulers]); {'optimizer': ..., 'lr_scheduler': scheduler or "
    "{'scheduler': ..., 'interval': 'step', ...}}; a list of such dicts; or None"
)


@dataclass
class SchedulerConfig:
    """When a scheduler makes a step.

    Attributes:
        scheduler: Anything with `step`, `state_dict` and `load_state_dict`. In what `configure_optimizers` returns also a name
            for `trainkit.optim.make_schedule`, whose arguments are then further keys, and whose interval is `"step"`.
        interval: `"epoch"` or `"step"`, which counts optimizer steps.
        frequency: Every how many of these.
        monitor: The metric that `ReduceLROnPlateau` reads; not needed under manual optimization, where you step it.
        strict: A monitor that was never logged is an error (`False`: a warning, and no advance).
        name: How `LearningRateMonitor` calls it.
        reduce_on_plateau: Advance it with the monitor's value; set by itself for `ReduceLROnPlateau`.
        optimizer_index: The number of its optimizer.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    optimizer_index: int = 0


_KEYS = [field.name for field in fields(SchedulerConfig) if field.name != "optimizer_index"]


def read_optimizers(returned: Any, module: nn.Module, automatic: bool) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """The optimizers and schedulers in what `configure_optimizers` returned. Those that are given by name are created.

    Raises:
        OptimizerError: Another form than the documented ones, an optimizer without the module's parameters, a scheduler of
            another optimizer; under automatic optimization several optimizers that cannot step together, and a plateau
            scheduler without a monitor.
    """
    optimizers, schedulers = _forms(returned)
    for optimizer in optimizers:
        _check_parameters(optimizer, module)
    if automatic and len(optimizers) > 1:
        _check_joint(optimizers, module)
    schedulers = [s.create(module) if isinstance(s, _NamedSchedule) else s for s in schedulers]
    configs = [_scheduler_config(scheduler, optimizers, automatic) for scheduler in schedulers]
    return optimizers, configs


def _forms(returned: Any) -> tuple[list[Optimizer], list[Any]]:
    """The optimizers and the schedulers, from one of the supported forms."""
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _one_dict(returned)
    if _all_are(Optimizer, returned):
        return list(returned), []
    if _all_are(Mapping, returned):
        optimizers, schedulers = zip(*map(_one_dict, returned), strict=True)
        return list(chain(*optimizers)), list(chain(*schedulers))
    if isinstance(returned, list | tuple) and len(returned) == 2 and _all_are(Optimizer, returned[0]):
        optimizers, schedulers = returned
        if isinstance(schedulers, list | tuple | Mapping):
            schedulers = [schedulers] if isinstance(schedulers, Mapping) else schedulers
            return list(optimizers), [_with_optimizer(scheduler, optimizers) for scheduler in schedulers]
    raise OptimizerError(f"configure_optimizers must return {_FORMS}; it returned {_describe(returned)}.")


def _all_are(kind: type, items: Any) -> bool:
    """Whether a value is a non-empty list or tuple of objects of a class."""
    return isinstance(items, list | tuple) and bool(items) and all(isinstance(item, kind) for item in items)


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{with_article(type(value).__name__)} of ({', '.join(type(item).__name__ for item in value)})"
    return repr(value)


def _one_dict(returned: Mapping[Any, Any]) -> tuple[list[Optimizer], list[Any]]:
    known = ("optimizer", "lr_scheduler", "monitor")
    for key in returned:
        if key == "frequency":
            raise OptimizerError(
                "configure_optimizers: 'frequency' of an optimizer is not supported. Use manual optimization "
                "(automatic_optimization = False) to step optimizers alternately."
            )
        if key not in known:
            raise OptimizerError(
                f"configure_optimizers: unknown key {key!r}; known: {', '.join(known)}.{nearest(str(key), known)}"
            )
    optimizer = returned.get("optimizer")
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"configure_optimizers: 'optimizer' must be a torch optimizer, not {optimizer!r}.")
    scheduler = returned.get("lr_scheduler")
    if scheduler is None:
        return [optimizer], []
    if "monitor" in returned:
        config = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        scheduler = {"monitor": returned["monitor"], **config}
    schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
    return [optimizer], [_with_optimizer(scheduler, [optimizer]) for scheduler in schedulers]


class _NamedSchedule(NamedTuple):
    """A schedule that is given by name, and its optimizer."""

    optimizer: Optimizer
    config: Mapping[str, Any]

    def create(self, module: Any) -> dict[str, Any]:
        """The form with a scheduler, for all optimizer steps of the module's run."""
        config = {key: value for key, value in self.config.items() if key in _KEYS}
        options = {key: value for key, value in self.config.items() if key not in _KEYS}
        name = config["scheduler"]
        if config.get("interval", "step") != "step" or config.get("frequency", 1) != 1:
            raise OptimizerError(
                f"lr_scheduler: the schedule {name!r} counts optimizer steps, so interval must be 'step' and frequency 1. To "
                f"count epochs: {{'scheduler': trainkit.optim.make_schedule({name!r}, optimizer, total_steps=epochs), "
                "'interval': 'epoch'}"
            )
        if "total_steps" not in options:
            options["total_steps"] = module.trainer.estimated_stepping_batches
        return {**config, "scheduler": make_schedule(name, self.optimizer, **options), "interval": "step"}


def _with_optimizer(scheduler: Any, optimizers: Sequence[Optimizer]) -> Any:
    """A scheduler in the form in which it was returned; one that is given by name gets its optimizer.

    Raises:
        OptimizerError: There are several optimizers.
    """
    config = {"scheduler": scheduler} if isinstance(scheduler, str) else scheduler
    if not isinstance(config, Mapping) or not isinstance(config.get("scheduler"), str):
        return scheduler
    if len(optimizers) > 1:
        raise OptimizerError(
            f"lr_scheduler: it is unclear which of {len(optimizers)} optimizers the schedule {config['scheduler']!r} is for. "
            "Return a list of dicts: [{'optimizer': first, 'lr_scheduler': {'scheduler': 'cosine'}}, {'optimizer': second}]"
        )
    return _NamedSchedule(optimizers[0], config)


def _check_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    name = type(optimizer).__name__
    foreign = foreign_parameters(optimizer, [module])
    if foreign:
        raise OptimizerError(
            f"{name} has {quantity(len(foreign), 'parameter that is', 'parameters that are')} not the module's "
            f"(the first of shape {tuple(foreign[0].shape)}). Pass self.parameters() to it, or assign them to the module: "
            "self.weight = nn.Parameter(...). An optimizer that was created before layers were replaced has the old parameters."
        )


_IN_TURNS = (
    "to step them in turns, set self.automatic_optimization = False in __init__ and call self.manual_backward(loss) and "
    "opt.step() in training_step"
)


def _check_joint(optimizers: list[Optimizer], module: nn.Module) -> None:
    """Refuse optimizers that cannot step together after one backward pass."""
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__} computes the loss again in its step, so it cannot step together with other "
                f"optimizers, and configure_optimizers returned {len(optimizers)}. Return {type(optimizer).__name__} alone; or "
                f"{_IN_TURNS}."
            )
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                name = parameter_names([module])[id(parameter)]
                first, second = (f"{type(optimizers[n]).__name__} (optimizer {n})" for n in (other, number))
                raise OptimizerError(
                    f"the parameter {name!r} belongs to {first} and to {second}, which would both change it in each step. "
                    "Expected optimizers without a parameter in common: after each backward pass all of them step. Remove it "
                    f"from one of them; or {_IN_TURNS}."
                )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` of the optimizer cannot be called without a closure, like that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _scheduler_config(scheduler: Any, optimizers: list[Optimizer], automatic: bool) -> SchedulerConfig:
    if isinstance(scheduler, Mapping):
        for key in scheduler:
            if key not in _KEYS:
                raise OptimizerError(f"lr_scheduler: unknown key {key!r}; known: {', '.join(_KEYS)}.{nearest(str(key), _KEYS)}")
        if "scheduler" not in scheduler:
            raise OptimizerError("lr_scheduler: a dict needs 'scheduler': {'scheduler': scheduler, 'interval': 'step'}.")
        config = SchedulerConfig(**scheduler)
    else:
        config = SchedulerConfig(scheduler)
    bare = config.scheduler
    config.reduce_on_plateau = config.reduce_on_plateau or isinstance(bare, ReduceLROnPlateau)
    _check_scheduler(config, automatic)
    owner = getattr(bare, "optimizer", None)
    if isinstance(bare, LRScheduler) or owner is not None:
        indices = [i for i, optimizer in enumerate(optimizers) if optimizer is owner]
        if not indices:
            raise OptimizerError(
                f"{type(bare).__name__} was created for an optimizer that configure_optimizers did not return. Create it with "
                "an optimizer that is returned."
            )
        config.optimizer_index = indices[0]
    return config


def _check_scheduler(config: SchedulerConfig, automatic: bool) -> None:
    name = type(config.scheduler).__name__
    # Under manual optimization only the user's code advances it.
    methods = ("step",) if automatic else ("step", "state_dict")
    if isinstance(config.scheduler, type) or not any(callable(getattr(config.scheduler, name, None)) for name in methods):
        raise OptimizerError(f"lr_scheduler: expected an object with step(), got {config.scheduler!r}.")
    if config.interval not in ("step", "epoch"):
        raise OptimizerError(f"lr_scheduler: interval must be 'step' or 'epoch', not {config.interval!r}.")
    fix = "{'scheduler': scheduler, 'frequency': 1}"
    whole_number(config.frequency, "lr_scheduler: frequency", 1, fix=fix, error=OptimizerError)
    if automatic and config.reduce_on_plateau and config.monitor is None:
        raise OptimizerError(
            f"{name} needs the metric that it monitors: return {{'optimizer': optimizer, 'lr_scheduler': "
            "{'scheduler': scheduler, 'monitor': 'val_loss'}}."
        )
