"""`trainer.plan(module)`: the memory estimate of a trainer's run, computed without data and without values of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.errors import MissingMethodError, ModuleError
from trainkit.footprint import Contents
from trainkit.memory.inventory import contents_of, placeholder_of
from trainkit.memory.report import MemoryPlan, plan_contents
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.precision import Precision

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["contents_of_module", "make_plan"]

_STEPS = 1000  # number of optimizer steps for schedules, if max_steps is not given


def make_plan(
    trainer: Trainer,
    module: TrainModule,
    processes: Sequence[int],
    per_host: int | None,
    device_memory: int | str | None,
    host_memory: int | str | None,
) -> MemoryPlan:
    """See `trainkit.Trainer.plan`."""
    contents = contents_of_module(trainer, module)
    late = next(module.parameters(), None) is None
    start = sum(p.nbytes for p in (contents.weights if late else module.parameters()))
    return plan_contents(trainer.strategy, contents, start, late, processes, per_host, device_memory, host_memory)


def contents_of_module(trainer: Trainer, module: TrainModule) -> Contents:
    """What a trainer's run of a module keeps in memory; the module is not changed, and nothing of its size is allocated.

    Raises:
        ModuleError: it is not a TrainModule, or has no parameters.
        MissingMethodError: it has no `configure_optimizers`.
        OptimizerError: what that returns is wrong.
    """
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, TrainModule):
        hint = f" Did you forget to make an instance: {module.__name__}()?" if isinstance(module, type) else ""
        raise ModuleError(f"expected a TrainModule, received {type(module).__name__}.{hint}")
    if not (is_overridden(module, "configure_optimizers", TrainModule) or trainer.strategy.has_optimizer):
        raise MissingMethodError(
            f"{type(module).__name__} has no configure_optimizers, so the memory of its optimizer cannot be determined. "
            "Define: def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=1e-3)   (or return None)"
        )
    placeholder: Any = placeholder_of(module)
    placeholder._trainer = _Planning(trainer)
    precision: Precision = trainer.precision_plugin
    if is_overridden(module, "configure_model", TrainModule) and not vars(module).get("_built", False):
        with torch.device("meta"), precision.init_context():
            placeholder.configure_model()
    if next(placeholder.parameters(), None) is None:
        raise ModuleError(
            f"{type(module).__name__} has no parameters, so there is nothing to plan. Create its layers in __init__ or "
            "in configure_model; setup() is not called for a plan."
        )
    precision.convert_module(placeholder)
    returned = trainer.strategy.configure_optimizers(placeholder)
    optimizers, _ = read_optimizers(
        _over_placeholders(returned, placeholder), placeholder, automatic=placeholder.automatic_optimization
    )
    schedule = trainer._run.accumulation_schedule
    windows = [trainer._arguments.accumulate_grad_batches] if schedule is None else schedule.scheduling.values()
    return contents_of([placeholder], optimizers, max(windows))


def _over_placeholders(returned: Any, placeholder: nn.Module) -> Any:
    """What `configure_optimizers` returned, with placeholders instead of parameters of the module."""
    placeholders = vars(placeholder)["_placeholders"]
    found = returned if isinstance(returned, list | tuple) else [returned]
    for one in found:
        optimizer = one.get("optimizer") if isinstance(one, dict) else one
        for inner in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            if isinstance(inner, Optimizer):
                for group in inner.param_groups:
                    group["params"] = [placeholders.get(id(p), p) for p in group["params"]]
    return returned


class _Planning:
    """The trainer as a module sees it while its memory is planned: it loads no data."""

    def __init__(self, trainer: Trainer) -> None:
        self._planned = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planned, name)

    @property
    def estimated_stepping_batches(self) -> int:
        """Any number will do: schedules use no memory."""
        steps = self._planned._arguments.max_steps
        return steps if steps > 0 else _STEPS
