"""Captures and restores models, optimizers, schedulers and the loss scale, for `Trainer` and your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.model_files import MODEL, ModelFiles
from trainkit.checkpoint.reader import weights_by_hook
from trainkit.console import notice, quantity
from trainkit.data.order import ORDER_VERSION
from trainkit.errors import CorruptCheckpointError, StateMismatchError, UnknownNameError, nearest
from trainkit.optim.optimizer_copy import StoredOptimizer
from trainkit.optim.parameter_names import KnownParameters, ParameterNames, parameter_names, without_pruning
from trainkit.precision import Precision
from trainkit.rng import KEY_VERSION
from trainkit.state.model import ModelState, capture_model, plan_model
from trainkit.state.optimizer import capture_optimizer, plan_optimizer, same_groups
from trainkit.state.pretrained_folder import for_from_pretrained, name_tied
from trainkit.state.scheduler import capture_scheduler, check_scheduler, restore_scheduler
from trainkit.strategy import Strategy

__all__ = [
    "TRAINED_WEIGHTS",
    "CapturedState",
    "SaveMode",
    "TrainingObjects",
    "capture",
    "check_components",
    "checkpoint_for_hooks",
    "describe_move",
    "manifest_fields",
    "model_stem",
    "model_stems",
    "read_trained_weights",
    "restore",
    "with_trained_weights",
]

SaveMode = Literal["all", "trainable"]

TRAINED_WEIGHTS = "current_model_state"
"""The key under which a callback stores trained weights if it gives the model of a checkpoint others: those for inference."""

_PLAIN = Strategy(device="cpu")  # has no state
_ORDER = ("model", "optimizer", "scheduler", "scaler", "loop", "callbacks", "loggers", "loaders", "registered")
# A scheduler needs its optimizer: many compute the next learning rate from the current one, which is in its groups.
_WITH_OPTIMIZER = ("optimizer", "scheduler")


@dataclass
class TrainingObjects:
    """The user's own objects of one run."""

    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    precision: Precision
    strategy: Strategy = _PLAIN
    known: KnownParameters = field(default_factory=KnownParameters)

    def names(self) -> ParameterNames:
        """The names of the parameters, and those of parameters of the optimizers that were replaced untrained."""
        names = parameter_names(self.models)
        for optimizer in self.optimizers:
            names.update(self.known.replaced(optimizer, names))
        return names

    def note_parameters(self) -> None:
        """Loading has changed the parameters: remember them as they are now."""
        if self.optimizers:
            self.known.note(self.optimizers, parameter_names(self.models))


@dataclass
class CapturedState:
    """The captured state of `TrainingObjects`.

    Attributes:
        tensors: Stem of the file name → name → tensor; not copies.
        state: Everything that is not in files of tensors: extra state, groups, schedulers, the scaler.
        parameters: Stem → name of a parameter → whether it is trained.
        aliases: Stem → name of a tied parameter → the name that it is stored under.
        irregular: Optimizer slots that do not have the shape of their parameter.
        attachments: Further files of the checkpoint.
        model_files: The files for the tensors of "model", see `trainkit.checkpoint.model_files`.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, dict[str, bool]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    irregular: list[str] = field(default_factory=list)
    attachments: dict[str, bytes] = field(default_factory=dict)
    model_files: ModelFiles = field(default_factory=dict)

    def choose_files(self, models: Sequence[nn.Module]) -> None:
        """Choose the files for the tensors, after hooks have changed these: `from_pretrained` opens those of a single model."""
        if len(models) == 1:
            described, tensors, aliases = self.state["models"][0], self.tensors[MODEL], self.aliases[MODEL]
            chosen = for_from_pretrained(models[0], tensors, aliases, described["trained"], described["configs"])
            self.model_files, self.attachments = chosen


def check_components(names: Collection[str] | None, known: Sequence[str]) -> set[str]:
    """The components of a run to restore: those with these names, or all.

    Raises:
        UnknownNameError: An unknown component.
    """
    components = set(known) if names is None else {names} if isinstance(names, str) else set(names)
    for name in components:
        if name not in known:
            raise UnknownNameError(f"restore: unknown part {name!r}; known: {', '.join(known)}.{nearest(str(name), known)}")
    return components


def checkpoint_for_hooks(epoch: int, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint that is passed to `on_save_checkpoint` and `on_load_checkpoint`, which may change it."""
    return {
        "epoch": epoch,
        "global_step": step,
        "state_dict": model,
        "callbacks": state.get("callbacks", {}),
        "hyper_parameters": state.get("hyper_parameters", {}),
        **state.get("user", {}),
    }


def add_omitted(
    checkpoint: dict[str, Any], state: Mapping[str, Any], on_save_checkpoint: Callable[[dict[str, Any]], Any]
) -> None:
    """Add what `Trainer(omit_from_checkpoint=)` omitted, for `on_load_checkpoint`: the objects that the hook would save now.

    Args:
        checkpoint: From `checkpoint_for_hooks`.
        state: The state of the checkpoint.
        on_save_checkpoint: The hook.
    """
    if omitted := state.get("omitted"):
        now = dict(checkpoint)
        on_save_checkpoint(now)
        checkpoint.update({name: now[name] for name in omitted if name in now})


def read_trained_weights(added: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights to continue training with, if a callback gave others to the model; hooks may have added anything else."""
    trained = added.get(TRAINED_WEIGHTS)
    if not isinstance(trained, Mapping):
        return {}
    return {name: value for name, value in trained.items() if isinstance(value, Tensor)}


def with_trained_weights(
    tensors: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Tensor], added: Mapping[str, Any]
) -> dict[str, Mapping[str, Tensor]]:
    """The tensors to continue training with, also without the callback that gave other weights to the model of the checkpoint.

    Args:
        tensors: Stem of the file name → name → tensor.
        saved: The saved model; what a hook has changed since is kept.
        added: What `on_save_checkpoint` added to the checkpoint.
    """
    trained, model = read_trained_weights(added), tensors.get("model")
    if model is None:
        return dict(tensors)
    return {**tensors, "model": {n: trained.get(n, value) if value is saved.get(n) else value for n, value in model.items()}}


def manifest_fields(
    strategy: Strategy,
    captured: CapturedState,
    *,
    seed: int,
    run_id: str,
    save_counter: int,
    step: int,
    epoch: int,
    position: Mapping[str, Any],
    save: SaveMode = "all",
    weights_only: bool = False,
    metrics: Mapping[str, float] | None = None,
    saved_by: str | None = None,
) -> dict[str, Any]:
    """The fields of the manifest; see `trainkit.checkpoint.manifest.Manifest`."""
    return {
        "run_id": run_id,
        "save_counter": save_counter,
        "step": step,
        "epoch": epoch,
        # the position of an iterable may be large, and is stored in the state
        "position": {name: value for name, value in position.items() if name not in ("iterable", "replay")},
        "seed": seed,
        "order_version": ORDER_VERSION,
        "key_version": KEY_VERSION,
        "world_size": strategy.world_size,
        "strategy": strategy.name,
        "precision": strategy.precision.name,
        "contents": {"model": save, "optimizer": not weights_only, "resumable": not weights_only},
        "metrics": {name: float(value) for name, value in (metrics or {}).items()},
        "saved_by": saved_by,
        "aliases": captured.aliases,
        "irregular": captured.irregular,
    }


def describe_move(strategy: Strategy, manifest: Manifest) -> str | None:
    """That a checkpoint was saved by another strategy or on another number of devices; `None` if it was not."""
    present = strategy.name, strategy.world_size
    saved = manifest.strategy, manifest.world_size
    if present == saved or "imported" in manifest.contents:
        return None
    places = (f"strategy={name!r} on {quantity(size, 'device')}" for name, size in (saved, present))
    return "the checkpoint was saved with {}; this run uses {}.".format(*places)


def model_stem(number: int) -> str:
    """The stem of the files of a model: "model", "model_1", …"""
    return f"{MODEL}_{number}" if number else MODEL


def model_stems(manifest: Manifest) -> set[str]:
    """The models in a checkpoint: "model", "model_1", …"""
    stems = {name.split(".")[0].split("-")[0] for name in manifest.files if name.endswith(".safetensors")}
    in_own_files = {MODEL} if manifest.model_files else set()
    return {stem for stem in stems if stem == MODEL or stem.startswith("model_")} | in_own_files


def capture(
    objects: TrainingObjects,
    *,
    save: SaveMode = "all",
    weights_only: bool = False,
    fingerprints: Mapping[int, str] | None = None,
) -> CapturedState:
    """Capture the parts for a checkpoint.

    Args:
        objects: The objects.
        save: All parameters, or the trainable ones.
        weights_only: Skip optimizers, schedulers and the loss scale.
        fingerprints: Index of the model → known fingerprint of its frozen parameters.
    """
    captured = CapturedState()
    models: list[dict[str, Any]] = []
    for number, model in enumerate(objects.models):
        placeholders = objects.strategy.stored_weights(model)
        model_state = capture_model(model, save, (fingerprints or {}).get(number), placeholders)
        stem = model_stem(number)
        if len(objects.models) == 1:
            name_tied(model, model_state.tensors, model_state.aliases, model_state.configs)
        captured.tensors[stem] = model_state.tensors
        captured.aliases[stem] = model_state.aliases
        # a callback may save a pruned parameter under its original name
        original = {without_pruning(name, model_state.tensors): trained for name, trained in model_state.trained.items()}
        captured.parameters[stem] = model_state.trained | original
        models.append({key: getattr(model_state, key) for key in ("extra", "trained", "fingerprint", "configs")})
    captured.state["models"] = models
    if weights_only:
        return captured
    names = objects.names()
    tensors = captured.tensors["optimizer"] = {}
    captured.state["optimizers"] = []
    for index, optimizer in enumerate(objects.optimizers):
        stored = objects.strategy.stored_optimizer(optimizer)
        if stored is None:
            state = capture_optimizer(optimizer, index, names)
        else:
            state = capture_optimizer(stored.optimizer, index, stored.names(names))
        tensors.update(state.tensors)
        captured.state["optimizers"].append(state.described)
        captured.irregular += state.irregular
    captured.state["schedulers"] = [capture_scheduler(scheduler) for scheduler in objects.schedulers]
    objects.precision.settle()
    scaler = objects.precision.scaler
    captured.state["scaler"] = None if scaler is None else scaler.state_dict()
    return captured


def restore(
    objects: TrainingObjects,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    aliases: Mapping[str, Mapping[str, str]],
    *,
    components: Collection[str],
    what: str,
    strict: bool = True,
    keep: bool = False,
    loaded: Collection[int] = (),
) -> None:
    """Restore the result of `capture`.

    Args:
        objects: The objects.
        tensors: Stem of the file name → name → tensor.
        state: The saved `CapturedState.state`.
        aliases: The saved `CapturedState.aliases`.
        components: The parts to restore: "model", "optimizer", "scheduler", "scaler"; other parts only occur in messages.
        what: The checkpoint, for messages.
        strict: Missing and unexpected names in a model raise an error; False: a notice lists them, and optimizers start without
            state for new parameters.
        keep: Optimizers may keep `tensors` instead of copying them, since they are not used elsewhere any more.
        loaded: Indices of models that hooks of the user have loaded.

    Raises:
        StateMismatchError: Something does not fit; the message lists all mismatches.
    """
    _check_present(state, components, what)
    # everything is compared before anything is changed
    loads: list[Callable[[], list[str]]] = []
    regrouped: list[int] = []
    if "model" in components:
        loads += _plan_models(objects, tensors, state, aliases, components, what, strict, loaded)
    if "optimizer" in components:
        with _with_advice(components, *_WITH_OPTIMIZER):
            of_optimizers, regrouped = _plan_optimizers(objects, tensors, state, aliases, what, strict, keep)
        loads += [partial(_load_with_advice, load, components) for load in of_optimizers]
    if "scheduler" in components:
        with _with_advice(components, "scheduler"):
            _check_schedulers(objects, state, what, regrouped)
    notices = [text for load in loads for text in load()]
    objects.strategy.restored(objects.optimizers if "optimizer" in components else ())
    objects.note_parameters()
    if "scheduler" in components:
        for scheduler, saved in zip(objects.schedulers, state["schedulers"], strict=True):
            with _with_advice(components, "scheduler"):
                restore_scheduler(scheduler, saved, what)
    if "scaler" in components:
        notices += _restore_scaler(objects.precision, state.get("scaler"))
    for text in notices:
        notice(text)


def _check_present(state: Mapping[str, Any], components: Collection[str], what: str) -> None:
    for part, key in (("model", "models"), ("optimizer", "optimizers"), ("scheduler", "schedulers")):
        if part in components and key not in state:
            raise CorruptCheckpointError(f"{what}: state.json has no {key!r}. Fix: use another checkpoint.")


@contextmanager
def _with_advice(components: Collection[str], *failed: str) -> Iterator[None]:
    """Add to an error how to restore all other parts."""
    try:
        yield
    except (StateMismatchError, CorruptCheckpointError) as error:
        left = [part for part in _ORDER if part in components and part not in failed]
        if not left:
            raise
        without = " and ".join({"optimizer": "the optimizers", "scheduler": "the schedulers"}[part] for part in failed)
        advice = f"Or restore everything except {without}: restore={{{', '.join(map(repr, left))}}}"
        raise type(error)(f"{error} {advice}") from error.__cause__


def _plan_models(
    objects: TrainingObjects,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    aliases: Mapping[str, Mapping[str, str]],
    components: Collection[str],
    what: str,
    strict: bool,
    loaded: Collection[int],
) -> Iterator[Callable[[], list[str]]]:
    _same_number("models", objects.models, state["models"], what)
    for number, (model, saved) in enumerate(zip(objects.models, state["models"], strict=True)):
        stem = model_stem(number)
        if number in loaded:
            continue
        if stem not in tensors:
            raise StateMismatchError(weights_by_hook(what, stem))
        # requires_grad belongs to a run, not to weights; but for adapters it shows which parameters are stored
        trained = saved["trained"] if "optimizer" in components or saved["fingerprint"] is not None else {}
        model_state = ModelState(
            dict(tensors[stem]),
            dict(aliases.get(stem, {})),
            saved.get("extra", {}),
            trained,
            saved["fingerprint"],
            saved.get("configs", {}),
        )
        yield plan_model(
            model,
            model_state,
            strict=strict,
            what=what,
            placeholders=objects.strategy.stored_weights(model),
            load_placeholders=objects.strategy.load_weights,
            fold_masks="optimizer" not in components,  # a run that continues needs the masks
        )


def _plan_optimizers(
    objects: TrainingObjects,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    aliases: Mapping[str, Mapping[str, str]],
    what: str,
    strict: bool,
    keep: bool,
) -> tuple[list[Callable[[], list[str]]], list[int]]:
    """Functions that load them, and the indices of those whose groups differ from the saved ones, without `strict`."""
    _same_number("optimizers", objects.optimizers, state["optimizers"], what)
    loads: list[Callable[[], list[str]]] = []
    regrouped: list[int] = []
    names = objects.names()
    dtypes: dict[str, torch.dtype] = {}
    for stem in map(model_stem, range(len(objects.models))):
        saved = tensors.get(stem, {})  # nothing if a hook has saved them
        tied = {alias: saved[stored] for alias, stored in aliases.get(stem, {}).items() if stored in saved}
        start = "" if stem == MODEL else f"{stem}/"
        dtypes |= {start + without_pruning(name, saved): tensor.dtype for name, tensor in {**tied, **saved}.items()}
    slots = tensors.get("optimizer", {})
    for index, (optimizer, described) in enumerate(zip(objects.optimizers, state["optimizers"], strict=True)):
        stored = objects.strategy.stored_optimizer(optimizer)
        if stored is not None:
            stored.check(described, what)
        whole, own_names = (optimizer, names) if stored is None else (stored.optimizer, stored.names(names))
        keeps = keep or stored is not None
        load = plan_optimizer(whole, index, own_names, slots, described, dtypes, what, keep=keeps, strict=strict)
        loads.append(load if stored is None else partial(_load_stored, objects.strategy, optimizer, stored, load))
        if not strict and not same_groups(whole, own_names, described):
            regrouped.append(index)
    return loads, regrouped


def _check_schedulers(objects: TrainingObjects, state: Mapping[str, Any], what: str, regrouped: Sequence[int]) -> None:
    """Check the classes of the schedulers, and that their learning rates belong to the same parameter groups.

    Raises:
        StateMismatchError: They do not match.
    """
    _same_number("schedulers", objects.schedulers, state["schedulers"], what)
    for number, (scheduler, saved) in enumerate(zip(objects.schedulers, state["schedulers"], strict=True)):
        check_scheduler(scheduler, saved, what, f"schedulers[{number}]")
    if regrouped and objects.schedulers:
        raise StateMismatchError(
            f"{what}: the parameter groups of optimizer {regrouped[0]} differ from the saved ones, and the saved schedulers "
            "have a learning rate for each saved group. Nothing was changed. Fix: build the groups as they were saved."
        )


def _load_with_advice(load: Callable[[], list[str]], components: Collection[str]) -> list[str]:
    with _with_advice(components, *_WITH_OPTIMIZER):
        return load()


def _load_stored(strategy: Strategy, optimizer: Optimizer, stored: StoredOptimizer, load: Callable[[], list[str]]) -> list[str]:
    notices = load()
    strategy.load_optimizer(optimizer, stored)
    return notices


def _same_number(kind: str, ours: Sequence[Any], theirs: Sequence[Any], what: str) -> None:
    if len(ours) != len(theirs):
        raise StateMismatchError(
            f"{what} contains {len(theirs)} {kind}, but this run has {len(ours)}. Fix: create the same ones, in the same order."
        )


def _restore_scaler(precision: Precision, saved: Any) -> list[str]:
    if precision.scaler is None:
        return []
    if not saved:
        return ["the checkpoint has no loss scale: 16-mixed starts with its initial one."]
    precision.scaler.load_state_dict(dict(saved))
    return []
