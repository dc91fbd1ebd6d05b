"""What a language model has to beat: how well single bytes and pairs of bytes predict the same text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bigram_bits", "unigram_bits"]

Bytes = NDArray[np.uint8]
"""Bytes as numbers, any shape."""


def unigram_bits(train: bytes, targets: Bytes) -> float:
    """Bits per byte of the model "each byte comes with its frequency in the training text".

    Every byte is counted once more than it occurs (Laplace), so that none has probability 0.

    Args:
        train: the text that frequencies are taken from.
        targets: the bytes to predict.
    """
    return _bits(_unigram(train)[targets])


def bigram_bits(train: bytes, previous: Bytes, targets: Bytes, strength: float = 1.0) -> float:
    """Bits per byte of the model "each byte depends on the one before it".

    The counts after a byte are smoothed by ``strength`` more observations spread as single bytes are: the mean under a
    Dirichlet prior around the unigram model (MacKay and Peto, "A hierarchical Dirichlet language model", 1995). Pairs
    that the training text does not have then fall back on the unigram model.

    Args:
        train: the text that frequencies are taken from.
        previous: the byte before each target, same shape as ``targets``.
        targets: the bytes to predict.
        strength: how many observations the unigram model counts for; above 0.
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
