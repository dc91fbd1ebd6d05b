"""`WeightAveraging`: evaluate with an average of the weights of the steps so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainkit.callbacks._averaged_weights import AveragedWeights
from trainkit.errors import ConfigurationError
from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["WeightAveraging"]

__getattr__, _ = lazily(globals(), {"EMAWeightAveraging": ".exponential_moving_average"})  # Lightning has it in this module.

AverageFunction = Callable[[Tensor, Tensor, Any], Tensor]
MultiAverageFunction = Callable[[Any, Any, Any], None]


class WeightAveraging(AveragedWeights):
    """Averages the weights during training, and validates with the average. After `fit` the module has the averaged weights.

    By default all averaged steps count equally, as in `torch.optim.swa_utils.AveragedModel`. For an average that forgets old
    steps, use `ExponentialMovingAverage`. Override `should_update` to choose the steps.

    Trained parameters and, with `use_buffers`, floating-point buffers are averaged. A parameter that was never trained is not
    copied. Parameters with 16 bits have an average with 32 bits. Until the first average, validation uses the trained weights
    (in Lightning: the initial ones). Integer buffers are always the module's own.

    A checkpoint contains both: the averaged weights are the weights of the model (`model.safetensors`), so that
    `load_from_checkpoint`, `trainer.test(ckpt_path=...)` and other programs get them; the trained weights are in
    `state.safetensors`, and `trainer.fit(ckpt_path=...)` continues with them. A resumed run is bit-identical to one that was
    never interrupted, also after a signal in the middle of a validation.

    Memory: one copy of what is averaged, and a second one during validation and after `fit`. Under FSDP each rank averages its
    shards; host memory then needs room for all trained weights, on the main process to save a checkpoint, on each to load it.

    Args:
        device: Where the average is kept, such as `"cpu"`. Default: the device of the module. On another device, each update
            waits for the device of the module.
        use_buffers: Average floating-point buffers too, such as the statistics of BatchNorm. `False`: validation uses the
            module's own buffers.
        avg_fn: Called with the average of a tensor, its current value and the number of averages so far; returns the new
            average. See `torch.optim.swa_utils.AveragedModel`. Under FSDP the tensors are this rank's shards.
        multi_avg_fn: The same for lists of tensors; it changes the averages in place.

    Raises:
        ConfigurationError: Both functions were given; another callback averages the weights; or the strategy is ZeRO stage 3,
            whose parameters are empty outside of a forward. The last two are raised before training.

    Example:
        ```python
        from torch.optim.swa_utils import get_ema_avg_fn

        class LateAverage(WeightAveraging):
            def should_update(self, step_idx=None, epoch_idx=None):
                return step_idx is not None and step_idx >= 1000

        trainer = Trainer(max_epochs=10, callbacks=[LateAverage(avg_fn=get_ema_avg_fn(0.99))])
        ```
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: AverageFunction | None = None,
        multi_avg_fn: MultiAverageFunction | None = None,
    ) -> None:
        super().__init__(device, use_buffers)
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(
                f"{type(self).__name__} expected one function that averages, got avg_fn and multi_avg_fn. Remove one of them."
            )
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn

    def _forget(self) -> None:
        super()._forget()
        self._updates = 0  # number of averages so far
        self._latest_step, self._latest_epoch = 0, -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to average the weights now. Override it to choose; it must return the same on all processes.

        Called after each optimizer step and at the end of each epoch. A skipped step does not count.

        Args:
            step_idx: Index of the last optimizer step, from 0; `None` at the end of an epoch.
            epoch_idx: Index of the epoch that ends, from 0; `None` after a step.

        Returns:
            By default `True` after each step.
        """
        return step_idx is not None

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        if not self._restored:
            self._latest_step = trainer.global_step

    # A process without a batch in a step gets no on_train_batch_end, and a resumed run may begin after it. So each hook in
    # which the weights are still those of the last step averages them, if that has not been done: the result is the same.

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        self._catch_up(trainer)
        return None

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        self._catch_up(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._catch_up(trainer)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if module is not self._owner:
            return
        if trainer.stage == "fit":
            self._catch_up(trainer)
        self._begin_validation()
        if self._borrowed:
            trainer.strategy.precision.weights_changed(module)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._borrowed:
            self._end_validation()
            trainer.strategy.precision.weights_changed(module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._catch_up(trainer)
        if trainer.current_epoch > self._latest_epoch:
            self._latest_epoch = trainer.current_epoch
            if self.should_update(epoch_idx=trainer.current_epoch):
                self._update()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._average:
            self._show()  # the trained weights are kept for trainer.save_checkpoint after fit

    def _catch_up(self, trainer: Trainer) -> None:
        """Average the weights of the last optimizer step, if that is due and was not done."""
        step = trainer.global_step
        if step == self._latest_step:
            return
        self._latest_step = step
        if self.should_update(step_idx=step - 1):
            self._update()

    def _update(self) -> None:
        with torch.inference_mode(False):  # validation calls it too
            self._accumulate()
        self._updates += 1

    def _merge(self, averages: list[Tensor], values: list[Tensor]) -> None:
        number = torch.tensor(self._updates)
        if self.multi_avg_fn is not None:
            self.multi_avg_fn(averages, values, number)
        elif self.avg_fn is not None:
            for average, value in zip(averages, values, strict=True):
                average.copy_(self.avg_fn(average, value, number))
        else:
            get_swa_multi_avg_fn()(averages, values, self._updates)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "latest_step": self._latest_step, "latest_epoch": self._latest_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._updates = int(state["updates"])
        self._latest_step, self._latest_epoch = int(state["latest_step"]), int(state["latest_epoch"])
