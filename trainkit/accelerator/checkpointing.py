"""Files of an `Accelerator`: checkpoints in the format that `Trainer` writes, weights, and objects."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from trainkit.accelerator.gradients import AccumulationState
from trainkit.accelerator.prepared_models import PreparedObjects, user_model
from trainkit.accelerator.state_hooks import SavedByHooks, StateHooks
from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan
from trainkit.checkpoint.checksum import DEFAULT_CHECKSUM, check_checksum
from trainkit.checkpoint.commit import CommitResult
from trainkit.checkpoint.folder import next_counter, remove
from trainkit.checkpoint.manifest import TORCH_SUFFIXES, Manifest, is_checkpoint
from trainkit.checkpoint.plain_files import write_object, write_weights
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.reader import LoadedCheckpoint, inspect_checkpoint, read_on_all_ranks
from trainkit.checkpoint.saver import Saver
from trainkit.checkpoint.tensor_file import FiniteCheck
from trainkit.checkpoint.torch_file import write_torch_file
from trainkit.checkpoint.urls import remote_sync
from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.console import join_names, notice, warn
from trainkit.data.loader import PreparedLoader
from trainkit.distributed.collective_checks import CollectiveChecks, Values
from trainkit.distributed.world import ThreadExchange, World
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
)
from trainkit.optim.parameter_names import clean_names, without_checkpoint_wrapper
from trainkit.optim.same_options import check_same_options
from trainkit.paths import local_path, url_of
from trainkit.state.model import capture_model
from trainkit.state.plan_checkpoint import checksums, compare_ranks, plan_checkpoint
from trainkit.state.pretrained import adapter_folders, has_adapters
from trainkit.state.pretrained_folder import config_files
from trainkit.state.training_objects import (
    CapturedState,
    SaveMode,
    TrainingObjects,
    capture,
    describe_move,
    manifest_fields,
    model_stem,
    restore,
    with_trained_weights,
)
from trainkit.strategy import Strategy
from trainkit.tagged_json.tensors import is_sharded_tensor

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator

__all__ = ["PARTS", "Checkpointing", "NumberedCheckpoints", "Saving", "refuse_pickle", "rotate"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "loaders", "registered")
_NAME = re.compile(r"checkpoint_(0|[1-9][0-9]*)")
_ALONE = World()  # the main process of several that writes without the others


class Checkpointing:
    """Saves and restores prepared and registered objects, and the counters of the loop.

    All processes call `load`, and `save` too unless the main process has everything that is saved; see `_writes_alone`.

    Args:
        strategy: The strategy of the run.
        numbered: Checkpoints that are named by their number.
        prepared: The objects to save.
        resumes: Whether `load` lets loaders continue, by default.

    Attributes:
        registered: Other objects to save, which have `state_dict` and `load_state_dict`.
        hooks: Functions that save and load models in the user's own way.
        run_id: The id of the run; a full `load` takes over that of the checkpoint.
    """

    def __init__(
        self, strategy: Strategy, numbered: NumberedCheckpoints, prepared: PreparedObjects, resumes: bool = False
    ) -> None:
        self._strategy = strategy
        self._world = strategy.world
        self._numbered = numbered
        self._prepared = prepared
        self._resumes = resumes
        self._saver = Saver(notify=lambda: None)
        self._group: ThreadExchange | None = None  # of all processes, once they have saved together
        self._checks = CollectiveChecks.of(self._world)
        self._nonfinite: deque[CommitResult] = deque()  # the writer's thread appends
        self._warned = False
        self._said_names = False
        self.registered: list[Any] = []
        self.hooks = StateHooks()
        self.run_id = secrets.token_hex(8)

    def register(self, *objects: Any) -> None:
        """See `Accelerator.register_for_checkpointing`."""
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
        self._checks.alone.raise_here()
        self._report()

    def join(self) -> None:
        """Wait for a save in flight; the next verb of all processes raises its error if the main process has written alone."""
        self._saver.join()

    def note_failures(self) -> None:
        """Before a verb: note the failures of what the main process has written alone in a thread."""
        if self._saver.group.size == 1:  # otherwise all processes have the same error, and raise it together
            self._saver.poll()

    def agree_on_run(self, options: Sequence[str]) -> None:
        """Let all processes have the run id of the main process, and compare `options` of optimizers.

        Collective: it is a part of `prepare`.

        Raises:
            OptimizerError: The options differ.
        """
        by_rank = self._checks.exchange("prepare", [self.run_id, options])
        check_same_options([options for _, options in by_rank])
        self.run_id = by_rank[0][0]

    def save(
        self,
        loop: Accelerator,
        output_dir: str | PathLike[str] | None = None,
        *,
        blocking: bool = True,
        checksum: str = DEFAULT_CHECKSUM,
    ) -> Path:
        """See `Accelerator.save_state`.

        If its parameters are not finite, a warning says so. It then does not replace a checkpoint that has finite ones, and
        `total_limit` keeps the newest of those.
        """
        check_checksum(checksum, "save_state(checksum=)")
        numbered = self._is_numbered(output_dir, "save_state")
        folder = None if output_dir is None else local_path(output_dir, "output_dir")
        self._check_not_empty()
        world = _ALONE if self._writes_alone() else self._world
        self._join_group(world)
        if world is _ALONE:
            self._note_values(loop)
            self._checks.alone.updates = loop.updates
        if world is _ALONE and not self._world.is_main:
            if self.hooks.saves:
                self._run_hooks_aside()
            return folder if folder is not None and not numbered else self._numbered.count()
        target = None if numbered else folder
        with failing_alone(self._checks, world is _ALONE):
            return self._write(loop, world, target, output_dir, blocking=blocking, checksum=checksum)

    def _writes_alone(self) -> bool:
        """Whether the main process saves without the others, which have nothing that it does not have. The same on all."""
        return writes_alone(self._strategy) and all(loader.main_has_position for loader in self._prepared.loaders)

    def _note_values(self, loop: Accelerator) -> None:
        """Note a checksum of what all processes have: if all of them have called, the next verb compares it."""
        objects = self._training_objects()
        taken = capture(objects, fingerprints=dict.fromkeys(range(len(objects.models)), "not asked for"))
        about = {"save_counter": loop.updates}
        sums = checksums(CheckpointContent(taken.tensors, taken.state, about))
        self._checks.alone.values = Values(loop.updates, sum(sums.values()), lambda group: compare_ranks(group, sums))

    def _join_group(self, world: World) -> None:
        """Let these processes save together: all of the run, or the main process alone. Waits for the last save."""
        saver = self._saver
        saver.join()  # before the verb, which raises its error on all processes if the main process has written alone
        if world is self._world:
            VerbGroup(world, "save_state").wait()
            if world.size > 1 and self._group is None:
                self.run_id = world.from_main(self.run_id)
                self._group = world.thread_exchange(f"save_state/{self.run_id}")
        saver.wait()
        saver.group = ThreadExchange() if self._group is None or world is _ALONE else self._group
        self._checks.alone.raise_here()
        self._report()

    def _write(
        self,
        loop: Accelerator,
        world: World,
        folder: Path | None,
        output_dir: str | PathLike[str] | None,
        *,
        blocking: bool,
        checksum: str,
    ) -> Path:
        """Write a checkpoint together with the other processes of `world`; `folder` is `None` if it is named by its number."""
        saver = self._saver
        failed = None
        if world is _ALONE:
            failed = self._checks.alone.note
            self._checks.alone.writers.add(self)
        if folder is not None:
            with self._hooks_run(world, folder) as by_hooks:
                draft = self._draft(loop, world, folder, checksum, by_hooks)
                saver.save(draft, folder, blocking=blocking, replace=True, committed=self._note, failed=failed)
            nonfinite = [written.path for written in self._nonfinite if written.kept is not None]  # empty unless blocking
            self._report()
            return nonfinite[0] if nonfinite else folder
        project, path = self._numbered.project, self._numbered.next_path(world)
        if output_dir is not None:
            notice(f"save_state({str(output_dir)!r}): automatic_checkpoint_naming is on, so it is written to {path}.")

        def on_commit(written: CommitResult) -> None:
            self._note(written)
            rotate(path.parent, project.total_limit, written.manifest)

        with self._hooks_run(world, path) as by_hooks:
            draft = self._draft(loop, world, path, checksum, by_hooks)
            saver.save(draft, path, blocking=blocking, committed=on_commit, failed=failed)
        project.iteration = _number_of(path) + 1
        self._report()
        return path

    @contextmanager
    def _hooks_run(self, world: World, path: Path) -> Iterator[SavedByHooks]:
        """A context before which the hooks of `save_state` have run; an error in it removes their files."""
        saved = SavedByHooks()
        if self.hooks.saves:
            target, group = Path(os.path.abspath(path)), VerbGroup(world, "save_state")
            saved = self.hooks.save(group, self._prepared.models, self._weights_for_hooks(), target, self.run_id)
        try:
            yield saved
        except BaseException:
            if saved.files is not None:
                saved.files.remove()
            raise

    def _run_hooks_aside(self) -> None:
        """Run the hooks of `save_state` on a process that does not write."""
        try:
            self.hooks.save_aside(self._prepared.models, self._weights_for_hooks())
        except Exception:
            self._checks.alone.note_own()
            raise

    def _weights_for_hooks(self) -> list[dict[str, Any]]:
        """The state dicts of the models, which hooks of `save_state` may remove; none if sharded, as in Accelerate."""
        if _shards(self._strategy):
            return []
        saving = Saving(self._strategy)
        return [saving.state_dict(model) for model in self._prepared.models]

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
        loop: Accelerator,
        input_dir: str | PathLike[str] | None = None,
        *,
        parts: Collection[str] = PARTS,
        strict: bool = True,
        resume_loaders: bool | None = None,
    ) -> None:
        """See `Accelerator.load_state`; `parts` are those to restore, of `PARTS`."""
        numbered = self._is_numbered(input_dir, "load_state")
        self.join()
        VerbGroup(self._world, "load_state").wait()
        if input_dir is None:
            path, loaded = self._newest()
        else:
            path = local_path(input_dir, "input_dir")
            loaded = self._read(path)
        resumes = self._resumes if resume_loaders is None else resume_loaders
        self._restore(loop, path, loaded, set(parts), strict, resumes)
        if numbered:
            self._numbered.continue_after(path)

    def resume_loaders(self) -> None:
        """See `Accelerator.resume_loaders`."""
        left = [(loader, loader.reading.left[0]) for loader in self._prepared.loaders if loader.reading.left is not None]
        if not left:
            raise ConfigurationError(
                "resume_loaders: no prepared loader has a position to resume from. Either no checkpoint was loaded, or the "
                "loaders have been read since. Call it after load_state and before the loop, or use: "
                "accelerator.load_state(folder, resume_loaders=True)"
            )
        for loader, position in left:
            loader.resume_at(position, loader.start_of(position))

    # ------------------------------------------------------------------------------------------------------------ where

    def _is_numbered(self, folder: str | PathLike[str] | None, verb: str) -> bool:
        """Whether checkpoints are named by their number; if they are not, a folder must be named."""
        if not self._numbered.active and folder is None:
            raise ConfigurationError(
                f"{verb} needs a folder: accelerator.{verb}('checkpoints/first'); or number the checkpoints automatically: "
                "Accelerator(project_config=ProjectConfiguration(project_dir='runs/first', automatic_checkpoint_naming=True))"
            )
        return self._numbered.active

    def _read(self, path: str | PathLike[str]) -> LoadedCheckpoint:
        return read_on_all_ranks(path, self._world, mapped=self._strategy.reads_checkpoint_parts)

    def _newest(self) -> tuple[Path, LoadedCheckpoint]:
        """Read the newest complete checkpoint of those that are named by their number."""
        bad: list[str] = []
        checkpoints = self._numbered.newest_first()
        for path, problem, finite in checkpoints:
            try:
                if problem is None:
                    loaded = self._read(path)
                    for text in bad:
                        warn(f"a checkpoint is damaged and skipped: {text}")
                    if not finite:
                        warn(f"the parameters in {path} are not finite, and there is no checkpoint with finite ones.")
                    elif newer := [one.name for one, _, good in checkpoints if not good and _number_of(one) > _number_of(path)]:
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

    def _training_objects(self) -> TrainingObjects:
        prepared, strategy = self._prepared, self._strategy
        optimizers = [one.optimizer for one in prepared.optimizers]
        schedulers = [one.scheduler for one in prepared.schedulers]
        return TrainingObjects(list(prepared.models), optimizers, schedulers, strategy.precision, strategy, prepared.known)

    def _check_not_empty(self) -> None:
        if not self._prepared.models and not self.registered:
            raise ConfigurationError(
                "save_state: nothing was prepared, so there is nothing to save. Call it after: model, optimizer = "
                "accelerator.prepare(model, optimizer)"
            )

    def _draft(self, loop: Accelerator, world: World, path: Path, checksum: str, by_hooks: SavedByHooks) -> CheckpointPlan:
        """The current state as a checkpoint that the processes of `world` write together, and have not written."""
        objects = self._training_objects()
        save: SaveMode = "trainable" if any(has_adapters(model) for model in objects.models) else "all"
        # The main process computes the fingerprint of frozen parameters; where they are sharded all processes gather them.
        fingerprints = world.is_main or self._strategy.shards_parameters
        known = dict.fromkeys(by_hooks.models if fingerprints else range(len(objects.models)), "the main process's")
        taken = capture(objects, save=save, fingerprints=known)
        self._choose_files(path, taken, objects.models, by_hooks.models)
        positions = [loader.gather_position(loader.state_dict()) for loader in self._prepared.loaders]
        state = {
            **taken.state,
            "loaders": positions,
            "windows": loop.accumulation.counts(),
            "registered": [thing.state_dict() for thing in self.registered],
        }
        if ahead := [n for n, loader in enumerate(self._prepared.loaders) if loader in loop.open_loaders.read_ahead]:
            state["read_ahead"] = ahead

        def count() -> int:
            return next_counter(path.absolute().parent, self.run_id) if world.is_main else 0

        described = manifest_fields(
            self._strategy,
            taken,
            seed=loop.own_seed if world is _ALONE else loop.seed,
            run_id=self.run_id,
            save_counter=run_on_all_ranks(world, count),
            step=loop.updates,
            epoch=positions[0]["epoch"] if positions else 0,
            position=positions[0] if positions else {},
            save=save,
        )
        stems = [model_stem(number) for number in by_hooks.models]
        if stems:
            described["contents"]["by_hook"] = stems
        content = CheckpointContent(
            taken.tensors,
            state,
            described,
            taken.attachments,
            parameters=taken.parameters,
            checksum=checksum,
            hook_files=by_hooks.files,
            by_hook=stems,
            model_files=taken.model_files,
        )
        return plan_checkpoint(world, content)

    def _choose_files(self, path: Path, taken: CapturedState, models: Sequence[nn.Module], by_hooks: Collection[int]) -> None:
        """Choose the files of the models that no hook has saved.

        A notice says once that `from_pretrained` would open the folder with random weights: in it they have other names.
        """
        if by_hooks:
            _leave_to_hooks(taken, by_hooks)
            return
        taken.choose_files(models)
        if not self._said_names and not taken.attachments and not taken.model_files:
            self._note_other_names(path, taken)

    def _note_other_names(self, path: Path, taken: CapturedState) -> None:
        models = taken.state["models"]
        found = [(number, place) for number, model in enumerate(models) for place in model["configs"]]
        if not found:
            return
        self._said_names = True
        number, place = found[0]
        of_several = model_stem(number) if len(models) > 1 else ""
        attribute = "/".join(part for part in (of_several, place) if part)
        option = f" --attribute {attribute}" if attribute else ""
        notice(
            f"save_state: from_pretrained({str(path)!r}) would initialize the weights at random, since they have other names "
            f"there. For a folder that it opens: trainkit checkpoint export {path} exported{option}"
        )

    def _restore(
        self, loop: Accelerator, path: Path, loaded: LoadedCheckpoint, parts: set[str], strict: bool, resumes: bool
    ) -> None:
        """Load a checkpoint into the prepared objects. What does not fit is raised before anything is changed."""
        manifest, state = loaded.manifest, loaded.state
        self._check_fits(path, loaded, parts)
        positions = (state.get("loaders") or []) if "loaders" in parts else []
        loaders = list(zip(self._prepared.loaders, positions, strict=False))
        starts = [loader.start_of(position) if resumes else None for loader, position in loaders]
        tensors = with_trained_weights(loaded.tensors, loaded.tensors.get("model", {}), state.get("user", {}))
        objects = self._training_objects()
        done = self._load_by_hooks(path) if "model" in parts else []
        what = str(path)
        restore(objects, tensors, state, manifest.aliases, components=parts, what=what, strict=strict, keep=True, loaded=done)
        if "loaders" in parts:
            if positions:
                _compare_seeds(loop.seed, manifest.seed)
            # checkpoints of earlier versions have one count for all models
            windows = state.get("windows", [(0, state.get("window", 0))])
            self._place_loaders(loop, loaders, starts, windows)
        if "optimizer" in parts:
            loop.updates = manifest.step
        if parts == set(PARTS):
            self.run_id = manifest.run_id  # the run continues
        if "registered" in parts:
            for thing, saved in zip(self.registered, state.get("registered") or [], strict=True):
                thing.load_state_dict(saved)
        loop.open_loaders.note_load([loader for loader, _ in loaders], state.get("read_ahead", []))
        _report_restored(path, manifest.step, parts)
        if text := describe_move(self._strategy, manifest):
            notice(text)
        _report_loader_start(self._prepared.loaders)

    def _load_by_hooks(self, path: Path) -> list[int]:
        """Run the hooks of `load_state`, if there are any. Returns the indices of the models that they have loaded."""
        if not self.hooks.loads:
            return []
        models = [] if _shards(self._strategy) else self._prepared.models
        return self.hooks.load(VerbGroup(self._world, "load_state"), models, Path(os.path.abspath(path)))

    def _place_loaders(
        self,
        loop: Accelerator,
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

    def _check_fits(self, path: Path, loaded: LoadedCheckpoint, parts: Collection[str]) -> None:
        """Check that the checkpoint and this loop have the same parts."""
        if "optimizer" in parts and not loaded.manifest.contents.get("resumable", False):
            raise CheckpointError(
                f"{path} is a weights-only checkpoint. Load only the model: accelerator.load_state(path, restore={{'model'}})"
            )
        here: Mapping[str, Sequence[Any]] = {"loaders": self._prepared.loaders, "registered": self.registered}
        for part, objects in here.items():
            saved = len(loaded.state.get(part) or [])
            if part in parts and saved != len(objects):
                raise StateMismatchError(
                    f"{path} contains {saved} {part}, but there are {len(objects)} here. Prepare and register the same objects "
                    "as when it was saved, in the same order; or do not restore them: "
                    "accelerator.load_state(path, restore={'model', 'optimizer', 'scheduler', 'scaler'})"
                )

    def _close_window(self, accumulation: AccumulationState) -> None:
        """Discard an accumulation window that is open: its gradients are those of other parameters."""
        if accumulation.has_open_window or not accumulation.current.last:
            accumulation.forget_window()
            for optimizer in self._prepared.optimizers:
                optimizer.zero_grad()


def _leave_to_hooks(taken: CapturedState, models: Collection[int]) -> None:
    """Remove what belongs to the weights of models that hooks have saved."""
    for number in models:
        described = taken.state["models"][number]
        described |= {"extra": {}, "fingerprint": None, "configs": {}}
        taken.aliases.pop(model_stem(number))


def _compare_seeds(seed: int, saved: int) -> None:
    if seed != saved:
        warn(
            f"the seed is {seed}, but the checkpoint was saved with seed {saved}: from now on, order and random numbers differ "
            f"from those of the saved loop. To keep them, call trainkit.set_seed({saved}) before prepare."
        )


def _report_restored(path: Path, step: int, parts: Collection[str]) -> None:
    skipped = [part for part in PARTS if part not in parts]
    notice(f"restored the state of {path} (step {step})" + (f"; not restored: {', '.join(skipped)}." if skipped else "."))


def _report_loader_start(loaders: Sequence[PreparedLoader]) -> None:
    """A notice, for the training loader, that it does not continue by itself where the checkpoint was saved."""
    loader = next((one for one in loaders if one.reading.left is not None), None)
    if loader is None or loader.reading.left is None:
        return
    epoch, batches = loader.epoch, loader.reading.left[1]
    place = f"batch {batches} of" if batches is not None else "in the middle of"
    skip = f"accelerator.skip_first_batches(loader, {'n' if batches is None else batches})"
    notice(
        f"the checkpoint was saved at {place} epoch {epoch}, and the prepared loader starts epoch {epoch} at its first "
        "batch, as in Accelerate. To continue exactly: accelerator.load_state(folder, resume_loaders=True), or "
        f"accelerator.resume_loaders() before the loop. In a script that skips batches itself: {skip}."
    )


class NumberedCheckpoints:
    """The checkpoints of a project that are named by their number, as `automatic_checkpoint_naming` does.

    The main process looks at the folder, and all processes get what it has found.

    Args:
        project: The folder, and in `iteration` the number of the next checkpoint.
        world: The processes.
    """

    def __init__(self, project: ProjectConfiguration, world: World) -> None:
        self.project = project
        self._world = world

    @property
    def active(self) -> bool:
        """Whether `save_state` names checkpoints by their number."""
        return self.project.automatic_checkpoint_naming

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        if self.project.project_dir is None:
            raise ConfigurationError(
                "ProjectConfiguration(automatic_checkpoint_naming=True) needs a folder: Accelerator(project_dir='runs/first', "
                "project_config=...), or ProjectConfiguration(project_dir='runs/first', ...)"
            )
        return Path(os.path.abspath(self.project.project_dir), "checkpoints")

    def next_path(self, world: World) -> Path:
        """The folder of the next checkpoint; refuses those of an earlier start that was not resumed. Collective in `world`."""
        return Path(run_on_all_ranks(world, lambda: str(self._free_path()) if world.is_main else None))

    def count(self) -> Path:
        """The folder of the next checkpoint, which the main process alone writes, as this process has counted; counts it."""
        path = self.folder / f"checkpoint_{self.project.iteration}"
        self.project.iteration += 1
        return path

    def check(self) -> None:
        """On the main process, raise what `next_path` would raise; before hours of training are spent."""
        if self.active and self._world.is_main:
            self._free_path()

    def _free_path(self) -> Path:
        folder, number = self.folder, self.project.iteration
        taken = sorted(number for number, _ in _list_numbered(folder))
        if taken and taken[-1] >= number:
            shown = f"checkpoint_{taken[0]}" + (f" to checkpoint_{taken[-1]}" if len(taken) > 1 else "")
            raise ConfigurationError(
                f"{folder} contains {shown} of an earlier start, and the next one would be checkpoint_{number}. To continue "
                "from the newest: accelerator.load_state() before the loop; to start a new series next to them: "
                f"accelerator.project_configuration.iteration = {taken[-1] + 1}, or another project_dir."
            )
        return folder / f"checkpoint_{number}"

    def newest_first(self) -> list[tuple[Path, str | None, bool]]:
        """Each checkpoint, what is wrong with it, or `None`, and whether its parameters are finite. Collective.

        Those whose parameters are not finite come last. The files of a killed save have other names and are not listed.
        """

        def find() -> list[list[Any]] | None:
            if not self._world.is_main:
                return None
            numbered = sorted(_list_numbered(self.folder), reverse=True)
            rows = [(str(path), *inspect_checkpoint(path)) for _, path in numbered if is_checkpoint(path)]
            marked = [[path, problem, about is None or about.finite is not False] for path, about, problem in rows]
            return sorted(marked, key=lambda row: not row[-1])

        return [(Path(path), problem, finite) for path, problem, finite in run_on_all_ranks(self._world, find)]

    def continue_after(self, loaded: Path) -> None:
        """Number the next checkpoint after all that there are, if the loaded one is one of them. Collective."""

        def count() -> int | None:
            if not self._world.is_main:
                return None
            folder = self.folder
            if Path(os.path.realpath(loaded)).parent != Path(os.path.realpath(folder)):
                return self.project.iteration
            return max((number for number, _ in _list_numbered(folder)), default=-1) + 1

        self.project.iteration = run_on_all_ranks(self._world, count)


def rotate(folder: Path, limit: int | None, manifest: Manifest | None) -> None:
    """Remove the oldest checkpoints after a save; on the process that has the manifest of the new one.

    Only complete checkpoints of the same run are counted and removed: first those whose parameters are not finite. A new one
    whose parameters are not finite never removes the newest of the others.

    Args:
        folder: The folder of the checkpoints.
        limit: Number of checkpoints to keep; `None`: all.
        manifest: The manifest of the new checkpoint; `None`: another process removes.
    """
    if manifest is None:
        return
    try:
        for left in folder.glob(".checkpoint_*.del-*"):  # a process was killed while it removed this
            shutil.rmtree(left, ignore_errors=True)
        if limit is not None:
            new, *others = sorted(_complete(folder, manifest.run_id), key=lambda one: one[0], reverse=True)
            others.sort(key=lambda one: (one[2], one[0]))
            outdated = others[: max(0, len(others) + 1 - limit)]
            if not new[2] and outdated and outdated[-1] == others[-1] and others[-1][2]:
                outdated.pop()
            for _, old, _ in outdated:
                remove(old)
    except (CheckpointError, OSError) as error:  # the next save tries again
        notice(f"save_state: the new checkpoint is complete, but old ones could not be removed: {error}")


def _complete(folder: Path, run_id: str) -> list[tuple[int, Path, bool]]:
    """The complete checkpoints of a run: number, path, and whether its parameters are finite."""
    complete = []
    for number, path in _list_numbered(folder):
        manifest, problem = inspect_checkpoint(path) if is_checkpoint(path) else (None, None)
        if problem is None and manifest is not None and manifest.run_id == run_id:
            complete.append((number, path, manifest.finite is not False))
    return complete


def _number_of(path: Path) -> int:
    """The number in the name of a numbered checkpoint."""
    return int(path.name.rpartition("_")[2])


def _list_numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """The number and path of everything that is named like a checkpoint."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Use another project_dir.") from error
    for name in names:
        if match := _NAME.fullmatch(name):
            yield int(match[1]), folder / name


class Saving:
    """Writes weights as safetensors, and objects as safetensors or JSON.

    Args:
        strategy: The strategy of the run.
        models: The prepared models, without wrappers.
        alone: The main process writes models without the others, if it can. With a `Trainer`, `save_model` waits for all.
    """

    def __init__(self, strategy: Strategy, models: Sequence[nn.Module] = (), alone: bool = False) -> None:
        self._alone = alone and writes_alone(strategy)
        self._strategy = strategy
        self._models = models

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool | None = None) -> None:
        """See `Accelerator.save`."""
        if not isinstance(f, str | PathLike):
            raise ConfigurationError(
                f"save(obj, f): f must be the path of a file, not {f!r}. For example: save(obj, 'state.json')"
            )
        if not self._strategy.is_main_process:
            return
        path = local_path(f, "save(obj, f)")
        if url_of(path) is not None:
            raise ConfigurationError(
                f"save(obj, f): expected the path of a file on a disk, got {f!r}. Fix: save(obj, 'state.json')"
            )
        if safe_serialization is False and path.suffix == ".safetensors":
            raise ConfigurationError(f"save(safe_serialization=False) writes torch's format, and {f} is a safetensors file.")
        if self._strategy.shards_parameters and isinstance(obj, Mapping):
            self._refuse_without_values(obj)
        named_so = path.suffix.lower() in TORCH_SUFFIXES
        if named_so if safe_serialization is None else not safe_serialization:
            write_torch_file(path, obj)
        else:
            write_object(path, obj)
            if named_so or path.suffix in (".pickle", ".pkl"):
                notice(f"{f} is not a pickle file, despite its name. Read it with trainkit.utils.load.")

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """See `Accelerator.get_state_dict`."""
        model = user_model(model, self._strategy)
        placeholders = self._strategy.exported_weights(model)
        sharded = any(is_sharded_tensor(tensor) for tensor in placeholders.values())
        if sharded:
            VerbGroup(self._strategy.world, "get_state_dict").wait()
        state = capture_model(model, placeholders=placeholders)
        tensors = _on_host(state.tensors) if sharded else state.tensors
        if sharded and not self._strategy.is_main_process:
            return {}
        values = {**state.extra, **tensors, **{alias: tensors[name] for alias, name in state.aliases.items()}}
        order = clean_names(model).values()
        return {name: values[name] for name in order if name in values}  # a lazy parameter has no values yet

    def write_model(self, model: nn.Module, folder: Path, limit: int, checksum: str | None = None) -> None:
        """Write the files of `Accelerator.save_model`, each of at most `limit` bytes."""
        check_checksum(checksum, "save_model(checksum=)", optional=True)
        strategy, model = self._strategy, user_model(model, self._strategy)
        if not self._alone:
            self._write_model(model, folder, limit, checksum, VerbGroup(strategy.world, "save_model"))
        elif strategy.is_main_process:
            with failing_alone(CollectiveChecks.of(strategy.world), True):
                self._write_model(model, folder, limit, checksum, VerbGroup(_ALONE, "save_model"))

    def _write_model(self, model: nn.Module, folder: Path, limit: int, checksum: str | None, group: VerbGroup) -> None:
        """Write the files of a model, together with the processes of a group."""
        placeholders = self._strategy.exported_weights(model)
        if any(is_sharded_tensor(tensor) for tensor in placeholders.values()):
            group.wait()  # they are gathered from all processes
        state = capture_model(model, placeholders=placeholders)
        files, folders, rank = config_files(state.configs, state.tensors), adapter_folders(state), group.rank
        checks = [FiniteCheck(dict.fromkeys(tensors, True)) for tensors, _ in folders.values()] or [FiniteCheck(state.trained)]

        def write() -> None:
            for (where, (tensors, config)), check in zip(folders.items(), checks, strict=False):
                write_weights(
                    folder / where,
                    tensors,
                    {"adapter_config.json": config},
                    max_shard_size=sys.maxsize,
                    stem="adapter_model",
                    rank=rank,
                    check=check,
                    checksum=checksum,
                )
            if not folders:
                write_weights(folder, state.tensors, files, max_shard_size=limit, rank=rank, check=checks[0], checksum=checksum)

        # written before waiting for the other processes, so that the files are there even if those never come
        run_on_all_ranks(group, write, CheckpointWriteError)
        if nonfinite := [name for check in checks for name in check.nonfinite]:
            warn(f"save_model: parameters in {folder} are not finite: {join_names(nonfinite)}.")
        if rank == 0:
            remote_sync.add_log_folder(folder)
            remote_sync.finish()

    def _refuse_without_values(self, state: Mapping[Any, Any]) -> None:
        """Refuse the `state_dict()` of a sharded model: its tensors have no elements."""
        for model in self._models:
            placeholders = self._strategy.exported_weights(model)
            for name, parameter in model.named_parameters():
                whole, value = placeholders.get(id(parameter)), state.get(without_checkpoint_wrapper(name))
                if whole is not None and whole.numel() and isinstance(value, Tensor) and not value.numel():
                    raise ConfigurationError(
                        f"save(): {name!r} has no values in this state dict, because the parameters are sharded over the "
                        "processes. Gather them: accelerator.save(accelerator.get_state_dict(model), f), with get_state_dict "
                        "on all processes."
                    )


class VerbGroup:
    """The processes in one verb: a process that calls another verb is an error instead of a wait.

    It is a `trainkit.checkpoint.all_ranks.Group`.

    Args:
        world: The processes.
        verb: What the user has called.
    """

    def __init__(self, world: World, verb: str) -> None:
        self.rank, self.size = world.rank, world.size
        self._world = world
        self._verb = verb

    def exchange(self, value: Any) -> list[Any]:
        """The value of each process, in the order of the ranks."""
        if self._world.channel is None:  # threads, whose own exchange finds that out
            return self._world.exchange(value)
        return CollectiveChecks.of(self._world).exchange(self._verb, value)

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """The reply to the value of each process. Every process computes it, so it must be the same everywhere."""
        return answer(self.exchange(value))

    def wait(self) -> None:
        """Wait until all processes have called the verb."""
        self.exchange(None)


def writes_alone(strategy: Strategy) -> bool:
    """Whether the main process of several writes models and optimizers without the others. The same on all."""
    return strategy.world.size > 1 and strategy.main_saves_alone and not _shards(strategy)


def _shards(strategy: Strategy) -> bool:
    """Whether parameters or optimizer state are sharded. The same on all processes."""
    return strategy.shards_parameters or strategy.shards_optimizer_state


@contextmanager
def failing_alone(checks: CollectiveChecks, alone: bool) -> Iterator[None]:
    """A context that, on the main process, passes an error to the other ones, which raise it in their next verb."""
    try:
        yield
    except Exception as error:
        if alone:
            checks.alone.note(error, raised=True)
        raise


def refuse_pickle(verb: str, safe_serialization: bool) -> None:
    """Refuse `safe_serialization=False`."""
    if not safe_serialization:
        raise ConfigurationError(f"{verb}(safe_serialization=False) is not supported: a pickle can run code. Remove it.")


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sharded tensors gathered to the main process's host memory, one at a time. Collective."""
    on_host = {}
    for name, tensor in tensors.items():
        if is_sharded_tensor(tensor):
            values = cast(Any, tensor).collect(0)
            tensor = tensor if values is None else values.cpu()
        on_host[name] = tensor
    return on_host
