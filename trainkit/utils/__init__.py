"""What scripts written for Hugging Face Accelerate import from its ``utils``, under the same names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.config.configurations import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
    from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
    from trainkit.config.distributed_type import DistributedType
    from trainkit.config.kwargs_handlers import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from trainkit.launch.notebook import notebook_launcher
    from trainkit.state.single_file import load
    from trainkit.utils.available import (
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
    from trainkit.utils.basic_config import write_basic_config
    from trainkit.utils.choices import DynamoBackend, LoggerType, PrecisionType
    from trainkit.utils.memory import find_executable_batch_size, release_memory
    from trainkit.utils.modeling import load_checkpoint_in_model
    from trainkit.utils.models import extract_model_from_parallel, is_compiled_module
    from trainkit.utils.objects import broadcast_object_list, gather_object
    from trainkit.utils.operations import broadcast, gather, pad_across_processes, reduce, send_to_device, wait_for_everyone
    from trainkit.utils.progress import tqdm
    from trainkit.utils.seeding import set_seed

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
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

PLACES = {
    "AutocastKwargs": "trainkit.config.kwargs_handlers",
    "DDPCommunicationHookType": "trainkit.config.kwargs_handlers",
    "DataLoaderConfiguration": "trainkit.config.configurations",
    "DeepSpeedPlugin": "trainkit.config.deepspeed_plugin",
    "DistributedDataParallelKwargs": "trainkit.config.kwargs_handlers",
    "DistributedType": "trainkit.config.distributed_type",
    "DynamoBackend": "trainkit.utils.choices",
    "GradScalerKwargs": "trainkit.config.kwargs_handlers",
    "GradientAccumulationPlugin": "trainkit.config.configurations",
    "InitProcessGroupKwargs": "trainkit.config.kwargs_handlers",
    "LoggerType": "trainkit.utils.choices",
    "PrecisionType": "trainkit.utils.choices",
    "ProfileKwargs": "trainkit.config.kwargs_handlers",
    "ProjectConfiguration": "trainkit.config.configurations",
    "broadcast": "trainkit.utils.operations",
    "broadcast_object_list": "trainkit.utils.objects",
    "extract_model_from_parallel": "trainkit.utils.models",
    "find_executable_batch_size": "trainkit.utils.memory",
    "gather": "trainkit.utils.operations",
    "gather_object": "trainkit.utils.objects",
    "is_bf16_available": "trainkit.utils.available",
    "is_comet_ml_available": "trainkit.utils.available",
    "is_compiled_module": "trainkit.utils.models",
    "is_cuda_available": "trainkit.utils.available",
    "is_datasets_available": "trainkit.utils.available",
    "is_deepspeed_available": "trainkit.utils.available",
    "is_fp16_available": "trainkit.utils.available",
    "is_mlflow_available": "trainkit.utils.available",
    "is_mps_available": "trainkit.utils.available",
    "is_npu_available": "trainkit.utils.available",
    "is_peft_available": "trainkit.utils.available",
    "is_tensorboard_available": "trainkit.utils.available",
    "is_torch_xla_available": "trainkit.utils.available",
    "is_transformers_available": "trainkit.utils.available",
    "is_wandb_available": "trainkit.utils.available",
    "is_xpu_available": "trainkit.utils.available",
    "load": "trainkit.state.single_file",
    "load_checkpoint_in_model": "trainkit.utils.modeling",
    "notebook_launcher": "trainkit.launch.notebook",
    "pad_across_processes": "trainkit.utils.operations",
    "reduce": "trainkit.utils.operations",
    "release_memory": "trainkit.utils.memory",
    "send_to_device": "trainkit.utils.operations",
    "set_seed": "trainkit.utils.seeding",
    "tqdm": "trainkit.utils.progress",
    "wait_for_everyone": "trainkit.utils.operations",
    "write_basic_config": "trainkit.utils.basic_config",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name in PLACES:
        value = globals()[name] = getattr(import_module(PLACES[name]), name)
        return value
    from trainkit.lazy import absent
    from trainkit.unsupported import refuse_import

    refuse_import(name)
    raise absent("trainkit.utils", name, __all__)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
