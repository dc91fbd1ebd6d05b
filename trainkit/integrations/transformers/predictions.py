"""All predictions of an evaluation as numpy arrays on the main process, in memory that does not grow with the data set.

Each rank keeps what it predicts: in memory at first, above a limit in a file. At the end the other ranks send their batches to
the main process, one after the other, which writes them into one array for each tensor, a memory map if it is large. So ranks
need no folder that all of them see.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedWriter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.world import World
from trainkit.errors import MetricError
from trainkit.nested import leaves, map_tensors

__all__ = ["MEMORY_LIMIT", "Predictions"]

MEMORY_LIMIT = 64 * 2**20
"""Bytes of predictions that a process keeps in memory; more of them go to files."""

Array = npt.NDArray[Any]


class _Block(NamedTuple):
    """An array of one batch: itself, or where it begins in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data: Array | int


class Predictions:
    """What one rank has predicted for one loader, batch by batch.

    Files are in a folder of their own in Python's temporary folder, which the variable `TMPDIR` chooses. `close` removes them.

    Args:
        limit: Bytes of arrays in memory. Default: `MEMORY_LIMIT`.

    Example:
        ```python
        predictions = Predictions()
        predictions.add({"predictions": logits, "label_ids": labels})
        arrays = predictions.gather(world, {})  # on all ranks
        ```
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = MEMORY_LIMIT if limit is None else limit
        self._bytes = 0
        self._batches: list[list[_Block]] = []
        self._form: Mapping[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._file: BufferedWriter | None = None

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep the tensors of a batch: nested dicts, lists and tuples of them, the same in each batch.

        Raises:
            MetricError: A value is no tensor, or a batch has other ones than the first.
        """
        if not self._batches:
            self._form = map_tensors(values, lambda tensor: tensor.new_empty(0, device="cpu"))
        arrays = [_as_array(value, key) for key, value in _columns(values)]
        if self._batches and len(arrays) != len(self._batches[0]):
            raise MetricError(
                f"compute_metrics: a batch has {len(arrays)} tensors of predictions and labels, the first one "
                f"{len(self._batches[0])}. Exclude what only some have: model.config.keys_to_ignore_at_inference = [...]"
            )
        self._batches.append([self._keep(array) for array in arrays])
        if self._file is None and self._bytes > self._limit:
            self._file = (self._path() / "batches").open("wb")
            self._batches = [[self._keep(self._read(block)) for block in batch] for batch in self._batches]

    def gather(self, world: World, fill: Mapping[str, int]) -> dict[str, Any] | None:
        """The arrays of all batches of all ranks, in the order of the data. Collective.

        Batches of different lengths are padded to the longest in each dimension.

        Args:
            world: The ranks that have read the data.
            fill: What to pad the arrays under a key with; default: -100, as in transformers.

        Returns:
            On the main process the form of the batches, with numpy arrays that may be changed; `close` removes them. On
            other ranks, and without any batch, `None`.
        """
        if self._file is not None:
            self._file.flush()
        by_rank = _exchange_sizes(world, self._batches)
        if not world.is_main:
            for batch in self._batches:
                for block in batch:
                    _send(world, self._read(block))
            return None
        order = list(_in_order([len(batches) for batches in by_rank]))
        if not order:
            return None
        batches = [by_rank[rank][index] for rank, index in order]
        arrays = self._allocate(list(zip(*batches, strict=True)))
        fills = [fill.get(key, -100) for key, _ in _columns(self._form)]
        row = [0] * len(arrays)
        for (rank, index), batch in zip(order, batches, strict=True):
            for column, block in enumerate(batch):
                value = self._read(self._batches[index][column]) if rank == 0 else _receive(world, rank, block)
                _place(arrays[column], row[column], value, fills[column])
                row[column] += len(value)
        parts = iter(arrays)
        return {key: map_tensors(form, lambda _: next(parts)) for key, form in self._form.items()}

    def close(self) -> None:
        """Remove the files."""
        self._batches = []
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _path(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="trainkit-predictions-")
        return Path(self._folder.name)

    def _keep(self, array: Array) -> _Block:
        self._bytes += array.nbytes
        if self._file is None:
            return _Block(array.shape, array.dtype, array)
        start = self._file.tell()
        self._file.write(np.ascontiguousarray(array).data)
        return _Block(array.shape, array.dtype, start)

    def _read(self, block: _Block) -> Array:
        if not isinstance(block.data, int):
            return block.data
        flat = np.fromfile(self._path() / "batches", block.dtype, prod(block.shape), offset=block.data)
        return flat.reshape(block.shape)

    def _allocate(self, columns: Sequence[Sequence[_Block]]) -> list[Array]:
        """One array for each column: in memory if all together are small."""
        shapes = [_whole_shape([block.shape for block in column]) for column in columns]
        kinds = [np.result_type(*{block.dtype for block in column}) for column in columns]
        if sum(prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)) <= self._limit:
            return [np.empty(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        arrays: list[Array] = []
        for index, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
            path = self._path() / f"{index}.npy"
            arrays.append(np.lib.format.open_memmap(path, "w+", kind, shape) if prod(shape) else np.empty(shape, kind))
        return arrays


def _exchange_sizes(world: World, batches: Sequence[Sequence[_Block]]) -> list[list[list[_Block]]]:
    """On the main process the shapes and types of all batches, by rank; nothing on other ranks. Collective."""
    sizes: list[list[list[tuple[list[int], str]]]] = []
    world.collect([[(list(block.shape), block.dtype.str) for block in batch] for batch in batches], sizes.extend)
    return [[[_Block(tuple(shape), np.dtype(kind), 0) for shape, kind in batch] for batch in rows] for rows in sizes]


def _columns(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors in a value, each with the key that it is under."""
    return ((key, leaf) for key, value in values.items() for leaf in leaves(value))


def _as_array(value: Any, key: str) -> Array:
    if not isinstance(value, Tensor):
        raise MetricError(
            f"compute_metrics: the model returned {type(value).__name__} among the {key}, which is no tensor. Exclude it: "
            "model.config.keys_to_ignore_at_inference = ['past_key_values', ...]"
        )
    value = value.detach()
    if value.dtype == torch.bfloat16:  # numpy has no such type
        value = value.float()
    copied = torch.atleast_1d(value).cpu().contiguous()
    array: Array = (copied.clone() if copied.data_ptr() == value.data_ptr() else copied).numpy()
    return array


def _whole_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the array of all batches.

    Raises:
        MetricError: the batches have different numbers of dimensions.
    """
    if len({len(shape) for shape in shapes}) > 1:
        raise MetricError(
            f"compute_metrics: the predictions of the batches have different numbers of dimensions: {sorted(set(shapes))[:3]}. "
            "Reduce them in preprocess_logits_for_metrics."
        )
    return (sum(shape[0] for shape in shapes), *(max(sizes) for sizes in list(zip(*shapes, strict=True))[1:]))


def _place(array: Array, start: int, value: Array, fill: int) -> None:
    rows = array[start : start + len(value)]
    if rows.shape != value.shape:
        rows[...] = fill
    rows[tuple(slice(size) for size in value.shape)] = value


def _in_order(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The (rank, index) of all batches, in the order of the data, of which each rank reads every n-th batch."""
    for index in range(max(counts)):
        for rank, count in enumerate(counts):
            if index < count:
                yield rank, index


def _send(world: World, array: Array) -> None:
    if array.size:
        with world.collectives:
            dist.send(
                torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).view(torch.uint8), group=world.control, group_dst=0
            )


def _receive(world: World, rank: int, block: _Block) -> Array:
    received = torch.empty(prod(block.shape) * block.dtype.itemsize, dtype=torch.uint8)
    if len(received):
        with world.collectives:
            dist.recv(received, group=world.control, group_src=rank)
    return received.numpy().view(block.dtype).reshape(block.shape)
