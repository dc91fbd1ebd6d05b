"""Learning rates whose values do not make XLA recompile.

A Python number in an operation becomes an input of the compiled graph, so a different value needs no new graph. There are
exceptions: 0, 1 and -1 become constants of the graph, and so does a number that rounds to one of them in float32 (AdamW's
factor 1 - rate × decay is 1 as soon as the rate is small). Equal numbers become one input. A schedule that warms up from 0, or
decays to 0, would therefore cause a recompilation each time.

Adam's bias corrections also approach 1, after hundreds or thousands of steps. One case remains: two parameter groups whose
rates become equal, other than 0, cause a recompilation.

During the optimizer step the rates are floats that also keep the exact value. An operation that accepts a tensor
(`parameter.mul_(1 - rate * decay)`) gets one, which is an input whatever its value. An operation that accepts only numbers
(`addcdiv_(…, value=-rate)`) gets a number that is not 0 or ±1, but differs from it by less than float32 can represent, so the
result is the same.
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
_DENORMAL = 2.0**-149  # the smallest float32 above 0; XLA treats it as 0

TensorCache = dict[tuple[float, torch.dtype, torch.device], Tensor]


class Rate(float):
    """A learning rate, or a value computed from one.

    Args:
        value: the exact value.
        group: number of the parameter group, so that equal rates of two groups do not become one input.
        cache: the tensors created from values of the group in this step.
    """

    exact: float
    group: int
    cache: TensorCache

    def __new__(cls, value: float, group: int, cache: TensorCache) -> Rate:
        made = super().__new__(cls, _avoid_constants(value, group))
        made.exact, made.group, made.cache = value, group, cache
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace rates in the positional arguments of a tensor operation by tensors, and in the others by exact floats."""
        like = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
        others = {name: value.exact if isinstance(value, Rate) else value for name, value in (kwargs or {}).items()}
        return function(*[arg._for(like) if isinstance(arg, Rate) else arg for arg in args], **others)

    def _for(self, like: Tensor | None) -> Tensor | float:
        if like is None or like.device.type != "xla":
            return self.exact
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        key = (self.exact, dtype, like.device)
        if key not in self.cache:
            xm: Any = importlib.import_module("torch_xla.core.xla_model")
            # torch.tensor(value, device=…) would become a constant too
            (self.cache[key],) = xm.send_cpu_data_to_device([torch.tensor(self.exact, dtype=dtype)], like.device)
        return self.cache[key]


def _avoid_constants(value: float, group: int) -> float:
    """Returns the value, or a number next to it if XLA would make it a constant of the graph."""
    if value == 0.0:
        return math.copysign(group * _DENORMAL or _SMALLEST, value)
    if abs(value) == 1.0:
        return math.copysign(_BELOW_ONE, value)
    return value


def _operator(name: str) -> Callable[..., Any]:
    """Returns a method of `float` that computes with the exact values and returns a `Rate`."""
    plain = getattr(float, name)

    def operation(self: Rate, *others: Any) -> Any:
        result = plain(self.exact, *[other.exact if isinstance(other, Rate) else other for other in others])
        return Rate(result, self.group, self.cache) if isinstance(result, float) else result

    operation.__name__ = name
    return operation


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "pos", "abs"):
    setattr(Rate, f"__{_name}__", _operator(f"__{_name}__"))


class _Beta(float):
    """A decay rate of Adam's moments. Its powers approach 0, so the bias corrections 1 - beta**step approach 1."""

    group: int
    cache: TensorCache

    def __new__(cls, value: float, group: int, cache: TensorCache) -> _Beta:
        made = super().__new__(cls, value)
        made.group, made.cache = group, cache
        return made

    def __pow__(self, exponent: Any, modulo: None = None) -> Any:
        result = float(self) ** exponent
        return Rate(result, self.group, self.cache) if isinstance(result, float) else result


@contextmanager
def steady_rates(optimizer: Optimizer, closure: object = None) -> Iterator[None]:
    """A context in which the optimizer's step is the same graph for all values of its learning rates.

    Does nothing if there is a closure: LBFGS would keep values computed from the rates, and runs several graphs anyway.
    """
    if closure is not None:
        yield
        return
    plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        rate, betas, cache = group.get("lr"), group.get("betas"), TensorCache()
        if not isinstance(rate, float | int):
            continue
        plain.append((group, {"lr": rate}))
        group["lr"] = Rate(rate, number, cache)
        if isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas):
            plain[-1][1]["betas"] = betas
            group["betas"] = tuple(_Beta(beta, number, cache) for beta in betas)
    try:
        yield
    finally:
        for group, options in plain:
            group.update(options)
