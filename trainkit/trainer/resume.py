"""Resuming from a checkpoint: which parts of it, and into which objects."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import Loaded
from trainkit.checks import real_number
from trainkit.console import counted, notice, warn
from trainkit.data.order import ORDER_VERSION
from trainkit.errors import CheckpointError, ConfigurationError, UnknownNameError, nearest
from trainkit.module.data_module import DataModule
from trainkit.paths import local_path
from trainkit.rng import KEY_VERSION
from trainkit.state.parts import Parts, check_names, moved, restore, shown, with_trained_weights
from trainkit.state.plug_ins import check_callbacks
from trainkit.trainer.find_checkpoint import WORDS, Enter, FoundCheckpoint, Searcher, find_checkpoint, newest_of
from trainkit.trainer.run_folder import Places, checkpoint_places, folder_of_run
from trainkit.trainer.run_state import parts_of, restore_loop, restore_run

if TYPE_CHECKING:
    from trainkit.strategy import Strategy
    from trainkit.trainer.run import Run
    from trainkit.trainer.save_policy import SavePolicy
    from trainkit.trainer.setup import FitPlan

__all__ = ["PARTS", "FoundCheckpoint", "begin_resume", "best_of_fit", "check_restore", "load_weights", "restore_fit"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "loop", "callbacks", "loggers")
_FITS = itertools.count(1)  # numbers the fits of this process; after a restart the script has the same ones


def check_restore(
    ckpt_path: Any, given: Collection[str] | None, overrides: Mapping[str, Any] | None, strict: bool = True
) -> set[str]:
    """The parts to be restored.

    Raises:
        ConfigurationError: parts or overrides without a checkpoint, or of the wrong type.
        UnknownNameError: an unknown part.
    """
    _check_path(ckpt_path)
    if not isinstance(strict, bool):
        raise ConfigurationError(f"strict must be True or False, not {strict!r}.")
    if ckpt_path is None and (given is not None or overrides or not strict):
        raise ConfigurationError(
            "restore=, overrides= and strict=False need a checkpoint: add ckpt_path='auto', 'best' or the path of one."
        )
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigurationError(
            f"overrides must be a dict of optimizer options, not {overrides!r}. For example: {{'lr': 1e-4}}"
        )
    return check_names(given, PARTS)


def _check_path(ckpt_path: Any) -> None:
    """Refuse what is neither a path nor one of the words."""
    if ckpt_path is None:
        return
    if not isinstance(ckpt_path, str | os.PathLike):
        meant = "datamodule" if isinstance(ckpt_path, DataModule) else "verbose" if isinstance(ckpt_path, bool) else ""
        hint = f" Pass a {type(ckpt_path).__name__} by name: {meant}=..." if meant else ""
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
    wanted: set[str],
    chosen: bool,
    strict: bool = True,
) -> None:
    """Read the checkpoint that a fit resumes from, before anything is set up: data may be split under its seed.

    Args:
        run: the fit.
        saves: its saves.
        ckpt_path: which one; `None`: a fresh start.
        wanted: the parts to be restored; those that cannot be restored are removed from it.
        chosen: the user has named the parts.
        strict: see `restore_fit`.
    """
    world, key = run.strategy.world, f"run/{next(_FITS)}"
    run.found = None
    _agree(run, ckpt_path, wanted, strict)
    before = world.load_text(key) if world.restarts else None
    if ckpt_path is not None or before is not None:
        _find(run, saves, ckpt_path, before, wanted, chosen)
    if run.found is None:
        world.keep_text(key, saves.run_id)
    elif not run.found.restart:  # this job has not saved the earlier checkpoints of a resumed run
        world.keep_text(key, f"{saves.run_id} {saves.last_counter()}")


def _find(
    run: Run,
    saves: SavePolicy,
    ckpt_path: str | os.PathLike[str] | None,
    before: str | None,
    wanted: set[str],
    chosen: bool,
) -> None:
    """Read the checkpoint of the restarted job, or the requested one, and continue in the folder of its run."""
    places = checkpoint_places(run)
    enter = _use_folders(run, saves, places)
    found: FoundCheckpoint | None = None
    if run.arguments.fast_dev_run and wanted - {"model"}:
        wanted -= {"loop", "callbacks", "loggers"}  # it starts at step 0 and writes nothing
    elif before is not None:
        found = _restarted(run.strategy, before, places, enter, finite=ckpt_path is not None)
    if found is not None:
        wanted |= set(PARTS)
    elif ckpt_path is not None:
        continues = enter if wanted >= set(PARTS) else None  # restoring only some parts starts another run
        weights_only = wanted <= {"model"}
        found = find_checkpoint(_searcher(run), ckpt_path, places, whole=not weights_only, enter=continues)
        if found is None:
            saves.places.remove_abandoned(places.runs)
    if found is not None:
        run.found, found.wanted, run.ckpt_path = found, wanted, str(found.path)
        _take_over(run, saves, found, wanted, chosen and not found.restart)
        if enter is not None:
            _find_folder(run, saves, found, places, enter)


def _use_folders(run: Run, saves: SavePolicy, places: Places) -> Enter | None:
    """Lock the folders that callbacks were given, so that no other run removes what is being read.

    Returns:
        What continues in the folder of a run; `None` if all callbacks were given folders, or there are none.
    """
    callbacks: list[Any] = [] if run.arguments.fast_dev_run else list(run.checkpoint_callbacks)
    if callbacks:
        for folder in places.given:
            saves.use_folder(folder)
    return None if all(own.given_dirpath for own in callbacks) else saves.places.continue_in


def _agree(run: Run, ckpt_path: str | os.PathLike[str] | None, wanted: set[str], strict: bool) -> None:
    """Check that all processes resume from and save the same, as otherwise they would wait for each other forever.

    Raises:
        ConfigurationError: they do not.
    """
    which = str(ckpt_path) if ckpt_path is None or ckpt_path in WORDS else "a path"  # the main process's path is used
    saving = [callback.state_key for callback in run.checkpoint_callbacks]
    own = [f"ckpt_path={which}", f"restore={sorted(wanted)}", f"strict={strict}", f"callbacks={saving}"]
    by_rank = run.strategy.world.exchange(own)
    for rank, own in enumerate(by_rank):
        for first, other in zip(by_rank[0], own, strict=True):
            if first != other:
                raise ConfigurationError(
                    f"all processes must resume from the same checkpoint and save the same: rank 0 has {first}, but rank "
                    f"{rank} has {other}. Fix: pass the same on all ranks; do not choose by rank or by the files that a rank "
                    "finds. With ckpt_path='auto' the main process searches for all."
                )


def _find_folder(run: Run, saves: SavePolicy, found: FoundCheckpoint, places: Places, enter: Enter) -> None:
    """Continue in the run's own folder also if the checkpoint was in the `dirpath` of a callback."""
    if saves.places.of_run is None and saves.run_id == found.loaded.manifest.run_id:
        folder = folder_of_run(run.strategy.world, places.runs, saves.run_id)
        if folder is not None:
            enter(folder)


def _restarted(strategy: Strategy, before: str, places: Places, enter: Enter | None, finite: bool) -> FoundCheckpoint | None:
    """The checkpoint to resume from after a restart of the processes: the newest that the run has saved since the job began.

    `finite`: only one whose parameters are finite, because the run began with a checkpoint, too.
    """
    run_id, _, since = before.partition(" ")
    found = newest_of(strategy, run_id, int(since or 0), places, enter, finite)
    if found is None:
        notice(
            f"the processes were restarted, but no checkpoint {'with finite parameters ' if finite else ''}was saved since the "
            "job began: the run starts as it did the first time."
        )
        return None
    found.restart = True
    notice("the processes were restarted: the run continues from its newest checkpoint, regardless of ckpt_path.")
    return found


def _take_over(run: Run, saves: SavePolicy, found: FoundCheckpoint, wanted: set[str], chosen: bool) -> None:
    """Take from the checkpoint what must be known before loaders and optimizers are created: the seed and the run.

    Args:
        run: the fit.
        saves: its saves.
        found: the checkpoint.
        wanted: the parts to be restored; the loggers are removed from it if this is another run.
        chosen: the user has named the parts.
    """
    manifest = found.loaded.manifest
    if wanted - {"model", "optimizer", "scheduler", "scaler"} and "loop" not in found.loaded.state:
        raise CheckpointError(
            f"{found.path} was saved by your own training loop, whose position a Trainer cannot restore. Fix: restore the "
            "other parts: fit(..., ckpt_path=..., restore={'model', 'optimizer', 'scheduler', 'scaler'})"
        )
    notice(f"resuming from {found}.")
    _note_moved(run, manifest, loop="loop" in wanted)
    if not wanted >= set(PARTS):
        left = [part for part in PARTS if part not in wanted]
        notice(f"restored: {', '.join(p for p in PARTS if p in wanted) or 'nothing'}. Not restored: {', '.join(left)}.")
    elif found.path.absolute().parent in saves.folders:
        saves.run_id = manifest.run_id
    elif chosen or not run.loggers:
        pass
    elif _has_its_log(run, found):
        notice("this run is not the one that saved the checkpoint, but was given its log: it continues that log.")
    else:
        wanted.discard("loggers")  # continuing in its files would cut off what the other run has logged since
        notice("this run is not the one that saved the checkpoint, so it does not continue the log of that run.")
    saves.resumed_from, saves.resumed_saved_at = found.path, manifest.saved_at
    saves.resumed_finite = manifest.finite is not False
    if "loop" not in wanted:
        return
    # loaders are created before the loop is restored: those of the epoch in which they were last created
    every = run.arguments.reload_dataloaders_every_n_epochs
    run.progress.current_epoch = manifest.epoch - (manifest.epoch % every if every else 0)
    run.progress.global_step = manifest.step
    _take_seed(run, manifest)


def _has_its_log(run: Run, found: FoundCheckpoint) -> bool:
    """Whether a logger was given the log of the checkpoint's run, as by `version`: it continues there, as in its own run."""
    from trainkit.loggers.log_folder import is_given_log_of
    from trainkit.loggers.logger_setup import states_of

    states = states_of(run.loggers, found.loaded.state.get("loggers", ()))
    pairs = [(logger, state) for logger, state in zip(run.loggers, states, strict=True) if state is not None]
    agreed: bool = run.strategy.world.from_main(any(is_given_log_of(logger, state) for logger, state in pairs))
    return agreed


def _note_moved(run: Run, manifest: Manifest, loop: bool) -> None:
    """One notice if the checkpoint was saved by another strategy or on another number of devices."""
    text, size = moved(run.strategy, manifest), run.strategy.world_size
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
    elif run.seed != manifest.seed:
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


def restore_fit(run: Run, plan: FitPlan, wanted: set[str], overrides: Mapping[str, Any], strict: bool = True) -> bool:
    """Restore the checkpoint into the run, which is set up; returns whether there is a checkpoint.

    Args:
        run: the fit.
        plan: what its loop calls.
        wanted: the parts to be restored.
        overrides: options of the optimizers.
        strict: names that are missing or not expected in the model are an error.

    Raises:
        StateMismatchError: the checkpoint does not fit; nothing has been trained.
    """
    found, run.found = run.found, None  # its memory is released at the end of this function
    if found is None:
        return False
    loaded = found.loaded
    state = loaded.state
    # the position first, so that one that does not fit raises before anything has changed
    if "loop" in wanted:
        restore_loop(run, plan, state["loop"])
    if "callbacks" in wanted:
        check_callbacks(run.callbacks, state["callbacks"], str(found.path))
    seen = _run_load_hooks(run, loaded)
    tensors = with_trained_weights({**loaded.tensors, "model": seen["state_dict"]}, loaded.tensors["model"], seen)
    parts = parts_of(run)
    aliases, what = loaded.manifest.aliases, str(found.path)
    strict = strict and run.module.strict_loading
    restore_parts = partial(restore, parts, tensors, state, aliases, wanted=wanted, what=what, strict=strict, keep=True)
    state = {**state, "callbacks": seen["callbacks"]} if "callbacks" in state else state
    restore_run(run, state, wanted, what, restore_parts)
    if overrides and not found.restart:  # a restarted run has them already
        _override(parts, overrides)
    if "loop" in wanted and run.due.training_ends and not run.progress.should_stop:
        notice(
            f"the checkpoint is of step {run.progress.global_step}, {counted(run.progress.current_epoch, 'epoch')} complete, "
            f"and nothing is left to train: max_epochs={run.arguments.max_epochs}, max_steps={run.arguments.max_steps}. Raise "
            "them to continue."
        )
    return True


def _run_load_hooks(run: Run, loaded: Loaded) -> dict[str, Any]:
    """Show the checkpoint to the hooks before it is loaded; they may change `state_dict`."""
    manifest = loaded.manifest
    seen = shown(manifest.epoch, manifest.step, dict(loaded.tensors["model"]), loaded.state)
    run.hooks.run("on_load_checkpoint", seen)
    return seen


def load_weights(run: Run, ckpt_path: str | os.PathLike[str], strict: bool = True) -> None:
    """Load only the model's weights, for an evaluation; `strict` as for `restore_fit`."""
    found = find_checkpoint(_searcher(run), ckpt_path, checkpoint_places(run), whole=False)
    if found is None:
        return
    loaded, run.ckpt_path = found.loaded, str(found.path)
    seen = _run_load_hooks(run, loaded)
    parts = Parts([run.module], [], [], run.strategy.precision, run.strategy)
    tensors, aliases, what = {"model": seen["state_dict"]}, loaded.manifest.aliases, str(found.path)
    strict = strict and run.module.strict_loading
    restore(parts, tensors, loaded.state, aliases, wanted={"model"}, what=what, strict=strict)
    notice(f"weights of {found}.")


def _searcher(run: Run) -> Searcher:
    evaluates = run.progress.stage != "fit"
    trial = bool(run.arguments.fast_dev_run)
    return Searcher(run.strategy, type(run.module).__name__, run.callbacks, trial, evaluates and run.fitted is not None)


def _override(parts: Parts, overrides: Mapping[str, Any]) -> None:
    """Replace restored options of the optimizers' parameter groups."""
    for name, value in overrides.items():
        known = sorted({key for o in parts.optimizers for group in o.param_groups for key in group if key != "params"})
        if name not in known:
            raise UnknownNameError(
                f"overrides: no optimizer has the option {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
        if name == "lr":
            real_number(value, "overrides: lr", least=0, fix="overrides={'lr': 1e-4}")
        for optimizer in parts.optimizers:
            if name == "lr":
                _override_lr(optimizer, parts.schedulers, value)
                continue
            for group in optimizer.param_groups:
                if name in group:
                    group[name] = value
        notice(f"{name} is {value!r} from now on, instead of the value in the checkpoint.")


def _override_lr(optimizer: Any, schedulers: Collection[Any], rate: float) -> None:
    """Set a new learning rate. If there is a schedule, its initial learning rate changes, and the rest of it is scaled."""
    own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
    factors = []
    for group in optimizer.param_groups:
        before = float(group.get("initial_lr", group["lr"]))
        factors.append(rate / before if before else 1.0)
        keys = ("lr", "initial_lr", "max_lr", "min_lr") if own and before else ("lr",)
        for key in keys:
            if key in group:
                value = rate if len(keys) == 1 else float(group[key]) * factors[-1]
                # a tensor is filled and not replaced: compiled and captured steps refer to it
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
