"""Objects of users on all ranks, by pickle: the only place where ranks exchange anything but JSON and tensors.

`trainer.predict`, `PredictionWriter`, `gather_for_metrics`, `gather_object`, `broadcast_object_list` and
`strategy.broadcast` accept any object that can be pickled. It is sent between the ranks of one run, and is never written
to a file or read from one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_user_objects", "broadcast_user_object"]


def all_gather_user_objects(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """The objects of all ranks, in the order of the ranks; tensors keep their devices. Collective."""
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)  # noqa: TID251
    return values


def broadcast_user_object(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """The object of rank `source`, on all ranks; tensors keep their devices. Collective."""
    values = [value]
    dist.broadcast_object_list(values, source, group=group)  # noqa: TID251
    return values[0]
