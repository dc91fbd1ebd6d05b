"""The transfer of batches."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.nested import move

__all__ = ["move_data_to_device"]


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The batch with its tensors, and other objects with a `.to(device)`, on the device.

    Copies from pinned memory to a GPU do not block.

    Args:
        batch: A tensor, or tensors in dicts, lists, tuples, named tuples and dataclasses.
        device: The device; a number is the index of a GPU.
    """
    device = torch.device(device)
    return move(batch, device, non_blocking=device.type == "cuda")
