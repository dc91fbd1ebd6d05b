"""Configuration files as `accelerate config` of Accelerate 1.15 writes them.

`tests/config/test_accelerate.py` compares them with those of Accelerate itself.
"""

from __future__ import annotations

from typing import Any

import yaml

__all__ = [
    "DEFAULT",
    "FILES",
    "FSDP",
    "FSDP1",
    "MULTI_CPU",
    "MULTI_GPU",
    "ONE_CPU",
    "SIZES",
    "TPU",
    "TWO_MACHINES",
    "ZERO2",
    "ZERO3",
    "accelerates",
]

_ALWAYS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def accelerates(**keys: Any) -> str:
    """The text of a configuration file with these keys, and the keys that all files have."""
    return yaml.safe_dump({**_ALWAYS, **keys})


ONE_CPU = accelerates(distributed_type="NO", num_processes=1, use_cpu=True)
MULTI_CPU = accelerates(distributed_type="MULTI_CPU", num_processes=2, use_cpu=True)
MULTI_GPU = accelerates(distributed_type="MULTI_GPU", gpu_ids="all", mixed_precision="bf16", num_processes=4)
TWO_MACHINES = accelerates(
    distributed_type="MULTI_GPU",
    dynamo_config={"dynamo_backend": "INDUCTOR"},
    gpu_ids="all",
    machine_rank=1,
    main_process_ip="10.0.0.1",
    main_process_port=29500,
    mixed_precision="fp16",
    num_machines=2,
    num_processes=16,
)
ZERO2 = accelerates(
    deepspeed_config={
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 2,
    },
    distributed_type="DEEPSPEED",
    mixed_precision="bf16",
    num_processes=2,
)
ZERO3 = accelerates(
    deepspeed_config={
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": False,
        "zero_stage": 3,
    },
    distributed_type="DEEPSPEED",
    num_processes=1,
)
TPU = accelerates(distributed_type="XLA", num_processes=8)
FSDP = accelerates(
    distributed_type="FSDP",
    fsdp_config={
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_version": 2,
    },
    mixed_precision="bf16",
    num_processes=2,
)
FSDP1 = accelerates(
    distributed_type="FSDP",
    fsdp_config={
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_min_num_params": 1000,
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
        "fsdp_version": 1,
    },
    num_processes=8,
)
SIZES = accelerates(
    distributed_type="FSDP",
    fsdp_config={"fsdp_version": 2},
    num_processes=8,
    parallelism_config={
        "parallelism_config_cp_size": 1,
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
    },
)
FILES = {
    "one_cpu": ONE_CPU,
    "multi_cpu": MULTI_CPU,
    "multi_gpu": MULTI_GPU,
    "two_machines": TWO_MACHINES,
    "zero2": ZERO2,
    "zero3": ZERO3,
    "tpu": TPU,
    "fsdp": FSDP,
    "fsdp1": FSDP1,
    "sizes": SIZES,
}

# The file of accelerate.utils.write_basic_config, which writes JSON to a .yaml file.
DEFAULT = """\
{
  "compute_environment": "LOCAL_MACHINE",
  "debug": false,
  "distributed_type": "NO",
  "downcast_bf16": false,
  "enable_cpu_affinity": false,
  "machine_rank": 0,
  "main_training_function": "main",
  "mixed_precision": "no",
  "num_machines": 1,
  "num_processes": 1,
  "rdzv_backend": "static",
  "same_network": false,
  "tpu_use_cluster": false,
  "tpu_use_sudo": false,
  "use_cpu": true
}
"""
