"""Captures the state of a learning-rate scheduler as plain values, and restores it.

torch's `state_dict` and `load_state_dict` do the work. In addition, functions are skipped, since they are code and the
loading scheduler has its own; a failed load changes nothing; and the classes are compared, since `load_state_dict` accepts
any state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainkit.checkpoint.state_schema import scheduler_problem
from trainkit.errors import CorruptCheckpointError, StateMismatchError
from trainkit.optim.prepared import PreparedScheduler
from trainkit.state.saved_values import copy_value, is_of_torch, kind_mismatch, snapshot

__all__ = ["capture_scheduler", "check_scheduler", "restore_scheduler"]

_MISSING = object()


def capture_scheduler(scheduler: Any) -> dict[str, Any]:
    """Capture the state of a scheduler, which may be chained or wrapped.

    Returns:
        Values for tagged JSON. Functions are skipped: the scheduler that loads it has its own.
    """
    bare = _bare(scheduler)
    state = bare.state_dict()
    inner = {key: capture_scheduler(value) for key, value in state.items() if _is_scheduler(value)}
    return {
        "class": type(bare).__name__,
        "chained": _classes(bare),
        "opt_called": bool(getattr(getattr(bare, "optimizer", None), "_opt_called", False)),
        "state": {key: _plain(value) for key, value in state.items() if key not in inner and not _contains_code(value)},
        "inner": inner,
    }


def restore_scheduler(scheduler: Any, state: Mapping[str, Any], what: str = "the checkpoint") -> None:
    """Load a captured state into a scheduler, through its `load_state_dict`.

    The learning rates are in the optimizer's groups: restore the optimizer, too.

    Args:
        scheduler: A scheduler created like the saved one.
        state: The result of `capture_scheduler`; it is copied.
        what: What is loaded, for messages.

    Raises:
        StateMismatchError: The scheduler has another class or other parts, or its `load_state_dict` fails. Nothing was changed.
        CorruptCheckpointError: The state is malformed.
    """
    check_scheduler(scheduler, state, what)
    undo = _snapshot(_bare(scheduler))
    try:
        _load(_bare(scheduler), state)
    except Exception as error:
        undo()
        raise StateMismatchError(
            f"{what}: {type(_bare(scheduler)).__name__}.load_state_dict failed: {type(error).__name__}: "
            f"{error}. The scheduler was restored. Fix: build the same scheduler as when it was saved."
        ) from error


def _bare(scheduler: Any) -> Any:
    return scheduler.scheduler if isinstance(scheduler, PreparedScheduler) else scheduler


def _is_scheduler(value: Any) -> bool:
    methods = ("step", "state_dict", "load_state_dict")
    return not isinstance(value, Optimizer) and all(callable(getattr(type(value), method, None)) for method in methods)


def _inner_schedulers(scheduler: Any) -> list[Any]:
    """The schedulers inside torch's SequentialLR and ChainedScheduler."""
    schedulers = getattr(scheduler, "_schedulers", None)
    return [inner for inner in schedulers if _is_scheduler(inner)] if isinstance(schedulers, list | tuple) else []


def _classes(scheduler: Any) -> list[Any]:
    return [[type(inner).__name__, _classes(inner)] for inner in _inner_schedulers(scheduler)]


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, weakref.ref | ModuleType | Optimizer | nn.Module)


def _contains_code(value: Any) -> bool:
    """Whether a value is a function, or a list that contains one: a list cannot be stored without some of its items."""
    return _is_code(value) or (isinstance(value, list | tuple | set) and any(_contains_code(item) for item in value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        result = value.copy()  # The copy has the same class: MultiStepLR has a Counter.
        for key, item in value.items():
            if _contains_code(item):
                del result[key]
            else:
                result[key] = _plain(item)
        return result
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def check_scheduler(
    scheduler: Any, state: Mapping[str, Any], what: str = "the checkpoint", where: str = "the scheduler"
) -> None:
    """Check the class, the parts and the kinds of the values, with the arguments and errors of `restore_scheduler`.

    `where` is its key in the state of the checkpoint.
    """
    if (problem := scheduler_problem(state, where)) is not None:
        raise CorruptCheckpointError(f"{what}: the state of a scheduler is malformed: {problem}. Fix: use another checkpoint.")
    bare = _bare(scheduler)
    theirs, ours = (state["class"], state.get("chained")), (type(bare).__name__, _classes(bare))
    for key in state["inner"]:
        if not _is_scheduler(getattr(bare, key, None)):
            theirs = (theirs[0], f"with the scheduler {key!r} in it")
    if theirs != ours:
        raise StateMismatchError(
            f"{what} contains the state of {_as_code(*theirs)}, but this run has {_as_code(*ours)}. Nothing was changed. Fix: "
            "build the same scheduler as when it was saved."
        )
    if (problem := _find_malformed(bare, state["state"], f"{where}.state")) is not None:
        raise CorruptCheckpointError(f"{what}: the state of a scheduler is malformed: {problem}. Fix: use another checkpoint.")
    for key, inner in state["inner"].items():
        check_scheduler(getattr(bare, key), inner, what, f"{where}.inner.{key}")


def _find_malformed(bare: Any, saved: Mapping[str, Any], path: str) -> str | None:
    """What `load_state_dict` of torch's schedulers would accept, although the next step fails or computes something else."""
    present = {key: _plain(value) for key, value in bare.state_dict().items() if not _contains_code(value)}
    torchs = is_of_torch(bare)
    if (
        problem := kind_mismatch(dict(saved), present, path, may_be_none=not torchs, any_for_none=not torchs)
    ) is not None or not torchs:
        return problem
    for key, least in (("last_epoch", -1), ("_step_count", 0)):
        if saved.get(key, least) < least:
            return f"{path}[{key!r}]: expected a number ≥ {least}, got {saved[key]!r:.80}"
    lr_lambdas = saved.get("lr_lambdas", ())
    if any(value is not None and not isinstance(value, dict) for value in lr_lambdas):
        return f"{path}['lr_lambdas']: expected null for a function, or a dict for an object, got {lr_lambdas!r:.80}"
    return None


def _as_code(name: str, chained: Any) -> str:
    if isinstance(chained, list) and chained:
        return f"{name}({', '.join(_as_code(*part) if isinstance(part, list) and len(part) == 2 else '?' for part in chained)})"
    return f"{name} {chained}" if chained and isinstance(chained, str) else name


def _load(scheduler: Any, state: Mapping[str, Any]) -> None:
    inner = {key: getattr(scheduler, key) for key in state["inner"]}
    scheduler.load_state_dict(copy_value(state["state"]))  # the scheduler keeps it
    for key, part in inner.items():
        _load(part, state["inner"][key])
    optimizer = getattr(scheduler, "optimizer", None)
    if state.get("opt_called") is True and optimizer is not None:
        optimizer._opt_called = True  # otherwise torch warns that optimizer.step() was not called before


def _snapshot(scheduler: Any) -> Callable[[], None]:
    """A function that restores a scheduler and its parts."""
    before = dict(vars(scheduler))
    undo_own = snapshot(scheduler, [value for value in before.values() if type(value) in (list, dict)], copy_value)
    below = [_snapshot(part) for part in [*_inner_schedulers(scheduler), *(v for v in before.values() if _is_scheduler(v))]]
    optimizer = before.get("optimizer", _MISSING)
    called = getattr(optimizer, "_opt_called", _MISSING)

    def undo() -> None:
        undo_own()
        for undo_part in below:
            undo_part()
        if called is not _MISSING:
            optimizer._opt_called = called

    return undo
