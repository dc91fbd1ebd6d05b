"""What scripts written for Hugging Face Accelerate import from its `utils`, under the same names.

`trainkit.utilities` has the names of Lightning's `utilities`.
"""

from __future__ import annotations

from typing import Any

from trainkit.checkpoint.plain_files import load
from trainkit.compat.accelerate_names.available import (
    is_bf16_available,
    is_comet_ml_available,
    is_cuda_available,
    is_datasets_available,
    is_deepspeed_available,
    is_fp16_available,
    is_mlflow_available,
    is_mps_available,
    is_npu_available,
    is_peft_available,
    is_tensorboard_available,
    is_torch_xla_available,
    is_transformers_available,
    is_wandb_available,
    is_xpu_available,
)
from trainkit.compat.accelerate_names.basic_config import write_basic_config
from trainkit.compat.accelerate_names.choices import DynamoBackend, LoggerType, PrecisionType
from trainkit.compat.accelerate_names.modeling import extract_model_from_parallel, is_compiled_module, load_checkpoint_in_model
from trainkit.compat.accelerate_names.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    set_seed,
    tqdm,
    wait_for_everyone,
)
from trainkit.config.compiling import TorchDynamoPlugin
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin, ParallelismConfig
from trainkit.config.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from trainkit.launch.notebook import notebook_launcher
from trainkit.names import absent
from trainkit.tuner.executable_batch_size import find_executable_batch_size, release_memory

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "extract_model_from_parallel",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "is_bf16_available",
    "is_comet_ml_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_fp16_available",
    "is_mlflow_available",
    "is_mps_available",
    "is_npu_available",
    "is_peft_available",
    "is_tensorboard_available",
    "is_torch_xla_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
    "load",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]

__path__: list[str] = []  # what is below it, such as trainkit.utils.operations, is found by trainkit.names.import_paths


def __getattr__(name: str) -> Any:
    raise absent("trainkit.utils", name, __all__)
