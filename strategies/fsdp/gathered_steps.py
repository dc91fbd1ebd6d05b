"""`GatheredSteps`: steps of an optimizer that needs whole parameters, such as Muon, over sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainkit.distributed.parameter_placement import part_at
from trainkit.distributed.world import World
from trainkit.errors import OptimizerError
from trainkit.optim.optimizer_copy import trial_copy
from trainkit.optim.whole_parameters import StepTrial, try_step
from trainkit.strategies.fsdp.sharded_model import Shards

__all__ = ["GatheredSteps", "find_gathered"]


class Gathered(NamedTuple):
    """A parameter that is stepped whole.

    Attributes:
        parameter: The parameter.
        group: The number of its group.
        tensors: Its state of the parameter's shape: name → dtype.
        numbers: The numbers in its state: name → an example.
    """

    parameter: DTensor
    group: int
    tensors: dict[str, torch.dtype]
    numbers: dict[str, Any]


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
                trials[key] = _try(optimizer, group, parameter)
            if not trials[key].elementwise:
                found.append(Gathered(parameter, number, trials[key].tensors, trials[key].numbers))
    return found


def _try(optimizer: Optimizer, group: dict[str, Any], parameter: DTensor) -> StepTrial:
    name = type(optimizer).__name__
    try:
        trial = try_step(optimizer, group, parameter.ndim, parameter.dtype, parameter.device)
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


class GatheredSteps:
    """Steps parameters whole on one rank each, and shards the results.

    In each round every rank gathers one parameter, with its gradient and its state, steps it, and sends each rank its part of
    the new values. So a rank never has more than one whole parameter, and the steps of a round run at the same time on all
    ranks. Parameters of similar size are in the same round.

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
        with self._world.collectives:
            for start in range(0, len(due), self._world.size):
                self._step_round(due[start : start + self._world.size])
        self._gradients = [(one.parameter, one.parameter.grad) for one in due if one.parameter.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _restore_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def _step_round(self, due: list[Gathered]) -> None:
        """Step one parameter on each rank."""
        exchange, rank = Exchange(self._world.rank), self._world.rank
        wholes: list[Tensor | None] = []
        for owner, one in enumerate(due):
            shards = self._shards_of(one.parameter)
            own = [exchange.gather(tensor, shards, one.parameter, owner) for tensor in self._inputs(one)]
            wholes = own if owner == rank else wholes
        exchange.run()
        numbers: list[float] = []
        results: list[Tensor | None] = []
        if rank < len(due):
            numbers, results = self._step_whole(due[rank], [whole for whole in wholes if whole is not None])
        exchange = Exchange(rank)
        for owner, one in enumerate(due):
            for place, target in enumerate(self._outputs(one)):
                whole = results[place] if owner == rank else None
                exchange.scatter(target, self._shards_of(one.parameter), one.parameter, owner, whole)
        exchange.run()
        self._share_numbers(due, numbers)

    def _inputs(self, one: Gathered) -> Iterator[Any]:
        """What the owner needs: the parameter, its gradient and the state that it has."""
        yield one.parameter
        yield one.parameter.grad
        state = self._optimizer.state.get(one.parameter, {})
        yield from (state[slot] for slot in one.tensors if slot in state)

    def _outputs(self, one: Gathered) -> Iterator[Any]:
        """What a step changes: the parameter and its state, which the first step creates."""
        yield one.parameter
        state = self._optimizer.state[one.parameter]
        for slot, dtype in one.tensors.items():
            if slot not in state:
                state[slot] = torch.zeros_like(one.parameter, dtype=dtype, requires_grad=False)
            yield state[slot]

    def _step_whole(self, one: Gathered, wholes: list[Tensor]) -> tuple[list[float], list[Tensor | None]]:
        """Step a whole parameter; returns the numbers in its state, and what `_outputs` gets."""
        state = self._optimizer.state.get(one.parameter, {})
        parameter, gradient = nn.Parameter(wholes[0]), wholes[1]
        parameter.grad = gradient
        copy = trial_copy(self._optimizer, self._optimizer.param_groups[one.group], [parameter])
        given = dict(zip((slot for slot in one.tensors if slot in state), wholes[2:], strict=True))
        numbers = {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in state.items()}
        if state:
            copy.state[parameter] = {slot: given.get(slot, numbers[slot]) for slot in state}
        copy.step()
        after = copy.state[parameter]
        return [float(after[slot]) for slot in one.numbers], [parameter.detach(), *(after[slot] for slot in one.tensors)]

    def _share_numbers(self, due: list[Gathered], own: list[float]) -> None:
        """Give each rank the numbers in the state of all parameters of a round."""
        counts = [len(one.numbers) for one in due]
        if not any(counts):
            return
        first = sum(counts[: self._world.rank])
        shared = torch.zeros(sum(counts), dtype=torch.float64, device=_device(due[0].parameter))
        shared[first : first + len(own)] = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(shared)
        values = iter(shared.tolist())
        for one in due:
            self._set_numbers(one, [next(values) for _ in one.numbers])

    def _set_numbers(self, one: Gathered, values: list[float]) -> None:
        state = self._optimizer.state[one.parameter]
        for (slot, example), value in zip(one.numbers.items(), values, strict=True):
            if not isinstance(example, Tensor):
                state[slot] = type(example)(value)
            elif slot in state:
                state[slot].fill_(value)
            else:
                state[slot] = torch.full_like(example, value)


class Exchange:
    """Transfers between ranks that run at the same time. All ranks add the same ones in the same order.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._operations: list[dist.P2POp] = []
        self._received: list[tuple[Tensor, Tensor]] = []  # (where it belongs, what arrives)

    def gather(self, tensor: DTensor, shards: Shards, parameter: Tensor, owner: int) -> Tensor | None:
        """The whole tensor on rank `owner`, filled by `run`; `None` on the others."""
        places, part, device = shards.places(parameter), tensor.to_local().detach(), _device(tensor)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if owner == self._rank else None
        for sender in shards.senders(parameter, owner):
            if whole is not None:
                self._receive(part_at(whole, places[sender]), part if sender == self._rank else None, sender)
            elif sender == self._rank:
                self._send(part.to(device), owner)
        return whole

    def scatter(self, target: DTensor, shards: Shards, parameter: Tensor, owner: int, whole: Tensor | None) -> None:
        """Set each rank's part of a tensor to that of the whole one, which rank `owner` has."""
        part = target.to_local().detach()
        for receiver, place in enumerate(shards.places(parameter)):
            if any(start == end for start, end in place):
                continue
            if receiver == self._rank:
                self._receive(part, None if whole is None else part_at(whole, place), owner, _device(target))
            elif whole is not None:
                self._send(part_at(whole, place), receiver)

    def _send(self, part: Tensor, to: int) -> None:
        self._operations.append(dist.P2POp(dist.isend, part.contiguous(), to))

    def _receive(self, target: Tensor, known: Tensor | None, sender: int, device: torch.device | None = None) -> None:
        if known is not None:
            target.copy_(known)
            return
        arriving = torch.empty(target.shape, dtype=target.dtype, device=device or target.device)
        self._operations.append(dist.P2POp(dist.irecv, arriving, sender))
        self._received.append((target, arriving))

    def run(self) -> None:
        """Wait for all transfers. Collective."""
        if self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()
        for target, arriving in self._received:
            target.copy_(arriving)


def _device(tensor: DTensor) -> torch.device:
    """Where the ranks communicate: an offloaded part is on the host."""
    return torch.device(tensor.device_mesh.device_type)
