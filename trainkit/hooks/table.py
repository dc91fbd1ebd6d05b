"""``HookTable``: who overrides which hook, worked out once per run, and checked.

A call site in the loop is ``for hook in hooks.on_train_batch_end: hook(...)`` over a tuple of bound methods; a callback that
does not override a hook is not in its tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import warn
from trainkit.errors import HookError
from trainkit.module.overridable_hooks import is_overridden

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.profiler import Profiler
    from trainkit.trainer.trainer import Trainer

__all__ = ["HOOKS", "REMOVED", "WARNED", "HookTable", "check_callback", "check_datamodule", "check_module", "check_names"]

# Hook → names of the arguments after (trainer, module). The module's own hooks take the same without these two.
HOOKS: dict[str, tuple[str, ...]] = {
    "setup": ("stage",),
    "teardown": ("stage",),
    "on_fit_start": (),
    "on_fit_end": (),
    "on_sanity_check_start": (),
    "on_sanity_check_end": (),
    "on_train_start": (),
    "on_train_end": (),
    "on_train_epoch_start": (),
    "on_train_epoch_end": (),
    "on_train_batch_start": ("batch", "batch_idx"),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    "on_before_backward": ("loss",),
    "on_after_backward": (),
    "on_before_optimizer_step": ("optimizer",),
    "on_before_zero_grad": ("optimizer",),
    **{f"on_{stage}_{when}": () for stage in ("validation", "test", "predict") for when in ("start", "end")},
    **{f"on_{stage}_epoch_{when}": () for stage in ("validation", "test", "predict") for when in ("start", "end")},
    **{f"on_{stage}_batch_start": ("batch", "batch_idx", "dataloader_idx") for stage in ("validation", "test", "predict")},
    **{
        f"on_{stage}_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx")
        for stage in ("validation", "test", "predict")
    },
    "on_exception": ("exception",),
    "on_save_checkpoint": ("checkpoint",),
    "on_load_checkpoint": ("checkpoint",),
}

# Method → names of its arguments, of callbacks, of data modules and modules, and of modules only.
_STATE: dict[str, tuple[str, ...]] = {"state_dict": (), "load_state_dict": ("state_dict",)}
_DATA_METHODS: dict[str, tuple[str, ...]] = {
    "prepare_data": (),
    "train_dataloader": (),
    "val_dataloader": (),
    "test_dataloader": (),
    "predict_dataloader": (),
    "transfer_batch_to_device": ("batch", "device", "dataloader_idx"),
    "on_before_batch_transfer": ("batch", "dataloader_idx"),
    "on_after_batch_transfer": ("batch", "dataloader_idx"),
}
_MODULE_METHODS: dict[str, tuple[str, ...]] = {
    **_DATA_METHODS,
    "configure_optimizers": (),
    "configure_model": (),
    "configure_callbacks": (),
    "configure_gradient_clipping": ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
    "batch_weight": ("batch",),
    "lr_scheduler_step": ("scheduler", "metric"),
    "optimizer_zero_grad": ("epoch", "batch_idx", "optimizer"),
    **{f"on_{stage}_model_{mode}": () for stage in ("validation", "test", "predict") for mode in ("eval", "train")},
}
# Steps may leave out arguments from the right.
_STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("batch", "batch_idx"),
    **{f"{stage}_step": ("batch", "batch_idx", "dataloader_idx") for stage in ("validation", "test", "predict")},
}

# Overridable names of Lightning's, of this and earlier versions, that would never be called here → what to use.
REMOVED: dict[str, str] = {
    "training_epoch_end": "on_train_epoch_end (keep what you need of the outputs in an attribute)",
    "validation_epoch_end": "on_validation_epoch_end (keep what you need of the outputs in an attribute)",
    "test_epoch_end": "on_test_epoch_end (keep what you need of the outputs in an attribute)",
    "training_step_end": "training_step: the gradient is already the mean over all processes",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_init_start": "setup",
    "on_init_end": "setup",
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
    "on_validation_model_zero_grad": "on_validation_start: a validation leaves the gradients as they are",
    "optimizer_step": (
        "on_before_optimizer_step, or manual optimization (automatic_optimization = False) with self.optimizers().step()"
    ),
    "backward": "on_before_backward and on_after_backward, or manual optimization with self.manual_backward(loss)",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True)",
    "tbptt_split_batch": "a loop over the parts of the sequence under manual optimization",
}

# Of these, the hooks whose names users also give to methods that they call themselves: a warning. The others are errors:
# without them a run would train or restore something else than the user means.
_ERRORS_AMONG_HOOKS = ("on_configure_sharded_model", "on_hpc_load", "on_hpc_save", "on_post_move_to_device")
WARNED: frozenset[str] = frozenset(name for name in REMOVED if name.startswith("on_") and name not in _ERRORS_AMONG_HOOKS)


def check_names(owner: object, base: type, known: Iterable[str]) -> None:
    """Refuse a method of a user's class that looks like a hook but would never be called.

    A method with the name of a hook in :data:`WARNED` is a warning: the user's code may call it.

    Args:
        owner: the user's callback, module or data module.
        base: the class of ours that it is of; what that defines is known.
        known: names that are called.

    Raises:
        HookError: a method within two edits of a known name, or one that Lightning removed.
    """
    known = tuple(known)
    for cls in type(owner).__mro__:
        if cls is not base and not cls.__module__.startswith(("trainkit.", "torch.")):
            _check_methods(cls.__name__, vars(cls), base, known)
    _check_methods(type(owner).__name__, vars(owner), base, known)  # assigned on the object


def _check_methods(owner: str, methods: Mapping[str, Any], base: type, known: tuple[str, ...]) -> None:
    for name, member in methods.items():
        if name.startswith("_") or not (inspect.isfunction(member) or inspect.ismethod(member)) or hasattr(base, name):
            continue
        where = f"{owner}.{name}"
        if name in WARNED:
            warn(
                f"{where} has the name of a hook that Lightning had, and trainkit does not call it. Expected: a method that "
                f"your code calls itself. If it is meant as the hook, use {REMOVED[name]} instead."
            )
        elif name in REMOVED:
            raise HookError(f"{where} is never called by trainkit. Use {REMOVED[name]} instead.")
        elif name in known:
            raise HookError(
                f"{where} is never called: only callbacks have this hook. Fix: class Mine(Callback): "
                f"def {name}(self, trainer, module, ...), and Trainer(callbacks=[Mine()])"
            )
        else:
            _refuse_misspelt(name, where, known)


def _refuse_misspelt(name: str, where: str, known: tuple[str, ...]) -> None:
    for candidate in known:
        if _edits(name, candidate, allowed := 2 if len(candidate) > 10 else 1) <= allowed:
            raise HookError(
                f"{where} is never called: no hook has that name. Did you mean {candidate!r}? "
                "If it is a method of your own, rename it so that it cannot be taken for the hook."
            )


def _edits(first: str, second: str, limit: int) -> int:
    """The Levenshtein distance of two names, or ``limit + 1`` if it is more."""
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


class HookTable:
    """For each hook the tuple of what is called, in order: callbacks, the module, callbacks that run last.

    Built once per run. Each entry is called with the hook's own arguments; trainer and module are bound.

    Args:
        trainer: the trainer.
        module: the user's module.
        callbacks: the attached callbacks.
        inserted: hook → what is called between the module's own and the callbacks that run last: an epoch's metrics are
            finished there, so that monitors see them.
        several_loaders: an evaluation has more than one loader, so its batch hooks must take ``dataloader_idx``.
        profiler: times each hook; ``None`` costs nothing.

    Raises:
        HookError: a hook is misspelt, removed or cannot be called with its arguments.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: TrainModule,
        callbacks: Iterable[Callback],
        *,
        inserted: Mapping[str, Callable[[], Any]] | None = None,
        several_loaders: bool = False,
        profiler: Profiler | None = None,
    ) -> None:
        callbacks = list(callbacks)
        early: list[Any] = [*(c for c in callbacks if not c.runs_last), module]
        late: list[Any] = [c for c in callbacks if c.runs_last]
        self.owners: dict[str, tuple[str, ...]] = {}
        for name, arguments in HOOKS.items():
            entries: list[Callable[..., Any]] = []
            owners: list[str] = []
            for owner in [*early, None, *late]:
                if owner is None:
                    entries += [inserted[name]] if inserted and name in inserted else []
                    continue
                entry = _entry(owner, name, arguments, trainer, module, several_loaders)
                if entry is not None:
                    owners.append(type(owner).__name__)
                    entries.append(entry if profiler is None else profiler.wrapped(f"{owners[-1]}.{name}", entry))
            setattr(self, name, tuple(entries))
            self.owners[name] = tuple(owners)

    @classmethod
    def nothing(cls) -> HookTable:
        """A table in which nobody handles anything: what a run has before its callbacks are known."""
        table = cls.__new__(cls)
        table.owners = dict.fromkeys(HOOKS, ())
        for name in HOOKS:
            setattr(table, name, ())
        return table

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]: ...

    def run(self, name: str, *arguments: Any) -> None:
        """Call everything that is in the table for a hook; for the hooks that are not on the way of a step."""
        for hook in getattr(self, name):
            hook(*arguments)


def check_callback(callback: object) -> None:
    """Refuse a callback that is none, or whose hooks are misspelt or cannot be called.

    Raises:
        HookError: with the expected signature.
    """
    if not isinstance(callback, Callback):
        raise HookError(
            f"callbacks must hold Callback objects, not {callback!r}. "
            + (f"Did you forget to make an instance: {callback.__name__}()?" if isinstance(callback, type) else "")
            + ("" if isinstance(callback, type) else "For example: callbacks=[EarlyStopping('val_loss')]")
        )
    check_names(callback, Callback, [*HOOKS, *_STATE])
    hooks = {name: ("trainer", "module", *arguments) for name, arguments in HOOKS.items()}
    _check_signatures(callback, Callback, {**hooks, **_STATE})


def check_module(module: object, base: type) -> None:
    """Refuse a module with a hook or step that is misspelt, removed or cannot be called.

    Raises:
        HookError: with the expected signature.
    """
    check_names(module, base, [*HOOKS, *_MODULE_METHODS, *_STEPS])
    _check_signatures(module, base, {**HOOKS, **_MODULE_METHODS})
    for name, arguments in _STEPS.items():
        method = getattr(module, name)
        if not is_overridden(module, name, base):
            continue
        if not any(_accepts(method, n + 1) for n in range(len(arguments))):
            raise _not_callable(module, name, arguments)
        if "dataloader_iter" in inspect.signature(method).parameters:
            raise HookError(
                f"{type(module).__name__}.{name} takes dataloader_iter, which is not offered. Take the batch: "
                f"def {name}({', '.join(('self', *arguments[:2]))}); copies to the device overlap with the work anyway."
            )


def check_datamodule(datamodule: object, base: type) -> None:
    """Refuse a data module with a method that is misspelt, removed or cannot be called.

    Raises:
        HookError: with the expected signature.
    """
    methods = {**_DATA_METHODS, **_STATE, "setup": ("stage",), "teardown": ("stage",)}
    check_names(datamodule, base, methods)
    _check_signatures(datamodule, base, methods)


def _check_signatures(owner: object, base: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Whether what is overridden can be called with these arguments, or with them but the loader's number."""
    for name, arguments in methods.items():
        if not hasattr(base, name) or not is_overridden(owner, name, base):
            continue
        method = getattr(owner, name)
        fewer = name in HOOKS and arguments[-1:] == ("dataloader_idx",)
        if not _accepts(method, len(arguments)) and not (fewer and _accepts(method, len(arguments) - 1)):
            raise _not_callable(owner, name, arguments)


def _not_callable(owner: object, name: str, arguments: tuple[str, ...]) -> HookError:
    assigned = name in vars(owner)  # a function that does not get the object
    received = inspect.signature(getattr(owner if assigned else type(owner), name))
    several = "optimizer_idx" in received.parameters
    return HookError(
        f"{type(owner).__name__}.{name} cannot be called. Expected: "
        f"def {name}({', '.join(arguments if assigned else ('self', *arguments))}); received: def {name}{received}"
        + ("; for several optimizers use manual optimization: self.automatic_optimization = False" if several else "")
    )


def _accepts(method: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(method).bind(*(None,) * count)
    except TypeError:
        return False
    except ValueError:  # a callable without a readable signature
        return True
    return True


def _entry(
    owner: Any, name: str, arguments: tuple[str, ...], trainer: Trainer, module: TrainModule, several_loaders: bool
) -> Callable[..., Any] | None:
    """What is called for one owner and hook, or ``None`` if he does not override it."""
    is_module = owner is module
    base: type = _module_base() if is_module else Callback
    if not hasattr(base, name) or not is_overridden(owner, name, base):
        return None
    method: Callable[..., Any] = getattr(owner, name)
    if not is_module:
        method = partial(method, trainer, module)
    if arguments[-1:] == ("dataloader_idx",) and not _accepts(method, len(arguments)):
        if several_loaders:
            raise HookError(
                f"{type(owner).__name__}.{name} must take dataloader_idx, as there are several loaders: "
                f"def {name}(self, {', '.join(arguments)})"
            )
        return _without_last(method)
    return method


def _without_last(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return method(*arguments[:-1])

    return call


def _module_base() -> type:
    from trainkit.module.train_module import TrainModule

    return TrainModule
