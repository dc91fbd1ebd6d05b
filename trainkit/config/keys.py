"""The keys of a configuration file, which are Accelerate's, and how their values are read.

With the keys, values and flags of Accelerate that are not supported: which are allowed, and what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import ConfigurationError, UnsupportedArgumentError, nearest
from trainkit.registry import strategy_infos

__all__ = [
    "ANY",
    "BACKEND",
    "CONFIG_FILE",
    "DYNAMO",
    "FLAGS",
    "FSDP",
    "HOSTFILE",
    "IGNORED_FLAGS",
    "INSTEAD",
    "KEYS",
    "MULTINODE_LAUNCHER",
    "NOT_IN_FILE",
    "PARALLELISM",
    "SECTIONS",
    "UNUSED",
    "UNUSED_IN_SECTIONS",
    "Key",
    "check_unused",
    "convert_value",
    "is_off",
]


CONFIG_FILE = "deepspeed_config_file"
HOSTFILE = "deepspeed_hostfile"
MULTINODE_LAUNCHER = "deepspeed_multinode_launcher"
"""Keys of `BACKEND` that are not options of the strategy: its own configuration file, and how nodes are started."""

NOT_IN_FILE = (CONFIG_FILE, HOSTFILE, MULTINODE_LAUNCHER, "zero3_init_flag")
"""Keys of `BACKEND` that a backend's own configuration does not have."""

_TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Key:
    """A key of the file.

    Attributes:
        read: Converts a value of a file or the text of a flag; raises a `ValueError` with the expected value and a hint.
        help: The text for `--help`.
        metavar: The name of the value in `--help`.
        switch: The flag takes no value: `--use_cpu`, `--no-use_cpu`.
        none: `none` is a value, instead of meaning "not set".
    """

    read: Callable[[Any], Any]
    help: str
    metavar: str = "N"
    switch: bool = False
    none: bool = False


def _whole(least: int, most: int | None = None) -> Callable[[Any], int]:
    bounds = f"a whole number ≥ {least}" if most is None else f"a whole number from {least} to {most}"

    def read(value: Any) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
            raise ValueError(bounds)
        if int(text) < least or (most is not None and int(text) > most):
            raise ValueError(bounds)
        return int(text)

    return read


def _truth(value: Any) -> bool:
    truth = _TRUTH.get(str(value).strip().lower())
    if truth is None:
        raise ValueError("true or false")
    return truth


def _one_of(*known: str, also: Mapping[str, str] | None = None) -> Callable[[Any], str]:
    """One of some words, in any case; `also` maps other spellings. An unquoted `no` is false in YAML."""
    names = {**{one.lower(): one for one in known}, **(also or {})}

    def read(value: Any) -> str:
        text = "no" if value is False else str(value).strip()
        if text.lower() not in names:
            raise ValueError(f"one of {', '.join(known)}", nearest(text, known))
        return names[text.lower()]

    return read


def _check_distributed_type(value: Any) -> str:
    """One of the types that strategies declare, which are imported when this is called."""
    infos = strategy_infos()
    also = {alias: kind for info in infos for alias, kind in info.file_aliases.items()}
    return _one_of(*(kind for info in infos for kind in info.file_types), also=also)(value)


def _check_mixed_precision(value: Any) -> str:
    from trainkit.precision import MIXED  # here, because it imports torch, and `trainkit launch --help` needs no torch

    return _one_of(*MIXED)(value)  # includes those registered later


def _text(value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise ValueError("text")
    return str(value).strip()


def _backend(value: Any) -> str:
    """A backend of `torch.compile`; Accelerate writes it in capitals."""
    text = "no" if value is False else _text(value)
    return text.lower() if text.isupper() else text


def _gpus(value: Any) -> str:
    text = str(value).replace(" ", "")
    parts = text.split(",")
    if text != "all" and (not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts)):
        raise ValueError("all, or different GPU numbers such as 0,1")
    return text


def _norm(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise ValueError("a number ≥ 0")
    return number


def _or_auto(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_either(value: Any) -> Any:
        try:
            return "auto" if str(value).strip() == "auto" else read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None

    return read_either


def _reshard(value: Any) -> bool | str:
    """A truth value, or a sharding strategy of FSDP1."""
    truth = value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).strip().lower())
    return _sharding(value) if truth is None else truth


def _names(value: Any) -> str:
    """Names separated by commas, or in a list."""
    return _text(",".join(map(str, value)) if isinstance(value, list) else value)


_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_sharding = _one_of(*_SHARDING, also=dict(zip("1245", _SHARDING, strict=True)))  # 3 is DDP
_PLACES = _one_of("none", "cpu", "nvme")
_STEPS = Key(_or_auto(_whole(1)), "micro-batches per optimizer step; auto: as in the script")
_BACKEND = Key(_backend, "backend of torch.compile, such as inductor; or no", "NAME")

KEYS: dict[str, Key] = {
    "distributed_type": Key(
        _check_distributed_type, "NO: one process; MULTI_CPU, MULTI_GPU: DDP; DEEPSPEED: ZeRO; FSDP; XLA: TPUs", "TYPE"
    ),
    "mixed_precision": Key(_check_mixed_precision, "precision of the computation: no (float32), fp16, bf16 or fp8", "NAME"),
    "num_processes": Key(_whole(1), "total number of processes on all machines"),
    "num_machines": Key(_whole(1), "number of machines"),
    "machine_rank": Key(_whole(0), "rank of this machine, from 0", "R"),
    "main_process_ip": Key(_text, "address of machine 0, reachable from the other machines", "HOST"),
    "main_process_port": Key(_whole(0, 65535), "a free port of machine 0; 0: any free port (one machine only)", "PORT"),
    "use_cpu": Key(_truth, "run on the CPU even if there are GPUs", switch=True),
    "gpu_ids": Key(_gpus, "GPUs to use: all, or numbers such as 0,1", "IDS"),
    "num_cpu_threads_per_process": Key(_whole(1), "threads of a process for operations on the CPU; sets OMP_NUM_THREADS"),
    "gradient_accumulation_steps": _STEPS,
    "dynamo_backend": _BACKEND,
    "debug": Key(_truth, "debug mode: compare the calls of all processes", switch=True),
}
"""The keys at the top of the file."""

BACKEND: dict[str, Key] = {
    "zero_stage": Key(_whole(1, 3), "stage of ZeRO: 1, 2 or 3; default: 2"),
    "offload_optimizer_device": Key(_PLACES, "where to keep the optimizer state: none, cpu or nvme", "PLACE", none=True),
    "offload_param_device": Key(_PLACES, "where to keep the parameters (stage 3): none, cpu or nvme", "PLACE", none=True),
    "offload_optimizer_nvme_path": Key(_text, "a folder on a fast disk, for nvme", "FOLDER"),
    "offload_param_nvme_path": Key(_text, "a folder on a fast disk, for nvme", "FOLDER"),
    "gradient_accumulation_steps": _STEPS,
    "gradient_clipping": Key(_or_auto(_norm), "largest norm of the gradients; auto: as in the script", "NORM"),
    "zero3_init_flag": Key(_truth, "shard a transformers model while it is built (stage 3): true or false", "BOOL"),
    "zero3_save_16bit_model": Key(_truth, "save_model writes 16-bit parameters (stage 3): true or false", "BOOL"),
    CONFIG_FILE: Key(_text, "DeepSpeed's own configuration, in JSON, instead of the keys above", "FILE"),
    HOSTFILE: Key(_text, "start the machines named in this file over ssh", "FILE"),
    MULTINODE_LAUNCHER: Key(
        _one_of("standard", "pdsh"),
        "standard: start each machine yourself; pdsh: start those of deepspeed_hostfile over ssh",
        "NAME",
    ),
}
"""The keys of `deepspeed_config`."""

FSDP: dict[str, Key] = {
    "fsdp_version": Key(_whole(1, 2), "no effect: 1 and 2 are both FSDP2", "1|2"),
    "fsdp_reshard_after_forward": Key(
        _reshard, "free parameters after the forward of their block: true, false, or as fsdp_sharding_strategy", "BOOL"
    ),
    "fsdp_sharding_strategy": Key(
        _sharding,
        "FULL_SHARD, SHARD_GRAD_OP (keep parameters until the backward), or HYBRID_SHARD (a replica on each node)",
        "NAME",
    ),
    "fsdp_offload_params": Key(_truth, "keep parameters and optimizer state in host memory: true or false", "BOOL"),
    "fsdp_auto_wrap_policy": Key(
        _one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "what is sharded one by one; default: the repeated blocks",
        "NAME",
    ),
    "fsdp_transformer_layer_cls_to_wrap": Key(_names, "classes for TRANSFORMER_BASED_WRAP, separated by commas", "NAMES"),
    "fsdp_min_num_params": Key(_whole(0), "number of parameters for SIZE_BASED_WRAP"),
    "fsdp_ignored_modules": Key(_text, "a regular expression for names of modules that are not sharded", "REGEX"),
    "fsdp_activation_checkpointing": Key(_truth, "recompute activations in the backward: true or false", "BOOL"),
    "fsdp_state_dict_type": Key(
        _one_of("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
        "no effect: a checkpoint is the same for every strategy",
        "NAME",
    ),
    "fsdp_backward_prefetch": Key(
        _one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), "no effect: FSDP2 always does it", "NAME"
    ),
    "fsdp_forward_prefetch": Key(_truth, "no effect: FSDP2 always does it", "BOOL"),
    "fsdp_use_orig_params": Key(_truth, "no effect: FSDP2 always does it", "BOOL"),
    "fsdp_sync_module_states": Key(_truth, "no effect: rank 0 always sends its values", "BOOL"),
    "fsdp_cpu_ram_efficient_loading": Key(_truth, "no effect: each process loads the model", "BOOL"),
}
"""The keys of `fsdp_config`."""

PARALLELISM: dict[str, Key] = {
    "parallelism_config_dp_replicate_size": Key(_whole(1), "number of replicas of FSDP"),
    "parallelism_config_dp_shard_size": Key(_whole(1), "number of processes over which a replica is sharded"),
    "parallelism_config_tp_size": Key(_whole(1), "number of processes of tensor parallelism"),
}
"""The keys of `parallelism_config`, the sizes of FSDP."""

DYNAMO: dict[str, Key] = {
    "dynamo_backend": _BACKEND,
    "dynamo_mode": Key(
        _one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"),
        "mode of torch.compile: default, reduce-overhead or max-autotune",
        "NAME",
    ),
    "dynamo_use_fullgraph": Key(_truth, "raise an error instead of compiling in parts", switch=True),
    "dynamo_use_dynamic": Key(_truth, "compile for dynamic shapes", switch=True),
    "dynamo_use_regional_compilation": Key(_truth, "compile each repeated block instead of the whole model", switch=True),
}
"""The keys of `dynamo_config`."""

SECTIONS: dict[str, dict[str, Key]] = {
    "deepspeed_config": BACKEND,
    "fsdp_config": FSDP,
    "parallelism_config": PARALLELISM,
    "dynamo_config": DYNAMO,
}
"""The sections of the file."""


def convert_value(name: str, value: Any, table: Mapping[str, Key], label: str) -> Any:
    """The value of a key, converted.

    Args:
        name: The name of the key in `table`.
        value: The value from a file, or the text of a flag.
        table: The known keys.
        label: The name of the key in messages.

    Raises:
        ConfigurationError: A wrong value.
        UnsupportedArgumentError: A value of Accelerate that is not supported; the message says what to write.
    """
    for known, fix in INSTEAD.get(name, {}).items():
        if str(value).strip().lower() == known.lower():
            raise UnsupportedArgumentError(f"{label}: {value} is not supported; {fix}.")
    try:
        return table[name].read(value)
    except ValueError as error:
        expected, hint = (*error.args, "")[:2]
        raise ConfigurationError(f"{label} must be {expected}, not {value!r}.{hint}") from None


_OFF_WORDS = ("", "no", "none", "null", "false", "off")
_SHARDED = "to shard parameters write distributed_type: FSDP, or DEEPSPEED with deepspeed_config: {zero_stage: 3}"
_CONTEXT = "context and sequence parallelism are not implemented; remove it, and use activation checkpointing"
_SLICE = "start each machine of a TPU slice with gcloud compute tpus tpu-vm ssh --worker=all"
_MPIRUN = "start the script with mpirun, which trainkit detects"
_WHOLE = "for DDP, write distributed_type: MULTI_GPU (or MULTI_CPU)"
_UNSHARDED = {"NO_SHARD": _WHOLE, "3": _WHOLE}
_PARALLEL = {  # options of context and sequence parallelism, whose only size is 1
    "cp": ("backend", "comm_strategy"),
    "sp": ("backend", "seq_length", "seq_length_is_variable", "attn_implementation"),
}
_BACKENDS = (  # torch no longer has them
    *("aot_torchxla_trace_once", "aot_ts_nvfuser", "fx2trt", "hpu_backend", "ipex", "neuron", "nvprims_nvfuser", "ofi"),
    "torchxla_trace_once",
)

ANY = "any"
"""Instead of the values of a key: each value is ignored."""

UNUSED: dict[str, tuple[tuple[Any, ...] | str, str]] = {
    **dict.fromkeys(("command_file", "commands"), ((), _SLICE)),
    "compute_environment": (("LOCAL_MACHINE",), "start the script with trainkit launch on the machine itself"),
    "downcast_bf16": ((), "write mixed_precision: bf16"),
    "enable_cpu_affinity": ((), "start the script with numactl"),
    "megatron_lm_config": ((), _SHARDED),
    "ipex_config": ((), "Intel's extension is not used, torch now has most of it; remove it"),
    "main_training_function": (ANY, ""),
    "mpirun_config": ((), _MPIRUN),
    "tp_config": (({"tp_size": 1},), "write parallelism_config: {parallelism_config_tp_size: 2}"),
    "rdzv_backend": (("static", "c10d"), "write static or c10d, which are the same here, or remove it"),
    "same_network": (ANY, ""),
    **dict.fromkeys(("tpu_env", "tpu_name", "tpu_vm", "tpu_zone"), ((), _SLICE)),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo"), ((), _SLICE)),
}
"""Ignored keys → (values that are ignored, in addition to those that turn it off; what to do instead of another value)."""

UNUSED_IN_SECTIONS: dict[str, tuple[tuple[Any, ...] | str, str]] = {
    "deepspeed_exclusion_filter": ((), "remove the machines from the hostfile"),
    "deepspeed_inclusion_filter": ((), "write a hostfile of these machines"),
    "deepspeed_moe_layer_cls_names": (
        (),
        "call DeepSpeed yourself, before the model is prepared: "
        "deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])",
    ),
    "fsdp_activation_checkpointing_offload": (
        (),
        "remove it, or offload in the forward of the model: with torch.autograd.graph.save_on_cpu(pin_memory=True): ...",
    ),
    **dict.fromkeys(
        (f"parallelism_config_{kind}_{name}" for kind, names in _PARALLEL.items() for name in names),
        (ANY, ""),
    ),
    **dict.fromkeys(("parallelism_config_cp_size", "parallelism_config_sp_size"), ((1, "1"), _CONTEXT)),
}
"""The same for the sections of the file."""

IGNORED_FLAGS: dict[str, str] = {
    "main_training_function": "NAME",
    "rdzv_backend": "NAME",
    "same_network": "",
}
"""Flags of `accelerate launch` that have no effect, with the name of the value; `""`: it takes none."""

INSTEAD: dict[str, dict[str, str]] = {
    "deepspeed_multinode_launcher": {
        "mpich": _MPIRUN,
        "mvapich": _MPIRUN,
        "nossh": "write standard, and start each machine yourself",
        "openmpi": _MPIRUN,
        "slurm": "start trainkit launch once on each machine with srun, and remove num_machines",
    },
    "distributed_type": {
        "MEGATRON_LM": _SHARDED,
        **{
            f"MULTI_{name}": "there is no strategy for these devices; write MULTI_CPU or MULTI_GPU"
            for name in ("HPU", "MLU", "MUSA", "NEURON", "NPU", "SDAA", "XPU")
        },
    },
    "dynamo_backend": dict.fromkeys(_BACKENDS, "write inductor, or another of torch._dynamo.list_backends()"),
    "fsdp_reshard_after_forward": _UNSHARDED,
    "fsdp_sharding_strategy": _UNSHARDED,
    "zero_stage": {"0": f"{_WHOLE} and no deepspeed_config"},
}
"""Key → a value of Accelerate that is not supported → what to write."""

FLAGS: dict[str, str] = {
    **dict.fromkeys(("use_megatron_lm", "megatron_lm"), "write --use_fsdp, or --use_deepspeed --zero_stage 3"),
    "use_parallelism_config": "remove it: --parallelism_config_tp_size and the other sizes are used without it",
    "enable_cpu_affinity": "start it with numactl",
    "fp8": "write --mixed_precision fp8, which uses torchao; its options are those of trainkit.Float8Precision in the script",
    "mpirun_hostfile": _MPIRUN,
    "tpu_": _SLICE,
    "rdzv_conf": "remove it: trainkit connects the nodes itself",
    "monitor_interval": "remove it: a failure is noticed at once",
    "no_python": "remove it: the script must be Python",
    **{name: fix or "remove it" for name, (_, fix) in UNUSED_IN_SECTIONS.items()},
}
"""Flags of `accelerate launch`, or their beginnings → what to write."""


def is_off(value: Any) -> bool:
    """Whether a value in a file of another framework turns a feature off, whatever the feature is.

    `false`, `null`, `no`, `none`, `off`, empty values, and a section that is not enabled or has only such values. A section
    with `enabled: false` is off even if it has other values; in a method of compression, `shared_parameters` says so.
    """
    if isinstance(value, Mapping):
        return any(is_off(value.get(key, True)) for key in ("enabled", "shared_parameters")) or all(map(is_off, value.values()))
    if isinstance(value, str):
        return value.strip().lower() in _OFF_WORDS
    return value is None or value is False or value == []


def check_unused(label: str, value: Any, allowed: tuple[Any, ...] | str, fix: str) -> None:
    """Check the value of an ignored key; `label` names it.

    Raises:
        UnsupportedArgumentError: A value that is neither `allowed` nor turns the feature off.
    """
    if allowed != ANY and not is_off(value) and not any(type(value) is type(one) and value == one for one in allowed):
        raise UnsupportedArgumentError(f"{label}: {value!r} is not supported; {fix}.")
