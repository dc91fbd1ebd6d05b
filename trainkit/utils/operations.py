"""`gather`, `reduce`, `broadcast` and others as functions, without an `Accelerator` object.

They use the process's `trainkit.Accelerator`; of several, the last one, if it has prepared something. A single process
needs none.
"""

from __future__ import annotations

from typing import Any

import torch

from trainkit.accelerator.current import gathering
from trainkit.checks import is_whole
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.nested import move

__all__ = ["broadcast", "gather", "pad_across_processes", "reduce", "send_to_device", "wait_for_everyone"]


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all ranks, as `Accelerator.gather` does. Collective.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts; the same containers on all ranks.

    Raises:
        ConfigurationError: No `Accelerator` was created, or an item is not a tensor.
        CollectiveError: Containers, shapes or dtypes differ between ranks.
    """
    return gathering("gather").gather(tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce tensors over all ranks, as `Accelerator.reduce` does; by default the mean, as in Accelerate. Collective.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts; with the same shapes on all ranks.
        reduction: `"mean"`, `"sum"`, `"max"`, or `"none"`, which only scales.
        scale: Multiplies the result.

    Raises:
        ConfigurationError: As in `gather`; or the reduction is unknown.
        CollectiveError: As in `gather`.
    """
    return gathering("reduce").reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors to the largest size of all ranks, as `Accelerator.pad_across_processes` does. Collective.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts.
        dim: The dimension to pad.
        pad_index: The value of the padding.
        pad_first: Pad at the start instead of the end.

    Raises:
        ConfigurationError: As in `gather`.
        CollectiveError: As in `gather`.
    """
    return gathering("pad_across_processes").pad_across_processes(tensor, dim, pad_index, pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcast tensors from one rank to all, on the device. Collective.

    The argument is not changed: use the result. With XLA's SPMD, which has one process, the result is the argument.

    Args:
        tensor: A tensor, or tensors in lists, tuples and dicts; with the same shapes and dtypes on all ranks.
        from_process: The rank to broadcast from.

    Raises:
        ConfigurationError: As in `gather`; or the rank is unknown, or differs between processes.
        CollectiveError: As in `gather`.
    """
    part = gathering("broadcast")
    size = part.world.size
    if not is_whole(from_process) or not 0 <= from_process < size:
        raise ConfigurationError(f"broadcast(from_process={from_process!r}): expected a rank from 0 to {size - 1}.")
    return part.broadcast(tensor, from_process)


def wait_for_everyone() -> None:
    """Wait until all processes have called it, as `Accelerator.wait_for_everyone` does. Collective.

    Raises:
        ConfigurationError: As in `gather`.
        CollectiveError: As in `gather`.
    """
    gathering("wait_for_everyone").wait("wait_for_everyone")


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: None = None) -> Any:
    """Move a batch to a device: its tensors and other objects with a `.to(device)`. Prepared loaders already do this.

    Args:
        tensor: Tensors in lists, tuples, dicts and dataclasses.
        device: A `torch.device`, its name or its index.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Only `None`.

    Raises:
        UnsupportedArgumentError: `skip_keys`.
    """
    if skip_keys is not None:
        raise UnsupportedArgumentError(
            "send_to_device(skip_keys=...) is not supported. Remove these keys from the batch first."
        )
    return move(tensor, torch.device(device), non_blocking)
