"""JSON from a file that may be damaged or hostile: duplicate keys, `NaN`, `1e999` and deep nesting are errors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from json import JSONDecoder
from typing import Any, NoReturn

import numpy as np

from trainkit.errors import CorruptCheckpointError

__all__ = ["MAX_DEPTH", "MAX_JSON_BYTES", "strict_json"]

MAX_JSON_BYTES = 64 * 2**20  # larger JSON is rejected unread
MAX_DEPTH = 100  # of nested arrays and objects; deeper JSON is rejected before it is parsed
_MAX_DIGITS = 1100  # of one number, as int() takes quadratic time; longer integers are written in hexadecimal


def strict_json(data: bytes | memoryview, what: str, hook: Callable[[dict[str, Any]], Any] = lambda value: value) -> Any:
    """Parse UTF-8 text of at most `MAX_JSON_BYTES`, nested at most `MAX_DEPTH` deep.

    `hook` is called with each object, the innermost first; its result replaces the object. Raises
    `CorruptCheckpointError`, which names `what` and the reason.
    """

    def refuse(reason: str) -> NoReturn:
        raise CorruptCheckpointError(f"{what}: {reason}")

    def pairs(found: list[tuple[str, Any]]) -> Any:
        value = dict(found)
        if len(value) != len(found):
            refuse(f"the key {Counter(key for key, _ in found).most_common(1)[0][0]!r:.200} occurs more than once")
        return hook(value)

    def number(text: str, kind: Callable[[str], float]) -> float:
        if len(text) > _MAX_DIGITS:
            refuse(f"a number has {len(text):,} characters, expected at most {_MAX_DIGITS:,}")
        value = kind(text)
        return value if kind is int or math.isfinite(value) else refuse(f"the number {text:.40} is too large")

    if len(data) > MAX_JSON_BYTES:
        refuse(f"{len(data):,} bytes of JSON, expected at most {MAX_JSON_BYTES:,}")
    unescaped = bytes(data).replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = re.sub(rb'"[^"]*"?', b"", unescaped).translate(None, bytes(set(range(256)) - set(b"[]{}")))
    steps = np.frombuffer(brackets.translate(bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")), np.int8)
    if (depth := steps.cumsum(dtype=np.int32).max(initial=0)) > MAX_DEPTH:
        refuse(f"JSON nested {depth:,} levels deep, expected at most {MAX_DEPTH}")
    try:
        return JSONDecoder(
            object_pairs_hook=pairs,
            parse_float=lambda text: number(text, float),
            parse_int=lambda text: number(text, int),
            parse_constant=lambda name: refuse(f"{name} is not valid JSON"),
        ).decode(str(data, "utf-8"))
    except (RecursionError, ValueError) as error:  # ValueError: UnicodeDecodeError and JSONDecodeError, with the position
        refuse(f"not valid JSON: {error}")
