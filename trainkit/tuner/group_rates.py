"""The learning rates that `configure_optimizers` makes of the attribute that a search sets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.errors import ConfigurationError
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.tuner.attributes import FoundAttribute

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["GroupRates", "measure_rates", "rates_of", "same_rate"]

_PRECISION = 1e-5  # of a learning rate that is a float32 tensor, with room for the arithmetic of configure_optimizers


class GroupRates:
    """The learning rate of each parameter group as a function of a value: `offset + factor * value`.

    Args:
        terms: offset and factor of each group.
    """

    def __init__(self, terms: list[tuple[float, float]]) -> None:
        self.terms = terms

    def of(self, value: float) -> list[float]:
        """The learning rate of each group."""
        return [offset + factor * value for offset, factor in self.terms]

    def assign(self, optimizer: Any, value: float) -> None:
        """Set the learning rates of an optimizer."""
        for group, rate in zip(optimizer.param_groups, self.of(value), strict=True):
            if isinstance(group["lr"], Tensor):  # compiled and captured steps refer to it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def text(self, value: float) -> str:
        """A sentence for the user on the learning rates at a value; empty if all are that value."""
        rates = self.of(value)
        if all(same_rate(rate, value) for rate in rates):
            return ""
        shown = ", ".join(f"{rate:.4g}" for rate in (rates if len(set(rates)) > 1 else rates[:1]))
        return f" configure_optimizers makes {shown} of it."


def rates_of(optimizer: Any) -> list[float]:
    """The learning rate of each group, from which schedules compute theirs; of a cyclic one, the largest."""
    return [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups]


def same_rate(one: float, other: float) -> bool:
    """Whether two learning rates are equal, except for rounding."""
    return math.isclose(one, other, rel_tol=_PRECISION)


def measure_rates(
    trainer: Trainer, module: TrainModule, attribute: FoundAttribute, values: tuple[float, float], needed: bool
) -> GroupRates | None:
    """Call `configure_optimizers` with other values of the attribute, which is restored.

    Args:
        trainer: of the trial.
        module: the copy of the trial.
        attribute: of the copy.
        values: the smallest and the largest value.
        needed: the attribute will be set, so it must have an effect.

    Returns:
        The learning rates; `None` if it is not `needed`, and they do not grow evenly with the attribute.

    Raises:
        ConfigurationError: it is `needed`, and they do not depend on the attribute, or do not grow evenly with it.
    """

    def rates(value: float) -> list[float]:
        attribute.set(value)
        returned = trainer.strategy.configure_optimizers(module)
        return rates_of(read_optimizers(returned, module, module.automatic_optimization)[0][0])

    low, high = values
    middle = math.sqrt(low * high)
    with attribute.restored():
        lows, middles, highs = rates(low), rates(middle), rates(high)
    found = GroupRates([_terms(values, ends) for ends in zip(lows, highs, strict=True)])
    used, even = any(factor != 0 for _, factor in found.terms), all(map(same_rate, middles, found.of(middle)))
    if not needed:
        return found if used and even else None
    name = f"configure_optimizers of {type(module).__name__}"
    if not used:
        raise ConfigurationError(
            f"{name} does not use {attribute.name!r}: the learning rate stays {highs[0]:.4g} when it changes. Expected an "
            f"optimizer with the learning rate that the search sets. Fix: torch.optim.AdamW(self.parameters(), "
            f"lr=self.{attribute.name}); or name your attribute: attr_name='my_lr'; or update_attr=False"
        )
    if not even:
        pairs = ", ".join(f"{value:.3g} → {one[0]:.3g}" for value, one in ((low, lows), (middle, middles), (high, highs)))
        raise ConfigurationError(
            f"{name} makes learning rates of {attribute.name!r} that do not grow evenly with it ({pairs}). Expected a product, "
            f"such as lr=4 * self.{attribute.name}. Fix: search where it is one, such as max_lr=0.01; or search the learning "
            "rate of the optimizer, and set the attribute yourself: update_attr=False"
        )
    return found


def _terms(values: tuple[float, float], rates: tuple[float, float]) -> tuple[float, float]:
    """Offset and factor, so that the two values have these learning rates."""
    if same_rate(*rates):
        return rates[1], 0.0
    factor = rates[1] / values[1]
    if same_rate(factor, rates[0] / values[0]):
        return 0.0, 1.0 if same_rate(factor, 1.0) else factor
    factor = (rates[1] - rates[0]) / (values[1] - values[0])
    return rates[0] - factor * values[0], factor
