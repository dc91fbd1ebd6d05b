"""Checkpoints of own loops: what ``Accelerator.save_state`` and ``load_state`` do, in the format that ``Trainer`` writes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.accelerator.naming import folder_of, newest_first, next_place, number_after, rotate
from trainkit.accelerator.saving import SavingVerbs, meet, refuse_pickle
from trainkit.checkpoint.draft import Content, Draft
from trainkit.checkpoint.folder import next_counter
from trainkit.checkpoint.reader import Loaded
from trainkit.checkpoint.shared_reading import read_together
from trainkit.checkpoint.together import together
from trainkit.console import notice, warn
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
)
from trainkit.paths import local_path
from trainkit.state.model import has_adapters
from trainkit.state.parts import Parts, SaveMode, about, capture, check_names, restore
from trainkit.trainer.arguments import refuse_unknown
from trainkit.utils.configurations import ProjectConfiguration

if TYPE_CHECKING:
    from trainkit.accelerator import Accelerator

__all__ = ["PARTS", "StateVerbs"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "loaders", "registered")


class StateVerbs(SavingVerbs):
    """The verbs of :class:`trainkit.Accelerator` that write and read checkpoints."""

    project: ProjectConfiguration

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the loop writes, and how its checkpoints are named."""
        return self.project

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that names itself."""
        return self.project.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects too; they have ``state_dict`` and ``load_state_dict``."""
        _register(self._accelerator(), objects)

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **unknown: Any,
    ) -> Path:
        """Write a checkpoint: models, optimizers, schedulers, loss scale, the loaders' positions, registered objects.

        A checkpoint that is there is replaced, and there is always the old or the new one. Inside an accumulation window, what
        is saved is the position at its start. Of several processes all call it, and each writes its part.

        With ``ProjectConfiguration(automatic_checkpoint_naming=True)`` it goes to ``project_dir/checkpoints/checkpoint_N``, as
        in Accelerate whatever ``output_dir`` is. Nothing is replaced then: what an earlier start has left there is an error,
        unless the loop goes on from it (``load_state()``). When the new one is complete, the oldest of the run beyond
        ``total_limit`` are removed.

        Args:
            output_dir: the folder that the checkpoint becomes.
            safe_serialization: only ``True``.
            blocking: return when it is complete on the disk; ``False``: when it is copied, and a thread writes it. The next
                ``save_state``, and ``free_memory``, wait for it and raise what went wrong; the end of the program waits too.

        Returns:
            The folder.

        Raises:
            CheckpointError: it cannot be written, or the folder holds something else; or that was so the last time.
            UnsavableError: a value that cannot be stored, with the path to it.
            ConfigurationError: no folder is named; or those of an earlier start are in the way.
        """
        accelerator = self._accelerator()
        refuse_unknown("Accelerator.save_state", unknown, ("output_dir", "safe_serialization", "blocking"))
        refuse_pickle("save_state", safe_serialization)
        naming = _is_naming(accelerator, output_dir, "save_state")
        folder = None if output_dir is None else local_path(output_dir, "output_dir")
        meet(accelerator.world, "save_state")
        saver, world = accelerator.saver, accelerator.world
        if world.size > 1 and saver.team.size == 1:
            accelerator.run_id = world.from_main(accelerator.run_id)
            saver.team = world.team(f"save_state/{accelerator.run_id}")
        saver.wait()
        if not naming:
            assert folder is not None
            saver.save(_draft(accelerator, folder), folder, blocking=blocking, replace=True)
            return folder
        project = self.project
        path = next_place(project, world)
        if output_dir is not None:
            notice(f"save_state({str(output_dir)!r}): automatic_checkpoint_naming is on, so it is written to {path}.")
        done = partial(rotate, path.parent, project.total_limit)
        saver.save(_draft(accelerator, path), path, blocking=blocking, committed=done)
        project.iteration += 1
        return path

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Any = None,
        *,
        restore: Collection[str] | None = None,
        strict: bool = True,
        resume_loaders: bool | None = None,
        **unknown: Any,
    ) -> None:
        """Restore what :meth:`save_state` wrote, into objects that were prepared as they were then.

        As in Accelerate, a prepared loader then begins the epoch of the checkpoint at its beginning, in the order that it had.
        A script skips what it has trained on, by ``accelerator.skip_first_batches(loader, n)`` or by counting; a notice says so
        where the checkpoint was saved inside an epoch. With ``resume_loaders=True`` the next iteration continues where the loop
        was, and nothing of a map-style dataset is fetched to get there. In both cases the loop to write is
        ``for epoch in range(loader.epoch, n)``. All processes call it; there may be more or fewer than when it was saved.

        Args:
            input_dir: the folder of the checkpoint; one that a ``Trainer`` has written will do for the parts that it has. With
                ``ProjectConfiguration(automatic_checkpoint_naming=True)`` the default is the one with the highest number that
                is complete; those that are damaged are named and passed over.
            load_kwargs: of Accelerate's ``torch.load``; only ``None``.
            restore: only these parts, of "model", "optimizer", "scheduler", "scaler", "loaders", "registered".
            strict: names that are missing or not expected in a model are errors.
            resume_loaders: continue each prepared loader where it was, as :meth:`resume_loaders` does. For loops that do not
                skip batches themselves. Default: only with ``DataLoaderConfiguration(use_stateful_dataloader=True)``.

        Raises:
            CheckpointError: missing, damaged, or does not fit; the message lists all that does not.
            ConfigurationError: no folder is named.
            UnsupportedArgumentError: an argument of Accelerate's; the message names the replacement.
        """
        accelerator = self._accelerator()
        given = unknown if load_kwargs is None else {"load_kwargs": load_kwargs, **unknown}
        refuse_unknown("Accelerator.load_state", given, ("input_dir", "restore", "strict", "resume_loaders"))
        wanted = check_names(restore, PARTS)
        naming = _is_naming(accelerator, input_dir, "load_state")
        meet(accelerator.world, "load_state")
        if input_dir is None:
            path, loaded = _newest(accelerator)
        else:
            path = local_path(input_dir, "input_dir")
            loaded = _read(accelerator, path)
        resumes = accelerator.options.resume_loaders if resume_loaders is None else resume_loaders
        _load(accelerator, path, loaded, wanted, strict, resumes)
        if naming:
            self.project.iteration = number_after(self.project, path, accelerator.world)

    def resume_loaders(self) -> None:
        """After :meth:`load_state`: let the next iteration over each prepared loader continue where the saved loop was, once.

        Raises:
            ConfigurationError: no positions were loaded, or the loaders have been read since.
            CheckpointError: a position lies inside a micro-batch of this loop's loader.
        """
        left = [(loader, *loader.left_off) for loader in self._accelerator().loaders if loader.left_off is not None]
        if not left:
            raise ConfigurationError(
                "resume_loaders: no prepared loader has a position of a checkpoint that it has not been read since. Call it "
                "after load_state and before the loop: accelerator.load_state(folder, resume_loaders=True)"
            )
        for loader, position, _ in left:
            loader.go_on(position, loader.start_of(position))


def _is_naming(accelerator: Accelerator, folder: str | PathLike[str] | None, verb: str) -> bool:
    """Whether checkpoints name themselves.

    Raises:
        ConfigurationError: they do not, and no folder is named.
    """
    project: ProjectConfiguration | None = getattr(accelerator, "project", None)
    naming = project is not None and project.automatic_checkpoint_naming
    if not naming and folder is None:
        raise ConfigurationError(
            f"{verb} needs a folder: accelerator.{verb}('checkpoints/first'); or let checkpoints name themselves: "
            "Accelerator(project_config=ProjectConfiguration(project_dir='runs/first', automatic_checkpoint_naming=True))"
        )
    return naming


def _read(accelerator: Accelerator, path: str | PathLike[str]) -> Loaded:
    return read_together(path, accelerator.world, mapped=accelerator.strategy.sharded_state)


def _newest(accelerator: Accelerator) -> tuple[Path, Loaded]:
    """The newest complete checkpoint of those that name themselves.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: all are damaged.
    """
    bad: list[str] = []
    found = newest_first(accelerator.project, accelerator.world)
    for path, problem in found:
        try:
            if problem is None:
                loaded = _read(accelerator, path)
                for said in bad:
                    warn(f"a checkpoint is damaged and passed over: {said}")
                return path, loaded
        except CorruptCheckpointError as error:
            problem = str(error)
        bad.append(problem)
    folder = folder_of(accelerator.project)
    if bad:
        raise CorruptCheckpointError(
            f"none of the checkpoints in {folder} is good:\n  "
            + "\n  ".join(bad)
            + "\nRemove them to start from the beginning."
        )
    raise CheckpointNotFoundError(
        f"there is no checkpoint in {folder}. For a script that goes on only if there is one: "
        f"if trainkit.checkpoint.list_checkpoints({str(folder)!r}): accelerator.load_state()"
    )


def _parts(accelerator: Accelerator) -> Parts:
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    return Parts(models, accelerator.optimizers, accelerator.schedulers, accelerator.strategy.precision, accelerator.strategy)


def _draft(accelerator: Accelerator, path: Path) -> Draft:
    """A checkpoint of this moment, laid out.

    Raises:
        ConfigurationError: nothing has been prepared.
        UnsavableError: a value that cannot be stored, with the path to it.
    """
    parts = _parts(accelerator)
    if not parts.models and not accelerator.registered:
        raise ConfigurationError(
            "save_state saves what was prepared, and nothing was: model, optimizer = accelerator.prepare(model, optimizer)"
        )
    adapters = any(has_adapters(model) for model in parts.models)
    save: SaveMode = "trainable" if adapters else "all"
    # of frozen parameters the main process takes the fingerprint, which all of them have to read for
    main = accelerator.world.is_main or accelerator.strategy.sharded_parameters  # which are gathered, to be read
    known = {} if main else dict.fromkeys(range(len(parts.models)), "the main process's")
    taken = capture(parts, save=save, fingerprints=known)
    positions = [loader.gathered(loader.state_dict()) for loader in accelerator.loaders]
    state = {
        **taken.state,
        "loaders": positions,
        "window": accelerator.accumulation.counted,
        "registered": [thing.state_dict() for thing in accelerator.registered],
    }
    world = accelerator.world

    def count() -> int:
        return next_counter(path.absolute().parent, accelerator.run_id) if world.is_main else 0

    described = about(
        accelerator.strategy,
        taken,
        seed=accelerator.seed,
        run_id=accelerator.run_id,
        save_counter=together(world, count)[0],
        step=accelerator.updates,
        epoch=positions[0]["epoch"] if positions else 0,
        position=positions[0] if positions else {},
        save=save,
    )
    content = Content(taken.tensors, state, described, taken.attachments)
    drafts: list[Draft] = []
    together(world, lambda: drafts.append(Draft(content, rank=world.rank, ranks=world.size)))
    return drafts[0]


def _load(accelerator: Accelerator, path: Path, loaded: Loaded, wanted: set[str], strict: bool, resume_loaders: bool) -> None:
    """Put a checkpoint's state into what was prepared.

    Raises:
        CheckpointError: it does not fit.
    """
    manifest, state = loaded.manifest, loaded.state
    if "optimizer" in wanted and not manifest.contents.get("resumable", False):
        raise CheckpointError(f"{path} holds weights only. Load those: accelerator.load_state(path, restore={{'model'}})")
    positions = state.get("loaders") or []
    if "loaders" in wanted:
        _same("loaders", len(positions), len(accelerator.loaders), path)
    if "registered" in wanted:
        _same("registered", len(state.get("registered") or []), len(accelerator.registered), path)
    positions = positions if "loaders" in wanted else []
    pairs = list(zip(accelerator.loaders, positions, strict=False))
    starts = [loader.start_of(position) if resume_loaders else 0 for loader, position in pairs]  # what is wrong is said first
    parts = _parts(accelerator)
    restore(parts, loaded.tensors, state, manifest.aliases, wanted=wanted, what=str(path), strict=strict, keep=True)
    if "loaders" in wanted:
        if positions and accelerator.seed != manifest.seed:
            warn(
                f"the seed is {accelerator.seed}, and the checkpoint's loop had {manifest.seed}: order and randomness "
                f"are others from here on. To go on as before: trainkit.set_seed({manifest.seed}) before prepare."
            )
        if accelerator.accumulation.open:  # its gradients are those of other parameters
            accelerator.accumulation.forget_window()
            for optimizer in accelerator._optimizers:
                optimizer.zero_grad()
        for (loader, position), start in zip(pairs, starts, strict=True):
            if resume_loaders:
                loader.go_on(position, start)
            else:
                loader.begin_again(position)
        accelerator.accumulation.restore_count(int(state.get("window", 0)))
    if "optimizer" in wanted:
        accelerator.updates = manifest.step
    if wanted == set(PARTS):
        accelerator.run_id = manifest.run_id  # it is the same run
    if "registered" in wanted:
        for thing, own in zip(accelerator.registered, state.get("registered") or [], strict=True):
            thing.load_state_dict(own)
    accelerator.reading.loaded = True
    left = [part for part in PARTS if part not in wanted]
    notice(f"state of {path} (step {manifest.step})" + (f"; not restored: {', '.join(left)}." if left else "."))
    _tell_where_loaders_begin(accelerator)


def _tell_where_loaders_begin(accelerator: Accelerator) -> None:
    """Say once, for the loader that is trained on, that it does not continue by itself where the checkpoint was written."""
    for loader in accelerator.loaders:
        if loader.left_off is not None:
            epoch, batches = loader.epoch, loader.left_off[1]
            place = f"batch {batches} of" if batches is not None else "in the middle of"
            skip = f"accelerator.skip_first_batches(loader, {'n' if batches is None else batches})"
            notice(
                f"the checkpoint was saved at {place} epoch {epoch}, and the prepared loader starts epoch {epoch} at its first "
                "batch, as in Accelerate. To continue exactly: accelerator.load_state(folder, resume_loaders=True), or "
                f"accelerator.resume_loaders() before the loop. A script that skips batches itself: {skip}."
            )
            return


def _same(part: str, saved: int, here: int, path: Any) -> None:
    if saved != here:
        raise StateMismatchError(
            f"{path} holds {saved} {part}, and there are {here} here. Prepare and register what the loop had, in the same "
            f"order, or leave them out: accelerator.load_state(path, restore={{'model', 'optimizer', 'scheduler', 'scaler'}})"
        )


def _register(accelerator: Accelerator, things: tuple[Any, ...]) -> None:
    """Objects whose state goes into the checkpoints.

    Raises:
        ConfigurationError: one without ``state_dict`` and ``load_state_dict``.
    """
    for thing in things:
        if isinstance(thing, type) or not all(
            callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")
        ):
            raise ConfigurationError(
                f"register_for_checkpointing needs objects with state_dict() and load_state_dict(state), not {thing!r}."
            )
    accelerator.registered.extend(things)
