"""Keys, values and flags of Accelerate that trainkit does not support: which are allowed, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import UnsupportedArgumentError

__all__ = ["ANY", "FLAGS", "IGNORED_FLAGS", "INSTEAD", "UNUSED", "UNUSED_IN_SECTIONS", "check_unused", "is_off"]

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
