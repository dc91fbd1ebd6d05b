"""`Accelerator.backward(loss, weight=)`: micro-batches that count by a weight which only the loop knows."""

from __future__ import annotations

from torch import Tensor

from trainkit.accelerator.accumulation import AccumulationState
from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.data.micro_batch import MicroBatchKind
from trainkit.data.windows import checked_weight
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.strategy import Strategy

__all__ = ["Weighing"]


class Weighing:
    """The weights of the current window, and the correction of its gradients.

    The sum of a window's weights is known at its last micro-batch. Until then losses are scaled by an estimate from the first
    micro-batch of each rank, and the gradients are corrected at the end, so that float16 holds no larger values than usual.

    Args:
        accumulation: of the accelerator.
        world: the processes.
        strategy: whose gradients they are.
        checks: check that all processes call it.

    Raises:
        UnsupportedArgumentError: several micro-batches in a window, and the strategy shards its gradients.

    Attributes:
        weighed: whether the micro-batches of the window have weights; `None`: none has been trained on.
        factor: what the gradients of a complete window are multiplied by.
    """

    def __init__(self, accumulation: AccumulationState, world: World, strategy: Strategy, checks: CollectiveChecks) -> None:
        if strategy.accumulates_in_engine and accumulation.size > 1:
            raise UnsupportedArgumentError(
                "backward(weight=) with gradient_accumulation_steps > 1 needs gradients that are not sharded, but this "
                "strategy shards them. Set the weight when the batch is read: accelerator.prepare(loader, "
                "batch_weight=lambda batch: float((batch['labels'] != -100).sum()))"
            )
        self._accumulation, self._world, self._checks = accumulation, world, checks
        self.weighed: bool | None = None
        self._emptied = False  # the window was marked as having weight 0
        self._at = -1  # the micro-batch that was weighed last
        self._sum = 0.0
        self._expected = 1.0
        self.factor = 1.0

    def share(self, weight: float | Tensor | None) -> float:
        """What the loss of the current micro-batch is multiplied by. Collective at the first and the last of a window.

        Raises:
            ConfigurationError: some micro-batches of the window have a weight, and this one has none, or the other way round;
                or this one has been weighed already.
            DataError: not a finite number ≥ 0.
        """
        state, given = self._accumulation, weight is not None
        micro = state.current
        if micro.first:
            self.weighed, self._sum = given, 0.0
        elif given is not self.weighed:
            raise ConfigurationError(
                "backward(weight=) was called for some micro-batches of a window and not for others, so they cannot be "
                "compared. Pass the weight of each micro-batch."
            )
        self.factor = 1.0
        if weight is None:
            if self._emptied:  # the current micro-batch may be the same one
                self._emptied = False
                state.mark_empty(False)
            return micro.share
        several = state.size > 1 and state.by_hand is not True
        if several and self._at == state.worked:
            raise ConfigurationError(
                "backward(weight=) was called twice for a micro-batch, which can have one weight only. Add the losses: "
                "accelerator.backward(loss1 + loss2, weight=count)"
            )
        self._at = state.worked
        mine = 0.0 if micro.kind is not MicroBatchKind.DATA else checked_weight(weight, "backward(weight=) must be", "weight=")
        self._sum += mine
        total = 0.0
        if micro.first:
            total = self._over_all(mine)
            self._expected = (total or 1.0) * state.size
        if micro.last:
            self._end(self._over_all(self._sum) if several else total)
        return mine * self._world.size / self._expected

    def end_late(self) -> None:
        """The window ends with its last backward pass, which was not known to be its last. Collective."""
        if self.weighed:
            self._end(self._over_all(self._sum))

    def _end(self, total: float) -> None:
        self._emptied = total <= 0.0
        self._accumulation.mark_empty(self._emptied)
        self.factor = self._expected / total if total > 0.0 and self._accumulation.by_hand is not True else 1.0

    def _over_all(self, value: float) -> float:
        """The sum over the processes, added in the order of the ranks. Raises if a process passes no weight."""
        return float(sum(self._checks.exchange("backward(weight=)", value)))
