"""`DummyOptim` and `DummyScheduler`: they stand for what the configuration of the strategy defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import ConfigurationError

__all__ = ["DummyOptim", "DummyScheduler", "replace_placeholders"]


class DummyOptim:
    """Stands for the optimizer of a DeepSpeed configuration, in your own training loop: pass it to `Accelerator.prepare`.

    The section `optimizer` of the configuration says which optimizer is created, and its values count. What is missing there
    or `"auto"` is taken from here.

    Args:
        params: The parameters, or groups of them, as for an optimizer of torch.
        lr: The learning rate.
        weight_decay: The weight decay.
        kwargs: Further arguments of the optimizer.

    Raises:
        ConfigurationError: In `prepare`: the run has no such section.

    Example:
        ```python
        optimizer = DummyOptim(model.parameters(), lr=1e-4)
        scheduler = DummyScheduler(optimizer, total_num_steps=1000, warmup_num_steps=100)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        ```
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        self._created: Optimizer | None = None

    def create(self, strategy: ByConfiguration) -> Optimizer:
        """The optimizer, which is created once."""
        if self._created is None:
            values = {"lr": self.lr, **({"weight_decay": self.weight_decay} if self.weight_decay else {}), **self.kwargs}
            self._created = strategy.create_optimizer(self.params, values)
        return self._created


class DummyScheduler:
    """Stands for the scheduler of a DeepSpeed configuration, in your own training loop: pass it to `Accelerator.prepare`.

    The section `scheduler` of the configuration says which one is created, and its values count. Of what is `"auto"` there,
    `warmup_min_lr` becomes 0, `warmup_max_lr` the learning rate of the optimizer, and the numbers of steps are taken from here.
    As in DeepSpeed it advances by one step with each optimizer step.

    Args:
        optimizer: The `DummyOptim`, or the optimizer.
        total_num_steps: Number of steps. As in Accelerate it is that of one process: it is divided by the number of
            processes, unless the run has `split_batches`.
        warmup_num_steps: Number of optimizer steps of the warm-up. It is not divided, as in Accelerate.
        lr_scheduler_callable: Creates the scheduler from the optimizer, if the configuration has no such section.
        kwargs: No effect: as in Accelerate.

    Raises:
        ConfigurationError: In `prepare`: the run has neither such a section nor an `lr_scheduler_callable`, or both.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        self._created: Any = None

    def create(self, strategy: ByConfiguration, parts: int) -> Any:
        """The scheduler, which is created once; the number of all steps is divided by `parts`."""
        if self._created is None:
            optimizer = self.optimizer.create(strategy) if isinstance(self.optimizer, DummyOptim) else self.optimizer
            optimizer = getattr(optimizer, "optimizer", optimizer)  # one that is prepared
            values = {"warmup_num_steps": self.warmup_num_steps}
            if self.total_num_steps is not None:
                values["total_num_steps"] = math.ceil(self.total_num_steps / parts)
            self._created = strategy.create_scheduler(optimizer, values, self.lr_scheduler_callable)
        return self._created


class ByConfiguration(Protocol):
    """A strategy, as the placeholders see it."""

    def create_optimizer(self, parameters: Sequence[Any], values: Mapping[str, Any]) -> Optimizer:
        """Create the optimizer that the configuration defines."""

    def create_scheduler(self, optimizer: Optimizer, values: Mapping[str, Any], make: Callable[[Optimizer], Any] | None) -> Any:
        """Create the scheduler that the configuration or `make` defines."""


def replace_placeholders(objects: Sequence[Any], strategy: ByConfiguration, parts: int) -> tuple[list[Any], set[int]]:
    """The objects, with what the placeholders among them stand for, and the places of such schedulers.

    Args:
        objects: The objects that were passed to `prepare`.
        strategy: The strategy of the run.
        parts: Divides the number of all steps of a schedule.

    Raises:
        ConfigurationError: The configuration does not define one of them.
    """
    schedulers = {place for place, item in enumerate(objects) if isinstance(item, DummyScheduler)}
    given = [item for item in objects if isinstance(item, DummyOptim)]
    for place in schedulers:
        optimizer = objects[place].optimizer
        if isinstance(optimizer, DummyOptim) and optimizer._created is None and not any(optimizer is one for one in given):
            raise ConfigurationError(
                "prepare: a DummyScheduler was passed without its DummyOptim. Pass both: prepare(model, optimizer, scheduler)"
            )
    created: list[Any] = [item.create(strategy) if isinstance(item, DummyOptim) else item for item in objects]
    return [one.create(strategy, parts) if place in schedulers else one for place, one in enumerate(created)], schedulers
