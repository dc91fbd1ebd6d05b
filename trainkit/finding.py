"""Which checkpoint to go on from; over several processes the main one looks, and all of them read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.checkpoint.folder import POINTER, candidates, read_pointer
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import Loaded
from trainkit.checkpoint.shared_reading import read_together
from trainkit.checkpoint.together import together
from trainkit.console import counted, notice, warn
from trainkit.distributed import World
from trainkit.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, nearest
from trainkit.registry import load_callback
from trainkit.state.parts import model_stems

if TYPE_CHECKING:
    from trainkit.strategy import Strategy
    from trainkit.trainer import Trainer

__all__ = ["WORDS", "Found", "checkpoint_folders", "find_checkpoint", "newest_of"]

WORDS = ("auto", "last", "best")


class Found:
    """A checkpoint that was read, and where it lies.

    Attributes:
        restart: it was taken because the processes were started anew, whatever the user had asked for.
        wanted: the parts of it that are restored.
    """

    def __init__(self, path: Path, loaded: Loaded) -> None:
        self.path, self.loaded = path, loaded
        self.restart = False
        self.wanted: set[str] = set()

    def __str__(self) -> str:
        manifest = self.loaded.manifest
        # complete ones: the epoch that a file name counts from 0 is the one before
        return f"{self.path} (step {manifest.step}, {counted(manifest.epoch, 'epoch')} complete)"


class _Listed(NamedTuple):
    """A checkpoint in a folder; see :class:`trainkit.checkpoint.folder.Found`."""

    path: Path
    problem: str | None
    resumable: bool
    run_id: str | None  # None: nothing can be known of it
    counter: int


def find_checkpoint(trainer: Trainer, ckpt_path: str | os.PathLike[str], folders: list[Path], *, whole: bool) -> Found | None:
    """Read the checkpoint that ``ckpt_path`` names; ``None`` for a fresh start, which only "auto" allows.

    Args:
        trainer: whose callbacks know the best one.
        ckpt_path: "auto": the newest good one, if there is one. "last": the newest good one. "best": that of
            ``ModelCheckpoint``. Or a path.
        folders: where to look.
        whole: read everything, not the weights only.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: the one that was named is bad, or all are.
    """
    strategy, world = trainer.strategy, trainer.strategy.world
    if ckpt_path in ("auto", "last"):
        return _newest(strategy, str(ckpt_path), folders, whole)
    named = together(world, lambda: os.fspath(_named(trainer, ckpt_path, folders)) if world.is_main else None)[0]
    return _read(strategy, Path(named), whole)


def _named(trainer: Trainer, ckpt_path: str | os.PathLike[str], folders: list[Path]) -> Path:
    """Where the checkpoint lies that is not asked for by its age."""
    if ckpt_path == "best":
        return _best(trainer, folders)
    path = Path(ckpt_path)
    if path.name == POINTER and path.is_file():  # of save_last
        path = path.parent / (read_pointer(path.parent) or POINTER)
    if not path.exists() and path.name == str(ckpt_path) and (hint := nearest(path.name, WORDS)):
        raise CheckpointNotFoundError(f"there is no checkpoint {str(ckpt_path)!r}, and it is none of {WORDS}.{hint}")
    return path


def _read(strategy: Strategy, path: Path, whole: bool) -> Found:
    """Read a checkpoint on all processes."""

    def stems(manifest: Manifest) -> set[str] | None:
        if whole and not _resumable(manifest):
            raise CheckpointError(
                f"{path} holds weights only, so that no run can go on from it. Start a new run with them: "
                "fit(..., ckpt_path=..., restore={'model'})"
            )
        return None if whole else model_stems(manifest.files) | {"state"}

    return Found(path, read_together(path, strategy.world, stems, mapped=strategy.sharded_state))


def _resumable(manifest: Manifest | None) -> bool:
    return manifest is not None and bool(manifest.contents.get("resumable", False))


def _listed(world: World, folders: list[Path]) -> tuple[list[_Listed], str]:
    """The checkpoints in the order in which to try them, and the folders for messages, as the main process sees them."""

    def look() -> Any:
        if not world.is_main:
            return None
        rows = []
        for found in candidates(*folders):
            about, problem = found.manifest, found.problem
            sound = problem is None and about is not None
            who = [None, 0] if about is None else [about.run_id, about.save_counter]
            rows.append([str(found.path), None if sound else str(problem), sound and _resumable(about), *who])
        return rows, ", ".join(map(str, folders)) or "no folder"

    rows, where = together(world, look)[0]
    return [_Listed(Path(path), *rest) for path, *rest in rows], where


def newest_of(strategy: Strategy, run_id: str, since: int, folders: list[Path]) -> Found | None:
    """The newest good checkpoint of a run that it can go on from; bad ones are named.

    Args:
        strategy: of the run.
        run_id: the run.
        since: only those of a higher save counter.
        folders: where to look.

    Raises:
        CorruptCheckpointError: there are some, and all are bad.
    """
    bad: list[str] = []
    listed, where = _listed(strategy.world, folders)
    for one in listed:
        own = one.run_id == run_id and one.counter > since and (one.problem is not None or one.resumable)
        if not own and one.run_id is not None:
            continue
        try:
            if one.problem is None:
                return _read(strategy, one.path, whole=True)
            problem = one.problem
        except CorruptCheckpointError as error:
            problem = str(error)
        warn(f"a checkpoint is damaged and passed over: {problem}")
        bad += [problem] if own else []
    if bad:
        raise CorruptCheckpointError(
            f"the processes were started anew, and none of the checkpoints of this run in {where} is good:\n  "
            + "\n  ".join(bad)
            + "\nRemove them, and start the job again."
        )
    return None


def _newest(strategy: Strategy, word: str, folders: list[Path], whole: bool) -> Found | None:
    bad: list[str] = []
    weights: list[str] = []
    listed, where = _listed(strategy.world, folders)
    for one in listed:
        if one.problem is not None:
            bad.append(one.problem)
            continue
        if whole and not one.resumable:
            weights.append(str(one.path))
            continue
        try:
            read = _read(strategy, one.path, whole)
        except CorruptCheckpointError as error:
            bad.append(str(error))
            continue
        for problem in bad:
            warn(f"a checkpoint is damaged and passed over: {problem}")
        return read
    if bad:
        raise CorruptCheckpointError(
            f"ckpt_path={word!r}: none of the checkpoints in {where} is good:\n  "
            + "\n  ".join(bad)
            + "\nRemove them to start "
            "from the beginning, or name another folder: ModelCheckpoint(dirpath=...)"
        )
    if weights:
        raise CheckpointError(
            f"ckpt_path={word!r}: {where} holds checkpoints of weights only, so that no run can go on from them. Start a new "
            f"run with the weights: fit(..., ckpt_path={weights[0]!r}, restore={{'model'}})"
        )
    if word == "auto":
        notice(f"there is no checkpoint in {where}: " + ("starting from the beginning." if whole else "weights as they are."))
        return None
    raise CheckpointNotFoundError(
        f"ckpt_path='last': there is no checkpoint in {where}. ckpt_path='auto' starts from the beginning then."
    )


def _best(trainer: Trainer, folders: list[Path]) -> Path:
    kind = load_callback("model_checkpoint")
    own = [callback for callback in trainer.callbacks if isinstance(callback, kind)]
    if not own:
        raise CheckpointNotFoundError(
            "ckpt_path='best' asks a ModelCheckpoint: Trainer(callbacks=[ModelCheckpoint(monitor=...)])."
        )
    for callback in own:
        if path := callback.best_model_path or callback.best_in(candidates(*folders)):
            return Path(path)
    raise CheckpointNotFoundError(
        "ckpt_path='best': no checkpoint has been ranked yet. A ModelCheckpoint ranks by its monitor: "
        "ModelCheckpoint(monitor='val_loss')"
    )


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Where "auto", "last" and "best" look: where this run saves."""
    own: list[Any] = list(trainer.checkpoint_callbacks)
    folders = [Path(callback.folder_in(trainer)) for callback in own]
    return list(dict.fromkeys(folders)) or [Path(trainer.default_root_dir) / "checkpoints"]
