"""The names and arguments of all hooks and other methods that users override, and `HookTable`: which object overrides which.

The table is made once per run. A call in the loop is `for hook in hooks.on_train_batch_end: hook(...)` over a tuple of bound
methods, with only those callbacks that override the hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.errors import HookError
from trainkit.module.overridable_hooks import DataHooks, ModuleHooks, is_overridden
from trainkit.module.train_module import TrainModule

__all__ = ["DATA_METHODS", "HOOKS", "MODULE_METHODS", "STATE_METHODS", "STEPS", "HookTable", "accepts"]


def _arguments(owner: type, names: Iterable[str], skipped: int = 1) -> dict[str, tuple[str, ...]]:
    """Method → names of its arguments, without the first ones."""
    fixed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    signatures = {name: inspect.signature(getattr(owner, name)).parameters.values() for name in names}
    return {name: tuple(one.name for one in params if one.kind in fixed)[skipped:] for name, params in signatures.items()}


def _methods(owner: type) -> list[str]:
    """The public methods that a class itself defines."""
    return [name for name, member in vars(owner).items() if inspect.isfunction(member) and not name.startswith("_")]


_SETUP = ("setup", "teardown")

# Hook → names of the arguments after (trainer, module). The module's own hooks take the same without these two.
HOOKS = _arguments(Callback, [name for name in _methods(Callback) if name.startswith("on_") or name in _SETUP], skipped=3)

# Method → names of its arguments, of callbacks, of data modules and modules, and of modules only.
STATE_METHODS = _arguments(Callback, ["state_dict", "load_state_dict"])
DATA_METHODS = _arguments(DataHooks, [name for name in _methods(DataHooks) if name not in _SETUP])
MODULE_METHODS = {
    **DATA_METHODS,
    **_arguments(ModuleHooks, [name for name in _methods(ModuleHooks) if name not in HOOKS]),
    **_arguments(TrainModule, ["configure_optimizers", "configure_gradient_clipping"]),
}
# A step may omit arguments from the right.
STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("batch", "batch_idx"),
    **{f"{stage}_step": ("batch", "batch_idx", "dataloader_idx") for stage in ("validation", "test", "predict")},
}


class HookTable:
    """For each hook a tuple of functions in the order of their calls: callbacks, the module, callbacks that run last.

    Each function is called with the arguments of the hook; trainer and module are bound.

    Args:
        trainer: The trainer.
        module: The user's module.
        callbacks: The attached callbacks.
        inserted: Hook → a function to call between the module and the callbacks that run last: it completes the metrics of an
            epoch, so that monitors see them.
        several_loaders: An evaluation has several loaders, so that its batch hooks must take `dataloader_idx`.
        timed: Called with "Owner.hook" and the bound method; returns the function to call instead, as profilers do.

    Raises:
        HookError: A batch hook of an evaluation with several loaders does not take `dataloader_idx`.

    Attributes:
        owners: Hook → names of the classes that override it, in the order of their calls.
        early: Hooks that the module or a callback that does not run last overrides.
    """

    def __init__(
        self,
        trainer: object,
        module: TrainModule,
        callbacks: Iterable[Callback],
        *,
        inserted: Mapping[str, Callable[[], Any]] | None = None,
        several_loaders: bool = False,
        timed: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        callbacks = list(callbacks)
        early: list[Any] = [*(c for c in callbacks if not c.runs_last), module]
        late: list[Any] = [c for c in callbacks if c.runs_last]
        self.owners: dict[str, tuple[str, ...]] = {}
        self.early: set[str] = set()
        for name, arguments in HOOKS.items():
            entries: list[Callable[..., Any]] = []
            owners: list[str] = []
            for owner in [*early, None, *late]:
                if owner is None:
                    self.early |= {name} if entries else set()
                    entries += [inserted[name]] if inserted and name in inserted else []
                    continue
                entry = _entry(owner, name, arguments, trainer, module, several_loaders)
                if entry is not None:
                    owners.append(type(owner).__name__)
                    entries.append(entry if timed is None else timed(f"{owners[-1]}.{name}", entry))
            setattr(self, name, tuple(entries))
            self.owners[name] = tuple(owners)

    @classmethod
    def nothing(cls) -> HookTable:
        """An empty table, for a run whose callbacks are not known yet."""
        table = cls.__new__(cls)
        table.owners = dict.fromkeys(HOOKS, ())
        table.early = set()
        for name in HOOKS:
            setattr(table, name, ())
        return table

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]: ...

    def run(self, name: str, *arguments: Any) -> None:
        """Call all functions of a hook; for hooks outside of the training step."""
        for hook in getattr(self, name):
            hook(*arguments)


def _entry(
    owner: Any, name: str, arguments: tuple[str, ...], trainer: object, module: TrainModule, several_loaders: bool
) -> Callable[..., Any] | None:
    """The function to call for an owner and a hook; `None` if it does not override the hook."""
    is_module = owner is module
    base: type = TrainModule if is_module else Callback
    if not hasattr(base, name) or not is_overridden(owner, name, base):
        return None
    method: Callable[..., Any] = getattr(owner, name)
    if not is_module:
        method = partial(method, trainer, module)
    if arguments[-1:] == ("dataloader_idx",) and not accepts(method, len(arguments)):
        if several_loaders:
            raise HookError(
                f"{type(owner).__name__}.{name} must take dataloader_idx, because there are several loaders: "
                f"def {name}(self, {', '.join(arguments)})"
            )
        return lambda *values: method(*values[:-1])
    return method


def accepts(method: Callable[..., Any], count: int) -> bool:
    """Whether a method can be called with `count` positional arguments."""
    try:
        inspect.signature(method).bind(*(None,) * count)
    except TypeError:
        return False
    except ValueError:  # a callable without a readable signature
        return True
    return True
