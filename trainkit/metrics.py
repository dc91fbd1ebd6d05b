"""What ``self.log`` gathers.

Values stay on the device: ``log`` keeps a detached copy, nothing waits for it. At a log boundary the values of the step are
stacked and read once; the values of an epoch are reduced at its end, means in float64 and weighted by samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.data.nested import batch_size as size_of
from trainkit.errors import MetricError
from trainkit.metric_values import alike, is_metric_object, number_of, one_element, read, reduction_of, stacked, weight_of
from trainkit.state.metrics import adopt, capture, capture_objects, fill, restore_objects, stored, unstored, without_it

__all__ = ["MetricResults", "MetricStore", "Scope"]

_RESERVED = ("epoch", "step")  # columns that the loggers fill
_CHUNK = 64  # values of an epoch that are kept before they are summed up: one kernel instead of 64, and bounded memory


class Scope(Enum):
    """Where in a run ``log`` is called, which decides what it may do and its defaults."""

    NOWHERE = "nowhere"
    TRAIN_BATCH = "train batch"
    TRAIN_EPOCH = "train epoch"
    EVAL_BATCH = "evaluation batch"
    EVAL_EPOCH = "evaluation epoch"


class _Metric:
    """One name: its options, the value of the step, and what is needed for the value of the epoch."""

    __slots__ = ("awaits", "fresh", "logger", "name", "on_epoch", "on_step", "prog_bar", "reduce_fx", "signature", "stamp",
                 "step_value", "suffix", "torchmetric", "total", "updated", "values", "weight", "weights")  # fmt: skip

    def __init__(self, key: tuple[str, str], signature: tuple[Any, ...], on_step: bool, on_epoch: bool) -> None:
        self.name, self.suffix = key
        self.signature = signature
        self.prog_bar, self.logger, _, _, reduce_fx = signature[:5]
        self.reduce_fx = reduction_of(self.name, reduce_fx)
        self.on_step, self.on_epoch = on_step, on_epoch
        self.torchmetric: Any = None
        self.updated = False  # logged in this epoch
        self.step_value: Any = None
        self.fresh = False  # the step value has not been given to the loggers yet
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.total: Tensor | None = None
        self.weight = 0.0
        self.stamp = 0  # of the store, when the last value came
        self.awaits: dict[str, Any] | None = None  # restored, and not logged again yet: what has to come back

    @property
    def full_name(self) -> str:
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        return self.name + ("_step" if self.on_epoch else "") + self.suffix

    @property
    def epoch_name(self) -> str:
        return self.name + ("_epoch" if self.on_step else "") + self.suffix

    @property
    def has_values(self) -> bool:
        return bool(self.values) or self.total is not None

    def add(self, value: Any, weight: float) -> None:
        self.values.append(value)
        self.weights.append(weight)
        if len(self.values) >= _CHUNK and isinstance(self.reduce_fx, str):
            self._fold()

    def _fold(self) -> None:
        """Take the kept values into the running total, in float64 where the device has it."""
        if not self.values:
            return
        values = stacked(self.values)
        if self.reduce_fx == "mean":
            weights = torch.tensor(self.weights, dtype=values.dtype).to(values.device, non_blocking=True)
            part, self.weight = (values * weights).sum(), self.weight + sum(self.weights)
        else:
            part = values.sum() if self.reduce_fx == "sum" else values.amin() if self.reduce_fx == "min" else values.amax()
        if self.total is None:
            self.total = part
        elif self.reduce_fx in ("min", "max"):
            self.total = (torch.minimum if self.reduce_fx == "min" else torch.maximum)(self.total, part)
        else:
            self.total = self.total + part
        self.values, self.weights = [], []

    def take(self, metric: Any) -> None:
        """Another batch of the torchmetrics object that stands under this name; its state is its own business."""
        if metric is not self.torchmetric:
            raise MetricError(
                f"log({self.name!r}): in this epoch the name stood for another Metric or for numbers. Use one name for each."
            )
        if not self.on_step:
            return
        latest = getattr(metric, "_forward_cache", None)  # its value of the last batch, if it was asked for
        if latest is not None:
            self.step_value, self.fresh = one_element(self.name, latest), True
        elif not self.on_epoch:
            raise MetricError(
                f"log({self.name!r}, metric) by step: {type(metric).__name__} has no value of this batch, as update() makes "
                "none. Call it, metric(preds, target), or log it by epoch: on_step=False, on_epoch=True"
            )

    def start_epoch(self) -> None:
        """Forget the epoch; a value of a step that no log boundary has seen yet stays."""
        self.values, self.weights, self.total, self.weight, self.updated = [], [], None, 0.0, False

    def epoch_value(self) -> Tensor | None:
        if self.awaits is not None:
            ended, value = without_it(self)
            if ended:
                return value
        if self.torchmetric is not None:
            if not self.updated:
                return None
            value = self.torchmetric.compute() if self.on_epoch else None
            self.torchmetric.reset()
            return None if value is None else one_element(self.full_name, value)
        if not self.on_epoch:
            return None
        if not isinstance(self.reduce_fx, str):
            return one_element(self.full_name, self.reduce_fx(stacked(self.values))) if self.values else None
        self._fold()
        if self.total is None:
            return None
        if self.reduce_fx != "mean":
            return self.total
        return self.total / self.weight if self.weight > 0 else torch.full_like(self.total, torch.nan)


@dataclass
class MetricResults:
    """What the stores of a run have come to so far: ``trainer.callback_metrics`` and the like are made from it."""

    callback: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors by name, for a checkpoint."""
        callback = {name: stored(value) for name, value in self.callback.items()}
        return {"callback": callback, "progress_bar": dict(self.progress_bar), "logged": dict(self.logged)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Take back what :meth:`state_dict` gave, onto ``device`` what was on one; in place, as many hold this object."""
        callback = {name: unstored(value, device) for name, value in state["callback"].items()}
        for mine, others in (
            (self.callback, callback),
            (self.progress_bar, state["progress_bar"]),
            (self.logged, state["logged"]),
        ):
            mine.clear()
            mine.update(others)


class MetricStore:
    """The metrics of one stage.

    Args:
        emit: ``emit(metrics, for_step)`` gives metrics, as numbers, to the loggers: those of a step, or those of an epoch.
        results: where the results go.
        compiled: steps are compiled, and what is logged in them must stay out of the graph.

    Attributes:
        log: see :meth:`trainkit.TrainModule.log`.
        scope: where in the run the loop is.
        batch: what the loop is working on, to weigh an epoch's values by samples.
        suffix: of the evaluation loader, where there are several.
        stamp: a number that the loop sets, kept with each value: see :meth:`logged_at`.
    """

    def __init__(
        self, emit: Callable[[dict[str, float], bool], None], results: MetricResults, *, compiled: bool = False
    ) -> None:
        self.log: Callable[..., None] = torch.compiler.disable(self._log) if compiled else self._log
        self._emit = emit
        self.results = results
        self._metrics: dict[tuple[str, str], _Metric] = {}
        self.scope = Scope.NOWHERE
        self.batch: Any = None
        self._size: tuple[Any, int] = (None, 0)
        self.suffix = ""
        self.stamp = 0

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: str | Callable[..., Any],
        enable_graph: bool,
        add_dataloader_idx: bool,
        batch_size: int | None,
        rank_zero_only: bool,
    ) -> None:
        signature = (prog_bar, logger, on_step, on_epoch, reduce_fx, self.scope)
        if not isinstance(name, str) or not name:
            raise MetricError(f"log: the name of a metric must be a string, not {name!r}. For example: log('loss', loss)")
        key = (name, self.suffix if add_dataloader_idx else "")
        metric = self._metrics.get(key)
        if metric is None or metric.signature != signature:
            metric = self._declare(key, metric, signature, value)
        metric.updated = True
        metric.stamp = self.stamp
        if metric.torchmetric is not None:
            metric.take(value)
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise MetricError(
                    f"log({name!r}): a metric is one number, not a tensor of shape {tuple(value.shape)}. "
                    "Reduce it first, for example with .mean()."
                )
            if not enable_graph:
                value = value.detach().clone()  # a copy: the caller may go on to change his tensor in place
        elif type(value) is not float and type(value) is not int:
            value = number_of(name, value)
        if metric.on_step:
            metric.step_value = value
            metric.fresh = True
        if metric.on_epoch:
            metric.add(value, self._batch_size() if batch_size is None else weight_of(name, batch_size))

    def _declare(self, key: tuple[str, str], known: _Metric | None, signature: tuple[Any, ...], value: Any) -> _Metric:
        """The first call for a name in a stage, or one with other options: check it, work out what is wanted."""
        if known is not None and alike(known.signature, signature):
            return known
        name = key[0]
        scope: Scope = signature[5]
        if scope is Scope.NOWHERE:
            raise MetricError(
                f"log({name!r}) cannot be called here: there is no step or epoch that it belongs to. Call it in a step, or in "
                "a hook between on_train_start and on_train_end, or in a validation or test hook."
            )
        in_batch = scope in (Scope.TRAIN_BATCH, Scope.EVAL_BATCH)
        on_step = scope is Scope.TRAIN_BATCH if signature[2] is None else signature[2]
        on_epoch = scope is not Scope.TRAIN_BATCH if signature[3] is None else signature[3]
        if on_step and not in_batch:
            raise MetricError(f"log({name!r}, on_step=True) needs a batch; in an epoch hook only on_epoch=True is possible.")
        if not on_step and not on_epoch:
            raise MetricError(f"log({name!r}): with on_step=False and on_epoch=False nothing is logged. Set one of them.")
        if name in _RESERVED and signature[1] is not False:
            raise MetricError(
                f"log({name!r}): every row that the loggers get has a {name!r} already. Use another name, or logger=False."
            )
        if known is not None and known.awaits is not None:
            if adopt(known, signature, on_step, on_epoch, value):
                return known
            if known.has_values:
                raise MetricError(
                    f"log({name!r}) had other options before the checkpoint, in the epoch that goes on. Log it as before until "
                    "the epoch ends, or resume from a checkpoint of an epoch's end."
                )
        if known is not None and known.has_values:
            raise MetricError(
                f"log({name!r}) was called twice in one epoch with different options or from hooks of different kinds. Use one "
                "name for each."
            )
        metric = _Metric(key, signature, on_step, on_epoch)
        if is_metric_object(name, value):
            metric.torchmetric = value
        self._metrics[key] = metric
        return metric

    def _batch_size(self) -> int:
        if self.scope in (Scope.TRAIN_EPOCH, Scope.EVAL_EPOCH):
            return 1
        batch, size = self._size
        if batch is not self.batch or batch is None:
            size = size_of(self.batch)
            self._size = (self.batch, size)
        return size

    @property
    def pending(self) -> bool:
        """Whether a value of a step waits for a log boundary."""
        return any(metric.fresh for metric in self._metrics.values())

    def flush_step(self) -> None:
        """A log boundary: read the values of the step, all at once, and give them to bar and loggers."""
        fresh = [metric for metric in self._metrics.values() if metric.fresh]
        for metric in fresh:
            metric.fresh = False
        names = [metric.step_name for metric in fresh]
        self._publish(fresh, names, read([metric.step_value for metric in fresh]), for_step=True)

    def flush_epoch(self) -> dict[str, float]:
        """The end of an epoch: reduce, give to bar and loggers, and start anew; what it came to is returned by name."""
        self.results.callback.update(self.step_values())
        done: list[tuple[_Metric, Any]] = []
        for metric in self._metrics.values():
            value = metric.epoch_value()
            if value is not None:
                done.append((metric, value))
                self.results.callback[metric.full_name] = self.results.callback[metric.epoch_name] = value
            metric.start_epoch()
        # a metric that is logged rarely waits for a log boundary of the next epoch
        self._metrics = {key: metric for key, metric in self._metrics.items() if metric.fresh}
        self._size = (None, 0)
        names = [metric.epoch_name for metric, _ in done]
        numbers = read([value for _, value in done])
        self._publish([metric for metric, _ in done], names, numbers, for_step=False)
        return dict(zip(names, numbers, strict=True))

    def _publish(self, metrics: list[_Metric], names: list[str], numbers: list[float], *, for_step: bool) -> None:
        to_loggers: dict[str, float] = {}
        for metric, name, number in zip(metrics, names, numbers, strict=True):
            if metric.prog_bar:
                self.results.progress_bar[name] = number
            if metric.logger is not False:
                to_loggers[name] = number
        if to_loggers:
            self.results.logged.update(to_loggers)
            self._emit(to_loggers, for_step)

    def step_values(self) -> dict[str, Any]:
        """The latest value in this epoch of each metric that is logged by step."""
        values: dict[str, Any] = {}
        for metric in self._metrics.values():
            if metric.updated and metric.step_value is not None:
                values[metric.full_name] = values[metric.step_name] = metric.step_value
        return values

    def logged_at(self, name: str) -> int | None:
        """The stamp of the value that :meth:`step_values` has under a name; None if there is none."""
        for metric in self._metrics.values():
            if metric.updated and metric.step_value is not None and name in (metric.full_name, metric.step_name):
                return metric.stamp
        return None

    def state_dict(self, module: nn.Module | None = None, before: Mapping[str, int] | None = None) -> dict[str, Any]:
        """What the epoch has gathered so far: numbers, tensors, lists and dicts; tensors as they are, not copied.

        Args:
            module: where torchmetrics objects are attributes: all of them that hold anything are in the state, logged or not.
            before: see :func:`trainkit.state.metrics.capture_objects`.
        """
        objects = {} if module is None else capture_objects(module, before)
        paths = {} if module is None else {id(module.get_submodule(path)): path for path in objects}
        metrics = [capture(metric, paths.get(id(metric.torchmetric))) for metric in self._metrics.values()]
        return {"stamp": self.stamp, "metrics": metrics, "objects": objects}

    def load_state_dict(
        self, state: Mapping[str, Any], module: nn.Module | None = None, device: torch.device | None = None
    ) -> None:
        """Go on with the epoch of :meth:`state_dict`.

        Args:
            state: what it gave.
            module: its torchmetrics objects get their states now. Without it, those that are logged again do so then.
            device: where tensors go that were not on the CPU.
        """
        objects = {} if module is None else restore_objects(module, state["objects"])
        self.stamp = int(state["stamp"])
        self._metrics = {}
        for entry in state["metrics"]:
            # a signature that no call has, so that the next one is looked at
            options = (entry["prog_bar"], entry["logger"], entry["on_step"], entry["on_epoch"], entry["reduce_fx"] or _unknown)
            key = (entry["name"], entry["suffix"])
            metric = _Metric(key, (*options, Scope(entry["scope"]), None), entry["on_step"], entry["on_epoch"])
            fill(metric, entry, device, objects)
            self._metrics[key] = metric

    def discard(self) -> None:
        """Forget what was logged in this epoch (after the sanity check, or when an epoch is left)."""
        self._metrics = {}


def _unknown(values: Tensor) -> Tensor:
    """Stands for a function of the user's that has not come back yet."""
    raise AssertionError(values)
