"""``find_executable_batch_size``: try smaller batches until one fits into the memory; ``release_memory``."""

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

__all__ = ["find_executable_batch_size", "release_memory"]

# What torch and cuDNN say where they raise no class of their own.
_SAID = ("out of memory", "can't allocate memory", "not enough memory", "cudnn_status_not_supported")


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """A decorator: call a function with a batch size, and again with a smaller one as long as the memory is too small.

    ::

        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size):
            accelerator = Accelerator()
            ...

        train()

    What the function has made before it failed must not be kept elsewhere. The size that has fitted is kept for the next call.
    On several processes nothing is tried again: one of them may run out of memory while the others do not.

    Args:
        function: its first argument is the batch size.
        starting_batch_size: what is tried first.
        reduce_batch_size_fn: returns the next size; default: 0.9 of the one before, rounded down.

    Raises:
        ConfigurationError: no size fits; or the function is called with a batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size, starting_batch_size=starting_batch_size, reduce_batch_size_fn=reduce_batch_size_fn
        )
    signature = inspect.signature(function)
    size = starting_batch_size

    @functools.wraps(function)
    def tried(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        try:
            signature.bind(size, *args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{function.__name__} gets the batch size as its first argument from find_executable_batch_size, so call it "
                f"without one: {error}."
            ) from None
        while size > 0:
            _clear()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not _is_shortage(error) or (dist.is_initialized() and dist.get_world_size() > 1):
                    raise
                reason = " ".join(str(error).split())[:120]
            before, size = size, int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            notice(f"{function.__name__}: a batch size of {before} does not fit into the memory ({reason}); trying {size}.")
            if size >= before:
                raise ConfigurationError(f"reduce_batch_size_fn must return less than {before}, not {size}.")
        raise ConfigurationError(f"{function.__name__}: no batch size fits into the memory, not even 1.")

    return tried


def release_memory(*objects: Any) -> list[None]:
    """Give back memory that nothing holds any more: ``a, b = release_memory(a, b)``.

    What an ``Accelerator`` has prepared it holds: ``model, optimizer = accelerator.free_memory(model, optimizer)``.

    Args:
        *objects: their names are to be given what is returned.

    Returns:
        ``None`` for each.
    """
    count = len(objects)
    del objects
    _clear()
    return [None] * count


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _SAID)


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
