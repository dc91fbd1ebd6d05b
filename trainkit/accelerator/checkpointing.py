"""`Checkpointing`: the part of an `Accelerator` that saves and restores a loop, in the format that `Trainer` writes."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainkit.accelerator.accumulation import AccumulationState
from trainkit.accelerator.naming import NumberedCheckpoints, number_of, rotate
from trainkit.accelerator.reading import Reading
from trainkit.accelerator.saving import VerbGroup
from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan
from trainkit.checkpoint.commit import CommitResult
from trainkit.checkpoint.folder import next_counter
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.reader import LoadedCheckpoint, read_on_all_ranks
from trainkit.checkpoint.saver import Saver
from trainkit.console import notice, warn
from trainkit.data.loader import PreparedLoader
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
)
from trainkit.optim.prepared import PreparedOptimizer, PreparedScheduler
from trainkit.paths import local_path
from trainkit.state.plan_checkpoint import plan_checkpoint
from trainkit.state.pretrained import has_adapters
from trainkit.state.training_objects import Parts, SaveMode, about, capture, moved, restore, with_trained_weights
from trainkit.strategy import Strategy

__all__ = ["PARTS", "Checkpointing", "Loop", "Prepared"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "loaders", "registered")


class Loop(Protocol):
    """The counters of a training loop that a checkpoint contains.

    Attributes:
        updates: number of optimizer steps so far.
        accumulation: the accumulation window.
        reading: the loaders that are being read.
    """

    updates: int
    accumulation: AccumulationState
    reading: Reading

    @property
    def seed(self) -> int:
        """The seed of order and randomness. Collective when it is first asked for."""


@dataclass
class Prepared:
    """The objects that `prepare` was given, in that order.

    Attributes:
        models: without wrappers.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    loaders: Sequence[PreparedLoader]


class Checkpointing:
    """Saves and restores prepared and registered objects, and the counters of the loop.

    All processes call `save` and `load`, in the same order.

    Args:
        strategy: knows the processes and the precision, and where state is sharded.
        numbered: checkpoints that are named by their number.
        prepared: what to save.
        resumes: whether `load` lets loaders continue, by default.

    Attributes:
        registered: other objects to save, which have `state_dict` and `load_state_dict`.
        run_id: names the run; a full `load` takes over that of the checkpoint.
    """

    def __init__(self, strategy: Strategy, numbered: NumberedCheckpoints, prepared: Prepared, resumes: bool = False) -> None:
        self._strategy, self._world = strategy, strategy.world
        self._numbered, self._prepared, self._resumes = numbered, prepared, resumes
        self._saver = Saver(notify=lambda: None)
        self._nonfinite: deque[CommitResult] = deque()  # the writer's thread appends
        self._warned = False
        self.registered: list[Any] = []
        self.run_id = secrets.token_hex(8)

    def register(self, *objects: Any) -> None:
        """Save and load the state of these objects too.

        Raises:
            ConfigurationError: one without `state_dict` and `load_state_dict`.
        """
        for thing in objects:
            if isinstance(thing, type) or not all(
                callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")
            ):
                raise ConfigurationError(
                    f"register_for_checkpointing needs objects with state_dict() and load_state_dict(state), not {thing!r}."
                )
        self.registered.extend(objects)

    def close(self) -> None:
        """Wait for a save in flight, raise its error if it failed, and free the host buffers."""
        self._saver.close()
        self._report()

    def save(self, loop: Loop, output_dir: str | PathLike[str] | None = None, *, blocking: bool = True) -> Path:
        """Write a checkpoint, and return its folder.

        If its parameters are not finite, a warning says so. It then does not replace a checkpoint that has finite ones, and
        `total_limit` keeps the newest of those.

        Args:
            loop: whose counters to save.
            output_dir: the folder that the checkpoint becomes, unless checkpoints are named by their number.
            blocking: return when it is complete on the disk; `False`: when it is copied.

        Raises:
            CheckpointError: it cannot be written, or a save in flight has failed.
            UnsavableError: a value cannot be stored; the message names the path to it.
            ConfigurationError: no folder is named, nothing was prepared, or checkpoints of an earlier start are in the way.
        """
        numbered = self._is_numbered(output_dir, "save_state")
        folder = None if output_dir is None else local_path(output_dir, "output_dir")
        saver, world = self._saver, self._world
        VerbGroup(world, "save_state").wait()
        if world.size > 1 and saver.group.size == 1:
            self.run_id = world.from_main(self.run_id)
            saver.group = world.thread_exchange(f"save_state/{self.run_id}")
        saver.wait()
        self._report()
        if not numbered:
            assert folder is not None
            saver.save(self._draft(loop, folder), folder, blocking=blocking, replace=True, committed=self._note)
            own = [written.path for written in self._nonfinite if written.kept is not None]  # empty unless blocking
            self._report()
            return own[0] if own else folder
        project, path = self._numbered.project, self._numbered.next_path()
        if output_dir is not None:
            notice(f"save_state({str(output_dir)!r}): automatic_checkpoint_naming is on, so it is written to {path}.")

        def done(written: CommitResult) -> None:
            self._note(written)
            rotate(path.parent, project.total_limit, written.manifest)

        saver.save(self._draft(loop, path), path, blocking=blocking, committed=done)
        project.iteration += 1
        self._report()
        return path

    def _note(self, written: CommitResult) -> None:
        """Remember a checkpoint whose parameters are not finite; called in any thread."""
        if not written.finite:
            self._nonfinite.append(written)

    def _report(self) -> None:
        """Warn of the first checkpoint whose parameters are not finite, and of each that has another path for that reason."""
        while self._nonfinite:
            written = self._nonfinite.popleft()
            if not self._warned:
                warn(
                    f"save_state: {written.text} load_state() without a folder uses the newest that is finite, and total_limit "
                    "keeps it. To skip such a step: if not torch.isfinite(loss): accelerator.skip_update() (with Trainer: "
                    "NonFiniteGuard)"
                )
            elif written.kept is not None:
                notice(f"save_state: {written.text}")
            self._warned = True

    def load(
        self,
        loop: Loop,
        input_dir: str | PathLike[str] | None = None,
        *,
        wanted: Collection[str] = PARTS,
        strict: bool = True,
        resume_loaders: bool | None = None,
    ) -> None:
        """Restore a checkpoint.

        Args:
            loop: whose counters to restore.
            input_dir: the folder of the checkpoint; default: the newest complete one of those that are named by their number.
            wanted: what to restore, of `PARTS`.
            strict: missing and unexpected names in a model are errors.
            resume_loaders: let each loader continue where it was; default: the `resumes` of this object.

        Raises:
            CheckpointError: missing, damaged, or it does not fit; the message lists all that does not.
            ConfigurationError: no folder is named.
        """
        numbered = self._is_numbered(input_dir, "load_state")
        VerbGroup(self._world, "load_state").wait()
        if input_dir is None:
            path, loaded = self._newest()
        else:
            path = local_path(input_dir, "input_dir")
            loaded = self._read(path)
        resumes = self._resumes if resume_loaders is None else resume_loaders
        self._restore(loop, path, loaded, set(wanted), strict, resumes)
        if numbered:
            self._numbered.continue_after(path)

    def resume_loaders(self) -> None:
        """After `load`: let each loader continue where it was when the checkpoint was saved.

        Raises:
            ConfigurationError: no positions were loaded, or the loaders have been read since.
            CheckpointError: a position lies inside a micro-batch of the loader.
        """
        left = [(loader, *loader.last_position) for loader in self._prepared.loaders if loader.last_position is not None]
        if not left:
            raise ConfigurationError(
                "resume_loaders: no prepared loader has a position to resume from. Either no checkpoint was loaded, or the "
                "loaders have been read since. Call it after load_state and before the loop, or use: "
                "accelerator.load_state(folder, resume_loaders=True)"
            )
        for loader, position, _ in left:
            loader.resume_at(position, loader.start_of(position))

    # ------------------------------------------------------------------------------------------------------------ where

    def _is_numbered(self, folder: str | PathLike[str] | None, verb: str) -> bool:
        """Whether checkpoints are named by their number.

        Raises:
            ConfigurationError: they are not, and no folder is named.
        """
        if not self._numbered.active and folder is None:
            raise ConfigurationError(
                f"{verb} needs a folder: accelerator.{verb}('checkpoints/first'); or number the checkpoints automatically: "
                "Accelerator(project_config=ProjectConfiguration(project_dir='runs/first', automatic_checkpoint_naming=True))"
            )
        return self._numbered.active

    def _read(self, path: str | PathLike[str]) -> LoadedCheckpoint:
        return read_on_all_ranks(path, self._world, mapped=self._strategy.reads_checkpoint_parts)

    def _newest(self) -> tuple[Path, LoadedCheckpoint]:
        """The newest complete checkpoint of those that are named by their number.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: all are damaged.
        """
        bad: list[str] = []
        found = self._numbered.newest_first()
        for path, problem, finite in found:
            try:
                if problem is None:
                    loaded = self._read(path)
                    for text in bad:
                        warn(f"a checkpoint is damaged and skipped: {text}")
                    if not finite:
                        warn(f"the parameters in {path} are not finite, and there is no checkpoint with finite ones.")
                    elif newer := [one.name for one, _, good in found if not good and number_of(one) > number_of(path)]:
                        notice(f"skipped newer checkpoints whose parameters are not finite: {', '.join(newer)}. Using {path}.")
                    return path, loaded
            except CorruptCheckpointError as error:
                problem = str(error)
            bad.append(problem)
        folder = self._numbered.folder
        if bad:
            raise CorruptCheckpointError(
                f"all checkpoints in {folder} are damaged:\n  "
                + "\n  ".join(bad)
                + "\nRemove them to start from the beginning."
            )
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {folder}. For a script that resumes only if there is one: "
            f"if trainkit.checkpoint.list_checkpoints({str(folder)!r}): accelerator.load_state()"
        )

    # ------------------------------------------------------------------------------------------------------------- what

    def _parts(self) -> Parts:
        prepared, strategy = self._prepared, self._strategy
        optimizers = [one.optimizer for one in prepared.optimizers]
        schedulers = [one.scheduler for one in prepared.schedulers]
        return Parts(list(prepared.models), optimizers, schedulers, strategy.precision, strategy)

    def _draft(self, loop: Loop, path: Path) -> CheckpointPlan:
        """The current state as a checkpoint that has not been written.

        Raises:
            ConfigurationError: nothing has been prepared.
            UnsavableError: a value cannot be stored; the message names the path to it.
        """
        parts, world = self._parts(), self._world
        if not parts.models and not self.registered:
            raise ConfigurationError(
                "save_state: nothing was prepared, so there is nothing to save. Call it after: model, optimizer = "
                "accelerator.prepare(model, optimizer)"
            )
        save: SaveMode = "trainable" if any(has_adapters(model) for model in parts.models) else "all"
        # The main process computes the fingerprint of frozen parameters; where they are sharded all processes gather them.
        fingerprints = world.is_main or self._strategy.shards_parameters
        known = {} if fingerprints else dict.fromkeys(range(len(parts.models)), "the main process's")
        taken = capture(parts, save=save, fingerprints=known)
        positions = [loader.gathered(loader.state_dict()) for loader in self._prepared.loaders]
        state = {
            **taken.state,
            "loaders": positions,
            "windows": loop.accumulation.counts(),
            "registered": [thing.state_dict() for thing in self.registered],
        }

        def count() -> int:
            return next_counter(path.absolute().parent, self.run_id) if world.is_main else 0

        described = about(
            self._strategy,
            taken,
            seed=loop.seed,
            run_id=self.run_id,
            save_counter=run_on_all_ranks(world, count)[0],
            step=loop.updates,
            epoch=positions[0]["epoch"] if positions else 0,
            position=positions[0] if positions else {},
            save=save,
        )
        content = CheckpointContent(taken.tensors, state, described, taken.attachments, parameters=taken.parameters)
        return plan_checkpoint(world, content)

    def _restore(self, loop: Loop, path: Path, loaded: LoadedCheckpoint, wanted: set[str], strict: bool, resumes: bool) -> None:
        """Load a checkpoint into what was prepared; what does not fit is raised before anything is changed.

        Raises:
            CheckpointError: it does not fit.
        """
        manifest, state = loaded.manifest, loaded.state
        self._check_fits(path, loaded, wanted)
        positions = (state.get("loaders") or []) if "loaders" in wanted else []
        loaders = list(zip(self._prepared.loaders, positions, strict=False))
        starts = [loader.start_of(position) if resumes else None for loader, position in loaders]
        tensors = with_trained_weights(loaded.tensors, loaded.tensors.get("model", {}), state.get("user", {}))
        restore(self._parts(), tensors, state, manifest.aliases, wanted=wanted, what=str(path), strict=strict, keep=True)
        if "loaders" in wanted:
            if positions and loop.seed != manifest.seed:
                warn(
                    f"the seed is {loop.seed}, but the checkpoint was saved with seed {manifest.seed}: from now on, order and "
                    "random numbers differ from those of the saved loop. To keep them, call "
                    f"trainkit.set_seed({manifest.seed}) before prepare."
                )
            # checkpoints of earlier versions have one count for all models
            windows = state.get("windows", [(0, state.get("window", 0))])
            self._place_loaders(loop, loaders, starts, windows)
        if "optimizer" in wanted:
            loop.updates = manifest.step
        if wanted == set(PARTS):
            self.run_id = manifest.run_id  # the run continues
        if "registered" in wanted:
            for thing, own in zip(self.registered, state.get("registered") or [], strict=True):
                thing.load_state_dict(own)
        loop.reading.loaded = True
        _report_restored(path, manifest.step, wanted)
        if text := moved(self._strategy, manifest):
            notice(text)
        _report_loader_start(self._prepared.loaders)

    def _place_loaders(
        self,
        loop: Loop,
        loaders: list[tuple[PreparedLoader, Any]],
        starts: list[int | None],
        windows: Sequence[tuple[int | None, int]],
    ) -> None:
        """Continue each loader at its position, or begin its epoch again where there is no start."""
        self._close_window(loop.accumulation)
        for (loader, position), start in zip(loaders, starts, strict=True):
            if start is None:
                loader.restart_epoch(position)
            else:
                loader.resume_at(position, start)
        loop.accumulation.restore_counts(windows)

    def _check_fits(self, path: Path, loaded: LoadedCheckpoint, wanted: Collection[str]) -> None:
        """Compare the parts that the checkpoint and this loop have.

        Raises:
            CheckpointError: they differ.
        """
        if "optimizer" in wanted and not loaded.manifest.contents.get("resumable", False):
            raise CheckpointError(
                f"{path} is a weights-only checkpoint. Load only the model: accelerator.load_state(path, restore={{'model'}})"
            )
        here: Mapping[str, Sequence[Any]] = {"loaders": self._prepared.loaders, "registered": self.registered}
        for part, objects in here.items():
            saved = len(loaded.state.get(part) or [])
            if part in wanted and saved != len(objects):
                raise StateMismatchError(
                    f"{path} contains {saved} {part}, but there are {len(objects)} here. Prepare and register the same objects "
                    "as when it was saved, in the same order; or do not restore them: "
                    "accelerator.load_state(path, restore={'model', 'optimizer', 'scheduler', 'scaler'})"
                )

    def _close_window(self, accumulation: AccumulationState) -> None:
        """Discard an accumulation window that is open: its gradients are those of other parameters."""
        if accumulation.unfinished or not accumulation.current.last:
            accumulation.forget_window()
            for optimizer in self._prepared.optimizers:
                optimizer.zero_grad()


def _report_restored(path: Path, step: int, wanted: Collection[str]) -> None:
    left = [part for part in PARTS if part not in wanted]
    notice(f"restored the state of {path} (step {step})" + (f"; not restored: {', '.join(left)}." if left else "."))


def _report_loader_start(loaders: Sequence[PreparedLoader]) -> None:
    """A notice, for the training loader, that it does not continue by itself where the checkpoint was saved."""
    loader = next((one for one in loaders if one.last_position is not None), None)
    if loader is None or loader.last_position is None:
        return
    epoch, batches = loader.epoch, loader.last_position[1]
    place = f"batch {batches} of" if batches is not None else "in the middle of"
    skip = f"accelerator.skip_first_batches(loader, {'n' if batches is None else batches})"
    notice(
        f"the checkpoint was saved at {place} epoch {epoch}, and the prepared loader starts epoch {epoch} at its first "
        "batch, as in Accelerate. To continue exactly: accelerator.load_state(folder, resume_loaders=True), or "
        f"accelerator.resume_loaders() before the loop. In a script that skips batches itself: {skip}."
    )
