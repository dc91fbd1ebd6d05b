"""`trainer.plan(module)`: the memory estimate of a trainer's run, computed without values of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainkit.data.combined import CombinedLoader, training_source
from trainkit.errors import MissingMethodError, ModuleError
from trainkit.memory.inventory import built_placeholder, contents_of
from trainkit.memory.report import MemoryPlan, plan_contents
from trainkit.memory.traced_step import StepTraceError, activation_profile, reasons
from trainkit.module.activation_checkpointing import checkpoint_activations, checkpointing_choice
from trainkit.module.data_module import DataModule
from trainkit.module.overridable_hooks import DataHooks, is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.rng import RandomState
from trainkit.strategy import Contents
from trainkit.trainer.states import TrainerFn

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["contents_of_module", "make_plan"]

_ASSUMED_STEPS = 1000  # number of optimizer steps for schedules, if max_steps is not given


def make_plan(
    trainer: Trainer,
    module: TrainModule,
    train_dataloaders: Any,
    processes: Sequence[int],
    per_host: int | None,
    device_memory: int | str | None,
    host_memory: int | str | None,
) -> MemoryPlan:
    """See `trainkit.Trainer.plan`."""
    placeholder, optimizers = _prepare_placeholder(trainer, module)
    contents, untraced = _contents(trainer, placeholder, optimizers), ""
    chosen = checkpointing_choice(trainer._arguments.activation_checkpointing)
    if chosen is not None and trainer.stage is None:  # a run has applied it to its module
        checkpoint_activations(placeholder, chosen)
    try:
        contents = replace(contents, profile=_profile(trainer, placeholder, train_dataloaders))
    except StepTraceError as error:
        untraced = str(error)
    late = next(module.parameters(), None) is None
    start = sum(p.nbytes for p in (contents.weights if late else module.parameters()))
    limits = (processes, per_host, device_memory, host_memory)
    return plan_contents(trainer.strategy, contents, start, late, *limits, untraced=untraced)


def _profile(trainer: Trainer, placeholder: Any, train_dataloaders: Any) -> tuple[tuple[int, int], ...]:
    """The memory of a training step, with the shapes of the first batch of the loader or of `train_dataloader`.

    Raises:
        StepTraceError: There is no batch, or the step needs values.
    """
    owner = placeholder
    if isinstance(train_dataloaders, DataModule):
        owner, train_dataloaders = train_dataloaders, None
        with reasons():
            owner.prepare_data()
            owner.setup(TrainerFn.FITTING)
    if train_dataloaders is None and not is_overridden(owner, "train_dataloader", DataHooks):
        raise StepTraceError("they need a batch: trainer.plan(module, DataLoader(...))")
    with reasons():
        batch = _first_batch(owner.train_dataloader() if train_dataloaders is None else train_dataloaders)
    return activation_profile(placeholder, batch, trainer.precision_plugin, trainer.strategy.device, placeholder._trainer)


def _first_batch(loader: Any) -> Any:
    """The first batch of a training loader, read in this process; the loader and the random generators are not changed."""
    if isinstance(loader, Iterator):
        raise StepTraceError("an iterator can be read only once. Pass a list with one batch: trainer.plan(module, [batch])")
    source = training_source(loader)
    if type(source) is DataLoader:
        source = copy.copy(source)
        source.num_workers, source.timeout, source.pin_memory = 0, 0, False
    random_state = RandomState()
    try:
        for batch in source:
            return batch[0] if isinstance(source, CombinedLoader) else batch
    finally:
        random_state.restore()
    raise StepTraceError("the training loader has no batch")


def contents_of_module(trainer: Trainer, module: TrainModule) -> Contents:
    """What a trainer's run of a module keeps in memory; the module is not changed, and nothing of its size is allocated.

    For the errors see `_prepare_placeholder`.
    """
    return _contents(trainer, *_prepare_placeholder(trainer, module))


def _contents(trainer: Trainer, placeholder: nn.Module, optimizers: list[Optimizer]) -> Contents:
    schedule = trainer._run.accumulation_schedule
    windows = [trainer._arguments.accumulation] if schedule is None else schedule.scheduling.values()
    return contents_of([placeholder], optimizers, max(windows))


def _prepare_placeholder(trainer: Trainer, module: TrainModule) -> tuple[Any, list[Optimizer]]:
    """A copy of the module without values, in the precision of the run, and its optimizers.

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
    precision = trainer.precision_plugin
    placeholder: Any = built_placeholder(module, precision, _Planning(trainer))
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
    return placeholder, list(optimizers)


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
        return steps if steps > 0 else _ASSUMED_STEPS
