"""Offload to NVMe: checks of the disk, one folder per process, checked reads and writes, and ranges of the files."""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import importlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.errors import ConfigurationError, OffloadError

__all__ = [
    "Folder",
    "InMemory",
    "OnDisk",
    "Shard",
    "check_path",
    "check_space",
    "disk_checks",
    "gradient_partition",
    "partition",
    "swapper",
    "swapping",
]


_PREFIX = "trainkit-swap-"
_BLOCK_BYTES = 4096


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that DeepSpeed can write to a folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigurationError(f"nvme_path={str(path)!r} is not a folder. Create one on a local disk: mkdir -p '{path}'")
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} is not writable ({error.strerror}). Use a writable folder on a local disk."
        ) from error
    os.close(descriptor)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # direct I/O needs memory that is aligned to pages
            descriptor = os.open(name, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
            try:
                os.write(descriptor, block)
            finally:
                os.close(descriptor)
    except OSError as error:
        why = "its file system has no direct I/O" if error.errno == errno.EINVAL else error.strerror
        raise ConfigurationError(
            f"DeepSpeed cannot write to nvme_path={str(path)!r}: {why}. Use a folder on a local disk (ext4, xfs)."
        ) from error
    finally:
        os.unlink(name)


def check_space(path: Path, on_disk: int, pinned: int, processes: int) -> None:
    """Check before the first write that there is enough disk space and page-locked memory.

    Args:
        on_disk: Number of bytes that each process of this node writes.
        pinned: Number of bytes of page-locked memory that this process needs.
        processes: Number of processes of this node.
    """
    free = shutil.disk_usage(path).free
    if on_disk * processes > free:
        raise ConfigurationError(
            f"offload to {path.parent} needs {_size(on_disk * processes)} ({processes} processes with {_size(on_disk)} "
            f"each), but only {_size(free)} are free. Free disk space, or use nvme_path on another disk."
        )
    if not _can_lock(pinned):
        raise ConfigurationError(
            f"offload to NVMe needs {_size(pinned)} of page-locked memory in each process, but the system does not allow that "
            "much. Raise the limit (ulimit -l unlimited; in a container --ulimit memlock=-1), or use smaller buffers: "
            "ZeROStrategy(..., sub_group_size=10_000_000)."
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _can_lock(size: int) -> bool:
    """Whether `size` bytes of memory can be page-locked; if not, DeepSpeed would crash."""
    system = ctypes.CDLL(None, use_errno=True)
    try:
        memory = mmap.mmap(-1, max(size, _BLOCK_BYTES))
    except OSError:
        return False
    with memory:
        held = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(held))
        locked: bool = system.mlock(address, ctypes.c_size_t(size)) == 0
        if locked:
            system.munlock(address, ctypes.c_size_t(size))
        del held  # Otherwise the memory could not be freed.
    return locked


class Folder:
    """A folder under `nvme_path` for this process only, because DeepSpeed uses the same file names in every process.

    Creating one also removes the folders of killed processes.

    Args:
        base: `nvme_path`.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        for lock in Path(base).glob(f"{_PREFIX}*.lock"):
            _remove_abandoned(lock)
        while True:
            self._file, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".lock", dir=base)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if _same_file(self._file, name):  # If not, another process removed the file before it was locked.
                break
            os.close(self._file)
        self._lock = Path(name)
        self._process = os.getpid()
        self.path = self._lock.with_suffix("")
        self.path.mkdir()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder and its files."""
        atexit.unregister(self.close)
        if os.getpid() == self._process:  # A forked process must not remove them.
            _remove(self._lock)
            os.close(self._file)


def _same_file(descriptor: int, name: str) -> bool:
    """Whether `name` is still the path of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name))
    except FileNotFoundError:
        return False


def _remove_abandoned(lock: Path) -> None:
    """Remove a folder whose process has exited."""
    with suppress(OSError):  # it is in use, or belongs to another user
        descriptor = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(descriptor, str(lock)):
                _remove(lock)
        finally:
            os.close(descriptor)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------- checked reads and writes


_MODULES = ("optimizer_utils", "partitioned_param_swapper")
# Sizes of reads and writes are multiples of it. Disks have blocks of 512 or 4096 bytes; DeepSpeed uses 1024.
_ALIGNED_BYTES = 4096
_MARK = 0x7FB5A3C1  # As float32 it is a NaN that no arithmetic returns.


class _Handle:
    """Wraps a handle of DeepSpeed for asynchronous reads and writes, and checks its operations."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._reads: list[tuple[Tensor, str]] = []
        self._known: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Start to write a tensor to a file.

        Raises:
            OffloadError: The disk is full.
        """
        if path not in self._known:
            _allocate(path, offset + buffer.numel() * buffer.element_size())
            self._known.add(path)
        return int(self._handle.async_pwrite(buffer, path, offset))

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Start to read a tensor from a file.

        Raises:
            OffloadError: The file does not exist, or is too short.
        """
        marked = buffer.view(-1).view(torch.int32)[:: _ALIGNED_BYTES // 4]
        marked.fill_(_MARK)
        self._reads.append((marked, path))
        result = int(self._handle.async_pread(buffer, path, offset))
        if result != 0:
            raise read_error(path)
        return result

    def wait(self) -> int:
        """Wait for all operations that were started.

        Raises:
            OffloadError: A read failed.
        """
        count = int(self._handle.wait())
        reads, self._reads = self._reads, []
        for marked, path in reads:
            if bool((marked == _MARK).any()):
                raise read_error(path)
        return count


def read_error(path: str) -> OffloadError:
    """Returns the error for a file that cannot be read."""
    return OffloadError(
        f"{path} cannot be read: the file was removed, or the disk of nvme_path failed (see dmesg). "
        "Resume from the last checkpoint: fit(..., ckpt_path='last'). If the disk failed, use nvme_path on another disk."
    )


def write_error(path: str, error: OSError, size: int = 0) -> OffloadError:
    """Returns the error for `size` bytes that cannot be written."""
    if error.errno != errno.ENOSPC:
        return OffloadError(
            f"{path} cannot be written: {error.strerror}. Check the disk, or use nvme_path on another disk, and resume from "
            "the last checkpoint: fit(..., ckpt_path='last')."
        )
    return OffloadError(
        f"no space for {size / 2**20:.1f} MiB in {os.path.dirname(path)}: the disk of nvme_path is full. Free disk space, or "
        "use nvme_path on another disk, and resume from the last checkpoint: fit(..., ckpt_path='last')."
    )


def _allocate(path: str, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that allocates blocks at each write
            return
        raise write_error(path, error, size) from error
    finally:
        os.close(descriptor)


@contextmanager
def disk_checks() -> Iterator[None]:
    """Context manager in which DeepSpeed creates handles with these checks."""
    modules = [importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in _MODULES]
    users = [importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper"), modules[1]]
    aligned, builder = [module.AIO_ALIGNED_BYTES for module in modules], modules[1].AsyncIOBuilder

    def handle(**options: Any) -> _Handle:
        return _Handle(builder().load(verbose=False).aio_handle(**options))

    class Builder:
        def load(self, verbose: bool = False) -> Any:
            return SimpleNamespace(aio_handle=handle)

    try:
        for module in modules:
            module.AIO_ALIGNED_BYTES = _ALIGNED_BYTES  # type: ignore[attr-defined]
        for module in users:
            module.AsyncIOBuilder = Builder  # type: ignore[attr-defined]
        yield
    finally:
        for module, before in zip(modules, aligned, strict=True):
            module.AIO_ALIGNED_BYTES = before  # type: ignore[attr-defined]
        for module in users:
            module.AsyncIOBuilder = builder  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ ranges of files


class Shard(Protocol):
    """The flattened elements of a tensor that this process holds."""

    def read(self) -> Tensor:
        """Returns the elements."""
        ...

    def write(self, values: Tensor) -> None:
        """Replace the elements by the same number of new ones."""
        ...


class InMemory:
    """A range of a tensor in memory.

    Args:
        first: Start of the range.
        last: End of the range.
    """

    def __init__(self, tensor: Tensor, first: int, last: int) -> None:
        self._tensor = tensor.detach().view(-1)[first:last]

    def read(self) -> Tensor:
        """See `Shard.read`."""
        return self._tensor

    def write(self, values: Tensor) -> None:
        """See `Shard.write`."""
        self._tensor.copy_(values)


class OnDisk:
    """A range of elements in a file.

    Args:
        dtype: Dtype of its elements.
        first: Start of the range.
        last: End of the range.
    """

    def __init__(self, path: str, dtype: torch.dtype, first: int, last: int) -> None:
        self._path = path
        self._dtype = dtype
        self._first = first
        self._count = last - first

    def read(self) -> Tensor:
        """See `Shard.read`.

        Raises:
            OffloadError: The file is missing, or cannot be read.
        """
        elements = torch.empty(self._count, dtype=self._dtype)
        left = memoryview(elements.view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(self._first * elements.element_size())
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise read_error(self._path) from error
        if left:
            raise read_error(self._path)
        return elements

    def write(self, values: Tensor) -> None:
        """See `Shard.write`.

        Raises:
            OffloadError: The file is missing, or the disk is full.
        """
        elements = values.detach().reshape(-1).to("cpu", self._dtype).contiguous()
        try:
            with open(self._path, "r+b") as file:
                file.seek(self._first * elements.element_size())
                file.write(elements.view(torch.uint8).numpy().data)
        except OSError as error:
            raise write_error(self._path, error) from error


class Swap:
    """The sub-groups of a stage 3 engine with master weights and optimizer state on NVMe."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._swapper = zero.optimizer_swapper

    def keep_gradients(self) -> None:
        """Keep gradients in memory, where they are anyway, until their sub-group is updated.

        DeepSpeed would also write them to disk, and read them back into unaligned memory, which direct I/O does not support:
        for most models the read would silently do nothing.
        """
        zero, write = self._zero, self._zero._offload_grad_partition_at_boundary

        def keep(parameter: Any, gradient: Tensor, *lists: Any) -> None:
            number, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            if not self.has(number):
                write(parameter, gradient, *lists)
                return
            zero.norm_for_param_grads[zero.get_param_id(parameter)] = zero._constant_buffered_norm2(gradient)
            self._info(number).unswapped_gradients[offset] = gradient_partition(zero, parameter)

        zero._offload_grad_partition_at_boundary = keep

    def has(self, number: int) -> bool:
        """Whether a sub-group is on disk; small ones are not."""
        return bool(self._zero._swappable_optimizer_subgroup(number))

    def shard(self, tensor: Tensor, number: int, first: int, last: int) -> Shard:
        """Returns a range of a sub-group's master weights, or of a tensor of its optimizer state."""
        for held in self._info(number).tensors:
            if held.compute_tensor is tensor:
                return OnDisk(held.swap_path, tensor.dtype, first, last)
        return InMemory(tensor, first, last)

    @contextmanager
    def resident(self, number: int) -> Iterator[None]:
        """Context manager that keeps a sub-group without optimizer state in memory; afterwards both are offloaded to disk."""
        info = self._info(number)
        info.tensors = info.tensors[:1]
        info.has_state_tensors = False
        self._zero._optimizer_states_and_gradient_swap_in(number)
        yield
        self._zero._optimizer_states_and_gradient_swap_out(number)

    def _info(self, number: int) -> Any:
        return self._swapper.swap_params_info[self._zero.fp32_partitioned_groups_flat[number].ds_id]


def swapping(zero: Any) -> Swap | None:
    """Returns the sub-groups on disk of DeepSpeed's optimizer; `None` if it is not offloaded to NVMe."""
    if not getattr(zero, "swap_optimizer", False):
        return None
    swap = Swap(zero)
    swap.keep_gradients()
    return swap


def gradient_partition(zero: Any, parameter: Any) -> Tensor:
    """Returns this process's shard of a gradient in stage 3, between the backward pass and the optimizer step."""
    shard: Tensor = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id]
    return shard


def partition(parameter: Any, count: int) -> Shard:
    """Returns the first `count` elements of this process's shard of a parameter, in memory or on disk."""
    held = parameter.ds_tensor
    if held.final_location == "nvme":
        disk = parameter.nvme_swapper  # has the dtype; the tensor in memory is only a placeholder
        return OnDisk(disk.get_path(parameter, True), disk.dtype, 0, count)
    return InMemory(held, 0, count)


# --------------------------------------------------------------------------------------------------- buffers on demand


# The distance between two buffers, for DeepSpeed; larger than any parameter.
_FAR_ELEMENTS = 2**40


class _Buffers:
    """Page-locked buffers that are allocated on demand, in any number and size. DeepSpeed treats them as one long tensor."""

    def __init__(self, handle: Any, dtype: torch.dtype) -> None:
        self._handle = handle
        self._example = torch.empty(1, dtype=dtype)
        self._made: dict[int, Tensor] = {}

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        """Returns the first `length` elements of the buffer at `start`, which must not be in use."""
        number = start // _FAR_ELEMENTS
        if number in self._made and self._made[number].numel() < length:
            self._handle.free_cpu_locked_tensor(self._made.pop(number))
        if number not in self._made:
            self._made[number] = self._handle.new_cpu_locked_tensor(length, self._example)
        return self._made[number].narrow(dimension, 0, length)

    def free(self) -> None:
        """Free the memory."""
        for buffer in self._made.values():
            self._handle.free_cpu_locked_tensor(buffer)
        self._made = {}


def swapper(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Returns DeepSpeed's reader and writer of parameters, with buffers that are allocated on demand.

    In DeepSpeed the user has to guess the number of buffers. It fails if a layer has more parameters, or if all parameters of a
    model are gathered together.
    """
    module: Any = importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_param_swapper")
    parsed: Any = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(config)

    class Growing(module.AsyncPartitionedParameterSwapper):  # type: ignore[misc]
        def _configure_aio(self, ds_config: Any) -> None:
            offload = ds_config.zero_config.offload_param
            ahead = offload.buffer_count
            offload.buffer_count = offload.buffer_size = 1
            super()._configure_aio(ds_config)
            self.aio_read_handle.free_cpu_locked_tensor(self.buffers)
            self.buffers: Any = _Buffers(self.aio_read_handle, self.dtype)
            self.elements_per_buffer = self.aligned_elements_per_buffer = _FAR_ELEMENTS
            self.available_buffer_ids = [*range(ahead)]  # The buffers for reading ahead.
            self._made = ahead

        def _make(self, count: int) -> None:
            while len(self.available_buffer_ids) < count:
                self.available_buffer_ids.append(self._made)
                self._made += 1

        def get_buffer(self, param: Any, numel: int) -> Tensor:
            self._make(1)
            buffer: Tensor = super().get_buffer(param, numel)
            return buffer

        def swap_in(self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
            if swap_in_buffers is None:
                params = [*{param.ds_id: param for param in params}.values()]  # reading ahead may list a parameter twice
                self._make(len(params))
            super().swap_in(params, async_op, swap_in_buffers)

        def close(self) -> None:
            self.buffers.free()
            if self.partitioned_swap_buffer is not None:
                self.aio_write_handle.free_cpu_locked_tensor(self.partitioned_swap_buffer)

    return Growing(parsed, dtype)
