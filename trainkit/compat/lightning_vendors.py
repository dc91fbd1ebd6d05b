"""Names that other packages import from Lightning: base classes, and functions that are private there.

They exist behind the door only; `vendors` in `lightning.json` says in which modules. Otherwise they are errors that say what to
use.
"""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from trainkit.accelerator.processes import rank_and_size
from trainkit.checkpoint.torch_file import load
from trainkit.distributed.requested_devices import find_device
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import DEVICE, tpu_is_chosen
from trainkit.launch.strategy_choice import read_devices
from trainkit.loggers import base
from trainkit.module.data_module import DataModule
from trainkit.module.train_module import TrainModule
from trainkit.names import use_instead

__all__ = [
    "CUDAAccelerator",
    "ClusterEnvironment",
    "LightningEnvironment",
    "LightningLogger",
    "num_cuda_devices",
    "rank_zero_experiment",
]


# ----------------------------------------------------------------------------------------------------------------- the cluster


class ClusterEnvironment:
    """The base class of objects that know the ranks, for `Trainer(plugins=[...])`.

    trainkit takes the ranks from the environment of the process. A `Trainer` that is given such an object compares them with
    `world_size()`, `global_rank()`, `local_rank()` and `node_rank()`, which a subclass defines.

    Raises:
        ConfigurationError: The class does not define the world size and the rank.
    """

    def __init__(self) -> None:
        if not all(callable(getattr(self, name, None)) for name in ("world_size", "global_rank")):
            raise ConfigurationError(
                f"{type(self).__name__} defines no world_size() and global_rank(), so it decides nothing. Use: "
                f"{use_instead('trainkit.plugins', 'ClusterEnvironment')}"
            )


class LightningEnvironment(ClusterEnvironment):
    """The base class of Ray's `RayLightningEnvironment`."""


class _AcceleratorConnector:
    """What packages ask Lightning's private class, before they have a Trainer: which devices its arguments mean.

    Args:
        accelerator: As of `Trainer`.
        devices: As of `Trainer`.
        others: Further arguments of `Trainer`, which change neither.
    """

    def __init__(self, accelerator: str = "auto", devices: Any = "auto", **others: Any) -> None:
        requested = read_devices(accelerator, devices, None)
        kind = requested.accelerator
        if kind == "auto":
            kind = DEVICE if tpu_is_chosen() else find_device("auto").type
        self._accelerator_flag = "tpu" if kind == DEVICE else kind
        count = requested.per_node
        if count in (None, -1):
            count = max(1, torch.cuda.device_count()) if kind == "cuda" else 1
        indices = list(range(count or 1) if requested.indices is None else requested.indices)
        self._devices_flag: int | list[int] = indices if kind in ("cuda", "mps") else count or 1

    @property
    def is_distributed(self) -> bool:
        """Whether these are several devices."""
        return (self._devices_flag if isinstance(self._devices_flag, int) else len(self._devices_flag)) > 1

    @staticmethod
    def _choose_auto_accelerator() -> str:
        """The kind of device of `accelerator="auto"`."""
        return _AcceleratorConnector()._accelerator_flag


class CUDAAccelerator:
    """What packages ask Lightning's class: whether there are GPUs, and how many.

    Raises:
        ConfigurationError: It is created; the message says what to use.
    """

    def __init__(self) -> None:
        raise ConfigurationError(
            f"CUDAAccelerator cannot be created. Use: {use_instead('trainkit.accelerators', 'CUDAAccelerator')}"
        )

    @staticmethod
    def is_available() -> bool:
        """Whether there is a GPU."""
        return torch.cuda.is_available()

    @staticmethod
    def auto_device_count() -> int:
        """Number of GPUs."""
        return torch.cuda.device_count()


num_cuda_devices = CUDAAccelerator.auto_device_count


# ------------------------------------------------------------------------------------------------------------------- the files


_lazy_load = load


def _load_from_checkpoint(
    cls: type[Any],
    checkpoint_path: str | PathLike[str],
    map_location: Any = None,
    hparams_file: str | PathLike[str] | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **overrides: Any,
) -> Any:
    """`load_from_checkpoint` as a class inherits it, for classes whose own method calls Lightning's function."""
    if hparams_file is not None:
        overrides["hparams_file"] = hparams_file  # the error says what to use
    if issubclass(cls, DataModule):
        return DataModule.load_from_checkpoint.__func__(cls, checkpoint_path, map_location, **overrides)  # type: ignore[attr-defined]
    return TrainModule.load_from_checkpoint.__func__(cls, checkpoint_path, map_location, strict, **overrides)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------------ the logger


class _OfAnyLogger(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, base.Logger) if cls is LightningLogger else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, base.Logger) if cls is LightningLogger else super().__subclasscheck__(subclass)


class LightningLogger(base.Logger, metaclass=_OfAnyLogger):
    """`Logger` of `lightning.pytorch.loggers.logger`, a subclass of Fabric's as in Lightning, so that a class can have both.

    Every logger of trainkit is an instance of it.
    """

    def set_rank(self, rank: int) -> None:
        """Set the rank of this process, when a run begins.

        Raises:
            ConfigurationError: The logger is to store checkpoints, which it expects to be told of.
        """
        if getattr(self, "_log_model", False):
            raise ConfigurationError(
                f"{type(self).__name__}(log_model=...) is not supported: this logger stores files, and a checkpoint of "
                "trainkit is a folder. Remove log_model, and store trainer.checkpoint_callback.best_model_path after fit."
            )
        super().set_rank(rank)


Logger = LightningLogger


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate a logger's `experiment`: on other ranks than 0 it is an object that does nothing.

    Args:
        experiment: The function that returns the experiment of the logger.
    """

    @functools.wraps(experiment)
    def on_rank_zero(self: Any) -> Any:
        return experiment(self) if rank_and_size()[0] == 0 else base.NullExperiment()

    return on_rank_zero


def _add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


def _convert_params(params: Mapping[str, Any] | Namespace | None) -> Mapping[str, Any]:
    return vars(params) if isinstance(params, Namespace) else params or {}


def _sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _uncallable(value) for name, value in params.items()}


def _uncallable(value: Any) -> Any:
    """The value; of a class its name, and of a function what it returns, or else its name."""
    if inspect.isclass(value):
        return value.__name__
    if not callable(value):
        return value
    try:
        result = value()
    except Exception:  # Lightning asks no less of it, and a function with arguments raises.
        return getattr(value, "__name__", None)
    return getattr(value, "__name__", None) if callable(result) else result


def _scan_checkpoints(checkpoint_callback: Any, logged_model_time: Mapping[str, float]) -> list[tuple[float, str, Any, str]]:
    """The files of a `ModelCheckpoint` that are newer than the times that a logger has noted, the oldest first."""
    found = {
        checkpoint_callback.last_model_path: (checkpoint_callback.current_score, "latest"),
        checkpoint_callback.best_model_path: (checkpoint_callback.best_model_score, "best"),
        **{path: (score, "best_k") for path, score in checkpoint_callback.best_k_models.items()},
    }
    files = [(Path(path).stat().st_mtime, path, *each) for path, each in found.items() if Path(path).is_file()]
    return sorted((file for file in files if logged_model_time.get(file[1], -1.0) < file[0]), key=lambda file: file[:2])
