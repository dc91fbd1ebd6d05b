"""`DDPStrategy`: a copy of the model on every rank, gradients averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainkit.checks import real_number
from trainkit.console import notice
from trainkit.data.micro_batches import WHOLE_WINDOW, MicroBatch, MicroBatchKind
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, ModuleError, UnknownNameError, nearest
from trainkit.nested import leaves
from trainkit.precision import Precision
from trainkit.strategies._collectives import Buffers, average_gradients, broadcast, check_modules_match, sparse_parameters
from trainkit.strategies._processes import ProcessStrategy
from trainkit.strategies.ddp import INFO
from trainkit.strategies.ddp.replica import FixedDDP, PreparedModel, Replica, TrainingStep
from trainkit.strategy import Contents, Footprint, StepArguments, StepMemory, in_backward

__all__ = ["DDPStrategy", "SyncedBatchNorms"]


_NULL = nullcontext()


class DDPStrategy(ProcessStrategy):
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
    main_saves_alone: ClassVar[bool] = True

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
        super().__init__(process_group_backend, timeout, device, precision)
        real_number(bucket_cap_mb, "bucket_cap_mb", above=0, example=25)
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

    def check_arguments(self, arguments: StepArguments) -> None:
        super().check_arguments(arguments)
        if arguments.auto_micro_batch and self.static_graph:
            raise ConfigurationError(
                "auto_micro_batch=True and DDPStrategy(static_graph=True) contradict each other: a micro-batch in parts is "
                "not like the first one. Remove one of them."
            )

    def join(self, wanted: RequestedDevices) -> None:
        super().join(wanted)
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
        """Run the backward pass of your own training loop, through the prepared models that it called."""
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
        probes = [] if self._step is None else [self._step.probe_parameter]
        with self.world.collectives:
            average_gradients([*parameters, *probes], self.bucket_cap_mb, wire=self._compression.wire, sparse=self._sparse)
        for replica in self._replicas():
            replica.forget_backward()

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

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """See `trainkit.Strategy.footprint`. Adds the buckets, unless gradients are views of them."""
        alone = super().footprint(contents, processes)
        if processes == 1:
            return alone
        update = alone.moments["update"].device
        views = self.gradient_as_bucket_view
        held = replace(update, gradients=0, buffers=0 if views else update.gradients)
        moments = {"update": StepMemory(replace(held, gradients=update.gradients)), **in_backward(contents, held, kept=views)}
        return replace(alone, moments=moments)

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        self._refuse_in_parts("all_gather")
        if self.micro_batch.uneven and not self._alone:
            self._refuse_uneven(data, sync_grads)
        return super().all_gather(data, sync_grads, alike)

    def barrier_for(self, verb: str) -> None:
        self._refuse_in_parts(verb)
        super().barrier_for(verb)

    def _refuse_in_parts(self, verb: str) -> None:
        """Raise an error in a `training_step` that other ranks may call less often."""
        if self.micro_batch.alone and self._stepping and not self._alone:
            raise ConfigurationError(
                f"{verb} was called in training_step with auto_micro_batch=True, where a rank whose memory runs out calls "
                "training_step more often than the others, which would wait forever. Call it in on_train_batch_end, or remove "
                "auto_micro_batch."
            )

    def _refuse_uneven(self, data: Any, sync_grads: bool) -> None:
        """Raise an error where ranks without a micro-batch do not participate: in `training_step` and in its backward."""
        if self._stepping or (sync_grads and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(data))):
            raise ConfigurationError(
                "all_gather was called in an accumulation window in which some ranks have fewer micro-batches than others, "
                "such as the last one of an epoch. Those ranks do not call it, so the others would wait forever. End the epoch "
                "after n micro-batches, where n is the number that every rank has: Trainer(limit_train_batches=n)"
            )

    def teardown(self) -> None:
        """Remove the hooks from the parameters. Keeps the process groups, which may be used elsewhere."""
        for replica in self._replicas():
            replica.close()
        self._norms.restore()
        self._reset()
        super().teardown()


class SyncedBatchNorms:
    """Replaces BatchNorm layers by `nn.SyncBatchNorm`, which communicates in every forward.

    In an accumulation window in which ranks have different numbers of micro-batches, each rank uses its own statistics, because
    ranks without a micro-batch run no forward.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []  # parent module, name, the user's layer
        self._layers: list[nn.SyncBatchNorm] = []
        self._local_group: Any = None  # a process group that contains only this rank
        self._local = False

    def __bool__(self) -> bool:
        return bool(self._layers)

    def convert(self, module: nn.Module, world: World) -> None:
        """Replace all BatchNorm layers by synchronized ones with the same parameters and buffers."""
        synced: dict[nn.Module, nn.SyncBatchNorm] = {}
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                    if layer not in synced:
                        synced[layer] = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
                    setattr(owner, name, synced[layer])
                    self._replaced.append((owner, name, layer))
        self._layers += [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
        if self._layers and self._local_group is None:
            groups = [dist.new_group([rank]) for rank in range(world.size)]  # every rank must create every group
            self._local_group = groups[world.rank]
            notice(
                "sync_batchnorm: in an accumulation window in which some ranks have fewer micro-batches than others, such as "
                "the last one of an epoch, each rank uses its own BatchNorm statistics."
            )

    def select_statistics(self, uneven: bool) -> None:
        """Select synchronized or local statistics, before the first forward of an accumulation window."""
        if uneven is not self._local:
            self._local = uneven
            for layer in self._layers:
                layer.process_group = self._local_group if uneven else None

    def restore(self) -> None:
        """Restore the user's layers, with the parameters and buffers of the synchronized ones."""
        self.select_statistics(False)
        for owner, name, layer in self._replaced:
            synced = getattr(owner, name)
            layer._parameters.update(synced._parameters)
            layer._buffers.update(synced._buffers)
            layer.train(synced.training)
            setattr(owner, name, layer)
        self._replaced.clear()
        self._layers.clear()


_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWERSGD = "powersgd"


class Compression:
    """The communication hook that `DDPStrategy(comm_hook=, comm_state=)` selects.

    Args:
        hook: `"fp16"`, `"bf16"`, `"powersgd"`, a DDP communication hook, or `None`.
        state: The first argument of the hook. For "powersgd": a `PowerSGDState` of torch, or a dict of its options.

    Attributes:
        wire: The dtype that gradients are sent in, for "fp16" and "bf16"; else `None`.
    """

    def __init__(self, hook: str | Callable[..., Any] | None, state: Any) -> None:
        known = (*_WIRES, _POWERSGD)
        if isinstance(hook, str) and hook not in known:
            raise UnknownNameError(
                f"unknown comm_hook {hook!r}; known: {', '.join(known)}, or a function (state, bucket) like those in "
                f"torch.distributed.algorithms.ddp_comm_hooks.{nearest(hook, known)}"
            )
        if hook is not None and not isinstance(hook, str) and not callable(hook):
            raise ConfigurationError(
                f"comm_hook must be one of {', '.join(known)}, or a function (state, bucket), not {hook!r}. For example: "
                "comm_hook='bf16'"
            )
        if state is not None and (hook is None or hook in _WIRES):
            raise ConfigurationError(
                f"comm_state needs comm_hook='powersgd' or a function, not {hook!r}. Remove it, or use comm_hook='powersgd'."
            )
        self._hook = hook
        self._state = state
        self.wire = _WIRES.get(hook) if isinstance(hook, str) else None
        self._powersgd_state: Any = None  # the PowerSGDState, kept when DDP is created again
        if hook == _POWERSGD and isinstance(state, Mapping):
            self._make_powersgd_state(**state)  # raises now if the options are wrong, not when training begins

    def register(self, ddp: DistributedDataParallel) -> None:
        """Register the hook with DDP."""
        if self._hook is None:
            return
        if self.wire is not None:
            ddp.register_comm_hook(self.wire, _plain(_send_short))
        elif self._hook == _POWERSGD:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

            ddp.register_comm_hook(self._state_for_new_buckets(), _plain(powerSGD_hook))
        else:
            assert callable(self._hook)
            ddp.register_comm_hook(self._state, _plain(self._hook))

    def _state_for_new_buckets(self) -> Any:
        """A state for new buckets, without the errors and matrices of earlier buckets, whose shapes may differ."""
        if self._state is not None and not isinstance(self._state, Mapping):
            made = self._state
            for memory in (made.error_dict, made.p_memory_dict, made.q_memory_dict):
                memory.clear()
        else:
            made = self._make_powersgd_state(**(self._state or {}))
            made.iter = 0 if self._powersgd_state is None else self._powersgd_state.iter
        if self._powersgd_state is None:
            notice(
                "comm_hook='powersgd': checkpoints do not contain PowerSGD's state of earlier gradients, so a resumed run "
                "differs slightly from an uninterrupted one."
            )
        self._powersgd_state = made
        return made

    def _make_powersgd_state(self, **options: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        try:
            return PowerSGDState(process_group=None, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"comm_state must have options of torch's PowerSGDState for comm_hook='powersgd': {error}. For example: "
                "comm_state={'matrix_approximation_rank': 2, 'start_powerSGD_iter': 1000}"
            ) from None


def _send_short(wire: torch.dtype, bucket: Any) -> Any:
    """Average a bucket over all ranks, sent in a shorter dtype. Complex and already short values are sent unchanged."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    short = buffer.is_floating_point() and wire.itemsize < buffer.dtype.itemsize
    sent = buffer.to(wire) if short else buffer
    future: Future[Any] = dist.all_reduce(sent, async_op=True).get_future()

    def read_result(done: Future[Any]) -> Any:
        values = done.value()  # raises if the all-reduce failed
        # for a complex bucket, values[0] has the real pairs that were sent; torch 2.9 would read only half of them
        return buffer.copy_(values[0]) if short else buffer

    return future.then(read_result)


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that it passes torch's checks, which reject annotations as text, and some hook names in some builds."""

    def call(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return call
