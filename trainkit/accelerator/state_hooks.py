"""`StateHooks`: functions of the user that `save_state` and `load_state` call, to save and load models in their own way."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainkit.checkpoint.commit import make_hook_folder
from trainkit.checkpoint.hook_files import HookFiles
from trainkit.checkpoint.ranks import SHARED_FOLDER_ADVICE, Group, run_on_all_ranks, wait_for_path
from trainkit.errors import CheckpointError, CheckpointWriteError, CollectiveError, ConfigurationError, HookError
from trainkit.module.hook_table import accepts

__all__ = ["LoadHook", "SaveHook", "SavedByHooks", "StateHooks"]

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
"""`hook(models, weights, output_dir)`"""
LoadHook = Callable[[list[nn.Module], str], Any]
"""`hook(models, input_dir)`"""


class SavedByHooks(NamedTuple):
    """What the hooks of `save_state` have done.

    Attributes:
        files: The files that they have written, on the main process.
        models: The indices of the models whose weights they have removed from the list.
    """

    files: HookFiles | None = None
    models: Sequence[int] = ()


class StateHooks:
    """The hooks of `save_state` and `load_state`, in the order in which they were registered."""

    def __init__(self) -> None:
        self._save: OrderedDict[int, SaveHook] = OrderedDict()
        self._load: OrderedDict[int, LoadHook] = OrderedDict()

    def register_save(self, hook: SaveHook) -> RemovableHandle:
        """See `Accelerator.register_save_state_pre_hook`."""
        return _register(self._save, hook, "register_save_state_pre_hook", ("models", "weights", "output_dir"))

    def register_load(self, hook: LoadHook) -> RemovableHandle:
        """See `Accelerator.register_load_state_pre_hook`."""
        return _register(self._load, hook, "register_load_state_pre_hook", ("models", "input_dir"))

    @property
    def saves(self) -> bool:
        """Whether there is a hook of `save_state`."""
        return bool(self._save)

    @property
    def loads(self) -> bool:
        """Whether there is a hook of `load_state`."""
        return bool(self._load)

    def save(
        self, group: Group, models: Sequence[nn.Module], weights: list[dict[str, Any]], target: Path, run_id: str
    ) -> SavedByHooks:
        """Run the hooks of `save_state` on all ranks of a group. Collective.

        Args:
            group: The ranks.
            models: The models.
            weights: Their state dicts; empty if hooks cannot save the models instead of us.
            target: The folder of the checkpoint, as given on the main process.
            run_id: The run that saves it.

        Raises:
            CheckpointWriteError: A hook has failed; nothing is left of what it has written.
            CheckpointError: A hook has written something that a checkpoint cannot contain.
        """

        def create() -> str | None:
            return str(make_hook_folder(target, run_id)) if group.rank == 0 else None

        folder = Path(run_on_all_ranks(group, create, CheckpointWriteError))
        files: list[HookFiles] = []

        def finish(removed: list[list[int]]) -> list[int]:
            files.append(HookFiles(folder))
            return removed[0]  # the main process is the one that writes models

        try:
            removed = _run(group, lambda: self._call_save(models, weights, folder), finish)
        except BaseException:
            if group.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return SavedByHooks(files[0] if files else None, removed)

    def save_aside(self, models: Sequence[nn.Module], weights: list[dict[str, Any]]) -> None:
        """Run the hooks of `save_state` on a process that does not write, since the main process saves alone.

        Raises:
            CheckpointWriteError: A hook has failed, or has written a file, which would be lost.
        """
        with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
            self._call_save(models, weights, Path(folder))
            written = [str(path.relative_to(folder)) for path in sorted(Path(folder).rglob("*")) if not path.is_dir()]
        if written:
            raise CheckpointWriteError(
                f"save_state: a hook has written {', '.join(map(repr, written[:3]))} on a process that is not the main "
                "process. Here the main process saves without the others, so these files would be lost. Fix: write them under "
                "if accelerator.is_main_process:"
            )

    def _call_save(self, models: Sequence[nn.Module], weights: list[dict[str, Any]], folder: Path) -> list[int]:
        """Call the hooks. Returns the indices of the models whose weights they have removed."""
        if not wait_for_path(folder):
            raise CheckpointWriteError(
                f"this process cannot see the folder {folder}, which the main process created. {SHARED_FOLDER_ADVICE}"
            )
        left = list(weights)
        before = [dict(one) for one in weights]
        for hook in list(self._save.values()):
            call = partial(hook, list(models), left, str(folder))
            _call("save_state", call, hook, CheckpointWriteError, empty=not weights)
        return _removed(weights, before, left)

    def load(self, group: Group, models: Sequence[nn.Module], folder: Path) -> list[int]:
        """Run the hooks of `load_state` on all ranks of a group. Collective.

        Args:
            group: The ranks.
            models: The models that they may load.
            folder: The checkpoint.

        Returns:
            The indices of the models that hooks have removed from the list, because they have loaded them.

        Raises:
            CheckpointError: A hook has failed, or has removed other models on other ranks.
        """

        def call() -> list[int]:
            left = list(models)
            for hook in list(self._load.values()):
                _call("load_state", partial(hook, left, str(folder)), hook, CheckpointError)
            return [number for number, model in enumerate(models) if all(model is not one for one in left)]

        def compare(by_rank: list[list[int]]) -> list[int]:
            if differing := [str(rank) for rank, removed in enumerate(by_rank) if removed != by_rank[0]]:
                raise CheckpointError(
                    f"load_state: a hook has removed other models from its list on rank {', '.join(differing)} than on rank 0. "
                    "Expected: it loads the same models on all ranks. Fix: remove `if accelerator.is_main_process:` around "
                    "models.pop()"
                )
            return by_rank[0]

        return _run(group, call, compare)


def _register(hooks: OrderedDict[int, Any], hook: Any, verb: str, arguments: Sequence[str]) -> RemovableHandle:
    if not callable(hook) or not accepts(hook, len(arguments)):
        raise HookError(
            f"{verb} needs a function that can be called with {len(arguments)} arguments, not {hook!r}. Fix: "
            f"def hook({', '.join(arguments)}): ..."
        )
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _run(group: Group, call: Callable[[], list[int]], answer: Callable[[list[list[int]]], list[int]]) -> list[int]:
    """Call hooks on all ranks, and let all have the answer or an error. A hook may call verbs of all ranks itself."""
    failure: list[BaseException] = []
    result: list[int] = []
    try:
        result = call()
    except CollectiveError:  # all ranks have it
        raise
    except BaseException as error:
        failure.append(error)

    def report() -> list[int]:
        if failure:
            raise failure[0]
        return result

    try:
        numbers: list[int] = run_on_all_ranks(group, report, CheckpointError, answer)
    except CollectiveError:  # the others are in a verb that the hook calls, and this process has not come to it
        if failure:
            raise failure[0] from failure[0].__cause__
        raise
    return numbers


def _call(verb: str, call: Callable[[], Any], hook: Any, kind: type[CheckpointError], empty: bool = False) -> None:
    """Call a hook; `empty`: it gets an empty list of weights."""
    try:
        call()
    except CollectiveError:
        raise
    except Exception as error:
        what = "No checkpoint was written." if kind is CheckpointWriteError else "The checkpoint was not loaded."
        fix = "correct the hook"
        if empty and isinstance(error, IndexError):
            fix = "if weights: weights.pop(). Under FSDP and DeepSpeed the list of weights is empty, as in Accelerate"
        raise kind(f"{verb}: the hook {_name(hook)} raised {type(error).__name__}: {error}. {what} Fix: {fix}") from error


def _name(hook: Any) -> str:
    """The name of a hook and the line of its definition, as far as they can be found."""
    function = inspect.unwrap(hook.func if isinstance(hook, partial) else hook)
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}{place}"


def _removed(weights: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], left: Sequence[dict[str, Any]]) -> list[int]:
    """The indices of the state dicts that hooks have removed from the list `left`; they may change nothing else.

    Raises:
        ConfigurationError: They have changed one, or added another.
    """
    changed = any(all(one is not given for given in weights) for one in left) or any(
        one.keys() != as_given.keys() or any(one[name] is not as_given[name] for name in one)
        for one, as_given in zip(weights, before, strict=True)
        if any(one is kept for kept in left)
    )
    if changed:
        raise ConfigurationError(
            "save_state: a hook has changed the weights that it got. Expected: it removes the state dict of a model from the "
            "list, or leaves it as it is, since the checkpoint stores the weights of the model. Fix: write other weights to a "
            "file in output_dir, and remove those of the model: weights.pop()"
        )
    return [number for number, one in enumerate(weights) if all(one is not kept for kept in left)]
