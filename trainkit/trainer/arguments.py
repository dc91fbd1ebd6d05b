"""The arguments of `Trainer`: what each may be, which contradict each other, and what settings and assignments change."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from trainkit.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM
from trainkit.checks import (
    argument,
    argument_texts,
    arguments_of,
    check_arguments,
    choice,
    is_whole,
    optional,
    real_number,
    switch,
    whole,
    whole_number,
)
from trainkit.config.settings import Settings, read_process_settings
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.launch.environment import DEVICE
from trainkit.launch.joining import nodes, processes
from trainkit.launch.strategy_choice import read_devices
from trainkit.module.activation_checkpointing import checkpointing_choice
from trainkit.names import refuse_unknown
from trainkit.paths import local_path
from trainkit.precision import MIXED, OVER_MASTERS, is_short
from trainkit.registry import load_callback, load_strategy
from trainkit.trainer.checkpoint_plugins import without_checkpoint_io

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.config.settings import Plugin
    from trainkit.loggers import Logger
    from trainkit.precision import Precision
    from trainkit.strategy import StepArguments, Strategy
    from trainkit.trainer.profiler import Profiler
    from trainkit.trainer.trainer import Trainer

__all__ = ["ArgumentView", "TrainerArguments", "assign_argument", "attribute_errors", "read_arguments", "with_settings"]


def _as_count(value: Any) -> Any:
    """A whole float above 1, such as `10.0`, is a number of batches and no fraction."""
    return int(value) if isinstance(value, float) and value > 1.0 and value.is_integer() else value


def _limit(value: Any, name: str) -> int | float:
    value = 1.0 if value is None else _as_count(value)
    if (is_whole(value) and value >= 0) or (isinstance(value, float) and 0.0 <= value <= 1.0):
        return value
    raise ConfigurationError(
        f"{name} must be a number of batches (an integer ≥ 0) or a fraction (a float from 0.0 to 1.0), not {value!r}. For "
        f"example: {name}=100 or {name}=0.25"
    )


def _interval(value: Any, name: str) -> int | float | timedelta | None:
    if isinstance(value, str | timedelta | Mapping):
        if time := _as_time(value):  # An interval of 0 is refused, too.
            return time
    else:
        value = _as_count(value)
        if value is None or (isinstance(value, float) and 0.0 < value <= 1.0) or (is_whole(value) and value >= 1):
            return value
    raise ConfigurationError(
        "val_check_interval must be a number of training batches (an integer ≥ 1), a fraction of the epoch (a float "
        f"above 0.0 up to 1.0) or a time such as '00:00:30:00', not {value!r}. To validate every N optimizer steps: "
        "val_every_n_steps=N"
    )


def _epochs(value: Any, name: str) -> int | float | None:
    if value is None:
        return None
    if isinstance(value, float) and 0.0 < value < math.inf:
        return int(value) if value.is_integer() else value
    return whole_number(value, name, -1, expected="an integer ≥ -1 (-1: no limit) or a float above 0, such as 2.5")


def _as_time(value: Any) -> timedelta | None:
    """A time in one of the forms of `max_time`; `None` if it is none of them."""
    try:
        return timedelta(seconds=load_callback("timer")(value).duration)
    except ConfigurationError:
        return None


def _checkpointing(value: Any, name: str) -> Any:
    checkpointing_choice(value)
    return value


def _algorithm(value: Any, name: str) -> Any:
    if value not in (None, "norm", "value"):
        raise UnknownNameError(f"unknown {name} {value!r}; known: 'norm', 'value'.{nearest(str(value), ('norm', 'value'))}")
    return value


def _root(value: Any, name: str) -> Any:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ConfigurationError(f"{name} must be a path, not {value!r}. For example: 'runs'")
    return value


def _omitted(value: Any, name: str) -> Sequence[str] | None:
    names = [value] if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) and one for one in names):
        raise ConfigurationError(f"{name} must be a name or a list of names, not {value!r}. For example: {name}=['tokenizer']")
    if needed := [one for one in names if one in ("state_dict", "callbacks", "epoch", "global_step")]:
        raise ConfigurationError(f"{name}: {needed[0]!r} is needed to resume. Name what on_save_checkpoint adds.")
    return names


def _best(value: Any, name: str) -> Any:
    if value is None or (isinstance(value, str) and value):
        return value
    if not isinstance(value, load_callback("model_checkpoint")):
        raise ConfigurationError(
            f"{name} must be the name of a logged metric or a ModelCheckpoint, not {value!r}. For example: {name}='val_loss'"
        )
    if value.monitor is None:
        raise ConfigurationError(
            f"{name} is a ModelCheckpoint without a monitor, so none of its checkpoints is the best. For example: "
            f"{name}=ModelCheckpoint(monitor='val_accuracy', mode='max')"
        )
    return value


def _determinism(value: Any, name: str) -> Any:
    if value not in (True, False, None, "warn"):
        raise ConfigurationError(f"{name} must be True, False or 'warn', not {value!r}.")
    return value


def _trial(value: Any, name: str) -> Any:
    if not isinstance(value, bool) and not (is_whole(value) and value >= 0):
        raise ConfigurationError(f"{name} must be True, False or a number of batches, not {value!r}.")
    return value


@dataclass(kw_only=True)
class TrainerArguments:
    """The arguments of `trainkit.Trainer`, each stated once: its type, its default, its check, and here its text.

    An object of it has the values of those that a run reads, checked together, with defaults filled in.

    Args: Where it runs
        accelerator: Kind of device: `"cpu"`, `"gpu"` or `"cuda"`, `"mps"`, `"tpu"` or `"xla"`. `"auto"`: the best one there
            is.
        devices: Number of processes per node, one for each device; `-1` for all GPUs, or a list of GPUs such as `[0, 1]`.
            `"auto"`: all GPUs in a script, one GPU in a notebook, one process on the CPU.
        num_nodes: Number of nodes. Default: as the launcher started the processes.
        strategy: `"ddp"`, `"zero1"` to `"zero3"`, `"zero3_offload"`, `"xla"`, or a `Strategy`. `"auto"`: XLA on a TPU, DDP
            with several processes, otherwise one device.
        sync_batchnorm: Compute BatchNorm statistics over all processes (not on the CPU).
        activation_checkpointing: Recompute activations in the backward pass of `fit`, to save memory. `True`: those of the
            repeated blocks. `"selective"`: of these, keep matrix products, convolutions and attention. Or modules: a
            class, a name such as `"layers.*"`, a function `(name, module) -> bool`, or a list. Or a dict with keys of
            `modules`, `policy` (`"full"` or `"selective"`) and `every`: `{"every": 2}` is every second block.
        precision: `"32-true"` (the default), `"64-true"`, `"bf16-mixed"`, `"16-mixed"`, `"bf16-true"`, `"16-true"`, or a
            `Precision`.
        seed: Seed of the order of the data, of augmentation and of dropout. Default: the seed given to `seed_everything`,
            otherwise torch's own.
        deterministic: `True`: torch raises on nondeterministic kernels; `"warn"`: it warns. The setting from before is
            restored after the run.
        compile: Compile with `torch.compile`. `True`: each repeated block of the model, or the steps if it has none;
            `"regional"`: the blocks; `"whole"`: the steps. Or a dict of arguments of `torch.compile`, with `"regional"`
            (`True` or `False`) and `"modules"`: the classes, the names or a function of the modules to compile instead of the
            blocks. In place: names in checkpoints do not change, and the module is not compiled after the run.
        benchmark: Let cuDNN choose kernels by timing them. The setting from before is restored after the run.

    Args: How long
        max_epochs: Maximum number of epochs; -1: no limit. Default: 1000 if neither `max_steps` nor `max_time` is given. 2.5 is
            two epochs and the first half of the optimizer steps of a third one, rounded up; the loader needs a length.
        min_epochs: Minimum number of epochs, even if a callback requests a stop.
        max_steps: Maximum number of optimizer steps; -1: no limit.
        min_steps: Minimum number of optimizer steps, even if a callback requests a stop.
        max_time: Maximum duration: `"DD:HH:MM:SS"`, a `timedelta`, or its arguments as a dict such as `{"hours": 12}`.
        fast_dev_run: Run one batch of each stage, or this number of batches, to find errors. Nothing is logged or saved;
            `trainer.logger` accepts every call.

    Args: Batches and optimizer steps
        accumulate_grad_batches: Number of micro-batches per optimizer step, or a dict of them: `{0: 8, 4: 4}` is 8 from
            epoch 0 on and 4 from epoch 4 on. Default: 1. A dict adds `GradientAccumulationScheduler`.
        global_batch_size: Number of samples per optimizer step, over all processes. The number of micro-batches follows
            from it; a number that does not divide is an error.
        auto_micro_batch: Split a micro-batch that runs out of memory in training, into parts of whole samples whose
            gradients add up to its own. The global batch and the order of samples stay the same. For one device and DDP;
            evaluation is not split.
        gradient_clip_val: Maximum norm of the gradient, or with `"value"` maximum absolute value of its elements. Adds
            `GradientClipping`. 0, as `None`, turns clipping off.
        gradient_clip_algorithm: `"norm"` (the default) or `"value"`.
        log_grad_norm: Log the norm of the gradient as `grad_norm` at log boundaries, before clipping if there is any. Adds
            `GradientClipping`. With `gradient_clip_val` it is logged anyway.
        limit_train_batches: Number of batches per epoch on each process (int), or a fraction of them (float). Default: 1.0.
        limit_val_batches: The same for each validation loader.
        limit_test_batches: The same for each loader of `test`.
        limit_predict_batches: The same for each loader of `predict`.
        overfit_batches: Train on this number (or fraction) of batches, unshuffled, and validate on the same ones.
        reload_dataloaders_every_n_epochs: Call `train_dataloader` and `val_dataloader` again every n epochs; 0: never.

    Args: Validation
        val_check_interval: Training batches between validations (int), a fraction of an epoch (float), or a time, in the forms
            of `max_time`. Default: 1.0.
        val_every_n_steps: Optimizer steps between validations.
        check_val_every_n_epoch: Validate in every n-th epoch only. `None`: `val_check_interval`, an integer or a time, counts
            across epochs.
        num_sanity_val_steps: Number of validation batches before training, to find errors early; -1: all. Default: 2. Their
            metrics are discarded.
        inference_mode: Run `validate`, `test` and `predict` under `torch.inference_mode`; `False`: under `torch.no_grad`, like
            the validation in a fit, since what is created there may be used in training.
        validate_at_end: Validate after the last optimizer step of a fit if no validation came after it, as when `max_steps`,
            `max_time` or a stop request ends an epoch early. The last checkpoint has its metrics.

    Args: What is shown and kept
        logger: `True` (the default): TensorBoard if it is installed, otherwise CSV. `False`: none. Or a logger, its name
            such as `"mlflow"`, or a list.
        callbacks: A callback or a list of them.
        default_root_dir: Folder for logs and checkpoints, or a URL such as `s3://bucket/runs`; each run has its own folder
            in it. Default: `./trainkit_runs`.
        log_every_n_steps: Optimizer steps between two log boundaries. Default: 50; 0: log epochs only.
        enable_progress_bar: Add `TQDMProgressBar`.
        enable_model_summary: Add `ModelSummary`.
        enable_checkpointing: Add `ModelCheckpoint`, unless `callbacks` has one. It saves at the end of each epoch, every 30
            minutes and when training ends, and keeps the two newest checkpoints.
        restore_best: A metric, as passed to `self.log`, or a `ModelCheckpoint` with a `monitor`: after `fit` the module has the
            parameters and buffers of the best checkpoint. A run resumes from the last one all the same. A metric whose name
            ends in `loss` should be small, any other large; if not, pass a `ModelCheckpoint` with its `mode`. Adds a
            `ModelCheckpoint`, unless `callbacks` has one that monitors the metric; if it has several, pass one of them. A fit
            that a signal stops restores nothing.
        save_total_limit: Maximum number of checkpoints that `ModelCheckpoint` keeps of a run, the best ones and the newest
            included, instead of its `keep_last`. If 1, and the newest is not the best, it keeps both.
        checksum: How the files of checkpoints are checked: `"xxh3-128"` finds damage; `"sha256"`, slower, also what someone
            replaces, if the digest of the manifest is kept in another place.
        omit_from_checkpoint: Names that `on_save_checkpoint` adds to the checkpoint and that are not stored, because they
            cannot be: `"loss_fn"`, or `"hyper_parameters.tokenizer"`. On loading, `on_save_checkpoint` is asked again, and
            `on_load_checkpoint` gets its objects.
        slurm_requeue: After SIGTERM, SIGUSR1 or SIGHUP, when the checkpoint is complete, ask SLURM to run the job again.
        profiler: `"simple"`, `"advanced"`, `"pytorch"` or a `Profiler`: prints at the end of the run where the time went.
        detect_anomaly: Let autograd name the forward operation that caused a NaN in the backward pass. Slow.
    """

    accelerator: str = argument("auto", kept=False)
    devices: int | Sequence[int] | str = argument("auto", kept=False)
    num_nodes: int | None = argument(None, kept=False)
    strategy: Strategy | str = argument("auto", kept=False)
    sync_batchnorm: bool = argument(False, kept=False)
    activation_checkpointing: Any = argument(None, _checkpointing)
    precision: Precision | int | str | None = argument(None, kept=False)
    seed: int | None = argument(None, kept=False)
    deterministic: bool | str | None = argument(None, _determinism)
    compile: bool | str | Mapping[str, Any] | None = argument(None, kept=False)
    benchmark: bool | None = argument(None, optional(switch), kept=False)
    max_epochs: int | float | None = argument(None, _epochs)
    min_epochs: int | None = argument(None, optional(whole(0)))
    max_steps: int = argument(-1, whole(-1))
    min_steps: int | None = argument(None, optional(whole(0)))
    max_time: str | timedelta | Mapping[str, int] | None = argument(None)
    fast_dev_run: int | bool = argument(False, _trial)
    accumulate_grad_batches: int | Mapping[int, int] | None = argument(None, whole(1))
    global_batch_size: int | None = argument(None, optional(whole(1)))
    auto_micro_batch: bool = argument(False, switch)
    gradient_clip_val: float | None = argument(None, optional(partial(real_number, least=0)))
    gradient_clip_algorithm: str | None = argument(None, _algorithm)
    log_grad_norm: bool = argument(False, switch)
    limit_train_batches: int | float | None = argument(None, _limit)
    limit_val_batches: int | float | None = argument(None, _limit)
    limit_test_batches: int | float | None = argument(None, _limit)
    limit_predict_batches: int | float | None = argument(None, _limit)
    overfit_batches: int | float = argument(0.0, _limit)
    reload_dataloaders_every_n_epochs: int = argument(0, whole(0))
    val_check_interval: int | float | str | timedelta | Mapping[str, float] | None = argument(None, _interval)
    val_every_n_steps: int | None = argument(None, optional(whole(1)))
    check_val_every_n_epoch: int | None = argument(1, optional(whole(1)))
    num_sanity_val_steps: int | None = argument(None, optional(whole(-1)))
    inference_mode: bool = argument(True, switch, kept=False)
    validate_at_end: bool = argument(False, switch)
    logger: Logger | Sequence[Logger | str] | bool | str | None = argument(None, kept=False)
    callbacks: Callback | Sequence[Callback] | None = argument(None, kept=False)
    default_root_dir: str | Path | None = argument(None, _root)
    log_every_n_steps: int | None = argument(None, optional(whole(0)))
    enable_progress_bar: bool | None = argument(True, optional(switch), kept=False)
    enable_model_summary: bool | None = argument(True, optional(switch), kept=False)
    enable_checkpointing: bool | None = argument(True, optional(switch), kept=False)
    restore_best: Callback | str | None = argument(None, _best)
    save_total_limit: int | None = argument(None, optional(whole(1)))
    checksum: str = argument(DEFAULT_CHECKSUM, partial(choice, choices=tuple(CHECKSUMS)))
    omit_from_checkpoint: str | Sequence[str] | None = argument(None, _omitted)
    slurm_requeue: bool = argument(False, switch)
    profiler: Profiler | str | None = argument(None, kept=False)
    detect_anomaly: bool = argument(False, switch, kept=False)

    def __post_init__(self) -> None:
        self._raw = {name: getattr(self, name) for name, one in arguments_of(TrainerArguments).items() if one.kept}
        self.ends_by_default = False  # no argument says when training ends
        self.fractional_epochs: float | None = None  # max_epochs, if it is not whole
        self.accumulation_schedule: Mapping[int, int] | None = None  # if accumulate_grad_batches was one
        self._read_schedule()
        for name, value in check_arguments(TrainerArguments, {name: getattr(self, name) for name in self._raw}).items():
            setattr(self, name, value)
        self._check_contradictions()
        self._unify()
        self._set_defaults()

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TrainerArguments:
        """Those that a run reads, out of the values of all."""
        return cls(**{name: values[name] for name, one in arguments_of(cls).items() if one.kept})

    def with_value(self, name: str, value: Any) -> TrainerArguments:
        """These arguments with another value of one of them; defaults that depend on it follow.

        Raises:
            ConfigurationError: the value is wrong, or contradicts another argument.
        """
        return TrainerArguments(**{**self._raw, name: value})

    def limited_to(self, steps: int) -> TrainerArguments:
        """These arguments for a fit of at most `steps` optimizer steps."""
        limited, most = copy.copy(self), int(self._raw["max_steps"])
        limited.max_steps = steps if most == -1 else min(steps, most)
        return limited

    @property
    def accumulation(self) -> int:
        """`accumulate_grad_batches`, in the first epoch if it was given by epoch."""
        return cast("int", self.accumulate_grad_batches)

    @property
    def of_step(self) -> StepArguments:
        """The same, for a strategy: `accumulate_grad_batches` is a number by now."""
        return cast("StepArguments", self)

    def _read_schedule(self) -> None:
        schedule = self.accumulate_grad_batches
        if isinstance(schedule, Mapping):
            self.accumulation_schedule = schedule
            kind = load_callback("gradient_accumulation_scheduler")
            self.accumulate_grad_batches = kind(schedule).get_accumulate_grad_batches(0)
        elif schedule is None:
            self.accumulate_grad_batches = 1

    def _check_contradictions(self) -> None:
        self._check_validation()
        if self.gradient_clip_val is None and self.gradient_clip_algorithm == "value":
            raise ConfigurationError(
                "gradient_clip_algorithm='value' has no effect without gradient_clip_val. Add it: gradient_clip_val=0.5"
            )
        if self.global_batch_size is not None and self.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size} and accumulate_grad_batches={self.accumulate_grad_batches} both "
                "set the accumulation. Give one of them."
            )
        for low, high in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and -1 < most < least:
                raise ConfigurationError(f"{low}={least} is more than {high}={most}.")
        if self.overfit_batches and self.limit_train_batches != 1.0:
            raise ConfigurationError(
                f"overfit_batches={self.overfit_batches} and limit_train_batches={self.limit_train_batches} both limit the "
                "training batches. Give one of them."
            )

    def _check_validation(self) -> None:
        """Refuse arguments that contradict each other about when to validate."""
        if self.val_every_n_steps is not None and self.val_check_interval not in (None, 1.0):
            raise ConfigurationError(
                f"val_every_n_steps={self.val_every_n_steps} and val_check_interval={self.val_check_interval} both set when to "
                "validate. Give one of them."
            )
        if self.val_every_n_steps is not None and self.check_val_every_n_epoch not in (None, 1):
            raise ConfigurationError(
                f"val_every_n_steps={self.val_every_n_steps} counts optimizer steps across epochs, so "
                f"check_val_every_n_epoch={self.check_val_every_n_epoch} cannot be used with it. Give one of them."
            )
        across_epochs = self.check_val_every_n_epoch is None and self.val_every_n_steps is None
        if across_epochs and not isinstance(self.val_check_interval, int | timedelta):
            raise ConfigurationError(
                "check_val_every_n_epoch=None counts training batches across epochs, which needs an integer, or a time. For "
                "example: val_check_interval=1000"
            )

    def _unify(self) -> None:
        """Replace values by others that mean the same: one batch of each stage by `True`, clipping to 0 by `None`."""
        if self.fast_dev_run in (0, 1):
            self.fast_dev_run = bool(self.fast_dev_run)
        self.gradient_clip_val = self.gradient_clip_val or None
        if isinstance(self.max_epochs, float) and not self.fast_dev_run:
            self.fractional_epochs = self.max_epochs
            self.max_epochs = math.ceil(self.max_epochs)

    def _set_defaults(self) -> None:
        """Set defaults, also those that depend on other arguments."""
        self.default_root_dir = local_path(self.default_root_dir or "trainkit_runs", "default_root_dir")
        if self.max_epochs is None:
            limitless = self.max_steps != -1 or self.max_time is not None
            self.max_epochs = -1 if limitless else max(1000, self.min_epochs or 0)
            self.ends_by_default = not limitless and not self.fast_dev_run
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            self.max_epochs = 1
            self.max_steps = batches
            self.num_sanity_val_steps = 0
            self.val_check_interval = 1.0
            self.val_every_n_steps = None
            self.check_val_every_n_epoch = 1
            self.overfit_batches = 0.0
            self.log_every_n_steps = 0 if self.log_every_n_steps == 0 else 1  # So few steps are all logged.
            for name in ("train", "val", "test", "predict"):
                setattr(self, f"limit_{name}_batches", batches)
        if self.overfit_batches:
            self.limit_train_batches = self.overfit_batches
            if self.limit_val_batches == 1.0:
                self.limit_val_batches = self.overfit_batches
        if self.num_sanity_val_steps is None:
            self.num_sanity_val_steps = 2
        if self.val_check_interval is None:
            self.val_check_interval = 1.0
        if self.log_every_n_steps is None:
            self.log_every_n_steps = 50


Value = TypeVar("Value")


class ArgumentView(Generic[Value]):
    """An argument of the Trainer under its name, with its default filled in; assigning it takes effect in the next run.

    Args:
        fixed: It cannot be assigned, because the Trainer has made a callback from it.
    """

    def __init__(self, fixed: bool = False) -> None:
        self._fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = argument_texts(TrainerArguments)[name]

    @overload
    def __get__(self, trainer: None, owner: type) -> ArgumentView[Value]: ...

    @overload
    def __get__(self, trainer: Trainer, owner: type) -> Value: ...

    def __get__(self, trainer: Trainer | None, owner: type) -> Any:
        return self if trainer is None else getattr(trainer._arguments, self._name)

    def __set__(self, trainer: Trainer, value: Any) -> None:
        if self._fixed:
            raise ConfigurationError(
                f"trainer.{self._name} cannot be assigned: a callback was made from it. Pass it: "
                f"Trainer({self._name}={value!r})"
            )
        assign_argument(trainer, self._name, value)


def assign_argument(trainer: Trainer, name: str, value: Any) -> None:
    """Change an argument of a Trainer, checked together with all others.

    Raises:
        ConfigurationError: A run is in progress, or the value is wrong or contradicts another argument.
    """
    if trainer.stage is not None:
        by_epoch = name == "accumulate_grad_batches"
        raise ConfigurationError(
            f"trainer.{name} cannot change during a run, whose plan is fixed. Assign it before: trainer.{name} = {value!r}"
            + (", or let it change by epoch: callbacks=[GradientAccumulationScheduler({0: 1, 4: 2})]" if by_epoch else "")
        )
    if name == "accumulate_grad_batches" and (isinstance(value, Mapping) or trainer._run.accumulation_schedule is not None):
        raise ConfigurationError(
            "trainer.accumulate_grad_batches cannot be assigned where the number changes by epoch, because a callback sets it. "
            f"Pass it: Trainer(accumulate_grad_batches={value!r})"
        )
    changed = trainer._arguments.with_value(name, value)
    if changed.fast_dev_run and getattr(changed, name) == getattr(trainer._arguments, name) != value:
        raise ConfigurationError(
            f"trainer.{name} = {value!r} has no effect, because fast_dev_run={changed.fast_dev_run!r} sets it to "
            f"{getattr(changed, name)!r}. Remove fast_dev_run."
        )
    trainer.strategy.check_arguments(changed.of_step)
    trainer._run.use_arguments(changed)


def read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all arguments of a Trainer, of which the user has passed these.

    Raises:
        UnsupportedArgumentError, UnknownNameError: an argument that the Trainer does not have.
        ConfigurationError: the value of one that no run reads is wrong; `TrainerArguments` checks the others.
    """
    known = arguments_of(TrainerArguments)
    arguments = without_checkpoint_io(arguments)
    refuse_unknown("Trainer", {name: value for name, value in arguments.items() if name not in known}, known)
    values = {name: arguments.get(name, getattr(TrainerArguments, name)) for name in known}
    check_arguments(TrainerArguments, {name: values[name] for name, one in known.items() if not one.kept})
    return values


_CLAIMS = ("gradient_accumulation_steps", "gradient_clipping")


def with_settings(arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments of a `Trainer`, completed by the settings that this process was started with.

    Args:
        arguments: the arguments; the settings replace those that are `None` or `"auto"`.

    Returns:
        The arguments, and a notice of what the settings have set, to be printed when the processes are connected; empty if
        they have set nothing.

    Raises:
        ConfigurationError: the settings ask for something that is not available here.
    """
    settings = read_process_settings()
    plugin, mixed = settings.plugin(), settings.get("mixed_precision")
    taken = _place(settings, arguments) | _optimizer_step(settings, plugin, arguments)
    created: dict[str, Any] = {}
    masters = False
    if plugin is not None and arguments["strategy"] == "auto" and not _elsewhere(settings, arguments):
        created, chosen = _by_plugin(settings, plugin, {**arguments, **taken})
        taken |= chosen
        masters = created["strategy"].owns_masters
    if arguments["precision"] is None and mixed is not None:
        taken |= _precision(arguments["strategy"], OVER_MASTERS.get(mixed, MIXED[mixed]) if masters else MIXED[mixed])
    notes = [f"{name}={value!r}" for name, value in taken.items()] + _compilation(settings, arguments)
    complete = arguments | {name: taken[name] for name in taken.keys() & arguments.keys()} | created
    if complete["accumulate_grad_batches"] is None:
        complete["accumulate_grad_batches"] = 1
    return complete, f"settings of {settings.source}: {', '.join(notes)}." if notes else ""


def _precision(strategy: Any, precision: str) -> dict[str, Any]:
    """The precision of the settings as an argument; a strategy object without a precision gets it immediately."""
    if isinstance(strategy, str):
        return {"precision": precision}
    if hasattr(strategy, "use_precision"):
        strategy.use_precision(precision, given=False)
    return {}


def _compilation(settings: Settings, arguments: dict[str, Any]) -> list[str]:
    """What the settings compile, in words; `setup.read_compilation` reads them."""
    backend = settings.get("dynamo_backend")
    return [] if backend is None or arguments["compile"] is not None else [f"compiled by {backend!r}"]


def attribute_errors(arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it an error names the settings, if they set what the arguments of a `Trainer` do not.

    Args:
        arguments: the arguments.
    """
    settings = read_process_settings()
    names = settings.of_place if (arguments["strategy"], arguments["accelerator"]) == ("auto", "auto") else ()
    return settings.attribute_errors(*names, *(() if arguments["precision"] is not None else ("mixed_precision",)))


def _place(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the settings say about where to run, in addition to `Settings.plugin`."""
    taken: dict[str, Any] = {}
    accelerator, name = arguments["accelerator"], settings.strategy
    if accelerator == "auto" and settings.get("use_cpu"):
        taken["accelerator"] = "cpu"
    elif accelerator == "auto" and settings.get("distributed_type") == "MULTI_GPU":
        taken["accelerator"] = "gpu"
    if name is not None and arguments["strategy"] == "auto" and not _elsewhere(settings, arguments):
        taken["strategy"] = name
        if settings.devices is not None and arguments["devices"] == "auto":
            taken["devices"] = settings.devices
    return taken


def _elsewhere(settings: Settings, arguments: dict[str, Any]) -> bool:
    """Whether the arguments ask for devices that the strategy of the settings does not run on."""
    accelerator, info = arguments["accelerator"], settings.info
    if info is None:
        return False
    if accelerator == "tpu":
        return DEVICE not in info.devices
    if accelerator not in ("auto", "cpu") and DEVICE in info.devices:
        return True
    return info.one_device and (arguments["devices"] not in ("auto", 1, "1") or arguments["num_nodes"] not in (None, 1))


def _optimizer_step(settings: Settings, plugin: Plugin | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the settings say about an optimizer step, by themselves or in the options of the strategy."""
    of_plugin = {} if plugin is None else {name: plugin.loop_option(name) for name in _CLAIMS}
    claimed = {name: value for name, value in of_plugin.items() if value is not None}
    steps, clip = settings.get(_CLAIMS[0], claimed.get(_CLAIMS[0])), claimed.get(_CLAIMS[1])
    taken: dict[str, Any] = {}
    if steps is not None and arguments["accumulate_grad_batches"] is None and arguments["global_batch_size"] is None:
        taken["accumulate_grad_batches"] = steps
    if clip and arguments["gradient_clip_val"] is None and not _clips(arguments["callbacks"]):
        taken["gradient_clip_val"] = clip
    return taken


def _clips(callbacks: Any) -> bool:
    kind = load_callback("gradient_clipping")
    return any(isinstance(callback, kind) for callback in (callbacks if isinstance(callbacks, list | tuple) else [callbacks]))


def _by_plugin(settings: Settings, plugin: Plugin, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plugin's strategy as an argument, and what else it sets.

    The strategy does not get accumulation, clipping and activation checkpointing, which are arguments of the Trainer.
    """
    short = is_short(arguments["precision"] or OVER_MASTERS[settings.get("mixed_precision") or "no"])
    with settings.attribute_errors(*settings.of_place):
        requested = read_devices(arguments["accelerator"], arguments["devices"], arguments["num_nodes"])
        options = plugin.options_for(short, processes(requested), nodes(requested), _CLAIMS)
        strategy = load_strategy(plugin.strategy)(device=requested.accelerator, **options)
    chosen = plugin.describe()
    if arguments.get("activation_checkpointing") is None and plugin.loop_option("activation_checkpointing"):
        chosen["activation_checkpointing"] = True
    return {"strategy": strategy}, chosen
