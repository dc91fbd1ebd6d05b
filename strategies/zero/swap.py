"""Reads and writes ranges of the files in which ZeRO-3 offloads master weights, optimizer state and parameters to NVMe.

DeepSpeed has one file per tensor of a sub-group, and reads all files of a sub-group into memory to update it. A checkpoint
needs one parameter at a time, which is a range of such a file. It reads only this range, so it needs no memory for a sub-group.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.strategies.zero.aio import unreadable, unwritable

__all__ = ["InMemory", "OnDisk", "Shard", "Swap", "gradient_partition", "partition", "swapper", "swapping"]


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
        tensor: the tensor.
        first: start of the range.
        last: end of the range.
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
        path: path of the file.
        dtype: dtype of its elements.
        first: start of the range.
        last: end of the range.
    """

    def __init__(self, path: str, dtype: torch.dtype, first: int, last: int) -> None:
        self._path, self._dtype, self._first, self._count = path, dtype, first, last - first

    def read(self) -> Tensor:
        """See `Shard.read`.

        Raises:
            OffloadError: the file is missing, or cannot be read.
        """
        found = torch.empty(self._count, dtype=self._dtype)
        left = memoryview(found.view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(self._first * found.element_size())
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise unreadable(self._path) from error
        if left:
            raise unreadable(self._path)
        return found

    def write(self, values: Tensor) -> None:
        """See `Shard.write`.

        Raises:
            OffloadError: the file is missing, or the disk is full.
        """
        given = values.detach().reshape(-1).to("cpu", self._dtype).contiguous()
        try:
            with open(self._path, "r+b") as file:
                file.seek(self._first * given.element_size())
                file.write(given.view(torch.uint8).numpy().data)
        except OSError as error:
            raise unwritable(self._path, error) from error


class Swap:
    """The sub-groups of a stage 3 engine with master weights and optimizer state on NVMe.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero, self._swapper = zero, zero.optimizer_swapper

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
        info.tensors, info.has_state_tensors = info.tensors[:1], False
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
    found: Tensor = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id]
    return found


def partition(parameter: Any, count: int) -> Shard:
    """Returns the first `count` elements of this process's shard of a parameter, in memory or on disk."""
    held = parameter.ds_tensor
    if held.final_location == "nvme":
        disk = parameter.nvme_swapper  # has the dtype; the tensor in memory is only a placeholder
        return OnDisk(disk.get_path(parameter, True), disk.dtype, 0, count)
    return InMemory(held, 0, count)


# --------------------------------------------------------------------------------------------------- buffers on demand


_FAR = 2**40  # distance between two buffers in elements, for DeepSpeed; larger than any parameter


class _Buffers:
    """Page-locked buffers that are allocated on demand, in any number and size. DeepSpeed treats them as one long tensor."""

    def __init__(self, handle: Any, dtype: torch.dtype) -> None:
        self._handle, self._example = handle, torch.empty(1, dtype=dtype)
        self._made: dict[int, Tensor] = {}

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        """Returns the first `length` elements of the buffer at `start`, which must not be in use."""
        number = start // _FAR
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

    Args:
        config: the DeepSpeed configuration.
        dtype: the dtype of the parameters.
    """
    module: Any = importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_param_swapper")
    parsed: Any = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(config)

    class Growing(module.AsyncPartitionedParameterSwapper):  # type: ignore[misc]
        def _configure_aio(self, ds_config: Any) -> None:
            wanted = ds_config.zero_config.offload_param
            ahead, wanted.buffer_count, wanted.buffer_size = wanted.buffer_count, 1, 1
            super()._configure_aio(ds_config)
            self.aio_read_handle.free_cpu_locked_tensor(self.buffers)
            self.buffers: Any = _Buffers(self.aio_read_handle, self.dtype)
            self.elements_per_buffer = self.aligned_elements_per_buffer = _FAR
            self.available_buffer_ids, self._made = [*range(ahead)], ahead  # the buffers for reading ahead

        def _make(self, count: int) -> None:
            while len(self.available_buffer_ids) < count:
                self.available_buffer_ids.append(self._made)
                self._made += 1

        def get_buffer(self, param: Any, numel: int) -> Tensor:
            self._make(1)
            found: Tensor = super().get_buffer(param, numel)
            return found

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
