"""Finds by trial which optimizers need whole parameters: their step on a part is not a part of their step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.optim.optimizer_copy import trial_copy

__all__ = ["StepTrial", "try_step"]

_SIZES = (6, 5, 2, 3, 2)  # of a trial parameter; the first is cut into halves
_STEPS = 3
_RATE = 0.1  # A schedule may begin at 0, where no step changes anything.
_LIMIT = 1e-5  # of the largest change; steps of whole parameters differ by their size


@dataclass
class StepTrial:
    """What a few steps of tiny parameters show about an optimizer.

    Attributes:
        elementwise: The step of a part of a parameter is that part of the step of the whole one, as for SGD and AdamW. Muon,
            LARS and LAMB are not: they need the whole matrix, or its norm.
        independent: The step of a parameter does not depend on the others, and its group does not change.
        tensors: The state of the parameter's shape, of parameters of the given dtype: name → dtype.
        numbers: The state that is one number, perhaps in a tensor: name → an example.
        odd: Names of slots that are neither numbers nor of the parameter's shape.
    """

    elementwise: bool
    independent: bool
    tensors: dict[str, torch.dtype] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)


def try_step(optimizer: Optimizer, group: dict[str, Any], dims: int, dtype: torch.dtype, device: torch.device) -> StepTrial:
    """Step copies of an optimizer on tiny parameters.

    Args:
        optimizer: The optimizer; it does not change.
        group: One of its groups.
        dims: Number of dimensions of a parameter, at least 1.
        dtype: Of the parameters whose state is described.
        device: Where to step.

    Raises:
        Exception: What the optimizer raises.
    """
    shape, generator = [_SIZES[n % len(_SIZES)] for n in range(dims)], torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    begin, other = draw(), draw()
    gradients = [(draw(), draw()) for _ in range(_STEPS)]
    half = shape[0] // 2
    own = [gradient for gradient, _ in gradients]
    ((whole,), _) = _run(optimizer, group, [begin], [[g] for g in own])
    parts = [_run(optimizer, group, [begin[cut]], [[g[cut]] for g in own])[0][0] for cut in (slice(half), slice(half, None))]
    (together, changed) = _run(optimizer, group, [begin, other], [list(pair) for pair in gradients])
    changes = whole - begin
    trial = StepTrial(_same(torch.cat(parts) - begin, changes), not changed and _same(together[0] - begin, changes))
    parameter = nn.Parameter(begin.to(dtype))
    parameter.grad = own[0].to(dtype)
    copy = trial_copy(optimizer, group, [parameter])
    copy.step()
    for name, value in copy.state[parameter].items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            trial.tensors[name] = value.dtype
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim):
            trial.numbers[name] = value
        else:
            trial.odd.append(name)
    return trial


def _run(
    optimizer: Optimizer, group: dict[str, Any], begin: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], bool]:
    """The parameters after steps with these gradients, and whether options of the group have changed."""
    parameters = [nn.Parameter(value.clone()) for value in begin]
    given = dict(group)
    if "lr" in given:
        given["lr"] = torch.full_like(given["lr"], _RATE) if isinstance(given["lr"], Tensor) else _RATE
    copy = trial_copy(optimizer, given, parameters)
    before = dict(copy.param_groups[0])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        copy.step()
    after = copy.param_groups[0]
    changed = after.keys() != before.keys() or any(after[name] is not value for name, value in before.items())
    return [parameter.detach() for parameter in parameters], changed


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _LIMIT * expected.abs().max())
