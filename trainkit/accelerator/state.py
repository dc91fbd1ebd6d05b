"""Checkpoints of own loops: what ``Accelerator.save_state`` and ``load_state`` do, in the format that ``Trainer`` writes."""

from __future__ import annotations

import sys
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from trainkit.checkpoint.draft import Content, Draft
from trainkit.checkpoint.folder import next_counter
from trainkit.checkpoint.shared_reading import read_together
from trainkit.checkpoint.together import together
from trainkit.checkpoint.weights import shard_size, write_weights
from trainkit.console import notice, warn
from trainkit.errors import CheckpointError, CheckpointWriteError, ConfigurationError, StateMismatchError
from trainkit.state.adapters import adapter_folders
from trainkit.state.model import capture_model, has_adapters
from trainkit.state.parts import Parts, SaveMode, about, capture, check_names, configurations, restore

if TYPE_CHECKING:
    from trainkit.accelerator import Accelerator

__all__ = ["PARTS", "StateVerbs"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "loaders", "registered")


class StateVerbs:
    """The verbs of :class:`trainkit.Accelerator` that write and read checkpoints."""

    def _accelerator(self) -> Accelerator:
        return cast("Accelerator", self)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects too; they have ``state_dict`` and ``load_state_dict``."""
        _register(self._accelerator(), objects)

    def save_state(self, output_dir: str | PathLike[str], *, blocking: bool = True) -> None:
        """Write a checkpoint: models, optimizers, schedulers, loss scale, the loaders' positions, registered objects.

        A checkpoint that is there is replaced, and there is always the old or the new one. Inside an accumulation window, what
        is saved is the position at its start. Of several processes all call it, and each writes its part.

        Args:
            output_dir: the folder that the checkpoint becomes.
            blocking: return when it is complete on the disk; ``False``: when it is copied, and a thread writes it. The next
                ``save_state``, and ``free_memory``, wait for it and raise what went wrong; the end of the program waits too.

        Raises:
            CheckpointError: it cannot be written, or the folder holds something else; or that was so the last time.
            UnsavableError: a value that cannot be stored, with the path to it.
        """
        path, accelerator = Path(output_dir), self._accelerator()
        saver, world = accelerator.saver, accelerator.world
        if world.size > 1 and saver.team.size == 1:
            accelerator.run_id = world.from_main(accelerator.run_id)
            saver.team = world.team(f"save_state/{accelerator.run_id}")
        saver.wait()
        saver.save(_draft(accelerator, path), path, blocking=blocking, replace=True)

    def load_state(
        self, input_dir: str | PathLike[str], *, restore: Collection[str] | None = None, strict: bool = True
    ) -> None:
        """Take back what :meth:`save_state` wrote, into objects that were prepared as they were then.

        The next iteration over a prepared loader goes on where the loop was: with ``for epoch in range(loader.epoch, n)``
        nothing is repeated and nothing skipped. Nothing of a map-style dataset is fetched to get there. Of several processes
        all call it; they may be others in number than those that saved.

        Args:
            input_dir: the folder of the checkpoint; one that a ``Trainer`` has written will do for the parts that it has.
            restore: only these parts, of "model", "optimizer", "scheduler", "scaler", "loaders", "registered".
            strict: names that are missing or not expected in a model are errors.

        Raises:
            CheckpointError: missing, damaged, or does not fit; the message lists all that does not.
        """
        _load(self._accelerator(), input_dir, restore, strict)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as plain safetensors, which ``from_pretrained`` opens if it is a ``transformers`` model.

        Of one with PEFT adapters these are written, and not the base: a folder for ``PeftModel.from_pretrained(base, folder)``.
        Of several processes all call it, and the main one writes.

        Args:
            model: prepared or not; with a ``Trainer`` any module within its module, in ``fit`` or after it:
                ``trainer.accelerator.save_model(module.model, folder)``.
            save_directory: the folder to write to.
            max_shard_size: larger models are written to several files, with an index; adapters never are.
            safe_serialization: only ``True``: what pickle loads can run code.

        Raises:
            CheckpointWriteError: the folder cannot be written.
            ConfigurationError: an adapter of a method whose parameters only PEFT can tell; ``safe_serialization=False``.
        """
        if not safe_serialization:
            raise ConfigurationError(
                "save_model(safe_serialization=False) is not offered: a pickle can run code. Leave it out."
            )
        inner = self._accelerator().unwrap_model(model)
        state = capture_model(inner, standins=self._accelerator().strategy.exported_weights(inner))
        files, adapters, folder = configurations(state.configs), adapter_folders(state), Path(save_directory)
        world, size = self._accelerator().world, shard_size(max_shard_size)

        def write() -> None:
            for where, (tensors, config) in adapters.items():
                beside = {"adapter_config.json": config}
                write_weights(
                    folder / where, tensors, beside, max_shard_size=sys.maxsize, stem="adapter_model", rank=world.rank
                )
            if not adapters:
                write_weights(folder, state.tensors, files, max_shard_size=size, rank=world.rank)

        together(world, write, CheckpointWriteError)


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
        "window": accelerator.window.counted,
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


def _load(accelerator: Accelerator, path: str | PathLike[str], given: Collection[str] | None, strict: bool = True) -> None:
    """Put a checkpoint's state into what was prepared.

    Raises:
        CheckpointError: missing, damaged, or does not fit.
        UnknownNameError: ``restore`` names an unknown part.
    """
    wanted = check_names(given, PARTS)
    loaded = read_together(path, accelerator.world, mapped=accelerator.strategy.sharded_state)
    manifest, state = loaded.manifest, loaded.state
    if "optimizer" in wanted and not manifest.contents.get("resumable", False):
        raise CheckpointError(f"{path} holds weights only. Load those: accelerator.load_state(path, restore={{'model'}})")
    positions = state.get("loaders") or []
    if "loaders" in wanted:
        _same("loaders", len(positions), len(accelerator.loaders), path)
    if "registered" in wanted:
        _same("registered", len(state.get("registered") or []), len(accelerator.registered), path)
    positions = positions if "loaders" in wanted else []
    starts = [loader.start_of(position) for loader, position in zip(accelerator.loaders, positions, strict=False)]
    parts = _parts(accelerator)
    restore(parts, loaded.tensors, state, manifest.aliases, wanted=wanted, what=str(path), strict=strict, keep=True)
    if "loaders" in wanted:
        if positions and accelerator.seed != manifest.seed:
            warn(
                f"the seed is {accelerator.seed}, and the checkpoint's loop had {manifest.seed}: order and randomness "
                f"are others from here on. To go on as before: trainkit.set_seed({manifest.seed}) before Accelerator()."
            )
        for loader, position, start in zip(accelerator.loaders, positions, starts, strict=True):
            loader.go_on(position, start)
        accelerator.window.counted = int(state.get("window", 0))
    if "optimizer" in wanted:
        accelerator.updates = manifest.step
    if wanted == set(PARTS):
        accelerator.run_id = manifest.run_id  # it is the same run
    if "registered" in wanted:
        for thing, own in zip(accelerator.registered, state.get("registered") or [], strict=True):
            thing.load_state_dict(own)
    left = [part for part in PARTS if part not in wanted]
    notice(f"state of {path} (step {manifest.step})" + (f"; not restored: {', '.join(left)}." if left else "."))


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
