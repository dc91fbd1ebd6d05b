"""``HookTable``: which object overrides which hook, worked out once per run.

A call site in the loop is ``for hook in hooks.on_train_batch_end: hook(...)`` over a tuple of bound methods; a callback that
does not override a hook is not in its tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.errors import HookError
from trainkit.hooks.hook_checks import accepts
from trainkit.hooks.hook_names import HOOKS
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule

__all__ = ["HookTable"]


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
        timed: called with "Owner.hook" and the bound method, returns what is called in its place: how a profiler times hooks.

    Raises:
        HookError: a hook is misspelt, removed or cannot be called with its arguments.
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
                    entries.append(entry if timed is None else timed(f"{owners[-1]}.{name}", entry))
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


def _entry(
    owner: Any, name: str, arguments: tuple[str, ...], trainer: object, module: TrainModule, several_loaders: bool
) -> Callable[..., Any] | None:
    """What is called for one owner and hook, or ``None`` if it does not override it."""
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
                f"{type(owner).__name__}.{name} must take dataloader_idx, as there are several loaders: "
                f"def {name}(self, {', '.join(arguments)})"
            )
        return lambda *given: method(*given[:-1])
    return method
