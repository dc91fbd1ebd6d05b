"""Reads files of `torch.save` in a process of its own: `python -m … SOURCE TARGET [SOURCE TARGET …]`.

This is the only module that calls `torch.load`, and always with `weights_only=True`, which runs no code of the file. Classes
that it does not know are replaced by an empty class, so that one such value does not prevent reading the others. Each TARGET is
written as `trainkit.state.single_file` writes objects, and has no code in it either.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.state.single_file import write_object

__all__ = ["main"]

_PLAIN = (bool, int, float, str, bytes, type(None))
_OMITTED = object()


class _Unknown:
    """Stands for a value of a class that is not read."""

    origin = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def main(arguments: list[str]) -> int:
    """Convert pairs of files; the exit code is 1 if one cannot be read, with the reason on stderr."""
    for source, target in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            value = _load(source)
        except Exception as error:  # whatever a damaged or foreign file causes
            print(f"{type(error).__name__}: {_shortened(str(error))}", file=sys.stderr)
            return 1
        omitted: list[str] = []
        plain = _plain_of(value, "", omitted)
        write_object(Path(target), {"value": None if plain is _OMITTED else plain, "omitted": omitted})
    return 0


def _shortened(text: str) -> str:
    """The line of torch's long messages that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = (line for line in lines if line.startswith(("WeightsUnpickler error", "Trying to load unsupported", "Unsupported")))
    return next(told, lines[0] if lines else "")


def _load(source: str) -> Any:
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except ValueError:  # the format of torch before 1.6
        refused = []
    known: list[Any] = [argparse.Namespace]
    known += [(type("Unknown", (_Unknown,), {"origin": name}), name) for name in refused if name != "argparse.Namespace"]
    with torch.serialization.safe_globals(known):
        return torch.load(source, map_location="cpu", weights_only=True)


def _plain_of(value: Any, where: str, omitted: list[str]) -> Any:
    """The value with plain containers; what has another type is omitted, and noted in `omitted`."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in _PLAIN or isinstance(value, torch.dtype | torch.device):
        return value
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        items = {key: _plain_of(item, f"{where}.{key}".lstrip("."), omitted) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _OMITTED and type(key) in _PLAIN}
    if isinstance(value, list | tuple | set):
        return _plain_items(value, where, omitted)
    origin = getattr(value, "origin", "") or f"{type(value).__module__}.{type(value).__qualname__}"
    omitted.append(f"{where or 'the value'} ({origin})")
    return _OMITTED


def _plain_items(value: list[Any] | tuple[Any, ...] | set[Any], where: str, omitted: list[str]) -> Any:
    found = [_plain_of(item, f"{where}[{n}]", omitted) for n, item in enumerate(value)]
    kept = [item for item in found if item is not _OMITTED]
    return kept if isinstance(value, list) else tuple(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
