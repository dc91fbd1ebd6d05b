"""`RecompileMonitor`: counts compiled graphs, and reports why one was compiled after warm-up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.callback import Callback
from trainkit.callbacks._graph_inputs import (
    Change,
    Inputs,
    inputs_of_batch,
    inputs_of_state,
    is_shorter,
    nearest_changes,
    numbers_in,
)
from trainkit.checks import whole_number
from trainkit.console import counted, notice, warn

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["RecompileMonitor"]

_NAMED = 6  # changes, numbers or operations in a message, at most
_FIRST = {
    "place": "no earlier step had this place in its accumulation window; the last window of an epoch may be shorter.",
    "log": "the first step at a log boundary, where more is logged than in other steps; what is logged is part of the graph.",
}
_BETWEEN = (  # a cause: its name in `counts`, and a text with the fix
    "between steps",
    "A hook, a callback or a logger computed with tensors of the device, or read one: compute the value in training_step and "
    "log it, self.log('name', value). Or training_step returned None after it had computed something: decide by the batch "
    "before the computation, or return 0 for such batches from batch_weight(self, batch).",
)


class _Step(NamedTuple):
    """The visible inputs of a step that determine which graph it needs."""

    shapes: Inputs  # of the batch
    place: tuple[bool, bool, bool]  # in its accumulation window
    log: bool  # at a log boundary
    begun: bool  # the optimizer has state
    state: int  # number of the state of modules and optimizers

    def new_fields(self, seen: Iterable[_Step]) -> list[str]:
        """The fields with a value that no other step had."""
        return [name for name, value in self._asdict().items() if all(getattr(one, name) != value for one in seen)]


class RecompileMonitor(Callback):
    """Logs how many graphs were compiled, and warns of each compilation after warm-up: in which step, and what changed.

    For strategies that compile each kind of step when they first run it (XLA): a run should compile in its first two
    optimizer steps only. With other strategies it does nothing, and a notice says so: graphs of `torch.compile`, such as
    those of `Trainer(compile=True)`, are not counted. The environment variable `TORCH_LOGS=recompiles` prints them.

    Logged at log boundaries: `compilations/total`, graphs compiled in this process, and `compilations/unexpected`.

    The first evaluation, the short last batch of an epoch, the first log boundary and a shorter accumulation window compile
    their own graphs once in a run, with a notice. Any other compilation after warm-up is a warning, once for each cause.

    Args:
        warmup_steps: Number of optimizer steps of this fit that may compile. 2: the optimizer makes its state in the first and
            uses it from the second on.
        max_warnings: Number of causes to warn of; then a line says that further compilations are only counted.

    Attributes:
        counts: Graphs compiled in this fit, by cause: `"warm-up"`, `"evaluation"` (the first), `"expected"`, and others.
        unexpected: Number of graphs compiled in this fit after warm-up that should not have been.

    Raises:
        ConfigurationError: An argument out of its range.

    Example:
        ```python
        trainer = Trainer(strategy="xla", callbacks=[RecompileMonitor()])
        ```
    """

    def __init__(self, warmup_steps: int = 2, max_warnings: int = 5) -> None:
        super().__init__()
        self.warmup_steps = whole_number(warmup_steps, "RecompileMonitor(warmup_steps=)", 1)
        self.max_warnings = whole_number(max_warnings, "RecompileMonitor(max_warnings=)", 0)
        self._total: int | None = None  # graphs at the last look; None: there is nothing to count
        self._restart()

    def _restart(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unexpected = self._warned = self._first_update = self._state = 0
        self._reported: set[str] = set()  # causes, fields of steps, and other things that are reported once
        self._steps: dict[_Step, None] = {}  # one of each kind
        self._evaluated: dict[Inputs, None] = {}  # shapes of batches
        self._states: dict[Inputs, int] = {}  # with their numbers
        self._late = False  # warm-up is over

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._total = None  # Trainer.validate calls the same hooks as a validation in a fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._total = trainer.strategy.compilations
        if self._total is not None:
            self._restart()
            self._first_update = trainer.global_step
        elif self._first("useless"):
            notice(
                f"RecompileMonitor has no effect with strategy={trainer.strategy.name!r}, which compiles nothing itself: "
                "it is for 'xla'. Nothing is logged. For torch.compile set the environment variable TORCH_LOGS=recompiles."
            )

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._look_between_steps(trainer)
        if self._total is None:
            return
        if not self._states:
            self._new_state(trainer, module)
        micro, updates = trainer.accelerator.accumulation.current, trainer.global_step - self._first_update
        self._late = updates >= self.warmup_steps
        place = (micro.first, micro.last, micro.uneven)
        self._step = _Step(inputs_of_batch(batch), place, trainer.should_log, updates > 0, self._state)
        self._hints = Counter(trainer.strategy.compilation_hints())

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._total is None:
            return
        hints = Counter(trainer.strategy.compilation_hints()) - self._hints
        if not module.automatic_optimization or self._step.place[2]:  # several graphs a step are usual
            del hints["graphs"]
        if number := self._compiled(trainer):
            changes = self._new_state(trainer, module)
            self._step = self._step._replace(state=self._state)
            self._judge(trainer, changes, hints, batch, batch_idx, number)
        elif self._late and hints["graphs"] > 1 and self._first("cut"):
            why = _cause([], hints, batch)[1]
            notice(f"RecompileMonitor: a step runs in {hints['graphs']} graphs instead of one. {why}")
        self._steps[self._step] = None
        if trainer.should_log and trainer.accelerator.sync_gradients:
            values = {"compilations/total": float(self._total), "compilations/unexpected": float(self.unexpected)}
            self.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._look_between_steps(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._total is None:
            return
        shapes, number = inputs_of_batch(batch), self._compiled(trainer)
        if number and "evaluation" in self._reported:
            where = f"in batch {batch_idx} of the validation after step {trainer.global_step} (epoch {trainer.current_epoch})"
            self._unexpected(number, where, *_cause(nearest_changes(shapes, self._evaluated), Counter(), batch))
        else:
            self._count("evaluation", number)
        self._evaluated[shapes] = None

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._count("evaluation", self._compiled(trainer))  # at its end, such as its metrics
        number = self.counts["evaluation"]
        if self._total is not None and not trainer.sanity_checking and self._first("evaluation") and number:
            notice(f"RecompileMonitor: {_graphs(number)} compiled for the first evaluation, as expected.")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._look_between_steps(trainer)
        if self.unexpected:
            parts = ", ".join(f"{number} ({cause})" for cause, number in self.counts.items())
            notice(f"RecompileMonitor: {_graphs(self.counts.total())} compiled in this fit: {parts}.")

    def _compiled(self, trainer: Trainer) -> int:
        """Number of graphs compiled since the last look."""
        if self._total is None:
            return 0
        before, self._total = self._total, trainer.strategy.compilations or 0
        return self._total - before

    def _new_state(self, trainer: Trainer, module: TrainModule) -> list[Change]:
        """What has changed in the state of modules and optimizers. Slow, so it is called first and after a compilation only."""
        state = inputs_of_state(module, trainer.optimizers)
        changes = nearest_changes(state, self._states)
        self._state = self._states.setdefault(state, len(self._states))
        return changes

    def _look_between_steps(self, trainer: Trainer) -> None:
        number = self._compiled(trainer)
        if number and self._late:
            where = f"between steps, after step {trainer.global_step} (epoch {trainer.current_epoch})"
            self._unexpected(number, where, *_BETWEEN)
        else:
            self._count("warm-up", number)

    def _judge(
        self, trainer: Trainer, changes: list[Change], hints: Counter[str], batch: Any, batch_idx: int, number: int
    ) -> None:
        """Report why the step has compiled, given the changes of state."""
        step = self._step
        shapes = nearest_changes(step.shapes, dict.fromkeys(one.shapes for one in self._steps))
        if not self._late:
            self._count("warm-up", number)
            self._reported.update(["shapes"] if is_shorter(shapes) else [])
            return
        # global_step counts complete optimizer steps; a micro-batch inside a window belongs to the next one
        update = trainer.global_step + (not trainer.accelerator.sync_gradients)
        where = f"in step {update} (epoch {trainer.current_epoch}, batch_idx {batch_idx})"
        may_be_last = trainer.num_training_batches in (batch_idx + 1, math.inf)
        short = is_shorter(shapes) and may_be_last and "shapes" not in self._reported
        visible = [*shapes, *changes] if changes or not short else []
        new = step.new_fields(self._steps)
        if visible or step in self._steps or (hints["graphs"] > 1 and not new):
            self._unexpected(number, where, *_cause(visible, hints, batch))
        else:  # a combination of known parts, or something that a run has once
            reasons = {"shapes": f"the short last batch, {_cause(shapes, hints, batch)[1]}"} if short else _FIRST
            self._expected(number, where, new, reasons)

    def _expected(self, number: int, where: str, new: Sequence[str], reasons: Mapping[str, str]) -> None:
        self._count("expected", number)
        for name in new:
            if name in reasons and self._first(name):
                notice(f"RecompileMonitor: {_graphs(number)} compiled {where}, as expected once: {reasons[name]}")

    def _count(self, cause: str, number: int) -> None:
        if number:
            self.counts[cause] += number

    def _unexpected(self, number: int, where: str, cause: str, text: str) -> None:
        self.unexpected += number
        self._count(cause, number)
        if self._warned <= self.max_warnings and self._first(cause):
            self._warned += 1
            if self._warned > self.max_warnings:
                text = f"Further compilations are only counted, in compilations/unexpected (max_warnings={self.max_warnings})."
            warn(f"RecompileMonitor: {_graphs(number)} compiled after warm-up {where}. {text}")

    def _first(self, what: str) -> bool:
        """Whether this has not been reported before; marks it as reported."""
        first = what not in self._reported
        self._reported.add(what)
        return first


def _graphs(number: int) -> str:
    return counted(number, "graph was", "graphs were")


def _cause(changes: Sequence[Change], hints: Counter[str], batch: Any) -> tuple[str, str]:
    """Why a graph was compiled: its name in `counts`, and a text with the fix. Without changes, by the hints."""
    if changes:
        named = "; ".join(map(str, changes[:_NAMED])) + (f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else "")
        fixes = " ".join(dict.fromkeys(change.fix for change in changes))
        return ", ".join(sorted({change.kind for change in changes})[:_NAMED]), f"{named}. {fixes}"
    if operations := [name for name in hints if name not in ("graphs", "reads")][:_NAMED]:
        return "operations on the host", (
            f"Operations that the device does not support ran on the host: {', '.join(operations)}. They split the step in "
            "two, and the rest may have another shape each time. Instead of x[mask] or nonzero(): torch.where(mask, x, 0)."
        )
    if hints["reads"] or hints["graphs"] > 1:
        how = ".item(), int(), float(), bool() or if" if hints["reads"] else "print, .cpu(), .tolist() or .numpy()"
        return "values read in a step", (
            f"A value was read before the step was complete, by {how}, in training_step or a hook. This splits the step into "
            "two graphs, and each new number that is used in a shape needs another graph. Log the value instead, "
            "self.log('name', value), which reads it after the step, or use it as a tensor, torch.where(condition, a, b)."
        )
    numbers = f" The batch has such numbers: {', '.join(numbers_in(batch)[:_NAMED])}." if numbers_in(batch) else ""
    return "a change that is not visible", (
        "Neither the batch's shapes and dtypes nor the window, parameters, modules or options of the optimizer changed. Look "
        "for a Python number that changes from step to step and is used in a shape, a slice or an index, or is sometimes 0, 1 "
        f"or -1: convert it to a tensor, torch.tensor(number) in the batch.{numbers}"
    )
