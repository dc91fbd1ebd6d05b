"""Distributes the work on a checkpoint over the ranks, by bytes, with the same result on all ranks."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["assign_to_ranks"]


def assign_to_ranks(sizes: Mapping[str, int], loads: list[int], whole_up_to: int = 0) -> dict[int, list[str]]:
    """Assign each item to a rank, the largest first, always to the rank with the least bytes so far.

    Args:
        sizes: name of the item → bytes.
        loads: bytes that each rank has already; updated in place.
        whole_up_to: items with no more bytes in total are all assigned to one rank.

    Returns:
        rank → names, in the order of `sizes`, for ranks with items. The assignment does not depend on the order of
        `sizes`, so that all ranks compute the same one.
    """
    if sum(sizes.values()) <= whole_up_to or len(loads) == 1:
        rank = loads.index(min(loads))
        loads[rank] += sum(sizes.values())
        return {rank: list(sizes)}
    owner: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += size
    ranks = sorted(set(owner.values()))
    return {rank: [name for name in sizes if owner[name] == rank] for rank in ranks}
