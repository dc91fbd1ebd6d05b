"""What scripts written for Lightning read and assign inside a Trainer: `trainer.fit_loop` and `_accelerator_connector`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from trainkit.names import advice
from trainkit.trainer.arguments import assign_argument

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["ConnectorView", "EpochLoopView", "EpochProgressView", "FitLoopView", "ValidationLoopView"]


class _View:
    """Shows values of a Trainer under other names; a name that it does not have is an error that says what to use."""

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    _trainer: Trainer
    _name = ""  # what the user has written after `trainer.`
    _use = ""  # what its error says to use, if that is not what it says of loops

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"trainer.{self._name} has no {name!r}. Use {self._use or advice('trainer', 'test_loop')}.", name=name, obj=None
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(getattr(type(self), name, None), property):
            getattr(self, name)  # its error says what to use
        super().__setattr__(name, value)

    def _continue(self, name: str, value: Any) -> None:
        assign_argument(self._trainer, name, value)
        self._trainer._run.continues = True


class EpochProgressView(_View):
    """`trainer.fit_loop.epoch_progress`, to be read between fits."""

    _name = "fit_loop.epoch_progress"

    @property
    def current(self) -> EpochProgressView:
        """The epochs of the last fit and of those that it has continued."""
        return self

    @property
    def ready(self) -> int:
        """Number of epochs that have begun."""
        begun = self._trainer._run.progress.batches_done > 0  # in an epoch that has not ended
        return self._trainer.current_epoch + begun

    @property
    def completed(self) -> int:
        """`trainer.current_epoch`."""
        return self._trainer.current_epoch


class ValidationLoopView(_View):
    """`trainer.fit_loop.epoch_loop.val_loop` and its `_data_source`, which is private in Lightning."""

    _name = "fit_loop.epoch_loop.val_loop"

    @property
    def _data_source(self) -> ValidationLoopView:
        return self

    def is_defined(self) -> bool:
        """Whether this fit has validation data. Modules ask for it to choose the monitor of a schedule."""
        return self._trainer._run.validation is not None


class EpochLoopView(_View):
    """`trainer.fit_loop.epoch_loop`."""

    _name = "fit_loop.epoch_loop"

    @property
    def max_steps(self) -> int:
        """`trainer.max_steps`. After assigning it the next fit continues, as with `FitLoopView.max_epochs`."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, max_steps: int) -> None:
        self._continue("max_steps", max_steps)

    @property
    def min_steps(self) -> int | None:
        """`trainer.min_steps`; assign it between runs."""
        return self._trainer.min_steps

    @min_steps.setter
    def min_steps(self, min_steps: int | None) -> None:
        self._trainer.min_steps = min_steps

    @property
    def global_step(self) -> int:
        """`trainer.global_step`."""
        return self._trainer.global_step

    @property
    def batch_idx(self) -> int:
        """`trainer.batch_idx`."""
        return self._trainer.batch_idx

    @property
    def val_loop(self) -> ValidationLoopView:
        """Whether there is validation data."""
        return ValidationLoopView(self._trainer)

    @property
    def _batches_that_stepped(self) -> int:
        return self._trainer.global_step  # Callbacks of other packages log with it.


class FitLoopView(_View):
    """`trainer.fit_loop`.

    A fit is a new run, from step 0. After `trainer.fit_loop.max_epochs = n` the next one continues, as a second fit in
    Lightning does: it counts epochs and steps from where the last one has ended, so that it trains the epochs up to `n` and
    draws a new order of the data. `configure_optimizers` is called again, and callbacks and logs start again. It begins with a
    whole epoch, also if the last fit has ended inside one.

    Example:
        ```python
        trainer = Trainer(max_epochs=2)
        trainer.fit(module, loader)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(module, loader)  # epochs 2, 3 and 4
        ```
    """

    _name = "fit_loop"

    @property
    def epoch_loop(self) -> EpochLoopView:
        """The same for steps."""
        return EpochLoopView(self._trainer)

    @property
    def epoch_progress(self) -> EpochProgressView:
        """Numbers of epochs, to be read."""
        return EpochProgressView(self._trainer)

    @property
    def max_epochs(self) -> int:
        """`trainer.max_epochs`. After assigning it the next fit continues.

        Raises:
            ConfigurationError: Assigned during a run, or the value is wrong.
        """
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, max_epochs: int) -> None:
        least = self._trainer.min_epochs
        if self._trainer.stage is None and isinstance(max_epochs, int) and least is not None and 0 <= max_epochs < least:
            self._trainer.min_epochs = max_epochs  # A script assigns both, and the maximum first; it prevails in Lightning.
        self._continue("max_epochs", max_epochs)

    @property
    def min_epochs(self) -> int | None:
        """`trainer.min_epochs`; assign it between runs."""
        return self._trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, min_epochs: int | None) -> None:
        self._trainer.min_epochs = min_epochs

    @property
    def max_steps(self) -> int:
        """`trainer.max_steps`."""
        return self._trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        """`trainer.min_steps`."""
        return self._trainer.min_steps

    @property
    def batch_idx(self) -> int:
        """`trainer.batch_idx`."""
        return self._trainer.batch_idx


class ConnectorView(_View):
    """`trainer._accelerator_connector`, which is private in Lightning, and which callbacks of other packages read."""

    _name = "_accelerator_connector"
    _use = "trainer.strategy, trainer.world_size and trainer.precision"

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several processes, or several devices in one process."""
        return self._trainer.strategy.world.size > 1 or self._trainer.world_size > 1
