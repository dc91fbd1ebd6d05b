"""`GradientAccumulationScheduler`: what `Trainer(accumulate_grad_batches={0: 8, 4: 4})` attaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.callback import Callback
from trainkit.checks import is_whole
from trainkit.errors import ConfigurationError

__all__ = ["GradientAccumulationScheduler"]


class GradientAccumulationScheduler(Callback):
    """Sets the number of micro-batches per optimizer step for each epoch.

    The `Trainer` reads the schedule before training and at the start of each epoch. `trainer.estimated_stepping_batches`
    counts with it, and a resumed run continues with the number of its epoch. It works with every strategy; a DeepSpeed
    configuration that states `gradient_accumulation_steps` or `train_batch_size` is refused, because it states one number.

    Args:
        scheduling: Epoch → number of micro-batches per optimizer step from that epoch on. Epochs count from 0. Before the
            first key it is 1.

    Attributes:
        scheduling: As given, with a key 0.
        epochs: The keys, sorted.

    Raises:
        ConfigurationError: A key or a number is wrong. When training starts: `accumulate_grad_batches` or
            `global_batch_size` is given too, or the module uses manual optimization.

    Example:
        ```python
        trainer = Trainer(callbacks=[GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})])
        trainer = Trainer(accumulate_grad_batches={0: 8, 4: 4, 8: 1})   # the same
        ```
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        super().__init__()
        _check(scheduling)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch has more than one micro-batch per optimizer step."""
        return any(number > 1 for number in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of micro-batches per optimizer step in an epoch."""
        return self.scheduling[max(key for key in self.epochs if key <= epoch)]


def _check(scheduling: Any) -> None:
    fits = isinstance(scheduling, Mapping) and bool(scheduling)
    if not fits or not all(is_whole(e) and e >= 0 and is_whole(n) and n >= 1 for e, n in scheduling.items()):
        raise ConfigurationError(
            "a schedule of gradient accumulation must be a dict of epoch (an integer ≥ 0) → number of micro-batches (an "
            f"integer ≥ 1), not {scheduling!r}. Fix: accumulate_grad_batches={{0: 8, 4: 4}}, or "
            "GradientAccumulationScheduler({0: 8, 4: 4})"
        )
