"""The hooks of `TrainModule` and `DataModule`, with Lightning's names and arguments.

Every hook is empty here, and is called only if a subclass overrides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.nested import move

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
        """Download, tokenize and write to disk. Called in one process of each node, before `setup` in any process.

        Do not assign attributes here: the other processes would not have them.
        """

    def setup(self, stage: str) -> None:
        """Called first, in every process: open and split the data.

        `stage` is `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def teardown(self, stage: str) -> None:
        """Called last, also after an error."""

    def train_dataloader(self) -> Any:
        """Return the training loader: a `DataLoader`, any iterable of batches, or a dict or list of them."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of them."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of them."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the loader to predict on, or a list of them."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the CPU before its transfer; with CUDA one step ahead of the computation."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override it for batches of your own classes."""
        return move(batch, device, non_blocking=device.type == "cuda")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device before the step receives it; the place for augmentation on the GPU."""
        return batch


class ModuleHooks(DataHooks):
    """The hooks of `TrainModule`. For their order see the page on hooks in the docs."""

    def configure_model(self) -> None:
        """Build large layers here: directly on the device, in the dtype of the run, and sharded if the strategy shards."""

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Shard the layers over the ranks of a tensor-parallel group, under `FSDPStrategy(tensor_parallel=...)`.

        Called after `configure_model`, with the values of rank 0, and before parameters are sharded over the other ranks. A
        loss that is computed in torch's `loss_parallel` needs it in the backward pass too: override `backward`, as
        `examples/llama.py` does.

        Each run calls it on the same module, and afterwards the parameters are whole again. So it must not edit attributes,
        such as `self.attention.heads //= mesh["tensor"].size()`: the next run would do it again.

        Args:
            mesh: The device mesh, with the dimensions `"data"` and `"tensor"`.

        Example:
            ```python
            def parallelize(self, mesh):
                parallelize_module(self.mlp, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            ```
        """

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return the callbacks of this module; one of a class that the trainer also has replaces the trainer's."""
        return []

    def batch_weight(self, batch: Any) -> float:
        """Return the weight of a micro-batch, such as its number of tokens: a finite number ≥ 0, computed on the CPU.

        Override it if samples have different lengths and `training_step` returns the mean over tokens: the gradient is then
        the mean over all tokens of the global batch. What `training_step` logs is weighted the same way, unless `log` is
        given a `batch_size`. By default the weight is the number of samples.
        """
        raise NotImplementedError

    def on_fit_start(self) -> None:
        """Called when the module is on its device and the optimizers exist."""

    def on_fit_end(self) -> None:
        """Called after training, if there was no error."""

    def on_sanity_check_start(self) -> None:
        """Called before the few validation batches that run ahead of training."""

    def on_sanity_check_end(self) -> None:
        """Called after the few validation batches that run ahead of training; the metrics that they logged are discarded."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of an epoch and the validation at its end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a micro-batch. Return -1 to skip the rest of the epoch, on all processes at the same `batch_idx`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch, and after the optimizer step if the accumulation window is full."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before the backward pass; `loss` is what `training_step` returned."""

    def on_after_backward(self) -> None:
        """Called after the backward pass of a micro-batch; under `16-mixed` the gradients are still scaled."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when the gradients of the accumulation window are complete and unscaled, and not yet clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients are set to zero, at the start of each accumulation window."""

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation."""

    def on_validation_model_eval(self) -> None:
        """Set the module to eval mode before validation. Override it to set only a part of it."""
        cast(nn.Module, self).eval()

    def on_validation_model_train(self) -> None:
        """Called after validation if it is overridden; otherwise the mode of every submodule is restored."""
        cast(nn.Module, self).train()

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of validation."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last batch of validation; metrics can still be logged."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch; `outputs` is what `validation_step` returned."""

    def on_test_start(self) -> None:
        """Called before the test."""

    def on_test_end(self) -> None:
        """Called after the test."""

    def on_test_model_eval(self) -> None:
        """See `on_validation_model_eval`."""
        cast(nn.Module, self).eval()

    def on_test_model_train(self) -> None:
        """See `on_validation_model_train`."""
        cast(nn.Module, self).train()

    def on_test_epoch_start(self) -> None:
        """Called before the first batch of the test."""

    def on_test_epoch_end(self) -> None:
        """Called after the last batch of the test; metrics can still be logged."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch; `outputs` is what `test_step` returned."""

    def on_predict_start(self) -> None:
        """Called before prediction."""

    def on_predict_end(self) -> None:
        """Called after prediction."""

    def on_predict_model_eval(self) -> None:
        """See `on_validation_model_eval`."""
        cast(nn.Module, self).eval()

    def on_predict_model_train(self) -> None:
        """See `on_validation_model_train`."""
        cast(nn.Module, self).train()

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch of prediction."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch of prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch of prediction."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a batch of prediction; `outputs` is what `predict_step` returned."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; what you add to `checkpoint` is saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before the state of a checkpoint is restored; what was added in `on_save_checkpoint` is in `checkpoint`."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; override it to run it in another way: `loss.backward(create_graph=True)`.

        Args:
            loss: A scalar: the micro-batch's loss, multiplied by its share of the accumulation window and by the loss scale.
            *args: Arguments of `Tensor.backward`.
            **kwargs: Arguments of `Tensor.backward`.
        """
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make the optimizer step at the end of an accumulation window; override it to change the step. Not under manual
        optimization.

        Args:
            epoch: Index of the epoch.
            batch_idx: Index of the window's last micro-batch.
            optimizer: The optimizer. Its `step` calls the closure, `on_before_optimizer_step`, clipping, and then steps.
            optimizer_closure: Returns the loss of the window, a scalar; its gradients are in the parameters. Each call after
                the first computes loss and gradients again, at the current parameters.

        Example:
            ```python
            def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
                for group in optimizer.param_groups:  # a linear warm-up over 500 steps
                    group["lr"] = min(1.0, (self.global_step + 1) / 500) * 1e-3
                optimizer.step(closure=optimizer_closure)
            ```
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Set the gradients to zero, at the start of an accumulation window; override it to do so in another way."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance a scheduler; override it for a scheduler with other arguments.

        `metric` is the value of the scheduler's monitored metric, or `None`.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)


def find_source(method: str, argument: Any, datamodule: Any, module: Any) -> Any:
    """The loader of a stage, or `None`: the argument, else what `method` of the data module or the module returns."""
    if argument is not None:
        return argument
    for owner in (datamodule, module):
        if owner is not None and is_overridden(owner, method, DataHooks):
            return getattr(owner, method)()
    return None
