"""`TrainingArguments` of transformers → a `TransformersModule`, a `TransformersData` and a `Trainer`.

What each argument becomes is stated in `trainkit/names/hugging_face.json`, from which the documentation and the messages
are made.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments

from trainkit.callback import Callback
from trainkit.callbacks import MemoryMonitor
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.integrations.transformers.hf_callbacks import HuggingFaceCheckpoint, HuggingFaceEvents, best_metric
from trainkit.integrations.transformers.named_optimizers import check_optimizer
from trainkit.integrations.transformers.refusals import Refusals
from trainkit.integrations.transformers.strategy_arguments import strategy_of
from trainkit.integrations.transformers.transformers_data import TransformersData
from trainkit.trainer import Trainer

if TYPE_CHECKING:
    from trainkit.integrations.transformers.transformers_module import TransformersModule

__all__ = ["from_arguments", "make_data", "make_run", "of_transformers", "run_length"]

# TrainingArguments → TransformersModule
_MODULE = {
    **{
        name: name
        for name in ("learning_rate", "weight_decay", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
    },
    **{name: name for name in ("lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "label_names")},
    **{name: name for name in ("neftune_noise_alpha", "include_for_metrics")},
    **{name: name for name in ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config")},
}
# TrainingArguments → TransformersData
_DATA = {
    "per_device_train_batch_size": "train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "dataloader_num_workers": "num_workers",
    "dataloader_persistent_workers": "persistent_workers",
    "dataloader_prefetch_factor": "prefetch_factor",
    "dataloader_multiprocessing_context": "multiprocessing_context",
    "dataloader_drop_last": "drop_last",
    "train_sampling_strategy": "train_sampling_strategy",
    "length_column_name": "length_column_name",
    "remove_unused_columns": "remove_unused_columns",
    "label_names": "label_names",
}
_LOGGERS = ("comet_ml", "mlflow", "tensorboard", "wandb")
_PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "fp8-mixed"}
_NEVER = sys.maxsize  # A validation is never due by itself, but a callback may request one.


class RunLength(NamedTuple):
    """How long a run is, and how often it acts, in optimizer steps.

    Attributes:
        steps: of the whole run; `None` if it is the number of epochs that counts, and the data set has no length.
        logging: between two logs.
        evaluation: between two evaluations.
        saving: between two saves.
    """

    steps: int | None
    logging: int
    evaluation: int | None
    saving: int


def from_arguments(
    kind: type[TransformersModule],
    model: nn.Module,
    args: TrainingArguments,
    callbacks: Sequence[Any] | None,
    optimizers: tuple[Optimizer | None, Any],
    *,
    data: Mapping[str, Any],
    module: Mapping[str, Any],
) -> tuple[TransformersModule, TransformersData, Trainer]:
    """See `TransformersModule.from_arguments`, which calls this with its class, and `make_run`."""
    if not isinstance(args, TrainingArguments):
        raise ConfigurationError(
            f"from_arguments expected TrainingArguments of transformers, got {type(args).__name__}. For example: "
            "from_arguments(model, TrainingArguments(output_dir='out'), train_dataset=train)"
        )
    events = HuggingFaceEvents(args, of_transformers(callbacks), processing_class=module["processing_class"])
    more = [callback for callback in callbacks or () if isinstance(callback, Callback)]
    if any(optimizers):
        kind = with_optimizers(kind, optimizers)
    parts = make_run(kind, model, args, events, more, data=data, module=module)
    events.attach(model)
    return parts


def make_run(
    kind: Callable[..., TransformersModule],
    model: nn.Module,
    args: TrainingArguments,
    events: HuggingFaceEvents,
    callbacks: Sequence[Callback],
    *,
    data: Mapping[str, Any],
    module: Mapping[str, Any],
    pushes: bool = False,
) -> tuple[TransformersModule, TransformersData, Trainer]:
    """The three parts of a run.

    Args:
        kind: makes the module.
        model: the model.
        args: the arguments.
        events: calls the callbacks of transformers.
        callbacks: those of trainkit.
        data: arguments of `TransformersData` that are not in `args`.
        module: the same of `TransformersModule`.
        pushes: the caller uploads the model as the arguments say.

    Raises:
        UnsupportedArgumentError: arguments cannot be mapped; all of them are in the message.
    """
    refusals = Refusals(args)
    if args.push_to_hub:
        refuse_push(args, refusals, pushes)
    length = run_length(args, data["train"])
    of_module = module_arguments(args, refusals) | dict(module)
    of_trainer = trainer_arguments(args, length, refusals, evaluates=data["val"] is not None)
    of_trainer["callbacks"] = [events, *callbacks, *_more_callbacks(args)]
    checkpoints = checkpoint_callback(args, length, events)
    if checkpoints is not None:
        of_trainer["callbacks"].append(checkpoints)
        if args.load_best_model_at_end:
            of_trainer["restore_best"] = checkpoints
    of_trainer["enable_checkpointing"] = checkpoints is not None
    of_trainer["strategy"] = strategy_of(args, refusals)
    of_trainer["logger"] = loggers_of(args, refusals)
    refusals.raise_all()
    prepare_model(model, args)
    if args.prediction_loss_only:
        of_module["compute_metrics"] = None
    trainer = Trainer(**of_trainer)
    return kind(model, **of_module), make_data(args, processing_class=module["processing_class"], **data), trainer


def make_data(args: TrainingArguments, **given: Any) -> TransformersData:
    """The data of a run.

    Args:
        args: the arguments.
        given: arguments of `TransformersData` that are not in `args`.
    """
    values = {ours: getattr(args, name) for name, ours in _DATA.items()}
    return TransformersData(**values, pin_memory=None if args.dataloader_pin_memory else False, **given)


def refuse_push(args: TrainingArguments, refusals: Refusals, pushes: bool) -> None:
    """Refuse an upload that nothing would make."""
    strategy = str(args.hub_strategy.value)
    if not pushes:
        refusals.add(
            "push_to_hub",
            True,
            "from_arguments makes the parts of a run, which upload nothing. Call module.push_to_hub(repo_id) "
            "after the fit; or use Trainer of trainkit.integrations.transformers",
        )
    elif strategy not in ("end", "every_save"):
        refusals.add("hub_strategy", strategy, "checkpoints are not uploaded. Use 'every_save' or 'end'")


# ------------------------------------------------------------------------------------------------------------- the module


def module_arguments(args: TrainingArguments, refusals: Refusals) -> dict[str, Any]:
    """The arguments of `TransformersModule`."""
    values = {ours: getattr(args, name) for name, ours in _MODULE.items() if hasattr(args, name)}
    try:
        check_optimizer(str(getattr(args.optim, "value", args.optim)))
    except TrainkitError as error:
        refusals.add("optim", str(getattr(args.optim, "value", args.optim)), str(error))
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = dict(args.lr_scheduler_kwargs or {})
    if schedule == "greedy":
        refusals.add("lr_scheduler_type", schedule, "it reads the training loss after each step. Use reduce_lr_on_plateau")
    elif schedule == "reduce_lr_on_plateau":
        options = {"monitor": best_metric(args), "mode": "max" if args.greater_is_better else "min", **options}
        if args.eval_strategy == "steps":
            refusals.add("lr_scheduler_type", schedule, "it acts at the end of each epoch. Use eval_strategy='epoch' with it")
    values["lr_scheduler_kwargs"] = options or None
    kwargs = dict(args.activation_checkpointing_kwargs or {})
    if kwargs.pop("offload", False):
        refusals.add(
            "activation_checkpointing_kwargs",
            {"offload": True},
            "activations stay on the device. Remove offload; to save more memory: auto_find_batch_size=True",
        )
    if kwargs.pop("every_n_layers", 1) == 1:  # Otherwise the Trainer does it.
        values |= {
            "gradient_checkpointing": bool(args.activation_checkpointing),
            "gradient_checkpointing_kwargs": kwargs or None,
        }
    if args.train_sampling_strategy == "batch_rebalance":
        refusals.add(
            "train_sampling_strategy",
            "batch_rebalance",
            "it moves rows between processes. Use 'group_by_length', or packing: "
            "TransformersData(packing=True, max_length=1024)",
        )
    return values


def prepare_model(model: Any, args: TrainingArguments) -> None:
    """What the arguments change in the model itself."""
    if getattr(model, "config", None) is not None:
        model.config.use_cache = args.use_cache
    if args.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, args.liger_kernel_config)
    if "underflow_overflow" in args.debug:
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)


def with_optimizers(kind: type[TransformersModule], optimizers: tuple[Optimizer | None, Any]) -> type[TransformersModule]:
    """A class of module that trains with an optimizer or a scheduler of the user."""

    class GivenOptimizers(kind):  # type: ignore[misc, valid-type]  # the base is the user's class
        def configure_optimizers(self) -> Any:
            optimizer, scheduler = optimizers
            if optimizer is None:
                optimizer = super().configure_optimizers()["optimizer"]
            given = self._schedule(optimizer) if scheduler is None else {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": given}

    return GivenOptimizers


# ------------------------------------------------------------------------------------------------------------ the Trainer


def trainer_arguments(args: TrainingArguments, length: RunLength, refusals: Refusals, *, evaluates: bool) -> dict[str, Any]:
    """The arguments of `Trainer`, but for its strategy, loggers and callbacks."""
    if args.eval_strategy != "no" and not evaluates:
        refusals.add("eval_strategy", args.eval_strategy.value, "there is no eval_dataset. Pass it: eval_dataset=...")
    if "tpu_metrics_debug" in args.debug:
        refusals.add("debug", "tpu_metrics_debug", "not supported. Use Trainer(profiler='pytorch')")
    if args.save_strategy == "no" and args.load_best_model_at_end:
        refusals.add("load_best_model_at_end", True, "it needs checkpoints. Set save_strategy='epoch'")
    return {
        "default_root_dir": args.output_dir,
        "accelerator": "cpu" if args.use_cpu else "auto",
        "precision": _PRECISIONS[args.mixed_precision],
        "seed": args.seed,
        "deterministic": args.full_determinism or None,
        "accumulate_grad_batches": args.gradient_accumulation_steps,
        "gradient_clip_val": args.max_grad_norm,
        "log_every_n_steps": length.logging if args.logging_strategy == "steps" else 0,
        "enable_progress_bar": not args.disable_tqdm,
        "save_total_limit": args.save_total_limit if args.save_strategy != "no" else None,
        "auto_micro_batch": args.auto_find_batch_size,
        **_duration(args),
        **(_evaluation(args, length) if evaluates else {}),
        **_computation(args),
    }


def _evaluation(args: TrainingArguments, length: RunLength) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_sanity_val_steps": -1 if args.eval_on_start else 0,
        "validate_at_end": args.eval_strategy != "no",
    }
    if args.eval_strategy != "epoch":
        values["val_every_n_steps"] = length.evaluation if args.eval_strategy == "steps" else _NEVER
    return values


def _computation(args: TrainingArguments) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if args.torch_compile:
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        values["compile"] = {name: value for name, value in options.items() if value is not None}
    every = (args.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
    if args.activation_checkpointing and every != 1:
        values["activation_checkpointing"] = {"every": every}
    return values


def _duration(args: TrainingArguments) -> dict[str, Any]:
    return {"max_steps": args.max_steps} if args.max_steps > 0 else {"max_epochs": args.num_train_epochs}


def run_length(args: TrainingArguments, dataset: Any) -> RunLength:
    """The number of optimizer steps of a run, and of the intervals that may be fractions of it.

    Raises:
        ConfigurationError: it is needed, and the data set has no length.
    """
    intervals = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    steps = args.max_steps if args.max_steps > 0 else None
    has_length = dataset is not None and hasattr(dataset, "__len__")
    if steps is None and has_length:
        steps = math.ceil(args.num_train_epochs * steps_of_epoch(args, len(dataset)))
    if steps is None and dataset is not None:
        raise ConfigurationError(
            f"the training data set, a {type(dataset).__name__}, has no length, so that the schedule needs the number of "
            "optimizer steps: TrainingArguments(max_steps=1000)"
        )

    def whole(name: str) -> int | None:
        value = intervals[name]
        return int(value) if value is None or value >= 1 else max(1, math.ceil(value * (steps or 1)))

    intervals = {name: 0 if value is None else value for name, value in intervals.items()}
    return RunLength(steps, whole("logging_steps") or 1, whole("eval_steps"), whole("save_steps") or 0)


def steps_of_epoch(args: TrainingArguments, rows: int) -> int:
    """Optimizer steps of an epoch, as both Trainers count them."""
    batches: int = rows // args.per_device_train_batch_size
    if not args.dataloader_drop_last:
        batches = math.ceil(rows / args.per_device_train_batch_size)
    windows: int = math.ceil(math.ceil(batches / data_ranks(args)) / args.gradient_accumulation_steps)
    return max(1, windows)


def data_ranks(args: TrainingArguments) -> int:
    """The number of processes that read their own batches."""
    parallel = getattr(args.parallelism_config, "tp_size", None) or 1
    ranks: int = args.world_size // parallel
    return max(1, ranks)


def loggers_of(args: TrainingArguments, refusals: Refusals) -> Any:
    """The loggers of `report_to`; `False` without any."""
    from trainkit.loggers.logger_setup import make_logger

    names = [name for name in args.report_to or [] if name != "none"]
    unknown = [name for name in names if name not in _LOGGERS]
    if unknown:
        refusals.add("report_to", unknown, f"there are loggers for {', '.join(_LOGGERS)}; or write a trainkit.loggers.Logger")
        return False
    options: dict[str, dict[str, Any]] = {
        "comet_ml": {"name": args.run_name},
        "mlflow": {"run_name": args.run_name},
        "tensorboard": {},
        "wandb": {"name": args.run_name, "project": os.environ.get("WANDB_PROJECT", args.project)},
    }
    return [make_logger(name, **{k: v for k, v in options[name].items() if v is not None}) for name in names] or False


# --------------------------------------------------------------------------------------------------------------- callbacks


def checkpoint_callback(args: TrainingArguments, length: RunLength, events: HuggingFaceEvents) -> HuggingFaceCheckpoint | None:
    """What saves checkpoints, in folders as transformers names them; `None` if nothing does."""
    strategy = args.save_strategy
    if strategy == "no" and not args.enable_jit_checkpoint:
        return None
    best = args.load_best_model_at_end or strategy == "best"
    options: dict[str, Any] = {} if args.save_total_limit is not None else {"keep_last": -1}
    if strategy == "best":
        options = {"keep_last": 0}
    if best:
        options |= {"monitor": best_metric(args), "mode": "max" if args.greater_is_better else "min"}
    return HuggingFaceCheckpoint(
        dirpath=args.output_dir,
        filename="checkpoint-{step}",
        auto_insert_metric_name=False,
        enable_version_counter=False,
        save_weights_only=args.save_only_model,
        every_n_train_steps=length.saving if strategy == "steps" else 0,
        every_n_epochs=1 if strategy in ("epoch", "best") else 0,
        events=events,
        **options,
    )


def _more_callbacks(args: TrainingArguments) -> list[Callback]:
    return [] if args.skip_memory_metrics else [MemoryMonitor()]


def of_transformers(callbacks: Sequence[Any] | None) -> list[Any]:
    """Those of transformers among the callbacks, classes too, as its Trainer accepts them.

    Raises:
        ConfigurationError: one is neither of transformers nor of trainkit.
    """
    for callback in callbacks or ():
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback | Callback):
            raise ConfigurationError(
                f"callbacks: expected a transformers.TrainerCallback or a trainkit.Callback, got {callback!r}."
            )
    return [callback for callback in callbacks or () if not isinstance(callback, Callback)]
