"""``RecompileMonitor``: counts compiled graphs, and says why one was compiled when no more should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
_REMEMBERED = 1000  # kinds of steps; a run with more has been warned long before
_FIRST = {
    "place": "no step before had this place in its accumulation window; an epoch's last window may have fewer micro-batches.",
    "log": "the first step at a log boundary: what is logged there, and not in other steps, is a part of the graph.",
}
_BETWEEN = (  # a cause: a few words, the same for all compilations that it explains; and a text for the user, with the fix
    "between steps",
    "A hook, a callback or a logger has computed with tensors of the device, or read one: compute it in training_step and log "
    "it, self.log('name', value). Or training_step has returned None after it had computed something: decide by the batch "
    "before that, or give such batches no weight, def batch_weight(self, batch).",
)


class RecompileMonitor(Callback):
    """Logs how many graphs have been compiled, and warns when one is after warm-up: in which step, and what changed.

    For strategies that compile each kind of step when they first see it (XLA). A run should compile in its first two
    optimizer steps and then no more: a compilation takes from seconds to minutes, and a run that compiles in every step seems
    to hang. With other strategies a notice says that there is nothing to do; under ``torch.compile``, PyTorch itself reports
    recompilations if the environment variable ``TORCH_LOGS`` is ``recompiles``.

    Logged at log boundaries: ``compilations/total``, graphs compiled in this process, and ``compilations/unexpected``.

    The first evaluation, the short last batch of an epoch, the first log boundary and a shorter accumulation window have
    graphs of their own, once a run; a notice says so. Any other compilation after warm-up is a warning, once for each cause:
    what no step before had (shapes and dtypes of the batch, parameters that require gradients, modules in train mode,
    options of the optimizer), a value that was read in the step, an operation that ran on the host.

    Args:
        warmup_steps: optimizer steps of this fit after which nothing should be compiled any more. 2: the optimizer's state is
            made in the first, and used from the second on.
        max_warnings: number of causes to warn of; then a line says that further compilations are only counted.

    Attributes:
        counts: graphs compiled in this fit, by cause: ``"warm-up"``, ``"evaluation"`` (the first), ``"expected"``, and others.
        unexpected: number of graphs of this fit that were compiled after warm-up and should not have been.

    Raises:
        ConfigurationError: an argument out of its range.

    Example::

        trainer = Trainer(strategy="xla", callbacks=[RecompileMonitor()])
    """

    def __init__(self, warmup_steps: int = 2, max_warnings: int = 5) -> None:
        super().__init__()
        warmup_steps = whole_number(warmup_steps, "RecompileMonitor(warmup_steps=)", 1)
        max_warnings = whole_number(max_warnings, "RecompileMonitor(max_warnings=)", 0)
        self.warmup_steps = warmup_steps
        self.max_warnings = max_warnings
        self._total: int | None = None  # at the last look; None: this strategy does not compile by itself
        self._reported_useless = False
        self._restart()

    def _restart(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unexpected = self._warned = self._first_update = self._evaluations = self._state = 0
        self._reported: set[str] = set()  # causes
        self._kinds: set[tuple[Any, ...]] = set()  # of steps, with the number of the state in which they ran
        self._parts: set[tuple[str, Any]] = set()  # of steps
        self._shapes: dict[str, dict[Inputs, None]] = {"training": {}, "evaluation": {}}
        self._states: dict[Inputs, int] = {}
        self._step: dict[str, Any] | None = None  # what is known of the one that runs
        self._late = False  # warm-up is over
        self._hints: Mapping[str, int] = {}

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._total = None  # a validation by itself calls the same hooks as one in a fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._restart()
        self._total = trainer.strategy.compilations
        if self._total is None and not self._reported_useless:
            self._reported_useless = True
            notice(
                f"RecompileMonitor has nothing to do with strategy={trainer.strategy.name!r}, which compiles nothing itself: "
                "it is for 'xla'. Nothing is logged. For torch.compile set the environment variable TORCH_LOGS=recompiles."
            )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is not None:
            self._first_update = trainer.global_step
            self._count("warm-up", self._compiled(trainer))
            self._new_state(trainer, module)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._total is None:
            return
        self._look_between_steps(trainer)
        micro, updates = trainer.accelerator.accumulation.current, trainer.global_step - self._first_update
        self._late = updates >= self.warmup_steps
        place = (micro.first, micro.last, micro.uneven)
        self._step = {"shapes": inputs_of_batch(batch), "place": place, "log": trainer.should_log, "begun": updates > 0}
        self._hints = trainer.strategy.compilation_hints()

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, self._step = self._step, None
        if self._total is None or step is None:
            return
        now = trainer.strategy.compilation_hints()
        grown = {name: value - self._hints.get(name, 0) for name, value in now.items() if value != self._hints.get(name, 0)}
        if not module.automatic_optimization or step["place"][2]:  # several graphs a step are usual
            grown.pop("graphs", None)
        if number := self._compiled(trainer):
            self._judge(trainer, module, step, grown, batch, batch_idx, number)
        elif self._late and grown.get("graphs", 0) > 1 and "cut" not in self._reported:
            self._reported.add("cut")
            notice(f"RecompileMonitor: a step runs in {grown['graphs']} graphs instead of one. {_cause(grown)[1]}")
        if len(self._kinds) < _REMEMBERED:
            self._kinds.add((*step.values(), self._state))
            self._shapes["training"].setdefault(step["shapes"])
            self._parts.update(step.items())
        if trainer.should_log and trainer.accelerator.sync_gradients:
            values = {"compilations/total": float(self._total), "compilations/unexpected": float(self.unexpected)}
            self.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is not None:
            self._look_between_steps(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._total is None:
            return
        shapes, seen, number = inputs_of_batch(batch), self._shapes["evaluation"], self._compiled(trainer)
        if number and self._evaluations:
            where = f"in batch {batch_idx} of the validation after step {trainer.global_step} (epoch {trainer.current_epoch})"
            changes = nearest_changes(shapes, seen)
            self._unexpected(number, where, _changed(changes) if changes and shapes not in seen else _cause({}, batch))
        else:
            self._count("evaluation", number)
        if len(seen) < _REMEMBERED:
            seen[shapes] = None

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is None:
            return
        self._count("evaluation", self._compiled(trainer))  # at its end, such as its metrics
        self._evaluations += not trainer.sanity_checking
        if self._evaluations == 1 and not trainer.sanity_checking and (number := self.counts["evaluation"]):
            notice(f"RecompileMonitor: {_graphs(number)} compiled for evaluation, as expected the first time.")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._total is None:
            return
        self._look_between_steps(trainer)
        if self.unexpected:
            parts = ", ".join(f"{number} ({cause})" for cause, number in self.counts.items())
            notice(f"RecompileMonitor: {_graphs(self.counts.total())} compiled in this fit: {parts}.")

    def _compiled(self, trainer: Trainer) -> int:
        """Number of graphs compiled since the last look."""
        before, self._total = self._total or 0, trainer.strategy.compilations or 0
        return self._total - before

    def _new_state(self, trainer: Trainer, module: TrainModule) -> list[Change]:
        """What is new in the state of modules and optimizers; looked at only after a compilation, because it takes long."""
        state = inputs_of_state(module, trainer.optimizers)
        new = [] if state in self._states else nearest_changes(state, self._states)
        self._state = self._states.setdefault(state, len(self._states))
        return new

    def _look_between_steps(self, trainer: Trainer) -> None:
        number = self._compiled(trainer)
        if number and self._late:
            self._unexpected(
                number, f"between steps, after step {trainer.global_step} (epoch {trainer.current_epoch})", _BETWEEN
            )
        else:
            self._count("warm-up", number)

    def _judge(
        self,
        trainer: Trainer,
        module: TrainModule,
        step: Any,
        grown: Mapping[str, int],
        batch: Any,
        batch_idx: int,
        number: int,
    ) -> None:
        """Say why a step has compiled."""
        changes, last = self._new_state(trainer, module), batch_idx + 1 >= trainer.num_training_batches
        new = [name for name, value in step.items() if (name, value) not in self._parts]
        shapes = nearest_changes(step["shapes"], self._shapes["training"]) if "shapes" in new else []
        short = bool(shapes) and is_shorter(shapes) and "short" not in self._reported
        # global_step counts complete optimizer steps; a micro-batch inside a window belongs to the next one
        update = trainer.global_step + (0 if trainer.accelerator.sync_gradients else 1)
        where = f"in step {update} (epoch {trainer.current_epoch}, batch_idx {batch_idx})"
        if not self._late:
            self._count("warm-up", number)
            self._reported.update(["short"] if short else [])
        elif changes or (shapes and not (short and (last or trainer.num_training_batches == float("inf")))):
            self._unexpected(number, where, _changed([*shapes, *changes]))
        elif (*step.values(), self._state) in self._kinds or (grown.get("graphs", 0) > 1 and not new):
            self._unexpected(number, where, _cause(grown, batch))
        else:  # a combination of known parts, or what a run has once
            self.counts["expected"] += number
            reasons = {"short": f"the short last batch, {_changed(shapes)[1]}"} if short else _FIRST
            for name in [name for name in reasons if name in [*new, "short"] and name not in self._reported]:
                self._reported.add(name)
                notice(f"RecompileMonitor: {_graphs(number)} compiled {where}, as expected once: {reasons[name]}")

    def _count(self, cause: str, number: int) -> None:
        if number:
            self.counts[cause] += number

    def _unexpected(self, number: int, where: str, cause: tuple[str, str]) -> None:
        kind, text = cause
        self.unexpected += number
        self.counts[kind] += number
        if kind in self._reported or self._warned > self.max_warnings:
            return
        self._reported.add(kind)
        self._warned += 1
        if self._warned > self.max_warnings:
            text = f"Further ones are only counted (max_warnings={self.max_warnings}), in compilations/unexpected."
        warn(f"RecompileMonitor: {_graphs(number)} compiled after warm-up {where}. {text}")


def _graphs(number: int) -> str:
    return counted(number, "graph was", "graphs were")


def _changed(changes: Sequence[Change]) -> tuple[str, str]:
    named = "; ".join(map(str, changes[:_NAMED])) + (f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else "")
    fixes = " ".join(dict.fromkeys(change.fix for change in changes))
    return ", ".join(sorted({change.kind for change in changes})[:_NAMED]), f"{named}. {fixes}"


def _cause(grown: Mapping[str, int], batch: Any = None) -> tuple[str, str]:
    """Why a step has compiled whose inputs have all been there before."""
    if operations := [name for name in grown if name not in ("graphs", "reads")][:_NAMED]:
        return "operations on the host", (
            f"Operations that the device does not have ran on the host: {', '.join(operations)}. They cut the step in two, and "
            "what follows may have another shape each time. Instead of x[mask] or nonzero(): torch.where(mask, x, 0)."
        )
    if grown.get("reads") or grown.get("graphs", 0) > 1:
        how = ".item(), int(), float(), bool() or if" if grown.get("reads") else "print, .cpu(), .tolist() or .numpy()"
        return "values read in a step", (
            f"A value was read before the step was complete, by {how}, in training_step or a hook: what comes before and after "
            "it are graphs of their own, and a number that goes into a shape makes another. Log it instead, self.log('name', "
            "value), which is read after the step, or leave it a tensor, torch.where(condition, a, b)."
        )
    numbers = f" The batch has such numbers: {', '.join(numbers_in(batch)[:_NAMED])}." if numbers_in(batch) else ""
    return "a change that is not visible", (
        "Neither the batch's shapes and dtypes nor the window, parameters, modules or options of the optimizer changed. Look "
        "for a Python number that changes from step to step and is used in a shape, a slice or an index, or is at times 0, 1 "
        f"or -1: make it a tensor, torch.tensor(number) in the batch.{numbers}"
    )
