"""Which checkpoint to resume from: the main process searches, and all processes read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.checkpoint.folder import ListedCheckpoint, candidates, pointed_to
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import Loaded
from trainkit.checkpoint.shared_reading import read_on_all_ranks
from trainkit.checkpoint.staging import staging
from trainkit.console import counted, notice, shortened, warn
from trainkit.distributed.world import World
from trainkit.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    nearest,
)
from trainkit.paths import local_path
from trainkit.registry import load_callback
from trainkit.state.parts import model_stems
from trainkit.trainer.run_folder import Places

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.strategy import Strategy

__all__ = ["WORDS", "Enter", "FoundCheckpoint", "Searcher", "find_checkpoint", "newest_of"]

WORDS = ("auto", "last", "best")

Enter = Callable[[Path], None]
"""Called on all processes with the folder of the run that is resumed, before a checkpoint in it is read, to continue there.

Raises `CheckpointLockedError` if another live run saves there.
"""


class FoundCheckpoint:
    """A checkpoint that was read, and its path.

    Attributes:
        restart: it was chosen because the processes were restarted, regardless of `ckpt_path`.
        wanted: the parts of it that are restored.
    """

    def __init__(self, path: Path, loaded: Loaded) -> None:
        self.path, self.loaded = path, loaded
        self.restart = False
        self.wanted: set[str] = set()

    def __str__(self) -> str:
        manifest = self.loaded.manifest
        # the number of complete epochs; the epoch in a file name counts from 0
        return f"{self.path} (step {manifest.step}, {counted(manifest.epoch, 'epoch')} complete)"


class _Listed(NamedTuple):
    """A checkpoint in a folder; see `trainkit.checkpoint.folder.ListedCheckpoint`."""

    path: Path
    problem: str | None
    resumable: bool
    of_run: bool  # it is in the folder of a run, not in the dirpath of a callback
    module: str | None  # the class that was trained; None: unknown
    run_id: str | None  # None: its manifest cannot be read
    counter: int
    finite: bool  # its manifest does not say that its parameters are not finite


class Searcher(NamedTuple):
    """The run that looks for a checkpoint.

    Attributes:
        strategy: of the run.
        module: the name of the class that it trains; checkpoints of another class are skipped.
        callbacks: its callbacks; a `ModelCheckpoint` knows the best checkpoint.
        fast_dev_run: it is a trial run, which saves nothing.
        fitted: it is an evaluation, and this trainer has run a fit.
    """

    strategy: Strategy
    module: str
    callbacks: Sequence[Callback]
    fast_dev_run: bool
    fitted: bool


def find_checkpoint(
    searcher: Searcher, ckpt_path: str | os.PathLike[str], places: Places, *, whole: bool, enter: Enter | None = None
) -> FoundCheckpoint | None:
    """Read the checkpoint that `ckpt_path` names; `None` for a fresh start, which only "auto" allows. Collective.

    Args:
        searcher: the run.
        ckpt_path: "auto": the newest good one, if there is one. "last": the newest good one; for both, of its run's those with
            finite parameters first. "best": that of `ModelCheckpoint`. Or a path.
        places: where to look.
        whole: read everything, not the weights only.
        enter: continues in the folder of the run. "auto" and "last" skip the checkpoints of a live run; one that is named
            by its path starts another run.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: the one that was named is damaged, or all are.
    """
    strategy, world = searcher.strategy, searcher.strategy.world
    if ckpt_path in ("auto", "last"):
        return _newest(searcher, str(ckpt_path), places, whole, enter)

    def find() -> list[Any] | None:
        if not world.is_main:
            return None
        path = _named(searcher, ckpt_path, places)
        folder = Path(os.path.abspath(path)).parent
        return [os.fspath(path), str(folder) if folder in places.runs else None]

    named, folder = run_on_all_ranks(world, find)[0]
    if folder is not None and enter is not None and _is_busy(Path(folder), enter):
        notice(f"{folder} is in use by another live run: this run continues from its checkpoint, in a new folder.")
    found = _read(strategy, Path(named), whole)
    if found.loaded.manifest.finite is False:
        warn(f"the parameters in {found.path} are not finite. For the newest checkpoint with finite ones: ckpt_path='auto'")
    return found


def _is_busy(folder: Path, enter: Enter) -> bool:
    try:
        enter(folder)
    except CheckpointLockedError:
        return True
    return False


def _named(searcher: Searcher, ckpt_path: str | os.PathLike[str], places: Places) -> Path:
    """The path of the checkpoint for "best" or a path."""
    if ckpt_path == "best":
        return _best(searcher, places)
    path = local_path(ckpt_path, "ckpt_path")
    staging.fetch(path)
    path = pointed_to(path)
    if not path.exists() and path.name == str(ckpt_path) and (hint := nearest(path.name, WORDS)):
        raise CheckpointNotFoundError(
            f"there is no checkpoint {str(ckpt_path)!r}. ckpt_path is a path or one of {', '.join(map(repr, WORDS))}.{hint}"
        )
    return path


def _read(strategy: Strategy, path: Path, whole: bool) -> FoundCheckpoint:
    """Read a checkpoint on all processes."""

    def stems(manifest: Manifest) -> set[str] | None:
        if whole and not _resumable(manifest):
            raise CheckpointError(
                f"{path} is a weights-only checkpoint, which cannot be resumed. Start a new run with the weights: "
                "fit(..., ckpt_path=..., restore={'model'})"
            )
        return None if whole else model_stems(manifest.files) | {"state"}

    return FoundCheckpoint(path, read_on_all_ranks(path, strategy.world, stems, mapped=strategy.reads_checkpoint_parts))


def _resumable(manifest: Manifest | None) -> bool:
    return manifest is not None and bool(manifest.contents.get("resumable", False))


def _listed(world: World, places: Places) -> tuple[list[_Listed], str]:
    """The checkpoints in the order in which to try them, and the folders for messages, as the main process sees them."""
    runs = set(places.runs) - set(places.given)

    def find() -> Any:
        if not world.is_main:
            return None
        rows = []
        for found in candidates(*places.folders):
            about, problem = found.manifest, found.problem
            sound = problem is None and about is not None
            who: list[Any] = [None, None, 0, True]
            if about is not None:
                who = [about.contents.get("module"), about.run_id, about.save_counter, about.finite is not False]
            place = found.path.parent in runs
            rows.append([str(found.path), None if sound else str(problem), sound and _resumable(about), place, *who])
        return rows, str(places)

    rows, where = run_on_all_ranks(world, find)[0]
    return [_Listed(Path(path), *rest) for path, *rest in rows], where


def newest_of(
    strategy: Strategy, run_id: str, since: int, places: Places, enter: Enter | None, finite: bool = False
) -> FoundCheckpoint | None:
    """The newest good checkpoint that a run can resume from; damaged ones are named in a warning.

    One whose parameters are not finite is the last choice or, with `finite`, none.

    Args:
        strategy: of the run.
        run_id: the run.
        since: only those with a higher save counter.
        places: where to look.
        enter: continue in the folder of the run.
        finite: only those whose parameters are finite.

    Raises:
        CheckpointLockedError: another live run saves to the folder of the run.
        CorruptCheckpointError: there are some, and all are damaged.
    """
    bad: list[str] = []
    listed, where = _listed(strategy.world, places)
    for one in listed:
        usable = one.problem is not None or (one.resumable and (one.finite or not finite))
        own = one.run_id == run_id and one.counter > since and usable
        if not own and one.run_id is not None:
            continue
        try:
            if one.problem is None:
                if one.of_run and enter is not None:
                    enter(one.path.parent)
                read = _read(strategy, one.path, whole=True)
                _tell_of_nonfinite(one, listed)
                return read
            problem = one.problem
        except CorruptCheckpointError as error:
            problem = str(error)
        warn(f"a checkpoint is damaged and skipped: {problem}")
        bad += [problem] if own else []
    if bad:
        raise CorruptCheckpointError(
            f"the processes were restarted, but all checkpoints of this run in {where} are damaged:\n  "
            + "\n  ".join(bad)
            + "\nRemove them, and start the job again."
        )
    return None


def _tell_of_nonfinite(chosen: _Listed, listed: list[_Listed]) -> None:
    """Say that newer checkpoints of the run are not finite and were skipped, or that this one is not either."""
    if not chosen.finite:
        warn(f"the parameters in {chosen.path} are not finite, and its run has no checkpoint with finite ones.")
        return
    same = [one for one in listed if one.run_id == chosen.run_id and one.problem is None]
    newer = [one.path.name for one in same if not one.finite and one.counter > chosen.counter]
    if newer:
        notice(
            f"skipped newer checkpoints whose parameters are not finite ({shortened(newer)}): {chosen.path} is the newest with "
            "finite ones."
        )


class _Skipped:
    """The newer checkpoints that cannot be used, by reason."""

    def __init__(self, module: str, where: str) -> None:
        self._module, self._where = module, where
        self.damaged: list[str] = []
        self.weights_only: list[str] = []
        self.of_others: list[str] = []  # names of other modules
        self.busy: list[Path] = []  # folders of live runs

    def report(self) -> None:
        """Print which newer checkpoints this run does not continue."""
        if self.of_others:
            names = ", ".join(dict.fromkeys(self.of_others))
            notice(
                f"skipped newer checkpoints of another module ({names}): this run trains {self._module}. To use one, pass its "
                "path as ckpt_path."
            )
        for folder in self.busy:
            notice(
                f"skipped the checkpoints in {folder}: another live run saves there. To continue from one, pass its path as "
                "ckpt_path."
            )

    def refuse(self, word: str, whole: bool) -> None:
        """No checkpoint can be used: raise an error, or for "auto" print a notice.

        Raises:
            CorruptCheckpointError: those that are not skipped for another reason are damaged.
            CheckpointError: there are only weights-only checkpoints.
            CheckpointNotFoundError: there is none.
        """
        self.report()
        if self.damaged:
            raise CorruptCheckpointError(
                f"ckpt_path={word!r}: there is no good checkpoint in {self._where}. Damaged:\n  "
                + "\n  ".join(self.damaged)
                + "\nRemove them to start from the beginning, or use another folder: ModelCheckpoint(dirpath=...)"
            )
        if self.weights_only:
            raise CheckpointError(
                f"ckpt_path={word!r}: {self._where} contains weights-only checkpoints, which cannot be resumed. Start a new "
                f"run with the weights: fit(..., ckpt_path={self.weights_only[0]!r}, restore={{'model'}})"
            )
        if word != "auto":
            raise CheckpointNotFoundError(
                f"ckpt_path='last': there is no checkpoint in {self._where}. To start from the beginning if there is none: "
                "ckpt_path='auto'"
            )
        which = f"checkpoint of {self._module}" if self.of_others else "checkpoint"
        start = "starting from the beginning." if whole else "the weights are not changed."
        notice(f"there is no {which} in {self._where}: {start}")


def _newest(searcher: Searcher, word: str, places: Places, whole: bool, enter: Enter | None) -> FoundCheckpoint | None:
    listed, where = _listed(searcher.strategy.world, places)
    skipped = _Skipped(searcher.module, where)
    for one in listed:
        if one.of_run and _is_another(one.module, searcher.module):
            skipped.of_others.append(str(one.module))
        elif one.problem is not None:
            skipped.damaged.append(one.problem)
        elif whole and not one.resumable:
            skipped.weights_only.append(str(one.path))
        elif not (one.of_run and enter is not None and _skips_busy(one.path.parent, enter, skipped.busy)):
            try:
                read = _read(searcher.strategy, one.path, whole)
            except CorruptCheckpointError as error:
                skipped.damaged.append(str(error))
                continue
            skipped.report()
            for problem in skipped.damaged:
                warn(f"a checkpoint is damaged and skipped: {problem}")
            _tell_of_nonfinite(one, listed)
            return read
    skipped.refuse(word, whole)
    return None


def _skips_busy(folder: Path, enter: Enter, busy: list[Path]) -> bool:
    """Whether a live run saves to a folder, which is then added to `busy`."""
    if folder in busy:
        return True
    if _is_busy(folder, enter):
        busy.append(folder)
        return True
    return False


def _is_another(module: str | None, kind: str) -> bool:
    """Whether a checkpoint is of another class of modules; a checkpoint without a class name may be of any."""
    return module is not None and module.rpartition(".")[2] != kind


def _best(searcher: Searcher, places: Places) -> Path:
    """The best checkpoint of this trainer's fit, or of a run that the user has named: no other run is meant by "best"."""
    kind = load_callback("model_checkpoint")
    own = [callback for callback in searcher.callbacks if isinstance(callback, kind)]
    ranking = [callback for callback in own if callback.monitor is not None] or own
    for callback in ranking:
        if callback.best_model_path:
            return Path(callback.best_model_path)
    if searcher.fast_dev_run:
        raise CheckpointNotFoundError(
            "ckpt_path='best': fast_dev_run saves no checkpoint, so none is the best. Fix: pass the path of a checkpoint, or "
            "remove fast_dev_run from Trainer(...)"
        )
    if not own:
        raise CheckpointNotFoundError(
            "ckpt_path='best' needs a ModelCheckpoint callback: Trainer(callbacks=[ModelCheckpoint(monitor='val_loss')])"
        )
    if searcher.fitted:
        raise CheckpointNotFoundError(_none_ranked(ranking, "the fit of this Trainer"))
    return _best_of_named(ranking, _candidates_of(searcher, places), places)


def _best_of_named(ranking: Sequence[Any], found: list[ListedCheckpoint], places: Places) -> Path:
    """The best of the checkpoints in folders that the user has named, as the callbacks in `ranking` rank them."""

    def best(among: list[ListedCheckpoint]) -> str:
        return next(filter(None, (callback.best_in(among) for callback in ranking)), "")

    if path := best([one for one in found if places.named or one.path.parent in places.given]):
        return Path(path)
    if path := best(found):
        raise CheckpointNotFoundError(
            "ckpt_path='best': this Trainer has not run fit, and the folder may contain several runs, so it is not known which "
            f"one is meant. The best of the newest run is {path}. Fix: pass this path as ckpt_path, or name the folder: "
            f"ModelCheckpoint(dirpath={os.path.dirname(path)!r})"
        )
    raise CheckpointNotFoundError(_none_ranked(ranking, str(places)))


def _candidates_of(searcher: Searcher, places: Places) -> list[ListedCheckpoint]:
    """The checkpoints in folders that the user gave, and those of runs that trained the same class of module."""
    given = set(places.given)
    return [
        one
        for one in candidates(*places.folders)
        if one.path.parent in given
        or one.manifest is None
        or not _is_another(one.manifest.contents.get("module"), searcher.module)
    ]


def _none_ranked(ranking: Sequence[Any], where: str) -> str:
    """The message if `"best"` finds nothing `where`; `ranking`: the callbacks that may have a monitor."""
    wanted = " or ".join(f"monitor={one.monitor!r}, mode={one.mode!r}" for one in ranking if one.monitor is not None)
    if not wanted:
        return (
            "ckpt_path='best': no checkpoint has been ranked yet. A ModelCheckpoint ranks by its monitor: "
            "ModelCheckpoint(monitor='val_loss')"
        )
    return (
        f"ckpt_path='best': no checkpoint that was ranked by {wanted} is in {where}. Pass the path of a checkpoint "
        "(trainkit checkpoint ls FOLDER lists them with their metrics), or give ModelCheckpoint the monitor and mode of the "
        "run that saved them."
    )
