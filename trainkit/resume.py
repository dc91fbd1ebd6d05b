"""Going on from a checkpoint: which one, what of it, and into what."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.checkpoint.folder import POINTER, candidates, read_pointer
from trainkit.checkpoint.reader import Loaded, open_checkpoint
from trainkit.console import notice, warn
from trainkit.data.order import ORDER_VERSION
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    UnknownNameError,
    nearest,
)
from trainkit.registry import load_callback
from trainkit.rng import KEY_VERSION
from trainkit.state.parts import Parts, check_names, model_stems, restore, shown
from trainkit.state.run import parts_of, restore_loop, restore_run

if TYPE_CHECKING:
    from trainkit.trainer import Trainer

__all__ = ["PARTS", "Found", "begin_resume", "check_restore", "checkpoint_folders", "load_weights", "restore_fit"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "loop", "callbacks", "loggers")
_WORDS = ("auto", "last", "best")


class Found:
    """A checkpoint that was read, and where it lies."""

    def __init__(self, path: Path, loaded: Loaded) -> None:
        self.path, self.loaded = path, loaded

    def __str__(self) -> str:
        manifest = self.loaded.manifest
        return f"{self.path} (step {manifest.step}, epoch {manifest.epoch})"


def check_restore(ckpt_path: Any, given: Collection[str] | None, overrides: Mapping[str, Any] | None) -> set[str]:
    """The parts to be restored.

    Raises:
        ConfigurationError: parts or overrides without a checkpoint, or of the wrong type.
        UnknownNameError: a part that nobody knows.
    """
    if ckpt_path is not None and not isinstance(ckpt_path, str | os.PathLike):
        raise ConfigurationError(f"ckpt_path must be a path, 'auto', 'last' or 'best', not {ckpt_path!r}.")
    if ckpt_path == "":
        raise ConfigurationError("ckpt_path is an empty string. For a fresh start: ckpt_path=None; for the newest one: 'auto'.")
    if ckpt_path is None and (given is not None or overrides):
        raise ConfigurationError("restore= and overrides= need a checkpoint: fit(module, loader, ckpt_path='auto', ...).")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigurationError(
            f"overrides must be a dict of optimizer options, not {overrides!r}. For example: {{'lr': 1e-4}}"
        )
    return check_names(given, PARTS)


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
    if ckpt_path == "best":
        ckpt_path = _best(trainer, folders)
    elif ckpt_path in ("auto", "last"):
        return _newest(str(ckpt_path), folders, whole)
    path = Path(ckpt_path)
    if path.name == POINTER and path.is_file():  # of save_last
        path = path.parent / (read_pointer(path.parent) or POINTER)
    if not path.exists() and path.name == str(ckpt_path) and (hint := nearest(path.name, _WORDS)):
        raise CheckpointNotFoundError(f"there is no checkpoint {str(ckpt_path)!r}, and it is none of {_WORDS}.{hint}")
    return _read(path, whole)


def _read(path: Path, whole: bool) -> Found:
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    if whole and not manifest.contents.get("resumable", False):
        raise CheckpointError(
            f"{path} holds weights only, so that no run can go on from it. Start a new run with them: "
            "fit(..., ckpt_path=..., restore={'model'})"
        )
    stems = None if whole else model_stems(manifest.files) | {"state"}
    return Found(path, checkpoint.read(stems))


def _newest(word: str, folders: list[Path], whole: bool) -> Found | None:
    bad: list[str] = []
    weights: list[str] = []
    for found in candidates(*folders):
        if found.problem is not None or found.manifest is None:
            bad.append(str(found.problem))
            continue
        if whole and not found.manifest.contents.get("resumable", False):
            weights.append(str(found.path))
            continue
        try:
            read = _read(found.path, whole)
        except CorruptCheckpointError as error:
            bad.append(str(error))
            continue
        for problem in bad:
            warn(f"a checkpoint is damaged and passed over: {problem}")
        return read
    where = ", ".join(map(str, folders)) or "no folder"
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


def begin_resume(trainer: Trainer, ckpt_path: str | os.PathLike[str] | None, wanted: set[str], chosen: bool) -> None:
    """Read the checkpoint that a fit goes on from, before anything is set up: data may be split under its seed.

    Args:
        trainer: the trainer.
        ckpt_path: which one; ``None``: a fresh start.
        wanted: the parts to be restored; what cannot be is taken out.
        chosen: the user has named the parts.
    """
    trainer.found = None
    if ckpt_path is None:
        return
    folders = checkpoint_folders(trainer)
    if trainer.checkpoint_callbacks and not trainer.fast_dev_run:
        for folder in folders:
            trainer.checkpointing.use_folder(folder)  # so that no other run removes what is being read
    if trainer.fast_dev_run and wanted - {"model"}:
        wanted -= {"loop", "callbacks", "loggers"}  # its one step is the first, and leaves no trace
    trainer.found = find_checkpoint(trainer, ckpt_path, folders, whole=not wanted <= {"model"})
    if trainer.found is not None:
        _take_over(trainer, trainer.found, wanted, chosen)


def _take_over(trainer: Trainer, found: Found, wanted: set[str], chosen: bool) -> None:
    """What has to be known of the checkpoint before loaders and optimizers are made: seed and run.

    Args:
        trainer: the trainer.
        found: the checkpoint.
        wanted: the parts to be restored; without the loggers afterwards if this is another run.
        chosen: the user has named the parts.
    """
    manifest, checkpointing = found.loaded.manifest, trainer.checkpointing
    if wanted - {"model", "optimizer", "scheduler", "scaler"} and "loop" not in found.loaded.state:
        raise CheckpointError(
            f"{found.path} was written by an own loop, whose position a Trainer cannot take over. Take what both have: "
            "fit(..., ckpt_path=..., restore={'model', 'optimizer', 'scheduler', 'scaler'})"
        )
    notice(f"resuming from {found}.")
    if not wanted >= set(PARTS):
        left = [part for part in PARTS if part not in wanted]
        notice(f"restored: {', '.join(p for p in PARTS if p in wanted) or 'nothing'}. Not restored: {', '.join(left)}.")
    elif found.path.absolute().parent in checkpointing.folders:
        checkpointing.run_id = manifest.run_id
    elif trainer.loggers and not chosen:
        wanted.discard("loggers")  # going on in its files would cut off what the other run has logged since
        notice("this is another run than the one that wrote it, so it logs to files of its own.")
    checkpointing.resumed_from = found.path
    if "loop" not in wanted:
        return
    # what is asked for before the loop is restored: loaders, which belong to the epoch that they were last asked for in
    every = trainer.arguments.reload_dataloaders_every_n_epochs
    trainer.current_epoch = manifest.epoch - (manifest.epoch % every if every else 0)
    trainer.global_step = manifest.step
    if not trainer.seed_given:
        trainer.seed = trainer.accelerator.seed = manifest.seed
    elif trainer.seed != manifest.seed:
        warn(
            f"seed={trainer.seed}, and the checkpoint's run had {manifest.seed}: from here on order, augmentation and dropout "
            "are those of another run. Leave seed out to go on as before."
        )
    for name, saved, ours in (
        ("order", manifest.order_version, ORDER_VERSION),
        ("keys", manifest.key_version, KEY_VERSION),
    ):
        if saved != ours:
            warn(
                f"the checkpoint was written under version {saved} of the {name} of samples and random numbers, and this is "
                f"{ours}: from here on they are others."
            )


def restore_fit(trainer: Trainer, wanted: set[str], overrides: Mapping[str, Any]) -> bool:
    """Put the checkpoint's state into the run, which is set up; returns whether there is a checkpoint.

    Raises:
        StateMismatchError: it does not fit; nothing has been trained.
    """
    found, trainer.found = trainer.found, None  # whose memory is given back with the end of this function
    if found is None:
        return False
    loaded = found.loaded
    state = loaded.state
    # the position first: that it does not fit is found before anything has changed
    if "loop" in wanted:
        restore_loop(trainer, state["loop"])
    seen = _ask_hooks(trainer, loaded)
    tensors = {**loaded.tensors, "model": seen["state_dict"]}
    parts = parts_of(trainer)
    restore(parts, tensors, state, loaded.manifest.aliases, wanted=wanted, what=str(found.path), keep=True)
    restore_run(trainer, {**state, "callbacks": seen["callbacks"]} if "callbacks" in state else state, wanted)
    if overrides:
        _override(parts, overrides)
    if "loop" in wanted and trainer.finished and not trainer.should_stop:
        notice(
            f"the checkpoint is of step {trainer.global_step}, epoch {trainer.current_epoch}, and nothing is left to train: "
            f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}. Raise them to go on."
        )
    return True


def _ask_hooks(trainer: Trainer, loaded: Loaded) -> dict[str, Any]:
    """Show the checkpoint to the hooks before it is loaded; they may change ``state_dict``."""
    manifest = loaded.manifest
    seen = shown(manifest.epoch, manifest.step, dict(loaded.tensors["model"]), loaded.state)
    trainer.hooks.run("on_load_checkpoint", seen)
    return seen


def load_weights(trainer: Trainer, ckpt_path: str | os.PathLike[str]) -> None:
    """The model's weights only, for an evaluation."""
    found = find_checkpoint(trainer, ckpt_path, checkpoint_folders(trainer), whole=False)
    if found is None:
        return
    loaded = found.loaded
    seen = _ask_hooks(trainer, loaded)
    parts = Parts([trainer.lightning_module], [], [], trainer.precision)
    restore(parts, {"model": seen["state_dict"]}, loaded.state, loaded.manifest.aliases, wanted={"model"}, what=str(found.path))
    notice(f"weights of {found}.")


def _override(parts: Parts, overrides: Mapping[str, Any]) -> None:
    """Options of the optimizers' groups, put over what was restored."""
    for name, value in overrides.items():
        known = sorted({key for o in parts.optimizers for group in o.param_groups for key in group if key != "params"})
        if name not in known:
            raise UnknownNameError(
                f"overrides: no optimizer has the option {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
        if name == "lr" and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise ConfigurationError(f"overrides: lr must be a number ≥ 0, not {value!r}. Write: overrides={{'lr': 1e-4}}")
        for optimizer in parts.optimizers:
            if name == "lr":
                _override_rates(optimizer, parts.schedulers, value)
                continue
            for group in optimizer.param_groups:
                if name in group:
                    group[name] = value
        notice(f"{name} is {value!r} from here on, not as in the checkpoint.")


def _override_rates(optimizer: Any, schedulers: Collection[Any], rate: float) -> None:
    """A new learning rate. Under a schedule it is the one that the schedule starts from: what is left of it is scaled."""
    own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
    factors = []
    for group in optimizer.param_groups:
        before = float(group.get("initial_lr", group["lr"]))
        factors.append(rate / before if before else 1.0)
        keys = ("lr", "initial_lr", "max_lr", "min_lr") if own and before else ("lr",)
        for key in keys:
            if key in group:
                value = rate if len(keys) == 1 else float(group[key]) * factors[-1]
                # a rate that is a tensor stays that tensor: compiled and captured steps hold it
                group[key] = group[key].fill_(value) if isinstance(group[key], Tensor) else value
    for scheduler in own:
        _scale(scheduler, factors)


def _scale(scheduler: Any, factors: list[float]) -> None:
    for key in ("base_lrs", "max_lrs", "_last_lr"):
        values = getattr(scheduler, key, None)
        if isinstance(values, list) and len(values) == len(factors):
            setattr(scheduler, key, [value * factor for value, factor in zip(values, factors, strict=True)])
    for inner in getattr(scheduler, "_schedulers", []):
        _scale(inner, factors)
