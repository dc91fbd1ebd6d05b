"""Captures and restores models, optimizers, schedulers and the loss scale, for `Trainer` and your own training loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.manifest import Manifest
from trainkit.console import counted, notice
from trainkit.data.order import ORDER_VERSION
from trainkit.errors import CorruptCheckpointError, StateMismatchError, UnknownNameError, nearest
from trainkit.optim.optimizer_copy import StoredOptimizer
from trainkit.optim.parameter_names import parameter_names, without_pruning
from trainkit.precision import Precision
from trainkit.rng import KEY_VERSION
from trainkit.state.model import ModelState, capture_model, plan_model
from trainkit.state.optimizer import capture_optimizer, plan_optimizer, same_groups
from trainkit.state.scheduler import capture_scheduler, check_scheduler, restore_scheduler
from trainkit.strategy import Strategy

__all__ = [
    "TRAINED_WEIGHTS",
    "Captured",
    "Parts",
    "SaveMode",
    "about",
    "capture",
    "check_names",
    "configurations",
    "model_stem",
    "model_stems",
    "moved",
    "restore",
    "shown",
    "trained_weights",
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
class Parts:
    """The user's own objects of one run."""

    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    precision: Precision
    strategy: Strategy = _PLAIN


@dataclass
class Captured:
    """The captured state of `Parts`.

    Attributes:
        tensors: stem of the file name → name → tensor; not copies.
        state: everything that is not in files of tensors: extra state, groups, schedulers, the scaler.
        parameters: stem → name of a parameter → whether it is trained.
        aliases: stem → name of a tied parameter → the name that it is stored under.
        irregular: optimizer slots that do not have the shape of their parameter.
        attachments: further files of the checkpoint.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, dict[str, bool]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    irregular: list[str] = field(default_factory=list)
    attachments: dict[str, bytes] = field(default_factory=dict)


def check_names(given: Collection[str] | None, known: Sequence[str]) -> set[str]:
    """The parts to restore: those given, or all.

    Raises:
        UnknownNameError: an unknown part.
    """
    wanted = set(known) if given is None else {given} if isinstance(given, str) else set(given)
    for part in wanted:
        if part not in known:
            raise UnknownNameError(f"restore: unknown part {part!r}; known: {', '.join(known)}.{nearest(str(part), known)}")
    return wanted


def shown(epoch: int, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint that is passed to `on_save_checkpoint` and `on_load_checkpoint`, which may change it."""
    return {
        "epoch": epoch,
        "global_step": step,
        "state_dict": model,
        "callbacks": state.get("callbacks", {}),
        "hyper_parameters": state.get("hyper_parameters", {}),
        **state.get("user", {}),
    }


def trained_weights(added: Mapping[str, Any]) -> dict[str, Tensor]:
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
        tensors: stem of the file name → name → tensor.
        saved: the saved model; what a hook has changed since is kept.
        added: what `on_save_checkpoint` added to the checkpoint.
    """
    trained, model = trained_weights(added), tensors.get("model")
    if model is None:
        return dict(tensors)
    return {**tensors, "model": {n: trained.get(n, value) if value is saved.get(n) else value for n, value in model.items()}}


def about(
    strategy: Strategy,
    taken: Captured,
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
        "aliases": taken.aliases,
        "irregular": taken.irregular,
    }


def moved(strategy: Strategy, manifest: Manifest) -> str | None:
    """That a checkpoint was saved by another strategy or on another number of devices; `None` if it was not."""
    here, saved = (strategy.name, strategy.world_size), (manifest.strategy, manifest.world_size)
    if here == saved:
        return None
    places = (f"strategy={name!r} on {counted(size, 'device')}" for name, size in (saved, here))
    return "the checkpoint was saved with {}; this run uses {}.".format(*places)


def model_stem(number: int) -> str:
    """The stem of the files of a model: "model", "model_1", …"""
    return f"model_{number}" if number else "model"


def model_stems(files: Collection[str]) -> set[str]:
    """The stems of models, from the names of a checkpoint's files."""
    stems = {name.split(".")[0].split("-")[0] for name in files if name.endswith(".safetensors")}
    return {stem for stem in stems if stem == "model" or stem.startswith("model_")}


def capture(
    parts: Parts, *, save: SaveMode = "all", weights_only: bool = False, fingerprints: Mapping[int, str] | None = None
) -> Captured:
    """Capture the parts for a checkpoint.

    Args:
        parts: the objects.
        save: all parameters, or the trainable ones.
        weights_only: skip optimizers, schedulers and the loss scale.
        fingerprints: index of the model → known fingerprint of its frozen parameters.
    """
    taken = Captured()
    models: list[dict[str, Any]] = []
    for number, model in enumerate(parts.models):
        placeholders = parts.strategy.stored_weights(model)
        state = capture_model(model, save, (fingerprints or {}).get(number), placeholders)
        stem = model_stem(number)
        taken.tensors[stem], taken.aliases[stem] = state.tensors, state.aliases
        # a callback may save a pruned parameter under its original name
        original = {without_pruning(name, state.tensors): trained for name, trained in state.trained.items()}
        taken.parameters[stem] = state.trained | original
        models.append(
            {"extra": state.extra, "trained": state.trained, "fingerprint": state.fingerprint, "configs": state.configs}
        )
    taken.state["models"] = models
    if len(models) == 1:
        taken.attachments = configurations(models[0]["configs"])
    if weights_only:
        return taken
    names = parameter_names(parts.models)
    tensors = taken.tensors["optimizer"] = {}
    taken.state["optimizers"] = []
    for index, optimizer in enumerate(parts.optimizers):
        stored = parts.strategy.stored_optimizer(optimizer)
        own = capture_optimizer(
            *((optimizer, index, names) if stored is None else (stored.optimizer, index, stored.names(names)))
        )
        tensors.update(own.tensors)
        taken.state["optimizers"].append(own.described)
        taken.irregular += own.irregular
    taken.state["schedulers"] = [capture_scheduler(scheduler) for scheduler in parts.schedulers]
    parts.precision.settle()
    scaler = parts.precision.scaler
    taken.state["scaler"] = None if scaler is None else scaler.state_dict()
    return taken


def configurations(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The files with which `transformers` can open the folder, if the model itself is one of its models."""
    own = configs.get("")
    if own is None or own["kind"] != "transformers":
        return {}
    files = {"config.json": own["config"], "generation_config.json": own.get("generation_config")}
    return {name: json.dumps(value, indent=2).encode() for name, value in files.items() if value is not None}


def restore(
    parts: Parts,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    aliases: Mapping[str, Mapping[str, str]],
    *,
    wanted: Collection[str],
    what: str,
    strict: bool = True,
    keep: bool = False,
) -> None:
    """Restore the result of `capture`.

    Args:
        parts: the objects.
        tensors: stem of the file name → name → tensor.
        state: the saved `Captured.state`.
        aliases: the saved `Captured.aliases`.
        wanted: the parts to restore: "model", "optimizer", "scheduler", "scaler"; other parts only occur in messages.
        what: the checkpoint, for messages.
        strict: missing and unexpected names in a model raise an error; False: a notice lists them, and optimizers start without
            state for new parameters.
        keep: optimizers may keep `tensors` instead of copying them, since they are not used elsewhere any more.

    Raises:
        StateMismatchError: something does not fit; the message lists all mismatches.
    """
    _check_present(state, wanted, what)
    # everything is compared before anything is changed
    loads: list[Callable[[], list[str]]] = []
    regrouped: list[int] = []
    if "model" in wanted:
        loads += _plan_models(parts, tensors, state, aliases, wanted, what, strict)
    if "optimizer" in wanted:
        with _advised(wanted, *_WITH_OPTIMIZER):
            plans, regrouped = _plan_optimizers(parts, tensors, state, what, strict, keep)
        loads += [partial(_load_advised, plan, wanted) for plan in plans]
    if "scheduler" in wanted:
        with _advised(wanted, "scheduler"):
            _check_schedulers(parts, state, what, regrouped)
    notices = [text for load in loads for text in load()]
    parts.strategy.restored(parts.optimizers if "optimizer" in wanted else ())
    if "scheduler" in wanted:
        for scheduler, own in zip(parts.schedulers, state["schedulers"], strict=True):
            with _advised(wanted, "scheduler"):
                restore_scheduler(scheduler, own, what)
    if "scaler" in wanted:
        notices += _restore_scaler(parts.precision, state.get("scaler"))
    for text in notices:
        notice(text)


def _check_present(state: Mapping[str, Any], wanted: Collection[str], what: str) -> None:
    for part, key in (("model", "models"), ("optimizer", "optimizers"), ("scheduler", "schedulers")):
        if part in wanted and key not in state:
            raise CorruptCheckpointError(f"{what}: state.json has no {key!r}. Fix: use another checkpoint.")


@contextmanager
def _advised(wanted: Collection[str], *parts: str) -> Iterator[None]:
    """Add to an error how to restore all other parts."""
    try:
        yield
    except (StateMismatchError, CorruptCheckpointError) as error:
        left = [part for part in _ORDER if part in wanted and part not in parts]
        if not left:
            raise
        without = " and ".join({"optimizer": "the optimizers", "scheduler": "the schedulers"}[part] for part in parts)
        advice = f"Or restore everything except {without}: restore={{{', '.join(map(repr, left))}}}"
        raise type(error)(f"{error} {advice}") from error.__cause__


def _plan_models(
    parts: Parts,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    aliases: Mapping[str, Mapping[str, str]],
    wanted: Collection[str],
    what: str,
    strict: bool,
) -> Iterator[Callable[[], list[str]]]:
    _same_number("models", parts.models, state["models"], what)
    for number, (model, own) in enumerate(zip(parts.models, state["models"], strict=True)):
        stem = model_stem(number)
        # requires_grad belongs to a run, not to weights; but for adapters it shows which parameters are stored
        trained = own["trained"] if "optimizer" in wanted or own["fingerprint"] is not None else {}
        model_state = ModelState(
            dict(tensors[stem]),
            dict(aliases.get(stem, {})),
            own.get("extra", {}),
            trained,
            own["fingerprint"],
            own.get("configs", {}),
        )
        placeholders, take = parts.strategy.stored_weights(model), parts.strategy.load_weights
        folds = "optimizer" not in wanted  # a run that continues needs the masks
        yield plan_model(
            model, model_state, strict=strict, what=what, placeholders=placeholders, load_placeholders=take, fold_masks=folds
        )


def _plan_optimizers(
    parts: Parts,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    what: str,
    strict: bool,
    keep: bool,
) -> tuple[list[Callable[[], list[str]]], list[int]]:
    """Functions that load them, and the indices of those whose groups differ from the saved ones, without `strict`."""
    _same_number("optimizers", parts.optimizers, state["optimizers"], what)
    loads: list[Callable[[], list[str]]] = []
    regrouped: list[int] = []
    names = parameter_names(parts.models)
    dtypes = {
        (f"{model_stem(n)}/" if n else "") + without_pruning(name, tensors[model_stem(n)]): tensor.dtype
        for n in range(len(parts.models))
        for name, tensor in tensors[model_stem(n)].items()
    }
    slots = tensors.get("optimizer", {})
    for index, (optimizer, described) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        stored = parts.strategy.stored_optimizer(optimizer)
        if stored is not None:
            stored.check(described, what)
        whole, own_names = (optimizer, names) if stored is None else (stored.optimizer, stored.names(names))
        keeps = keep or stored is not None
        plan = plan_optimizer(whole, index, own_names, slots, described, dtypes, what, keep=keeps, strict=strict)
        loads.append(plan if stored is None else partial(_load_stored, parts.strategy, optimizer, stored, plan))
        if not strict and not same_groups(whole, own_names, described):
            regrouped.append(index)
    return loads, regrouped


def _check_schedulers(parts: Parts, state: Mapping[str, Any], what: str, regrouped: Sequence[int]) -> None:
    """Check the classes of the schedulers, and that their learning rates belong to the same parameter groups.

    Raises:
        StateMismatchError: they do not match.
    """
    _same_number("schedulers", parts.schedulers, state["schedulers"], what)
    for number, (scheduler, own) in enumerate(zip(parts.schedulers, state["schedulers"], strict=True)):
        check_scheduler(scheduler, own, what, f"schedulers[{number}]")
    if regrouped and parts.schedulers:
        raise StateMismatchError(
            f"{what}: the parameter groups of optimizer {regrouped[0]} differ from the saved ones, and the saved schedulers "
            "have a learning rate for each saved group. Nothing was changed. Fix: build the groups as they were saved."
        )


def _load_advised(plan: Callable[[], list[str]], wanted: Collection[str]) -> list[str]:
    with _advised(wanted, *_WITH_OPTIMIZER):
        return plan()


def _load_stored(strategy: Strategy, optimizer: Optimizer, stored: StoredOptimizer, plan: Callable[[], list[str]]) -> list[str]:
    notices = plan()
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
