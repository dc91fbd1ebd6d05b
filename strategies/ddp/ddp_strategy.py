"""`DDPStrategy`: a copy of the model on every rank, gradients averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.checks import real_number
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.footprint import Contents, Footprint, Moment, in_backward
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch, MicroBatchKind
from trainkit.nested import leaves
from trainkit.precision import Precision
from trainkit.strategies._copies import Buffers, check_modules_match
from trainkit.strategies._gather import gathered
from trainkit.strategies._membership import Membership
from trainkit.strategies._reduction import average_gradients, broadcast, mean, sparse_parameters
from trainkit.strategies.ddp.compression import Compression
from trainkit.strategies.ddp.fixed_buckets import FixedDDP
from trainkit.strategies.ddp.info import INFO
from trainkit.strategies.ddp.replica import PreparedModel, Replica, TrainingStep
from trainkit.strategies.ddp.sync_batchnorm import SyncedBatchNorms
from trainkit.strategy import Strategy

__all__ = ["DDPStrategy"]

_NULL = nullcontext()


class DDPStrategy(Strategy):
    """Data parallel training with torch's `DistributedDataParallel`, on any number of processes. What `strategy="ddp"` makes.

    Each rank has the whole model and processes its shard of each global batch. Gradients are averaged in buckets during the
    backward pass of the last micro-batch of an accumulation window. With one process, this is the same as `Strategy`.

    Args:
        process_group_backend: `"gloo"`, `"nccl"`, … Default: nccl for CUDA, gloo for the CPU.
        timeout: Timeout of collectives: a timedelta, or a number of seconds.
        static_graph: Every step uses the same parameters, the same number of times and in the same order. Supports
            reentrant activation checkpointing, and searches for unused parameters only once. Every `training_step` must
            return a loss.
        find_unused_parameters: Allow parameters without a gradient in some steps. Traverses the autograd graph in every
            step.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves memory of the size of the gradients.
        bucket_cap_mb: Bucket size in MB. Default: 25, as in torch, with a first bucket of 1 MB.
        comm_hook: Send gradients in fewer bytes: `"fp16"`, `"bf16"`, `"powersgd"` (Vogels et al., "PowerSGD", NeurIPS
            2019), or a function `(state, bucket)` as in `torch.distributed.algorithms.ddp_comm_hooks`.
        comm_state: The first argument of that function. For `"powersgd"`: a dict of options of torch's `PowerSGDState`.
        sync_batchnorm: Compute BatchNorm statistics over the micro-batches of all ranks. Not supported on the CPU.
        device: A torch device, or `"auto"`: one GPU for each process, otherwise MPS or the CPU.
        precision: As in `Strategy`.

    Raises:
        ConfigurationError: An argument is wrong, or contradicts another.

    Example:
        ```python
        strategy = DDPStrategy(gradient_as_bucket_view=True, comm_hook="bf16")
        trainer = Trainer(strategy=strategy, accelerator="gpu", devices=8)
        ```
    """

    name: ClassVar[str] = "ddp"
    info = INFO
    can_sync_batchnorm: ClassVar[bool] = True

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float = 25,
        comm_hook: str | Callable[..., Any] | None = None,
        comm_state: Any = None,
        sync_batchnorm: bool = False,
        device: str | torch.device = "auto",
        precision: Precision | str | int | None = None,
    ) -> None:
        super().__init__(device, precision)
        real_number(bucket_cap_mb, "bucket_cap_mb", above=0, example=25)
        self._membership = Membership("DDPStrategy", device, process_group_backend, timeout)
        self.process_group_backend, self.timeout = process_group_backend, self._membership.timeout
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_cap_mb = bucket_cap_mb
        self.sync_batchnorm = sync_batchnorm
        self._compression = Compression(comm_hook, comm_state)
        self._norms = SyncedBatchNorms()
        self._reset()

    def _reset(self) -> None:
        self._step: TrainingStep | None = None  # the training_step of automatic optimization
        self._models: list[PreparedModel] = []  # the models that your own training loop calls
        self._buffers = Buffers()
        self._sparse: set[int] = set()  # ids of parameters with sparse gradients
        self._known: dict[int, int] = {}  # id of an optimizer → number of its parameters that have been checked
        self._stepping = False  # inside a training_step of automatic optimization

    def join(self, wanted: RequestedDevices) -> None:
        """See `trainkit.Strategy.join`."""
        self.world, self.device = self._membership.join(wanted, self.device)
        self.joined = True
        if self.sync_batchnorm and self.device.type == "cpu" and not self._alone:
            raise ConfigurationError(
                "sync_batchnorm=True does not work on the CPU: torch supports nn.SyncBatchNorm on GPUs only. Remove it, or use "
                "layers without batch statistics: nn.GroupNorm(num_groups, num_channels)"
            )

    @property
    def _alone(self) -> bool:
        return self.world.size == 1

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Move the module to the device, and broadcast its parameters and buffers from rank 0."""
        module = super().prepare_module(module)
        if self._alone:
            return module
        if self.sync_batchnorm:
            self._norms.convert(module, self.world)
        check_modules_match(module, self.world, "DDP")
        self._buffers.add(module, self.world)
        self._sparse |= sparse_parameters(module)
        broadcast([p.data for p in module.parameters()])
        self.sync_buffers()
        return module

    def wrap(self, module: nn.Module) -> nn.Module:
        """See `trainkit.Strategy.wrap`."""
        if self._alone:
            return module
        model = PreparedModel(module, late=self.static_graph, **self._options())
        if self._norms:
            model.register_forward_pre_hook(lambda *_: self._norms.select_statistics(self.micro_batch.uneven))
        self._models.append(model)
        for each in self._models:
            each.replica.watched = len(self._models) > 1
        return model

    def _options(self) -> dict[str, Any]:
        return {"make": self._make, "due": self._due, "world": self.world}

    def _make(self, target: nn.Module, due: Callable[[], bool]) -> FixedDDP:
        ddp = FixedDDP(
            target,
            due,
            bucket_cap_mb=self.bucket_cap_mb,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters and not self.static_graph,  # static_graph finds them anyway
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        self._compression.register(ddp)
        return ddp

    def _replicas(self) -> list[Replica]:
        return [part.replica for part in (self._step, *self._models) if part is not None]

    def _due(self) -> bool:
        """Whether the backward pass of the current micro-batch averages gradients."""
        return self.micro_batch.last and not self.micro_batch.uneven

    def unwrap(self, module: nn.Module) -> nn.Module:
        """See `trainkit.Strategy.unwrap`."""
        return module.module if isinstance(module, PreparedModel) else super().unwrap(module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """See `trainkit.Strategy.step_function`. With automatic optimization `training_step` runs in DDP's forward."""
        run = super().step_function(wrapped, module, name, compiler)
        if self._alone or name != "training_step" or not getattr(module, "automatic_optimization", True):
            return run
        if self._step is not None:
            self._step.replica.close()
        step = self._step = TrainingStep(module, run, static_graph=self.static_graph, **self._options())
        norms = self._norms

        def training_step(*args: Any) -> Any:
            micro = self.micro_batch
            if micro.first:
                step.begin_window(micro.uneven)
                norms.select_statistics(micro.uneven)
            self._stepping = True
            try:
                return step(*args)
            finally:
                self._stepping = False

        return training_step

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """See `trainkit.Strategy.backward`. Averages gradients in the last micro-batch of a window."""
        if self._alone:
            super().backward(loss, micro, **kwargs)
        elif loss is None:
            self.skip_backward(None, micro)
        elif self._step is not None:
            due = micro.last and not micro.uneven
            with self.world.collectives if due else _NULL:
                self._step.backward(self.precision.scale(loss), due, **kwargs)
        else:
            self._backward_of_models(loss, **kwargs)

    def _backward_of_models(self, loss: Tensor, call: Callable[..., Any] = Tensor.backward, **kwargs: Any) -> None:
        """Run the backward pass of your own training loop, through the prepared models that it called.

        Raises:
            ModuleError: It called no prepared model.
        """
        called = [model for model in self._models if model.replica.called]
        if self._models and not called:
            raise ModuleError(
                "no prepared model was called since the last backward pass, but gradients are averaged only after a prepared "
                "model was called. Call the model that prepare returned: model(...), not one of its methods. Add up the losses "
                "of one forward: accelerator.backward(loss1 + loss2)"
            )
        for model in called:
            model.replica.reached = False
        with self._collective_context(called):
            call(self.precision.scale(loss), **kwargs)
        # if it reached no model's outputs, the loss was computed from something else, which may involve all models
        for model in [model for model in called if model.replica.reached] or called:
            model.finish_backward()

    def _collective_context(self, models: list[PreparedModel]) -> AbstractContextManager[Any]:
        """A context for a backward pass: it counts as a collective if one of the models averages its gradients."""
        return self.world.collectives if any(model.replica.due() for model in models) else _NULL

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See `trainkit.Strategy.skip_backward`."""
        if self._alone:
            return
        due = micro.last and not micro.uneven
        self.precision.scale(torch.zeros((), device=self.device))  # keeps the loss scale the same on all ranks
        if self._step is not None:
            if micro.kind is not MicroBatchKind.DATA:  # no forward has started the window
                self._step.begin_window(micro.uneven)
            with self.world.collectives if due else _NULL:
                self._step.skip(loss is not None, due)
            return
        called = [model for model in self._models if model.replica.called]
        if not called and any(model.replica.due() for model in self._models):
            called = self._models  # the other ranks called it
            if len(called) > 1:
                raise ModuleError(
                    "backward(None) was called with several prepared models, but none of them was called since the last "
                    "backward pass, so it is unclear which of them the other ranks wait for. Call the models first: "
                    "model(batch), then backward(None)"
                )
        # in the order of a backward pass, which is also the order in which the other ranks average
        with self._collective_context(called):
            for model in sorted(called, key=lambda model: -model.replica.called):
                model.skip_backward()

    def any_loss(self, had_loss: bool) -> bool:
        """See `trainkit.Strategy.any_loss`. Call it after the gradients have been averaged."""
        if had_loss or self._step is None or self._step.probe_parameter.grad is None:
            return had_loss
        return bool(self._step.probe_parameter.grad.abs() > 0.0)

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See `trainkit.Strategy.reduce_gradients`.

        `comm_hook="fp16"` and `"bf16"` apply here too; other hooks do not.
        """
        if self._alone:
            return
        own = [] if self._step is None else [self._step.probe_parameter]
        with self.world.collectives:
            average_gradients([*parameters, *own], self.bucket_cap_mb, wire=self._compression.wire, sparse=self._sparse)
        for replica in self._replicas():
            replica.forget_backward()

    def mean(self, value: Tensor) -> Tensor:
        """See `trainkit.Strategy.mean`."""
        if self._alone:
            return value
        with self.world.collectives:
            return mean(value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters, and broadcast the buffers from rank 0.

        Raises:
            ModuleError: The optimizer has parameters whose gradients are not averaged.
        """
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if not self._alone and self._known.get(id(optimizer)) != count:
            self._refuse_unknown_parameters(optimizer)
            self._known[id(optimizer)] = count
        updated = super().optimizer_step(optimizer, closure)
        if self._buffers:
            self.sync_buffers()
        return updated

    def _refuse_unknown_parameters(self, optimizer: Optimizer) -> None:
        replicas = self._replicas()
        if not replicas:
            return  # the gradients of all parameters of the optimizer are averaged
        known = {id(p) for replica in replicas for p in replica.parameters}
        unknown = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in known]
        if unknown:
            raise ModuleError(
                f"{type(optimizer).__name__} has {len(unknown)} parameters (the first of shape {tuple(unknown[0].shape)}) that "
                "were not in a module when it was prepared, so their gradients are not averaged over the ranks. Create all "
                "parameters in __init__ or configure_model, and prepare all modules: accelerator.prepare(model, other)"
            )

    def sync_buffers(self) -> None:
        """See `trainkit.Strategy.sync_buffers`."""
        self._buffers.sync()

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """See `trainkit.Strategy.footprint`. Adds the buckets, unless gradients are views of them."""
        alone = super().footprint(contents, processes)
        if processes == 1:
            return alone
        update = alone.moments["update"].device
        views = self.gradient_as_bucket_view
        held = replace(update, gradients=0, buffers=0 if views else update.gradients)
        moments = {"update": Moment(replace(held, gradients=update.gradients)), **in_backward(contents, held, kept=views)}
        return replace(alone, moments=moments)

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """See `trainkit.Strategy.all_gather`.

        Raises:
            ConfigurationError: The ranks pass different containers, shapes or dtypes, or not all ranks call it.
        """
        if self.micro_batch.uneven and not self._alone:
            self._refuse_uneven(data, sync_grads)
        return data if self._alone else gathered(data, self.world, self.device, sync_grads, alike)

    def _refuse_uneven(self, data: Any, sync_grads: bool) -> None:
        """Raise an error where ranks without a micro-batch do not participate: in `training_step` and in its backward."""
        if self._stepping or (sync_grads and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(data))):
            raise ConfigurationError(
                "all_gather was called in an accumulation window in which some ranks have fewer micro-batches than others, "
                "such as the last one of an epoch. Those ranks do not call it, so the others would wait forever. End the epoch "
                "after n micro-batches, where n is the number that every rank has: Trainer(limit_train_batches=n)"
            )

    def barrier_for(self, verb: str) -> None:
        """See `trainkit.Strategy.barrier_for`.

        Raises:
            CollectiveError: Another rank is in a different verb, or has exited; the message names the lines of code.
        """
        CollectiveChecks.of(self.world).wait(verb)

    def teardown(self) -> None:
        """Remove the hooks from the parameters. Keeps the process groups, which may be used elsewhere."""
        for replica in self._replicas():
            replica.close()
        self._norms.restore()
        self._reset()
        super().teardown()
