"""Reads files of `torch.save` in a process of its own: `python -m … SOURCE TARGET [SOURCE TARGET …]`.

This is the only module that calls `torch.load`, and always with `weights_only=True`, which runs no code of the file. Classes
that it does not know are replaced by an empty class, so that one such value does not prevent reading the others. Each TARGET is
written as `trainkit.checkpoint.plain_files` writes objects, and has no code in it either.

The files may be a stranger's: what would be written is compared with the size of the file and the free space before anything is
written. The process ends when its standard input does, which the process that started it holds open.
"""

from __future__ import annotations

import argparse
import os
import pickletools
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.plain_files import is_pickle, write_object
from trainkit.checkpoint.tensor_file import memory_key
from trainkit.console import echo
from trainkit.tagged_json.codec import MAX_DEPTH

__all__ = ["main"]

_PLAIN = (bool, int, float, str, bytes, type(None))
_OMITTED = object()
_MOST_VALUES = 5_000_000
# Tensors that overlap are written one by one, and an expanded one in full: a file may be smaller than what it declares.
_MOST_TIMES, _SMALL = 2, 64 * 2**20
_HARMLESS = ("_codecs.encode", "copyreg._reconstructor")


class _Unknown:
    """Stands for a value of a class that is not read."""

    origin = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def main(arguments: list[str]) -> int:
    """Convert pairs of files; the exit code is 1 if one cannot be read, with the reason on stderr."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    for source, target in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            _convert(Path(source), Path(target))
        except Exception as error:  # whatever a damaged or foreign file causes
            echo(f"{type(error).__name__}: {_reason(str(error), Path(source))}", file=sys.stderr)
            return 1
    return 0


def _end_with_the_caller() -> None:
    """Wait until the process that started this one closes the pipe, or is killed."""
    while os.read(0, 4096):  # The lock of sys.stdin would be held at the end of the interpreter.
        pass
    os._exit(1)


def _convert(source: Path, target: Path) -> None:
    _check_zip(source)
    value, calls = _load(str(source))
    omitted: list[str] = []
    walk = _Walk(omitted)
    plain = walk.plain_of(value, "", 0)
    most = _MOST_TIMES * source.stat().st_size + _SMALL
    if walk.size > most:
        raise ValueError(f"it declares tensors of {walk.size:,} bytes, and has {source.stat().st_size:,} bytes itself")
    free = shutil.disk_usage(target.parent).free
    if 2 * walk.size > free:  # once here, and once in the checkpoint
        raise ValueError(
            f"its tensors need {2 * walk.size:,} bytes in {target.parent}, which has {free:,} free. Fix: free some, or set "
            "TMPDIR or default_root_dir to a folder on a larger disk"
        )
    content = {"value": None if plain is _OMITTED else plain, "omitted": omitted, "calls": calls}
    write_object(target, content)


def _check_zip(source: Path) -> None:
    """`torch.save` does not compress; a compressed file can be a thousand times larger in memory.

    Raises:
        ValueError: It is compressed, or its entries overlap.
    """
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which torch.save does not do")
        if sum(entry.file_size for entry in entries) > source.stat().st_size:
            raise ValueError("its entries are larger than the file")


def _reason(text: str, source: Path) -> str:
    """What is wrong, and whether the file tries to run code."""
    names = [name for name in _names_in(source) if _is_call(name)]
    blocked = re.search(r"GLOBAL (\S+) whose module \S+ is blocked", text)
    names = list(dict.fromkeys([*names, *([blocked[1]] if blocked else [])]))
    if names:
        called = f"it calls {', '.join(names[:5])} when pickle loads it, which was not done"
        return f"the file tries to run code: {called}. Do not load it with pickle or torch.load(weights_only=False)"
    with open(source, "rb") as file:
        head = file.read(16)
    if not is_pickle(head):
        return "it was not written by torch.save" if head else "it is empty"
    return _shorten(text)


def _names_in(source: Path) -> list[str]:
    """The names that a pickle imports, found in its first megabyte without loading it; none of a zip file."""
    names: list[str] = []
    texts: list[str] = []
    with suppress(Exception), open(source, "rb") as file:  # it need not be a pickle
        for operation, argument, _ in pickletools.genops(file.read(2**20)):
            if operation.name in ("GLOBAL", "INST"):
                names.append(str(argument).replace(" ", "."))
            elif operation.name == "STACK_GLOBAL" and len(texts) > 1:
                names.append(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts = [*texts[-1:], argument]
    return names


def _is_call(name: str) -> bool:
    """Whether a name is probably that of a function of Python's library: `posix.system`, `builtins.eval`."""
    module, _, last = name.rpartition(".")
    known = getattr(sys.modules.get(module), last, None)  # nothing is imported
    return module.partition(".")[0] in sys.stdlib_module_names and not isinstance(known, type) and name not in _HARMLESS


def _shorten(text: str) -> str:
    """The line of torch's long messages that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = (
        line for line in lines if line.startswith(("WeightsUnpickler error", "Trying to load unsupported", "Unsupported"))
    )
    return next(causes, lines[0] if lines else "")


def _load(source: str) -> tuple[Any, list[str]]:
    """The value, and the functions that the file calls, none of which was called."""
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(source)  # noqa: TID251 - it reads names and runs nothing
    except ValueError:  # the format of torch before 1.6
        refused = []
    known: list[Any] = [argparse.Namespace]
    known += [(type("Unknown", (_Unknown,), {"origin": name}), name) for name in refused if name != "argparse.Namespace"]
    # A file of another program, in a process of its own, and only what torch calls safe.
    with torch.serialization.safe_globals(known):  # noqa: TID251
        value = torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251
    return value, [name for name in refused if _is_call(name)]


class _Walk:
    """Makes a value plain. A file may refer to one object often, or to an object in itself: what is visited is counted.

    Attributes:
        size: The bytes of the tensors, each place in memory once, as they are written.
    """

    def __init__(self, omitted: list[str]) -> None:
        self._omitted = omitted
        self._visited = 0
        self._places: set[Any] = set()
        self.size = 0

    def plain_of(self, value: Any, where: str, depth: int) -> Any:
        """The value with plain containers; what has another type is omitted, and noted.

        Raises:
            ValueError: It is nested too deeply, or has too many values.
        """
        self._visited += 1
        if self._visited > _MOST_VALUES or depth > MAX_DEPTH - 10:
            raise ValueError(f"expected at most {_MOST_VALUES:,} values and {MAX_DEPTH - 10} levels")
        return self._plain_of(value, where, depth)

    def _add(self, tensor: Tensor) -> Tensor:
        place = memory_key(tensor)
        if place not in self._places:
            self._places.add(place)
            self.size += tensor.numel() * tensor.element_size()
        return tensor

    def _plain_of(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, Tensor):
            return self._add(value.detach())
        if type(value) in _PLAIN or isinstance(value, torch.dtype | torch.device):
            return value
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if isinstance(value, Mapping | list | tuple | set):
            return self._container_of(value, where, depth)
        origin = getattr(value, "origin", "") or f"{type(value).__module__}.{type(value).__qualname__}"
        self._omitted.append(f"{where or 'the value'} ({origin})")
        return _OMITTED

    def _container_of(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            items = {key: self.plain_of(item, f"{where}.{key!s:.80}".lstrip("."), depth + 1) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not _OMITTED and type(key) in _PLAIN}
        plain = [self.plain_of(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
        kept = [item for item in plain if item is not _OMITTED]
        return kept if isinstance(value, list) else tuple(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
