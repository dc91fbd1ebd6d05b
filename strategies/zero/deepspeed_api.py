"""Imports DeepSpeed when it is needed, without its log output, and sets it up for the processes and the device of the run."""

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

# PyTorch has renamed two collectives and warns about the old names, which DeepSpeed calls.
_RENAMED = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}


def require() -> None:
    """Check that DeepSpeed is installed, without importing it, which takes half a second.

    Raises:
        MissingPackageError: it is not; the message has the command that installs it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingPackageError(
            "ZeRO needs DeepSpeed, which is not installed. Install it: pip install 'trainkit-torch[deepspeed]'   (Linux)"
        )


class Session:
    """DeepSpeed from the set-up to the tear-down of a run.

    Args:
        world: the processes; if there are several, their process group is already initialized.
        device: the device of this process.

    Attributes:
        package: the module `deepspeed`.
        collectives: counts the collectives of this process.

    Raises:
        ConfigurationError: this process already uses DeepSpeed on another kind of device.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        local_rank = device.index if device.index is not None else world.local_rank
        self._stack = ExitStack()
        self.collectives = world.collectives
        self.package = imported(device)
        if world.size == 1 and not dist.is_initialized():
            self._stack.enter_context(alone("nccl" if device.type == "cuda" else "gloo"))
            self._stack.callback(self._forget)
        self._stack.enter_context(variable("LOCAL_RANK", str(local_rank)))  # DeepSpeed reads it several times
        with quiet():
            self._enter()

        _exit_without_cleanup()

    def _enter(self) -> None:
        """Let DeepSpeed use PyTorch's process group."""
        package = self.package
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        # compiling it takes half a minute; it is for reductions between processes of one node without a GPU
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        package.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        for attribute, name in _RENAMED.items():
            if hasattr(dist, name):
                setattr(comm.cdb, attribute, getattr(dist, name))

    def _forget(self) -> None:
        """Remove DeepSpeed's references to the process group, which is destroyed next."""
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        comm.cdb = None
        importlib.import_module("deepspeed.utils.groups")._release_process_group_references()

    @contextmanager
    def checkpointing(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Context manager that configures `deepspeed.checkpointing` with these arguments of `configure`."""
        module: Any = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
        names = ("deepspeed_checkpointing_enabled", *(name for name in vars(module) if name.isupper()), "mpu", "num_layers")
        before = {name: getattr(module, name) for name in names}
        with quiet():
            module.configure(None, **options)
        try:
            yield
        finally:
            module.reset()
            vars(module).update(before)

    def close(self) -> None:
        """Release all resources of the run."""
        autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None  # else the next run uses it
        self._stack.close()


@cache
def _exit_without_cleanup() -> None:
    """Let the process exit without C++ clean-up when Python has exited, with Python's exit code.

    A library that DeepSpeed loads sometimes aborts during C++ clean-up, and the exit code would be that of a crash.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):  # only glibc has it
        return
    atexit.register(libc.fflush, None)  # writes the output that C has buffered
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def imported(device: torch.device) -> Any:
    """Returns the module `deepspeed`, imported for this kind of device: DeepSpeed selects one at import and keeps it."""
    require()
    before = dict(os.environ)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with quiet():
        package = importlib.import_module("deepspeed")
    if device.type == "cpu":
        for name in os.environ.keys() - before.keys():  # set above, or by DeepSpeed for CUDA
            del os.environ[name]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # the strategy reports what users need
    found = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if found != device.type:
        raise ConfigurationError(
            f"the run is on {device.type!r}, but DeepSpeed in this process is set up for {found!r}, by an earlier run or by "
            f"DS_ACCELERATOR={os.environ.get('DS_ACCELERATOR')!r}. Use one kind of device per process: accelerator={found!r}."
        )
    return package


def supports_float16(device: torch.device) -> bool:
    """Whether DeepSpeed supports float16 on the device."""
    imported(device)
    return bool(importlib.import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported())


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Context manager that sets an environment variable."""
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
    """Context manager that ignores deprecation warnings caused by DeepSpeed, which the user cannot fix."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield
