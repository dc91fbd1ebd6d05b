"""Learning rates of which no value makes XLA compile anew.

A Python number in an operation becomes an input of the compiled graph, so that another value needs no other graph. But there
are exceptions: 0, 1 and -1 are put into the graph as constants, what rounds to them in float32 too (AdamW's factor
1 - rate × decay is 1 as soon as the rate is small), and numbers that are equal become one input. A schedule that warms up
from 0, or ends there, would cost a compilation each time.

(Of two groups whose rates become equal, other than 0, that remains so.) Adam's corrections for its first steps go to 1 as well,
after hundreds or thousands of them.

While the optimizer works, its rates are floats that remember what they were worked out to exactly. Where a tensor would do
(``parameter.mul_(1 - rate * decay)``) they are one, an input whatever its value. Where torch takes numbers only
(``addcdiv_(…, value=-rate)``) they keep away from 0 and ±1 by less than float32 can tell: what is computed is the same.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Rate", "steady_rates"]

_SMALLEST = math.ulp(0.0)
_BELOW_ONE = math.nextafter(1.0, 0.0)
_DENORMAL = 2.0**-149  # the smallest number above 0 that float32 has; XLA takes it for 0

Kept = dict[tuple[float, torch.dtype, torch.device], Tensor]


class Rate(float):
    """A learning rate, or what has been worked out with one.

    Args:
        value: exactly.
        group: the number of the parameter group, so that those of two groups are never one input.
        kept: the tensors that were made of values of the group in this step.
    """

    exact: float
    group: int
    kept: Kept

    def __new__(cls, value: float, group: int, kept: Kept) -> Rate:
        made = super().__new__(cls, _near(value, group))
        made.exact, made.group, made.kept = value, group, kept
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """An operation that takes a tensor and got this: give it one."""
        like = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
        others = {name: value.exact if isinstance(value, Rate) else value for name, value in (kwargs or {}).items()}
        return function(*[arg._for(like) if isinstance(arg, Rate) else arg for arg in args], **others)

    def _for(self, like: Tensor | None) -> Tensor | float:
        if like is None or like.device.type != "xla":
            return self.exact
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        key = (self.exact, dtype, like.device)
        if key not in self.kept:
            xm: Any = importlib.import_module("torch_xla.core.xla_model")
            # not torch.tensor(value, device=…): that becomes a constant too
            (self.kept[key],) = xm.send_cpu_data_to_device([torch.tensor(self.exact, dtype=dtype)], like.device)
        return self.kept[key]


def _near(value: float, group: int) -> float:
    if value == 0.0:
        return math.copysign(group * _DENORMAL or _SMALLEST, value)
    if abs(value) == 1.0:
        return math.copysign(_BELOW_ONE, value)
    return value


def _kept(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def operation(self: Rate, *others: Any) -> Any:
        result = plain(self.exact, *[other.exact if isinstance(other, Rate) else other for other in others])
        return Rate(result, self.group, self.kept) if isinstance(result, float) else result

    operation.__name__ = name
    return operation


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "pos", "abs"):
    setattr(Rate, f"__{_name}__", _kept(f"__{_name}__"))


class _Beta(float):
    """A decay of Adam's moments. Its powers go to 0, and with them the corrections 1 - beta**step to 1."""

    group: int
    kept: Kept

    def __new__(cls, value: float, group: int, kept: Kept) -> _Beta:
        made = super().__new__(cls, value)
        made.group, made.kept = group, kept
        return made

    def __pow__(self, exponent: Any, modulo: None = None) -> Any:
        result = float(self) ** exponent
        return Rate(result, self.group, self.kept) if isinstance(result, float) else result


@contextmanager
def steady_rates(optimizer: Optimizer, closure: object = None) -> Iterator[None]:
    """Within it the optimizer's learning rates are such that its step is the same graph whatever their values.

    Not with a closure: LBFGS would keep what it works out with them, and computes several graphs anyway.
    """
    if closure is not None:
        yield
        return
    plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        rate, betas, kept = group.get("lr"), group.get("betas"), Kept()
        if not isinstance(rate, float | int):
            continue
        plain.append((group, {"lr": rate}))
        group["lr"] = Rate(rate, number, kept)
        if isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas):
            plain[-1][1]["betas"] = betas
            group["betas"] = tuple(_Beta(beta, number, kept) for beta in betas)
    try:
        yield
    finally:
        for group, options in plain:
            group.update(options)
