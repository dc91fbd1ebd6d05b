"""Seeding and isolation of the random number generators, under Lightning's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainkit.rng import RandomState, seed_everything

__all__ = ["isolate_rng", "seed_everything"]


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """A context after which the global generators of torch, numpy and `random` continue as if it had drawn nothing.

    Args:
        include_cuda: Restore the generators of the GPUs too.

    Example:
        ```python
        with isolate_rng():
            noise = torch.randn(4)
        ```
    """
    with_cuda = include_cuda and torch.cuda.is_available() and torch.cuda.is_initialized()
    state = RandomState(torch.cuda.default_generators if with_cuda else ())
    try:
        yield
    finally:
        state.restore()
