"""Functions and classes of Lightning's `utilities` that are too small for a module."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigurationError
from trainkit.nested import move
from trainkit.rng import RandomState

__all__ = [
    "LightningDeprecationWarning",
    "PossibleUserWarning",
    "get_filesystem",
    "get_init_args",
    "grad_norm",
    "isolate_rng",
    "measure_flops",
    "move_data_to_device",
]


class PossibleUserWarning(UserWarning):
    """Lightning's class of hints that may not apply. trainkit prints its hints once, and does not warn with this class."""


class LightningDeprecationWarning(DeprecationWarning):
    """Lightning's class for its own deprecated names. trainkit does not warn with it."""


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The batch with its tensors, and other objects with a `.to(device)`, on the device.

    Copies from pinned memory to a GPU do not block.

    Args:
        batch: A tensor, or tensors in dicts, lists, tuples, named tuples and dataclasses.
        device: The device; a number is the index of a GPU.
    """
    device = torch.device(device)
    return move(batch, device, non_blocking=device.type == "cuda")


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """A context after which the global generators of torch, numpy and `random` continue as if it had drawn nothing.

    Args:
        include_cuda: Restore the generators of the GPUs too.

    Example:
        ```python
        with isolate_rng():
            noise = torch.randn(4)
        ```
    """
    with_cuda = include_cuda and torch.cuda.is_available() and torch.cuda.is_initialized()
    state = RandomState(torch.cuda.default_generators if with_cuda else ())
    try:
        yield
    finally:
        state.restore()


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of the gradient of each parameter, and of all of them.

    It reads `parameter.grad`, so call it where gradients are complete, in `on_before_optimizer_step`. Under ZeRO the
    gradients are sharded and `parameter.grad` is not set: use `GradientClipping(float("inf"))`, which logs the norm.

    Args:
        module: The module.
        norm_type: The p of the p-norm, a positive number, or `"inf"`.
        group_separator: Separates the name of the group and the parameter's name.

    Returns:
        `grad_2.0_norm/weight` and so on → the norm, a scalar on the device of the gradient; `grad_2.0_norm_total` → the norm
        of these norms. Empty if no parameter has a gradient.

    Raises:
        ConfigurationError: `norm_type` is not positive.

    Example:
        ```python
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self.net, norm_type=2))
        ```
    """
    p = float(norm_type)
    if not p > 0:
        raise ConfigurationError(f"norm_type must be a positive number or 'inf', not {norm_type!r}. For example: norm_type=2")
    with torch.no_grad():
        norms = {
            f"grad_{p}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad, p)
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        if norms:
            device = next(iter(norms.values())).device
            norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack([one.to(device) for one in norms.values()]), p)
    return norms


def measure_flops(model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None) -> int:
    """Count the FLOPs of a forward pass, and with `loss_fn` of the backward pass too, with `torch.utils.flop_counter`.

    Build the model under `torch.device("meta")` to count without computing. `ThroughputMonitor(measure_flops=True)` counts
    those of the first training batch.

    Args:
        model: No effect: every operation of `forward_fn` counts.
        forward_fn: Returns the output of the model.
        loss_fn: Returns the loss of the output, a scalar. Default: no backward pass.

    Example:
        ```python
        with torch.device("meta"):
            model, x = nn.Linear(64, 10), torch.randn(32, 64)
        flops = measure_flops(model, lambda: model(x), torch.sum)
        ```
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The file system of a path or URL: an `fsspec.AbstractFileSystem`.

    Args:
        path: A path, or a URL such as `s3://bucket/runs`.
        **kwargs: Options of the file system.

    Example:
        ```python
        with get_filesystem("memory://notes.txt").open("memory://notes.txt", "w") as file:
            file.write("loss 0.1")
        ```
    """
    from fsspec.core import url_to_fs  # only here: few scripts need it

    return url_to_fs(os.fspath(path), **kwargs)[0]


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """The arguments that a running `__init__` got, by name, without `self` and with the content of its `**kwargs`.

    In a class of your own call `self.save_hyperparameters()`, which also stores them in checkpoints.

    Args:
        frame: The frame of `__init__`: in it, `inspect.currentframe()`.
    """
    arguments = inspect.getargvalues(frame)
    found = {name: arguments.locals[name] for name in arguments.args[1:]}
    return found | (arguments.locals[arguments.keywords] if arguments.keywords else {})
