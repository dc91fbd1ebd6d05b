"""`ExponentialMovingAverage`: evaluate with an average of the weights that forgets old steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainkit.callbacks.weight_averaging import WeightAveraging
from trainkit.checks import real_number, whole_number
from trainkit.errors import ConfigurationError

__all__ = ["EMAWeightAveraging", "ExponentialMovingAverage"]


class ExponentialMovingAverage(WeightAveraging):
    """Validates with an exponential moving average (EMA) of the weights, and puts it into the module after `fit`.

    After each averaged step: average = decay × average + (1 − decay) × weights. The first one is a copy of the weights. How
    it is kept, shown and saved: see `WeightAveraging`. Source: Tarvainen and Valpola, "Mean teachers are better role models",
    NeurIPS 2017; the name in Lightning, `EMAWeightAveraging`, is an alias.

    Args:
        device: Where the average is kept, such as `"cpu"`. Default: the device of the module.
        use_buffers: Average floating-point buffers too, such as the statistics of BatchNorm.
        decay: Weight of the old average, from 0 to 1.
        update_every_n_steps: Average after each step whose index, from 0, is a multiple of this. 0: not after steps.
        update_starting_at_step: Index of the first step to average after. Default: 0.
        update_starting_at_epoch: Index of the first epoch at whose end to average, in addition to steps. Default: at the end
            of no epoch.
        warmup: Begin with a lower decay: min(decay, (1 + n) / (10 + n)) after n averages, as
            `tf.train.ExponentialMovingAverage` does with `num_updates`. The average then forgets the first weights sooner.

    Raises:
        ConfigurationError: An argument is out of range; another callback averages the weights; or the strategy is ZeRO stage
            3, whose parameters are empty outside of a forward.

    Example:
        ```python
        trainer = Trainer(max_epochs=10, callbacks=[ExponentialMovingAverage(decay=0.999)])
        trainer.fit(module, train_loader, val_loader)     # validates with the average
        trainer.test(module, test_loader)                 # the module has the averaged weights
        module = MyModule.load_from_checkpoint(path)      # a checkpoint gives them, too
        ```
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        warmup: bool = False,
    ) -> None:
        super().__init__(device, use_buffers)
        name = "ExponentialMovingAverage"
        real_number(decay, f"{name}(decay=)", least=0, fix=f"{name}(decay=0.999)")
        if decay > 1:
            raise ConfigurationError(f"{name}(decay=) must be a number from 0 to 1, not {decay!r}. Fix: {name}(decay=0.999)")
        whole_number(update_every_n_steps, f"{name}(update_every_n_steps=)", 0)
        for argument, value in (("step", update_starting_at_step), ("epoch", update_starting_at_epoch)):
            if value is not None:
                whole_number(value, f"{name}(update_starting_at_{argument}=)", 0)
        self.decay = decay
        self.warmup = warmup
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """See `WeightAveraging.should_update`; follows the arguments `update_...`."""
        if step_idx is not None:
            every, first = self.update_every_n_steps, self.update_starting_at_step
            return every > 0 and step_idx % every == 0 and (first is None or step_idx >= first)
        first_epoch = self.update_starting_at_epoch
        return epoch_idx is not None and first_epoch is not None and epoch_idx >= first_epoch

    def _merge(self, averages: list[Tensor], values: list[Tensor]) -> None:
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
        get_ema_multi_avg_fn(decay)(averages, values, self._updates)


EMAWeightAveraging = ExponentialMovingAverage
