"""Imports DeepSpeed when it is needed, without its log output, sets it up for a run, and compiles its C++ extensions."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.launch.joining import single_process_group

__all__ = [
    "Session",
    "import_deepspeed",
    "load",
    "quiet",
    "require",
    "require_async_io",
    "require_compiler",
    "supports_float16",
    "variable",
]


# PyTorch has renamed two collectives and warns about the old names, which DeepSpeed calls.
_RENAMED = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}


def require() -> None:
    """Check that DeepSpeed is installed, without importing it, which takes half a second."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingPackageError(
            "ZeRO needs DeepSpeed, which is not installed. Install it: pip install 'trainkit-torch[deepspeed]'   (Linux)"
        )


class Session:
    """DeepSpeed from the set-up to the tear-down of a run.

    Args:
        world: The processes; if there are several, their process group is already initialized.

    Attributes:
        package: The module `deepspeed`.
        collectives: Counts the collectives of this process.

    Raises:
        ConfigurationError: This process already uses DeepSpeed on another kind of device.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        local_rank = device.index if device.index is not None else world.local_rank
        self._stack = ExitStack()
        self.collectives = world.collectives
        self.package = import_deepspeed(device)
        if world.size == 1 and not dist.is_initialized():
            self._stack.enter_context(single_process_group("nccl" if device.type == "cuda" else "gloo"))
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
    if not hasattr(libc, "on_exit"):  # Only glibc has this function.
        return
    atexit.register(libc.fflush, None)  # writes the output that C has buffered
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def import_deepspeed(device: torch.device) -> Any:
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
    kind = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if kind != device.type:
        raise ConfigurationError(
            f"the run is on {device.type!r}, but DeepSpeed in this process is set up for {kind!r}, by an earlier run or by "
            f"DS_ACCELERATOR={os.environ.get('DS_ACCELERATOR')!r}. Use one kind of device per process: accelerator={kind!r}."
        )
    return package


def supports_float16(device: torch.device) -> bool:
    """Whether DeepSpeed supports float16 on the device."""
    import_deepspeed(device)
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


# ------------------------------------------------------------------------------------------------------- C++ extensions


# A compilation without a new file for this time counts as abandoned.
_ABANDONED_SECONDS = 600.0
_MARK = "trainkit"  # file next to PyTorch's lock while a process of trainkit holds the lock
_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def require_async_io() -> None:
    """Check that DeepSpeed's extension for offload to NVMe can be compiled."""
    if _prebuilt("async_io"):
        return
    if not _links(require_compiler("offload to NVMe")):
        raise MissingPackageError(
            "offload to NVMe needs libaio with its headers, which is not installed. "
            "Install it: apt install libaio-dev   (Debian, Ubuntu), dnf install libaio-devel   (Fedora)"
        )


def require_compiler(what: str, otherwise: str = "set CXX") -> str:
    """Returns the command of the C++ compiler.

    Args:
        what: The feature that needs it, for the message.
        otherwise: Another fix for the message.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise MissingPackageError(
            f"{what} needs a C++ compiler, and {compiler!r} is not installed. "
            f"Install one: apt install g++   (Debian, Ubuntu), dnf install gcc-c++   (Fedora); or {otherwise}."
        )
    return compiler


def _links(compiler: str) -> bool:
    """Whether a program that uses libaio compiles and links."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(compiler), "-x", "c++", "-", "-o", f"{folder}/program", *flags[0], *flags[1], "-laio"]
        done = subprocess.run(command, input=_PROGRAM, text=True, capture_output=True, check=False)
    return done.returncode == 0


def _prebuilt(name: str) -> bool:
    """Whether the extension was compiled when DeepSpeed was installed."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    return any(Path(spec.origin).parent.glob(f"ops/*/{name}_op*.so"))


def load(builder: str, *names: str) -> None:
    """Compile and load an extension of DeepSpeed. The first process of the machine compiles; the others wait.

    Args:
        builder: Name of a class in `deepspeed.ops.op_builder`.
        *names: Names of the extensions that it compiles.
    """
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    tools: Any = importlib.import_module("torch.utils.cpp_extension")
    with variable("PATH", os.pathsep.join([*_ninja(), os.environ.get("PATH", "")])), quiet():
        folders = [] if _prebuilt(names[-1]) else [Path(tools._get_build_directory(name, False)) for name in names]
        with _exclusive(folders[-1].parent / "trainkit.lock" if folders else None):
            for folder in folders:
                _clear(folder)
                (folder / _MARK).touch()
            if folders and not any(folders[-1].glob("*.so")):
                notice(f"compiling DeepSpeed's {names[-1]}. This takes minutes, once; the result is in {folders[-1]}", True)
            try:
                getattr(builders, builder)().load(verbose=False)
            finally:
                for folder in folders:
                    (folder / _MARK).unlink(missing_ok=True)


def _ninja() -> list[str]:
    """Folders with DeepSpeed's ninja, so that the user does not have to activate the virtual environment."""
    with suppress(ImportError):
        return [importlib.import_module("ninja").BIN_DIR]
    return [str(Path(sys.executable).parent)]


@contextmanager
def _exclusive(path: Path | None) -> Iterator[None]:
    """Context manager that holds a lock, so that no other process of trainkit compiles."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        with suppress(OSError):  # a file system without locks; PyTorch has its own lock
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear(folder: Path) -> None:
    """Remove the lock of a killed process, for which PyTorch would wait forever.

    If another program holds the lock, wait as long as it writes new files.
    """
    lock, noticed, newest = folder / "lock", False, time.time()
    while lock.exists():
        with suppress(FileNotFoundError):
            newest = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
        if (folder / _MARK).exists() or time.time() - newest > _ABANDONED_SECONDS:
            lock.unlink(missing_ok=True)
        elif not noticed:
            notice(f"waiting for another program that compiles in {folder}. If there is none, run: rm {lock}", True)
            noticed = True
        time.sleep(0.1)
