"""What scripts written for Hugging Face Accelerate import from its `utils`, under the same names.

`trainkit.utilities` has the names of Lightning's `utilities`.
"""

from __future__ import annotations

from typing import Any

from trainkit.checkpoint.torch_file import load
from trainkit.compat.accelerate_names import this_machine as _this_machine
from trainkit.compat.accelerate_names.modeling import (
    extract_model_from_parallel,
    init_empty_weights,
    is_compiled_module,
    is_peft_model,
    load_checkpoint_in_model,
    set_module_tensor_to_device,
)
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
from trainkit.compat.accelerate_names.this_machine import *
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
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
)
from trainkit.launch.notebook import notebook_launcher
from trainkit.names import absent
from trainkit.optim.placeholders import DummyOptim, DummyScheduler
from trainkit.tuner.executable_batch_size import find_executable_batch_size, release_memory

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
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
    "init_empty_weights",
    "is_compiled_module",
    "is_peft_model",
    "load",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_module_tensor_to_device",
    "set_seed",
    "tqdm",
    "wait_for_everyone",
]
__all__ += _this_machine.__all__

__path__: list[str] = []  # trainkit.names.import_paths finds modules below it, such as trainkit.utils.operations.


def __getattr__(name: str) -> Any:
    raise absent("trainkit.utils", name, __all__)
