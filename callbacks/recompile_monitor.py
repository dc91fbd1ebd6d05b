"""``RecompileMonitor``: counts the graphs that are compiled, and says why one was when there should be none any more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.callbacks._checks import check_int
from trainkit.callbacks._recompile_causes import Cause, between_cause, combined, first_cause, in_graphs, unseen_cause
from trainkit.callbacks._step_signature import (
    Change,
    Shapes,
    State,
    Step,
    nearest_shapes,
    nearest_state,
    numbers_in,
    shapes_of,
    shorter,
    state_of,
)
from trainkit.console import notice, warn

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["RecompileMonitor"]

_REMEMBERED = 1000  # kinds of batches; a run that has more has been told of it long ago


class RecompileMonitor(Callback):
    """Logs how many graphs have been compiled, and warns when one is after warm-up: in which step, and what has changed.

    For strategies that compile each kind of step when it is first met (XLA). A training run should do so in its first
    two updates and then no more: a compilation takes from seconds to minutes, and a run that compiles in every step
    seems to hang. Where nothing is compiled by itself a notice says so, and the callback does nothing.

    Logged at log boundaries: ``compilations/total``, graphs compiled in this process, and
    ``compilations/unexpected``, those of this fit that were compiled after warm-up and should not have been.

    Expected, and said in a notice: the first evaluation, the short last batch of an epoch and the first log boundary have
    graphs of their own, once a run. Everything else after warm-up is warned of, each cause once, with what it is that no
    step before had: shapes and dtypes of the batch (tensors in dicts, lists, tuples and dataclasses), its place in the
    accumulation window, parameters that require gradients, modules in train or eval mode, options of the optimizer; a
    value that was read before the step was complete (``.item()``, ``print``), or an operation that was left to the host.
    What was compiled in the steps is told from what was in an evaluation and between the steps; what hooks of a batch
    compile counts to the step, for callbacks that stand before this one in the list.

    No value is read from the device, and nothing is kept of the batches but shapes: some microseconds a step.

    Args:
        warmup_steps: updates of this fit after which nothing should be compiled any more. 2: the optimizer's state is made in
            the first, and used from the second on.
        max_warnings: that many causes are warned of; then a line says that further compilations are only counted.

    Attributes:
        counts: graphs compiled in this fit, by cause: ``"warm-up"``, ``"evaluation"`` (the first), ``"expected"``, and what was
            unexpected in the words of its cause.
        unexpected: graphs of this fit that were compiled after warm-up and should not have been.

    Raises:
        ConfigurationError: an argument out of its range.

    Example::

        trainer = Trainer(strategy="xla", callbacks=[RecompileMonitor()])
    """

    def __init__(self, warmup_steps: int = 2, max_warnings: int = 5) -> None:
        super().__init__()
        check_int("RecompileMonitor", "warmup_steps", warmup_steps, 1)
        check_int("RecompileMonitor", "max_warnings", max_warnings, 0)
        self.warmup_steps = warmup_steps
        self.max_warnings = max_warnings
        self.counts: Counter[str] = Counter()
        self.unexpected = 0
        self._told_useless = False
        self._total: int | None = None  # at the last look; None: nothing is compiled by itself
        self._restart()

    def _restart(self) -> None:
        self.counts, self.unexpected = Counter(), 0
        self._told: set[str] = set()  # kinds of causes
        self._warned = 0
        self._first_update = 0
        self._seen: dict[Step, set[int]] = {}  # in their order, with the numbers of the states in which they were
        self._parts: set[tuple[str, Any]] = set()
        self._states: dict[State, int] = {}
        self._state = 0  # the number of the one at the last look
        self._evaluated: dict[tuple[int, Shapes], None] = {}
        self._step: Step | None = None
        self._late = False  # the batch being worked on comes after warm-up
        self._hints: Mapping[str, int] = {}
        self._usual = 0  # graphs that a step runs: the least that one has, if it has run any
        self._cut = False  # it has been looked at whether each step is in several graphs
        self._without_loss = False
        self._evaluations = 0  # whole ones

    # ------------------------------------------------------------------ where the run is

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._total = None  # a validation by itself has the hooks of one in a fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._restart()
        self._total = trainer.strategy.compilations
        if self._total is None and not self._told_useless:
            self._told_useless = True
            notice(
                f"RecompileMonitor has nothing to do with strategy={trainer.strategy.name!r}, where nothing is compiled by "
                "itself: it is for 'xla'. Nothing is logged."
            )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is not None:
            self._first_update = trainer.global_step
            self._count("warm-up", self._compiled(trainer))
            self._look(trainer, module)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._total is None:
            return
        self._between(trainer)
        micro, updates = trainer.accelerator.micro_batch, trainer.global_step - self._first_update
        self._late = updates >= self.warmup_steps
        self._step = Step(shapes_of(batch), micro.first, micro.last, trainer.should_log, updates > 0, micro.uneven)
        self._hints = trainer.strategy.compilation_hints()

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, self._step = self._step, None
        if self._total is None or step is None:
            return
        number = self._compiled(trainer)
        grown = _grown(self._hints, trainer.strategy.compilation_hints())
        if number:
            self._judge_step(trainer, module, step, grown, batch, batch_idx, number)
        if self._late and not number and not self._cut:
            self._judge_runs(module, step, grown)
        runs = grown.get("graphs", 0)
        self._usual = min(self._usual, runs) if self._usual and runs else self._usual or runs
        if step in self._seen or len(self._seen) < _REMEMBERED:
            self._seen.setdefault(step, set()).add(self._state)
            self._parts.update(step.parts)
        self._without_loss = outputs is None
        if trainer.should_log and trainer.accelerator.sync_gradients:
            values = {"compilations/total": float(self._total), "compilations/unexpected": float(self.unexpected)}
            self.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is not None:
            self._between(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._total is None:
            return
        shapes, number = shapes_of(batch), self._compiled(trainer)
        if number and self._evaluations:
            where = f"in batch {batch_idx} of the validation after step {trainer.global_step} (epoch {trainer.current_epoch})"
            changes = nearest_shapes(shapes, [old for index, old in self._evaluated if index == dataloader_idx])
            new = (dataloader_idx, shapes) not in self._evaluated
            self._unexpected(number, where, combined(changes) if new and changes else unseen_cause({}, numbers_in(batch)))
        else:
            self._count("evaluation", number)
        if len(self._evaluated) < _REMEMBERED:
            self._evaluated[dataloader_idx, shapes] = None

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is None:
            return
        self._count("evaluation", self._compiled(trainer))  # at its end, or metrics of it
        if trainer.sanity_checking:
            return
        self._evaluations += 1
        number = self.counts["evaluation"]
        if self._evaluations == 1 and number:
            notice(f"RecompileMonitor: {_graphs(number)} compiled for evaluation, as expected the first time.")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is None:
            return
        self._between(trainer)
        if self.unexpected:
            parts = ", ".join(f"{number} ({cause})" for cause, number in self.counts.items() if number)
            notice(f"RecompileMonitor: {_graphs(self.counts.total())} compiled in this fit: {parts}.")

    # ------------------------------------------------------------------ why

    def _compiled(self, trainer: Trainer) -> int:
        """Graphs compiled since the last look."""
        before, now = self._total or 0, trainer.strategy.compilations or 0
        self._total = now
        return now - before

    def _between(self, trainer: Trainer) -> None:
        number = self._compiled(trainer)
        if number and self._late:
            where = f"between steps, after step {trainer.global_step} (epoch {trainer.current_epoch})"
            self._unexpected(number, where, between_cause(self._without_loss))
        else:
            self._count("warm-up", number)

    def _judge_step(
        self,
        trainer: Trainer,
        module: TrainModule,
        step: Step,
        grown: Mapping[str, int],
        batch: Any,
        batch_idx: int,
        number: int,
    ) -> None:
        changes = self._look(trainer, module)
        if not self._late:
            self._count("warm-up", number)
            if shorter(step.shapes, self._shapes()):
                self._told.add("short")
            return
        # global_step counts complete updates, and a micro-batch inside a window belongs to the next one
        update = trainer.global_step + (0 if trainer.accelerator.sync_gradients else 1)
        where = f"in step {update} (epoch {trainer.current_epoch}, batch_idx {batch_idx})"
        cut = self._usual and grown.get("graphs", 0) > self._usual
        single = module.automatic_optimization and not step.uneven  # else it may have more graphs than others of itself
        if cut and (single or len(grown) > 1):
            self._unexpected(number, where, in_graphs(grown))
        elif self._state in self._seen.get(step, ()):
            self._unexpected(number, where, unseen_cause(grown, numbers_in(batch)))
        elif changes or not self._is_expected(step, _may_be_last(trainer, batch_idx), f"{_graphs(number)} compiled {where}"):
            new = nearest_shapes(step.shapes, self._shapes()) if ("shapes", step.shapes) not in self._parts else []
            self._unexpected(number, where, combined([*new, *changes]))
        else:
            self._count("expected", number)

    def _shapes(self) -> list[Shapes]:
        return list(dict.fromkeys(step.shapes for step in self._seen))

    def _look(self, trainer: Trainer, module: TrainModule) -> list[Change]:
        """Take the state of modules and optimizers; what is new in it.

        Only when something has been compiled: it takes long, and a change that was seen before the step that it makes another
        graph of would be nothing new by then.
        """
        state = state_of(module, trainer.optimizers)
        changes = [] if state in self._states else nearest_state(state, self._states)
        self._state = self._states.setdefault(state, len(self._states))
        return changes

    def _is_expected(self, step: Step, last: bool, what: str) -> bool:
        """Whether a step that none is like has its graph as a matter of course; a notice says so, once for each cause."""
        new = [name for name, value in step.parts if (name, value) not in self._parts]
        if "shapes" in new:
            if "short" in self._told or not last or not shorter(step.shapes, self._shapes()):
                return False
            new = ["short"]
        changes = nearest_shapes(step.shapes, self._shapes()) if new == ["short"] else []
        for name in new:
            if name not in self._told:
                self._told.add(name)
                notice(f"RecompileMonitor: {what}, as expected once: {first_cause(name, changes)}")
        return True

    def _judge_runs(self, module: TrainModule, step: Step, grown: Mapping[str, int]) -> None:
        """Each step is in several graphs from the first on: nothing is compiled any more, but the device is waited for."""
        self._cut = True
        if grown.get("graphs", 0) > 1 and module.automatic_optimization and not step.uneven:
            notice(f"RecompileMonitor: a step runs in {grown['graphs']} graphs, and not in one. {in_graphs(grown).text}")

    def _count(self, cause: str, number: int) -> None:
        if number:
            self.counts[cause] += number

    def _unexpected(self, number: int, where: str, cause: Cause) -> None:
        self.unexpected += number
        self._count(cause.kind, number)
        if cause.kind in self._told or self._warned > self.max_warnings:
            return
        self._told.add(cause.kind)
        self._warned += 1
        if self._warned > self.max_warnings:
            warn(
                f"RecompileMonitor: {_graphs(number)} compiled after warm-up {where}. Further ones are only counted "
                f"(max_warnings={self.max_warnings}): compilations/unexpected, and a line at the end of training."
            )
            return
        warn(f"RecompileMonitor: {_graphs(number)} compiled after warm-up {where}. {cause.text}")


def _graphs(number: int) -> str:
    return "1 graph was" if number == 1 else f"{number} graphs were"


def _may_be_last(trainer: Trainer, batch_idx: int) -> bool:
    batches = trainer.num_training_batches
    return batch_idx + 1 >= batches or batches == math.inf


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
