"""Work on a checkpoint dealt out over the processes of a run: as many bytes for each, the same result on all."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["assign_to_ranks"]


def assign_to_ranks(sizes: Mapping[str, int], loads: list[int], whole_up_to: int = 0) -> dict[int, list[str]]:
    """Give each of some things to a process, the largest first and always to the one that has the least so far.

    Args:
        sizes: name → bytes.
        loads: bytes that each process has already, by rank; brought up to date.
        whole_up_to: things of no more bytes together are not divided, but given to one process.

    Returns:
        rank → names, in the order of ``sizes``; ranks that got nothing are left out. The result does not depend on the order
        of ``sizes``, so that processes that know the same things come to the same one.
    """
    if sum(sizes.values()) <= whole_up_to or len(loads) == 1:
        rank = _least(loads)
        loads[rank] += sum(sizes.values())
        return {rank: list(sizes)}
    owner: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner[name] = _least(loads)
        loads[owner[name]] += size
    ranks = sorted(set(owner.values()))
    return {rank: [name for name in sizes if owner[name] == rank] for rank in ranks}


def _least(loads: list[int]) -> int:
    return min(range(len(loads)), key=lambda rank: loads[rank])
