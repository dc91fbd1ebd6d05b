"""`HookFiles`: the files that the user's hooks have written for a checkpoint, until the commit moves them into it.

They are the user's: their size and digest are in the manifest, and their content is never read for anything else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from trainkit.checkpoint.manifest import is_hook_file_name
from trainkit.checkpoint.regular_file import hash_file, not_regular
from trainkit.checkpoint.tensor_file import sync_file
from trainkit.errors import CheckpointError, CheckpointWriteError

__all__ = ["HookFiles"]


class HookFiles:
    """The files in a folder that hooks have written to.

    Args:
        folder: The folder; `trainkit.checkpoint.commit.make_hook_folder` creates it.

    Attributes:
        folder: The folder.
        sizes: Name of the file, relative to the folder, with `/` → bytes.

    Raises:
        CheckpointError: There is something that a checkpoint cannot contain: a link, a pipe, a folder in a folder, or a name
            that is not allowed on every system.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes = dict(sorted(_list(folder, "")))

    def move(self, into: Path, checksum: str) -> dict[str, str]:
        """Move the files into a folder, and sync them to the disk. Returns the digest of each."""
        digests = {}
        for name, size in self.sizes.items():
            target = into / name
            target.parent.mkdir(exist_ok=True)
            os.rename(self.folder / name, target)
            sync_file(target)
            found, digests[name] = hash_file(target, checksum)
            if found != size:
                raise CheckpointWriteError(
                    f"{target}: expected {size:,} bytes, found {found:,}. A file changed after the hook that writes it had "
                    "returned. Fix: let the hook return when its files are complete"
                )
        return digests

    def folders(self, inside: Path) -> list[Path]:
        """The folders of the files below `inside`."""
        return [inside / name for name in sorted({str(PurePosixPath(name).parent) for name in self.sizes} - {"."})]

    def remove(self) -> None:
        """Remove what has not been moved, as far as possible. Readers ignore what is left, because of its name."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _list(folder: Path, parent: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder / parent) as entries:
        for entry in entries:
            name = f"{parent}/{entry.name}" if parent else entry.name
            info = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False) and not parent:
                yield from _list(folder, entry.name)
            elif (problem := not_regular(info.st_mode)) is not None:
                nested = " Files may be in output_dir, or in a folder in it, and no deeper." if entry.is_dir() else ""
                raise CheckpointError(f"a hook of save_state has written {name!r}: {problem}.{nested}")
            elif not is_hook_file_name(name):
                raise CheckpointError(
                    f"a hook of save_state has written {name!r}, which cannot be the name of a file in a checkpoint: expected "
                    "letters, digits, '.', '_' and '-', a name that is valid on all operating systems and does not start with "
                    "'.' or 'manifest.'. Fix: use another name"
                )
            else:
                yield name, info.st_size
