"""`RecompileMonitor`: counts compiled graphs, and reports why one was compiled after warm-up."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.callback import Callback
from trainkit.checks import whole_number
from trainkit.console import notice, quantity, warn

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["RecompileMonitor"]

_NAMED = 6  # the maximum number of changes, numbers or operations in a message
_FIRST = {
    "place": "no earlier step had this place in its accumulation window; the last window of an epoch may be shorter.",
    "log": "the first step at a log boundary, where more is logged than in other steps; what is logged is part of the graph.",
}
# A cause: its name in `counts`, and a text with the fix.
_BETWEEN = (
    "between steps",
    "A hook, a callback or a logger computed with tensors of the device, or read one: compute the value in training_step and "
    "log it, self.log('name', value). Or training_step returned None after it had computed something: decide by the batch "
    "before the computation, or return 0 for such batches from batch_weight(self, batch).",
)


Inputs = tuple[tuple[str, Any], ...]
"""Names and values, such as `batch['x']` with a shape, `batch['x'].dtype`, `layer.weight.requires_grad`."""


class Change(NamedTuple):
    """An input that differs, with its value in each of the two steps."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (list(one) if isinstance(one, tuple) else str(one).removeprefix("torch.") for one in self[1:])
        return f"{self.name}: {old} → {new}"

    @property
    def axes(self) -> list[int]:
        """The dimensions in which two shapes differ; none if they do not have the same number of dimensions."""
        if not (isinstance(self.old, tuple) and isinstance(self.new, tuple) and len(self.old) == len(self.new)):
            return []
        return [axis for axis, size in enumerate(self.new) if size != self.old[axis]]

    @property
    def kind(self) -> str:
        """What has changed, without the values."""
        if self.name.endswith((".requires_grad", ".training")):
            return self.name.rpartition(".")[2]
        return self.name + (f" dimension {', '.join(map(str, self.axes))}" if self.axes else "")

    @property
    def fix(self) -> str:
        """What the user can do about it."""
        if not self.name.startswith("batch"):
            return "Change it only once, or before training starts. Flags, and options of 0, 1 and -1, are part of the graph."
        if self.axes == [0]:
            return "Drop the short batch, DataLoader(drop_last=True), or pad it, XLAStrategy(pad_last_batch=True)."
        if isinstance(self.new, tuple) and isinstance(self.old, tuple):
            return "Each size needs its own graph: in collate_fn pad to one length, or to a few lengths."
        return "Let collate_fn return the same tensors with the same dtypes for all batches."


class _Step(NamedTuple):
    """The visible inputs of a step that determine which graph it needs."""

    shapes: Inputs  # The shapes of the batch.
    place: tuple[bool, bool, bool]  # The place in the accumulation window.
    log: bool  # Whether the step is at a log boundary.
    begun: bool  # the optimizer has state
    state: int  # number of the state of modules and optimizers


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
        self.unexpected = self._warned = self._first_step = self._state = 0
        self._reported: set[str] = set()  # causes, fields of steps, and other things that are reported once
        self._steps: dict[_Step, None] = {}  # A set in the order of insertion.
        self._evaluated: dict[Inputs, None] = {}  # shapes of batches
        self._states: dict[Inputs, int] = {}  # Inputs → their number.
        self._late = False  # warm-up is over

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._total = None  # Trainer.validate calls the same hooks as a validation in a fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._total = trainer.strategy.compilations
        if self._total is not None:
            self._restart()
            self._first_step = trainer.global_step
        elif self._is_first("useless"):
            notice(
                f"RecompileMonitor has no effect with strategy={trainer.strategy.name!r}, which compiles nothing itself: "
                "it is for 'xla'. Nothing is logged. For torch.compile set the environment variable TORCH_LOGS=recompiles."
            )

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._check_between_steps(trainer)
        if self._total is None:
            return
        if not self._states:
            self._new_state(trainer, module)
        micro, steps = trainer.accelerator.accumulation.current, trainer.global_step - self._first_step
        self._late = steps >= self.warmup_steps
        place = (micro.first, micro.last, micro.uneven)
        self._step = _Step(inputs_of_batch(batch), place, trainer.should_log, steps > 0, self._state)
        self._hints = Counter(trainer.strategy.compilation_hints())

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._total is None:
            return
        hints = Counter(trainer.strategy.compilation_hints()) - self._hints
        if not module.automatic_optimization or self._step.place[2]:  # Such a step usually has more than one graph.
            del hints["graphs"]
        if number := self._count_new(trainer):
            changes = self._new_state(trainer, module)
            self._step = self._step._replace(state=self._state)
            self._judge(trainer, changes, hints, batch, batch_idx, number)
        elif self._late and hints["graphs"] > 1 and self._is_first("cut"):
            notice(f"RecompileMonitor: a step runs in {hints['graphs']} graphs instead of one. {_cause([], hints, batch)[1]}")
        self._steps[self._step] = None
        if trainer.should_log and trainer.accelerator.sync_gradients:
            values = {"compilations/total": float(self._total), "compilations/unexpected": float(self.unexpected)}
            self.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._check_between_steps(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._total is None:
            return
        shapes, number = inputs_of_batch(batch), self._count_new(trainer)
        if number and "evaluation" in self._reported:
            where = f"in batch {batch_idx} of the validation after step {trainer.global_step} (epoch {trainer.current_epoch})"
            self._report(number, where, *_cause(nearest_changes(shapes, self._evaluated), Counter(), batch))
        else:
            self._count("evaluation", number)
        self._evaluated[shapes] = None

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._count("evaluation", self._count_new(trainer))  # The end of an evaluation compiles too, for example its metrics.
        number = self.counts["evaluation"]
        if self._total is not None and not trainer.sanity_checking and self._is_first("evaluation") and number:
            notice(f"RecompileMonitor: {_graphs(number)} compiled for the first evaluation, as expected.")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._check_between_steps(trainer)
        if self.unexpected:
            parts = ", ".join(f"{number} ({cause})" for cause, number in self.counts.items())
            notice(f"RecompileMonitor: {_graphs(self.counts.total())} compiled in this fit: {parts}.")

    def _count_new(self, trainer: Trainer) -> int:
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

    def _check_between_steps(self, trainer: Trainer) -> None:
        number = self._count_new(trainer)
        if number and self._late:
            where = f"between steps, after step {trainer.global_step} (epoch {trainer.current_epoch})"
            self._report(number, where, *_BETWEEN)
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
        # global_step counts complete optimizer steps; a micro-batch inside a window belongs to the next one.
        number_of_step = trainer.global_step + (not trainer.accelerator.sync_gradients)
        where = f"in step {number_of_step} (epoch {trainer.current_epoch}, batch_idx {batch_idx})"
        short = self._is_short_last_batch(trainer, shapes, batch_idx)
        visible = [*shapes, *changes] if changes or not short else []
        new = [name for name, value in step._asdict().items() if all(getattr(one, name) != value for one in self._steps)]
        if visible or step in self._steps or (hints["graphs"] > 1 and not new):
            self._report(number, where, *_cause(visible, hints, batch))
            return
        # It is a combination of known parts, or something that a run has once.
        self._count("expected", number)
        reasons = {"shapes": f"the short last batch, {_cause(shapes, hints, batch)[1]}"} if short else _FIRST
        self._explain_first(new, reasons, number, where)

    def _is_short_last_batch(self, trainer: Trainer, shapes: list[Change], batch_idx: int) -> bool:
        """Whether the changes are those of the short last batch of an epoch, and the first of these."""
        ends = trainer.num_training_batches in (batch_idx + 1, math.inf)
        return is_shorter(shapes) and ends and "shapes" not in self._reported

    def _explain_first(self, new: Sequence[str], reasons: Mapping[str, str], number: int, where: str) -> None:
        """Say once why a run compiles something that it has once."""
        for name in new:
            if name in reasons and self._is_first(name):
                notice(f"RecompileMonitor: {_graphs(number)} compiled {where}, as expected once: {reasons[name]}")

    def _count(self, cause: str, number: int) -> None:
        if number:
            self.counts[cause] += number

    def _report(self, number: int, where: str, cause: str, text: str) -> None:
        """Warn of an unexpected compilation."""
        self.unexpected += number
        self._count(cause, number)
        if self._warned <= self.max_warnings and self._is_first(cause):
            self._warned += 1
            if self._warned > self.max_warnings:
                text = f"Further compilations are only counted, in compilations/unexpected (max_warnings={self.max_warnings})."
            warn(f"RecompileMonitor: {_graphs(number)} compiled after warm-up {where}. {text}")

    def _is_first(self, what: str) -> bool:
        """Whether this has not been reported before; marks it as reported."""
        first = what not in self._reported
        self._reported.add(what)
        return first


def _graphs(number: int) -> str:
    return quantity(number, "graph was", "graphs were")


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


def inputs_of_batch(batch: Any) -> Inputs:
    """Shapes and dtypes of the tensors in nested dicts, lists, tuples and dataclasses."""
    tensors = [(path, leaf) for path, leaf in _leaves(batch, "batch") if isinstance(leaf, Tensor)]
    return tuple(pair for path, leaf in tensors for pair in ((path, tuple(leaf.shape)), (f"{path}.dtype", leaf.dtype)))


def numbers_in(batch: Any) -> list[str]:
    """The Python numbers of a batch."""
    return [f"{path} = {leaf!r}" for path, leaf in _leaves(batch, "batch") if isinstance(leaf, int | float)]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    elif isinstance(value, list | tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        yield path, value
        return
    for name, item in items:
        yield from _leaves(item, path + name)


def inputs_of_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> Inputs:
    """Flags of parameters and modules, and options of the optimizers. Walks through all modules, which takes long."""
    inputs: list[tuple[str, Any]] = [(f"{name}.requires_grad", one.requires_grad) for name, one in module.named_parameters()]
    inputs += [(f"{name or 'module'}.training", part.training) for name, part in module.named_modules()]
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            # The value of a learning rate is not part of the graph.
            options: dict[str, Any] = {"parameters": len(group["params"])}
            options |= {name: _option(value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            inputs += [(f"optimizer {index}, group {number}, {name}", value) for name, value in options.items()]
    return tuple(inputs)


def _option(value: Any) -> str:
    """A number is an input of any value to the same graph; but 0, 1 and -1 are part of the graph, like flags."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option, value))})"
    if isinstance(value, bool | str | None) or value in (0, 1, -1):
        return str(value)
    return "another number" if isinstance(value, int | float) else type(value).__name__


def nearest_changes(new: Inputs, seen: Iterable[Inputs]) -> list[Change]:
    """The changes from the most similar inputs, of several the latest; none if there is nothing to compare with."""
    after = dict(new)
    changes = []
    for before in map(dict, seen):
        pairs = [Change(name, before.get(name, "missing"), after.get(name, "missing")) for name in after | before]
        changes.append([change for change in pairs if change.old != change.new])
    return min(reversed(changes), key=lambda one: (len(one), sum(len(change.axes) for change in one)), default=[])


def is_shorter(changes: list[Change]) -> bool:
    """Whether the only change is that the batch has fewer samples: the first dimensions are smaller."""
    return bool(changes) and all(change.axes == [0] and change.new[0] < change.old[0] for change in changes)
