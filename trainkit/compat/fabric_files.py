"""Files of `Fabric.save`: a dict whose models and optimizers are stored by the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.checkpointing import VerbGroup
from trainkit.accelerator.prepared_models import user_model
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.tensor_file import split_tied
from trainkit.checkpoint.torch_file import load
from trainkit.console import notice
from trainkit.errors import CorruptCheckpointError, StateMismatchError
from trainkit.optim.parameter_names import parameter_names
from trainkit.optim.prepared import PreparedOptimizer
from trainkit.state.model import ModelState, capture_model, plan_model
from trainkit.state.optimizer import capture_optimizer, plan_optimizer
from trainkit.strategy import Strategy
from trainkit.tagged_json.tensors import is_sharded_tensor

__all__ = ["UserState", "read_on_each_rank"]

_FORM = ("described", "tensors", "dtypes")  # the keys of a stored optimizer


class UserState:
    """The state dict of a `Fabric` script as a file stores it, whatever the strategy.

    Args:
        strategy: The strategy of the run.
        prepared: The models that were set up, without wrappers.
        state: The user's dict.
    """

    def __init__(self, strategy: Strategy, prepared: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        self._strategy = strategy
        self._prepared = prepared
        self._state = state
        # Sorted, so that the names of parameters depend on neither the order of the dict nor that of the set-up.
        listed = [user_model(value, strategy) for _, value in sorted(state.items()) if isinstance(value, nn.Module)]
        self._models = list({id(model): model for model in (*listed, *prepared)}.values())
        self._names = parameter_names(self._models)

    def content(self) -> dict[str, Any]:
        """What the file contains. Collective if parameters or optimizer state are sharded; complete on the main process."""
        return {key: self._content_of(value) for key, value in self._state.items()}

    def plan(self, saved: Mapping[str, Any], what: str, strict: bool) -> Callable[[], None]:
        """Compare the content of a file with the models and optimizers here. Returns a function that loads it.

        Raises:
            StateMismatchError: Something does not fit; nothing was changed.
        """
        if strict and (missing := [key for key in self._state if key not in saved]):
            raise StateMismatchError(
                f"{what} has no {', '.join(map(repr, missing))}, which the state dict asks for; it has {', '.join(saved)}. "
                "Nothing was changed. Fix: load with the keys of the save, or fabric.load(path, state, strict=False)"
            )
        present = {key: value for key, value in self._state.items() if key in saved}
        loads = [
            load for key, value in present.items() for load in self._plans_of(value, saved[key], f"{what}: {key!r}", strict)
        ]
        optimizers = [_torch_optimizer(value) for value in present.values() if isinstance(value, Optimizer)]

        def restore() -> None:
            for text in [text for apply in loads for text in apply()]:
                notice(text)
            self._strategy.restored(optimizers)
            for key, value in present.items():
                if not isinstance(value, nn.Module | Optimizer) and hasattr(value, "load_state_dict"):
                    value.load_state_dict(saved[key])

        return restore

    def _content_of(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            model = user_model(value, self._strategy)
            captured = capture_model(model, placeholders=self._placeholders(model))
            tensors = _whole(captured.tensors)
            return {**captured.extra, **tensors, **{alias: tensors[name] for alias, name in captured.aliases.items()}}
        if isinstance(value, Optimizer):
            optimizer = _torch_optimizer(value)
            stored = self._strategy.stored_optimizer(optimizer)
            whole, names = (optimizer, self._names) if stored is None else (stored.optimizer, stored.names(self._names))
            state = capture_optimizer(whole, 0, names)
            dtypes = {names[id(p)]: p.dtype for group in whole.param_groups for p in group["params"]}
            return dict(zip(_FORM, (state.described, _whole(state.tensors), dtypes), strict=True))
        return value.state_dict() if hasattr(value, "state_dict") else value

    def _plans_of(self, value: Any, saved: Any, what: str, strict: bool) -> Iterator[Callable[[], list[str]]]:
        if isinstance(value, nn.Module):
            yield self.plan_of_model(value, saved, what, strict)
        elif isinstance(value, Optimizer):
            yield self.plan_of_optimizer(value, saved, what, strict)

    def plan_of_model(self, value: nn.Module, saved: Any, what: str, strict: bool) -> Callable[[], list[str]]:
        """A function that loads a state dict into a model."""
        if not isinstance(saved, Mapping):
            raise CorruptCheckpointError(f"{what}: expected the state dict of a model, found {type(saved).__name__}.")
        model = user_model(value, self._strategy)
        tensors = {n: v for n, v in saved.items() if isinstance(v, Tensor) and not n.endswith("_extra_state")}
        extra = {name: one for name, one in saved.items() if name not in tensors}
        state = ModelState(*split_tied(tensors), extra)
        return plan_model(
            model,
            state,
            strict=strict,
            what=what,
            placeholders=self._placeholders(model),
            load_placeholders=self._strategy.load_weights,
        )

    def plan_of_optimizer(self, value: Optimizer, saved: Any, what: str, strict: bool) -> Callable[[], list[str]]:
        """A function that loads the stored state of an optimizer."""
        if not isinstance(saved, Mapping) or sorted(saved) != sorted(_FORM):
            raise CorruptCheckpointError(
                f"{what}: expected the state of an optimizer as Fabric.save writes it. Fix: leave its key out of the state dict"
            )
        described, tensors, dtypes = (saved[key] for key in _FORM)
        optimizer, strategy = _torch_optimizer(value), self._strategy
        stored = strategy.stored_optimizer(optimizer)
        if stored is not None:
            stored.check(described, what)
        whole, names = (optimizer, self._names) if stored is None else (stored.optimizer, stored.names(self._names))
        apply = plan_optimizer(whole, 0, names, tensors, described, dtypes, what, keep=True, strict=strict)
        if stored is None:
            return apply

        def load_stored() -> list[str]:
            notices = apply()
            strategy.load_optimizer(optimizer, stored)
            return notices

        return load_stored

    def _placeholders(self, model: nn.Module) -> Mapping[int, Tensor] | None:
        prepared = any(model is one for one in self._prepared)
        return self._strategy.stored_weights(model) if prepared else None


def read_on_each_rank(group: VerbGroup, path: Any) -> Any:
    """The content of a file, which every process reads. An error on one process is raised on all."""
    read: list[Any] = []
    run_on_all_ranks(group, lambda: read.append(load(path)))
    return read[0]


def _torch_optimizer(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Sharded tensors gathered to the main process's host memory, one at a time; elsewhere they have no values."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = tensor.collect(0) if is_sharded_tensor(tensor) else tensor
        whole[name] = tensor if gathered is None else gathered.cpu() if is_sharded_tensor(tensor) else gathered
    return whole
