"""The algorithms that the files of a checkpoint are checked with. A manifest names one for all of its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import xxhash

from trainkit.checks import choice

__all__ = ["CHECKSUMS", "DEFAULT_CHECKSUM", "Algorithm", "Hasher", "check_checksum"]

_HEXADECIMAL = re.compile(r"[0-9a-f]*")


class Hasher(Protocol):
    """An object of `hashlib`, or one like it."""

    def update(self, data: memoryview, /) -> object:
        """Continue with these bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""


@dataclass(frozen=True)
class Algorithm:
    """A checksum.

    Attributes:
        title: Its name in messages.
        start: Returns an object that computes it.
        digits: Number of hexadecimal digits of a digest.
    """

    title: str
    start: Callable[[], Hasher]
    digits: int

    def accepts(self, value: object) -> bool:
        """Whether a value has the form of a digest, in lowercase."""
        return isinstance(value, str) and len(value) == self.digits and _HEXADECIMAL.fullmatch(value) is not None


DEFAULT_CHECKSUM = "xxh3-128"
"""Finds damage at the speed of the memory. It is no defense: other bytes with the same digest can be constructed."""

CHECKSUMS: Mapping[str, Algorithm] = {
    DEFAULT_CHECKSUM: Algorithm("XXH3-128", xxhash.xxh3_128, 32),
    "sha256": Algorithm("SHA-256", hashlib.sha256, 64),
}
"""By the names that a manifest has for them."""


def check_checksum(value: object, what: str, *, optional: bool = False) -> None:
    """Check an argument `checksum`; `what` is its name in the message, such as `"ModelCheckpoint(checksum=)"`."""
    choice(value, what, tuple(CHECKSUMS), optional=optional)
