"""Arguments of a Trainer as its attributes, which may be assigned between runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["ArgumentView", "assign_argument"]

Value = TypeVar("Value")


class ArgumentView(Generic[Value]):
    """An argument of the Trainer under its name, with its default filled in; assigning it takes effect in the next run.

    Args:
        fixed: It cannot be assigned, because the Trainer has made a callback from it.
    """

    def __init__(self, fixed: bool = False) -> None:
        self._fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> ArgumentView[Value]: ...

    @overload
    def __get__(self, trainer: Trainer, owner: type) -> Value: ...

    def __get__(self, trainer: Trainer | None, owner: type) -> Any:
        return self if trainer is None else getattr(trainer._arguments, self._name)

    def __set__(self, trainer: Trainer, value: Any) -> None:
        if self._fixed:
            raise ConfigurationError(
                f"trainer.{self._name} cannot be assigned: a callback was made from it. Pass it: "
                f"Trainer({self._name}={value!r})"
            )
        assign_argument(trainer, self._name, value)


def assign_argument(trainer: Trainer, name: str, value: Any) -> None:
    """Change an argument of a Trainer, checked together with all others.

    Raises:
        ConfigurationError: A run is in progress, or the value is wrong or contradicts another argument.
    """
    if trainer.stage is not None:
        by_epoch = name == "accumulate_grad_batches"
        raise ConfigurationError(
            f"trainer.{name} cannot change during a run, whose plan is fixed. Assign it before: trainer.{name} = {value!r}"
            + (", or let it change by epoch: callbacks=[GradientAccumulationScheduler({0: 1, 4: 2})]" if by_epoch else "")
        )
    if name == "accumulate_grad_batches" and (isinstance(value, Mapping) or trainer._run.accumulation_schedule is not None):
        raise ConfigurationError(
            "trainer.accumulate_grad_batches cannot be assigned where the number changes by epoch, because a callback sets it. "
            f"Pass it: Trainer(accumulate_grad_batches={value!r})"
        )
    changed = trainer._arguments.with_value(name, value)
    if changed.fast_dev_run and getattr(changed, name) == getattr(trainer._arguments, name) != value:
        raise ConfigurationError(
            f"trainer.{name} = {value!r} has no effect, because fast_dev_run={changed.fast_dev_run!r} sets it to "
            f"{getattr(changed, name)!r}. Remove fast_dev_run."
        )
    trainer.strategy.check_arguments(changed)
    trainer._run.use_arguments(changed)
