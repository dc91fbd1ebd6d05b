"""`find_executable_batch_size` and `release_memory`."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainkit.console import notice
from trainkit.errors import ConfigurationError

__all__ = ["find_executable_batch_size", "is_out_of_memory", "release_memory"]

# Messages, in lower case, of errors of torch, cuBLAS and cuDNN that have no class.
_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "status_alloc_failed",
    "host_allocation_failed",
    "cudnn_status_not_supported",
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """A decorator that calls a function with smaller and smaller batch sizes until it fits into memory.

    The function must not keep objects of a failed attempt alive elsewhere. The next call starts with the size that fit.
    With several processes an error is raised immediately: one rank may run out of memory while the others do not.

    Args:
        function: A function whose first argument is the batch size.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size. Default: 0.9 times the last one, rounded down.

    Raises:
        ConfigurationError: No size fits, or the caller passes a batch size.

    Example:
        ```python
        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size):
            accelerator = Accelerator()
            ...

        train()
        ```
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size, starting_batch_size=starting_batch_size, reduce_batch_size_fn=reduce_batch_size_fn
        )
    signature = inspect.signature(function)
    size = starting_batch_size

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        try:
            signature.bind(size, *args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"find_executable_batch_size passes the batch size as the first argument of {function.__name__}. Call it "
                f"without one: {error}."
            ) from None
        while size > 0:
            _clear()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error) or (dist.is_initialized() and dist.get_world_size() > 1):
                    raise
                reason = " ".join(str(error).split())[:120]
            before, size = size, int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            notice(f"{function.__name__}: a batch size of {before} does not fit into memory ({reason}); trying {size}.")
            if size >= before:
                raise ConfigurationError(f"reduce_batch_size_fn must return less than {before}, not {size}.")
        raise ConfigurationError(f"{function.__name__}: no batch size fits into memory, not even 1.")

    return wrapper


def release_memory(*objects: Any) -> list[None]:
    """Free the memory of objects: `a, b = release_memory(a, b)`.

    An `Accelerator` keeps prepared objects alive: `model, optimizer = accelerator.free_memory(model, optimizer)`.

    Args:
        *objects: The objects.

    Returns:
        `None` for each object.
    """
    count = len(objects)
    del objects
    _clear()
    return [None] * count


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the memory of a device or of the host is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
