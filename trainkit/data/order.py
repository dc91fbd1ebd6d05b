"""The order of an epoch, as a pure function of a 64-bit key.

No state has to be saved to resume: the key (mixed from seed and epoch by `trainkit.rng`) is enough to compute the indices
at any positions. There are two algorithms, chosen by the number of samples:

* below `HASH_SORT_LIMIT`: the indices sorted by a keyed 64-bit hash. Uniform for tiny datasets too.
* otherwise: a Feistel network over the next even power of two with cycle walking. It needs no list of indices, so
  an epoch over 10^12 samples starts as fast, and in as little memory, as one over 10^7. (For a handful of samples its
  rounds have too few bits to be uniform, which is why it is not used there.)

All arithmetic is on unsigned 64-bit integers that wrap around, and the hash has no ties, so the order depends neither
on the version of numpy nor on the machine. A change of the order would silently change the data of a resumed run: the tests
contain fixed values, and `ORDER_VERSION`, saved in every checkpoint, must be increased with it.

Sources: the hash is the output function of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014; constants of Stafford's variant 13); Feistel networks as permutations: Luby, Rackoff, 1988; cycle
walking: Black, Rogaway, "Ciphers with arbitrary finite domains", 2002.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from trainkit.errors import ConfigurationError

__all__ = ["CYCLE", "HASH_SORT_LIMIT", "ORDER_VERSION", "Permutation", "user_epoch"]

ORDER_VERSION = 1
"""Increased whenever the same key would give a different order."""

HASH_SORT_LIMIT = 1 << 20
"""Number of samples from which the Feistel network is used. A change needs a new `ORDER_VERSION`."""

CYCLE = 1 << 32
"""Cycle c of a loader within epoch e is its epoch e + c·CYCLE: a different order, but the same one in every run."""

_MAX_LENGTH = 1 << 62
_BLOCK = 4096  # positions computed at a time: enough to hide numpy's cost per call, few enough for the L1 cache
_ROUNDS = 6  # At 2^20 samples, 4 rounds leave positions 2^10 apart correlated. 5 rounds do not; 1 more is for safety.

_WORD = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

# numpy scalars, not Python integers: a mix of the two had other types before numpy 2. Arrays of them wrap around
# without a warning; arithmetic between two such scalars would warn, so keys are computed with Python integers.
_M1, _M2 = np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


class Permutation:
    """The order in which an epoch visits `length` samples.

    Args:
        length: number of samples, from 0 to 2^62.
        key: unsigned 64-bit number that decides the order. It is mixed before use, so keys that differ
            little (0, 1, 2, …) give unrelated orders.

    Raises:
        ConfigurationError: a length or key is not an integer or is out of range.

    The constructor computes nothing. Below `HASH_SORT_LIMIT` the first `block` sorts, and 8 bytes per sample are kept;
    otherwise only the 4,096 positions around the last request are kept.

    Orders of different lengths under one key are related: give every dataset its own key.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = _integer("length", length)
        if not 0 <= self._length <= _MAX_LENGTH:
            raise ConfigurationError(
                f"Permutation expects a length from 0 to 2**62 = {_MAX_LENGTH}, got {self._length}. "
                "Fix: Permutation(len(dataset), key)."
            )
        self._key = _integer("key", key)
        if not 0 <= self._key <= _WORD:
            raise ConfigurationError(
                f"Permutation expects an unsigned 64-bit key, from 0 to 2**64 - 1, got {self._key}. "
                "Fix: Permutation(length, key % 2**64)."
            )
        self._feistel = _Feistel(self._length, self._key) if self._length >= HASH_SORT_LIMIT else None
        # (first, last, indices at the positions [first, last)): replaced as one, so a reader on another thread never
        # sees the bounds of one block with the indices of another.
        self._cached: tuple[int, int, npt.NDArray[np.int64]] = (0, 0, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self._length

    def block(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The indices at the positions `[start, stop)` of the order.

        Intended for many small requests, in sequence or at any distance; an aligned block of 4,096 positions is computed
        once.

        Returns:
            int64, shape `[stop - start]`; a copy that the caller may change.

        Raises:
            ConfigurationError: unless `0 <= start <= stop <= len(self)`.
        """
        start, stop = _integer("start", start), _integer("stop", stop)
        first, last, indices = self._cached
        if first <= start <= stop <= last:
            copy: npt.NDArray[np.int64] = indices[start - first : stop - first].copy()
            return copy
        if not 0 <= start <= stop <= self._length:
            raise ConfigurationError(
                f"block(start, stop) expects 0 <= start <= stop <= {self._length} (the number of samples), "
                f"got block({start}, {stop}). Fix: order.block(start, min(stop, len(order)))."
            )
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            first, last, indices = self._block_around(at)
            end = min(stop, last)
            out[at - start : end - start] = indices[at - first : end - first]
            at = end
        return out

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices at any positions of the order; positions between them are not computed.

        Args:
            positions: int64, each in `[0, len(self))`.

        Returns:
            int64, of the same shape.
        """
        if self._feistel is not None:
            return self._feistel.at(positions.astype(np.uint64))
        indices: npt.NDArray[np.int64] = self._block_around(0)[2][positions]
        return indices

    def _block_around(self, position: int) -> tuple[int, int, npt.NDArray[np.int64]]:
        cached = self._cached
        if cached[0] <= position < cached[1]:
            return cached
        if self._feistel is None:
            cached = (0, self._length, _hash_sort(self._length, self._key))
        else:
            first = position - position % _BLOCK
            last = min(first + _BLOCK, self._length)
            cached = (first, last, self._feistel.indices(first, last))
        self._cached = cached
        return cached


class _Feistel:
    """A permutation of `[0, length)`, `1 <= length <= 2**62`, computed position by position.

    The network permutes `[0, 4**half_bits)`, the smallest such range that contains `length`. A result outside `[0, length)`
    is permuted again until it is inside, which must happen, as every position is on a cycle.
    The range is less than four times `length`, so that takes fewer than four applications on average.
    """

    def __init__(self, length: int, key: int, rounds: int = _ROUNDS) -> None:
        half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._length = np.uint64(length)
        self._half_bits = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)
        self._top_bits = np.uint64(64 - half_bits)
        self._round_keys = [np.uint64(subkey) for subkey in _subkeys(key, rounds)]

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        values = np.arange(stop - start, dtype=np.uint64)
        values += np.uint64(start)
        return self.at(values)

    def at(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        values = self._permute(positions)
        outside = np.flatnonzero(values >= self._length)
        while outside.size:
            walked = self._permute(values[outside])
            values[outside] = walked
            outside = outside[walked >= self._length]
        return values.view(np.int64)  # all below 2^62, so both types mean the same

    def _permute(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left: npt.NDArray[np.uint64] = values >> self._half_bits
        right: npt.NDArray[np.uint64] = values & self._half_mask
        hashed, shifted = np.empty_like(values), np.empty_like(values)
        for round_key in self._round_keys:
            # _mix without its last step, which changes only the lower 33 bits: the upper half_bits <= 31 are used.
            np.add(right, round_key, out=hashed)
            np.right_shift(hashed, _S30, out=shifted)
            np.bitwise_xor(hashed, shifted, out=hashed)
            np.multiply(hashed, _M1, out=hashed)
            np.right_shift(hashed, _S27, out=shifted)
            np.bitwise_xor(hashed, shifted, out=hashed)
            np.multiply(hashed, _M2, out=hashed)
            np.right_shift(hashed, self._top_bits, out=hashed)
            np.bitwise_xor(left, hashed, out=left)
            left, right = right, left
        left <<= self._half_bits
        left |= right
        return left


def _hash_sort(length: int, key: int) -> npt.NDArray[np.int64]:
    """The indices below `length` sorted by a keyed hash, which is a bijection: there are no ties."""
    first_key, second_key = _subkeys(key, 2)
    hashes = np.arange(length, dtype=np.uint64)
    hashes *= np.uint64(_INCREMENT)
    hashes += np.uint64(first_key)
    _mix(hashes)
    hashes ^= np.uint64(second_key)
    _mix(hashes)
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)


def _mix(values: npt.NDArray[np.uint64]) -> None:
    """SplitMix64's output function, in place: a bijection of the 64-bit numbers."""
    values ^= values >> _S30
    values *= _M1
    values ^= values >> _S27
    values *= _M2
    values ^= values >> _S31


def _mix_one(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _WORD
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _WORD
    return value ^ (value >> 31)


def _subkeys(key: int, count: int) -> list[int]:
    """`count` numbers drawn from SplitMix64, started at the mixed key so that neighboring keys share nothing."""
    state = _mix_one((key + _INCREMENT) & _WORD)
    return [_mix_one((state + draw * _INCREMENT) & _WORD) for draw in range(1, count + 1)]


def _integer(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigurationError(
            f"{name} expects an integer, got {value!r} of type {type(value).__name__}. Fix: {name}=int({name})."
        ) from None


def user_epoch(epoch: int) -> int:
    """The epoch to pass to the user's samplers and datasets, without the cycle."""
    return epoch % CYCLE
