"""The training loop: plain functions over the verbs of the ``Accelerator``.

::

    train_epoch:            on_train_epoch_start
        run_micro_batch:    on_train_batch_start; forward; backward            for each micro-batch of the loader
        close_window:       on_before_optimizer_step; clip; optimizer step; schedulers      after the last of a window
        end_micro_batch:    on_train_batch_end
        safe_point:         log; validate; save; obey signals                  after the last of a window
    finish_epoch:           on_train_epoch_end; save
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.console import warn
from trainkit.errors import LossError, MissingMetricError
from trainkit.metrics.store import Scope
from trainkit.micro_batch import MicroBatch, MicroBatchKind
from trainkit.module.monitors import not_logged
from trainkit.trainer.eval_loop import evaluate
from trainkit.trainer.progress import Phase, Stop

if TYPE_CHECKING:
    from trainkit.optim.optimizer_config import SchedulerConfig
    from trainkit.trainer.trainer import Trainer

__all__ = ["close_window", "epochs", "finish_epoch", "run_micro_batch", "safe_point", "train_epoch"]

_LONG = 1000  # batches without an optimizer step since a fit began: no accumulation is as long


_SKIP_EPOCH = object()  # on_train_batch_start returned -1


class OpenWindow:
    """What the loop keeps of the accumulation window between its first and its last micro-batch.

    Attributes:
        had_loss: ``training_step`` has returned a loss in it, on this rank.
        updates: the accelerator's number of optimizer steps before ``training_step`` was called last.
    """

    __slots__ = ("had_loss", "updates")

    def __init__(self) -> None:
        self.had_loss, self.updates = False, 0


def epochs(trainer: Trainer) -> Iterator[int]:
    """The epochs to train, until an end is reached: ``max_epochs``, ``max_steps``, or ``should_stop``."""
    hooks, metrics, progress = trainer._hooks, trainer._metrics, trainer._progress
    metrics.scope = Scope.TRAIN_EPOCH
    hooks.run("on_train_start")
    trainer._signals.working = True
    if not progress.epoch_start:
        metrics.stamp = -1
    progress.first_step = progress.global_step
    progress.safe_point_due = True  # at the first safe point, when there may be workers
    while progress.phase is not Phase.STEP or not trainer._due.training_ends:  # the rest of a resumed step comes first
        trainer._refresh_loaders()
        yield progress.current_epoch
    progress.end_training()
    metrics.scope = Scope.NOWHERE  # nothing is left that could be given to the loggers
    hooks.run("on_train_end")


def train_epoch(trainer: Trainer) -> None:
    """Train one epoch: the only training loop there is."""
    plan, hooks, metrics, progress = trainer._fit_plan, trainer._hooks, trainer._metrics, trainer._progress
    metrics.scope = Scope.TRAIN_EPOCH
    hooks.run("on_train_epoch_start")
    metrics.scope = Scope.TRAIN_BATCH
    if progress.phase is not Phase.STEP and finish_step(trainer):
        return
    window, complete, exhausted = OpenWindow(), False, False
    for micro in plan.micro_batches(progress.current_epoch, progress.epoch_start):
        outputs = run_micro_batch(trainer, micro, window)
        if outputs is _SKIP_EPOCH:
            complete = True  # the user skips the rest of this epoch
            break
        updated = micro.last and close_window(trainer, window)
        if hooks.on_train_batch_end and micro.kind is MicroBatchKind.DATA:
            end_micro_batch(trainer, micro, outputs)
        if micro.last:
            if micro.uneven:
                progress.batch_idx = plan.loader.given - 1  # of the rank that has the most micro-batches in this window
            if safe_point(trainer, progress.batch_idx, updated):
                complete = plan.is_last(progress.batch_idx)
                break
    else:
        complete = exhausted = True
        trainer.accelerator.accumulation.end_loader()
    finish_epoch(trainer, complete, exhausted)


def run_micro_batch(trainer: Trainer, micro: MicroBatch, window: OpenWindow) -> Any:
    """Run the hooks, the forward and the backward of one micro-batch; returns the outputs of ``training_step``."""
    plan, engine, metrics, progress = trainer._fit_plan, trainer.accelerator, trainer._metrics, trainer._progress
    progress.batch_idx, metrics.batch = micro.index, micro.batch
    engine.accumulation.begin(micro)
    if micro.first:
        progress.should_log = trainer._due.logs(progress.global_step + 1)
    has_data, skip = micro.kind is MicroBatchKind.DATA, None
    if has_data:
        metrics.stamp = micro.index
        for hook in trainer._hooks.on_train_batch_start:
            skip = hook if hook(micro.batch, micro.index) == -1 else skip
    if skip is not None:
        engine.collective_checks.end_epoch(skip)
        engine.skip_asked = False
        return _SKIP_EPOCH
    if micro.first and plan.optimizer is not None:
        for hook in trainer._hooks.on_before_zero_grad:
            hook(plan.optimizer)
        plan.zero_grad()
        window.had_loss = False
    window.updates = engine.updates
    if not has_data:
        return plan.pad(micro.batch, micro.index)
    outputs = plan.training_step(micro.batch, micro.index)
    if plan.automatic:
        loss = outputs if outputs is None or isinstance(outputs, Tensor) else _loss_in(outputs)
        if loss is not None:
            window.had_loss = progress.tried_to_learn = True
            run_backward(trainer, loss)
        elif plan.several:
            plan.backward(None)  # there is no gradient, but the other ranks wait in a collective
    return outputs


def run_backward(trainer: Trainer, loss: Tensor) -> None:
    """Run the backward pass of a loss with its hooks."""
    hooks = trainer._hooks
    if loss.ndim or not loss.requires_grad:
        _check_loss(loss)
    for hook in hooks.on_before_backward:
        hook(loss)
    trainer._fit_plan.backward(loss)
    for hook in hooks.on_after_backward:
        hook()


def close_window(trainer: Trainer, window: OpenWindow) -> bool:
    """Step the optimizer and the schedulers at the end of an accumulation window; returns whether there was a step.

    Under manual optimization ``training_step`` has stepped the optimizers already.
    """
    plan, engine, hooks = trainer._fit_plan, trainer.accelerator, trainer._hooks
    optimizer = plan.optimizer
    if optimizer is not None:
        had_loss = window.had_loss
        if plan.several:  # the same on all ranks
            had_loss = engine.any_rank_had_loss(had_loss)
        if had_loss:
            if hooks.on_before_optimizer_step:
                engine.unscale_gradients(optimizer)  # the hooks see the true gradients
                for hook in hooks.on_before_optimizer_step:
                    hook(optimizer)
            plan.step(optimizer)
    updated = engine.updates != window.updates or plan.without_optimizer
    if updated:
        count_update(trainer)
    return updated


def end_micro_batch(trainer: Trainer, micro: MicroBatch, outputs: Any) -> None:
    """Run the hooks at the end of a micro-batch."""
    detached = _detached(outputs)
    for hook in trainer._hooks.on_train_batch_end:
        hook(detached, micro.batch, micro.index)


def count_update(trainer: Trainer) -> None:
    """Count an optimizer step and advance the schedulers."""
    progress = trainer._progress
    progress.global_step += 1
    if trainer._fit_plan.without_optimizer:
        trainer.strategy.sync_buffers()  # else an update does it
    if trainer._fit_plan.schedulers:
        advance_schedulers(trainer, "step", progress.global_step)
    progress.phase = Phase.UPDATED


def finish_step(trainer: Trainer) -> bool:
    """Complete the step in which the loaded checkpoint was saved; returns whether that ends the epoch."""
    plan, progress = trainer._fit_plan, trainer._progress
    phase, progress.phase = progress.phase, Phase.STEP
    if phase is Phase.EPOCH_END:
        finish_epoch(trainer, progress.epoch_complete, exhausted=False)
        return True
    last = progress.epoch_start - 1
    if phase is Phase.UPDATED:
        progress.should_log = trainer._due.logs(progress.global_step)
        stop = safe_point(trainer, last, True)
    else:
        validate(trainer)
        stop = end_step(trainer, last, validated=True)
    if stop:
        finish_epoch(trainer, plan.is_last(last), False)
    return stop


def safe_point(trainer: Trainer, batch_idx: int, updated: bool) -> bool:
    """Log, validate, save and obey signals if they are due; returns whether training ends here."""
    plan, progress = trainer._fit_plan, trainer._progress
    if plan.profiler is not None:
        plan.profiler.step()
    trainer.accelerator.skip_asked = False  # asked for in a window that had no loss
    if updated and progress.should_log:
        trainer._metrics.flush_step()
    elif not updated and batch_idx >= _LONG and progress.global_step == progress.first_step:
        warn_without_step(trainer)  # the epoch may be an endless one
    agree_on_stop(trainer)
    validated = trainer._val_plan is not None and trainer._due.validates(batch_idx, updated, plan.validate_every)
    if validated:
        validate(trainer)
    elif updated and plan.schedulers and trainer._val_plan is None:
        advance_plateaus(trainer)
    return end_step(trainer, batch_idx, validated)


def agree_on_stop(trainer: Trainer) -> None:
    """Begin stopping if a stop was requested in the step before, and pass on a request of this step."""
    control, progress = trainer._control, trainer._progress
    if control is not None:
        control.turn()  # what the step before requested, on any rank
    if progress.stop is Stop.REQUESTED and trainer._due.may_stop:
        progress.begin_stopping()
    if control is None and (progress.should_stop or progress.stop is Stop.REQUESTED):
        progress.agree_on_stop(progress.should_stop)


def end_step(trainer: Trainer, batch_idx: int, validated: bool) -> bool:
    """The step is complete: save and obey signals if there is cause to; returns whether training ends here."""
    progress = trainer._progress
    if validated:
        if trainer._control is not None:
            trainer._control.exchange()
        if progress.should_stop and trainer._due.may_stop:
            progress.begin_stopping()
    progress.end_window(batch_idx, trainer.accelerator.updates)
    ends = progress.stop is Stop.STOPPING or trainer._due.max_steps_reached
    if progress.safe_point_due or progress.global_step >= progress.next_save_step:
        if ends:
            progress.safe_point_due = True  # after the end of the epoch: a run that has ended does not come back to it
        else:
            trainer._checkpointing.attend()
    return ends


def finish_epoch(trainer: Trainer, complete: bool, exhausted: bool) -> None:
    """The hooks, metrics and schedulers at the end of an epoch.

    Args:
        trainer: the trainer.
        complete: it counts: it was not left for a stop.
        exhausted: the loader gave all its batches.
    """
    hooks, metrics, plan, progress = trainer._hooks, trainer._metrics, trainer._fit_plan, trainer._progress
    if progress.batch_idx < 0:
        plan.refuse_empty()
    if exhausted and progress.batch_idx >= progress.epoch_start and progress.global_step == progress.first_step:
        warn_without_step(trainer)
    validates = trainer._val_plan is not None and trainer._due.validates_at_end(plan.validate_every)
    if validates and exhausted and not trainer._due.max_steps_reached:
        validate(trainer, at_end=True)
    progress.phase, progress.epoch_complete = Phase.EPOCH_END, complete
    metrics.batch = None
    metrics.scope = Scope.TRAIN_EPOCH
    hooks.run("on_train_epoch_end")
    trainer._end_metrics_of_epoch()  # what callbacks that run last have logged
    if complete:
        advance_schedulers(trainer, "epoch", progress.current_epoch + 1)
        progress.begin_next_epoch(progress.batch_idx + 1, trainer._arguments.check_val_every_n_epoch is None)
        metrics.stamp = -1  # nothing of the next one has been logged
    else:
        progress.epoch_start = progress.batches_done
    progress.batch_idx = -1
    progress.phase = Phase.STEP
    if trainer._control is not None:
        trainer._control.exchange()
    if progress.safe_point_due:
        trainer._checkpointing.attend()


def warn_without_step(trainer: Trainer) -> None:
    """Say once why a fit has made no optimizer step in a whole epoch."""
    progress = trainer._progress
    automatic = trainer.lightning_module.automatic_optimization
    if progress.warned_of_no_step or progress.tried_to_learn or not (automatic or trainer._prepared_optimizers):
        return  # what was tried was skipped: by the user, or by the loss scaler, which takes some steps to settle
    progress.warned_of_no_step = True
    if not automatic:
        why = (
            "automatic_optimization is False, and training_step never called step() of an optimizer of self.optimizers(). "
            "Write in training_step: opt = self.optimizers(); opt.zero_grad(); self.manual_backward(loss); opt.step()   (or "
            "remove automatic_optimization = False)"
        )
    else:
        why = "training_step returned None for every batch. Return the loss: return loss"
    warn(f"no optimizer step was made in this epoch, so nothing was learned: {why}.")


def validate(trainer: Trainer, at_end: bool = False) -> None:
    """The validation inside a fit.

    Args:
        trainer: the trainer.
        at_end: at the end of an epoch whose length was not known. A run that resumes in it comes here again by itself.
    """
    trainer._refresh_validation()
    plan = trainer._val_plan
    if plan is None:
        return
    trainer._begin_validation(plan, at_end)
    try:
        evaluate(trainer, plan)
    finally:
        trainer._progress.validating = False
    trainer._progress.validation_start = None
    advance_plateaus(trainer)


def advance_schedulers(trainer: Trainer, interval: str, count: int) -> None:
    """Advance the schedulers of an interval that are due after ``count`` steps or epochs."""
    for config in trainer._fit_plan.schedulers:
        due = config.interval == interval and count % config.frequency == 0
        if due and (interval == "epoch" or not config.reduce_on_plateau):
            advance(trainer, config)


def advance_plateaus(trainer: Trainer) -> None:
    """Advance the schedulers that follow a metric by steps: after each validation; without one, after each update."""
    for config in trainer._fit_plan.schedulers:
        if config.reduce_on_plateau and config.interval == "step" and trainer.global_step % config.frequency == 0:
            if trainer._fit_plan.several:
                trainer._results.add(trainer._train_metrics.agreed_step_values())
            advance(trainer, config)


def advance(trainer: Trainer, config: SchedulerConfig) -> None:
    """Advance one scheduler, with its monitor's value if it has one."""
    metric = None
    if config.reduce_on_plateau:
        known = trainer.callback_metrics
        metric = known.get(config.monitor or "")
        if metric is None:
            name = type(config.scheduler).__name__
            message = not_logged(trainer, f"the scheduler {name}", config.monitor or "", known)
            if config.strict:
                raise MissingMetricError(message)
            warn(message + " It is not advanced.")
            return
    trainer.lightning_module.lr_scheduler_step(config.scheduler, metric)


def _loss_in(outputs: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned, if that is a dict."""
    if not isinstance(outputs, dict) or "loss" not in outputs:
        raise LossError(
            "training_step must return the mean loss (a scalar tensor), a dict with it under 'loss', or None; it returned "
            f"{_describe(outputs)}."
        )
    loss = outputs["loss"]
    if loss is not None and not isinstance(loss, Tensor):
        raise LossError(f"training_step: outputs['loss'] must be a scalar tensor, not {_describe(loss)}.")
    return loss


def _check_loss(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise LossError(
            f"training_step must return a scalar loss, not a tensor of shape {tuple(loss.shape)}. Return its mean: "
            "return loss.mean()"
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss that training_step returned has no graph, so nothing can be learnt from it. Do not use .item(), "
            ".detach() or torch.no_grad() on the way to it, and check that some parameter requires a gradient."
        )


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"
    return f"{value!r} ({type(value).__name__})"


def _detached(outputs: Any) -> Any:
    """What ``on_train_batch_end`` gets: the outputs as a dict, the loss without its graph."""
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        return {**outputs, "loss": outputs["loss"].detach()}
    return outputs
