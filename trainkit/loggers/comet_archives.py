"""What Comet keeps of experiments that are offline: archives, and the folders that killed processes have left.

An archive is a zip file ``<key>….zip`` with ``experiment.json``, ``messages.json`` (JSON lines in the order in which they were
logged) and the files that messages name. ``comet upload`` sends it. comet_ml writes one when the experiment ends, from a folder
with the same content; here that folder lies in ``<folder>/<key>.unfinished``, so that it outlives the process and its machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from trainkit.checkpoint.process_identity import ProcessIdentity
from trainkit.console import warn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["archive_unfinished", "claim", "is_written", "kept_in", "media", "steps_in_archives", "tidy", "unfinished"]

_MESSAGES, _ABOUT = "messages.json", "experiment.json"
_OWNER = ".owner"  # beside the folder of an experiment: whose it is
_TAIL = 4096  # bytes at the end of the messages in which a message just logged is looked for
_PART = re.compile(r"-part(\d+)\.zip$")
_LOCK = threading.Lock()
_KINDS = {"visualization": "image", "text-sample": "text", "histogram3d": "histogram"}


def media(kind: str, name: str) -> str:
    """What records of an image, a text or a histogram are counted under, beside the metrics."""
    return f"<{kind}> {name}"


def unfinished(folder: Path, key: str) -> Path:
    """Where an offline experiment is kept until it ends."""
    return folder / f"{key}.unfinished"


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Temporary folders that are made meanwhile are made in this one: comet_ml has no argument that says where."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _LOCK, _alone(folder.parent):  # else another process may tidy it away before anything is in it
        folder.mkdir(exist_ok=True)
        before, tempfile.tempdir = tempfile.tempdir, str(folder)
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def _alone(folder: Path, wait: bool = True) -> Iterator[None]:
    """Within it no other process is within it for this folder, where the system and its file system can do that.

    Args:
        folder: of the archives.
        wait: for others.

    Raises:
        BlockingIOError: another is within it, and it is not to be waited for.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has it open too
        os.close(descriptor)


def claim(experiment: Path) -> None:
    """Say that an experiment's folder is this process's, so that no other takes it for what a killed one has left."""
    experiment.with_name(experiment.name + _OWNER).write_text(json.dumps(ProcessIdentity.this().to_json()), encoding="utf-8")


def _owner(experiment: Path) -> ProcessIdentity | None:
    """Another process, which logs to it still."""
    try:
        owner = ProcessIdentity.from_json(json.loads(experiment.with_name(experiment.name + _OWNER).read_text("utf-8")))
    except (OSError, ValueError):
        return None
    while owner is not None and owner.state() == "dying":
        time.sleep(0.01)
    return owner if owner is not None and owner.state() == "live" and owner != ProcessIdentity.this() else None


def is_written(folder: Path, name: str, value: int) -> bool:
    """Whether comet_ml's thread has written what was logged as ``log_other(name, value)``, and so all before it."""
    try:
        with (folder / _MESSAGES).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # the last is not whole, or empty
    except FileNotFoundError:
        return False
    for message in _parsed(lines):
        payload = message.get("payload", {})
        if payload.get("key") == name and payload.get("value") == value:
            return True
    return False


def archive_unfinished(folder: Path, key: str) -> list[Path]:
    """Make archives of what killed processes have left of an experiment, before another part of it begins; those that are new.

    Archives that are there are called ``<key>-part0.zip``, ``<key>-part1.zip``, … from now on: comet_ml ends their names with
    letters that Python's ``random`` gives, which are the same ones for the same seed, and then writes over them.

    Of several processes that do so at the same time one makes the archives, and the others have none to make. What a process of
    this machine logs to that is alive is left to it.
    """
    if not folder.is_dir():
        return []
    with _alone(folder):
        return _archive_unfinished(folder, key)


def _archive_unfinished(folder: Path, key: str) -> list[Path]:
    for archive in sorted(_archives(folder, key), key=lambda path: path.stat().st_mtime_ns):
        names = _names(archive)
        if not names:
            archive.unlink()  # made at the start, to see whether it can be
        elif _MESSAGES in names and not _PART.search(archive.name):
            archive.rename(_next(folder, key))
    made = []
    for left in sorted(unfinished(folder, key).glob("*"), key=lambda path: path.stat().st_mtime_ns):
        if not (left / _MESSAGES).is_file() or not (left / _ABOUT).is_file():
            continue  # killed before anything could be logged
        if (owner := _owner(left)) is not None:
            warn(
                f"CometLogger: process {owner.pid} logs to the experiment {key} too, in {folder}. What it logs is not looked "
                "at here, and may come twice. End that process, or give this one another save_dir or experiment_key."
            )
            continue
        archive = _next(folder, key)
        partial = archive.with_suffix(".partial")
        with ZipFile(partial, "w") as file:
            for path in sorted(left.iterdir()):
                if path.name == _MESSAGES:
                    whole = path.read_bytes().rpartition(b"\n")  # the kill may have torn the last line
                    file.writestr(_MESSAGES, whole[0] + whole[1])
                elif path.is_file():
                    file.write(path, path.name)
        os.replace(partial, archive)
        shutil.rmtree(left)
        made.append(archive)
    _tidy(folder, key)
    return made


def _next(folder: Path, key: str) -> Path:
    numbers = [int(match[1]) for path in _archives(folder, key) if (match := _PART.search(path.name))]
    return folder / f"{key}-part{max(numbers, default=-1) + 1}.zip"


def tidy(folder: Path, key: str) -> None:
    """Remove the folder of what is unfinished, if nothing is in it; not while another one works there, who may need it."""
    with suppress(OSError), _alone(folder, wait=False):  # a logger may be dropped, and tidy up, at any moment
        _tidy(folder, key)


def _tidy(folder: Path, key: str) -> None:
    kept = unfinished(folder, key)
    with suppress(OSError):
        for owner in kept.glob(f"*{_OWNER}"):
            if not owner.with_name(owner.name.removesuffix(_OWNER)).is_dir():
                owner.unlink()
        kept.rmdir()


def steps_in_archives(folder: Path, key: str) -> dict[str, list[int]]:
    """The steps of all records of an experiment by metric or :func:`media`, in the order in which they were logged."""
    found: list[tuple[int, list[tuple[str, int]]]] = []
    for archive in _archives(folder, key):
        if _MESSAGES not in _names(archive):
            continue
        with ZipFile(archive) as file:
            start = json.loads(file.read(_ABOUT)).get("start_time") or 0
            with file.open(_MESSAGES) as lines:
                found.append((start, list(_records(lines))))
    steps: dict[str, list[int]] = {}
    for _, records in sorted(found, key=lambda one: one[0]):
        for name, step in records:
            steps.setdefault(name, []).append(step)
    return steps


def _archives(folder: Path, key: str) -> list[Path]:
    return sorted(folder.glob(f"{key}*.zip"))


def _names(archive: Path) -> list[str]:
    try:
        with ZipFile(archive) as file:
            return file.namelist()
    except BadZipFile:
        return ["?"]  # being written, or somebody else's: not ours to remove


def _parsed(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _records(lines: Any) -> Iterator[tuple[str, int]]:
    wanted = (line for line in lines if b'"metric_msg"' in line or b'"file_upload"' in line)
    for message in _parsed(wanted):
        payload = message["payload"]
        if message["type"] == "metric_msg":
            name, step = payload["metric"]["metricName"], payload["metric"]["step"]
        else:
            about, kind = payload["additional_params"], _KINDS.get(payload["upload_type"])
            title = (payload.get("metadata") or {}).get("key") or about.get("figName") or about.get("fileName")
            name, step = media(kind or "file", str(title)), about.get("step")
        if step is not None:
            yield name, int(step)
