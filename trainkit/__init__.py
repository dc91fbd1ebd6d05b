"""trainkit trains PyTorch models: subclass `TrainModule` and call `Trainer(...).fit(...)`, or write your own
training loop with `Accelerator`, which is the same engine.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import trainkit.launch  # noqa: F401 - before a script goes to another folder
from trainkit._version import __version__
from trainkit.names import absent, submodule
from trainkit.names.import_paths import Aliases, LightningModules

if TYPE_CHECKING:
    from trainkit import checkpoint as checkpoint
    from trainkit import errors
    from trainkit.accelerator import Accelerator
    from trainkit.accelerator.prepared_loaders import skip_first_batches
    from trainkit.accelerator.state_views import AcceleratorState, PartialState
    from trainkit.callback import Callback
    from trainkit.checkpoint.weights import load_state_dict
    from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
    from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin, ParallelismConfig
    from trainkit.config.kwargs_handlers import (
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
    from trainkit.data.combined import CombinedLoader
    from trainkit.launch.notebook import notebook_launcher
    from trainkit.module.data_module import DataModule, LightningDataModule
    from trainkit.module.train_module import LightningModule, TrainModule
    from trainkit.precision import Float8Precision, Precision
    from trainkit.rng import seed_everything
    from trainkit.strategy import Strategy
    from trainkit.trainer.trainer import Trainer
    from trainkit.utils import (
        find_executable_batch_size,
        init_empty_weights,
        is_rich_available,
        load_checkpoint_in_model,
        set_seed,
        write_basic_config,
    )

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "Callback",
    "CombinedLoader",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataModule",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "Float8Precision",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LightningDataModule",
    "LightningModule",
    "ParallelismConfig",
    "PartialState",
    "Precision",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Strategy",
    "TrainModule",
    "Trainer",
    "__version__",
    "errors",
    "find_executable_batch_size",
    "init_empty_weights",
    "is_rich_available",
    "load_checkpoint_in_model",
    "load_state_dict",
    "notebook_launcher",
    "seed_everything",
    "set_seed",
    "skip_first_batches",
    "write_basic_config",
]

_PLACES = {
    "Accelerator": "trainkit.accelerator",
    "AcceleratorState": "trainkit.accelerator.state_views",
    "AutocastKwargs": "trainkit.config.kwargs_handlers",
    "Callback": "trainkit.callback",
    "CombinedLoader": "trainkit.data.combined",
    "DDPCommunicationHookType": "trainkit.config.kwargs_handlers",
    "DataLoaderConfiguration": "trainkit.config.kwargs_handlers",
    "DataModule": "trainkit.module.data_module",
    "DeepSpeedPlugin": "trainkit.config.deepspeed_plugin",
    "DistributedDataParallelKwargs": "trainkit.config.kwargs_handlers",
    "DistributedType": "trainkit.config.kwargs_handlers",
    "FullyShardedDataParallelPlugin": "trainkit.config.fsdp_plugin",
    "GradScalerKwargs": "trainkit.config.kwargs_handlers",
    "GradientAccumulationPlugin": "trainkit.config.kwargs_handlers",
    "InitProcessGroupKwargs": "trainkit.config.kwargs_handlers",
    "LightningDataModule": "trainkit.module.data_module",
    "LightningModule": "trainkit.module.train_module",
    "Float8Precision": "trainkit.precision",
    "ParallelismConfig": "trainkit.config.fsdp_plugin",
    "load_state_dict": "trainkit.checkpoint.weights",
    "PartialState": "trainkit.accelerator.state_views",
    "Precision": "trainkit.precision",
    "ProfileKwargs": "trainkit.config.kwargs_handlers",
    "ProjectConfiguration": "trainkit.config.kwargs_handlers",
    "Strategy": "trainkit.strategy",
    "TrainModule": "trainkit.module.train_module",
    "Trainer": "trainkit.trainer.trainer",
    "find_executable_batch_size": "trainkit.utils",
    "init_empty_weights": "trainkit.utils",
    "is_rich_available": "trainkit.utils",
    "load_checkpoint_in_model": "trainkit.utils",
    "notebook_launcher": "trainkit.launch.notebook",
    "seed_everything": "trainkit.rng",
    "set_seed": "trainkit.utils",
    "skip_first_batches": "trainkit.accelerator.prepared_loaders",
    "write_basic_config": "trainkit.utils",
}

sys.meta_path.append(LightningModules())
sys.meta_path.insert(0, Aliases())

if "TRAINKIT_DEBUG_MODE" in os.environ or "ACCELERATE_DEBUG_MODE" in os.environ:  # before the script's next line
    import_module("trainkit.launch.starting").watch_cuda()

if os.environ.get("TRAINKIT_AS"):  # the process that started this one has opened a door
    import_module("trainkit.names.doors").open_all(os.environ["TRAINKIT_AS"])


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing trainkit costs next to nothing."""
    if name in _PLACES:
        value = globals()[name] = getattr(import_module(_PLACES[name]), name)
        return value
    if (module := submodule(globals(), name)) is not None:
        return module
    raise absent("trainkit", name, __all__)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
