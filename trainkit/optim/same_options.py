"""Compares the options of the optimizers of all ranks: with different ones their parameters would diverge silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import OptimizerError

__all__ = ["check_same_options", "list_options"]

_HOW = {"capturable", "differentiable", "foreach", "fused"}  # They choose a kernel, which may depend on the device of a rank.


def list_options(optimizers: Iterable[Optimizer]) -> list[str]:
    """One text for each option that is a number or some numbers: "AdamW 0, group 0: lr=0.001"; JSON."""
    return [
        f"{type(optimizer).__name__} {place}, group {number}: {option}={value}"
        for place, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for option, each in group.items()
        if option not in _HOW and (value := _as_text(each)) is not None
    ]


def _as_text(value: Any) -> str | None:
    if isinstance(value, Tensor):  # A rate on an accelerator is not read, because that would wait for the device.
        return repr(value.item()) if value.numel() == 1 and value.device.type == "cpu" else None
    values = value if isinstance(value, tuple | list) else [value]
    return repr(value) if all(isinstance(each, bool | int | float) for each in values) else None


def check_same_options(by_rank: Sequence[Sequence[str]]) -> None:
    """Check that the optimizers of all ranks have the same options.

    Args:
        by_rank: What `list_options` has returned on each rank.

    Raises:
        OptimizerError: They do not, as when each rank draws its own learning rate.
    """
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if other != first:
            differing = [", ".join(line for line in one if line not in two) for one, two in ((first, other), (other, first))]
            raise OptimizerError(
                f"rank 0 and rank {rank} have different optimizers. Rank 0: {differing[0] or 'the same, and no more'}; rank "
                f"{rank}: {differing[1] or 'the same, and no more'}. With different options the parameters of the ranks would "
                "diverge. Fix: decide on one rank and let the others use its values, or set the same seed on all ranks before "
                "you draw them."
            )
