"""What the loops need of one run, determined when it is set up: the steps to call, the loaders, the schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainkit.data.loader import PreparedLoader
from trainkit.data.micro_batch import MicroBatch
from trainkit.errors import EmptyLoaderError
from trainkit.metrics.store import MetricStore
from trainkit.optim.optimizer_config import SchedulerConfig
from trainkit.trainer.module_steps import ModuleStep
from trainkit.trainer.profiler import Profiler

if TYPE_CHECKING:
    from trainkit.trainer.run import Run
    from trainkit.trainer.safe_points import SafePoints

__all__ = ["EvaluationPlan", "FitPlan"]


@dataclass(frozen=True)
class FitPlan:
    """What the training loop calls.

    Attributes:
        loader: the training batches.
        safe_points: where saves and signals are handled.
        training_step: called with (batch, batch_idx).
        automatic: the loop runs backward and optimizer step.
        several: other ranks have their own data.
        without_optimizer: there is no optimizer: windows are counted, nothing is trained.
        optimizer: the only one, under automatic optimization.
        backward: of a loss.
        step: of the optimizer.
        module_step: the step through the module's `optimizer_step`; `None`: the loop calls `step`.
        zero_grad: of the optimizer.
        pad: called instead of `training_step` for a micro-batch without data on this rank.
        schedulers: those that the loop advances.
        profiler: measures the steps; `None`: nothing does.
        validate_every: validate after this many micro-batches; `None`: at the end of an epoch.
    """

    loader: PreparedLoader
    safe_points: SafePoints
    training_step: Callable[..., Any]
    automatic: bool
    several: bool
    without_optimizer: bool
    optimizer: Optimizer | None
    backward: Callable[..., None]
    step: Callable[..., bool]
    module_step: ModuleStep | None
    zero_grad: Callable[[], None]
    pad: Callable[[Run, FitPlan, Any, int], None]
    schedulers: Sequence[SchedulerConfig]
    profiler: Profiler | None
    validate_every: int | None

    @property
    def length(self) -> int | None:
        """Micro-batches of an epoch; `None` if that is unknown until its end."""
        return self.loader.length

    def micro_batches(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """The micro-batches of an epoch, from index `start` on."""
        found = self.loader.iterate(epoch, start)
        return found if self.profiler is None else self.profiler.iterated("next training batch", found)

    def is_last(self, batch_idx: int) -> bool:
        """Whether this is known to be the last micro-batch of the epoch."""
        return self.length is not None and batch_idx + 1 >= self.length

    def refuse_empty(self) -> None:
        """Raise the error for a loader that has yielded nothing."""
        raise EmptyLoaderError(
            "the training loader yielded no batch. Check the dataset's length, drop_last and limit_train_batches. An iterator "
            "can be read only once: pass a DataLoader or a list."
        )


@dataclass
class EvaluationPlan:
    """The plan of a validation, test or prediction.

    Attributes:
        name: "validation", "test" or "predict", as in the names of the hooks.
        loaders: one or more.
        step: called with (batch, batch_idx, dataloader_idx).
        metrics: where `log` goes.
        logs: metrics may be logged (not in prediction).
        keeps: outputs are kept (prediction).
        count: batches of this stage since the run began, the step of what is logged by batch.
        began: the value of `count` when the running evaluation began.
        loaders_of: metric in `results` → the loaders in whose batches it was logged, `[]` if outside of batches.
        uneven: a loader is being read, and some ranks may have fewer of its batches than others.
    """

    name: str
    loaders: list[PreparedLoader]
    step: Callable[..., Any]
    metrics: MetricStore
    logs: bool = True
    keeps: bool = False
    count: int = 0
    began: int = 0
    uneven: bool = False
    outputs: list[list[Any]] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    loaders_of: dict[str, list[int]] = field(default_factory=dict)

    def begin_loader(self, index: int) -> None:
        """The evaluation begins to read this loader."""
        if index == 0:
            self.outputs = [[] for _ in self.loaders]
        self.metrics.suffix = f"/dataloader_idx_{index}" if len(self.loaders) > 1 else ""

    def refuse_empty(self, index: int) -> None:
        """Raise the error for a loader that has yielded nothing.

        Raises:
            EmptyLoaderError: always, unless a limit of 0 batches turned the loader off.
        """
        if self.loaders[index].limit != 0:
            raise EmptyLoaderError(
                f"{self.name} loader {index} yielded no batch, so its metrics cannot be computed. Check its dataset. An "
                "iterator can be read only once, and the sanity check reads it too: pass a DataLoader or a list."
            )

    def keep(self, index: int, outputs: Any) -> None:
        """Keep what a prediction returned."""
        if self.keeps:
            self.outputs[index].append(outputs)

    def finish(self) -> None:
        """Reduce what was logged; more calls add what was logged since."""
        self.results.update(self.metrics.flush_epoch())
        self.loaders_of |= self.metrics.loaders

    def by_loader(self) -> list[dict[str, float]]:
        """The metrics of each loader; those that were logged outside of batches, for example at the end, are in each."""
        found: list[dict[str, float]] = []
        for index in range(len(self.loaders)):
            where = {name: self.loaders_of[name] or [index] for name in self.results}
            found.append({name: value for name, value in self.results.items() if index in where[name]})
        return found
