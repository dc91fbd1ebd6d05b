"""`Manifest`: the description of a checkpoint, with the size and digest of each file; and which folders are checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.model_files import MODEL, files_problem
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.errors import CheckpointError, CorruptCheckpointError, UnsavableError
from trainkit.tagged_json.codec import MAX_DEPTH, MAX_JSON_BYTES, strict_json

__all__ = [
    "DIGEST",
    "FORMAT_VERSION",
    "MANIFEST",
    "MAX_LISTED",
    "MAX_NAME",
    "TORCH_SUFFIXES",
    "WEIGHT_SUFFIXES",
    "FileEntry",
    "Manifest",
    "checkpoint_identity",
    "describe_siblings",
    "digest_line",
    "format_version",
    "has_checkpoint_files",
    "is_checkpoint",
    "is_file_name",
    "is_hook_file_name",
    "is_pretrained_folder",
    "list_names",
    "make_hidden_path",
    "name_clash",
    "weight_files",
    "why_not_a_checkpoint",
]


FORMAT_VERSION = 4
# Earlier versions of trainkit read a checkpoint whose weights have the names of the module, and that no hook has written to.
_PLAIN, _WITH_HOOKS, _WITH_MODEL_FILES = 2, 3, 4
MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
# Names that are devices on Windows, with any extension.
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
# The run id is used in folder names.
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SAVED_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_FORMAT_1_CHECKSUM = "sha256"
_NON_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its size in bytes, and the digest of its content by `Manifest.checksum`, in hexadecimal."""

    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        run_id: The run that saved the checkpoint; letters, digits, `-` and `_`.
        save_counter: Number of this save in the run; later saves have higher numbers.
        step: Number of optimizer steps so far.
        epoch: The current epoch, from 0.
        position: The position in the data; plain JSON.
        seed: The seed of the run.
        order_version: Version of the algorithm for the order of the samples.
        key_version: Version of the algorithm for the keys of randomness.
        world_size: The world size of the run.
        strategy: The name of the strategy.
        precision: The name of the precision.
        contents: What is stored, such as `{"model": "all", "optimizer": True, "resumable": True}`; plain JSON.
            `"by_hook"` lists the stems of models whose weights are not stored, since a hook has saved them itself.
        aliases: Stem of the file → name of a tied tensor → the name that it is stored under.
        irregular: Keys of optimizer tensors that do not have the shape of their parameter.
        finite: Whether all parameters are finite; `None` if it is not known, in a checkpoint of an earlier version.
        metrics: The values of metrics at the save, by name; any float.
        saved_by: What requested the save; `None` for the user.
        saved_at: Time in UTC, as `2026-11-20T15:07:48.123456Z`, so that the strings sort by time.
        trainkit_version: The version of trainkit that saved it.
        format_version: The version of the format.
        checksum: The algorithm of the digests of the files, of `CHECKSUMS`; `"sha256"` in format 1.
        files: All other files, by name.
        hook_files: The files that hooks have written, by name: `config.json` or `unet/config.json`.
        model_files: The files that the weights of the model are in, and how their names differ from those of the module, see
            `trainkit.checkpoint.model_files`; empty if they are in `model.safetensors` by the module's names.
    """

    run_id: str
    save_counter: int
    step: int
    epoch: int
    position: dict[str, Any]
    seed: int
    order_version: int
    key_version: int
    world_size: int
    strategy: str
    precision: str
    contents: dict[str, Any]
    aliases: dict[str, dict[str, str]]
    irregular: list[str]
    finite: bool | None = None
    metrics: dict[str, float]
    saved_by: str | None
    saved_at: str
    trainkit_version: str
    format_version: int
    checksum: str
    files: dict[str, FileEntry]
    hook_files: dict[str, FileEntry] = field(default_factory=dict)
    model_files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def all_files(self) -> dict[str, FileEntry]:
        """All files but the manifest and its digest, by name."""
        return {**self.files, **self.hook_files}

    @property
    def total_size(self) -> int:
        """The bytes of all files but the manifest and its digest."""
        return sum(entry.size for entry in self.all_files.values())

    @property
    def by_hook(self) -> list[str]:
        """The stems of models whose weights are not stored, since a hook has saved them itself."""
        return list(self.contents.get("by_hook", []))

    def files_of(self, stem: str) -> dict[str, dict[str, Any]]:
        """The stems of the files that the tensors of a part are in, and how their names differ from those of the module."""
        return self.model_files if stem == MODEL and self.model_files else {stem: {"prefix": ""}}

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`: strict JSON in ASCII; metrics that are not finite are strings.

        Raises:
            UnsavableError: `from_bytes` would not accept a field; the message names it.
        """
        try:
            metrics = {name: _metric_to_json(value) for name, value in self.metrics.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise UnsavableError(f"manifest['metrics']: expected a dict of floats, got {self.metrics!r}") from error
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"metrics": metrics, "files": self._as_json(self.files), "hook_files": self._as_json(self.hook_files)}
        problem = _problem(values)
        if problem is not None:
            raise UnsavableError(f"manifest{problem}")
        for name in ("hook_files", "model_files"):
            if not values[name]:
                del values[name]
        first = {"format_version": values.pop("format_version")}
        data = json.dumps(first | values, indent=1, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"
        if len(data) > MAX_JSON_BYTES:
            raise UnsavableError(f"the manifest has {len(data)} bytes, expected at most {MAX_JSON_BYTES}")
        return data

    def _as_json(self, files: Mapping[str, FileEntry]) -> dict[str, dict[str, int | str]]:
        return {name: {"size": entry.size, self.checksum: entry.digest} for name, entry in files.items()}

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Manifest:
        """Decode a manifest and check every field; unknown fields are ignored.

        Args:
            data: The content of `manifest.json`. The caller compares it with its digest.
            what: The name of the file in messages.

        Raises:
            CorruptCheckpointError: It is not strict JSON, or a field is missing or invalid.
            CheckpointError: A later version of trainkit wrote it, in a format that this version cannot read.
        """
        values = strict_json(data, what)
        if not isinstance(values, dict):
            raise CorruptCheckpointError(f"{what}: expected a JSON object, got {_short(values)}")
        version = values.get("format_version")
        if _is_count(version) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{what}: written by a newer trainkit (format {version}; this one reads {FORMAT_VERSION}). "
                "Fix: upgrade with: pip install -U trainkit-torch"
            )
        values.setdefault("finite", None)  # earlier versions did not write it
        values.setdefault("hook_files", {})
        values.setdefault("model_files", {})
        if version == 1:
            values.setdefault("checksum", _FORMAT_1_CHECKSUM)
        problem = _problem(values)
        if problem is not None:
            raise CorruptCheckpointError(f"{what}: {problem}")
        known = {field.name: values[field.name] for field in fields(cls)}
        known["metrics"] = {name: float(value) for name, value in known["metrics"].items()}
        for kind in ("files", "hook_files"):
            known[kind] = {name: FileEntry(entry["size"], entry[known["checksum"]]) for name, entry in known[kind].items()}
        return cls(**known)


def digest_line(data: bytes) -> bytes:
    """The content of `manifest.sha256` for a `manifest.json` with these bytes; `sha256sum -c` can read it."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode("ascii")


def is_file_name(name: object) -> bool:
    """Whether a file of a checkpoint can have this name on every system: one plain name, not that of the manifest."""
    return (
        isinstance(name, str)
        and _FILE_NAME.fullmatch(name) is not None
        and ".." not in name
        and not name.endswith(".")
        and not name.lower().startswith("manifest.")
        and _DEVICE.fullmatch(name) is None
    )


def is_hook_file_name(name: object) -> bool:
    """Whether a file that a hook writes can have this name: that of a file, or of a file in a folder, as `unet/config.json`."""
    return isinstance(name, str) and name.count("/") <= 1 and all(map(is_file_name, name.split("/")))


def format_version(*, hooks: bool, model_files: bool) -> int:
    """The version of the format of a new checkpoint: the lowest that reads it.

    Args:
        hooks: Whether hooks have a part in it.
        model_files: Whether the manifest says which files the weights of the model are in.
    """
    return _WITH_MODEL_FILES if model_files else _WITH_HOOKS if hooks else _PLAIN


def _metric_to_json(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _problem(values: dict[str, Any]) -> str | None:
    """What is wrong with decoded fields, as `['field']: …`; `None` if they are valid."""
    for name, (is_right, expected) in _EXPECTED.items():
        if name not in values:
            return f"[{name!r}] is missing"
        if not is_right(values[name]):
            return f"[{name!r}]: expected {expected}, got {_short(values[name])}"
    if values["format_version"] == 1 and values["checksum"] != _FORMAT_1_CHECKSUM:
        return f"['checksum']: expected {_FORMAT_1_CHECKSUM!r} in format 1, got {_short(values['checksum'])}"
    algorithm = CHECKSUMS[values["checksum"]]
    listed = [(kind, name, entry) for kind in ("files", "hook_files") for name, entry in values[kind].items()]
    for kind, name, entry in listed:
        if not algorithm.accepts(entry.get(values["checksum"])):
            return (
                f"[{kind!r}][{name!r}][{values['checksum']!r}]: expected a {algorithm.title} of {algorithm.digits} hexadecimal "
                f"digits, got {_short(entry.get(values['checksum'], 'none'))}"
            )
    if len({name.lower() for name in values["files"]}) < len(values["files"]):
        return "['files']: two names differ only in upper and lower case"
    if (clash := name_clash([name for _, name, _ in listed])) is not None:
        return f"['hook_files']: {clash!r} is also the name of another file or folder"
    return _model_files_problem(values["model_files"], values["format_version"])


def _model_files_problem(files: Any, version: int) -> str | None:
    problem = files_problem(files)
    if problem is None and files and version < _WITH_MODEL_FILES:  # an earlier reader would misread the names
        problem = f"expected none in format {version}"
    return None if problem is None else f"['model_files']: {problem}"


def name_clash(names: Collection[str]) -> str | None:
    """A name that two files have, or a file and a folder, on a system that ignores case; `None` if there is none."""
    taken: set[str] = set()
    for name in names:
        if name.lower() in taken:
            return name
        taken.add(name.lower())
    folders = {name.lower().rpartition("/")[0] for name in names}
    return next((name for name in names if name.lower() in folders), None)


def _short(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_plain(value: Any, depth: int = MAX_DEPTH - 10) -> bool:
    """Whether JSON preserves the value."""
    if depth == 0:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item, depth - 1) for item in value)
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and _is_plain(value)


def _are_contents(value: Any) -> bool:
    kinds = {"model": str, "optimizer": bool, "resumable": bool, "module": str, "by_hook": list}
    if not _is_map(value) or not all(isinstance(value.get(name, kind()), kind) for name, kind in kinds.items()):
        return False
    return all(map(_is_text, value.get("by_hook", [])))


def _are_aliases(value: Any) -> bool:
    return _is_map(value) and all(
        isinstance(names, dict) and all(isinstance(name, str) for name in names.values()) for names in value.values()
    )


def _are_metrics(value: Any) -> bool:
    return _is_map(value) and all(
        item in _NON_FINITE if isinstance(item, str) else type(item) is float or _is_integer(item) for item in value.values()
    )


def _are_files(value: Any, is_name: Callable[[object], bool] = is_file_name) -> bool:
    return isinstance(value, dict) and all(
        is_name(name) and isinstance(entry, dict) and _is_count(entry.get("size")) for name, entry in value.items()
    )


def _is_time(value: Any) -> bool:
    if not isinstance(value, str) or _SAVED_AT.fullmatch(value) is None:
        return False
    try:
        datetime.fromisoformat(value[:-1])
    except ValueError:
        return False
    return True


_COUNT = (_is_count, "an integer ≥ 0")
_INTEGER = (_is_integer, "an integer of at most 64 bits")
_TEXT = (_is_text, "a string")
_MAP = (_is_map, "a JSON object with string keys")
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format_version": (lambda value: type(value) is int and 1 <= value <= FORMAT_VERSION, "an integer ≥ 1"),
    "run_id": (
        lambda value: isinstance(value, str) and _RUN_ID.fullmatch(value) is not None,
        "1 to 64 letters, digits, '-' and '_'",
    ),
    "save_counter": _COUNT,
    "step": _COUNT,
    "epoch": _COUNT,
    "position": _MAP,
    "seed": _INTEGER,
    "order_version": _COUNT,
    "key_version": _COUNT,
    "world_size": (lambda value: _is_count(value) and value > 0, "an integer ≥ 1"),
    "strategy": _TEXT,
    "precision": _TEXT,
    "contents": (
        _are_contents,
        "a JSON object: strings for 'model' and 'module', booleans for 'optimizer' and 'resumable', a list of strings for "
        "'by_hook'",
    ),
    "aliases": (_are_aliases, "a JSON object of JSON objects of strings"),
    "irregular": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of strings"),
    "finite": (lambda value: value is None or isinstance(value, bool), "true, false or null"),
    "metrics": (_are_metrics, "a JSON object of numbers, 'nan', 'inf' or '-inf'"),
    "saved_by": (lambda value: value is None or isinstance(value, str), "a string or null"),
    "saved_at": (_is_time, "a time such as '2026-11-20T15:07:48.123456Z'"),
    "trainkit_version": _TEXT,
    "checksum": (
        lambda value: isinstance(value, str) and value in CHECKSUMS,
        f"the name of a checksum, one of {', '.join(map(repr, CHECKSUMS))}",
    ),
    "files": (_are_files, "file names without a path, each with a size and a digest"),
    "hook_files": (
        lambda value: _are_files(value, is_hook_file_name),
        "names of files, or of files in a folder, each with a size and a digest",
    ),
}


MAX_NAME = 255
"""Bytes of a file name on every file system in use."""

MAX_LISTED = 10
"""The number of names that a message lists."""

TORCH_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".tar")
"""How the names of files of `torch.save` end, in lower case: `.tar` in PyTorch's tutorials, and `model_best.pth.tar`."""

WEIGHT_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
"""How the names of files of weights end, in lower case."""

_RESERVED = re.compile(
    r"manifest\.json|manifest\.sha256|state\.json|(model(_\d+)?|optimizer|state)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
)

# Files and folders in checkpoints of Hugging Face's Trainer, Accelerate and DeepSpeed.
_OF_OTHERS = ("trainer_state.json", "optimizer.bin", "pytorch_model.bin", "pytorch_model.bin.index.json", "zero")


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, valid or damaged: a folder that has a file with a name of a checkpoint's files.

    A folder whose name starts with `.` is not one: it is not finished, or is being removed.
    """
    return not path.name.startswith(".") and has_checkpoint_files(path)


def make_hidden_path(path: Path, mark: str) -> Path:
    """`.<name><mark>` in the same folder, which readers ignore; a long name is cut."""
    name, room = path.name, MAX_NAME - 1 - len(mark)
    if len(os.fsencode(name)) > room:
        name = os.fsencode(name)[:room].decode("utf-8", "ignore")
    return path.parent / f".{name}{mark}"


def has_checkpoint_files(folder: Path) -> bool:
    """Whether a folder has a file with a name of a checkpoint's files, regardless of its own name."""
    for _ in range(10):
        before = checkpoint_identity(folder)
        if _lists_checkpoint_files(folder):
            return True
        # otherwise the listed folder was replaced, and is being removed
        if checkpoint_identity(folder) == before:
            return False
    return True


def _lists_checkpoint_files(folder: Path) -> bool:
    try:
        return any(map(_RESERVED.fullmatch, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError as error:  # a failing disk must not look like a folder without checkpoints
        return error.errno != errno.ELOOP


def checkpoint_identity(path: Path) -> bytes | None:
    """The digest of the checkpoint at `path`, empty if it has none; `None` if there is no folder.

    The folder's inode is no identity: a new folder may get the same one.
    """
    try:
        return read_small_file(path / DIGEST, 1024)
    except CorruptCheckpointError:
        return b"" if path.is_dir() else None


def why_not_a_checkpoint(path: Path) -> str:
    """Why there is no checkpoint at `path`, with the checkpoints and files of weights next to it."""
    if (foreign := _of_another_program(path)) is not None:
        return foreign
    inside = _checkpoints_in(path)
    if inside:
        return (
            f"{path} is a folder of checkpoints, expected one of them: {list_names(inside)}. Fix: {str(path / inside[-1])!r}."
        )
    if not os.path.lexists(path):
        reason = "this path does not exist"
    elif path.is_symlink() and not path.exists():
        reason = f"this is a link to {os.readlink(path)}, which does not exist"
    elif path.name.startswith(".") and has_checkpoint_files(path):
        reason = "a name that starts with '.' marks one that is incomplete or being removed"
    elif path.is_dir():
        readable = os.access(path, os.R_OK | os.X_OK)
        reason = "the folder contains no checkpoint files" if readable else "the folder cannot be read"
    elif is_checkpoint(path.parent):
        return f"{path} is a file in a checkpoint; expected the folder. Fix: {str(path.parent)!r}."
    else:
        reason = "this is a file; a checkpoint is a folder"
    checkpoints = _checkpoints_in(path.parent)
    files = weight_files(name for name in _names_in(path.parent) if (path.parent / name).is_file())
    return f"{path}: expected a checkpoint, but {reason}. {describe_siblings(path, str(path.parent), checkpoints, files)}"


def weight_files(names: Iterable[str]) -> list[str]:
    """Those of the names of a folder that end like files of weights, sorted."""
    return sorted(name for name in names if name.lower().endswith(WEIGHT_SUFFIXES) and not name.startswith("."))


def describe_siblings(path: Path, where: str, checkpoints: list[str], files: list[str]) -> str:
    """What is next to a path, for a message, and which of it has a similar name."""
    near = f"Checkpoints in {where}: {list_names(checkpoints) or 'none'}."
    near += f" Weight files: {list_names(files)}." if files else ""
    close = get_close_matches(path.name, [*checkpoints, *files], n=1)
    return near + (f" Did you mean {close[0]!r}?" if close else "")


def _of_another_program(path: Path) -> str | None:
    """How to convert another program's checkpoint; `None` if it does not look like one."""
    name = path.stem if path.suffix else f"{path.name}-imported"
    fix = f"Convert it: trainkit checkpoint import {path} {name} (docs/moving-over/import-a-checkpoint.md)"
    expected = "expected a trainkit checkpoint, which is a folder"
    if path.suffix == ".ckpt" and path.is_file():
        return f"{path} is a Lightning checkpoint, which is a file; {expected}. {fix}"
    if path.suffix.lower() in TORCH_SUFFIXES and path.is_file():
        return f"{path} is a file written by torch.save; {expected}. {fix}"
    if path.suffix == ".safetensors" and path.is_file() and not is_checkpoint(path.parent):
        return f"{path} is a file of weights; {expected}. {fix}"
    if path.suffix == ".ckpt" and path.is_dir():
        return (
            f"{path} is a sharded Lightning checkpoint (FSDP or DeepSpeed); expected a trainkit checkpoint. Convert it "
            "to a single file with Lightning, then import it: docs/moving-over/import-a-checkpoint.md"
        )
    if is_pretrained_folder(path):
        return (
            f"{path} is a folder of transformers or PEFT, which cannot be resumed; expected a checkpoint of trainkit. To start "
            f"from its weights, make the model of it: from_pretrained({str(path)!r}). To continue a run of the Hugging Face "
            f"Trainer, convert its checkpoint: trainkit checkpoint import {path} {name} --prefix model. --names names.txt "
            "(docs/moving-over/import-a-checkpoint.md)"
        )
    if path.is_dir() and any((path / mark).exists() for mark in _OF_OTHERS):
        return f"{path} is a checkpoint of another program; expected one of trainkit. {fix}"
    return None


def is_pretrained_folder(path: Path) -> bool:
    """Whether a folder is one of `from_pretrained` that trainkit has not saved: nothing in it is a checkpoint's alone."""
    names = _names_in(path)
    ours = [name for name in names if _RESERVED.fullmatch(name) and not name.startswith("model")]
    return not ours and ("config.json" in names or "adapter_config.json" in names)


def _checkpoints_in(folder: Path) -> list[str]:
    return [name for name in _names_in(folder) if is_checkpoint(folder / name)]


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def list_names(names: list[str]) -> str:
    """The last names of a list, for a message."""
    return ", ".join(repr(name) for name in names[-MAX_LISTED:]) + (" and others" if len(names) > MAX_LISTED else "")
