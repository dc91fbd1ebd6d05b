"""`StochasticWeightAveraging`: average the weights of the last epochs, at a learning rate of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, get_swa_multi_avg_fn

from trainkit.callbacks._averaged_weights import AveragedWeights
from trainkit.checks import choice, function, real_number, whole_number
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError
from trainkit.metrics.metric_objects import capture_objects, restore_objects
from trainkit.module.hook_table import accepts
from trainkit.optim.optimizer_config import SchedulerConfig
from trainkit.optim.parameter_names import clean_paths

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["StochasticWeightAveraging"]

_NAME = "StochasticWeightAveraging"
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class StochasticWeightAveraging(AveragedWeights):
    """Stochastic weight averaging (SWA): after `fit` the module has the average of the weights of the last epochs.

    From the start epoch on, `torch.optim.swa_utils.SWALR` replaces the scheduler of the module, and the weights at the start
    of each epoch are averaged, as in Lightning. At the end of training the module gets the average. If it has BatchNorm
    layers, `training_step` then runs once more over the training data without gradients, to compute their statistics as
    `torch.optim.swa_utils.update_bn` does: all batches of all processes count equally. What it logs is dropped. A layer in eval
    mode keeps its statistics.

    Validation and checkpoints during training use the trained weights, and the average is in the state of the callback. A
    resumed run is bit-identical to one that was never interrupted. At the end of training `ModelCheckpoint` saves a checkpoint
    of the average, which it does not rank, because no metric was computed with it; `keep_last=0` saves none. Its model has the
    averaged weights, and `fit(ckpt_path=...)` still continues with the trained ones.

    Different from Lightning: training that stops early also ends with the average, if one has begun.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.

    Args:
        swa_lrs: Learning rate during averaging: one, or a list with one for each parameter group.
        swa_epoch_start: The epoch to begin with, counted from 1; or a fraction of `max_epochs`, which is rounded down.
        annealing_epochs: Number of epochs from the learning rate of the start to `swa_lrs`.
        annealing_strategy: `"cos"` or `"linear"`.
        avg_fn: Called with the average of a tensor, its current value and the number of averages so far; returns the new
            average. Default: all count equally.
        device: Where the average is kept. `None`: the device of the module.

    Raises:
        ConfigurationError: An argument is out of range. Before training: there is not exactly one optimizer, several
            schedulers, manual optimization, a fraction without `max_epochs`, another callback that averages the weights, or a
            strategy that shards parameters (FSDP, ZeRO stage 3).

    Example:
        ```python
        trainer = Trainer(max_epochs=20, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)])
        trainer.fit(module, train_loader)
        path = trainer.checkpoint_callback.last_model_path  # has the averaged weights
        ```
    """

    averages_parts = False  # `update_bn` runs training steps, and the average is in the state of the callback

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        super().__init__(device, use_buffers=False)
        fix = f"{_NAME}(swa_lrs=1e-2)"
        for rate in swa_lrs if isinstance(swa_lrs, list | tuple) else [swa_lrs]:
            real_number(rate, f"{_NAME}(swa_lrs=)", above=0, fix=fix)
        if isinstance(swa_epoch_start, float):
            if not 0 <= swa_epoch_start <= 1:
                raise ConfigurationError(
                    f"{_NAME}(swa_epoch_start=) must be an epoch ≥ 1, or a fraction from 0.0 to 1.0, not {swa_epoch_start!r}. "
                    f"Fix: {_NAME}(swa_lrs=1e-2, swa_epoch_start=0.8)"
                )
        else:
            whole_number(swa_epoch_start, f"{_NAME}(swa_epoch_start=)", 1)
        whole_number(annealing_epochs, f"{_NAME}(annealing_epochs=)", 0)
        choice(annealing_strategy, f"{_NAME}(annealing_strategy=)", ("cos", "linear"))
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.avg_fn = function(avg_fn, f"{_NAME}(avg_fn=)", "lambda average, value, number: (average + value) / 2")

    def _forget(self) -> None:
        super()._forget()
        self.n_averaged = 0
        self._latest_epoch = -1
        self._started = False
        self._replaced: list[SchedulerConfig] | None = None

    # ------------------------------------------------------------------------------------------------------------- training

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        if self._replaced is not None and not self._started:
            trainer.lr_scheduler_configs[:] = self._replaced  # the state of the callbacks was not restored
        if not module.automatic_optimization or len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            raise ConfigurationError(
                f"{_NAME} needs automatic optimization, one optimizer and at most one scheduler; {type(module).__name__} has "
                f"{len(trainer.optimizers)} and {len(trainer.lr_scheduler_configs)}, and automatic_optimization is "
                f"{module.automatic_optimization}. Fix: return one of each from configure_optimizers, or average with "
                "ExponentialMovingAverage()"
            )
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self.swa_lrs, list | tuple) and len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"{_NAME}(swa_lrs=) has {len(self.swa_lrs)} learning rates, but the optimizer has {groups} parameter groups. "
                f"Fix: one for each group, or one for all: {_NAME}(swa_lrs=1e-2)"
            )
        start = self._start(trainer)
        if trainer.max_epochs is not None and start >= trainer.max_epochs > 0:
            warn(f"{_NAME}(swa_epoch_start={self.swa_epoch_start}) never begins, because max_epochs is {trainer.max_epochs}.")

    def _start(self, trainer: Trainer) -> int:
        """Index of the first epoch at whose start the weights are averaged."""
        start = self.swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs is None or trainer.max_epochs < 0:
                raise ConfigurationError(
                    f"{_NAME}(swa_epoch_start={start}) is a fraction of max_epochs, which has no limit. Fix: an epoch, such as "
                    f"{_NAME}(swa_lrs=1e-2, swa_epoch_start=10), or Trainer(max_epochs=20)"
                )
            start = int(trainer.max_epochs * start)
        return max(start - 1, 0)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if epoch <= self._latest_epoch or not (self._started or epoch >= self._start(trainer)):
            return
        if not self._started:
            self._started = True
            for config in trainer.lr_scheduler_configs:
                notice(
                    f"{_NAME}: from epoch {epoch} on, SWALR replaces {type(config.scheduler).__name__}, and the learning rate "
                    f"becomes swa_lrs={self.swa_lrs}. To keep the schedule, average with ExponentialMovingAverage()."
                )
            self._replace_scheduler(trainer)
        self._latest_epoch = epoch
        self._accumulate()
        self.n_averaged += 1

    def _replace_scheduler(self, trainer: Trainer) -> None:
        configs = trainer.lr_scheduler_configs
        self._replaced = list(configs)
        rates = list(self.swa_lrs) if isinstance(self.swa_lrs, list | tuple) else self.swa_lrs
        annealing: Any = {"anneal_epochs": self.annealing_epochs, "anneal_strategy": self.annealing_strategy}
        scheduler = SWALR(trainer.optimizers[0], rates, **annealing)  # type: ignore[arg-type]  # a list is accepted
        configs[:] = [SchedulerConfig(scheduler, name=configs[0].name if configs else None)]

    def _merge(self, averages: list[Tensor], values: list[Tensor]) -> None:
        if self.avg_fn is None:
            get_swa_multi_avg_fn()(averages, values, self.n_averaged)
            return
        for average, value in zip(averages, values, strict=True):
            average.copy_(self.avg_fn(average, value, torch.tensor(self.n_averaged)))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not self._average:
            return
        self._show()
        layers = [part for part in module.modules() if isinstance(part, _BATCH_NORMS) and part.track_running_stats]
        layers = [layer for layer in layers if layer.training]  # a frozen one keeps its statistics
        try:
            if layers:
                self._recompute_statistics(trainer, module, layers)
        except BaseException:
            self._hide()  # A save on this error must have the trained weights.
            raise
        trainer._save_policy.weights_replaced()

    # ------------------------------------------------------------------------------------------------------- BatchNorm

    def _recompute_statistics(self, trainer: Trainer, module: TrainModule, layers: list[Any]) -> None:
        """Compute the statistics of the BatchNorm layers for the averaged weights."""
        assert self._trained is not None
        notice(f"{_NAME}: the training data is read once more to compute the statistics of BatchNorm.")
        buffers = _buffers_of(module, layers)
        self._buffers |= buffers
        # These are the statistics of the trained weights.
        self._trained |= {name: self._value(name).clone() for name in buffers}
        momenta = [(layer, layer.momentum) for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
        try:
            with _without_logging(module), torch.no_grad(), trainer.strategy.forward_context():
                self._run_training_steps(trainer, module, layers)
        finally:
            for layer, momentum in momenta:
                layer.momentum = momentum
        _average_over_ranks(trainer, layers)
        self._average |= {name: self._value(name).clone() for name in buffers}

    def _run_training_steps(self, trainer: Trainer, module: TrainModule, layers: list[Any]) -> None:
        """Run `training_step` once on this rank's batches of an epoch.

        The loader is another one than that of the fit, whose position a later checkpoint contains.
        """
        step: Callable[..., Any] = module.training_step
        accepted = 2 if accepts(step, 2) else 1
        world = trainer.strategy.data_world
        together = world.size > 1 and any(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
        loader = trainer.accelerator.prepare_loader(trainer.train_dataloader, window=False)
        try:
            batches = trainer.num_training_batches
            loader.limit = int(batches) if batches != float("inf") else None
            micro_batches = loader.iterate(trainer.current_epoch)
            while True:
                micro = next(micro_batches, None)
                # SyncBatchNorm communicates in each forward: a batch that only some ranks have is skipped
                if micro is None if not together else not all(world.exchange(micro is not None)):
                    return
                assert micro is not None
                step(*(micro.batch, micro.index)[:accepted])
        finally:
            trainer.accelerator.release_loader(loader)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def _average_is_for_inference(self) -> bool:
        return self._trained is not None

    def state_dict(self) -> dict[str, Any]:
        state = {"n_averaged": self.n_averaged, "latest_epoch": self._latest_epoch, "started": self._started}
        # after training, the average is in the model of the checkpoint
        return {**state, "average": {} if self._trained is not None else dict(self._average)}

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, module, checkpoint)
        state = checkpoint["callbacks"].get(self.state_key, {})
        if trainer.stage == "fit" and state.get("started"):
            self._replace_scheduler(trainer)  # The state of the new scheduler is restored next.

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.n_averaged, self._latest_epoch = int(state["n_averaged"]), int(state["latest_epoch"])
        self._started = bool(state["started"])
        self._restored = True
        self._take({**self._found, **state["average"]})


def _buffers_of(module: nn.Module, layers: list[Any]) -> dict[str, tuple[nn.Module, str]]:
    """The clean name of each statistic, with its owner and attribute."""
    layer_ids = {id(layer) for layer in layers}
    buffers = {
        f"{prefix}.{attribute}": (part, attribute)
        for prefix, part in module.named_modules()
        if id(part) in layer_ids
        for attribute, _ in part.named_buffers(recurse=False)
    }
    return {name: buffers[raw] for raw, name in clean_paths(module, buffers).items()}


def _average_over_ranks(trainer: Trainer, layers: list[Any]) -> None:
    """Combine the statistics of all ranks: each batch counts equally, wherever it was read."""
    strategy = trainer.strategy
    if strategy.data_world.size == 1:
        return
    for layer in layers:
        count, mean, variance = layer.num_batches_tracked, layer.running_mean, layer.running_var
        share = count.to(mean.dtype)
        total = strategy.mean(share.clone())
        for value in (mean, variance):
            value.copy_(strategy.mean(value * share) / total)
        count.copy_((total * strategy.data_world.size).round())


@contextmanager
def _without_logging(module: TrainModule) -> Iterator[None]:
    """Within it, what the module logs is dropped; afterwards its torchmetrics objects have their states from before."""
    before = copy.deepcopy(capture_objects(module))
    names = ("log", "log_dict")
    for name in names:
        module.__dict__[name] = _ignore
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]
        restore_objects(module, before)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replaces `log`."""
