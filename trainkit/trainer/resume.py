"""Resuming from a checkpoint: which one, which parts of it, and into which objects."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainkit.checkpoint.folder import ListedCheckpoint, candidates
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.pointers import is_ours, resolve_pointer
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.reader import LoadedCheckpoint, read_on_all_ranks, weights_by_hook
from trainkit.checkpoint.urls import remote_sync
from trainkit.checks import real_number
from trainkit.console import join_names, notice, quantity, warn
from trainkit.data.order import ORDER_VERSION
from trainkit.distributed.world import World
from trainkit.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
    UnknownNameError,
    nearest,
)
from trainkit.module.data_module import DataModule
from trainkit.paths import local_path
from trainkit.rng import KEY_VERSION
from trainkit.state.callback_state import check_callbacks
from trainkit.state.foreign_state import converted, is_foreign_file
from trainkit.state.training_objects import (
    TrainingObjects,
    add_omitted,
    check_components,
    checkpoint_for_hooks,
    describe_move,
    model_stems,
    restore,
    with_trained_weights,
)
from trainkit.trainer.run_folder import SearchFolders, folder_of_run, search_folders
from trainkit.trainer.run_state import restore_loop, restore_run, training_objects

if TYPE_CHECKING:
    from trainkit.strategy import Strategy
    from trainkit.trainer.run import Run
    from trainkit.trainer.save_policy import SavePolicy
    from trainkit.trainer.setup import Training

__all__ = [
    "PARTS",
    "WORDS",
    "Enter",
    "FoundCheckpoint",
    "begin_resume",
    "best_of_fit",
    "check_restore",
    "find_checkpoint",
    "load_found",
    "load_weights",
    "newest_of",
    "read_checkpoint",
    "restore_fit",
]


PARTS = ("model", "optimizer", "scheduler", "scaler", "loop", "callbacks", "loggers")
WORDS = ("auto", "last", "best")
_FITS = itertools.count(1)  # numbers the fits of this process; after a restart the script has the same ones

Enter = Callable[[Path], None]
"""Called on all processes with the folder of the run that is resumed, before a checkpoint in it is read, to continue there.

Raises `CheckpointLockedError` if another live run saves there.
"""


class FoundCheckpoint:
    """A checkpoint that was read, and its path.

    Attributes:
        restart: it was chosen because the processes were restarted, regardless of `ckpt_path`.
        components: those of its parts that are restored.
    """

    def __init__(self, path: Path, loaded: LoadedCheckpoint) -> None:
        self.path = path
        self.loaded = loaded
        self.restart = False
        self.components: set[str] = set()

    def __str__(self) -> str:
        manifest = self.loaded.manifest
        # the number of complete epochs; the epoch in a file name counts from 0
        return f"{self.path} (step {manifest.step}, {quantity(manifest.epoch, 'epoch')} complete)"


class _Listed(NamedTuple):
    """A checkpoint in a folder; see `trainkit.checkpoint.folder.ListedCheckpoint`."""

    path: Path
    problem: str | None
    resumable: bool
    of_run: bool  # it is in the folder of a run, not in the dirpath of a callback
    module: str | None  # the class that was trained; None: unknown
    run_id: str | None  # None: its manifest cannot be read
    counter: int
    finite: bool  # False if its manifest says that its parameters are not finite.


def find_checkpoint(
    run: Run, ckpt_path: str | os.PathLike[str], folders: SearchFolders, *, whole: bool, enter: Enter | None = None
) -> FoundCheckpoint | None:
    """Read the checkpoint that `ckpt_path` names; `None` for a fresh start, which only "auto" allows. Collective.

    Args:
        run: a fit, or an evaluation.
        ckpt_path: "auto": the newest good one, if there is one. "last": the newest good one; for both, of its run's those with
            finite parameters first. "best": that of `ModelCheckpoint`. Or a path.
        folders: where to look.
        whole: read everything, not the weights only.
        enter: continues in the folder of the run. "auto" and "last" skip the checkpoints of a live run; one that is named
            by its path starts another run.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: the one that was named is damaged, or all are.
    """
    world = run.strategy.world
    if ckpt_path in ("auto", "last"):
        return _newest(run, str(ckpt_path), folders, whole, enter)

    def find() -> list[Any] | None:
        if not world.is_main:
            return None
        path = _path_of(run, ckpt_path, folders)
        folder = Path(os.path.abspath(path)).parent
        return [os.fspath(path), str(folder) if folder in folders.runs else None]

    named, folder = run_on_all_ranks(world, find)
    if folder is not None and enter is not None and _is_busy(Path(folder), enter):
        notice(f"{folder} is in use by another live run: this run continues from its checkpoint, in a new folder.")
    checkpoint = _read_named(run, Path(named), whole)
    if checkpoint.loaded.manifest.finite is False:
        warn(
            f"the parameters in {checkpoint.path} are not finite. For the newest checkpoint with finite ones: ckpt_path='auto'"
        )
    return checkpoint


def _read_named(run: Run, path: Path, whole: bool) -> FoundCheckpoint:
    """Read a checkpoint on all processes, or a file of another program, which the main process converts."""
    world, conversion = run.strategy.world, ExitStack()

    def find() -> str | None:
        if not world.is_main or not is_foreign_file(path):
            return None
        return str(conversion.enter_context(converted(path, Path(local_path(run.root_dir, "default_root_dir")))))

    with conversion:
        folder = run_on_all_ranks(world, find)
        if folder is None:
            return _read(run.strategy, path, whole)
        return _read(run.strategy, Path(folder), whole, converted_from=path)


def _is_busy(folder: Path, enter: Enter) -> bool:
    try:
        enter(folder)
    except CheckpointLockedError:
        return True
    return False


def _path_of(run: Run, ckpt_path: str | os.PathLike[str], folders: SearchFolders) -> Path:
    """The path of the checkpoint for "best" or a path."""
    if ckpt_path == "best":
        return resolve_pointer(_best(run, folders))
    path = local_path(ckpt_path, "ckpt_path")
    remote_sync.fetch(path)
    path = resolve_pointer(path)
    if not os.path.lexists(path) and path.name == str(ckpt_path) and (hint := nearest(path.name, WORDS)):
        raise CheckpointNotFoundError(
            f"there is no checkpoint {str(ckpt_path)!r}. ckpt_path is a path or one of {', '.join(map(repr, WORDS))}.{hint}"
        )
    return path


def _read(strategy: Strategy, path: Path, whole: bool, converted_from: Path | None = None) -> FoundCheckpoint:
    """Read a checkpoint on all processes; one that was converted from a file is removed afterwards, and named as the file."""
    name = converted_from or path

    def stems(manifest: Manifest) -> set[str] | None:
        if whole and not _resumable(manifest):
            alone = converted_from is not None and is_ours(converted_from)
            folder = " To resume, put the folder of the checkpoint that it was made of next to it." if alone else ""
            raise CheckpointError(
                f"{name} is a weights-only checkpoint, which cannot be resumed. Start a new run with the weights: "
                f"fit(..., ckpt_path=..., restore={{'model'}}).{folder}"
            )
        if manifest.by_hook:
            raise StateMismatchError(weights_by_hook(str(path), manifest.by_hook[0]))
        return None if whole else model_stems(manifest) | {"state"}

    mapped = converted_from is None and strategy.reads_checkpoint_parts
    return FoundCheckpoint(name, read_on_all_ranks(path, strategy.world, stems, mapped=mapped))


def _resumable(manifest: Manifest | None) -> bool:
    return manifest is not None and bool(manifest.contents.get("resumable", False))


def _list_checkpoints(world: World, folders: SearchFolders) -> tuple[list[_Listed], str]:
    """The checkpoints in the order in which to try them, and the folders for messages, as the main process sees them."""
    runs = set(folders.runs) - set(folders.dirpaths)

    def find() -> Any:
        if not world.is_main:
            return None
        rows = []
        for listed in candidates(*folders.all):
            about, problem = listed.manifest, listed.problem
            sound = problem is None and about is not None
            who: list[Any] = [None, None, 0, True]
            if about is not None:
                who = [about.contents.get("module"), about.run_id, about.save_counter, about.finite is not False]
            place = listed.path.parent in runs
            rows.append([str(listed.path), None if sound else str(problem), sound and _resumable(about), place, *who])
        return rows, str(folders)

    rows, where = run_on_all_ranks(world, find)
    return [_Listed(Path(path), *rest) for path, *rest in rows], where


def newest_of(
    strategy: Strategy, run_id: str, since: int, folders: SearchFolders, enter: Enter | None, finite: bool = False
) -> FoundCheckpoint | None:
    """The newest good checkpoint that a run can resume from; damaged ones are named in a warning.

    One whose parameters are not finite is the last choice or, with `finite`, none.

    Args:
        strategy: of the run.
        run_id: the run.
        since: only those with a higher save counter.
        folders: where to look.
        enter: continue in the folder of the run.
        finite: only those whose parameters are finite.

    Raises:
        CheckpointLockedError: another live run saves to the folder of the run.
        CorruptCheckpointError: there are some, and all are damaged.
    """
    bad: list[str] = []
    listed, where = _list_checkpoints(strategy.world, folders)
    for one in listed:
        usable = one.problem is not None or (one.resumable and (one.finite or not finite))
        of_this_run = one.run_id == run_id and one.counter > since and usable
        if not of_this_run and one.run_id is not None:
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
        bad += [problem] if of_this_run else []
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
            f"skipped newer checkpoints whose parameters are not finite ({join_names(newer)}): {chosen.path} is the newest "
            "with finite ones."
        )


class _Skipped:
    """The newer checkpoints that cannot be used, by reason."""

    def __init__(self, module: str, where: str) -> None:
        self._module = module
        self._where = where
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


def _newest(run: Run, word: str, folders: SearchFolders, whole: bool, enter: Enter | None) -> FoundCheckpoint | None:
    listed, where = _list_checkpoints(run.strategy.world, folders)
    module = type(run.module).__name__
    skipped = _Skipped(module, where)
    for one in listed:
        if one.of_run and _is_another(one.module, module):
            skipped.of_others.append(str(one.module))
        elif one.problem is not None:
            skipped.damaged.append(one.problem)
        elif whole and not one.resumable:
            skipped.weights_only.append(str(one.path))
        elif not (one.of_run and enter is not None and _skips_busy(one.path.parent, enter, skipped.busy)):
            try:
                read = _read(run.strategy, one.path, whole)
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


def _best(run: Run, folders: SearchFolders) -> Path:
    """The best checkpoint of this trainer's fit, or of a run that the user has named: no other run is meant by "best"."""
    callbacks = run.checkpoint_callbacks
    ranking = [callback for callback in callbacks if callback.monitor is not None] or callbacks
    for callback in ranking:
        if callback.best_model_path:
            return Path(callback.best_model_path)
    if run.arguments.fast_dev_run:
        raise CheckpointNotFoundError(
            "ckpt_path='best': fast_dev_run saves no checkpoint, so none is the best. Fix: pass the path of a checkpoint, or "
            "remove fast_dev_run from Trainer(...)"
        )
    if not callbacks:
        raise CheckpointNotFoundError(
            "ckpt_path='best' needs a ModelCheckpoint callback: Trainer(callbacks=[ModelCheckpoint(monitor='val_loss')])"
        )
    if run.progress.stage != "fit" and run.fitted is not None:
        raise CheckpointNotFoundError(_why_none_is_best(ranking, "the fit of this Trainer"))
    return _best_of_named(ranking, _candidates_of(run, folders), folders)


def _best_of_named(ranking: Sequence[Any], checkpoints: list[ListedCheckpoint], folders: SearchFolders) -> Path:
    """The best of the checkpoints in folders that the user has named, as the callbacks in `ranking` rank them."""

    def best(among: list[ListedCheckpoint]) -> str:
        return next(filter(None, (callback.best_in(among) for callback in ranking)), "")

    if path := best([one for one in checkpoints if folders.named or one.path.parent in folders.dirpaths]):
        return Path(path)
    if path := best(checkpoints):
        raise CheckpointNotFoundError(
            "ckpt_path='best': this Trainer has not run fit, and the folder may contain several runs, so it is not known which "
            f"one is meant. The best of the newest run is {path}. Fix: pass this path as ckpt_path, or name the folder: "
            f"ModelCheckpoint(dirpath={os.path.dirname(path)!r})"
        )
    raise CheckpointNotFoundError(_why_none_is_best(ranking, str(folders)))


def _candidates_of(run: Run, folders: SearchFolders) -> list[ListedCheckpoint]:
    """The checkpoints in folders that the user gave, and those of runs that trained the same class of module."""
    dirpaths, module = set(folders.dirpaths), type(run.module).__name__
    return [
        one
        for one in candidates(*folders.all)
        if one.path.parent in dirpaths or one.manifest is None or not _is_another(one.manifest.contents.get("module"), module)
    ]


def _why_none_is_best(ranking: Sequence[Any], where: str) -> str:
    """The message if `"best"` finds nothing `where`; `ranking`: the callbacks that may have a monitor."""
    rankings = " or ".join(f"monitor={one.monitor!r}, mode={one.mode!r}" for one in ranking if one.monitor is not None)
    if not rankings:
        return (
            "ckpt_path='best': no checkpoint has been ranked yet. A ModelCheckpoint ranks by its monitor: "
            "ModelCheckpoint(monitor='val_loss')"
        )
    return (
        f"ckpt_path='best': no checkpoint that was ranked by {rankings} is in {where}. Pass the path of a checkpoint "
        "(trainkit checkpoint ls FOLDER lists them with their metrics), or give ModelCheckpoint the monitor and mode of the "
        "run that saved them."
    )


def check_restore(
    ckpt_path: Any, names: Collection[str] | None, overrides: Mapping[str, Any] | None, strict: bool = True
) -> set[str]:
    """The parts to be restored.

    Raises:
        ConfigurationError: parts or overrides without a checkpoint, or of the wrong type.
        UnknownNameError: an unknown part.
    """
    _check_path(ckpt_path)
    if not isinstance(strict, bool):
        raise ConfigurationError(f"strict must be True or False, not {strict!r}.")
    if ckpt_path is None and (names is not None or overrides or not strict):
        raise ConfigurationError(
            "restore=, overrides= and strict=False need a checkpoint: add ckpt_path='auto', 'best' or the path of one."
        )
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigurationError(
            f"overrides must be a dict of optimizer options, not {overrides!r}. For example: {{'lr': 1e-4}}"
        )
    return check_components(names, PARTS)


def _check_path(ckpt_path: Any) -> None:
    """Refuse what is neither a path nor one of the words."""
    if ckpt_path is None:
        return
    if not isinstance(ckpt_path, str | os.PathLike):
        meant = "datamodule" if isinstance(ckpt_path, DataModule) else "verbose" if ckpt_path is False else ""
        hint = f" Pass a {type(ckpt_path).__name__} by name: {meant}=..." if meant else ""
        hint = " For the newest checkpoint: ckpt_path='auto'" if ckpt_path is True else hint
        raise ConfigurationError(f"ckpt_path must be a path, 'auto', 'last' or 'best', not {ckpt_path!r}.{hint}")
    if ckpt_path == "":
        raise ConfigurationError("ckpt_path is an empty string. For a fresh start: ckpt_path=None; for the newest one: 'auto'.")
    if ckpt_path not in WORDS:
        local_path(ckpt_path, "ckpt_path")  # refused now, and expanded where it is looked for


def best_of_fit(run: Run, stage: str) -> str | None:
    """The best checkpoint of a fit, for an evaluation that was given no module; `None`: the module as it is."""
    ranked = [callback for callback in run.checkpoint_callbacks if callback.monitor is not None and callback.best_model_path]
    if not ranked or run.given_module is not run.fitted:
        return None
    path: str = ranked[0].best_model_path
    notice(f"{stage} was given no module: it uses the best checkpoint, {path}. For the last weights: trainer.{stage}(module)")
    return path


def begin_resume(
    run: Run,
    saves: SavePolicy,
    ckpt_path: str | os.PathLike[str] | None,
    components: set[str],
    chosen: bool,
    strict: bool = True,
) -> None:
    """Read the checkpoint that a fit resumes from, before anything is set up: data may be split under its seed.

    Args:
        run: the fit.
        saves: its saves.
        ckpt_path: which one; `None`: a fresh start.
        components: the parts to be restored; those that cannot be restored are removed from it.
        chosen: the user has named the parts.
        strict: see `restore_fit`.
    """
    world, key = run.strategy.world, f"run/{next(_FITS)}"
    run.checkpoint = None
    _agree(run, ckpt_path, components, strict)
    before = world.load_text(key) if world.restarts else None
    if ckpt_path is not None or before is not None:
        _find(run, saves, ckpt_path, before, components, chosen)
    if run.checkpoint is None:
        world.keep_text(key, saves.run_id)
    elif not run.checkpoint.restart:  # this job has not saved the earlier checkpoints of a resumed run
        world.keep_text(key, f"{saves.run_id} {saves.last_counter()}")


def _find(
    run: Run,
    saves: SavePolicy,
    ckpt_path: str | os.PathLike[str] | None,
    before: str | None,
    components: set[str],
    chosen: bool,
) -> None:
    """Read the checkpoint of the restarted job, or the requested one, and continue in the folder of its run."""
    folders = search_folders(run)
    enter = _use_folders(run, saves, folders)
    checkpoint: FoundCheckpoint | None = None
    if run.arguments.fast_dev_run and components - {"model"}:
        components -= {"loop", "callbacks", "loggers"}  # it starts at step 0 and writes nothing
    elif before is not None:
        checkpoint = _newest_of_job(run.strategy, before, folders, enter, finite=ckpt_path is not None)
    if checkpoint is not None:
        components |= set(PARTS)
    elif ckpt_path is not None:
        continues = enter if components >= set(PARTS) else None  # restoring only some parts starts another run
        weights_only = components <= {"model"}
        checkpoint = find_checkpoint(run, ckpt_path, folders, whole=not weights_only, enter=continues)
        if checkpoint is None:
            saves.save_folders.remove_abandoned(folders.runs)
    if checkpoint is not None:
        checkpoint.components = components
        run.checkpoint = checkpoint
        run.ckpt_path = str(checkpoint.path)
        _take_over(run, saves, checkpoint, components, chosen and not checkpoint.restart)
        if enter is not None:
            _find_folder(run, saves, checkpoint, folders, enter)


def _use_folders(run: Run, saves: SavePolicy, folders: SearchFolders) -> Enter | None:
    """Lock the folders that callbacks were given, so that no other run removes what is being read.

    Returns:
        What continues in the folder of a run; `None` if all callbacks were given folders, or there are none.
    """
    callbacks: list[Any] = [] if run.arguments.fast_dev_run else list(run.checkpoint_callbacks)
    if callbacks:
        for folder in folders.dirpaths:
            saves.use_folder(folder)
    return None if all(callback.user_dirpath for callback in callbacks) else saves.save_folders.continue_in


def _agree(run: Run, ckpt_path: str | os.PathLike[str] | None, components: set[str], strict: bool) -> None:
    """Check that all processes resume from and save the same, as otherwise they would wait for each other forever.

    Raises:
        ConfigurationError: they do not.
    """
    which = str(ckpt_path) if ckpt_path is None or ckpt_path in WORDS else "a path"  # the main process's path is used
    saving = [callback.state_key for callback in run.checkpoint_callbacks]
    settings = [f"ckpt_path={which}", f"restore={sorted(components)}", f"strict={strict}", f"callbacks={saving}"]
    by_rank = run.strategy.world.exchange(settings)
    for rank, settings in enumerate(by_rank):
        for first, other in zip(by_rank[0], settings, strict=True):
            if first != other:
                raise ConfigurationError(
                    f"all processes must resume from the same checkpoint and save the same: rank 0 has {first}, but rank "
                    f"{rank} has {other}. Fix: pass the same on all ranks; do not choose by rank or by the files that a rank "
                    "finds. With ckpt_path='auto' the main process searches for all."
                )


def _find_folder(run: Run, saves: SavePolicy, checkpoint: FoundCheckpoint, folders: SearchFolders, enter: Enter) -> None:
    """Continue in the run's own folder also if the checkpoint was in the `dirpath` of a callback."""
    if saves.save_folders.of_run is None and saves.run_id == checkpoint.loaded.manifest.run_id:
        folder = folder_of_run(run.strategy.world, folders.runs, saves.run_id)
        if folder is not None:
            enter(folder)


def _newest_of_job(
    strategy: Strategy, before: str, folders: SearchFolders, enter: Enter | None, finite: bool
) -> FoundCheckpoint | None:
    """The checkpoint to resume from after a restart of the processes: the newest that the run has saved since the job began.

    `finite`: only one whose parameters are finite, because the run began with a checkpoint, too.
    """
    run_id, _, since = before.partition(" ")
    checkpoint = newest_of(strategy, run_id, int(since or 0), folders, enter, finite)
    if checkpoint is None:
        notice(
            f"the processes were restarted, but no checkpoint {'with finite parameters ' if finite else ''}was saved since the "
            "job began: the run starts as it did the first time."
        )
        return None
    checkpoint.restart = True
    notice("the processes were restarted: the run continues from its newest checkpoint, regardless of ckpt_path.")
    return checkpoint


def _take_over(run: Run, saves: SavePolicy, checkpoint: FoundCheckpoint, components: set[str], chosen: bool) -> None:
    """Take from the checkpoint what must be known before loaders and optimizers are created: the seed and the run.

    Args:
        run: the fit.
        saves: its saves.
        checkpoint: the checkpoint.
        components: the parts to be restored; the loggers are removed from it if this is another run.
        chosen: the user has named the parts.
    """
    manifest = checkpoint.loaded.manifest
    if components - {"model", "optimizer", "scheduler", "scaler"} and "loop" not in checkpoint.loaded.state:
        raise CheckpointError(
            f"{checkpoint.path} was saved by your own training loop, whose position a Trainer cannot restore. Fix: restore the "
            "other parts: fit(..., ckpt_path=..., restore={'model', 'optimizer', 'scheduler', 'scaler'})"
        )
    notice(f"resuming from {checkpoint}.")
    _note_moved(run, manifest, loop="loop" in components)
    if not components >= set(PARTS):
        left = [part for part in PARTS if part not in components]
        notice(f"restored: {', '.join(p for p in PARTS if p in components) or 'nothing'}. Not restored: {', '.join(left)}.")
    elif checkpoint.path.absolute().parent in saves.folders:
        saves.run_id = manifest.run_id
    elif chosen or not run.loggers:
        pass
    elif _has_its_log(run, checkpoint):
        notice("this run is not the one that saved the checkpoint, but was given its log: it continues that log.")
    else:
        components.discard("loggers")  # continuing in its files would cut off what the other run has logged since
        notice("this run is not the one that saved the checkpoint, so it does not continue the log of that run.")
    saves.resumed_from = checkpoint.path
    saves.resumed_saved_at = manifest.saved_at
    saves.resumed_finite = manifest.finite is not False
    if "loop" not in components:
        return
    # loaders are created before the loop is restored: those of the epoch in which they were last created
    every = run.arguments.reload_dataloaders_every_n_epochs
    run.progress.current_epoch = manifest.epoch - (manifest.epoch % every if every else 0)
    run.progress.global_step = manifest.step
    _take_seed(run, manifest)


def _has_its_log(run: Run, checkpoint: FoundCheckpoint) -> bool:
    """Whether a logger was given the log of the checkpoint's run, as by `version`: it continues there, as in its own run."""
    from trainkit.loggers.log_folder import is_given_log_of
    from trainkit.loggers.logger_setup import states_of

    states = states_of(run.loggers, checkpoint.loaded.state.get("loggers", ()))
    pairs = [(logger, state) for logger, state in zip(run.loggers, states, strict=True) if state is not None]
    agreed: bool = run.strategy.world.from_main(any(is_given_log_of(logger, state) for logger, state in pairs))
    return agreed


def _note_moved(run: Run, manifest: Manifest, loop: bool) -> None:
    """One notice if the checkpoint was saved by another strategy or on another number of devices."""
    text, size = describe_move(run.strategy, manifest), run.strategy.world_size
    if text is None:
        return
    if loop and size != manifest.world_size and run.arguments.global_batch_size is None:
        text += (
            f" Each optimizer step has batch_size × {size} × accumulate_grad_batches samples from now on. To have the same "
            "number on any number of devices: Trainer(global_batch_size=N)."
        )
    notice(text)


def _take_seed(run: Run, manifest: Manifest) -> None:
    """Use the seed of the checkpoint's run, or warn that random numbers will differ from it."""
    if not run.seed_given:
        run.seed = run.accelerator.seed = manifest.seed
    elif run.seed != manifest.seed and "imported" not in manifest.contents:
        warn(
            f"seed={run.seed}, but the checkpoint's run had seed={manifest.seed}: from now on, order, augmentation and dropout "
            "differ from that run. To continue it exactly, do not set a seed."
        )
    for name, saved, ours in (
        ("order of samples", manifest.order_version, ORDER_VERSION),
        ("keys of random numbers", manifest.key_version, KEY_VERSION),
    ):
        if saved != ours:
            warn(
                f"the checkpoint was saved with version {saved} of the {name}, and this is version {ours}: from now on, the "
                "order of samples and the random numbers differ from those of the saved run."
            )


def restore_fit(run: Run, training: Training, components: set[str], overrides: Mapping[str, Any], strict: bool = True) -> bool:
    """Restore the checkpoint into the run, which is set up; returns whether there is a checkpoint.

    Args:
        run: the fit.
        training: what its loop calls.
        components: the parts to be restored.
        overrides: options of the optimizers.
        strict: names that are missing or not expected in the model are an error.

    Raises:
        StateMismatchError: the checkpoint does not fit; nothing has been trained.
    """
    checkpoint, run.checkpoint = run.checkpoint, None  # The memory of the checkpoint is released at the end of this function.
    if checkpoint is None:
        notice_end(run, "the last fit has ended at")  # one that does not continue has everything left
        return False
    loaded = checkpoint.loaded
    state = loaded.state
    # the position first, so that one that does not fit raises before anything has changed
    if "loop" in components:
        restore_loop(run, training, state["loop"])
    if "callbacks" in components:
        check_callbacks(run.callbacks, state["callbacks"], str(checkpoint.path))
    seen = _run_load_hooks(run, loaded)
    tensors = with_trained_weights({**loaded.tensors, "model": seen["state_dict"]}, loaded.tensors["model"], seen)
    objects = training_objects(run)
    aliases, what = loaded.manifest.aliases, str(checkpoint.path)
    strict = strict and run.module.strict_loading
    restore_objects = partial(
        restore, objects, tensors, state, aliases, components=components, what=what, strict=strict, keep=True
    )
    state = {**state, "callbacks": seen["callbacks"]} if "callbacks" in state else state
    restore_run(run, state, components, what, restore_objects)
    if overrides and not checkpoint.restart:  # a restarted run has them already
        _override(objects, overrides)
    if "loop" in components:
        notice_end(run, "the checkpoint is of")
    return True


def notice_end(run: Run, begins: str) -> None:
    """Print a notice if the limits are reached before the fit begins."""
    if run.due.training_ends and not run.progress.should_stop:
        notice(
            f"{begins} step {run.progress.global_step}, {quantity(run.progress.current_epoch, 'epoch')} complete, "
            f"and nothing is left to train: max_epochs={run.arguments.max_epochs}, max_steps={run.arguments.max_steps}. Raise "
            "them to continue."
        )


def _run_load_hooks(run: Run, loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Show the checkpoint to the hooks before it is loaded; they may change `state_dict`."""
    manifest = loaded.manifest
    seen = checkpoint_for_hooks(manifest.epoch, manifest.step, dict(loaded.tensors["model"]), loaded.state)
    add_omitted(seen, loaded.state, partial(run.hooks.run, "on_save_checkpoint"))
    run.hooks.run("on_load_checkpoint", seen)
    return seen


def load_weights(run: Run, ckpt_path: str | os.PathLike[str], strict: bool = True) -> None:
    """Load only the model's weights, for an evaluation; `strict` as for `restore_fit`."""
    checkpoint = find_checkpoint(run, ckpt_path, search_folders(run), whole=False)
    if checkpoint is not None:
        load_found(run, checkpoint, strict)
        notice(f"weights of {checkpoint}.")


def read_checkpoint(run: Run, path: Path) -> FoundCheckpoint:
    """Read the weights of a checkpoint folder on all processes.

    Raises:
        CheckpointNotFoundError: it does not exist.
        CorruptCheckpointError: it is damaged.
    """
    return _read(run.strategy, path, whole=False)


def load_found(run: Run, checkpoint: FoundCheckpoint, strict: bool = True) -> None:
    """Load the weights of a checkpoint that was read; `strict` as for `restore_fit`."""
    loaded, run.ckpt_path = checkpoint.loaded, str(checkpoint.path)
    seen = _run_load_hooks(run, loaded)
    objects = TrainingObjects([run.module], [], [], run.strategy.precision, run.strategy)
    tensors, aliases, what = {"model": seen["state_dict"]}, loaded.manifest.aliases, str(checkpoint.path)
    strict = strict and run.module.strict_loading
    restore(objects, tensors, loaded.state, aliases, components={"model"}, what=what, strict=strict)


def _override(objects: TrainingObjects, overrides: Mapping[str, Any]) -> None:
    """Replace restored options of the optimizers' parameter groups."""
    for name, value in overrides.items():
        known = sorted({key for o in objects.optimizers for group in o.param_groups for key in group if key != "params"})
        if name not in known:
            raise UnknownNameError(
                f"overrides: no optimizer has the option {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
        if name == "lr":
            real_number(value, "overrides: lr", least=0, fix="overrides={'lr': 1e-4}")
        for optimizer in objects.optimizers:
            if name == "lr":
                _override_lr(optimizer, objects.schedulers, value)
                continue
            for group in optimizer.param_groups:
                if name in group:
                    group[name] = value
        notice(f"{name} is {value!r} from now on, instead of the value in the checkpoint.")


def _override_lr(optimizer: Any, schedulers: Collection[Any], rate: float) -> None:
    """Set a new learning rate. If there is a schedule, its initial learning rate changes, and the rest of it is scaled."""
    own_schedulers = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
    factors = []
    for group in optimizer.param_groups:
        before = float(group.get("initial_lr", group["lr"]))
        factors.append(rate / before if before else 1.0)
        keys = ("lr", "initial_lr", "max_lr", "min_lr") if own_schedulers and before else ("lr",)
        for key in keys:
            if key in group:
                value = rate if len(keys) == 1 else float(group[key]) * factors[-1]
                # a tensor is filled and not replaced: compiled and captured steps refer to it
                group[key] = group[key].fill_(value) if isinstance(group[key], Tensor) else value
    for scheduler in own_schedulers:
        _scale(scheduler, factors)


def _scale(scheduler: Any, factors: list[float]) -> None:
    for key in ("base_lrs", "max_lrs", "_last_lr"):
        values = getattr(scheduler, key, None)
        if isinstance(values, list) and len(values) == len(factors):
            setattr(scheduler, key, [value * factor for value, factor in zip(values, factors, strict=True)])
    for inner in getattr(scheduler, "_schedulers", []):
        _scale(inner, factors)
