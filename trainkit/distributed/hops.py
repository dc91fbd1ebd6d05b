"""The messages of a reduction over all ranks that takes O(log N) hops: recursive doubling.

gloo's own all-reduce is a ring of 2(N - 1) hops one after the other. Here, in each hop the ranks swap their values in pairs and
combine them, so that each value stands for twice as many ranks. If their number is no power of two, the ranks above the largest
power of two give their values to a partner first, and get the result from it (R. Thakur, R. Rabenseifner, W. Gropp,
Optimization of collective communication operations in MPICH, 2005).

A file of its own because `benchmarks/scale.py` counts these messages without a `World`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["Hop", "hops"]


class Hop(NamedTuple):
    """One message of a rank to another one, or from it, or both.

    Attributes:
        peer: the other rank.
        sends: this rank sends its value.
        receives: this rank receives a value.
        final: the received value is the result; otherwise it is combined with this rank's own.
    """

    peer: int
    sends: bool
    receives: bool
    final: bool = False


@lru_cache(maxsize=16)
def hops(rank: int, size: int) -> tuple[Hop, ...]:
    """The messages of a rank in order; at most 2 + log2(size).

    If the combination of two values does not depend on their order, all ranks get the same bits.
    """
    power = 1 << size.bit_length() - 1
    extra = size - power
    if rank >= power:
        return (Hop(rank - power, True, False), Hop(rank - power, False, True, final=True))
    doubling = tuple(Hop(rank ^ 1 << bit, True, True) for bit in range(power.bit_length() - 1))
    if rank < extra:
        return (Hop(rank + power, False, True), *doubling, Hop(rank + power, True, False))
    return doubling
