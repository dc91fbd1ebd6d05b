"""Objects of users on all ranks, by pickle: the only place where ranks send each other anything but JSON and tensors.

``trainer.predict``, ``gather_for_metrics``, ``gather_object`` and ``broadcast_object_list`` accept any object that can be pickled. It goes
from one rank of a run to the others over the run's own process group, and is neither written to a file nor read from one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_user_objects"]


def all_gather_user_objects(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """The objects of all ranks, in the order of the ranks; tensors keep their devices. Collective."""
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
