"""The learning-rate range test; `RangeTest`, its result; and `GroupRates`, the learning rates that it sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.checks import choice, real_number, whole_number
from trainkit.console import notice
from trainkit.errors import ConfigurationError, OptimizerError, missing_package
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.tuner.attributes import FoundAttribute, existing_attribute, find_attribute

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["RangeTest", "RangeTestOptions", "find_learning_rate", "rates_of", "same_rate"]

_SMOOTHING = 0.98  # The weight of earlier losses.
_MODES = ("exponential", "linear")
_PRECISION = 1e-5  # Relative: a learning rate may be a float32 tensor, and configure_optimizers may compute it.


class RangeTest:
    """The result of a learning-rate range test: the smoothed loss at each learning rate.

    `Tuner.lr_find` returns it, and `LearningRateFinder.optimal_lr` is one. It is the same on all processes.

    Args:
        mode: `"exponential"` or `"linear"`: how the learning rate grows from step to step.
        lr_min: The first learning rate.
        lr_max: The last learning rate.
        num_training: Number of learning rates.

    Attributes:
        results: `"lr"` and `"loss"`, two lists of the same length: the learning rate of each optimizer step, as a value of
            the attribute that `configure_optimizers` uses, and the loss before that step as an exponential moving average
            (0.98) of the mean over all processes, corrected for its start.

    Example:
        ```python
        found = Tuner(trainer).lr_find(module, train_loader, update_attr=False)
        print(found.suggestion())
        found.plot(suggest=True).savefig("lr.png")
        ```
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls most steeply, in the picture of `plot`.

        In exponential mode that is the slope over the logarithm of the learning rate. The slope over the learning rate itself,
        which Lightning 2.6 uses, is largest where the learning rates are smallest and the loss only fluctuates.

        Args:
            skip_begin: Number of points to ignore at the beginning, where the moving average has few values.
            skip_end: Number of points to ignore at the end, where the loss may diverge.

        Returns:
            The learning rate; `None`, with a notice, if fewer than two points with a finite loss are left.

        Raises:
            ConfigurationError: A number below 0.
        """
        index = self._steepest(skip_begin, skip_end)
        if index is None:
            notice(
                f"no learning rate can be suggested: fewer than 2 of {len(self.results['lr'])} points have a finite loss, "
                f"without the first {skip_begin} and the last {skip_end}. Test more: lr_find(num_training=200)"
            )
            return None
        return self.results["lr"][index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Figure | SubFigure:
        """Draw the loss over the learning rate with matplotlib, which is in the extra `plot`.

        Args:
            suggest: Mark the point of `suggestion()`.
            show: Call `matplotlib.pyplot.show`.
            ax: Axes to draw on. Default: those of a new figure.

        Returns:
            The figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise missing_package("matplotlib", "plot", "RangeTest.plot") from error
        if ax is None:
            _, ax = pyplot.subplots()
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        index = self._steepest(10, 1) if suggest else None
        if index is not None:
            ax.plot(rates[index], losses[index], marker="o", markersize=10, color="red")
        if show:
            pyplot.show()
        return ax.figure

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        """The index of the point where the loss falls most steeply."""
        whole_number(skip_begin, "suggestion(skip_begin=)", 0)
        whole_number(skip_end, "suggestion(skip_end=)", 0)
        rates, losses = self.results["lr"], self.results["loss"]
        usable = [i for i in range(skip_begin, len(rates) - skip_end) if math.isfinite(losses[i])]
        if len(usable) < 2:
            return None
        at = torch.tensor([rates[i] for i in usable], dtype=torch.float64)
        at = at.log() if self.mode == "exponential" else at
        loss = torch.tensor([losses[i] for i in usable], dtype=torch.float64)
        return usable[int(torch.gradient(loss, spacing=(at,))[0].argmin())]

    def _keep(self, losses: list[float], threshold: float | None) -> None:
        """Fill `results` from the mean loss of each optimizer step, up to the first smoothed loss that diverges."""
        average = Smoothed(threshold)
        for rate, loss in zip(self.rates(), losses, strict=False):
            diverges = average.add(loss)
            self.results["lr"].append(rate)
            self.results["loss"].append(average.value)
            if diverges:
                break

    def rates(self) -> list[float]:
        """The learning rates to test: evenly spaced from `lr_min` to `lr_max`, in exponential mode by their logarithms."""
        last = max(1, self.num_training - 1)
        if self.mode == "linear":
            return [self.lr_min + (self.lr_max - self.lr_min) * i / last for i in range(self.num_training)]
        return [self.lr_min * (self.lr_max / self.lr_min) ** (i / last) for i in range(self.num_training)]


class Smoothed:
    """An exponential moving average of losses, which knows when it diverges.

    Args:
        threshold: it diverges when it is more than this times its smallest value; `None`: never.

    Attributes:
        value: the average, corrected for its start.
    """

    def __init__(self, threshold: float | None) -> None:
        self.value = math.nan
        self._threshold = threshold
        self._average = 0.0
        self._count = 0
        self._best = math.inf

    def add(self, loss: float) -> bool:
        """Add a loss; returns whether the average diverges."""
        self._count += 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        self.value = self._average / (1 - _SMOOTHING**self._count)
        diverges = self._threshold is not None and self._count > 1 and self.value > self._threshold * self._best
        self._best = min(self._best, self.value)
        return diverges


class RangeTestOptions:
    """The arguments of a range test, checked.

    Args:
        min_lr: the first learning rate.
        max_lr: the last learning rate.
        num_training: number of learning rates.
        mode: how the learning rate grows.
        early_stop_threshold: stop when the smoothed loss is more than this times its smallest value; `None`: never.
        update_attr: set the attribute to the suggestion.
        attr_name: the attribute; `""`: `lr` or `learning_rate`.
        owner: what has these arguments, for messages.
        count: the name of `num_training` there.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    def __init__(
        self,
        min_lr: float,
        max_lr: float,
        num_training: int,
        mode: str,
        early_stop_threshold: float | None,
        update_attr: bool,
        attr_name: str,
        *,
        owner: str,
        count: str = "num_training",
    ) -> None:
        mode = mode.lower() if isinstance(mode, str) else mode
        self.mode = choice(mode, f"{owner}(mode=)", _MODES)
        real_number(min_lr, f"{owner}(min_lr=)", above=0, example=1e-8)
        real_number(max_lr, f"{owner}(max_lr=)", above=0)
        if max_lr <= min_lr:
            raise ConfigurationError(
                f"{owner}(min_lr={min_lr!r}, max_lr={max_lr!r}): max_lr must be more than min_lr. For example: "
                f"{owner}(min_lr=1e-8, max_lr=1.0)"
            )
        real_number(early_stop_threshold, f"{owner}(early_stop_threshold=)", above=0, example=4.0, optional=True)
        self.min_lr, self.max_lr = float(min_lr), float(max_lr)
        self.num_training = whole_number(num_training, f"{owner}({count}=)", 1, fix=f"{owner}({count}=100)")
        self.early_stop_threshold = early_stop_threshold
        self.update_attr = update_attr
        self.attr_name = attr_name

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes to look for."""
        return (self.attr_name,) if self.attr_name else ("lr", "learning_rate")


def find_learning_rate(
    trainer: Trainer, module: TrainModule, options: RangeTestOptions, dataloaders: Any, datamodule: DataModule | None
) -> tuple[RangeTest | None, list[float]]:
    """Run a range test. Collective; the result is the same on all processes.

    Args:
        trainer: is not changed. It may be in a fit, in its `setup` hooks or, with one process, at the start of an epoch.
        module: is not changed, except its attribute with `update_attr`.
        options: of the test.
        dataloaders: training data as the user passed it.
        datamodule: the user's.

    Returns:
        The result; `None`, with a notice, in a `fast_dev_run`. And the learning rates of the parameter groups that
        `configure_optimizers` makes of the suggestion; empty if no attribute was set.

    Raises:
        ConfigurationError: the attribute does not exist, or `configure_optimizers` does not use it.
        OptimizerError: there is not exactly one optimizer.
    """
    begun, world = bool(trainer.stage and trainer.optimizers), trainer.strategy.world
    if begun and world.size > 1:
        raise ConfigurationError(
            f"a learning rate is searched during training on {world.size} processes. Expected one process, or a search before "
            "training. Fix: LearningRateFinder() without overriding on_fit_start; or Tuner(trainer).lr_find(module) before fit"
        )
    if trainer.fast_dev_run:
        notice("no learning rate is searched in a fast_dev_run.")
        return None, []
    fix = "Fix: self.lr = lr in __init__, or name yours: attr_name='my_lr', or update_attr=False"
    attribute = find_attribute(options.names, module, datamodule, fix) if options.update_attr else None
    test = RangeTest(options.mode, options.min_lr, options.max_lr, options.num_training)
    probe = RangeProbe(test.rates(), options)
    limits = {"alone": begun, "begun": begun, **_limits(options.num_training)}
    trainer._run_trial("fit", module, probe, dataloaders=dataloaders, datamodule=datamodule, **limits)
    test._keep(_mean_over_ranks(world.exchange(probe.losses())), options.early_stop_threshold)
    rate = test.suggestion() if attribute is not None else None
    if attribute is None or rate is None:
        return test, []
    attribute.set(rate)
    if begun:
        probe.group_rates.assign(trainer.optimizers[0], rate)
    notice(
        f"learning rate: {attribute.name} is {rate:.4g} from now on, after {len(test.results['lr'])} steps of a trial."
        + probe.group_rates.text(rate)
    )
    return test, probe.group_rates.of(rate)


def _limits(steps: int) -> dict[str, Any]:
    """The arguments of the trainer in a trial of this number of optimizer steps."""
    return {"max_steps": steps, "max_epochs": -1, "min_epochs": None, "min_steps": None, "log_every_n_steps": 0}


def _mean_over_ranks(by_rank: list[list[float]]) -> list[float]:
    """The mean loss of each step, over the ranks that have one."""
    columns = [[losses[i] for losses in by_rank if i < len(losses)] for i in range(max(map(len, by_rank)))]
    return [sum(values) / len(values) for values in columns]


class RangeProbe(Callback):
    """Sets the learning rate of each optimizer step in a trial, and records the losses.

    If `configure_optimizers` uses the attribute, each parameter group gets the learning rate that it makes of the one that is
    tested; otherwise all get the same.

    Args:
        rates: the learning rates.
        options: of the test.

    Attributes:
        group_rates: the learning rates of the parameter groups, from the start of the trial on.
    """

    def __init__(self, rates: list[float], options: RangeTestOptions) -> None:
        self._rates = rates
        self._options = options
        self._average = Smoothed(options.early_stop_threshold)
        self._judged = 0
        self._by_step: list[list[Any]] = [[] for _ in rates]  # the losses of the micro-batches of each step
        self._left = 2 * len(rates)  # windows, so that a trial ends in which the loss scaler skips all steps
        self.group_rates: GroupRates

    def losses(self) -> list[float]:
        """The mean loss of each step."""
        steps = [losses for losses in self._by_step if losses]
        return [sum(map(float, losses)) / len(losses) for losses in steps]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if len(trainer.optimizers) != 1:
            raise OptimizerError(
                f"configure_optimizers of {type(module).__name__} returned {len(trainer.optimizers)} optimizers. Expected one, "
                "whose learning rate a range test can change. Fix: return torch.optim.AdamW(self.parameters(), lr=self.lr)"
            )
        measured, options = None, self._options
        attribute = existing_attribute(options.names, module, trainer.datamodule)
        if attribute is not None:
            ends = options.min_lr, options.max_lr
            measured = measure_rates(trainer, module, attribute, ends, needed=options.update_attr)
        groups = len(trainer.optimizers[0].param_groups)
        self.group_rates = GroupRates([(0.0, 1.0)] * groups) if measured is None else measured

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step > self._judged:  # Only complete steps are judged; this waits for the device.
            losses, self._judged = self._by_step[step - 1], step
            if losses and self._average.add(sum(map(float, losses)) / len(losses)):
                trainer.should_stop = True
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._left -= 1
            if self._left < 0:
                trainer.should_stop = True
        if step >= len(self._rates):
            return
        self.group_rates.assign(trainer.optimizers[0], self._rates[step])
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._by_step[self._step].append(loss)


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
    with attribute.restore_after():
        lows, middles, highs = rates(low), rates(middle), rates(high)
    group_rates = GroupRates([_terms(values, ends) for ends in zip(lows, highs, strict=True)])
    used, even = any(factor != 0 for _, factor in group_rates.terms), all(map(same_rate, middles, group_rates.of(middle)))
    if not needed:
        return group_rates if used and even else None
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
    return group_rates


def _terms(values: tuple[float, float], rates: tuple[float, float]) -> tuple[float, float]:
    """Offset and factor, so that the two values have these learning rates."""
    if same_rate(*rates):
        return rates[1], 0.0
    factor = rates[1] / values[1]
    if same_rate(factor, rates[0] / values[0]):
        return 0.0, 1.0 if same_rate(factor, 1.0) else factor
    factor = (rates[1] - rates[0]) / (values[1] - values[0])
    return rates[0] - factor * values[0], factor
