"""Keyed randomness: every random number is a function of its place in the run, so that there is no state to save.

A key is a fixed 64-bit mix of (seed, stage, purpose, epoch, micro-batch). Before a micro-batch is fetched and before it is
computed, torch's CPU generator, the device's generator, `numpy.random` and `random` are seeded from its key. So a
resumed run, a run with other workers and a run on another number of processes draw the same augmentation and dropout, and
prefetching does not change them. The mix is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014), chained over the parts; golden values freeze it as `KEY_VERSION`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from trainkit.checks import whole_number
from trainkit.console import echo
from trainkit.errors import ConfigurationError

__all__ = [
    "KEY_VERSION",
    "KeyStream",
    "Purpose",
    "RandomState",
    "Stage",
    "mix",
    "part_key",
    "resolve_seed",
    "seed_everything",
    "seed_generators",
    "seed_process",
    "seed_was_given",
]

KEY_VERSION = 1

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_STAGES_PER_LOADER = 16

# The generators behind the functions of `random` and `numpy.random`.
_PYTHON: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_SEED_PYTHON = super(random.Random, _PYTHON).seed
_NUMPY: np.random.RandomState = np.random.mtrand._rand


class Stage(IntEnum):
    """The stage of a run; `of_loader` adds the index of an evaluation loader."""

    TRAIN = 1
    VALIDATE = 2
    TEST = 3
    PREDICT = 4
    SANITY = 5

    def of_loader(self, index: int) -> int:
        """The stage part of a key for loader `index` of this stage (0 for the only one)."""
        return int(self) + _STAGES_PER_LOADER * index

    def has_key(self, key: int) -> bool:
        """Whether `of_loader` of this stage returns this key for one of the loaders."""
        return key % _STAGES_PER_LOADER == self


class Purpose(IntEnum):
    """The purpose of random numbers."""

    INIT = 1
    ORDER = 2
    FETCH = 3
    FORWARD = 4
    TRANSFER = 5


def _advance(state: int, part: int) -> int:
    """SplitMix64's output number `part` for the given state."""
    z = (state + (part + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


def mix(seed: int, stage: int, purpose: int, epoch: int = 0, m: int = 0) -> int:
    """The unsigned 64-bit key of micro-batch `m` (global, not per rank) of `epoch` for a purpose in a stage."""
    state = seed & _MASK
    for part in (stage, purpose, epoch, m):
        state = _advance(state, part)
    return state


def part_key(key: int, part: int) -> int:
    """The key of part `part` of a micro-batch whose own key is `key`."""
    return _advance(key, part)


class KeyStream:
    """The keys of one epoch for one purpose: `stream(m) == mix(seed, stage, purpose, epoch, m)`, in about 0.4 µs."""

    __slots__ = ("_prefix",)

    def __init__(self, seed: int, stage: int, purpose: int, epoch: int) -> None:
        state = seed & _MASK
        for part in (stage, purpose, epoch):
            state = _advance(state, part)
        self._prefix = state

    def __call__(self, m: int) -> int:
        """The key of global micro-batch `m`."""
        # _advance inlined: this runs once per micro-batch, and a call costs as much as the arithmetic
        z = (self._prefix + (m + 1) * _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        return z ^ (z >> 31)


def seed_generators(key: int, device_generators: Iterable[torch.Generator] = ()) -> None:
    """Seed torch's CPU generator, `numpy.random`, `random` and the given device generators from an unsigned 64-bit key.

    Seeds the generators directly, because it runs twice per micro-batch: `torch.manual_seed` visits every backend, and the
    argument checks of `random.seed` and `np.random.seed` take longer than the seeding (25 µs instead of 16 µs for both).
    """
    torch.default_generator.manual_seed(key)
    try:
        _NUMPY.seed(key >> 32)
    except TypeError:  # the user set another bit generator
        np.random.seed(key >> 32)
    _SEED_PYTHON(key)
    _PYTHON.gauss_next = None  # type: ignore[attr-defined]
    for generator in device_generators:
        generator.manual_seed(key)


class RandomState:
    """A snapshot of the global generators, to restore later.

    `fit` seeds the global generators all the time; random numbers that the user draws after it must not depend on that.
    """

    def __init__(self, device_generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = (torch.default_generator, *device_generators)
        self._torch = [generator.get_state() for generator in self._generators]
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Restore the snapshot."""
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    @staticmethod
    def draw_with_key(key: int, draw: Callable[[], Any]) -> Any:
        """The result of `draw()` with the CPU generators seeded from `key`; restores their state."""
        before = RandomState()
        seed_generators(key)
        try:
            return draw()
        finally:
            before.restore()


# The seed of seed_everything, global like the generators.
_process_seed: int | None = None


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = False) -> int:
    """Seed torch, numpy and `random`, and use the seed for every `Trainer` and `Accelerator` without one.

    Args:
        seed: An integer from 0 to 2**64 - 1; `None` draws one.
        workers: Only `True`: loader workers are always seeded for each sample or batch.
        verbose: Print the seed.

    Returns:
        The seed.

    Raises:
        ConfigurationError: The seed is out of range, or `workers=False`.
    """
    global _process_seed
    if not workers:
        raise ConfigurationError(
            "seed_everything(workers=False): loader workers are always seeded, for each micro-batch. Remove the argument."
        )
    chosen = int.from_bytes(random.SystemRandom().randbytes(4), "little") if seed is None else _check_seed(seed)
    _process_seed = chosen
    seed_process(chosen)
    if verbose:
        echo(f"trainkit: seed {chosen}")
    return chosen


def seed_process(seed: int) -> None:
    """Seed the global generators of torch, numpy and `random`; `seed` is taken modulo 2**64."""
    seed &= _MASK
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)


def resolve_seed(seed: int | None) -> int:
    """The seed of a run: the argument, else that of `seed_everything`, else `torch.initial_seed()`.

    The latter is the argument of `torch.manual_seed`, or without that call a number that torch drew at start.
    """
    if seed is not None:
        return _check_seed(seed)
    if _process_seed is not None:
        return _process_seed
    return torch.initial_seed() & _MASK


def seed_was_given(seed: int | None) -> bool:
    """Whether the user chose the seed of a run by its argument or by `seed_everything`."""
    return seed is not None or _process_seed is not None


def _check_seed(seed: object) -> int:
    return whole_number(seed, "seed", 0, _MASK, expected="an integer from 0 to 2**64 - 1", fix="seed=42")
