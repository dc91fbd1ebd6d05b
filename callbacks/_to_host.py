"""Copies a scalar from the device to the host without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def copy_to_host(value: Tensor) -> tuple[Tensor, Any]:
    """Start copying a scalar to the host.

    Returns:
        The copy, and the event to synchronize before it is read; `None` if it can be read directly.
    """
    if value.device.type != "cuda":
        return value, None
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(value.device))
    return host, ready
