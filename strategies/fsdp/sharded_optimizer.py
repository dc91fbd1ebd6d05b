"""Optimizers over sharded parameters: given the parameters of the sharded model, and saved and loaded as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainkit.errors import OptimizerError
from trainkit.optim.stored_optimizer import StoredOptimizer, placeholder_parameter
from trainkit.strategies._quantized import quantizes
from trainkit.strategies.fsdp.sharded_model import ShardedModel
from trainkit.strategies.fsdp.sharded_models import ShardedModels

__all__ = ["check_optimizer", "load_optimizer", "refuse_optimizer", "stored_optimizer", "use_sharded_parameters"]

# torch has no sharding rule for what these compute
_REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
_NOT_FUSED = (torch.optim.SGD, torch.optim.Adagrad)


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose steps cannot be computed on parts of a parameter.

    Raises:
        OptimizerError: it is one of those.
    """
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _REFUSED), None)
    if name is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__} does not work on sharded parameters: torch cannot compute a step of {name} on parts "
            "of a parameter. Use torch.optim.AdamW, or strategy='ddp'."
        )
    if any(map(quantizes, type(optimizer).__mro__)):
        raise OptimizerError(
            f"{type(optimizer).__name__} does not work under FSDP: it quantizes blocks of its state, which would be other "
            "blocks than those of whole parameters. Use torch.optim.AdamW, or strategy='ddp'."
        )


def check_optimizer(optimizer: Optimizer, scaled: bool) -> None:
    """Refuse an optimizer that does not work on sharded parameters.

    Args:
        optimizer: over sharded parameters, and possibly whole ones.
        scaled: the loss is scaled.

    Raises:
        OptimizerError: it is one of those, or has both kinds of parameters where torch cannot compute with them together.
    """
    refuse_optimizer(optimizer)
    kinds = {isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]}
    if scaled and len(kinds) > 1:
        raise OptimizerError(
            "the loss scaler of torch cannot unscale the gradients of sharded parameters and of whole ones (scalars and "
            "ignored_modules) together. Use precision='bf16-mixed', or 32-true."
        )
    for number, group in enumerate(optimizer.param_groups):
        sharded = {isinstance(parameter, DTensor) for parameter in group["params"]}
        option = next((option for option in ("foreach", "fused") if group.get(option)), None)
        if True in sharded and option == "fused" and isinstance(optimizer, _NOT_FUSED):
            raise OptimizerError(
                f"{type(optimizer).__name__}(fused=True) does not work on sharded parameters: torch has no rule for its fused "
                "step. Remove fused=True, or use torch.optim.AdamW(fused=True)."
            )
        if len(sharded) > 1 and option is not None:
            raise OptimizerError(
                f"group {number} of {type(optimizer).__name__} has sharded parameters and whole ones, which torch cannot step "
                f"together with {option}=True. Put the whole ones (scalars and ignored_modules) into a group of their own."
            )


def use_sharded_parameters(optimizer: Optimizer, models: ShardedModels) -> None:
    """Let an optimizer, which was made before its model was sharded, step the sharded parameters. Its state is kept.

    Raises:
        OptimizerError: it was made during a forward.
    """
    owners = _owners(models)
    _refuse_lent(optimizer, {key for model in models for key in model.lent})
    state = {}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            current = parameter
            for one in models.replaced:
                current = one.current(current)
            group["params"][place] = current
            if parameter in optimizer.state:
                own, model = optimizer.state.pop(parameter), owners.get(id(current))
                state[current] = own if model is None or current is parameter else _sharded_state(own, current, model)
    optimizer.state.update(state)


def _refuse_lent(optimizer: Optimizer, lent: set[int]) -> None:
    if any(id(parameter) in lent for group in optimizer.param_groups for parameter in group["params"]):
        raise OptimizerError(
            f"{type(optimizer).__name__} was made while the model had whole parameters, during a forward or a method of the "
            "prepared model. They are freed after it, so the optimizer would train nothing. Make it before: "
            "optimizer = torch.optim.AdamW(model.parameters()); model, optimizer = accelerator.prepare(model, optimizer)"
        )


def _owners(models: Iterable[ShardedModel]) -> dict[int, ShardedModel]:
    return {id(parameter): model for model in models for parameter in model.sharded}


def _sharded_state(state: dict[str, Any], parameter: Any, model: ShardedModel) -> dict[str, Any]:
    """Whole tensors of the parameter's shape become sharded ones."""

    def sharded(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or value.shape != parameter.shape:
            return value
        return _shard_of(value, parameter, model)

    return {slot: sharded(value) for slot, value in state.items()}


def _shard_of(whole: Tensor, parameter: DTensor, model: ShardedModel) -> Any:
    """A tensor that is sharded like a parameter, with this rank's part of a whole one."""
    made: Any = torch.empty_like(parameter, dtype=whole.dtype, requires_grad=False)
    model.shards.load(made, parameter, whole)
    return made


def stored_optimizer(optimizer: Optimizer, models: Iterable[ShardedModel]) -> StoredOptimizer:
    """The optimizer with whole parameters and whole state, which is gathered when the checkpoint is written."""
    owners = _owners(models)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stored = StoredOptimizer(optimizer, {id(p): placeholder_parameter(p.shape, p.dtype) for p in parameters})
    for parameter in parameters:
        model = owners.get(id(parameter))
        slots = {
            slot: _stored(slot, value, parameter, model, optimizer) if model is not None else value
            for slot, value in optimizer.state.get(parameter, {}).items()
        }
        if slots:
            stored.optimizer.state[stored.placeholders[id(parameter)]] = slots
    return stored


def _stored(slot: str, value: Any, parameter: Tensor, model: ShardedModel, optimizer: Optimizer) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        raise OptimizerError(
            f"{type(optimizer).__name__} has sharded state of another shape than its parameter ({slot}: {tuple(value.shape)}, "
            f"the parameter: {tuple(parameter.shape)}), which FSDP cannot save. Use torch.optim.AdamW, or strategy='ddp'."
        )
    return model.shards.sharded_tensor(value, parameter)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, stored: StoredOptimizer, models: Iterable[ShardedModel]) -> None:
    """Copy this rank's parts of whole state into the optimizer."""
    stored.copy_options()
    owners = _owners(models)
    state = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            slots, model = stored.state(parameter), owners.get(id(parameter))
            if slots:
                state[parameter] = {slot: _loaded(slot, v, parameter, model, on_device) for slot, v in slots.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


def _loaded(slot: str, value: Any, parameter: Any, model: ShardedModel | None, on_device: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim and value.shape == parameter.shape and model is not None:
        return _shard_of(value, parameter, model)
    if value.ndim or (slot == "step" and on_device):
        return value.to(parameter.device, copy=True)
    return value.clone()
