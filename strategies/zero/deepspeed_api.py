"""DeepSpeed as the strategies use it: imported when it is needed, quiet, on the processes and the device of the run."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.launch.process_group import alone

__all__ = ["Session", "imported", "quiet", "require", "supports_float16", "variable"]

# torch has given two collectives new names, and warns of the old ones, which DeepSpeed calls.
_RENAMED = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}


def require() -> None:
    """Refuse at once where DeepSpeed is not installed; it is not imported, which takes half a second.

    Raises:
        MissingPackageError: with the command that installs it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingPackageError(
            "ZeRO runs on DeepSpeed, which is not installed. Install it: pip install 'trainkit-torch[deepspeed]'   (Linux)"
        )


class Session:
    """DeepSpeed between the set-up and the tear-down of a run.

    Args:
        world: the processes; torch's process group of several exists already.
        device: of this process.

    Attributes:
        package: ``deepspeed``.
        waits: the collectives of this process.

    Raises:
        ConfigurationError: this process has begun with DeepSpeed on another kind of device.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        local_rank = device.index if device.index is not None else world.local_rank
        self._stack = ExitStack()
        self.collectives = world.collectives
        self.package = imported(device)
        if world.size == 1 and not dist.is_initialized():
            self._stack.enter_context(alone("nccl" if device.type == "cuda" else "gloo"))
            self._stack.callback(self._forget)
        self._stack.enter_context(variable("LOCAL_RANK", str(local_rank)))  # DeepSpeed reads it now and again
        with quiet():
            self._enter()

        _leave_at_once()

    def _enter(self) -> None:
        """Let DeepSpeed use torch's process group."""
        package = self.package
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        # it would be compiled for half a minute, for reductions between processes of one machine without a GPU
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        package.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        for attribute, name in _RENAMED.items():
            if hasattr(dist, name):
                setattr(comm.cdb, attribute, getattr(dist, name))

    def _forget(self) -> None:
        """Let DeepSpeed forget the group, which is destroyed after this."""
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        comm.cdb = None
        importlib.import_module("deepspeed.utils.groups")._release_process_group_references()

    @contextmanager
    def checkpointing(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Within it ``deepspeed.checkpointing.checkpoint`` works as these arguments of its ``configure`` say."""
        room: Any = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
        names = ("deepspeed_checkpointing_enabled", *(name for name in vars(room) if name.isupper()), "mpu", "num_layers")
        before = {name: getattr(room, name) for name in names}
        with quiet():
            room.configure(None, **options)
        try:
            yield
        finally:
            room.reset()
            vars(room).update(before)

    def close(self) -> None:
        """Give back what the run took."""
        autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None  # else the next run has it too
        self._stack.close()


@cache
def _leave_at_once() -> None:
    """Let the process end when Python has ended, with its exit code.

    Now and then what DeepSpeed has loaded aborts when C++ clears up behind it: the code would be that of a crash.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):  # which is glibc's
        return
    atexit.register(libc.fflush, None)  # what C has not written yet
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def imported(device: torch.device) -> Any:
    """The package, for this kind of device: it chooses one when it is imported, and keeps it."""
    require()
    before = dict(os.environ)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with quiet():
        package = importlib.import_module("deepspeed")
    if device.type == "cpu":
        for name in os.environ.keys() - before.keys():  # what was set above, and what DeepSpeed sets for CUDA
            del os.environ[name]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # what it says is said by the strategy, or of no use
    found = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if found != device.type:
        raise ConfigurationError(
            f"the run is on {device.type!r}, and DeepSpeed in this process works on {found!r}: it was used on that before, or "
            f"DS_ACCELERATOR={os.environ.get('DS_ACCELERATOR')!r}. Use one kind of device in a process: accelerator={found!r}."
        )
    return package


def supports_float16(device: torch.device) -> bool:
    """Whether DeepSpeed computes in float16 there."""
    imported(device)
    return bool(importlib.import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported())


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Within it an environment variable has another value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def quiet() -> Iterator[None]:
    """Within it nothing is said of what DeepSpeed does of old: it is not for the user to mend."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield
