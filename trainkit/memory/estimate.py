"""The memory estimate of a `Trainer`'s run, computed without values of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainkit.data.combined import CombinedLoader, training_source
from trainkit.errors import MissingMethodError, ModuleError, make_instance
from trainkit.memory.inventory import built_placeholder, contents_of
from trainkit.memory.report import MemoryEstimate, estimate_contents
from trainkit.memory.traced_step import StepTraceError, activation_profile, reasons
from trainkit.module.activation_checkpointing import CheckpointingChoice, checkpoint_activations
from trainkit.module.data_module import DataModule
from trainkit.module.overridable_hooks import DataHooks, is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.names.doors import is_open
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.registry import adapt
from trainkit.rng import RandomState
from trainkit.strategy import Contents, Strategy

__all__ = ["RunEstimator"]

_ASSUMED_STEPS = 1000  # number of optimizer steps for schedules, if max_steps is not given


@dataclass(frozen=True)
class RunEstimator:
    """Estimates the memory of a run. No module is changed, and nothing of its size is allocated.

    Attributes:
        trainer: What the module sees as its trainer.
        strategy: The strategy of the run, with its precision.
        window: Micro-batches per optimizer step.
        checkpointing: The activation checkpointing that `fit` would apply to the module.
        max_steps: The largest number of optimizer steps; -1: no limit.
        stage: What `setup` of a `DataModule` receives.
    """

    trainer: Any
    strategy: Strategy
    window: int
    checkpointing: CheckpointingChoice | None
    max_steps: int
    stage: str

    def estimate(
        self,
        module: TrainModule,
        train_dataloaders: Any,
        processes: Sequence[int],
        per_host: int | None,
        device_memory: int | str | None,
        host_memory: int | str | None,
    ) -> MemoryEstimate:
        """See `trainkit.Trainer.plan`."""
        placeholder, optimizers = self._prepare_placeholder(module)
        contents, untraced = contents_of([placeholder], optimizers, self.window), ""
        if self.checkpointing is not None:
            checkpoint_activations(placeholder, self.checkpointing)
        try:
            contents = replace(contents, profile=self._profile(placeholder, train_dataloaders))
        except StepTraceError as error:
            untraced = str(error)
        late = next(module.parameters(), None) is None
        start = sum(p.nbytes for p in (contents.weights if late else module.parameters()))
        limits = (processes, per_host, device_memory, host_memory)
        return estimate_contents(self.strategy, contents, start, late, *limits, untraced=untraced)

    def contents(self, module: TrainModule) -> Contents:
        """What the run of a module keeps in memory. For the errors see `_prepare_placeholder`."""
        placeholder, optimizers = self._prepare_placeholder(module)
        return contents_of([placeholder], optimizers, self.window)

    def _profile(self, placeholder: Any, train_dataloaders: Any) -> tuple[tuple[int, int], ...]:
        """The memory of a training step, with the shapes of the first batch of the loader or of `train_dataloader`.

        Raises:
            StepTraceError: There is no batch, or the step needs values.
        """
        owner = placeholder
        if isinstance(train_dataloaders, DataModule):
            owner, train_dataloaders = train_dataloaders, None
            with reasons():
                owner.prepare_data()
                owner.setup(self.stage)
        if train_dataloaders is None and not is_overridden(owner, "train_dataloader", DataHooks):
            raise StepTraceError("they need a batch: trainer.plan(module, DataLoader(...))")
        with reasons():
            batch = _first_batch(owner.train_dataloader() if train_dataloaders is None else train_dataloaders)
        return activation_profile(placeholder, batch, self.strategy.precision, self.strategy.device, placeholder._trainer)

    def _prepare_placeholder(self, module: TrainModule) -> tuple[Any, list[Optimizer]]:
        """A copy of the module without values, in the precision of the run, and its optimizers.

        Raises:
            ModuleError: it is not a TrainModule, or has no parameters.
            MissingMethodError: it has no `configure_optimizers`.
            OptimizerError: what that returns is wrong.
        """
        module = getattr(module, "_orig_mod", module)
        if not isinstance(module, TrainModule):
            adapt(module)
            raise ModuleError(
                f"expected a TrainModule{' (LightningModule)' * is_open('lightning')}, received {type(module).__name__}."
                f"{make_instance(module)}"
            )
        if not (is_overridden(module, "configure_optimizers", TrainModule) or self.strategy.has_optimizer):
            raise MissingMethodError(
                f"{type(module).__name__} has no configure_optimizers, so the memory of its optimizer cannot be determined. "
                "Define: def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=1e-3)   "
                "(or return None)"
            )
        precision = self.strategy.precision
        placeholder: Any = built_placeholder(module, precision, _TrainerWithoutData(self))
        if next(placeholder.parameters(), None) is None:
            raise ModuleError(
                f"{type(module).__name__} has no parameters, so there is nothing to plan. Create its layers in __init__ or "
                "in configure_model; setup() is not called for a plan."
            )
        precision.convert_module(placeholder)
        returned = _over_placeholders(self.strategy.configure_optimizers(placeholder), placeholder)
        optimizers, _ = read_optimizers(returned, placeholder, automatic=placeholder.automatic_optimization)
        return placeholder, list(optimizers)


def _first_batch(loader: Any) -> Any:
    """The first batch of a training loader, read in this process; the loader and the random generators are not changed."""
    if isinstance(loader, Iterator):
        raise StepTraceError("an iterator can be read only once. Pass a list with one batch: trainer.plan(module, [batch])")
    source = training_source(loader)
    if type(source) is DataLoader:
        source = copy.copy(source)
        source.num_workers = 0
        source.timeout = 0
        source.pin_memory = False
    random_state = RandomState()
    try:
        for batch in source:
            return batch[0] if isinstance(source, CombinedLoader) else batch
    finally:
        random_state.restore()
    raise StepTraceError("the training loader has no batch")


def _over_placeholders(returned: Any, placeholder: nn.Module) -> Any:
    """What `configure_optimizers` returned, with placeholders instead of parameters of the module."""
    placeholders = vars(placeholder)["_placeholders"]
    items = returned if isinstance(returned, list | tuple) else [returned]
    for one in items:
        optimizer = one.get("optimizer") if isinstance(one, dict) else one
        for inner in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            if isinstance(inner, Optimizer):
                for group in inner.param_groups:
                    group["params"] = [placeholders.get(id(p), p) for p in group["params"]]
    return returned


class _TrainerWithoutData:
    """The trainer as a module sees it while its memory is estimated: it loads no data."""

    def __init__(self, of: RunEstimator) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of.trainer, name)

    @property
    def estimated_stepping_batches(self) -> int:
        """Any number will do: schedules use no memory."""
        return self._of.max_steps if self._of.max_steps > 0 else _ASSUMED_STEPS
