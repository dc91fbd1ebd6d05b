"""Files in the format of `torch.save`: written with plain values only, read in a process that runs no code of the file.

`torch.load(path, weights_only=True)` reads what this module writes. It is for other programs; checkpoints have the format of
`trainkit.checkpoint.manifest`.
"""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.checkpoint import plain_files
from trainkit.checkpoint.commit import replacing, sync_folder
from trainkit.checkpoint.tensor_file import memory_key, sync_file
from trainkit.console import join_names, warn, with_article
from trainkit.distributed.requested_devices import find_device
from trainkit.errors import CheckpointWriteError, CorruptCheckpointError, UnsavableError
from trainkit.nested import map_tensors
from trainkit.paths import local_path
from trainkit.tagged_json.codec import MAX_DEPTH, Unregistered, qualified_name
from trainkit.tagged_json.tensors import tensor_problem

__all__ = ["is_torch_file", "load", "note_in", "plain", "read_torch_files", "write_torch_file"]

_SCALARS: tuple[type[Any], ...] = (str, bytes, bool, int, float, type(None))
_ARRAY_KINDS = "biufcOSU"  # arrays of numbers, objects and text
_RECONSTRUCT = np.empty(0).__reduce__()[0]  # what numpy calls to read any array


def write_torch_file(path: Path, value: Any, *, note: str = "") -> None:
    """Write a value to a file, atomically. Parents of the file are created.

    Tensors are stored on the CPU, without gradients; those that share memory in full are stored once, and a part of a larger
    tensor on its own.

    Args:
        path: The file.
        value: What `plain` accepts.
        note: A text in ASCII at the end of the file, which `note_in` returns and `torch.load` ignores. A file that a program
            loads and saves again has none.

    Raises:
        UnsavableError: Something in the value cannot be stored; names the path to it.
        CheckpointWriteError: The file cannot be written; an existing file is unchanged.
    """
    stored = plain(value, "object")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            with open(temporary, "wb") as file:
                # The only call: what is stored is plain, so that reading it needs no code.
                torch.save(stored, file)  # noqa: TID251
            if note:
                with zipfile.ZipFile(temporary, "a") as archive:
                    archive.comment = note.encode("ascii")
            sync_file(temporary)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        reason = f"the disk may be full ({error})" if isinstance(error, RuntimeError) else error
        room = "free disk space, or " if isinstance(error, RuntimeError) or error.errno == errno.ENOSPC else ""
        raise CheckpointWriteError(f"{path} could not be written: {reason}. Fix: {room}choose another path.") from error


def note_in(path: Path) -> str:
    """The note of a file of `write_torch_file`; "" if it has none, or is another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.comment.decode("ascii")
    except (OSError, ValueError, zipfile.BadZipFile):
        return ""


# -------------------------------------------------------------------------------------------------------------- values


def plain(value: Any, where: str, replaced: list[str] | None = None) -> Any:
    """A value of tensors, dict, list, tuple, str, bytes, int, float, bool, None and dtypes, as `write_torch_file` stores it.

    Mappings become dicts, named tuples tuples, numpy's numbers Python's, and members of an enumeration of numbers or texts
    their values. Containers are copied, tensors only if they are not on the CPU or are a part of a larger one.

    A numpy array stays one where `torch.load(weights_only=True)` reads it: after `torch.serialization.add_safe_globals` with
    what the error names.

    Args:
        value: The value.
        where: Its name for messages.
        replaced: If it is given, any other array of numbers becomes a tensor, one of text or objects a list, and the reason is
            added here.

    Raises:
        UnsavableError: Something in it has another type; names the path to it.
    """
    return _PlainCopy(replaced).plain_of(value, where, 0)


class _PlainCopy:
    def __init__(self, replaced: list[str] | None) -> None:
        self._replaced = replaced
        self._tensors: dict[Any, tuple[Tensor, Tensor]] = {}  # the first one is kept, so that no other has its address

    def plain_of(self, value: Any, where: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnsavableError(f"{where:.200} cannot be stored: expected at most {MAX_DEPTH} levels of containers")
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
            return self._array(np.asarray(value), where, depth)
        value = _plainer(value)
        if isinstance(value, Mapping):
            return {
                self._key(key, where, depth): self.plain_of(item, f"{where}[{key!r:.80}]", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple) and not isinstance(value, Unregistered):
            items = (self.plain_of(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value))
            return list(items) if isinstance(value, list) else tuple(items)
        if isinstance(value, torch.dtype):
            return value
        for kind in _SCALARS:
            if type(value) is kind:
                return value
            if isinstance(value, kind):  # a subclass, such as a text with methods
                return kind(value)
        raise UnsavableError(
            f"{where} cannot be stored in torch's format: it is {with_article(type(value).__qualname__)}. Expected tensors, "
            "dict, list, tuple, str, bytes, int, float, bool, None and dtypes. Fix: store its content as these, such as a "
            "state_dict(), or save to a name with another ending, such as .json"
        )

    def _array(self, array: np.ndarray[Any, Any], where: str, depth: int) -> Any:
        needed: list[Any] = [_RECONSTRUCT, np.ndarray, np.dtype, type(array.dtype)]
        declared = torch.serialization.get_safe_globals()  # noqa: TID251 - what the user calls safe to read
        if {*needed} <= {one[0] if isinstance(one, tuple) else one for one in declared}:
            if array.dtype.kind != "O":
                return array
            elements = self.plain_of(array.ravel().tolist(), where, depth)
            return np.fromiter(elements, object, len(elements)).reshape(array.shape)
        reason = (
            "torch.load(weights_only=True) reads a numpy array only in a program that has called "
            f"torch.serialization.add_safe_globals([{', '.join(map(qualified_name, needed))}])"
        )
        kind, fix = ("list", "tolist()") if array.dtype.kind in "OSU" else ("tensor", "torch.from_numpy(array)")
        if self._replaced is None:
            raise UnsavableError(
                f"{where} cannot be stored in torch's format: {reason}. Fix: call that before you save, or store {fix}"
            )
        values = self.plain_of(array.tolist() if kind == "list" else torch.from_numpy(array), where, depth)
        self._replaced.append(f"{where} is stored as a {kind}: {reason}. Fix: call that before training, if you need an array")
        return values

    def _key(self, key: Any, where: str, depth: int) -> Any:
        found = self.plain_of(key, f"a key of {where}", depth + 1)
        if isinstance(found, Tensor | dict | list | np.ndarray):
            raise UnsavableError(
                f"a key of {where} cannot be stored in torch's format: {key!r:.80}. Fix: use a text or a number"
            )
        return found

    def _tensor(self, tensor: Tensor, where: str) -> Tensor:
        key = memory_key(tensor)
        if key not in self._tensors:
            problem = tensor_problem(tensor)
            if problem is not None:
                raise UnsavableError(f"{where} cannot be stored: {problem}")
            values = tensor.detach().cpu().resolve_conj().resolve_neg()
            if values.untyped_storage().nbytes() != values.nbytes or type(values) is not Tensor:
                values = values.as_subclass(Tensor).clone()  # not all memory of the tensor that it is a part of
            self._tensors[key] = tensor, values
        return self._tensors[key][1]


def _plainer(value: Any) -> Any:
    """What stands for a value: its number or text, or its attributes by name."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    return vars(value) if isinstance(value, argparse.Namespace) else value


# ------------------------------------------------------------------------------------------------------------- reading


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like one of `torch.save`, or like a pickle; its name does not matter."""
    try:
        with open(path, "rb") as file:
            return plain_files.is_pickle(file.read(16))
    except OSError:
        return False


def load(f: str | os.PathLike[str], map_location: str | torch.device | None = None) -> Any:
    """Read a file of `Accelerator.save`, of `torch.save`, or any safetensors file. No content is ever code.

    A file of `torch.save` is read in a process of its own, where nothing but plain values is created.

    Args:
        f: The file. A link is followed.
        map_location: The device for its tensors; default: the CPU.

    Returns:
        The object. Any mapping of names to tensors is returned as a dict. Tied names have the same tensor. Values of a file of
        `torch.save` that are neither tensors nor plain are omitted, with a warning that names them.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CorruptCheckpointError: The file has another format or is damaged.
        ConfigurationError: The device is not available.
    """
    f = local_path(f, "f")
    if not is_torch_file(f):
        return plain_files.load(f, map_location)
    device = None if map_location is None else find_device(map_location)
    omitted: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trainkit-load-") as scratch:
        (value,) = read_torch_files([Path(f)], Path(scratch), omitted)
    if omitted:
        warn(f"{f}: not all of it was read: {join_names(omitted)}")
    return value if device is None else map_tensors(value, lambda tensor: tensor.to(device))


def read_torch_files(paths: Sequence[Path], scratch: Path, omitted: list[str], first: int = 0) -> list[Any]:
    """The values in files of `torch.save`, read by `restricted_load` in a process of its own.

    Args:
        paths: The files.
        scratch: A folder on a disk with room for the tensors. It must exist as long as they are used.
        omitted: What is not read is added to it, with the reason.
        first: The number of the first new file in `scratch`.

    Raises:
        CorruptCheckpointError: A file cannot be read.
    """
    if not paths:
        return []
    targets = [scratch / f"{first + number}.bin" for number in range(len(paths))]
    pairs = [str(one) for pair in zip(paths, targets, strict=True) for one in pair]
    command = [sys.executable, "-m", "trainkit.checkpoint.restricted_load", *pairs]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    # The process ends when its standard input does: with this one, even if this one is killed.
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            stderr = process.stderr.read()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _unreadable(paths, stderr)
    values = []
    for path, target in zip(paths, targets, strict=True):
        content = plain_files.load(target)
        omitted += [f"{path.name}: {one}, a class that is not read" for one in content["omitted"]]
        if content["calls"]:
            called = ", ".join(content["calls"][:5])
            omitted.append(f"{path.name}: it tries to run code: it calls {called} when pickle loads it, which was not done")
        values.append(content["value"])
    return values


def _unreadable(paths: Sequence[Path], stderr: str) -> CorruptCheckpointError:
    """The error for files that the process could not read; the reason is the last line that it has printed."""
    reason = (stderr.strip().splitlines() or ["the process that read it ended"])[-1]
    fix = "" if " Fix: " in reason else " Save the weights again with torch.save, or pass a safetensors file."
    return CorruptCheckpointError(f"{', '.join(map(str, paths))} cannot be read: {reason.rstrip('.')}.{fix}")
