"""The training loop: plain functions over the verbs of the `Accelerator`.

```python
train_epoch:            on_train_epoch_start
    run_micro_batch:    on_train_batch_start; forward; backward            for each micro-batch of the loader
    close_window:       on_before_optimizer_step; clip; optimizer step; schedulers      after the last of a window
    end_micro_batch:    on_train_batch_end
    safe_point:         log; validate; save; obey signals                  after the last of a window
finish_epoch:           on_train_epoch_end; save
```
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.console import warn
from trainkit.data.micro_batches import MicroBatch, MicroBatchKind
from trainkit.errors import LossError, MissingMetricError, ModuleError
from trainkit.metrics.metric_objects import count_updates
from trainkit.metrics.store import Scope
from trainkit.module.monitors import not_logged, validation_hint
from trainkit.module.overridable_hooks import is_overridden
from trainkit.optim.joint_optimizer import JointOptimizer
from trainkit.state.callback_state import logger_states
from trainkit.strategy import Strategy
from trainkit.trainer.eval_loop import evaluate
from trainkit.trainer.module_steps import check_loss, detach_loss, loss_in, without_data
from trainkit.trainer.progress import Phase, Stop, ValidationStart
from trainkit.trainer.setup import refresh_validation, validate_every

if TYPE_CHECKING:
    from trainkit.optim.optimizer_config import SchedulerConfig
    from trainkit.trainer.run import Run
    from trainkit.trainer.setup import Training

__all__ = [
    "begin_training",
    "close_window",
    "end_training",
    "finish_epoch",
    "run_micro_batch",
    "safe_point",
    "train_epoch",
    "training_continues",
]

_MANY_BATCHES = 1000  # batches without an optimizer step after which to warn: no accumulation window is that long
_SKIP_EPOCH = object()  # on_train_batch_start returned -1


class OpenWindow:
    """The state of the loop between the first and the last micro-batch of an accumulation window.

    Attributes:
        had_loss: `training_step` has returned a loss in it, on this rank.
        learned: it has returned one in an earlier window of the epoch that has a weight, on any rank, or the epoch was resumed.
        updates: the accelerator's number of optimizer steps before the last call of `training_step`.
    """

    __slots__ = ("had_loss", "learned", "updates")

    def __init__(self, learned: bool) -> None:
        self.had_loss = False
        self.learned = learned
        self.updates = 0


def begin_training(run: Run, training: Training) -> None:
    """What comes before the first epoch of a fit."""
    run.metrics.scope = Scope.TRAIN_EPOCH
    if isinstance(training.optimizer, JointOptimizer):
        training.optimizer.begun = run.progress.global_step > 0
    run.hooks.run("on_train_start")
    training.safe_points.agree_now()  # One rank may have requested a stop in an earlier hook.
    interval = run.arguments.val_check_interval
    if isinstance(interval, timedelta) and run.validation is not None:
        training.safe_points.every(interval, run.progress.request_validation)
    run.signals.working = True
    if not run.progress.epoch_start:
        run.metrics.stamp = -1
    run.progress.safe_point_due = True  # The first safe point acts: DataLoader workers may have started by then.


def training_continues(run: Run) -> bool:
    """Whether there is another epoch to train: `max_epochs`, `max_steps` or `should_stop` end training."""
    return run.progress.phase is not Phase.STEP or not run.due.training_ends  # the rest of a resumed step comes first


def end_training(run: Run) -> None:
    """What comes after the last epoch of a fit."""
    run.progress.end_training()
    run.progress.overflows = run.accelerator.overflows
    run.metrics.scope = Scope.NOWHERE  # later values would not reach the loggers
    run.hooks.run("on_train_end")


def train_epoch(run: Run, training: Training) -> None:
    """Train one epoch: the only training loop there is."""
    hooks, metrics, progress = run.hooks, run.metrics, run.progress
    metrics.scope = Scope.TRAIN_EPOCH
    hooks.run("on_train_epoch_start")
    metrics.scope = Scope.TRAIN_BATCH
    metrics.begin_window(-1, run.accumulation)
    run.accelerator.recheck_parameters()  # a hook may have replaced layers
    if progress.phase is not Phase.STEP and finish_step(run, training):
        return
    window, complete, exhausted = OpenWindow(learned=progress.epoch_start > 0), False, False
    micro_batches = training.micro_batches(progress.current_epoch, progress.epoch_start)
    if training.loader.length_changes:
        every = validate_every(run, training.loader)
        training = replace(training, validate_every=every)
        if every is not None:  # an epoch that was resumed has had another length until now
            progress.validations = run.due.intervals(progress.epoch_start, every)
    for micro in micro_batches:
        if micro.batch is None:
            micro = without_data(training, micro)
        outputs = run_micro_batch(run, training, micro, window)
        if outputs is _SKIP_EPOCH:
            complete = True  # the user skips the rest of this epoch
            break
        updated = micro.last and close_window(run, training, window)
        if hooks.on_train_batch_end and micro.kind is MicroBatchKind.DATA:
            end_micro_batch(run, micro, outputs)
        if micro.last:
            if micro.uneven:
                # The index of the rank that has the most micro-batches in this window.
                progress.batch_idx = training.loader.given - 1
            if safe_point(run, training, progress.batch_idx, updated):
                complete = training.is_last(progress.batch_idx)
                break
    else:
        complete = exhausted = True
        run.accelerator.accumulation.end_loader()
    finish_epoch(run, training, complete, exhausted)
    if exhausted:
        refuse_epoch_of_none(run, training, window)


def run_micro_batch(run: Run, training: Training, micro: MicroBatch, window: OpenWindow) -> Any:
    """Run the hooks, the forward and the backward of one micro-batch; returns the outputs of `training_step`."""
    engine, metrics, progress = run.accelerator, run.metrics, run.progress
    progress.batch_idx = micro.index
    metrics.batch = micro.batch
    engine.accumulation.begin(micro)
    if micro.first:
        progress.should_log = run.due.logs(progress.global_step + 1)
        progress.loss = None
        if run.accumulation > 1:
            metrics.begin_window(micro.index, run.accumulation)
    has_data, skip = micro.kind is MicroBatchKind.DATA, None
    if has_data:
        metrics.stamp = micro.index
        for hook in run.hooks.on_train_batch_start:
            skip = hook if hook(micro.batch, micro.index) == -1 else skip
    if skip is not None:
        engine.collective_checks.end_epoch(skip)
        engine.skip_requested = False
        return _SKIP_EPOCH
    if micro.first and training.optimizer is not None:
        for hook in run.hooks.on_before_zero_grad:
            hook(training.optimizer)
        training.zero_grad()
        window.had_loss = False
    window.updates = engine.updates
    if not has_data:
        return training.pad(run, training, micro.batch, micro.index)
    if training.parts is not None:
        return training.parts.run(training, micro, partial(run_part, run, training, window))
    outputs = training.training_step(micro.batch, micro.index)
    if training.automatic:
        loss = outputs if isinstance(outputs, Tensor) else loss_in(outputs)
        if loss is not None:
            window.had_loss = True
            progress.tried_to_learn |= micro.share > 0.0
            run_backward(run, training, loss)
        else:
            run_without_loss(run, training, micro, outputs)
    return outputs


def run_part(run: Run, training: Training, window: OpenWindow, part: MicroBatch) -> Any:
    """Run the forward and backward of a part of a micro-batch; `MicroBatchParts` runs on_after_backward after the last one."""
    outputs = training.training_step(part.batch, part.index)
    loss = outputs if isinstance(outputs, Tensor) else loss_in(outputs)
    if loss is None:
        run_without_loss(run, training, part, outputs)
    else:
        window.had_loss = True
        run.progress.tried_to_learn |= part.share > 0.0
        run_backward(run, training, loss, whole=False)
    return outputs


def run_without_loss(run: Run, training: Training, micro: MicroBatch, outputs: Any) -> None:
    """What a micro-batch whose loss is None needs instead of a backward pass."""
    progress = run.progress
    if training.distributed:
        training.backward(None)  # There is no gradient, but the other ranks wait in a collective.
    first = micro.index == progress.epoch_start and progress.global_step == progress.first_step
    if first and outputs is None and training.optimizer is not None:
        warn("training_step returned None for the first batch, so it is skipped. Return the loss: return loss")


def run_backward(run: Run, training: Training, loss: Tensor, whole: bool = True) -> None:
    """Run the backward pass of the loss of a whole micro-batch or of a part of one, with its hooks."""
    hooks = run.hooks
    if run.progress.should_log and run.accelerator.accumulation.current.share > 0.0:  # the mean over nothing may be NaN
        run.progress.note_loss(loss)
    if loss.ndim or not loss.requires_grad:
        check_loss(loss)
    for hook in hooks.on_before_backward:
        hook(loss)
    try:
        training.backward(loss)
    except ModuleError:  # Parameters without a gradient. If they are all those of an optimizer, that needs another advice.
        # Where the question is a collective, it cannot be asked here: perhaps only this rank has failed.
        if isinstance(training.optimizer, JointOptimizer) and not is_overridden(run.strategy, "has_gradients", Strategy):
            training.optimizer.begin(run.strategy.has_gradients)
        raise
    if whole:
        for hook in hooks.on_after_backward:
            hook()


def close_window(run: Run, training: Training, window: OpenWindow) -> bool:
    """Step the optimizer and the schedulers at the end of an accumulation window; returns whether there was a step.

    Under manual optimization `training_step` has stepped the optimizers already.
    """
    engine, hooks = run.accelerator, run.hooks
    optimizer = training.optimizer
    if optimizer is not None:
        had_loss = window.had_loss
        if training.distributed:  # This is the same on all ranks.
            had_loss = engine.any_rank_had_loss(had_loss)
        window.learned |= had_loss and not engine.accumulation.current.empty
        if had_loss and training.module_step is not None:
            training.module_step(training)
        elif had_loss:
            if hooks.on_before_optimizer_step and not engine.accumulation.current.empty:
                engine.unscale_gradients(optimizer)  # the hooks see the true gradients
                for hook in hooks.on_before_optimizer_step:
                    hook(optimizer)
            training.step(optimizer)
    updated = engine.updates != window.updates or training.without_optimizer
    if updated:
        count_step(run, training)
    return updated


def end_micro_batch(run: Run, micro: MicroBatch, outputs: Any) -> None:
    """Run the hooks at the end of a micro-batch."""
    detached = detach_loss(outputs)
    for hook in run.hooks.on_train_batch_end:
        hook(detached, micro.batch, micro.index)


def count_step(run: Run, training: Training) -> None:
    """Count an optimizer step and advance the schedulers."""
    progress = run.progress
    progress.global_step += 1
    if training.without_optimizer:
        run.strategy.sync_buffers()  # otherwise the optimizer step does it
    if training.schedulers:
        advance_schedulers(run, training, "step", progress.global_step)
    progress.phase = Phase.UPDATED


def finish_step(run: Run, training: Training) -> bool:
    """Complete the step in which the loaded checkpoint was saved; returns whether that ends the epoch."""
    progress = run.progress
    phase, progress.phase = progress.phase, Phase.STEP
    if phase is Phase.EPOCH_END:
        finish_epoch(run, training, progress.epoch_complete, exhausted=False)
        return True
    last = progress.epoch_start - 1
    if phase is Phase.UPDATED:
        progress.should_log = run.due.logs(progress.global_step)
        stop = safe_point(run, training, last, True)
    else:
        validate(run, training)
        stop = end_step(run, training, last, validated=True)
    if stop:
        finish_epoch(run, training, training.is_last(last), False)
    return stop


def safe_point(run: Run, training: Training, batch_idx: int, updated: bool) -> bool:
    """Log, validate, save and obey signals if they are due; returns whether training ends here."""
    progress = run.progress
    if training.profiler is not None:
        training.profiler.step()
    run.accelerator.skip_requested = False  # requested in a window that had no loss
    if updated:
        end_update(run, training)
    elif batch_idx >= _MANY_BATCHES and progress.global_step == progress.first_step:
        warn_without_step(run)  # the epoch may be endless
    if run.distributed or progress.should_stop or progress.stop is not Stop.RUNNING:
        training.safe_points.agree()
    validated = run.validation is not None and run.due.validates(batch_idx, updated, training.validate_every)
    if validated:
        validate(run, training)
    elif updated and training.schedulers and run.validation is None:
        advance_plateaus(run, training)
    return end_step(run, training, batch_idx, validated)


def end_update(run: Run, training: Training) -> None:
    """After an optimizer step: what is to be done after each, and the log if it is due."""
    for act in training.safe_points.step_acts:
        act()
    if run.progress.should_log:
        check_loss_is_finite(run, waited=run.metrics.flush_step())


def end_step(run: Run, training: Training, batch_idx: int, validated: bool) -> bool:
    """The step is complete: save and obey signals if they are due; returns whether training ends here."""
    progress = run.progress
    if validated:
        training.safe_points.agree_now()
        if progress.should_stop and run.due.may_stop:
            progress.begin_stopping()
    progress.end_window(batch_idx, run.accelerator.updates)
    ends = progress.stop is Stop.STOPPING or run.due.max_steps_reached
    if progress.safe_point_due or progress.global_step >= progress.next_save_step:
        if ends:
            progress.safe_point_due = True  # The end of the epoch carries it out, so that a resumed run does not repeat that.
        else:
            training.safe_points.carry_out()
    return ends


def finish_epoch(run: Run, training: Training, complete: bool, exhausted: bool) -> None:
    """The hooks, metrics and schedulers at the end of an epoch.

    Args:
        run: the run.
        training: what its loop calls.
        complete: the epoch counts as complete: no stop request ended it.
        exhausted: the loader has yielded all its batches.
    """
    hooks, metrics, progress = run.hooks, run.metrics, run.progress
    no_step_yet = progress.global_step == progress.first_step
    if progress.batch_idx < 0:
        training.refuse_empty()
    if exhausted and not training.automatic and progress.batch_idx >= progress.epoch_start and no_step_yet:
        warn_without_step(run)
    validates = run.validation is not None and run.due.validates_at_end(training.validate_every)
    if validates and exhausted and not run.due.max_steps_reached:
        validate(run, training, at_end=True)
    progress.phase = Phase.EPOCH_END
    progress.epoch_complete = complete
    validate_last(run, training, complete)
    metrics.batch = None
    metrics.scope = Scope.TRAIN_EPOCH
    run.preview_metrics("on_train_epoch_end")
    hooks.run("on_train_epoch_end")
    run.end_metrics_of_epoch()  # Callbacks that run last may have logged metrics.
    validate_last(run, training, complete)  # a hook may have requested the end of training
    if complete:
        advance_schedulers(run, training, "epoch", progress.current_epoch + 1)
        progress.begin_next_epoch(progress.batches_done, run.arguments.check_val_every_n_epoch is None)
        metrics.stamp = -1  # nothing of the next one has been logged
    else:
        progress.epoch_start = progress.batches_done
    progress.batch_idx = -1
    progress.phase = Phase.STEP
    training.safe_points.agree_now()
    if progress.safe_point_due:
        training.safe_points.carry_out()


def refuse_epoch_of_none(run: Run, training: Training, window: OpenWindow) -> None:
    """After an epoch without any loss: refuse to train another one, or warn if it was the last.

    Raises:
        LossError: another epoch would follow.
    """
    if window.learned or not training.automatic or training.optimizer is None:
        return
    if not training_continues(run):
        warn_without_step(run)
        return
    raise LossError(
        f"training_step returned None for every batch of epoch {run.progress.current_epoch - 1}, the loader yielded None, or "
        "batch_weight returned 0, as for labels that are all -100, so nothing was learned. Return the loss: return loss. To "
        "step the optimizers in training_step: self.automatic_optimization = False. To skip an epoch on purpose, return -1 "
        "from on_train_batch_start."
    )


def check_loss_is_finite(run: Run, waited: bool) -> None:
    """At a log boundary: warn once if the loss is not finite. The device is not waited for if nothing was logged."""
    loss, run.progress.loss = run.progress.loss, None
    readable = loss is not None and (waited or loss.device.type == "cpu")
    if loss is not None and readable and run.save_policy is not None and not math.isfinite(loss):
        run.save_policy.warn_of_loss(float(loss))


def warn_without_step(run: Run) -> None:
    """Warn once why a fit has made no optimizer step in a whole epoch."""
    progress = run.progress
    automatic = run.module.automatic_optimization
    if progress.warned_of_no_step or progress.tried_to_learn or not (automatic or run.optimizers):
        return  # steps were skipped by the user, or by the loss scaler, which adapts in a few steps: see end_line
    progress.warned_of_no_step = True
    if not automatic:
        why = (
            "automatic_optimization is False, and training_step never called step() of an optimizer of self.optimizers(). "
            "Write in training_step: opt = self.optimizers(); opt.zero_grad(); self.manual_backward(loss); opt.step()   (or "
            "remove automatic_optimization = False)"
        )
    else:
        why = (
            "training_step returned None for every batch, the loader yielded None, or batch_weight returned 0, as for labels "
            "that are all -100. Return the loss: return loss"
        )
    warn(f"no optimizer step was made in this epoch, so nothing was learned: {why}.")


def validate(run: Run, training: Training, at_end: bool = False) -> None:
    """The validation inside a fit.

    Args:
        run: the run.
        training: what its loop calls.
        at_end: at the end of an epoch. A run that resumes in it reaches this again by itself.
    """
    refresh_validation(run)
    progress, validation = run.progress, run.validation
    if validation is None:
        return
    progress.validating = True
    validation.began = validation.count
    progress.validation_start = ValidationStart(logger_states(run.loggers), count_updates(run.module))
    if not at_end:
        progress.phase = Phase.VALIDATING
    try:
        evaluate(run, validation)
    finally:
        progress.validating = False
    progress.validation_start = None
    progress.validated_step = progress.global_step
    advance_plateaus(run, training)


def validate_last(run: Run, training: Training, complete: bool) -> None:
    """With `validate_at_end`, validate the last step of a fit unless that was done; `complete` as for `finish_epoch`."""
    if run.arguments.validate_at_end and run.validation is not None:
        training.safe_points.agree_now()  # Any rank may have requested the end of training.
        if run.due.validates_last(complete):
            validate(run, training, at_end=True)


def advance_schedulers(run: Run, training: Training, interval: str, count: int) -> None:
    """Advance the schedulers of an interval that are due after `count` steps or epochs."""
    for config in training.schedulers:
        due = config.interval == interval and count % config.frequency == 0
        if due and (interval == "epoch" or not config.reduce_on_plateau):
            advance(run, config)


def advance_plateaus(run: Run, training: Training) -> None:
    """Advance the schedulers that follow a metric by steps: after each validation, or without one after each step."""
    for config in training.schedulers:
        if config.reduce_on_plateau and config.interval == "step" and run.progress.global_step % config.frequency == 0:
            if training.distributed:
                run.results.add(run.train_metrics.agree_on_step_values())
            advance(run, config)


def advance(run: Run, config: SchedulerConfig) -> None:
    """Advance one scheduler, with its monitor's value if it has one. A value is used once: an old one is no bad epoch."""
    metric = None
    if config.reduce_on_plateau:
        known, monitor = run.callback_metrics, config.monitor or ""
        metric = known.get(monitor)
        if metric is None:
            message = not_logged(run.module.trainer, f"the scheduler {type(config.scheduler).__name__}", monitor, known)
            if config.strict:
                raise MissingMetricError(message + validation_hint(run.module.trainer))
            warn(message + " The scheduler is not advanced.")
            return
        index = str(next(n for n, one in enumerate(run.schedulers) if one is config))
        is_new = run.find_logged_step(monitor) > run.progress.advanced.get(index, -1)
        if run.distributed:  # a metric that only the main process logs is new there
            is_new = bool(run.strategy.world.largest([is_new])[0])
        if not is_new:
            return
        run.progress.advanced[index] = run.progress.global_step
    run.module.lr_scheduler_step(config.scheduler, metric)
