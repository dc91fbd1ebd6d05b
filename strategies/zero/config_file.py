"""A DeepSpeed configuration (a JSON file or a dict): the options of `ZeROStrategy` in it, and its comparison with the run.

A value that differs from the `Trainer`'s, the module's or the loaders' is an error that shows both values; `"auto"` takes the
run's value. If the module creates no optimizer or scheduler, the one in the configuration is created.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.checks import is_number
from trainkit.config.keys import is_off
from trainkit.console import notice, with_article
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, nearest
from trainkit.launch.environment import option
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.precision import Precision
from trainkit.strategies.zero.deepspeed_api import load, quiet, require_compiler
from trainkit.strategy import StepArguments

__all__ = ["AUTO", "DeepSpeedConfig", "RunSettings", "deepspeed_config", "options", "read_config"]


AUTO = "auto"

# Key of "zero_optimization" → option of ZeROStrategy.
_ZERO = {
    "stage": "stage",
    "contiguous_gradients": "contiguous_gradients",
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "overlap_comm": "overlap_comm",
    "round_robin_gradients": "round_robin_gradients",
    "sub_group_size": "sub_group_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
    "zero_hpz_partition_size": "hpz_partition_size",
    "zero_quantized_weights": "quantized_weights",
    "zero_quantized_nontrainable_weights": "quantized_nontrainable_weights",
    "zero_quantized_gradients": "quantized_gradients",
}
_OFFLOAD = {  # section → its keys → option of ZeROStrategy
    "offload_optimizer": {"buffer_count": "optimizer_buffer_count"},
    "offload_param": {"buffer_count": "param_buffer_count", "max_in_cpu": "max_params_in_cpu"},
}
_PLACE = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_params"}
_AIO = {
    "block_size": "aio_block_size",
    "queue_depth": "aio_queue_depth",
    "thread_count": "aio_threads",
    "intra_op_parallelism": "aio_threads",
    "single_submit": "aio_single_submit",
    "overlap_events": "aio_overlap_events",
}
_DTYPES = {"fp32": None, "fp16": "16", "float16": "16", "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16"}
# Keys for DeepSpeed's reports, its own checkpoints, its heuristics and the order of its collectives, which change no result.
# trainkit does this in another way or does not need it.
_WITHOUT_EFFECT = {
    "": (
        "checkpoint",
        "checkpoint_engine",
        "datastates_ckpt",
        "disable_python_gc",
        "dump_state",
        "gradient_predivide_factor",  # gradients are averaged whatever they are divided by before
        "log_level",
        "memory_breakdown",
        "nebula",
        "prescale_gradients",
        "steps_per_print",
        "timers",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    "zero_optimization": (
        "elastic_checkpoint",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "override_module_apply",
        "pipeline_loading_checkpoint",
        "stage3_allgather_sequential",
        "stage3_model_persistence_threshold",
        "stage3_use_all_reduce_for_fetch_params",
    ),
    "offload_optimizer": ("fast_init",),
    "offload_param": ("buffer_size",),
    "fp16": ("auto_cast", "consecutive_hysteresis", "hysteresis", "min_loss_scale"),
    # Keys of "fp16" that many files also have here; bfloat16 needs no loss scaling.
    "bf16": (
        *("auto_cast", "hysteresis", "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale"),
        "immediate_grad_update",
    ),
}
# Keys for which trainkit supports only this value.
_ONLY: dict[str, dict[str, Any]] = {
    "": {"sparse_gradients": False},
    "zero_optimization": {
        "allgather_partitions": True,
        "reduce_scatter": True,
        "compute_grad_norm": True,
        "legacy_stage1": False,
        "memory_efficient_linear": True,
        "use_multi_rank_bucket_allreduce": True,
        "stage3_module_granularity_threshold": 0,
    },
    "offload_optimizer": {"pipeline_read": False, "pipeline_write": False, "ratio": 1.0, "super_offload": False},
    "aio": {"use_gds": False},
    "optimizer": {"legacy_fusion": False},
}
_SECTIONS = ("zero_optimization", "fp16", "bf16", "torch_autocast", "aio", "optimizer", "scheduler", "activation_checkpointing")
_RUN_SETTINGS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_OLD = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "cpu_offload_params": '"offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": '"pin_memory": true in "offload_optimizer" and "offload_param"',
    "stage3_gather_fp16_weights_on_model_save": '"stage3_gather_16bit_weights_on_model_save"',
}
_LOG_WITH = "use Trainer(logger={0!r}), or Accelerator(log_with={0!r})"
# Unsupported keys → what to use instead.
_INSTEAD = {
    "amp": 'use "torch_autocast": {"enabled": true, "dtype": "float16"}, or precision=\'16-mixed\'',
    "autotuning": "use callbacks=[BatchSizeFinder()]",
    "comms_logger": "use Trainer(profiler='pytorch')",
    "compile": "use Trainer(compile=True), or Accelerator(dynamo_backend='inductor')",
    **{section: _LOG_WITH.format(name) for section, name in {
        "comet": "comet", "csv_monitor": "csv", "tensorboard": "tensorboard", "wandb": "wandb"
    }.items()},
    "dataloader_drop_last": "pass drop_last=True to the DataLoader",
    "gradient_checkpointing": 'write "activation_checkpointing": {"partition_activations": true}',
    "learning_rate": 'write it in the optimizer: "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}',
    "lr": 'write it in the optimizer: "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}',
    "max_grad_norm": 'write "gradient_clipping": 1.0',
    "cuda_visible_devices": "set the variable CUDA_VISIBLE_DEVICES in the environment",
    "flops_profiler": "use callbacks=[ThroughputMonitor()]",
    "tensor_parallel": "use FSDPStrategy(tensor_parallel=2) instead of ZeRO: DeepSpeed's AutoTP replaces layers, so that a "
    "checkpoint would not have the user's parameters",
}  # fmt: skip
# Keys of DeepSpeed for features that trainkit does not have → what they are.
_MISSING = {
    "": {
        "comm_type": "collectives of a library of its own",
        "compression_training": "quantization and pruning during training",
        "curriculum_learning": "a sequence length that grows during training",
        "data_efficiency": "curriculum sampling and random dropping of tokens",
        "data_types": "gradients that are accumulated in another dtype than the parameters",
        "eigenvalue": "eigenvalues of layers, for quantization during training",
        "elasticity": "a batch size that follows the number of GPUs",
        "gradient_allreduce_op": "another reduction of gradients than the mean",
        "graph_harvesting": "CUDA graphs",
        "hybrid_engine": "an engine that trains and generates text in turn",
        "moe": "expert parallelism",
        "pipeline": "pipeline parallelism",
        "pipeline_parallel_size": "pipeline parallelism",
        "progressive_layer_drop": "random dropping of layers",
        "quantize_training": "quantization during training",
        "seq_parallel_communication_data_type": "sequence parallelism",
        "sequence_parallel_size": "sequence parallelism",
        "sparse_attention": "block-sparse attention",
        "sparse_gradients": "sparse gradients of embeddings",
        "use_data_before_expert_parallelism": "expert parallelism",
        "weight_quantization": "quantization during training",
    },
    "zero_optimization": {
        "leaf_module": "modules whose parameters are gathered as one",
        "mics_hierarchical_params_gather": "MiCS, sharding within a group of GPUs",
        "mics_shard_size": "MiCS, sharding within a group of GPUs",
        "zenflow": "ZenFlow, which applies a part of each gradient in a later step: no step has the mean over its batch",
        "zeropp_loco_param": "LoCo, quantized gradients with error feedback",
    },
    "offload_optimizer": {
        "pipeline_read": "reading from NVMe that overlaps with the optimizer step",
        "pipeline_write": "writing to NVMe that overlaps with the optimizer step",
        "ratio": "an optimizer state of which only a part is offloaded",
        "super_offload": "SuperOffload, whose optimizer state lies in a process of its own, where no checkpoint reaches it",
    },
    "fp16": {"fp16_master_weights_and_grads": "optimizer states and gradients in float16"},
    "bf16": {
        "bf16_master_weights_and_grads": "optimizer states and gradients in bfloat16",
        "bf16_optimizer_states": "optimizer states in bfloat16",
        "check_grad_overflow": "skipping of steps with overflow in bfloat16",
    },
    "torch_autocast": {"lower_precision_safe_modules": "a choice of the modules whose gradients are reduced in bfloat16"},
    "aio": {"use_gds": "GPUDirect Storage"},
}
_OPTIMIZERS = {kind.lower(): kind for kind in dir(torch.optim) if isinstance(getattr(torch.optim, kind), type)}


@dataclass
class DeepSpeedConfig:
    """The contents of a DeepSpeed configuration.

    Attributes:
        source: Name of the configuration in messages.
        options: Options of `ZeROConfig`.
        run_settings: Batch sizes, accumulation steps and clipping norm, where they are numbers.
        precision: The enabled precision; `None`: the `Trainer`'s.
        optimizer: The section `optimizer`.
        scheduler: The section `scheduler`.
        without_effect: Keys that have no effect.
    """

    source: str
    options: dict[str, Any] = field(default_factory=dict)
    run_settings: dict[str, float] = field(default_factory=dict)
    precision: Precision | None = None
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    without_effect: list[str] = field(default_factory=list)


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration.

    Args:
        config: The path of a JSON file, which may contain comments, or a mapping with the same keys.

    Raises:
        ConfigurationError: It cannot be read, or has an unsupported key or value; the message names the key.
    """
    source, content = _content(config)
    read = DeepSpeedConfig(source)
    _Reader(read).read(content)
    return read


def _content(config: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(config, Mapping):
        return "config", config
    if not isinstance(config, str | os.PathLike):
        raise ConfigurationError(f"config must be the path of a DeepSpeed JSON file or a dict, not {config!r}.")
    source = str(os.fspath(config))
    hjson: Any = importlib.import_module("hjson")  # DeepSpeed reads its files with hjson, too
    try:
        content = hjson.loads(Path(source).read_text("utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ConfigurationError(f"config={source!r} cannot be read: {error.strerror}. Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"config={source!r} is not valid JSON: {error}. Correct the file.") from error
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            f"config={source!r} contains {with_article(type(content).__name__)}; a DeepSpeed configuration is an object: "
            '{"zero_optimization": {"stage": 2}}'
        )
    return source, content


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ValueError(f"the key {key!r} occurs twice")
        keys[key] = value
    return keys


class _Reader:
    """Reads a configuration section by section."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        self._config = config

    def read(self, content: Mapping[str, Any]) -> None:
        known = [*_SECTIONS, *_RUN_SETTINGS, "communication_data_type"]
        if self._section(content, "tensor_parallel").get("autotp_size") in (0, 1):  # DeepSpeed's way to turn it off
            content = {key: value for key, value in content.items() if key != "tensor_parallel"}
            self._config.without_effect.append("tensor_parallel")
        self._refuse_unknown("", content, known)
        for key in _RUN_SETTINGS:
            if content.get(key, AUTO) not in (AUTO, None):
                self._config.run_settings[key] = self._number(key, content[key])
        self._read_zero(self._section(content, "zero_optimization"))
        self._read_precision(content)
        self._store("aio", self._section(content, "aio"), _AIO)
        if content.get("communication_data_type", AUTO) not in (AUTO, None):
            self._config.options["communication_dtype"] = content["communication_data_type"]
        if checkpointing := self._section(content, "activation_checkpointing"):
            self._config.options["activation_checkpointing"] = dict(checkpointing)
        for name in ("optimizer", "scheduler"):
            if section := self._section(content, name):
                setattr(self._config, name, self._read_type(name, section))

    def _read_zero(self, zero: Mapping[str, Any]) -> None:
        for key, new in _OLD.items():
            if key in zero:
                raise self._error(f"'zero_optimization': {key!r} is from an old version of DeepSpeed. Write {new}")
        stage = zero.get("stage")
        self._check_stage(stage)
        self._store("zero_optimization", {k: v for k, v in zero.items() if k not in _OFFLOAD}, _ZERO)
        sections = {name: self._section(zero, name) for name in _OFFLOAD}
        used = {name: section for name, section in sections.items() if not is_off(section.get("device"))}
        if "offload_param" in used and stage in (1, 2):  # DeepSpeed ignores it; the files of `accelerate config` contain it
            del used["offload_param"]
            self._config.without_effect.append("offload_param")
        for name, section in used.items():
            self._read_offload(name, section)
        pinned = {section.get("pin_memory", True) for section in used.values()}
        if len(pinned) > 1:
            raise self._error("'pin_memory' differs between 'offload_optimizer' and 'offload_param'. Use one value")
        if pinned:
            self._config.options["pin_memory"] = pinned.pop()

    def _check_stage(self, stage: Any) -> None:
        """Refuse a configuration that shards nothing; `ZeROConfig` refuses all other stages."""
        if not is_off(stage) and stage not in (0, AUTO):
            return
        what = '"zero_optimization" has no "stage"' if stage is None else f'"stage": {stage}'
        raise self._error(
            f"{what}: DeepSpeed then shards nothing, which is DDP. Use strategy='ddp' without this configuration; or, to "
            'shard, write "zero_optimization": {"stage": 1, 2 or 3}'
        )

    def _read_offload(self, name: str, section: Mapping[str, Any]) -> None:
        """Read an offload section: its device, and the options that apply to NVMe only."""
        options, keys, device = self._config.options, _OFFLOAD[name], section["device"]
        options[_PLACE[name]] = device
        path = section.get("nvme_path")
        if device == "nvme" and path is not None and options.setdefault("nvme_path", path) != path:
            raise self._error(f"'nvme_path' is both {options['nvme_path']!r} and {path!r}. Use one folder")
        rest = {key: value for key, value in section.items() if key not in ("device", "nvme_path", "pin_memory")}
        self._store(name, rest, keys if device == "nvme" else {}, unused=keys)

    def _read_precision(self, content: Mapping[str, Any]) -> None:
        """Read which precision is enabled; with "auto" and `false` the `Trainer`'s precision is used."""
        enabled: dict[str, Precision] = {}
        fp16, bf16 = self._section(content, "fp16"), self._section(content, "bf16")
        autocast = self._section(content, "torch_autocast")
        scale = ("initial_scale_power", "loss_scale_window")
        self._refuse_unknown("fp16", fp16, ["enabled", "loss_scale", *scale])
        self._refuse_unknown("bf16", bf16, ["enabled"])
        self._refuse_unknown("torch_autocast", autocast, ["enabled", "dtype"])
        if fp16.get("loss_scale", 0) not in (0, AUTO) and not is_off(fp16.get("enabled")):
            raise self._error(f"'fp16': 'loss_scale' is {fp16['loss_scale']!r}, but loss scaling is always dynamic. Remove it")
        scaled: dict[str, Any] = {}
        if fp16.get("initial_scale_power", AUTO) != AUTO:
            scaled["init_scale"] = 2.0 ** self._number("initial_scale_power", fp16["initial_scale_power"])
        if fp16.get("loss_scale_window", AUTO) != AUTO:
            scaled["growth_interval"] = int(self._number("loss_scale_window", fp16["loss_scale_window"]))
        if self._is_enabled("fp16", fp16):
            enabled["fp16"] = Precision("16-true", **scaled)
        if self._is_enabled("bf16", bf16):
            enabled["bf16"] = Precision("bf16-true")
        if self._is_enabled("torch_autocast", autocast):
            dtype = _DTYPES.get(autocast.get("dtype", "bf16"))
            if dtype is None:
                raise self._error(f"'torch_autocast': 'dtype' must be 'bfloat16' or 'float16', not {autocast['dtype']!r}")
            enabled["torch_autocast"] = Precision(f"{dtype}-mixed", **(scaled if dtype == "16" else {}))
        if len(enabled) > 1:
            raise self._error(f"{' and '.join(map(repr, enabled))} are both enabled. Enable only one")
        self._config.precision = next(iter(enabled.values()), None)
        if self._config.precision is None or not self._config.precision.name.startswith("16"):  # another loss scale applies
            self._config.without_effect += [f"fp16.{key}" for key in scale if fp16.get(key, AUTO) != AUTO]

    def _store(self, name: str, section: Mapping[str, Any], keys: Mapping[str, str], unused: Iterable[str] = ()) -> None:
        """Store the values of `keys` as options; `_unknown_entries` checks all other keys."""
        self._refuse_unknown(name, section, [*keys, *unused])
        for key, value in section.items():
            if key in keys and value != AUTO:
                self._config.options[keys[key]] = value
            elif key in unused:
                self._config.without_effect.append(f"{name}.{key}")

    def _is_enabled(self, name: str, section: Mapping[str, Any]) -> bool:
        value = section.get("enabled", False)
        if not isinstance(value, bool) and value != AUTO and not is_off(value):
            raise self._error(f"{name!r}: 'enabled' must be true, false or 'auto', not {value!r}")
        return value is True

    def _refuse_unknown(self, name: str, section: Mapping[str, Any], known: Sequence[str]) -> None:
        """Refuse entries that are neither known, nor without effect, nor off, nor set to the only supported value."""
        where = f"{name}." if name else ""
        off = "enabled" in section and is_off(section["enabled"])
        for key, value in section.items():
            if key in _WITHOUT_EFFECT.get(name, ()):
                self._config.without_effect.append(f"{where}{key}")
            elif key in _ONLY.get(name, {}):
                only = _ONLY[name][key]
                if value not in (only, AUTO):
                    allowed = f"'{where}{key}' is {value!r}, but only {only!r} is supported"
                    raise self._error(f"{allowed}{self._missing(name, key)}. Remove it")
            elif key not in known and (off or is_off(value)):
                self._config.without_effect.append(f"{where}{key}")
            elif key not in known:
                raise self._error(f"{f'{name!r}: ' if name else ''}{self._unknown(name, key, known)}")

    def _unknown(self, name: str, key: str, known: Sequence[str]) -> str:
        """What to do about an entry that has no counterpart."""
        if missing := self._missing(name, key):
            return f"{key!r} is not supported{missing}. Remove it"
        if not name and key in _INSTEAD:
            return f"{key!r} is not supported. Remove it, and {_INSTEAD[key]}"
        return f"{key!r} is not a key that trainkit reads.{nearest(key, known)} Correct its name, or remove it"

    @staticmethod
    def _missing(name: str, key: str) -> str:
        feature = _MISSING.get(name, {}).get(key)
        return f": trainkit does not implement {feature}" if feature else ""

    def _read_type(self, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the type and the parameters of the section `optimizer` or `scheduler`."""
        self._refuse_unknown(name, section, ["type", "params"])
        if not isinstance(section.get("type"), str):
            raise self._error(f"{name!r} needs a 'type'. Add one, such as {'AdamW' if name == 'optimizer' else 'WarmupLR'!r}")
        params = dict(self._section(section, "params"))
        if name == "scheduler":
            return {"type": section["type"], "params": params}
        norm = params.pop("max_grad_norm", None)
        if not is_off(norm):
            raise self._error(
                f"'optimizer' has \"max_grad_norm\": {norm!r}, which is no option of an optimizer. Write it at the top of the "
                f'configuration: "gradient_clipping": {norm!r}'
            )
        # DeepSpeed reads the names of its own optimizers in any case.
        return {"type": _OPTIMIZERS.get(section["type"].lower(), section["type"]), "params": params}

    def _section(self, content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = content.get(name)
        if not isinstance(value, Mapping):
            if is_off(value):
                return {}
            raise self._error(f'{name!r} must be an object, "{name}": {{...}}, not {value!r}')
        return value

    def _number(self, key: str, value: Any) -> float:
        if not is_number(value):
            raise self._error(f"{key!r} must be a number or 'auto', not {value!r}")
        return value

    def _error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._config.source}: {problem}.")


def deepspeed_config(argv: Sequence[str]) -> str | None:
    """Returns the file in `--deepspeed_config FILE` or `--deepspeed_config=FILE` on a command line.

    `deepspeed.add_config_arguments` adds that option to a script's parser.

    Args:
        argv: The arguments of the script, such as `sys.argv[1:]`.

    Returns:
        The unchanged path, or `None` without the option. If the option occurs several times, the last one counts, as in
        argparse.
    """
    path = option(argv, "deepspeed_config")
    if path == "":
        raise ConfigurationError("--deepspeed_config has no value. Pass the path of a file: --deepspeed_config ds_config.json")
    return path


def options(argv: Sequence[str]) -> dict[str, Any] | None:
    """Returns the arguments of `ZeROStrategy` for a command line; `None` without `--deepspeed_config`."""
    path = deepspeed_config(argv)
    return None if path is None else {"config": path}


# ---------------------------------------------------------------------------------------------- comparison with the run


# Options with which DeepSpeed selects a class of Adam, or how it stores its state.
_OF_DEEPSPEED = ("adam_w_mode", "bias_correction", "fp32_optimizer_states", "torch_adam")
_WARMUP = 0.1  # The default length of a warm-up, as a fraction of the run's optimizer steps.
_ADAMS = ("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam")


class RunSettings:
    """The settings of a run that a DeepSpeed configuration also sets.

    Args:
        config: The configuration; `None`: there is none.
        offloaded: Whether the optimizer is offloaded.
    """

    def __init__(self, config: DeepSpeedConfig | None, offloaded: bool) -> None:
        self._config = config or DeepSpeedConfig("config")
        self._values = self._config.run_settings
        self._source = self._config.source
        self._offloaded = offloaded
        self._has_trainer = self._takes_precedence = self._clipping_noticed = self._has_scheduler = False

    @property
    def has_optimizer(self) -> bool:
        """Whether the configuration has an `optimizer` section."""
        return self._config.optimizer is not None

    @property
    def clip(self) -> float | None:
        """Maximum gradient norm in the user's own training loop if it does not clip; `None`: no clipping."""
        return self._values.get("gradient_clipping") or None

    def check_arguments(self, arguments: StepArguments) -> None:
        """Compare the configuration with the arguments of the `Trainer`.

        Raises:
            ConfigurationError: They differ; the message shows both values.
        """
        self._has_trainer = True
        theirs = {
            "gradient_clipping": ("gradient_clip_val", arguments.gradient_clip_val or 0.0),
            "gradient_accumulation_steps": ("accumulate_grad_batches", arguments.accumulate_grad_batches),
            "train_batch_size": ("global_batch_size", arguments.global_batch_size),
        }
        if arguments.global_batch_size is not None:  # it determines the accumulation
            del theirs["gradient_accumulation_steps"]
        for key, (name, value) in theirs.items():
            if value is not None:
                self._compare(key, value, f"Trainer({name}={value!r})", f"Trainer({name}={self._values.get(key)!r})")

    def check_batches(self, micro_batch: int | None, window: int, world: World) -> None:
        """Compare the configuration with the training loader.

        Args:
            micro_batch: Number of samples in a micro-batch; `None`: the loader has no `batch_size`.
            window: Number of micro-batches per process in an optimizer step.

        Raises:
            ConfigurationError: They differ; the message shows both values.
        """
        actual = f"{window} micro-batches per optimizer step"
        self._compare("gradient_accumulation_steps", window, actual, "the same number")
        if micro_batch is None:
            sizes = [key for key in ("train_micro_batch_size_per_gpu", "train_batch_size") if key in self._values]
            if sizes:
                notice(f"{' and '.join(sizes)} of {self._source} cannot be checked: the loader has no batch_size.")
            return
        loader = f"the loader's batch_size={micro_batch}"
        self._compare("train_micro_batch_size_per_gpu", micro_batch, loader, "the same batch_size")
        product = micro_batch * window * world.size
        actual = f"batch_size × micro-batches × processes = {micro_batch} × {window} × {world.size} = {product}"
        self._compare("train_batch_size", product, actual, "sizes with that product")

    def take_precedence(self, source: str) -> None:
        """Let `gradient_clipping` override the norm in the user's own training loop, as Accelerate does.

        Args:
            source: Name of the configuration in messages.
        """
        self._source = source
        self._takes_precedence = True

    def clipping(self, max_norm: float) -> float | None:
        """Returns the maximum gradient norm for a training loop that clips by `max_norm`; `None`: no clipping.

        Raises:
            ConfigurationError: The configuration has another norm, and does not `take_precedence`.
        """
        actual = f"clip_grad_norm_(..., {max_norm!r})"
        if not self._takes_precedence or self._values.get("gradient_clipping", max_norm) == max_norm:
            if self.clip is not None:
                self._compare("gradient_clipping", max_norm, actual, "the same norm")
            return max_norm if max_norm != math.inf else None
        if not self._clipping_noticed:
            self._clipping_noticed = True
            effect = "are not clipped" if self.clip is None else f"are clipped by {self.clip!r} in each optimizer step"
            notice(
                f"{self._source} sets gradient_clipping: {self._values['gradient_clipping']!r}, but the training loop calls "
                f"{actual}: gradients {effect}. Use the same number in both, or set gradient_clipping: auto, which uses the "
                "loop's."
            )
        return self.clip

    def _compare(self, key: str, value: float, actual: str, fix: str) -> None:
        configured = self._values.get(key, value)
        if configured != value:
            raise ConfigurationError(
                f'{self._source} sets {key!r}: {configured!r}, but the run has {actual}. Use {fix}, or set it to "auto" in the '
                "configuration."
            )

    # ------------------------------------------------------------------------------------------ optimizer and scheduler

    def configure_optimizers(self, module: Any, device: torch.device) -> Any:
        """Returns the module's optimizers, or the configuration's if the module has none, with the configuration's scheduler.

        Args:
            device: The device of the run.
        """
        in_module = is_overridden(module, "configure_optimizers", TrainModule)
        returned = module.configure_optimizers() if in_module or not self.has_optimizer else self._optimizer_of(module, device)
        if self._config.scheduler is None and (not in_module or self._config.optimizer is None):
            return returned
        optimizers, schedulers = read_optimizers(returned, module, module.automatic_optimization)
        if len(optimizers) != 1:
            raise ConfigurationError(
                f"{self._source} has a section 'optimizer' or 'scheduler', which is for one optimizer, but "
                f"configure_optimizers returned {len(optimizers)}. Remove these sections."
            )
        self.check_optimizer(optimizers[0])
        if self._config.scheduler is None:
            return returned
        if schedulers:
            raise ConfigurationError(
                f"{self._source} has the 'scheduler' {self._config.scheduler['type']!r}, but configure_optimizers also "
                f"returned a {type(schedulers[0].scheduler).__name__}. Remove one of them."
            )
        scheduler = self._make_scheduler(optimizers[0], lambda key: self._run_value(key, optimizers[0], module))
        return {"optimizer": optimizers[0], "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def create_optimizer(self, parameters: Sequence[Any], values: Mapping[str, Any], device: torch.device) -> Optimizer:
        """See `trainkit.Strategy.create_optimizer`.

        Raises:
            ConfigurationError: The configuration has no section `optimizer`, or one that is wrong.
        """
        section = self._config.optimizer
        if section is None:
            raise ConfigurationError(
                f"DummyOptim stands for the optimizer of the configuration, but {self._source} has no section 'optimizer'. Add "
                'one, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}; or create the optimizer: '
                "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        set_here = {name: value for name, value in section["params"].items() if value != AUTO}
        return self._make_optimizer(parameters, {**values, **set_here}, device)

    def create_scheduler(self, optimizer: Optimizer, values: Mapping[str, Any], make: Callable[[Optimizer], Any] | None) -> Any:
        """See `trainkit.Strategy.create_scheduler`.

        Raises:
            ConfigurationError: The configuration has no section `scheduler` and there is no `make`, or both are there.
        """
        section = self._config.scheduler
        if (section is None) == (make is None):
            here = "no section" if section is None else "a section"
            also = "without" if make is None else "also has an"
            raise ConfigurationError(
                f"{self._source} has {here} 'scheduler', and the DummyScheduler {also} lr_scheduler_callable. Define the "
                'scheduler once: "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}} in the '
                "configuration, or DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: LinearLR(optimizer))"
            )
        self._has_scheduler = True
        if section is None:
            assert make is not None
            return make(optimizer)
        made = self._make_scheduler(optimizer, lambda key: self._given_value(key, values, optimizer))
        taken = [f"{name}={value}" for name, value in values.items() if section["params"].get(name) == AUTO]
        notice(f"created the scheduler of {self._source}: {', '.join([type(made).__name__, *taken])}.")
        return made

    def check_loop(self) -> None:
        """Check that your own training loop has prepared the scheduler of the configuration.

        Raises:
            ConfigurationError: It has not.
        """
        if self._config.scheduler is not None and not self._has_scheduler:
            raise ConfigurationError(
                f"{self._source} has the 'scheduler' {self._config.scheduler['type']!r}, but your own training loop has not "
                "prepared it. Write: from trainkit.utils import DummyScheduler; model, optimizer, loader, scheduler = "
                "accelerator.prepare(model, optimizer, loader, DummyScheduler(optimizer)); or remove the section."
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Compare the configuration with the user's optimizer."""
        section, kind = self._config.optimizer, type(optimizer).__name__
        if section is None:
            return
        names = _ADAMS if section["type"] in _ADAMS else (section["type"],)
        if kind not in names:
            raise ConfigurationError(
                f"{self._source} has the 'optimizer' {section['type']!r}, but the run has {kind}. Use the same in both, or "
                "remove the section."
            )
        switches = self._check_adam(section, optimizer) if section["type"] in _ADAMS else ()
        for name, value in section["params"].items():
            if name in switches:
                continue
            if name not in optimizer.defaults:
                raise ConfigurationError(
                    f"{self._source} has {name!r} for the optimizer, but {kind} has no such argument. Remove it."
                )
            here = optimizer.defaults[name]
            same = tuple(here) == tuple(value) if isinstance(value, list | tuple) else here == value
            if value != AUTO and not same:
                raise self._differs(f"{name!r}: {value!r}", optimizer, here)

    def _check_adam(self, section: dict[str, Any], optimizer: Optimizer) -> tuple[str, ...]:
        """Compare the options of Adam that are not in the defaults of both PyTorch's and DeepSpeed's Adam.

        Returns:
            The names of these options.
        """
        params, defaults = section["params"], optimizer.defaults
        correction = params.get("bias_correction", True)
        if correction not in (AUTO, defaults.get("bias_correction", True)):
            raise self._differs(f"'bias_correction': {correction!r}", optimizer, not correction)
        decoupled = True if section["type"] == "AdamW" else params.get("adam_w_mode", True)
        here = bool(defaults.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False)))
        # Without weight decay, Adam and AdamW are the same.
        decays = any(group["weight_decay"] for group in optimizer.param_groups)
        if decays and decoupled not in (AUTO, here):
            how = "" if "adam_w_mode" in params else " (DeepSpeed's default)"
            raise self._differs(f"{section['type']!r} with 'adam_w_mode': {decoupled!r}{how}", optimizer, here)
        return _OF_DEEPSPEED

    def _differs(self, setting: str, optimizer: Optimizer, here: Any) -> ConfigurationError:
        return ConfigurationError(
            f"{self._source} has {setting} for the optimizer, but the run's {type(optimizer).__name__} has {here!r}. Use the "
            'same value in both, or set it to "auto" in the configuration.'
        )

    def _optimizer_of(self, module: nn.Module, device: torch.device) -> Optimizer:
        """The optimizer of the configuration for a module that creates none."""
        assert self._config.optimizer is not None
        params = {name: value for name, value in self._config.optimizer["params"].items() if value != AUTO}
        if "lr" not in params:
            raise ConfigurationError(
                f"{self._source}: the optimizer's 'lr' is missing or \"auto\", but the module has no configure_optimizers to "
                "take it from. Set 'lr' to a number, or define configure_optimizers."
            )
        return self._make_optimizer([one for one in module.parameters() if one.requires_grad], params, device)

    def _make_optimizer(self, trained: Sequence[Any], params: dict[str, Any], device: torch.device) -> Optimizer:
        section = self._config.optimizer
        assert section is not None
        kind, more = self._optimizer_class(section["type"], params, device)
        made = self._construct(kind, section["type"], trained, **more, **params)
        notice(f"created the optimizer of {self._source}: {type(made).__name__}, lr={params['lr']}.")
        return made  # type: ignore[no-any-return]

    def _optimizer_class(
        self, name: str, params: dict[str, Any], device: torch.device
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Returns the class that DeepSpeed would use, and its options; removes DeepSpeed's own options from `params`."""
        if name in ("Adam", "AdamW"):
            return self._adam_class(name, params, device)
        if name == "Muon":  # DeepSpeed's is another algorithm: it orthogonalizes gradients before they are clipped.
            raise ConfigurationError(
                f"{self._source}: DeepSpeed's optimizer 'Muon', which is Muon for matrices and Adam for the rest, is not "
                "supported in a configuration. Remove the section, and return both from configure_optimizers: "
                "[torch.optim.Muon(matrices), torch.optim.AdamW(rest)]"
            )
        kind = getattr(torch.optim, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            known = [n for n in dir(torch.optim) if n[0].isupper()]
            raise ConfigurationError(
                f"{self._source}: there is no optimizer {name!r}.{nearest(name, known)} Use a class of torch.optim, or remove "
                "the section and create the optimizer in configure_optimizers."
            )
        return kind, {}

    def _adam_class(self, name: str, params: dict[str, Any], device: torch.device) -> tuple[Callable[..., Any], dict[str, Any]]:
        plain = params.pop("torch_adam", False)
        decoupled = params.pop("adam_w_mode", True) or name == "AdamW"
        of_states = params.pop("fp32_optimizer_states", True)
        if plain or not (self._offloaded or device.type == "cuda"):
            if params.pop("bias_correction", True) is not True:
                raise ConfigurationError(f"{self._source}: PyTorch's Adam has no 'bias_correction': false. Remove it.")
            # On a CPU PyTorch's class replaces FusedAdam, whose other defaults are the same.
            more = {} if plain or "weight_decay" in params else {"weight_decay": 0.0}
            return (torch.optim.AdamW if decoupled else torch.optim.Adam), more
        require_compiler(f"DeepSpeed's optimizer {name}", 'add "torch_adam": true to its params')
        with quiet():
            adams: Any = importlib.import_module("deepspeed.ops.adam")
        if self._offloaded:
            load("CPUAdamBuilder", "cpu_adam")
            return adams.DeepSpeedCPUAdam, {"adamw_mode": decoupled, "fp32_optimizer_states": of_states}
        load("FusedAdamBuilder", "fused_adam")
        return adams.FusedAdam, {"adam_w_mode": decoupled}

    def _make_scheduler(self, optimizer: Optimizer, value_of: Callable[[str], Any]) -> Any:
        """The scheduler of the configuration; `value_of` returns the value of an option that is "auto"."""
        section = self._config.scheduler
        assert section is not None
        with quiet():
            modules: Any = [importlib.import_module("deepspeed.runtime.lr_schedules"), torch.optim.lr_scheduler]
        name = section["type"]
        kinds = {n: kind for source in reversed(modules) for n, kind in vars(source).items() if isinstance(kind, type)}
        if name not in kinds:
            raise ConfigurationError(
                f"{self._source}: there is no scheduler {name!r}.{nearest(name, kinds)} Use a class of "
                "torch.optim.lr_scheduler or deepspeed.runtime.lr_schedules."
            )
        params = {key: value_of(key) if value == AUTO else value for key, value in section["params"].items()}
        return self._construct(kinds[name], name, optimizer, **params)

    def _given_value(self, key: str, values: Mapping[str, Any], optimizer: Optimizer) -> Any:
        """Returns the value of a `DummyScheduler` for an "auto" option of the scheduler."""
        known = {"warmup_min_lr": 0.0, "warmup_max_lr": optimizer.param_groups[0]["lr"], **values}
        if key not in known:
            raise ConfigurationError(
                f'{self._source}: the scheduler\'s {key!r} is "auto", but the DummyScheduler has no such value. Set it to a '
                f"number{', or pass it: DummyScheduler(optimizer, total_num_steps=1000)' if key == 'total_num_steps' else ''}."
            )
        return known[key]

    def _run_value(self, key: str, optimizer: Optimizer, module: Any) -> Any:
        """Returns the run's value for an "auto" option of the scheduler."""
        if key == "warmup_max_lr":
            return optimizer.param_groups[0]["lr"]
        if key == "warmup_min_lr":
            return 0.0
        steps = module.trainer.estimated_stepping_batches
        if key == "total_num_steps" and not math.isinf(steps):
            return steps
        if key == "warmup_num_steps" and not math.isinf(steps):
            warmup = max(1, math.ceil(_WARMUP * steps))
            notice(
                f'{self._source}: the scheduler\'s "warmup_num_steps" is "auto": {warmup}, which is {_WARMUP:.0%} of the '
                f"{steps} optimizer steps of the run. For another number, write it there."
            )
            return warmup
        if key in ("total_num_steps", "warmup_num_steps"):
            why, fix = "the length of the run is unknown", "Set it to a number, or use Trainer(max_steps=...)"
        else:
            why, fix = "the run has no such value", "Set it to a number"
        raise ConfigurationError(f'{self._source}: the scheduler\'s {key!r} is "auto", but {why}. {fix}.')

    def _construct(self, kind: Callable[..., Any], name: str, *args: Any, **params: Any) -> Any:
        try:
            return kind(*args, **params)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._source}: {name} does not accept its 'params'. Fix them: {error}.") from error
