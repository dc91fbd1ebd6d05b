"""Keys, values and flags of Accelerate that trainkit does not support: which are allowed, and what to write instead."""

from __future__ import annotations

from typing import Any

__all__ = ["EMPTY", "FLAGS", "INSTEAD", "UNUSED", "UNUSED_IN_SECTIONS"]

EMPTY: tuple[Any, ...] = (None, "", {}, [])
"""Empty values."""

_OFF: tuple[Any, ...] = (False, "no", "false", *EMPTY)
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

UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("command_file", "commands"), (EMPTY, _SLICE)),
    "compute_environment": (("LOCAL_MACHINE", *EMPTY), "start the script with trainkit launch on the machine itself"),
    "downcast_bf16": (_OFF, "write mixed_precision: bf16"),
    "enable_cpu_affinity": (_OFF, "start the script with numactl"),
    "megatron_lm_config": (EMPTY, _SHARDED),
    "ipex_config": (EMPTY, "remove it"),
    "main_training_function": ((), ""),
    "mpirun_config": (EMPTY, _MPIRUN),
    "tp_config": (EMPTY, "write parallelism_config: {parallelism_config_tp_size: 2}"),
    "rdzv_backend": (("static", "c10d", *EMPTY), "remove it"),
    "same_network": ((), ""),
    **dict.fromkeys(("tpu_env", "tpu_name", "tpu_vm", "tpu_zone"), (EMPTY, _SLICE)),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo"), (_OFF, _SLICE)),
}
"""Ignored keys → (allowed values, or () for any; what to do instead of using any other value)."""

UNUSED_IN_SECTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed_exclusion_filter": (EMPTY, "remove the machines from the hostfile"),
    "deepspeed_inclusion_filter": (EMPTY, "write a hostfile of these machines"),
    "deepspeed_moe_layer_cls_names": (
        EMPTY,
        "call DeepSpeed yourself, before the model is prepared: "
        "deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])",
    ),
    "fsdp_activation_checkpointing_offload": (
        _OFF,
        "remove it, or offload in the forward of the model: with torch.autograd.graph.save_on_cpu(pin_memory=True): ...",
    ),
    **dict.fromkeys(
        (f"parallelism_config_{kind}_{name}" for kind, names in _PARALLEL.items() for name in names),
        ((), ""),
    ),
    **dict.fromkeys(("parallelism_config_cp_size", "parallelism_config_sp_size"), ((1, "1", *EMPTY), _CONTEXT)),
}
"""The same for the sections of the file."""

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
    "num_cpu_threads_per_process": "set it in the environment: OMP_NUM_THREADS=4 trainkit launch ...",
    "enable_cpu_affinity": "start it with numactl",
    "fp8": "write --mixed_precision fp8, which uses torchao; its options are those of trainkit.Float8Precision in the script",
    "mpirun_hostfile": _MPIRUN,
    "tpu_": _SLICE,
    "main_training_function": "remove it: the whole script is run",
    **dict.fromkeys(("same_network", "rdzv_backend", "rdzv_conf", "monitor_interval"), "remove it"),
    "no_python": "remove it: the script must be Python",
    **{name: fix or "remove it" for name, (_, fix) in UNUSED_IN_SECTIONS.items()},
}
"""Flags of `accelerate launch`, or their beginnings → what to write."""
