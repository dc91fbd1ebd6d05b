"""What ZeRO-3 keeps on a disk: files of masters, of optimizer state and of parameters, read and written in pieces.

DeepSpeed has a file for each tensor of a sub-group, and brings them into memory to update that sub-group. A checkpoint takes
a parameter at a time, which is a range of such a file: it is read from there, and memory does not grow with the sub-group.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.strategies.zero.aio import unreadable, unwritable

__all__ = ["InMemory", "OnDisk", "Part", "Swap", "gradient_partition", "partition", "swapper", "swapping"]


class Part(Protocol):
    """Elements that this process has of a tensor, flat."""

    def read(self) -> Tensor:
        """The elements."""
        ...

    def write(self, values: Tensor) -> None:
        """Give them others, as many."""
        ...


class InMemory:
    """A range of a tensor.

    Args:
        tensor: flat.
        first: from there.
        last: to there.
    """

    def __init__(self, tensor: Tensor, first: int, last: int) -> None:
        self._tensor = tensor.detach().view(-1)[first:last]

    def read(self) -> Tensor:
        """See :meth:`Part.read`."""
        return self._tensor

    def write(self, values: Tensor) -> None:
        """See :meth:`Part.write`."""
        self._tensor.copy_(values)


class OnDisk:
    """A range of a file of elements.

    Args:
        path: the file.
        dtype: of its elements.
        first: from there.
        last: to there.
    """

    def __init__(self, path: str, dtype: torch.dtype, first: int, last: int) -> None:
        self._path, self._dtype, self._first, self._count = path, dtype, first, last - first

    def read(self) -> Tensor:
        """See :meth:`Part.read`.

        Raises:
            OffloadError: the file has gone, or cannot be read.
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
        """See :meth:`Part.write`.

        Raises:
            OffloadError: the file has gone, or the disk is full.
        """
        given = values.detach().reshape(-1).to("cpu", self._dtype).contiguous()
        try:
            with open(self._path, "r+b") as file:
                file.seek(self._first * given.element_size())
                file.write(given.view(torch.uint8).numpy().data)
        except OSError as error:
            raise unwritable(self._path, error) from error


class Swap:
    """The sub-groups of an engine of stage 3 whose masters and optimizer state are on a disk.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero, self._swapper = zero, zero.optimizer_swapper

    def keep_gradients(self) -> None:
        """Leave gradients in memory, where they are anyhow, until their sub-group is updated.

        DeepSpeed would also write them to the disk and read them from there, into memory that begins anywhere, which direct I/O
        does not do: of most models it would read nothing, and say nothing.
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
        """Whether a sub-group is on the disk; small ones are not."""
        return bool(self._zero._swappable_optimizer_subgroup(number))

    def part(self, tensor: Tensor, number: int, first: int, last: int) -> Part:
        """A range of a sub-group's masters or of a tensor of its state."""
        for held in self._info(number).tensors:
            if held.compute_tensor is tensor:
                return OnDisk(held.swap_path, tensor.dtype, first, last)
        return InMemory(tensor, first, last)

    @contextmanager
    def resident(self, number: int) -> Iterator[None]:
        """Within it a sub-group without state is in memory; the state that it gets there goes with it to the disk."""
        info = self._info(number)
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        self._zero._optimizer_states_and_gradient_swap_in(number)
        yield
        self._zero._optimizer_states_and_gradient_swap_out(number)

    def _info(self, number: int) -> Any:
        return self._swapper.swap_params_info[self._zero.fp32_partitioned_groups_flat[number].ds_id]


def swapping(zero: Any) -> Swap | None:
    """What an optimizer of DeepSpeed's has on a disk; ``None``: nothing."""
    if not getattr(zero, "swap_optimizer", False):
        return None
    swap = Swap(zero)
    swap.keep_gradients()
    return swap


def gradient_partition(zero: Any, parameter: Any) -> Tensor:
    """This process's part of a parameter's gradient in stage 3, between its backward pass and the update."""
    found: Tensor = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id]
    return found


def partition(parameter: Any, count: int) -> Part:
    """The first ``count`` elements of this process's partition of a parameter, wherever it is."""
    held = parameter.ds_tensor
    if held.final_location == "nvme":
        disk = parameter.nvme_swapper  # the partition's own dtype is that of what stands in for it now
        return OnDisk(disk.get_path(parameter, True), disk.dtype, 0, count)
    return InMemory(held, 0, count)


# --------------------------------------------------------------------------------------------------- buffers on demand


_FAR = 2**40  # elements from one buffer to the next, as DeepSpeed sees them: more than any parameter has


class _Buffers:
    """Page-locked buffers, as many and as large as are asked for; to DeepSpeed it looks like one long tensor."""

    def __init__(self, handle: Any, dtype: torch.dtype) -> None:
        self._handle, self._example = handle, torch.empty(1, dtype=dtype)
        self._made: dict[int, Tensor] = {}

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        """The first ``length`` elements of the buffer that begins at ``start``, which nobody uses."""
        number = start // _FAR
        if number in self._made and self._made[number].numel() < length:
            self._handle.free_cpu_locked_tensor(self._made.pop(number))
        if number not in self._made:
            self._made[number] = self._handle.new_cpu_locked_tensor(length, self._example)
        return self._made[number].narrow(dimension, 0, length)

    def free(self) -> None:
        """Give the memory back."""
        for buffer in self._made.values():
            self._handle.free_cpu_locked_tensor(buffer)
        self._made = {}


def swapper(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """DeepSpeed's reader and writer of parameters, with as many buffers as are in use at a time.

    DeepSpeed's own has a number of them that the user has to guess, and fails where a layer, or whoever gathers all parameters
    of a model, needs more.

    Args:
        config: DeepSpeed's.
        dtype: of the parameters.
    """
    room: Any = importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_param_swapper")
    parsed: Any = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(config)

    class Growing(room.AsyncPartitionedParameterSwapper):  # type: ignore[misc]
        def _configure_aio(self, ds_config: Any) -> None:
            wanted = ds_config.zero_config.offload_param
            ahead, wanted.buffer_count, wanted.buffer_size = wanted.buffer_count, 1, 1
            super()._configure_aio(ds_config)
            self.aio_read_handle.free_cpu_locked_tensor(self.buffers)
            self.buffers: Any = _Buffers(self.aio_read_handle, self.dtype)
            self.elements_per_buffer = self.aligned_elements_per_buffer = _FAR
            self.available_buffer_ids, self._made = [*range(ahead)], ahead  # those are what is read ahead

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
                params = [*{param.ds_id: param for param in params}.values()]  # what is read ahead may be used twice
                self._make(len(params))
            super().swap_in(params, async_op, swap_in_buffers)

        def close(self) -> None:
            self.buffers.free()
            if self.partitioned_swap_buffer is not None:
                self.aio_write_handle.free_cpu_locked_tensor(self.partitioned_swap_buffer)

    return Growing(parsed, dtype)
