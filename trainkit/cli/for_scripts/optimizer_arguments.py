"""Optimizers and learning-rate schedulers as arguments: their types, and what creates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "SCHEDULER_TYPES",
    "LRSchedulerCallable",
    "LRSchedulerTypeUnion",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "instantiate_class",
    "with_class_path",
]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau` with the name of the metric that it reads.

    On a command line there is no `configure_optimizers` to name the metric in.

    Args:
        optimizer: The optimizer.
        monitor: The name of the logged metric.
        *args: The other arguments of torch's class.
        **kwargs: The other arguments of torch's class, such as `mode`, `factor` and `patience`.

    Example:
        ```bash
        python train.py fit --lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=val_loss --lr_scheduler.patience=2
        ```
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# ReduceLROnPlateau of torch is a subclass of LRScheduler, but nothing on a command line says which metric it reads
SCHEDULER_TYPES = (LRScheduler, ReduceLROnPlateau)

LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
"""A learning-rate scheduler, as an annotation."""

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""An argument of a module that creates an optimizer from the parameters. `TrainkitCLI` makes it from a class and its arguments.

Example:
    ```python
    class Classifier(TrainModule):
        def __init__(self, optimizer: OptimizerCallable = torch.optim.AdamW):
            super().__init__()
            self.make_optimizer = optimizer

        def configure_optimizers(self):
            return self.make_optimizer(self.parameters())
    ```
"""

LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
"""An argument of a module that creates a learning-rate scheduler from the optimizer, as `OptimizerCallable` an optimizer."""


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Create an object of the class that a configuration names.

    Args:
        args: The first positional argument, or a tuple of them.
        init: The class under `"class_path"`, and its keyword arguments under `"init_args"`.

    Returns:
        The object.

    Example:
        ```python
        optimizer = instantiate_class(module.parameters(), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
        ```
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **init.get("init_args", {}))


def with_class_path(kind: type, arguments: Any) -> dict[str, Any]:
    """The configuration that `instantiate_class` reads, for a class that the command line fixes."""
    values = {} if arguments is None else dict(arguments.as_dict() if hasattr(arguments, "as_dict") else arguments)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": values}
