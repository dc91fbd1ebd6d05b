"""What scripts written for Hugging Face Accelerate import from its ``utils``, under the same names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.checkpoint.single_file import load
    from trainkit.launch.notebook import notebook_launcher
    from trainkit.rng import set_seed
    from trainkit.settings.write import write_basic_config
    from trainkit.utils.configurations import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
    from trainkit.utils.deepspeed_plugin import DeepSpeedPlugin
    from trainkit.utils.distributed_type import DistributedType
    from trainkit.utils.handlers import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from trainkit.utils.memory import find_executable_batch_size
    from trainkit.utils.modeling import load_checkpoint_in_model
    from trainkit.utils.objects import broadcast_object_list, gather_object
    from trainkit.utils.progress import tqdm

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather_object",
    "load",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "set_seed",
    "tqdm",
    "write_basic_config",
]

PLACES = {
    "AutocastKwargs": "trainkit.utils.handlers",
    "DDPCommunicationHookType": "trainkit.utils.handlers",
    "DataLoaderConfiguration": "trainkit.utils.configurations",
    "DeepSpeedPlugin": "trainkit.utils.deepspeed_plugin",
    "DistributedDataParallelKwargs": "trainkit.utils.handlers",
    "DistributedType": "trainkit.utils.distributed_type",
    "GradScalerKwargs": "trainkit.utils.handlers",
    "GradientAccumulationPlugin": "trainkit.utils.configurations",
    "InitProcessGroupKwargs": "trainkit.utils.handlers",
    "ProfileKwargs": "trainkit.utils.handlers",
    "ProjectConfiguration": "trainkit.utils.configurations",
    "broadcast_object_list": "trainkit.utils.objects",
    "find_executable_batch_size": "trainkit.utils.memory",
    "gather_object": "trainkit.utils.objects",
    "load": "trainkit.checkpoint.single_file",
    "load_checkpoint_in_model": "trainkit.utils.modeling",
    "notebook_launcher": "trainkit.launch.notebook",
    "set_seed": "trainkit.rng",
    "tqdm": "trainkit.utils.progress",
    "write_basic_config": "trainkit.settings.write",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name in PLACES:
        value = globals()[name] = getattr(import_module(PLACES[name]), name)
        return value
    from trainkit.errors import nearest
    from trainkit.utils.instead import INSTEAD

    if name in INSTEAD:
        raise ImportError(f"trainkit has no {name}. Use: {INSTEAD[name]}")  # which `from … import` does not hide
    raise AttributeError(f"module 'trainkit.utils' has no attribute {name!r}.{nearest(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
