"""The control word: what each process of a fit has to tell the others, once a step.

One small vector for each optimizer step: a stop that was asked for, a signal that came, what the main process's saves want,
a hash of the names that were logged, and the number of updates. It is sent off at the end of step k and read at the end of
step k + 1, so that nobody waits for it; what it decides happens on all processes after the same step. At the end of a
validation or an epoch it is exchanged at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.console import counted
from trainkit.errors import ConfigurationError
from trainkit.trainer.progress import Stop

if TYPE_CHECKING:
    from trainkit.distributed.world import Pending
    from trainkit.trainer.trainer import Trainer

__all__ = ["Control"]

_NO_OPINION = -(1 << 63)


class Control:
    """The words of one fit on several processes.

    Args:
        trainer: the trainer.

    Attributes:
        signal: the number of the signal that the processes have agreed to end for.
        bits: what the main process's saves want attended to.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pending: Pending | None = None
        self.signal: int | None = None
        self.bits = 0

    def turn(self) -> None:
        """The end of a step: obey the word of the step before, and send this one's."""
        self.settle()
        self._begin()

    def exchange(self) -> None:
        """Send a word and obey it at once; a stop that was asked for counts on every process from here on."""
        self.settle()
        self._begin()
        self.settle()
        trainer = self._trainer
        if trainer._progress.stop is not Stop.RUNNING:
            trainer._progress.should_stop = True

    def settle(self) -> None:
        """Obey the word that was sent last, if that has not been done.

        Raises:
            ConfigurationError: a process has skipped an update, and another one has not.
            MetricError: the processes have logged different names.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        stop, signal, bits, schema, negated, most, least = pending.wait()
        trainer = self._trainer
        trainer._progress.agree_on_stop(bool(stop))
        if signal:
            self.signal = signal
            trainer._signals.received = signal  # the same on all of them, whatever came here
        self.bits |= bits
        if signal or bits:
            trainer._progress.safe_point_due = True
        if most != -least:
            raise ConfigurationError(
                f"one process has made {counted(most, 'update')}, and another one {-least}: their parameters are not "
                f"the same any more. "
                "Call skip_update() on all processes or on none: by the step, or by a value that has been reduced."
            )
        if schema not in (_NO_OPINION, -negated):
            trainer._train_metrics.check_schema(trainer.strategy.world)

    def take_bits(self) -> int:
        """:attr:`bits`, which are attended to now."""
        bits, self.bits = self.bits, 0
        return bits

    def _begin(self) -> None:
        trainer = self._trainer
        world = trainer.strategy.world
        schema = trainer._train_metrics.schema
        self._pending = world.begin_largest(
            [
                trainer.should_stop,
                trainer._signals.received or 0,
                trainer._checkpointing.local_attention() if world.is_main else 0,
                schema or _NO_OPINION,
                -schema or _NO_OPINION,
                trainer.accelerator.updates,
                -trainer.accelerator.updates,
            ]
        )
