"""`GatheredSteps`: steps of an optimizer that needs whole parameters, such as Muon, over sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainkit.distributed.world import World
from trainkit.errors import OptimizerError
from trainkit.optim.whole_parameters import StepTrial
from trainkit.strategies._whole_steps import Parts, WholeStep, set_numbers, step_in_rounds, step_whole, try_whole
from trainkit.strategies.fsdp.sharded_model import Shards

__all__ = ["GatheredSteps", "find_gathered"]


class Gathered(NamedTuple):
    """A parameter that is stepped whole.

    Attributes:
        parameter: The parameter.
        group: The number of its group.
        trial: What its state consists of.
    """

    parameter: DTensor
    group: int
    trial: StepTrial


def find_gathered(optimizer: Optimizer) -> list[Gathered]:
    """The sharded parameters whose steps need them whole, as trials with tiny parameters show.

    Raises:
        OptimizerError: A step depends on several parameters together, or its state cannot be sharded like the parameter.
    """
    trials: dict[tuple[int, int, torch.dtype], StepTrial] = {}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor) or not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # Of the others there are no gradients.
            key = number, parameter.ndim, parameter.dtype
            if key not in trials:
                trials[key] = try_whole(optimizer, group, parameter.ndim, parameter.dtype, parameter.device)
            if not trials[key].elementwise:
                found.append(Gathered(parameter, number, trials[key]))
    return found


class GatheredSteps:
    """Steps parameters whole on one rank each, and shards the results. Those of similar size are in the same round.

    It hooks the optimizer, whose own `step` then finds no gradient for these parameters and steps the others.

    Args:
        optimizer: Over sharded parameters.
        gathered: What `find_gathered` has found.
        world: The ranks.
        shards_of: Where the parts of a parameter lie.
    """

    def __init__(
        self, optimizer: Optimizer, gathered: Iterable[Gathered], world: World, shards_of: Callable[[Tensor], Shards]
    ) -> None:
        self._optimizer = optimizer
        self._gathered = sorted(gathered, key=lambda one: -one.parameter.numel())
        self._world = world
        self._shards_of = shards_of
        self._gradients: list[tuple[DTensor, Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(self._restore_gradients),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise OptimizerError(
                f"{type(optimizer).__name__}.step(closure) does not work on sharded parameters, which it steps whole: the "
                "closure would compute other gradients. Compute the loss before, and call step() without a closure."
            )
        due = [one for one in self._gathered if one.parameter.grad is not None]
        numbers = step_in_rounds([self._prepare(one) for one in due], self._world)
        for one, values in zip(due, numbers, strict=True):
            set_numbers(self._optimizer.state[one.parameter], one.trial.numbers, values)
        self._gradients = [(one.parameter, one.parameter.grad) for one in due if one.parameter.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _restore_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def _prepare(self, one: Gathered) -> WholeStep:
        """The step of a parameter. The first one creates its state."""
        parameter, state = one.parameter, self._optimizer.state[one.parameter]
        before = dict(state)
        for slot, dtype in one.trial.tensors.items():
            if slot not in state:
                state[slot] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        inputs = [parameter, parameter.grad, *(before[slot] for slot in one.trial.tensors if slot in before)]
        # The mesh's device is the one that communicates: an offloaded part is on the host.
        device = torch.device(parameter.device_mesh.device_type)
        return WholeStep(
            Parts(parameter.shape, self._shards_of(parameter).places(parameter), device),
            [_part(tensor) for tensor in inputs],
            [_part(tensor) for tensor in (parameter, *(state[slot] for slot in one.trial.tensors))],
            len(one.trial.numbers),
            partial(self._step_whole, one, before),
        )

    def _step_whole(self, one: Gathered, before: dict[str, Any], wholes: list[Tensor]) -> tuple[list[float], list[Tensor]]:
        return step_whole(self._optimizer, self._optimizer.param_groups[one.group], wholes, before, one.trial)


def _part(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local()
    return part.detach()
