"""Callbacks of transformers in a run of trainkit: their events, their `state`, and the flags of their `control`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, speed_metrics
from transformers.utils import logging

from trainkit.callback import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.console import warn
from trainkit.errors import MissingMetricError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["HuggingFaceCheckpoint", "HuggingFaceEvents", "TrainkitFlow", "best_metric"]

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_STEP_EVENTS = ("step_begin", "pre_optimizer_step", "optimizer_step", "substep_end", "step_end", "epoch_end", "log")
_COUNTERS = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen", "total_flos")


class TrainkitFlow(DefaultFlowCallback):  # type: ignore[misc]  # transformers has no types here
    """Takes the place of `DefaultFlowCallback`: trainkit's `Trainer` decides when to log, evaluate, save and end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Leave the flags as they are."""
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Leave the flags as they are."""
        return control


class HuggingFaceEvents(Callback):
    """Calls callbacks of transformers at the events of a run, with `args`, `state` and `control`, and obeys the flags.

    A flag that one rank sets acts on all ranks. `should_training_stop` and `should_epoch_stop` act after the step in which they
    are set, `should_log`, `should_evaluate` and `should_save` at its end. Where the order of events differs from transformers:
    at the last step of an epoch, `on_epoch_end` comes before the evaluation and the save of that step; there is one of each.

    `state.log_history` has the entries of transformers: under `loss` the mean over the steps since the last one, `grad_norm`,
    `learning_rate` and `epoch`; after an evaluation its metrics. The state, and that of callbacks with `ExportableState`, is in
    the checkpoint.

    Args:
        args: The arguments of the run, which callbacks get.
        callbacks: Objects or classes of `transformers.TrainerCallback`.
        processing_class: What callbacks get under this name.

    Attributes:
        args: The arguments of the run.
        state: The `transformers.TrainerState`.
        control: The flags.
        handler: Calls the callbacks in their order.
        training_loss: The mean loss over the steps of the last fit.
        train_metrics: What that fit has logged at its end, such as `train_runtime`.
        write_log: Called with each entry of the log; adds it to `state.log_history` and calls `on_log`.
    """

    runs_last = True

    def __init__(self, args: TrainingArguments, callbacks: Sequence[Any] = (), *, processing_class: Any = None) -> None:
        self.args = args
        self.state = TrainerState(
            is_local_process_zero=args.local_process_index == 0, is_world_process_zero=args.process_index == 0
        )
        self.control = TrainerControl()
        every = [TrainkitFlow(), *callbacks, *([PrinterCallback()] if args.disable_tqdm else [])]
        self.handler = CallbackHandler(every, None, processing_class, None, None)
        self.write_log: Callable[[dict[str, float]], None] = self.add_to_log
        self._trainer: Trainer | None = None
        self._loss: Tensor | float = 0.0  # the sum over the steps since the last log, of this rank's part
        self._whole_loss = 0.0  # the sum over the steps that are logged
        self._tokens = 0  # of this rank, since the last log
        self._logged_step = self._first_step = 0
        self._learning_rate = self._carried = self._first_epoch = self._train_began = self.training_loss = 0.0
        self._inputs = 0  # as _tokens, with padding
        self.train_metrics: dict[str, float] = {}
        self._parameters = 0
        self._epoch_ended = self._skips = False
        self._began = 0.0
        self._exchanges = self._awaits_saves = False

    @property
    def state_key(self) -> str:
        """One key for all callbacks of transformers."""
        return "HuggingFaceEvents"

    def attach(self, model: Any) -> None:
        """The model exists: `on_init_end`, and transformers' own log level."""
        logging.set_verbosity(self.args.get_process_log_level())
        self.handler.model = model
        if hasattr(model, "num_parameters"):
            self._parameters = model.num_parameters(exclude_embeddings=True)
        self._call("init_end")

    def evaluated(self, metrics: dict[str, float]) -> None:
        """An evaluation outside of a fit has ended."""
        self._call("evaluate", metrics=metrics)

    def predicted(self, metrics: dict[str, float]) -> None:
        """A prediction has ended."""
        self._call("predict", metrics=metrics)

    def push_begins(self) -> None:
        """An upload begins."""
        self._call("push_begin")

    def add_to_log(self, logs: dict[str, float]) -> None:
        """Add an entry to `state.log_history`, with the epoch, and call `on_log`."""
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("log", logs=logs)

    def _call(self, event: str, **kwargs: Any) -> None:
        self.control = getattr(self.handler, f"on_{event}")(self.args, self.state, self.control, **kwargs)

    def _defines(self, event: str) -> bool:
        """Whether a callback of the user's handles an event."""
        name = f"on_{event}"
        return any(
            getattr(type(one), name, None) is not getattr(TrainerCallback, name)
            and not type(one).__module__.startswith("transformers.")
            for one in self.handler.callbacks
        )

    # ------------------------------------------------------------------------------------------------------------ training

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        self.handler.model = module.model
        self.state.is_local_process_zero = trainer.local_rank == 0
        self.state.is_world_process_zero = trainer.is_global_zero
        if stage == "fit":
            fresh = {field.name: getattr(TrainerState(), field.name) for field in dataclasses.fields(TrainerState)}
            kept = ("is_local_process_zero", "is_world_process_zero")
            vars(self.state).update({name: value for name, value in fresh.items() if name not in kept})
            self._loss, self._whole_loss, self._carried = 0.0, 0.0, 0.0
            self._tokens = self._inputs = 0
            self._logged_step = self._first_step = 0

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        state, args = self.state, self.args
        steps = trainer.estimated_stepping_batches
        state.max_steps = int(steps) if steps != float("inf") else args.max_steps
        state.num_train_epochs = trainer.max_epochs
        state.train_batch_size = args.per_device_train_batch_size
        state.compute_steps(args, state.max_steps)
        state.global_step = self._first_step = trainer.global_step
        self._logged_step = self._logged_step or trainer.global_step  # A resumed run has restored it.
        self._carried = float(self._loss)
        self._train_began = time.time()
        self._note_epoch(trainer)
        self._first_epoch = self.state.epoch
        self.handler.optimizer = next(iter(trainer.optimizers), None)
        self.handler.lr_scheduler = next((config.scheduler for config in trainer.lr_scheduler_configs), None)
        self.handler.train_dataloader = trainer.train_dataloader
        self.handler.eval_dataloader = trainer.val_dataloaders
        # A script may add a callback on one rank only, and all ranks communicate or none does.
        defined = [any(map(self._defines, _STEP_EVENTS)), self._defines("save")]
        self._exchanges, self._awaits_saves = map(bool, trainer.strategy.world.largest(defined))
        self._epoch_ended = self._skips = False
        trainer._save_policy.safe_points.after_each_step(partial(self._end_step, trainer))
        self._call("train_begin")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        steps = self.state.global_step - self._first_step
        whole = self._whole_loss + self._reduce(trainer) - self._carried
        self.training_loss = whole / max(1, steps)
        dataset: Any = getattr(trainer.train_dataloader, "dataset", None)
        rows = len(dataset) * (self.state.epoch - self._first_epoch) if hasattr(dataset, "__len__") else None
        speed = speed_metrics("train", self._train_began, num_samples=rows, num_steps=steps)
        self.train_metrics = {**speed, "total_flos": self.state.total_flos, "train_loss": self.training_loss}
        self.write_log(self.train_metrics)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._note_best(trainer)
        self._call("train_end")

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._epoch_ended = self._skips = False
        self._note_epoch(trainer)
        self._call("epoch_begin")
        self._agree(trainer, every_step=False)

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        self._learning_rate = float(optimizer.param_groups[0]["lr"])
        self._call("step_begin")
        first = self.args.logging_first_step and trainer.global_step == 0
        if first or (self.args.logging_strategy == IntervalStrategy.EPOCH and self._ends_epoch(trainer)):
            trainer._run.progress.request_log()

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        return -1 if self._skips else None

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        if trainer.should_log:
            self.log_rate(module)
        self._call("pre_optimizer_step")

    def log_rate(self, module: TrainModule) -> None:
        """Pass the learning rate to the loggers, under transformers' name."""
        module.log("learning_rate", self._learning_rate, on_step=True, on_epoch=False)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        micro = trainer.accelerator.accumulation.current
        if outputs is not None and micro.share > 0.0:
            loss = outputs["loss"] * micro.share
            self._loss = loss if isinstance(self._loss, float) and not self._loss else self._loss + loss
        self._count_inputs(module, batch)
        if not micro.last:
            self._call("substep_end")

    def _end_step(self, trainer: Trainer) -> None:
        """After each optimizer step, on all ranks: the events, and what the flags ask for."""
        every = self.args.torch_empty_cache_steps
        if every is not None and trainer.global_step % every == 0:
            torch.accelerator.empty_cache()
        self._call("optimizer_step")
        self.state.global_step = trainer.global_step
        self._note_epoch(trainer)
        self._call("step_end")
        if trainer.is_last_batch:
            self._end_epoch()
        self._agree(trainer)
        control, progress = self.control, trainer._run.progress
        if trainer.should_log or control.should_log:
            progress.request_log()
            self._log_training(trainer)
            self._agree(trainer)
        control = self.control
        if control.should_epoch_stop and not trainer.is_last_batch:
            self._skips = True
            self._end_epoch()
            if self.args.eval_strategy == IntervalStrategy.EPOCH:
                control.should_evaluate = True
        if control.should_evaluate:
            progress.request_validation_now()
        if control.should_training_stop:
            trainer._save_policy.safe_points.stop_now()
        self._obey_save(trainer)

    def _agree(self, trainer: Trainer, every_step: bool = True) -> None:
        """A flag that one rank has set is set on all ranks. Collective.

        Args:
            trainer: The trainer.
            every_step: It costs time in each step, so it is skipped if no callback handles an event of a step.
        """
        if trainer.world_size > 1 and (self._exchanges or not every_step):
            flags = trainer.strategy.world.largest([bool(getattr(self.control, name)) for name in _FLAGS])
            for name, flag in zip(_FLAGS, flags, strict=True):
                setattr(self.control, name, bool(flag))

    def _obey_save(self, trainer: Trainer) -> None:
        """Save at the end of this step if a callback asks for it."""
        if not self.control.should_save:
            return
        checkpoint = next((one for one in trainer.callbacks if isinstance(one, HuggingFaceCheckpoint)), None)
        if checkpoint is None:
            warn("control.should_save has no effect: save_strategy='no' keeps no checkpoints. Use save_strategy='steps'.")
            self.control.should_save = False
        else:
            checkpoint.request(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not self._epoch_ended:  # The loader has no length, or an epoch was resumed after its last step.
            self._end_epoch()
            self._obey_save(trainer)
            if self.control.should_training_stop:
                trainer.should_stop = True

    def _end_epoch(self) -> None:
        if not self._epoch_ended:
            self._epoch_ended = True
            self._call("epoch_end")

    def _ends_epoch(self, trainer: Trainer) -> bool:
        """Whether the accumulation window that begins now is the last of its epoch."""
        return trainer.batch_idx + trainer.accumulate_grad_batches >= trainer.num_training_batches

    def _note_epoch(self, trainer: Trainer) -> None:
        batches = trainer.num_training_batches
        done = (trainer.batch_idx + 1) / batches if batches and batches != float("inf") else 0.0
        self.state.epoch = trainer.current_epoch + min(done, 1.0)

    def _count_inputs(self, module: TrainModule, batch: Any) -> None:
        inputs: Any = batch.get(getattr(module.model, "main_input_name", "input_ids"))
        if inputs is None:
            return
        self._inputs += inputs.numel()
        counted = self.args.include_num_input_tokens_seen
        if counted == "no":
            return
        if counted != "non_padding":
            self._tokens += inputs.numel()
        elif "attention_mask" in batch:
            self._tokens += int(batch["attention_mask"].sum())
        else:
            pad = getattr(self.handler.processing_class, "pad_token_id", None)
            self._tokens += int(inputs.numel() if pad is None else (inputs != pad).sum())

    def _log_training(self, trainer: Trainer) -> None:
        """Log the mean loss since the last entry. Collective."""
        steps = self.state.global_step - self._logged_step
        if steps <= 0:
            return
        loss = self._reduce(trainer)
        self._whole_loss += loss
        self._loss = 0.0
        self._logged_step = self.state.global_step
        norm = trainer.callback_metrics.get("grad_norm")
        norms = {} if norm is None else {"grad_norm": float(norm)}
        self.write_log({"loss": loss / steps, **norms, "learning_rate": self._learning_rate})

    def _reduce(self, trainer: Trainer) -> float:
        """The sum of the losses since the last log, over all ranks; each rank keeps an equal part. Collective."""
        world = trainer.strategy.data_world
        loss, tokens, inputs = world.sums([float(self._loss), self._tokens, self._inputs])
        self._loss = loss = loss / world.size
        self._tokens = self._inputs = 0
        self.state.num_input_tokens_seen += int(tokens)
        self.state.total_flos += 6 * inputs * self._parameters  # Kaplan et al., Scaling laws, 2020, as transformers counts them
        return loss

    # ---------------------------------------------------------------------------------------------------------- evaluation

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._began = time.time()

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._began = time.time()

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._call("prediction_step")

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._call("prediction_step")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.stage != "fit" or (trainer.sanity_checking and not self.args.eval_on_start):
            return
        metrics = self.metrics_of(trainer)
        self.write_log(metrics)  # which adds the epoch
        self._call("evaluate", metrics=metrics)
        self._note_best_metric(metrics)
        self._agree(trainer, every_step=False)
        if trainer.sanity_checking:
            return
        if self.control.should_training_stop:
            trainer.should_stop = True
        self._obey_save(trainer)

    def metrics_of(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the evaluation that has ended, with its speed, as transformers names them."""
        evaluation = trainer._run.evaluation
        assert evaluation is not None  # its last hook calls this
        metrics = {name: float(value) for results in evaluation.by_loader() for name, value in results.items()}
        rows = sum(len(loader.dataset) for loader in _as_list(trainer.val_dataloaders) if hasattr(loader.dataset, "__len__"))
        batches = [count for count in trainer.num_val_batches if count != float("inf")]
        speed: dict[str, float] = speed_metrics(
            "eval", self._began, num_samples=rows or None, num_steps=int(sum(batches)) or None
        )
        return metrics | speed

    def _note_best_metric(self, metrics: Mapping[str, float]) -> None:
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return
        name = best_metric(args)
        if name not in metrics:
            raise MissingMetricError(
                f"metric_for_best_model={args.metric_for_best_model!r}: the evaluation has no {name!r}, only "
                f"{', '.join(sorted(one for one in metrics if one.startswith('eval_')))}. Use one of them."
            )
        better = np.greater if args.greater_is_better else np.less
        if state.best_metric is None or better(metrics[name], state.best_metric):
            state.best_metric = metrics[name]
            if args.save_strategy != SaveStrategy.NO:
                state.best_global_step = state.global_step

    def _note_best(self, trainer: Trainer) -> None:
        best = next((one for one in trainer.callbacks if isinstance(one, HuggingFaceCheckpoint) and one.monitor), None)
        if best is not None and best.best_model_path:
            self.state.best_model_checkpoint = best.best_model_path

    # -------------------------------------------------------------------------------------------------------------- saving

    def saved(self, trainer: Trainer) -> None:
        """A checkpoint was saved: `on_save`, after it is complete on disk. Collective."""
        self._note_best(trainer)
        if self._awaits_saves:
            trainer._save_policy.wait()
            trainer.strategy.world.barrier()
        self._call("save")
        self._agree(trainer, every_step=False)

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if trainer.stage == "fit":
            self._reduce(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The counters of `state`, the losses that are not logged yet, and the state of the callbacks."""
        callbacks = TrainerState(stateful_callbacks=self._exportable()).stateful_callbacks
        return {
            **{name: getattr(self.state, name) for name in _COUNTERS},
            "loss": float(self._loss),
            "logged_step": self._logged_step,
            "callbacks": callbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a callback keeps its arguments, and gets the saved attributes."""
        for name in _COUNTERS:
            setattr(self.state, name, state_dict[name])
        self._loss, self._logged_step = state_dict["loss"], state_dict["logged_step"]
        waiting = {name: _as_list(states) for name, states in state_dict["callbacks"].items()}
        for callback in self._exportable():
            states = waiting.get(type(callback).__name__)
            for name, value in (states.pop(0) if states else {"attributes": {}})["attributes"].items():
                setattr(callback, name, value)

    def _exportable(self) -> list[Any]:
        return [one for one in self.handler.callbacks if isinstance(one, ExportableState)]


class HuggingFaceCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that calls `on_save` of callbacks of transformers, and saves when one asks for it.

    Args:
        events: Calls the callbacks.
        options: Arguments of `ModelCheckpoint`.
    """

    def __init__(self, *, events: HuggingFaceEvents, **options: Any) -> None:
        super().__init__(**options)
        self._events = events

    def request(self, trainer: Trainer) -> None:
        """Save when the current step is complete; after the last one of an epoch, at its end."""
        self._request(trainer, "validation")

    def _save(self, trainer: Trainer, why: str) -> None:
        before = self._saved
        super()._save(trainer, why)
        if self._saved != before:
            self._events.saved(trainer)


def best_metric(args: TrainingArguments) -> str:
    """The metric that decides which checkpoint is the best, as it is logged."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
