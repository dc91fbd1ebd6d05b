"""Host memory that is kept from save to save, so that an asynchronous save costs the training step one copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trainkit.checkpoint.tensor_file import TensorFile, check_unchanged

__all__ = ["HostBuffers"]


class HostBuffers:
    """Copies of tensors in host memory, in the layout of the files that will contain them.

    A first copy of some gigabytes spends most of its time on allocating memory; a copy into memory that was used before runs
    at the speed of the memory. For tensors on a CUDA device the memory is page-locked, so that all copies run without a wait
    after each.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._locked: dict[str, weakref.finalize[[Tensor], HostBuffers]] = {}  # file name → function that unlocks its buffer

    @property
    def nbytes(self) -> int:
        """Bytes of allocated host memory."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def copy(
        self,
        files: Mapping[str, tuple[TensorFile, Mapping[str, Tensor]]],
        take: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Mapping[str, memoryview]:
        """Copy every tensor of every file.

        Args:
            files: file name → its layout, and its tensors by name.
            take: returns the values of a tensor; called for all tensors in the order of the files.

        Returns:
            file name → the bytes of its data part, in the memory of this object: valid until the next `copy` or `free`. A
            call for files of the same names and sizes allocates nothing.

        Raises:
            UnsavableError: a tensor does not have the dtype or shape for which its file was planned.
        """
        sizes = {name: file.size - len(file.header) for name, (file, _) in files.items()}
        devices = {t.device for _, tensors in files.values() for t in tensors.values() if t.device.type == "cuda"}
        self._make_room(sizes, lock=bool(devices))
        for name, (file, tensors) in files.items():
            buffer = self._buffers[name]
            for entry in file.entries:
                source = take(tensors[entry.name]).detach()
                check_unchanged(entry, source)  # copy_ would cast and broadcast
                if entry.start < entry.end:
                    target = buffer[entry.start : entry.end].view(entry.dtype).view(entry.shape)
                    target.copy_(source, non_blocking=source.device.type == "cuda")
        for device in devices:  # one wait for all copies; the tensors were written on this stream, too
            torch.cuda.current_stream(device).synchronize()
        return {name: self._buffers[name].numpy().data[:size] for name, size in sizes.items()}

    def free(self) -> None:
        """Free the memory. Views returned by `copy` must not be used any more."""
        self._drop(list(self._buffers))

    def _make_room(self, sizes: Mapping[str, int], lock: bool) -> None:
        """Allocate a buffer for every file that has none, or one that is too small."""
        small = [name for name, size in sizes.items() if name not in self._buffers or self._buffers[name].nbytes < size]
        if not small:
            return
        # Files that are not part of this save may never be written again: free their memory.
        self._drop([name for name in self._buffers if name not in sizes])
        for name in small:
            # State that has grown will probably grow again: allocate a little more.
            spare = sizes[name] // 32 if name in self._buffers else 0
            self._drop([name])
            buffer = torch.empty(sizes[name] + spare, dtype=torch.uint8)
            # torch's own page-locked memory comes in powers of two, up to twice what is needed. If the system does not
            # allow that much locked memory, the copies are slower.
            if lock and buffer.nbytes and int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
                self._locked[name] = weakref.finalize(self, _unlock, buffer)
            self._buffers[name] = buffer

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._locked:
                self._locked.pop(name)()
            self._buffers.pop(name, None)


def _unlock(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
