"""`FSDPStrategy`: shards parameters, gradients and optimizer state with torch's `fully_shard`, with tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from inspect import ismethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from trainkit.accelerator.prepared_models import Wrapped
from trainkit.checks import accepts, arguments_of, describe_arguments
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin
from trainkit.data.micro_batches import WHOLE_WINDOW, MicroBatch
from trainkit.distributed.parameter_placement import refuse_sharded
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.launch.joining import single_process_group
from trainkit.names import refuse_unknown
from trainkit.optim.optimizer_copy import StoredOptimizer
from trainkit.optim.optimizer_gradients import total_norm
from trainkit.precision import Precision
from trainkit.strategies._collectives import Buffers, average_gradients, check_modules_match
from trainkit.strategies._processes import ProcessStrategy
from trainkit.strategies.fsdp import INFO, sharded_models
from trainkit.strategies.fsdp.fsdp_memory import footprint
from trainkit.strategies.fsdp.sharded_model import ShardedModel
from trainkit.strategies.fsdp.sharded_models import FSDPOptions, Meshes, ShardedModels
from trainkit.strategy import Contents, Footprint

__all__ = ["FSDPStrategy"]


_BUCKET_MB = 25.0  # Bucket size for the gradients of parameters that are not sharded.


class FSDPStrategy(ProcessStrategy):
    """PyTorch's fully sharded data parallelism (FSDP2): each rank keeps a shard of the model. What `strategy="fsdp"` makes.

    Parameters, gradients and optimizer state are sharded over the ranks (Zhao et al., "PyTorch FSDP", VLDB 2023). The
    parameters of a unit, such as one block of a transformer, are gathered before its forward and its backward, and freed
    after. Losses, the order of samples and checkpoints are those of DDP. A parameter that a step does not use has the
    gradient zero, so weight decay and momentum still apply. If a step does not call a unit, its backward is an error.

    With automatic optimization, `training_step` and the other steps run while the parameters that belong to no unit are
    whole. Under manual optimization, each submodule of the module is sharded by itself: call it, and not its layers.

    All arguments are keywords. An argument of Lightning's, torch's or Accelerate's that is not here is an error that names
    its replacement.

    Raises:
        ConfigurationError: An argument is wrong, unknown or unsupported.

    Example:
        ```python
        trainer = Trainer(strategy=FSDPStrategy(wrap="TransformerBlock"), precision="bf16-true", devices=8)
        ```
    """

    name: ClassVar[str] = "fsdp"
    info = INFO
    owns_masters = reads_checkpoint_parts = shards_optimizer_state = shards_parameters = True
    keeps_placement: ClassVar[bool] = False
    reduces_late: ClassVar[bool] = False

    @accepts(FSDPOptions)
    def __init__(self, **arguments: Any) -> None:
        known = arguments_of(FSDPOptions)
        refuse_unknown("FSDPStrategy", {name: value for name, value in arguments.items() if name not in known}, known)
        self.options = options = FSDPOptions(**arguments)
        super().__init__(options.process_group_backend, options.timeout, options.device, options.precision)
        self.plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=options.reshard_after_forward is not False,
            cpu_offload=options.offload_params is not None,
        )
        self._meshes: Meshes | None = None
        self._group = ExitStack()  # the process group of a single process
        self._described = ""  # Describes what was sharded in the last run.
        self._reset()

    def __repr__(self) -> str:
        options = {**self.options.non_defaults(), "device": str(self.device), "precision": self.precision.name}
        return f"FSDPStrategy({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def _reset(self) -> None:
        self._sharded: ShardedModels | None = None  # if a module has been sharded
        self._optimizers: set[int] = set()
        self._buffers = Buffers()

    def use_precision(self, precision: Precision | str | int, *, given: bool = True) -> None:
        """See `trainkit.Strategy.use_precision`. `16-true` scales the loss: master weights hold what float16 cannot."""
        super().use_precision(precision, given=given)
        if self.precision.name == "16-true":
            self.precision.use_scaler()

    def join(self, wanted: RequestedDevices) -> None:
        super().join(wanted)
        replicas, tensor_parallel = self.options.replicas, self.options.tensor_parallel
        if self.world.size > 1 or replicas * tensor_parallel > 1:
            self._meshes = Meshes(self.world, self.device, replicas, tensor_parallel, self.timeout)

    @property
    def data_world(self) -> World:
        """See `trainkit.Strategy.data_world`. The ranks of a tensor-parallel group read the same data."""
        return self.world if self._meshes is None else self._meshes.data_world

    @property
    def mesh(self) -> Any:
        """The device mesh: `"data"`, and `"replicas"` and `"tensor"` if there are several; `None` with a single process."""
        return None if self._meshes is None else self._meshes.whole

    @property
    def device_mesh(self) -> Any:
        """The same, for `accelerator.state`."""
        return self.mesh

    @property
    def _single_group(self) -> bool:
        """Whether this is a single process that needs no sharding."""
        return self.world.size == 1 and not self.options.needs_sharding_alone(self.precision)

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Shard the parameters, with rank 0's values; buffers are broadcast from rank 0.

        Raises:
            ModuleError: The ranks have different modules, or a part cannot be sharded.
        """
        if self._single_group:
            self._described = "nothing: there is one process"
            return super().prepare_module(module)
        refuse_sharded(module)
        self.placement(module)
        check_modules_match(module, self.world, "FSDP")
        if self._sharded is None:
            self._sharded = ShardedModels(
                self.options, self.precision, self.world, self.device, self._get_meshes(), self.reduce_gradients
            )
        self._sharded.add(module)
        self._described = self._sharded.described
        if self.world.size > 1:
            self._buffers.add(module, self.world)
            self.sync_buffers()
        return module

    def _get_meshes(self) -> Meshes:
        if self._meshes is None:  # a single process
            if not torch.distributed.is_initialized():
                backend = self.process_group_backend or ("nccl" if self.device.type == "cuda" else "gloo")
                self._group.enter_context(single_process_group(backend))
            self._meshes = Meshes(self.world, self.device, 1, 1, self.timeout)
        return self._meshes

    def wrap(self, module: nn.Module) -> nn.Module:
        if self._sharded is None:
            return module
        return FSDPModel(self._sharded.model_of(module), self.options.forward_methods)

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, FSDPModel) else super().unwrap(module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        run = super().step_function(wrapped, module, name, compiler)
        return run if self._sharded is None else partial(self._sharded.call_step, run)

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """Let the optimizer step the sharded parameters. Existing state is kept.

        Raises:
            OptimizerError: It does not work on sharded parameters.
        """
        if self._sharded is None:
            return super().prepare_optimizer(optimizer, module)
        self._sharded.reshard()
        sharded_models.use_sharded_parameters(optimizer, self._sharded)
        sharded_models.check_optimizer(optimizer, self.precision.scaler is not None)
        self._sharded.prepare_steps(optimizer)
        self._optimizers.add(id(optimizer))
        return super().prepare_optimizer(optimizer, module)

    def begin_micro_batch(self, micro: MicroBatch) -> None:
        before = self.micro_batch
        super().begin_micro_batch(micro)
        if self._sharded is not None and (micro.index != before.index or micro.batch is not before.batch):
            for model in self._sharded:
                model.forget()

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """See `trainkit.Strategy.backward`. Reduces the gradients in the last micro-batch of a window."""
        if loss is None:
            self.skip_backward(None, micro)
        elif self._sharded is None:
            super().backward(loss, micro, **kwargs)
        else:
            with self._sharded.window.backward(micro, had_loss=True):
                super().backward(loss, micro, **kwargs)

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See `trainkit.Strategy.skip_backward`. Runs the module's backward with zero gradients: it has collectives."""
        self.precision.scale(torch.zeros((), device=self.device))  # keeps the loss scale the same on all ranks
        if self._sharded is not None:
            self._sharded.window.skip(loss, micro, getattr(self.lightning_module, "backward", Tensor.backward))

    def any_loss(self, had_loss: bool) -> bool:
        return had_loss if self._sharded is None else self._sharded.window.any_loss(had_loss)

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See `trainkit.Strategy.reduce_gradients`. Only parameters that are not sharded need it."""
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if whole and self.world.size > 1:
            with self.world.collectives:
                average_gradients(whole, _BUCKET_MB)

    def discard_gradients(self, optimizer: Optimizer) -> None:
        if self._sharded is not None:
            self._sharded.window.discard(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters, and broadcast the buffers from rank 0. Skips the update if no rank had a loss.

        Raises:
            ModuleError: A backward pass has not reduced the gradient of a trained parameter.
        """
        if self._sharded is None:
            return super().optimizer_step(optimizer, closure)
        updated = False
        if self._sharded.window.any_loss(True):
            closure = self._sharded.begin_step(optimizer, closure)
            updated = super().optimizer_step(optimizer, closure)
            self._sharded.note_weights_changed()
        self.sync_buffers()
        return updated

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `trainkit.Strategy.clip_grad_norm_`. Collective."""
        if self._sharded is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        listed = list(parameters)
        norm = global_norm(listed, norm_type, self.device)
        clip_norm(listed, max_norm, norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        clip_values(parameters, clip_value)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        if self._sharded is None:
            return None
        return global_norm([p for group in optimizer.param_groups for p in group["params"]], 2.0, self.device)

    def gathered_parameters(self, module: nn.Module, modified: bool = False) -> AbstractContextManager[Any]:
        """See `trainkit.Strategy.gathered_parameters`. Changes reach the master weights."""
        return nullcontext() if self._sharded is None else self._sharded.gather_parameters(module, modified)

    def stored_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        return {} if self._sharded is None else self._sharded.list_stored_weights(module)

    def load_weights(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        if self._sharded is not None:
            self._sharded.load_weights(values)

    def stored_optimizer(self, optimizer: Optimizer) -> StoredOptimizer | None:
        if self._single_group:
            return None
        if self._sharded is None or id(optimizer) not in self._optimizers:
            raise ConfigurationError(
                "the run is over, so the optimizer's sharded state cannot be gathered any more. Save during fit, in a "
                "callback: trainer.save_checkpoint(path); or only the weights: trainer.save_checkpoint(path, weights_only=True)"
            )
        return sharded_models.make_stored_optimizer(optimizer, self._sharded)

    def load_optimizer(self, optimizer: Optimizer, stored: StoredOptimizer) -> None:
        sharded_models.load_optimizer(optimizer, stored, () if self._sharded is None else self._sharded)

    def description(self) -> Mapping[str, str]:
        """See `trainkit.Strategy.description`. The units of the last run."""
        return {"sharded": self._described} if self._described else {}

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        return footprint(contents, self.options, processes, self.name)

    def teardown(self) -> None:
        """Restore the modules: their parameters are whole again. Process groups stay open."""
        with ExitStack() as rest:  # runs all callbacks, even if one fails
            if self.world.size == 1:
                self._meshes = None  # The process group of the meshes ends too.
            rest.callback(self._group.close)
            rest.callback(self._reset)
            if self._sharded is not None:
                rest.callback(self._sharded.restore, collective=not self.broken)


# -------------------------------------------------------------------------------------------- the model that users call


_FORWARD_METHODS = ("generate", "training_step", "validation_step", "test_step", "predict_step")


class FSDPModel(Wrapped):
    """Wraps the user's model: its forward gathers the parameters that belong to no unit, and so do some other methods.

    Args:
        forward_methods: The names of these methods, besides `forward`, `generate` and the steps of a `TrainModule`.
    """

    def __init__(self, sharded: ShardedModel, forward_methods: Collection[str]) -> None:
        super().__init__(sharded.module)
        self.training = sharded.module.training
        vars(self).update(_sharded=sharded, _forward_methods={*_FORWARD_METHODS, *forward_methods})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the user's model."""
        return vars(self)["_sharded"].call(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not ismethod(value) or value.__self__ is not self.module or hasattr(nn.Module, name):
            return value
        if name in vars(self)["_forward_methods"]:
            return partial(vars(self)["_sharded"].call, value)
        return _with_advice(value)


def _with_advice(method: Callable[..., Any]) -> Callable[..., Any]:
    """Where a method computes with sharded parameters, torch's message is about tensors that the user has not made."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            name = method.__name__
            raise ModuleError(
                f"{name} computes with parameters that are sharded: only forward, generate and the methods that you name have "
                f"whole ones. Use FSDPStrategy(forward_methods=[{name!r}])"
            ) from error

    return call


# --------------------------------------------------------------------------------------------------- norms and clipping


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _copies(gradient: Tensor, ranks: int) -> int:
    """The number of ranks that have the same part of a gradient."""
    if not isinstance(gradient, DTensor):
        return ranks
    mesh, copies = gradient.device_mesh, ranks // gradient.device_mesh.size()
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return copies


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of the gradients of all ranks together, the same on each rank. Collective.

    Each rank sums over its own parts, in float64 where the device has it; what several ranks have counts once. In a norm of
    order `inf` a NaN counts as infinity: the maximum over the ranks may ignore a NaN.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type!r}: expected a number > 0, or float('inf'). Use norm_type=2.0")
    gradients, ranks = _gradients(parameters), dist.get_world_size()
    dtype = max((g.dtype for g in gradients), key=lambda dtype: dtype.itemsize, default=torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        part = _local(gradient)
        if part.numel():
            by_copies.setdefault(_copies(gradient, ranks), []).append(part)
    for copies, parts in by_copies.items():
        norm = total_norm(parts, norm_type).to(device, torch.float64)
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm.pow(norm_type) / copies
    if math.isinf(norm_type):
        total.nan_to_num_(nan=math.inf, posinf=math.inf)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return (total if math.isinf(norm_type) else total.pow(1.0 / norm_type)).to(dtype)


@torch.no_grad()
def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is `norm`, down to `max_norm`, as `torch.nn.utils.clip_grads_with_norm_`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in _gradients(parameters):
        part = _local(gradient)
        part.mul_(factor.to(part.device))


@torch.no_grad()
def clip_values(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp each element of the gradients to [-clip_value, clip_value]."""
    for gradient in _gradients(parameters):
        _local(gradient).clamp_(-clip_value, clip_value)


FSDPStrategy.__doc__ = describe_arguments(FSDPStrategy.__doc__, FSDPOptions)
