"""What Accelerate's configuration files and launcher have and we have not: what may stand there, or what to write instead."""

from __future__ import annotations

from typing import Any

__all__ = ["EMPTY", "FLAGS", "INSTEAD", "UNUSED", "UNUSED_IN_SECTIONS"]

EMPTY: tuple[Any, ...] = (None, "", {}, [])
"""Values that say nothing."""

_OFF: tuple[Any, ...] = (False, "no", "false", *EMPTY)
_FSDP = "parameters are divided by ZeRO: write distributed_type: DEEPSPEED and deepspeed_config: {zero_stage: 3}"
_SLICE = "start each machine of a TPU slice by gcloud compute tpus tpu-vm ssh --worker=all"
_MPIRUN = "start the script by mpirun, which is recognised"
_BACKENDS = (  # that torch has not, or not any more
    *("aot_torchxla_trace_once", "aot_ts_nvfuser", "fx2trt", "hpu_backend", "ipex", "neuron", "nvprims_nvfuser", "ofi"),
    "torchxla_trace_once",
)

UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "command_file": (EMPTY, _SLICE),
    "commands": (EMPTY, _SLICE),
    "compute_environment": (("LOCAL_MACHINE", *EMPTY), "start the script where it is to run, by trainkit launch"),
    "downcast_bf16": (_OFF, "write mixed_precision: bf16"),
    "enable_cpu_affinity": (_OFF, "start the script by numactl"),
    "fp8_config": (EMPTY, "write mixed_precision: bf16"),
    "fsdp_config": (EMPTY, _FSDP),
    "ipex_config": (EMPTY, "leave it out"),
    "main_training_function": ((), ""),
    "megatron_lm_config": (EMPTY, _FSDP),
    "mpirun_config": (EMPTY, _MPIRUN),
    "parallelism_config": (EMPTY, _FSDP),
    "rdzv_backend": (("static", "c10d", *EMPTY), "leave it out"),
    "same_network": ((), ""),
    "tp_config": (EMPTY, _FSDP),
    "tpu_env": (EMPTY, _SLICE),
    "tpu_name": (EMPTY, _SLICE),
    "tpu_use_cluster": (_OFF, _SLICE),
    "tpu_use_sudo": (_OFF, _SLICE),
    "tpu_vm": (EMPTY, _SLICE),
    "tpu_zone": (EMPTY, _SLICE),
}
"""Keys that need nothing here, with the values that they may have (none: any), and what to do about another value."""

UNUSED_IN_SECTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed_exclusion_filter": (EMPTY, "leave the machines out of the hostfile"),
    "deepspeed_inclusion_filter": (EMPTY, "write a hostfile of these machines"),
    "deepspeed_moe_layer_cls_names": (
        EMPTY,
        "tell DeepSpeed itself, before the model is prepared: "
        "deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])",
    ),
    "dynamo_use_regional_compilation": (_OFF, "compile the parts that repeat in the script: block.compile()"),
}
"""The same of ``deepspeed_config`` and ``dynamo_config``."""

INSTEAD: dict[str, dict[str, str]] = {
    "deepspeed_multinode_launcher": {
        "mpich": _MPIRUN,
        "mvapich": _MPIRUN,
        "nossh": "write standard, and start each machine",
        "openmpi": _MPIRUN,
        "slurm": "start trainkit launch once on each machine by srun, and leave num_machines out",
    },
    "distributed_type": {
        "FSDP": _FSDP,
        "MEGATRON_LM": _FSDP,
        **{
            f"MULTI_{name}": "there is no strategy for these devices; write MULTI_CPU or MULTI_GPU"
            for name in ("HPU", "MLU", "MUSA", "NEURON", "NPU", "SDAA", "XPU")
        },
    },
    "dynamo_backend": dict.fromkeys(_BACKENDS, "write inductor, or another of torch._dynamo.list_backends()"),
    "mixed_precision": {"fp8": "write bf16, or fp16"},
    "zero_stage": {"0": "without ZeRO it is DDP: write distributed_type: MULTI_GPU (or MULTI_CPU) and no deepspeed_config"},
}
"""Values of keys of ours that Accelerate has besides, and what to write."""

FLAGS: dict[str, str] = {
    "use_fsdp": "write --use_deepspeed --zero_stage 3",
    "fsdp": "write --use_deepspeed --zero_stage 3",
    "use_megatron_lm": "write --use_deepspeed --zero_stage 3",
    "megatron_lm": "write --use_deepspeed --zero_stage 3",
    "use_parallelism_config": "write --use_deepspeed --zero_stage 3",
    "parallelism_config": "write --use_deepspeed --zero_stage 3",
    "num_cpu_threads_per_process": "set it in the environment: OMP_NUM_THREADS=4 trainkit launch ...",
    "enable_cpu_affinity": "start it by numactl",
    "fp8": "write --mixed_precision bf16",
    "mpirun_hostfile": _MPIRUN,
    "tpu_": _SLICE,
    "main_training_function": "leave it out: the script is run as it is",
    "same_network": "leave it out",
    "rdzv_backend": "leave it out",
    "rdzv_conf": "leave it out",
    "monitor_interval": "leave it out",
    "no_python": "leave it out: the script is one of Python",
    **{name: fix for name, (_, fix) in UNUSED_IN_SECTIONS.items()},
}
"""Flags of ``accelerate launch``, or how they begin, and what to write."""
