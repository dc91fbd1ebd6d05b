"""`WholeSteps`: steps of an optimizer that needs whole parameters, such as Muon, over flat shards of the master weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.distributed.world import World
from trainkit.errors import OptimizerError
from trainkit.optim.whole_parameters import StepTrial
from trainkit.strategies._whole_steps import Parts, WholeStep, set_numbers, step_in_rounds, step_whole
from trainkit.strategies.zero.engine import TrainingEngine
from trainkit.strategies.zero.stored_state import Ranges, flat_positions

__all__ = ["WholeSteps"]

Member = tuple[torch.Size, Ranges, int, int]


class WholeSteps:
    """Steps the parameters in a flat shard whole on one rank each, and shards the results.

    Args:
        engine: The engine with the flat shards.
        world: The ranks.
        device: Where the ranks communicate, and the steps run.
    """

    def __init__(self, engine: TrainingEngine, world: World, device: torch.device) -> None:
        self._state = engine.shadow.inner.state
        self._world = world
        self._device = device
        self._members: dict[int, list[Member]] = {}  # The parameters in each flat shard, large ones first.
        flats = engine.flats
        for parameter, number, ranges, first, last in flat_positions(engine):
            shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
            self._members.setdefault(id(flats[number]), []).append((shape, ranges, first, last))
        for members in self._members.values():
            members.sort(key=lambda member: -member[0].numel())

    @torch.no_grad()
    def step(self, optimizer: Optimizer, group: dict[str, Any], trial: StepTrial) -> None:
        """Step the parameters in the flat shard of a group. Collective.

        Raises:
            OptimizerError: Its state has a number that differs between parameters, for which a flat shard has one place.
        """
        for flat in group["params"]:
            state = self._state[flat]
            before = dict(state)
            for slot, dtype in trial.tensors.items():
                if slot not in state:
                    state[slot] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
            inputs = [flat, flat.grad, *(before[slot] for slot in trial.tensors if slot in before)]
            outputs = [flat, *(state[slot] for slot in trial.tensors)]
            steps = [
                WholeStep(
                    Parts(torch.Size([shape.numel()]), [(one,) for one in ranges], self._device),
                    [_part(tensor, first, last) for tensor in inputs],
                    [_part(tensor, first, last) for tensor in outputs],
                    len(trial.numbers),
                    partial(self._step_whole, optimizer, group, shape, before, trial),
                )
                for shape, ranges, first, last in self._members[id(flat)]
            ]
            numbers = step_in_rounds(steps, self._world)
            if any(one != numbers[0] for one in numbers):
                raise OptimizerError(
                    f"{type(optimizer).__name__} does not work under ZeRO: its state ({', '.join(trial.numbers)}) has a number "
                    "that differs between parameters, and ZeRO keeps one for all parameters of a group. Use strategy='fsdp'."
                )
            set_numbers(state, trial.numbers, numbers[0])

    @staticmethod
    def _step_whole(
        optimizer: Optimizer,
        group: dict[str, Any],
        shape: torch.Size,
        before: dict[str, Any],
        trial: StepTrial,
        wholes: list[Tensor],
    ) -> tuple[list[float], list[Tensor]]:
        numbers, results = step_whole(optimizer, group, [whole.view(shape) for whole in wholes], before, trial)
        return numbers, [result.reshape(-1) for result in results]


def _part(flat: Tensor, first: int, last: int) -> Tensor:
    return flat.detach().view(-1)[first:last]
