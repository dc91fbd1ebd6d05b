"""JSON from a file that nobody vouches for: everything unusual is an error, and what it can cost is known beforehand.

Python's own parser takes duplicate keys and bare ``NaN``, turns ``1e999`` into infinity, needs quadratic time for a
number of a million digits and 44 bytes for each byte of ``[[[[…]]]]``. Here one pass over the bytes, before anything
is parsed, bounds the depth and the memory; the rest is refused while parsing.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

import numpy as np

from trainkit.errors import CorruptCheckpointError

__all__ = ["MAX_DEPTH", "MAX_JSON_BYTES", "json_problem", "strict_json"]

MAX_JSON_BYTES = 64 * 2**20
"""Size in bytes from which on JSON is refused unread."""

MAX_DEPTH = 100
"""Depth of nesting, arrays and objects alike, beyond which JSON is refused unparsed."""

_CHUNK = 2**20
_NOT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_RUN = 256  # digits in a row from which on numbers are looked at one by one
_MAX_DIGITS = 1100  # of one number; repr of a float has 25, the integers that are written plainly have 309

# What containers take, by sys.getsizeof: an array with room for four, an object without and with up to five keys.
_ARRAY = sys.getsizeof([]) + 4 * 8
_EMPTY = sys.getsizeof({})
_OBJECT = sys.getsizeof({"": 0})
# Of the 40 times the JSON's size (and 64 MiB) that parsing may take, what text and containers may take. The rest is
# for the numbers and strings in between (at most 15 bytes for each of theirs) and for the bytes themselves.
_TIMES, _SPARE = 35, 24 * 2**20


class _Marks:
    """What one pass over the bytes of JSON tells: depth, containers, widest character, long runs of digits.

    Where the bytes are no JSON its figures may be off, but only from the place on at which the parser gives up.
    """

    def __init__(self, data: memoryview) -> None:
        self.deepest = self.arrays = self.objects = self.empty = self.widest = 0
        self.digits = False
        self._depth = self._inside = 0
        self._last = 0  # the last mark outside of strings
        position = 0
        while position < len(data):
            chunk = bytes(data[position : position + _CHUNK])
            # The first backslash of a pair escapes the second: without pairs, one before a quote escapes it.
            text = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._count(text)
            # A backslash left at the end escapes the first byte of the next chunk, which is then passed over.
            position += len(chunk) + text.endswith(b"\\")

    def _count(self, text: bytes) -> None:
        codes = np.frombuffer(text, np.uint8)
        self.widest = max(self.widest, int(codes.max()))
        blocks = ((codes - 48) < 10)[: len(codes) // _RUN * _RUN].reshape(-1, _RUN)
        self.digits |= bool(blocks.all(axis=1).any())
        marks = np.frombuffer(text.translate(None, _NOT_MARKS), np.uint8)
        if not len(marks):
            return
        quotes = marks == ord('"')
        within = (np.cumsum(quotes, dtype=np.int32) + self._inside) & 1
        self._inside = int(within[-1])
        marks = marks[quotes == within.astype(bool)]  # brackets outside of strings, and the quotes that open strings
        if not len(marks):
            return
        follows = np.concatenate((np.array([self._last], np.uint8), marks))
        self._last = int(marks[-1])
        opened = follows[:-1] == ord("{")
        self.empty += int(np.count_nonzero(opened & (marks == ord("}"))))
        self.objects += int(np.count_nonzero(marks == ord("{")))
        self.arrays += int(np.count_nonzero(marks == ord("[")))
        kind = marks & 0xDF  # [ and { differ in one bit, and so do ] and }
        depth = np.cumsum((kind == ord("[")).astype(np.int32) - (kind == ord("]"))) + self._depth
        self.deepest = max(self.deepest, int(depth.max()))
        self._depth = int(depth[-1])


def json_problem(data: bytes | memoryview) -> str | None:
    """Why JSON would be refused before it is parsed, or None: too large, too deep, or containers with nothing in them."""
    return _problem_and_marks(memoryview(data))[0]


def _problem_and_marks(data: memoryview) -> tuple[str | None, _Marks | None]:
    size = len(data)
    if size > MAX_JSON_BYTES:
        return f"{size:,} bytes of JSON; a checkpoint has at most {MAX_JSON_BYTES:,}", None
    marks = _Marks(data)
    if marks.deepest > MAX_DEPTH:
        return f"JSON nested {marks.deepest:,} deep; a checkpoint's is at most {MAX_DEPTH}", marks
    width = 4 if marks.widest >= 0xF0 else 2 if marks.widest >= 0xC4 else 1
    full = marks.objects - marks.empty
    cost = width * size + _ARRAY * marks.arrays + _EMPTY * marks.empty + _OBJECT * full
    if cost > _TIMES * size + _SPARE:
        count = marks.arrays + marks.objects
        return f"{size:,} bytes of JSON that are {count:,} arrays and objects with next to nothing in them", marks
    return None, marks


def strict_json(data: bytes | memoryview, what: str, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON that may be damaged or hostile.

    It takes at most 64 MiB and 40 times the size of ``data`` in memory, and time in proportion to that size.

    Args:
        data: the text, UTF-8, at most ``MAX_JSON_BYTES`` and ``MAX_DEPTH`` deep.
        what: the file, for the message.
        hook: called with each object, the innermost first; what it returns takes the object's place.

    Raises:
        CorruptCheckpointError: the text is no JSON, or is one that is refused (see the module); says which file and why.
    """

    def refuse(reason: str) -> NoReturn:
        raise CorruptCheckpointError(f"{what}: {reason}")

    def pairs(found: list[tuple[str, Any]]) -> Any:
        value = dict(found)
        if len(value) != len(found):
            twice = next(key for key, times in Counter(key for key, _ in found).items() if times > 1)
            refuse(f"the key {twice!r:.200} is there twice")
        return value if hook is None else hook(value)

    def decimal(text: str) -> float:
        if len(text) > _MAX_DIGITS:
            refuse(f"a number of {len(text):,} characters")
        value = float(text)
        if math.isinf(value):
            refuse(f"the number {text:.40} is too large")
        return value

    def integer(text: str) -> int:
        if len(text) > _MAX_DIGITS:
            refuse(f"a number of {len(text):,} characters")
        return int(text)

    def constant(name: str) -> NoReturn:
        refuse(f"{name}, which is no JSON")

    view = memoryview(data)
    problem, marks = _problem_and_marks(view)
    if problem is not None or marks is None:
        refuse(problem or "cannot be read")
    try:
        # int itself is parsed in C; a function of ours, five times slower, only where long numbers may be.
        decoder = JSONDecoder(
            object_pairs_hook=pairs,
            parse_float=decimal,
            parse_int=integer if marks.digits else int,
            parse_constant=constant,
        )
        return decoder.decode(str(view, "utf-8"))
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 at byte {error.start:,}, so no JSON")
    except JSONDecodeError as error:
        refuse(f"no JSON: {error.msg} at character {error.pos:,}")
    except RecursionError:
        refuse("its nesting is too deep for what is left of the stack")
    except ValueError as error:
        refuse(f"no JSON: {error}")
