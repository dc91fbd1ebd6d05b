"""`find_executable_batch_size` and `release_memory`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world

from trainkit.errors import ConfigurationError
from trainkit.utils import find_executable_batch_size, release_memory


def test_sizes_are_tried_until_one_fits(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, name: str, *, scale: int = 1) -> tuple[str, int]:
        tried.append(batch_size)
        if batch_size > 85:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return name, batch_size * scale

    assert train("a", scale=2) == ("a", 162)
    assert tried == [100, 90, 81]
    assert "train: a batch size of 90 does not fit into memory (CUDA out of memory. Tried" in caplog.text
    assert train(name="b") == ("b", 81), "what has fitted is kept"
    assert tried[3:] == [81]


def test_a_real_shortage() -> None:
    """A real allocation on the host fails, with the error message of PyTorch's allocator."""
    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=2**44, reduce_batch_size_fn=lambda: 16)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        return len(torch.empty(batch_size, 1024))

    assert train() == 16
    assert sizes == [2**44, 16]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_other_out_of_memory_errors(error: Exception) -> None:
    """Other errors that mean that memory is exhausted."""
    errors = [error]

    @find_executable_batch_size
    def train(batch_size: int) -> int:
        if errors:
            raise errors.pop()
        return batch_size

    assert train() == 115


def test_other_errors_are_raised() -> None:
    calls: list[int] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        train()
    assert calls == [4]


def test_nothing_fits() -> None:
    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(ConfigurationError, match="train: no batch size fits into memory, not even 1"):
        train()

    @find_executable_batch_size(starting_batch_size=3, reduce_batch_size_fn=lambda: 3)
    def stuck(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(ConfigurationError, match="must return less than 3, not 3"):
        stuck()


@pytest.mark.parametrize("arguments, options", [((8, "a"), {}), (("a",), {"batch_size": 8}), ((), {})])
def test_a_call_with_a_batch_size(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    @find_executable_batch_size
    def train(batch_size: int, name: str) -> None:
        raise AssertionError("called")

    with pytest.raises(ConfigurationError, match="passes the batch size as the first argument of train"):
        train(*arguments, **options)


def on_two() -> list[int]:
    from trainkit import Accelerator

    tried: list[int] = []
    Accelerator()

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        train()
    return [int(os.environ["RANK"]), *tried]


def test_on_several_processes_nothing_is_tried_again() -> None:
    """On several processes the error is raised: one rank may run out of memory while the others do not."""
    assert run_world(2, on_two) == [[0, 8], [1, 8]]


def test_release_memory() -> None:
    """`release_memory` returns a list with one `None` for each object, as in Accelerate."""
    first, second = torch.ones(2), torch.ones(2)
    first, second = release_memory(first, second)
    assert (first, second) == (None, None)
    assert release_memory(torch.ones(1)) == [None]
