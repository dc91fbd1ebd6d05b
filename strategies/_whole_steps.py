"""Steps parameters whole, of which each rank has a part only: for optimizers such as Muon, whose step needs whole matrices.

In each round every rank gathers one parameter, with its gradient and its state, steps it, and sends each rank its part of the
new values. So a rank never has more than one whole parameter, and the steps of a round run at the same time on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.parameter_placement import Range, part_at, whole_shape
from trainkit.distributed.world import World
from trainkit.errors import OptimizerError
from trainkit.optim.optimizer_copy import trial_copy
from trainkit.optim.whole_parameters import StepTrial, try_step
from trainkit.strategy import Contents

__all__ = ["Parts", "WholeStep", "largest_gathered", "senders", "set_numbers", "step_in_rounds", "step_whole", "try_whole"]


def try_whole(optimizer: Optimizer, group: dict[str, Any], dims: int, dtype: torch.dtype, device: torch.device) -> StepTrial:
    """What `try_step` shows about an optimizer of sharded parameters.

    Raises:
        OptimizerError: A step depends on several parameters together, its state cannot be sharded like the parameter, or it
            cannot be tried.
    """
    name = type(optimizer).__name__
    try:
        trial = try_step(optimizer, group, dims, dtype, device)
    except Exception as error:
        raise OptimizerError(
            f"{name} does not work on sharded parameters: its step could not be tried on a small parameter, so it is unknown "
            f"whether it computes on parts what it computes on whole parameters ({type(error).__name__}: {error}). Use "
            "torch.optim.AdamW, or strategy='ddp'."
        ) from error
    if trial.elementwise or (trial.independent and not trial.odd):
        return trial
    if trial.odd:
        why = f"its state ({', '.join(trial.odd)}) has neither the shape of the parameter nor is it a number"
    else:
        why = "its step depends on several parameters together, on random numbers, or changes options of the group"
    raise OptimizerError(
        f"{name} does not work on sharded parameters: it needs whole ones, and {why}. Use torch.optim.AdamW or "
        "torch.optim.Muon, or strategy='ddp'."
    )


def largest_gathered(contents: Contents) -> int:
    """Bytes of the largest parameter that a rank steps whole, with its gradient and its state; 0 without such an optimizer.

    Raises:
        OptimizerError: See `try_whole`.
    """
    # Without modules it is unknown which optimizer has which parameter.
    weights = dict(zip(map(id, nn.ModuleList(contents.modules).parameters()), contents.weights, strict=False))
    largest = 0
    for optimizer in contents.optimizers:
        for group in optimizer.param_groups:
            trials: dict[tuple[int, torch.dtype], bool] = {}
            for parameter in group["params"]:
                weight, key = weights.get(id(parameter)), (max(len(whole_shape(parameter)), 1), parameter.dtype)
                if weight is None or not weight.trained:
                    continue
                if key not in trials:
                    trials[key] = try_whole(optimizer, group, *key, torch.device("cpu")).elementwise
                if not trials[key]:
                    largest = max(largest, 2 * weight.nbytes + weight.state)
    return largest


@dataclass(frozen=True)
class Parts:
    """Where the parts of a tensor lie.

    Attributes:
        shape: Of the whole tensor.
        places: Where the part of each rank lies in it.
        device: Where the ranks communicate: a part may be on the host.
    """

    shape: torch.Size
    places: Sequence[Range]
    device: torch.device


@dataclass(frozen=True)
class WholeStep:
    """The step of one parameter.

    Attributes:
        parts: Where its parts lie.
        inputs: This rank's parts of what the step needs: the parameter, its gradient and the state that it has.
        outputs: This rank's parts of what the step changes: the parameter and its state.
        numbers: How many numbers its state has.
        step: Steps the whole tensors; returns the numbers, and the new values of `outputs`.
    """

    parts: Parts
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    numbers: int
    step: Callable[[Sequence[Tensor]], tuple[list[float], list[Tensor]]]


def step_whole(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    wholes: Sequence[Tensor],
    state: Mapping[str, Any],
    trial: StepTrial,
) -> tuple[list[float], list[Tensor]]:
    """Step a whole parameter.

    Args:
        optimizer: The optimizer; a copy of it steps.
        group: The group of the parameter.
        wholes: The parameter, its gradient, and those tensors of `trial.tensors` that `state` has.
        state: The state so far, with the parts of the tensors.
        trial: What the state consists of.

    Returns:
        The numbers in the state, and the parameter with the tensors in the state.
    """
    parameter = nn.Parameter(wholes[0])
    parameter.grad = wholes[1]
    copy = trial_copy(optimizer, group, [parameter])
    given = dict(zip((slot for slot in trial.tensors if slot in state), wholes[2:], strict=True))
    if state:
        numbers = {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in state.items()}
        copy.state[parameter] = {slot: given.get(slot, numbers[slot]) for slot in state}
    copy.step()
    after = copy.state[parameter]
    return [float(after[slot]) for slot in trial.numbers], [parameter.detach(), *(after[slot] for slot in trial.tensors)]


def set_numbers(state: dict[str, Any], examples: Mapping[str, Any], values: Sequence[float]) -> None:
    """Set the numbers in a state: those of its slots, with examples of their types."""
    for (slot, example), value in zip(examples.items(), values, strict=True):
        if not isinstance(example, Tensor):
            state[slot] = type(example)(value)
        elif slot in state:
            state[slot].fill_(value)
        else:
            state[slot] = torch.full_like(example, value)


def step_in_rounds(steps: Sequence[WholeStep], world: World) -> list[list[float]]:
    """Make these steps, the same ones on all ranks; returns the numbers in the state of each parameter. Collective."""
    numbers: list[list[float]] = []
    with world.collectives:
        for start in range(0, len(steps), world.size):
            numbers += _step_round(steps[start : start + world.size], world)
    return numbers


def _step_round(steps: Sequence[WholeStep], world: World) -> list[list[float]]:
    """Make one step on each rank."""
    exchange, rank = Exchange(world.rank), world.rank
    wholes: list[Tensor] = []
    for owner, one in enumerate(steps):
        wholes += [whole for part in one.inputs if (whole := exchange.gather(part, one.parts, owner)) is not None]
    exchange.run()
    numbers: list[float] = []
    results: list[Tensor] = []
    if rank < len(steps):
        numbers, results = steps[rank].step(wholes)
    del wholes
    exchange = Exchange(rank)
    for owner, one in enumerate(steps):
        for place, part in enumerate(one.outputs):
            exchange.scatter(part, one.parts, owner, results[place] if owner == rank else None)
    exchange.run()
    return _share_numbers(steps, numbers, rank)


def _share_numbers(steps: Sequence[WholeStep], own: list[float], rank: int) -> list[list[float]]:
    """Give each rank the numbers in the state of all parameters of a round."""
    counts = [one.numbers for one in steps]
    if not any(counts):
        return [[] for _ in steps]
    first = sum(counts[:rank])
    shared = torch.zeros(sum(counts), dtype=torch.float64, device=steps[0].parts.device)
    shared[first : first + len(own)] = torch.tensor(own, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(shared)
    values = iter(shared.tolist())
    return [[next(values) for _ in range(count)] for count in counts]


def senders(places: Sequence[Range], owner: int) -> list[int]:
    """The ranks whose parts make up the whole tensor: of equal parts one, the owner's if it has it."""
    first: dict[Range, int] = {}
    for rank in (owner, *range(len(places))):
        if all(start < end for start, end in places[rank]):
            first.setdefault(places[rank], rank)
    return sorted(first.values())


class Exchange:
    """Transfers between ranks that run at the same time. All ranks add the same ones in the same order.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._operations: list[dist.P2POp] = []
        self._received: list[tuple[Tensor, Tensor]] = []  # (where it belongs, what arrives)

    def gather(self, part: Tensor, parts: Parts, owner: int) -> Tensor | None:
        """The whole tensor on rank `owner`, filled by `run`; `None` on the others."""
        whole = torch.empty(parts.shape, dtype=part.dtype, device=parts.device) if owner == self._rank else None
        for sender in senders(parts.places, owner):
            if whole is not None:
                self._receive(part_at(whole, parts.places[sender]), part if sender == self._rank else None, sender)
            elif sender == self._rank:
                self._send(part.to(parts.device), owner)
        return whole

    def scatter(self, part: Tensor, parts: Parts, owner: int, whole: Tensor | None) -> None:
        """Set each rank's part of a tensor to that of the whole one, which rank `owner` has."""
        for receiver, place in enumerate(parts.places):
            if any(start == end for start, end in place):
                continue
            if receiver == self._rank:
                self._receive(part, None if whole is None else part_at(whole, place), owner, parts.device)
            elif whole is not None:
                self._send(part_at(whole, place), receiver)

    def _send(self, part: Tensor, to: int) -> None:
        self._operations.append(dist.P2POp(dist.isend, part.contiguous(), to))

    def _receive(self, target: Tensor, known: Tensor | None, sender: int, device: torch.device | None = None) -> None:
        if known is not None:
            target.copy_(known)
            return
        arriving = target
        if not target.is_contiguous() or (device is not None and device != target.device):
            arriving = torch.empty(target.shape, dtype=target.dtype, device=device or target.device)
            self._received.append((target, arriving))
        self._operations.append(dist.P2POp(dist.irecv, arriving, sender))

    def run(self) -> None:
        """Wait for all transfers. Collective."""
        if self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()
        for target, arriving in self._received:
            target.copy_(arriving)
        self._operations.clear()  # They hold tensors, and the step comes next.
        self._received.clear()
