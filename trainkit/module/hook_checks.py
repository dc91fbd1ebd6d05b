"""Checks of user classes: a hook that is misspelled, removed or has a wrong signature is an error before training starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.callback import Callback
from trainkit.console import warn
from trainkit.errors import HookError, make_instance
from trainkit.module.hook_callers import callers_elsewhere, find_self_calls
from trainkit.module.hook_table import DATA_METHODS, HOOKS, MODULE_METHODS, STATE_METHODS, STEPS, accepts
from trainkit.module.overridable_hooks import is_overridden
from trainkit.names import table

__all__ = ["REMOVED", "WARNED", "check_callback", "check_datamodule", "check_module", "check_names"]

# Methods that Lightning (in this or earlier versions), Keras or the Hugging Face Trainer calls and trainkit does not → what to
# use instead. Those of the Hugging Face Trainer are data.
REMOVED: dict[str, str] = {
    **table("hugging_face")["hooks"],
    "training_epoch_end": "on_train_epoch_end (keep what you need of the outputs in an attribute)",
    "validation_epoch_end": "on_validation_epoch_end (keep what you need of the outputs in an attribute)",
    "test_epoch_end": "on_test_epoch_end (keep what you need of the outputs in an attribute)",
    "training_step_end": "training_step: the gradient is already the mean over all processes",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_init_start": "setup",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "configure_model of the module",
    "configure_sharded_model": "configure_model",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
    "on_post_move_to_device": "on_fit_start: tied parameters stay tied",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "on_validation_model_zero_grad": "on_validation_start: validation does not change the gradients",
    "on_batch_begin": "on_train_batch_start",
    "on_predict_batch_begin": "on_predict_batch_start",
    "on_predict_begin": "on_predict_start",
    "on_test_batch_begin": "on_test_batch_start",
    "on_test_begin": "on_test_start",
    "on_train_batch_begin": "on_train_batch_start",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True)",
    "tbptt_split_batch": "a loop over the parts of the sequence under manual optimization",
}

# Hooks in REMOVED with a name that users may also give to their own methods cause a warning. The others raise an error, because
# without them a run would train or restore something other than the user means.
_ERRORS_AMONG_HOOKS = ("on_configure_sharded_model", "on_hpc_load", "on_hpc_save", "on_post_move_to_device")
WARNED: frozenset[str] = frozenset(name for name in REMOVED if name.startswith("on_") and name not in _ERRORS_AMONG_HOOKS)


def check_names(owner: object, base: type, known: Iterable[str], removed: Mapping[str, str] = REMOVED) -> None:
    """Refuse a method of a user's class that looks like a hook but would never be called.

    If the class's own code calls it, it is a method of the user's. If other code seems to, it is a warning, and so is a method
    with a name in `WARNED`.

    Args:
        owner: The user's callback, module or data module.
        base: The class of trainkit that it derives from.
        known: The names that trainkit calls.
        removed: Methods that other frameworks call, and what to use instead.

    Raises:
        HookError: A method whose name is almost that of a hook, or that of a hook that Lightning removed.
    """
    classes = [cls for cls in type(owner).__mro__ if cls is not base and not cls.__module__.startswith(("trainkit.", "torch."))]
    places: list[tuple[str, Mapping[str, Any]]] = [(cls.__name__, vars(cls)) for cls in classes]
    places.append((type(owner).__name__, vars(owner)))  # Hooks may also be assigned on the object.
    refused = _find_refused(places, base, tuple(known), removed)
    if not refused:
        return
    called = find_self_calls([members for _, members in places], refused)
    left = {name: problem for name, problem in refused.items() if name not in called}
    callers = callers_elsewhere(classes, left)
    for name, problem in left.items():
        if name not in callers:
            raise HookError(problem)
        text = problem.replace(" is never called by trainkit", " is never called", 1)
        text = text.replace(" is never called", " is not called by trainkit", 1)
        warn(f"{text} Ignore this if {callers[name]} means your own method of that name.")


def _find_refused(
    places: Iterable[tuple[str, Mapping[str, Any]]], base: type, known: tuple[str, ...], removed: Mapping[str, str]
) -> dict[str, str]:
    """The methods that look like a hook, each with what is wrong; those in `WARNED` are a warning instead."""
    refused: dict[str, str] = {}
    for place, members in places:
        for name, member in members.items():
            if name.startswith("_") or not (inspect.isfunction(member) or inspect.ismethod(member)) or hasattr(base, name):
                continue
            if name in WARNED and name in removed:
                warn(
                    f"{place}.{name} has the name of a hook of Keras, the Hugging Face Trainer or an older Lightning, which "
                    "trainkit does not call. Ignore this if your own code calls the method. If it is meant as the hook, use "
                    f"{removed[name]} instead."
                )
            elif problem := _problem(name, f"{place}.{name}", known, removed):
                refused.setdefault(name, problem)
    return refused


def _problem(name: str, where: str, known: tuple[str, ...], removed: Mapping[str, str]) -> str | None:
    """What is wrong with a method that looks like a hook; `None` if it does not."""
    if name in removed:
        return f"{where} is never called by trainkit. Use {removed[name]} instead."
    if name in known:
        return (
            f"{where} is never called: only callbacks have this hook. Fix: class Mine(Callback): "
            f"def {name}(self, trainer, module, ...), and Trainer(callbacks=[Mine()])"
        )
    for candidate in known:
        allowed = 2 if len(candidate) > 10 else 1
        if _edits(name, candidate, allowed) <= allowed:
            return (
                f"{where} is never called: no hook has that name. Did you mean {candidate!r}? "
                "If it is your own method, rename it so that the names differ more."
            )
    return None


def _edits(first: str, second: str, limit: int) -> int:
    """The Levenshtein distance of two names, or `limit + 1` if it is larger. difflib does not compute the smallest one."""
    if abs(len(first) - len(second)) > limit:
        return limit + 1
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
        if min(row) > limit:
            return limit + 1
    return row[-1]


def check_callback(callback: object) -> None:
    """Raise a `HookError` for an object that is not a callback, or whose hooks are misspelled or cannot be called."""
    if not isinstance(callback, Callback):
        _refuse_callback_of_transformers(callback)
        raise HookError(
            f"callbacks must contain Callback objects, not {callback!r}."
            + (make_instance(callback, Callback) or " For example: callbacks=[EarlyStopping('val_loss')]")
        )
    check_names(callback, Callback, [*HOOKS, *STATE_METHODS])
    hooks = {name: ("trainer", "module", *arguments) for name, arguments in HOOKS.items()}
    _check_signatures(callback, Callback, {**hooks, **STATE_METHODS})


def _refuse_callback_of_transformers(callback: object) -> None:
    """Say how to use a `transformers.TrainerCallback`, an object or a class, which is recognized without an import."""
    kind = callback if isinstance(callback, type) else type(callback)
    if not any(each.__name__ == "TrainerCallback" and each.__module__.startswith("transformers.") for each in kind.__mro__):
        return
    ours = table("hugging_face")["imports"].get(kind.__name__)
    hooks = table("hugging_face")["hooks"] | table("hugging_face")["unwarned_hooks"]
    own = {name for each in kind.__mro__ if not each.__module__.startswith("transformers.") for name in vars(each)}
    theirs = [f"{name} is {use}" for name, use in hooks.items() if name in own]
    fix = f"Use {ours}" if ours else "Make it a trainkit.Callback, whose hooks get (trainer, module, ...)"
    raise HookError(
        f"callbacks must contain Callback objects of trainkit, not {kind.__name__}, a TrainerCallback of transformers. "
        f"{fix}{': ' + ', '.join(theirs) if theirs else ''}. Or keep it, with Trainer or TransformersModule.from_arguments of "
        "trainkit.integrations.transformers, which take callbacks of transformers."
    )


def check_module(module: object, base: type) -> None:
    """Raise a `HookError` for a hook or step of a module that is misspelled, removed or cannot be called."""
    check_names(module, base, [*HOOKS, *MODULE_METHODS, *STEPS])
    _check_signatures(module, base, {**HOOKS, **MODULE_METHODS})
    for name, arguments in STEPS.items():
        method = getattr(module, name)
        if not is_overridden(module, name, base):
            continue
        if not any(accepts(method, n + 1) for n in range(len(arguments))):
            raise _not_callable(module, name, arguments)
        parameters = list(inspect.signature(method).parameters)
        if "dataloader_iter" in parameters and parameters != ["dataloader_iter"]:
            raise HookError(
                f"{type(module).__name__}.{name} takes dataloader_iter and other arguments. Expected: def {name}(self, "
                "dataloader_iter), with batch, batch_idx, dataloader_idx = next(dataloader_iter) in it"
            )


def check_datamodule(datamodule: object, base: type) -> None:
    """Raise a `HookError` for a method of a data module that is misspelled, removed or cannot be called."""
    run_hooks = {"setup": ("stage",), "teardown": ("stage",), "on_exception": ("exception",)}
    methods = {**DATA_METHODS, **STATE_METHODS, **run_hooks}
    check_names(datamodule, base, methods)
    _check_signatures(datamodule, base, methods)


def _check_signatures(owner: object, base: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Check that overridden methods take these arguments; the hooks of evaluation batches may omit `dataloader_idx`."""
    for name, arguments in methods.items():
        if not hasattr(base, name) or not is_overridden(owner, name, base):
            continue
        method = getattr(owner, name)
        fewer = name in HOOKS and arguments[-1:] == ("dataloader_idx",)
        if not accepts(method, len(arguments)) and not (fewer and accepts(method, len(arguments) - 1)):
            raise _not_callable(owner, name, arguments)


def _not_callable(owner: object, name: str, arguments: tuple[str, ...]) -> HookError:
    assigned = name in vars(owner)  # a function that does not get the object
    received = inspect.signature(getattr(owner if assigned else type(owner), name))
    old_style = "optimizer_idx" in received.parameters
    return HookError(
        f"{type(owner).__name__}.{name} cannot be called. Expected: "
        f"def {name}({', '.join(arguments if assigned else ('self', *arguments))}); received: def {name}{received}"
        + ("; for optimizers in turns use manual optimization: self.automatic_optimization = False" if old_style else "")
    )
