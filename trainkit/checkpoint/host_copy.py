"""Host memory that is kept from save to save, so that an asynchronous save costs the training step one copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trainkit.checkpoint.tensor_file import TensorFile, check_unchanged

__all__ = ["HostBuffers"]


class HostBuffers:
    """Copies of tensors in host memory, laid out as the files that will hold them.

    A fresh copy of some gigabytes spends most of its time on getting memory from the system; into memory that was used
    before it runs at the memory's speed. Memory next to a CUDA device is page-locked, so that the copies of all tensors
    run one after the other without waiting for each.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._locked: dict[str, weakref.finalize[[Tensor], HostBuffers]] = {}  # file name → what unlocks its buffer

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def copy(
        self,
        files: Mapping[str, tuple[TensorFile, Mapping[str, Tensor]]],
        take: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Mapping[str, memoryview]:
        """Copy every tensor of every file; changing the tensors afterwards changes nothing here.

        Args:
            files: file name → its layout, and its tensors by name.
            take: gives the values of a tensor, of those of all files in their order.

        Returns:
            file name → the bytes of its data part. They are this object's memory: valid until the next ``copy`` or
            ``free``. A further call for files of the same names and sizes allocates nothing.

        Raises:
            UnsavableError: a tensor has another dtype or shape than its file was laid out for.
        """
        sizes = {name: file.size - len(file.header) for name, (file, _) in files.items()}
        devices = {t.device for _, tensors in files.values() for t in tensors.values() if t.device.type == "cuda"}
        self._make_room(sizes, lock=bool(devices))
        for name, (file, tensors) in files.items():
            buffer = self._buffers[name]
            for entry in file.entries:
                source = take(tensors[entry.name]).detach()
                check_unchanged(entry, source)  # copy_ would convert and broadcast
                if entry.start < entry.end:
                    target = buffer[entry.start : entry.end].view(entry.dtype).view(entry.shape)
                    target.copy_(source, non_blocking=source.device.type == "cuda")
        for device in devices:  # one wait for all of them; what wrote the tensors ran on this stream too
            torch.cuda.current_stream(device).synchronize()
        return {name: self._buffers[name].numpy().data[:size] for name, size in sizes.items()}

    def free(self) -> None:
        """Give the memory back; views that ``copy`` has returned must not be used any more."""
        self._drop(list(self._buffers))

    def _make_room(self, sizes: Mapping[str, int], lock: bool) -> None:
        """A buffer for every file, the ones at hand where they are large enough."""
        small = [name for name, size in sizes.items() if name not in self._buffers or self._buffers[name].nbytes < size]
        if not small:
            return
        # Files that are not written now are perhaps never written again: their memory is for the new ones.
        self._drop([name for name in self._buffers if name not in sizes])
        for name in small:
            # A state that has grown a little will grow again.
            spare = sizes[name] // 32 if name in self._buffers else 0
            self._drop([name])
            buffer = torch.empty(sizes[name] + spare, dtype=torch.uint8)
            # torch's own page-locked memory comes in powers of two: up to twice what is needed. Where the system does not
            # let that much be locked, the copies are slower and nothing else.
            if lock and buffer.nbytes and int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
                self._locked[name] = weakref.finalize(self, _unlock, buffer)  # also when this object or the process ends
            self._buffers[name] = buffer

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._locked:
                self._locked.pop(name)()
            self._buffers.pop(name, None)


def _unlock(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
