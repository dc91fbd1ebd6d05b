"""The text of the demo: the source files of Python's own standard library, and windows over it.

With two baselines for a language model of it: the frequencies of bytes and of pairs of bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainkit.errors import ConfigurationError, DataError
from trainkit.module.data_module import DataModule

__all__ = ["Corpus", "SourceCode", "Windows", "bigram_bits", "is_validation", "read_corpus", "source_files", "unigram_bits"]


# Skipped: installed packages, tests, packages that some distributions do not ship, and generated tables.
_OTHERS = {"__pycache__", "dist-packages", "site-packages"}
_TESTS = {"idle_test", "test", "tests"}
_NOT_EVERYWHERE = {"ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"}
_GENERATED = {"encodings", "pydoc_data"}
_SKIPPED = _OTHERS | _TESTS | _NOT_EVERYWHERE | _GENERATED


class Corpus(NamedTuple):
    """Text for training and text for validation, from different files.

    Attributes:
        train: The training files, joined by line ends.
        val: The validation files, joined by line ends.
        train_files: The sorted relative paths of the training files, with "/" on every system.
        val_files: The same for the validation files.
    """

    train: bytes
    val: bytes
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]


def source_files(library: Path) -> Iterator[str]:
    """The relative paths of the `.py` files to use, in the same order on every system."""
    paths = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                paths.append(Path(folder, name).relative_to(library).as_posix())
    return iter(sorted(paths))


def is_validation(path: str, share: float = 0.1) -> bool:
    """Whether a file is for validation, by a hash of its path: the same on every system.

    Args:
        path: A relative path, with "/" between folders.
        share: The fraction of validation files, in [0, 1].
    """
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def read_corpus(library: Path | None = None, share: float = 0.1) -> Corpus:
    """Read the library and split it by file.

    Skips files that are empty, not UTF-8, or a copy of another one; converts line ends to "\\n".

    Args:
        library: A folder of Python files (default: the standard library of this Python).
        share: The fraction of validation files.

    Raises:
        DataError: There are not enough source files for both parts.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    files: dict[bool, list[str]] = {False: [], True: []}
    seen = set()
    for path in source_files(library):
        text = _read(library / path)
        digest = hashlib.sha256(text).digest()
        if text and digest not in seen:
            seen.add(digest)
            held_out = is_validation(path, share)
            texts[held_out].append(text)
            files[held_out].append(path)
    if not (files[False] and files[True]):
        raise DataError(
            f"expected Python source files for training and for validation in {library}, found "
            f"{len(files[False])} and {len(files[True])}. A Python that keeps its library in a zip file or as bytecode "
            "only does not have them. Fix: run the demo with a Python from python.org, your distribution or conda"
        )
    return Corpus(b"\n".join(texts[False]), b"\n".join(texts[True]), tuple(files[False]), tuple(files[True]))


def _read(path: Path) -> bytes:
    """The text of a file; empty if it is not UTF-8."""
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return b""
    return text.replace(b"\r\n", b"\n")


class Windows(Dataset[Tensor]):
    """Fixed windows over a text in memory.

    An item is a `uint8` tensor of `length + 1` bytes. Windows overlap by one byte, so that each byte except the first is
    predicted once.

    Args:
        text: At least `length + 1` bytes.
        length: The number of predicted bytes per window.
        limit: The maximum number of windows, spread evenly over the text.

    Raises:
        ConfigurationError: `length` or `limit` is less than 1.
        DataError: The text is shorter than one window.
    """

    def __init__(self, text: bytes, length: int, limit: int | None = None) -> None:
        if length < 1 or (limit is not None and limit < 1):
            raise ConfigurationError(f"expected length ≥ 1 and limit ≥ 1, got length={length} and limit={limit}.")
        self.length = length
        self.total = (len(text) - 1) // length
        if self.total < 1:
            raise DataError(
                f"expected a text of at least {length + 1} bytes for windows of length {length}, got {len(text)}. "
                f"Fix: use a longer text, or length={max(len(text) - 1, 1)}"
            )
        self.count = self.total if limit is None else min(limit, self.total)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(f"index {index} of {self.count} windows")
        start = index * self.total // self.count * self.length
        return self.text[start : start + self.length + 1]

    def all(self) -> Tensor:
        """Every window, shape (len(self), length + 1)."""
        return torch.stack([self[index] for index in range(len(self))])


class SourceCode(DataModule):
    """The standard library as batches of windows: `uint8` tensors of shape (batch, context + 1).

    Args:
        context: The number of predicted bytes per window.
        batch_size: Windows per training batch.
        val_windows: Windows to validate on, spread evenly over the validation files.
        library: A folder of Python files (default: the standard library of this Python).

    Attributes:
        corpus: The text and the names of the files, after `setup`.
        train, val: The windows, after `setup`.
    """

    corpus: Corpus
    train: Windows
    val: Windows

    def __init__(self, context: int = 64, batch_size: int = 16, val_windows: int = 1024, library: Path | None = None) -> None:
        self.context = context
        self.batch_size = batch_size
        self.val_windows = val_windows
        self.library = library

    def setup(self, stage: str = "fit") -> None:
        """Read the files, once."""
        if not hasattr(self, "corpus"):
            self.corpus = read_corpus(self.library)
            self.train = Windows(self.corpus.train, self.context)
            self.val = Windows(self.corpus.val, self.context, self.val_windows)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """All training windows, shuffled."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The validation windows, in larger batches."""
        return DataLoader(self.val, batch_size=64)


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
