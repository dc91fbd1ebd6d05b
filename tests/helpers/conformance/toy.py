"""`AllReduceStrategy`: data parallel training that uses only the collectives of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit import Strategy
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import device_of, join
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch
from trainkit.nested import map_tensors
from trainkit.registry import StrategyInfo

__all__ = ["INFO", "AllReduceStrategy"]

INFO = StrategyInfo(path=f"{__name__}:AllReduceStrategy", names={"all_reduce": {}}, devices=("cpu", "cuda"))


class AllReduceStrategy(Strategy):
    """Every process has the whole model. Gradients are averaged once in each accumulation window, before the optimizer step."""

    name = "all_reduce"
    info = INFO
    averages_in_step = True  # the engine calls reduce_gradients before each optimizer step
    supported_precisions = ("32-true", "64-true", "bf16-mixed", "bf16-true")  # no loss scale

    def __init__(self, *, timeout: timedelta = timedelta(minutes=5), device: Any = "auto", precision: Any = None) -> None:
        super().__init__(device, precision)
        self.timeout = timeout

    def join(self, wanted: RequestedDevices) -> None:
        wanted = replace(wanted, accelerator=self.device.type)
        self.world = join(wanted, timeout=self.timeout)
        self.device, self.joined, self._buffers = device_of(wanted, self.world), True, []

    def prepare_module(self, module: nn.Module) -> nn.Module:
        module = super().prepare_module(module)
        self._buffers += module.buffers()
        self._broadcast(module.parameters())
        self.sync_buffers()
        return module

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        parameters = list(parameters)
        present = self.world.largest([parameter.grad is not None for parameter in parameters])
        for parameter, on_any_rank in zip(parameters, present, strict=True):
            if on_any_rank:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(self.mean(parameter.grad))

    def any_loss(self, had_loss: bool) -> bool:
        return bool(self.world.largest([had_loss])[0])

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        updated = super().optimizer_step(optimizer, closure)
        self.sync_buffers()
        return updated

    def sync_buffers(self) -> None:
        self._broadcast(self._buffers)

    def mean(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value
        total = value.detach() / self.world.size
        with self.world.collectives:
            dist.all_reduce(total)
        return total

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) needs a strategy that sends gradients back: strategy='ddp'")
        return data if self.world.size == 1 else map_tensors(data, self._gather)

    def _gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.world.size)]
        with self.world.collectives:
            dist.all_gather(parts, tensor.detach().contiguous())
        return torch.stack(parts)

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        if self.world.size > 1:
            with self.world.collectives:
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), 0)
