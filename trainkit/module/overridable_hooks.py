"""The hooks of `TrainModule` and `DataModule`, with Lightning's names and arguments.

Every hook is empty here, and is called only if a subclass overrides it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.nested import move

if TYPE_CHECKING:
    from trainkit.callback import Callback

__all__ = ["DataHooks", "ModuleHooks", "find_source", "is_overridden"]


def is_overridden(owner: object, name: str, base: type) -> bool:
    """Whether an object overrides a method of a base class, in its class or by assignment.

    Args:
        owner: The user's module, data module, callback or logger.
        name: The method. `module.validation_step = None` removes it.
        base: The class of trainkit that defines it.
    """
    method = getattr(owner, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(base, name, None)


class DataHooks:
    """The hooks of `TrainModule` and `DataModule`: loaders, and the transfer of batches.

    Attributes:
        prepare_data_per_node: Call `prepare_data` in one process of each node; `False`: in one process of the run.
    """

    prepare_data_per_node: bool = True

    def prepare_data(self) -> None:
        """Download, tokenize, write to disk: called in one process of each node, before `setup` in any process.

        Do not assign attributes here: the other processes would not have them.
        """

    def setup(self, stage: str) -> None:
        """Called first, in every process. `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called last, also after an error."""

    def train_dataloader(self) -> Any:
        """The training loader: a `DataLoader`, any iterable of batches, or a dict or list of them."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """The validation loader, or a list of them."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """The test loader, or a list of them."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """The loader to predict on, or a list of them."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch before the transfer, on the CPU; with CUDA one step ahead of the computation."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch on the device; override it for batches of your own classes."""
        return move(batch, device, non_blocking=device.type == "cuda")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch on the device, as the step receives it; the place for augmentation on the GPU."""
        return batch


class ModuleHooks(DataHooks):
    """The hooks of `TrainModule`. For their order see the page on hooks in the docs."""

    def configure_model(self) -> None:
        """Build large layers here: directly on the device, in the dtype of the run, and sharded if the strategy shards."""

    def configure_callbacks(self) -> Callback | list[Callback]:
        """The callbacks of this module; one of a class that the trainer also has replaces it."""
        return []

    def batch_weight(self, batch: Any) -> float:
        """The weight of a micro-batch, such as its number of tokens: a finite number ≥ 0, computed on the CPU.

        Override it if samples have different lengths and `training_step` returns the mean over tokens: the gradient is then
        the mean over all tokens of the global batch. By default the weight is the number of samples.
        """
        raise NotImplementedError

    def on_fit_start(self) -> None:
        """The module is on its device, and the optimizers exist."""

    def on_fit_end(self) -> None:
        """After training without an error."""

    def on_sanity_check_start(self) -> None:
        """Before the few validation batches that run ahead of training."""

    def on_sanity_check_end(self) -> None:
        """After these batches; their logged metrics are discarded."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """After the last batch of an epoch and the validation at its end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a micro-batch. Returning -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch, and after the optimizer step if it completes its accumulation window."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before the backward pass; `loss` as `training_step` returned it."""

    def on_after_backward(self) -> None:
        """After the backward pass of a micro-batch; under `16-mixed` the gradients are still scaled."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The gradients are complete and unscaled, and not yet clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before the gradients are set to zero, at the start of each accumulation window."""

    def on_validation_start(self) -> None:
        """Before validation."""

    def on_validation_end(self) -> None:
        """After validation."""

    def on_validation_model_eval(self) -> None:
        """Set the module to eval mode before validation. Override it to set only a part."""
        cast(nn.Module, self).eval()

    def on_validation_model_train(self) -> None:
        """Called after validation if it is overridden; otherwise the mode of every submodule is restored."""
        cast(nn.Module, self).train()

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of validation."""

    def on_validation_epoch_end(self) -> None:
        """After the last batch of validation; metrics can still be logged."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a batch of validation."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a batch of validation; `outputs` is what `validation_step` returned."""

    def on_test_start(self) -> None:
        """Before the test."""

    def on_test_end(self) -> None:
        """After the test."""

    def on_test_model_eval(self) -> None:
        """See `on_validation_model_eval`."""
        cast(nn.Module, self).eval()

    def on_test_model_train(self) -> None:
        """See `on_validation_model_train`."""
        cast(nn.Module, self).train()

    def on_test_epoch_start(self) -> None:
        """Before the first batch of the test."""

    def on_test_epoch_end(self) -> None:
        """After the last batch of the test; metrics can still be logged."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a batch of the test."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a batch of the test; `outputs` is what `test_step` returned."""

    def on_predict_start(self) -> None:
        """Before prediction."""

    def on_predict_end(self) -> None:
        """After prediction."""

    def on_predict_model_eval(self) -> None:
        """See `on_validation_model_eval`."""
        cast(nn.Module, self).eval()

    def on_predict_model_train(self) -> None:
        """See `on_validation_model_train`."""
        cast(nn.Module, self).train()

    def on_predict_epoch_start(self) -> None:
        """Before the first batch of prediction."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch of prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a batch of prediction."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a batch of prediction; `outputs` is what `predict_step` returned."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint's state is restored."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Set the gradients to zero at the start of an accumulation window."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance a scheduler; `metric` is the value of its monitored metric, if it has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)


def find_source(method: str, given: Any, datamodule: Any, module: Any) -> Any:
    """The loader of a stage, or `None`: the argument, else what `method` of the data module or the module returns."""
    if given is not None:
        return given
    for owner in (datamodule, module):
        if owner is not None and is_overridden(owner, method, DataHooks):
            return getattr(owner, method)()
    return None
