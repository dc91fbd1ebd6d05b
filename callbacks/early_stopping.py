"""`EarlyStopping`: stop training when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.checks import choice, real_number, whole_number
from trainkit.console import echo, notice, quantity, warn
from trainkit.errors import ConfigurationError, MissingMetricError, nearest
from trainkit.module.monitors import how_to_log, not_logged

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["EarlyStopping", "EarlyStoppingReason"]


class EarlyStoppingReason(Enum):
    """Why an `EarlyStopping` has stopped training: its attribute `stopping_reason`.

    Example:
        ```python
        from trainkit.callbacks.early_stopping import EarlyStoppingReason

        if stopping.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC:
            print(stopping.stopping_reason_message)
        ```
    """

    NOT_STOPPED = 0
    """It has not stopped training."""

    STOPPING_THRESHOLD = 1
    """The metric was better than `stopping_threshold`."""

    DIVERGENCE_THRESHOLD = 2
    """The metric was worse than `divergence_threshold`."""

    PATIENCE_EXHAUSTED = 3
    """The metric had not improved for `patience` checks."""

    NON_FINITE_METRIC = 4
    """The metric was NaN or infinite."""


class EarlyStopping(Callback):
    """Stops training when a logged metric has not improved for `patience` checks.

    It checks after each validation (not the sanity check), or at the end of each training epoch without validation or with
    `check_on_train_epoch_end`. With several validations in an epoch, `patience` counts validations. A value is checked once: a
    check is skipped if the metric was not logged since the last one. `min_epochs` and `min_steps` of the Trainer take
    precedence. Under `fast_dev_run` it only checks that the metric is logged. All processes use the same value, so they decide
    the same.

    Args:
        monitor: Name of the metric, as passed to `self.log`.
        min_delta: Minimum change that is an improvement, not inclusive; at least 0.
        patience: Number of checks in a row without an improvement that stop training.
        verbose: Print improvements and the reason for stopping.
        mode: `"min"` if smaller is better, `"max"` if larger is better.
        strict: Raise an error if the metric was never logged; if False, warn once and skip the check.
        check_finite: Stop training if the metric is NaN or infinite.
        stopping_threshold: Stop training if the metric is better than this.
        divergence_threshold: Stop training if the metric is worse than this.
        check_on_train_epoch_end: True: check at the end of each training epoch, False: after each validation. None: after
            each validation, and at the end of training epochs if there is no validation or it does not log the metric.
        log_rank_zero_only: With several processes, print on the main process only.

    Attributes:
        best_score: The best value so far, a scalar tensor on the CPU.
        wait_count: Number of checks since the last improvement.
        stopped_epoch: The epoch in which it stopped, 0 if it did not.
        stopping_reason: An `EarlyStoppingReason`.
        stopping_reason_message: The same as text, with the values; None if it did not stop.
        mode_dict: `mode` → the comparison of torch that is true if the first value is better.
        order_dict: `mode` → the sign of that comparison.

    Raises:
        ConfigurationError: An argument out of its range.
        MissingMetricError: `monitor` was never logged and `strict` is True; while training.

    Example:
        ```python
        trainer = Trainer(callbacks=[EarlyStopping("val_loss", patience=5)])
        ```
    """

    runs_last = True
    mode_dict: ClassVar[dict[str, Callable[..., Tensor]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        _check_monitor(monitor)
        choice(mode, "EarlyStopping(mode=)", ("min", "max"))
        patience = whole_number(patience, "EarlyStopping(patience=)", 0)
        real_number(min_delta, "EarlyStopping(min_delta=)", fix="EarlyStopping('val_loss', min_delta=0.01)")
        if min_delta < 0:
            raise ConfigurationError(
                f"EarlyStopping(min_delta=...) expected a number of at least 0, got {min_delta!r}. It is an absolute "
                "change, whatever the mode. Write: EarlyStopping('val_loss', min_delta=0.01)"
            )
        real_number(stopping_threshold, "EarlyStopping(stopping_threshold=)", example=0.01, optional=True)
        real_number(divergence_threshold, "EarlyStopping(divergence_threshold=)", example=10.0, optional=True)
        self.monitor = monitor
        self.min_delta = float(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only

        self._begin()
        self._warned = False
        self._deferred = False

    @property
    def state_key(self) -> str:
        """The key of its state in a checkpoint; two instances need different metrics or modes."""
        return f"EarlyStopping{{'monitor': {self.monitor!r}, 'mode': {self.mode!r}}}"

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """The comparison of `mode`: `torch.lt` or `torch.gt`."""
        return self.mode_dict[self.mode]

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "checked": self._checked,
            "checked_step": self._checked_step,
            "validated": self._validated,
            "at_train_epoch_end": self._at_train_epoch_end,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = int(state_dict["wait_count"])
        self.stopped_epoch = int(state_dict["stopped_epoch"])
        self.best_score = torch.as_tensor(state_dict["best_score"]).detach().cpu()
        # The constructor's patience counts, so that it can be raised on resume; the saved one says whether this has stopped.
        self._ran_out = self.wait_count >= max(1, int(state_dict.get("patience", self.patience)))
        self._checked = bool(state_dict.get("checked", False))
        self._checked_step = int(state_dict.get("checked_step", -1))
        self._validated = bool(state_dict.get("validated", False))
        if self.check_on_train_epoch_end is None:
            self._at_train_epoch_end = bool(state_dict.get("at_train_epoch_end", False))
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":  # each fit is a new run; a resumed one loads its state after this
            self._begin()

    def _begin(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if self.mode == "min" else -math.inf)
        self._set_reason(EarlyStoppingReason.NOT_STOPPED)
        self._checked = False  # Whether the metric was checked in this run.
        self._checked_step = -1  # `global_step` of the last check: values of this step and earlier ones have been used
        self._validated = False  # Whether this run has validated; the sanity check does not count.
        self._at_train_epoch_end = self.check_on_train_epoch_end is True
        self._ran_out = False  # the run of the loaded checkpoint had no patience left

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._warned = self._deferred = False
        raised = self._ran_out and self.wait_count < self.patience
        if self._ran_out and not raised:
            trainer.should_stop = True  # the resumed run had been stopped for this reason
            message = f"{self.monitor} had not improved for {self.wait_count} checks"
            self._set_reason(EarlyStoppingReason.PATIENCE_EXHAUSTED, message)
            notice(
                f"EarlyStopping had stopped the resumed run: {message}. It does not train further. To continue, "
                f"raise patience={self.patience}: EarlyStopping({self.monitor!r}, patience={self.wait_count + 3})"
            )
            return
        self._ran_out = False
        if raised:
            self.stopped_epoch = 0
            self._set_reason(EarlyStoppingReason.NOT_STOPPED)
        if raised and trainer.should_stop:
            trainer.should_stop = False
            notice(
                f"EarlyStopping had stopped after {quantity(self.wait_count, 'check')} without an improvement of "
                f"{self.monitor}; with patience={self.patience} training continues."
            )

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.sanity_checking or trainer.stage != "fit":
            return
        self._validated = True
        if self._at_train_epoch_end:
            return
        value, is_new = self._latest(trainer)
        if self.check_on_train_epoch_end is None and not self._checked and not is_new:
            self._defer(trainer)
            return
        self._check(trainer, module, value, is_new)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.check_on_train_epoch_end is None and not self._checked:
            # decided now, because validation did not log the metric or there is none
            self._at_train_epoch_end = self._validated or not _validates(trainer)
            if not self._at_train_epoch_end:  # the first validation must not use the values of this epoch
                self._checked_step = trainer.global_step
        if self._at_train_epoch_end:
            self._check(trainer, module, *self._latest(trainer))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._validated and not self._checked:  # training ended in the first epoch
            self._check(trainer, module, *self._latest(trainer))

    def _latest(self, trainer: Trainer) -> tuple[Tensor | None, bool]:
        """The latest value of the metric, and whether it was logged since the last check; the same on all processes.

        If no optimizer step was made since, which is always so with optimizers that the Trainer does not know, each is new.
        """
        value, last = trainer.callback_metrics.get(self.monitor), self._checked_step
        is_new = value is not None and (trainer.global_step == last or trainer._run.find_logged_step(self.monitor) > last)
        world = trainer.strategy.world
        if world.size == 1:
            return value, is_new
        known = [one for one in world.exchange(None if value is None else [float(value), is_new]) if one is not None]
        if not known:
            return None, False
        number, is_new = max(known, key=lambda one: one[1])  # the first that is new: values of a step may differ
        return torch.tensor(number, dtype=torch.float64 if value is None else value.dtype), is_new

    def _check(self, trainer: Trainer, module: TrainModule, value: Tensor | None, is_new: bool) -> None:
        if value is None:
            self._report_missing(trainer)
            return
        self._checked = True
        if trainer.fast_dev_run or not is_new:
            return
        self._checked_step = trainer.global_step
        reason, message = self._judge(value)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self._set_reason(reason, message)
        if message is not None and self.verbose:
            self._print(trainer, module, message)

    def _judge(self, value: Tensor) -> tuple[EarlyStoppingReason, str | None]:
        """Whether and why to stop, and a message."""
        reason = EarlyStoppingReason
        current, best, name = float(value), float(self.best_score), self.monitor
        sign = 1.0 if self.mode == "min" else -1.0
        good, bad = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(current):
            return reason.NON_FINITE_METRIC, f"{name} = {current} is not finite. Best value: {best:.6g}. Training stops."
        if good is not None and sign * current < sign * good:
            self._improve(value)
            text = f"{name} = {current:.6g} is better than stopping_threshold = {good}. Training stops."
            return reason.STOPPING_THRESHOLD, text
        if bad is not None and sign * current > sign * bad:
            text = f"{name} = {current:.6g} is worse than divergence_threshold = {bad}. Training stops."
            return reason.DIVERGENCE_THRESHOLD, text
        if sign * current + self.min_delta < sign * best:
            self._improve(value)
            change = f" by {abs(best - current):.6g}" if math.isfinite(best) else ""
            return reason.NOT_STOPPED, f"{name} improved{change} to {current:.6g}."
        self.wait_count += 1
        if self.wait_count < self.patience:
            return reason.NOT_STOPPED, None
        text = f"{name} has not improved for {quantity(self.wait_count, 'check')}. Best value: {best:.6g}. Training stops."
        return reason.PATIENCE_EXHAUSTED, text

    def _set_reason(self, reason: EarlyStoppingReason, message: str | None = None) -> None:
        self.stopping_reason, self.stopping_reason_message = reason, message

    def _improve(self, value: Tensor) -> None:
        with torch.inference_mode(False):  # validation may run in it, but a normal tensor is needed
            self.best_score = torch.tensor(value.item(), dtype=value.dtype)
        self.wait_count = 0

    def _defer(self, trainer: Trainer) -> None:
        """Look for the metric at the end of the training epoch, because validation did not log it."""
        if not self._deferred:
            self._deferred = True
            notice(
                f"EarlyStopping: {self.monitor!r} was not logged before the end of validation, so it is looked for at "
                f"the end of the training epoch.{nearest(self.monitor, trainer.callback_metrics)}"
            )

    def _report_missing(self, trainer: Trainer) -> None:
        text = not_logged(trainer, "EarlyStopping", self.monitor, trainer.callback_metrics)
        if self.strict:
            when, fix = self.check_on_train_epoch_end, ""
            if when is not None and _validates(trainer):
                fix = f" Or remove check_on_train_epoch_end={when}, which decides when it is read."
            raise MissingMetricError(f"{text} {how_to_log(self.monitor)}.{fix} Or pass strict=False to continue without it.")
        if not self._warned:
            self._warned = True
            warn(f"{text} The check is skipped because of strict=False.")

    def _print(self, trainer: Trainer, module: TrainModule, message: str) -> None:
        if trainer.strategy.world.size == 1 or self.log_rank_zero_only:
            module.print(message)
        else:
            echo(f"[rank {module.global_rank}] {message}")


def _check_monitor(monitor: Any) -> None:
    if not isinstance(monitor, str) or not monitor:
        raise ConfigurationError(
            f"EarlyStopping(monitor=...) expected the name of a logged metric, got {monitor!r}. "
            "Fix: EarlyStopping('val_loss'), and in validation_step: self.log('val_loss', loss)"
        )


def _validates(trainer: Trainer) -> bool:
    return any(count > 0 for count in trainer.num_val_batches)
