"""What scripts call without an ``Accelerator`` at hand: ``gather``, ``reduce``, ``broadcast`` and their kin.

They are the verbs of the process's :class:`trainkit.Accelerator`: of several the one that was made last, if it has prepared
something. A process that is alone needs none.
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
    """:meth:`trainkit.Accelerator.gather`. Collective.

    Args:
        tensor: a tensor, or tensors in lists, tuples and dicts; the same containers on all processes.

    Raises:
        ConfigurationError: no ``Accelerator`` has been made; or something in it is no tensor.
        CollectiveError: other containers, shapes or dtypes on other processes.
    """
    return gathering("gather").gather(tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """:meth:`trainkit.Accelerator.reduce`, but by default the mean, as in Accelerate. Collective.

    Args:
        tensor: a tensor, or tensors in lists, tuples and dicts; of the same shapes on all processes.
        reduction: ``"mean"``, ``"sum"``, ``"max"``, or ``"none"``, which only scales.
        scale: the result is multiplied by it.

    Raises:
        ConfigurationError, CollectiveError: as of :func:`gather`; or another reduction.
    """
    return gathering("reduce").reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """:meth:`trainkit.Accelerator.pad_across_processes`. Collective.

    Args:
        tensor: a tensor, or tensors in lists, tuples and dicts.
        dim: the dimension in which all become as long as the longest.
        pad_index: what is filled in.
        pad_first: in front instead of behind.

    Raises:
        ConfigurationError, CollectiveError: as of :func:`gather`.
    """
    return gathering("pad_across_processes").pad_across_processes(tensor, dim, pad_index, pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors that one process has, on all of them, on the device. Collective.

    What is given stays as it is: use what is returned. On XLA's SPMD, where there is one process, that is what was given.

    Args:
        tensor: a tensor, or tensors in lists, tuples and dicts; of the same shapes and dtypes on all processes.
        from_process: the number of the process whose tensors count.

    Raises:
        ConfigurationError: as of :func:`gather`; or there is no such process, or it is not the same on all.
        CollectiveError: as of :func:`gather`.
    """
    part = gathering("broadcast")
    size = part.world.size
    if not is_whole(from_process) or not 0 <= from_process < size:
        raise ConfigurationError(f"broadcast(from_process={from_process!r}): there are 0 to {size - 1}.")
    return part.broadcast(tensor, from_process)


def wait_for_everyone() -> None:
    """:meth:`trainkit.Accelerator.wait_for_everyone`. Collective.

    Raises:
        ConfigurationError, CollectiveError: as of :func:`gather`.
    """
    gathering("wait_for_everyone").wait("wait_for_everyone")


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: None = None) -> Any:
    """A batch with its tensors, and whatever else has a ``.to(device)``, on a device. Batches of prepared loaders are there.

    Args:
        tensor: tensors in lists, tuples, dicts and dataclasses.
        device: a ``torch.device``, its name or its number.
        non_blocking: do not wait for copies out of pinned memory.
        skip_keys: only ``None``.

    Raises:
        UnsupportedArgumentError: ``skip_keys``.
    """
    if skip_keys is not None:
        raise UnsupportedArgumentError("send_to_device(skip_keys=...) is not supported. Take these out of the batch before.")
    return move(tensor, torch.device(device), non_blocking)
