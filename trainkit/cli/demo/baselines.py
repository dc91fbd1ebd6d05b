"""Baselines for a language model: the frequencies of bytes and of pairs of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bigram_bits", "unigram_bits"]

Bytes = NDArray[np.uint8]
"""Bytes as numbers, any shape."""


def unigram_bits(train: bytes, targets: Bytes) -> float:
    """Return the bits per byte of a model in which each byte has its frequency in the training text.

    Add-one smoothing (Laplace), so that no probability is 0.

    Args:
        train: The training text.
        targets: The bytes to predict.
    """
    return _bits(_unigram(train)[targets])


def bigram_bits(train: bytes, previous: Bytes, targets: Bytes, strength: float = 1.0) -> float:
    """Return the bits per byte of a model in which each byte depends on the one before it.

    The counts are smoothed with a Dirichlet prior around the unigram model (MacKay and Peto, "A hierarchical Dirichlet
    language model", 1995).

    Args:
        train: The training text.
        previous: The byte before each target, same shape as `targets`.
        targets: The bytes to predict.
        strength: The weight of the unigram model, in observations; above 0.
    """
    text = np.frombuffer(train, np.uint8).astype(np.intp)
    pairs = np.bincount(text[:-1] * 256 + text[1:], minlength=65536).reshape(256, 256).astype(np.float64)
    smoothed = (pairs + strength * _unigram(train)) / (pairs.sum(axis=1, keepdims=True) + strength)
    return _bits(smoothed[previous, targets])


def _unigram(train: bytes) -> NDArray[np.float64]:
    counts = np.bincount(np.frombuffer(train, np.uint8), minlength=256) + 1.0
    return np.asarray(counts / counts.sum())


def _bits(probabilities: NDArray[Any]) -> float:
    return float(-np.log2(probabilities).mean())
