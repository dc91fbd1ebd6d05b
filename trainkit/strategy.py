"""`Strategy`: on which devices a run computes, and how. The base class is a strategy for one device (CPU, CUDA, MPS)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.device import find_device, generators_of
from trainkit.distributed.placement import move_module, move_state, refuse_sharded
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.footprint import Contents, Footprint, unsharded
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch
from trainkit.nested import move
from trainkit.optim.gradient_norm import total_norm
from trainkit.optim.stored_optimizer import StoredOptimizer
from trainkit.precision import PRECISIONS, Precision
from trainkit.registry import SINGLE, StrategyInfo

if TYPE_CHECKING:
    from trainkit.optim.step_arguments import StepArguments

__all__ = ["Strategy"]

_NULL = nullcontext()


class Strategy:
    """Everything that depends on the devices of a run. A subclass overrides only what differs.

    Args:
        device: a torch device, or `"auto"`: the current CUDA device, else MPS, else the CPU.
        precision: a `Precision` or its name; `None`: that of the `Trainer` or `Accelerator`, or `"32-true"` without one.

    Attributes:
        info: the declaration of the strategy, readable without importing it; a strategy with its own short names has its own.
        accumulates_in_engine: the backend sums the gradients of an accumulation window; `parameter.grad` does not show them.
        averages_in_step: gradients are averaged over the processes in the optimizer step, not in a backward pass.
        can_sync_batchnorm: it has an option `sync_batchnorm`.
        compiles: it works with modules from `torch.compile`.
        lazy_tensors: operations are recorded, and values exist only after a sync.
        owns_masters: for parameters in 16 bits the backend keeps float32 copies, which the optimizer updates.
        reads_checkpoint_parts: each process reads only its part of a checkpoint's tensors, so their files are memory-mapped.
        shards_optimizer_state: no process holds the whole optimizer state.
        shards_parameters: no process holds whole parameters, so a forward is a collective.
        supported_precisions: names of the precisions that work.
        plugin: the options as Accelerate's plugin for this backend, for `accelerator.state`; `None`: it has no plugin.
        sync_batchnorm: BatchNorm computes its statistics over all processes.
        world: the processes of the run.
        pad_last_batch: short training batches are padded.
        joined: `join` has been called.
        micro_batch: the current micro-batch; see `begin_micro_batch`.
        broken: a run with several processes has failed, so the other processes do not reach a collective at its end.

    Raises:
        ConfigurationError: the device does not exist, or the precision does not work on it.
    """

    name: ClassVar[str] = "single"
    info: ClassVar[StrategyInfo] = SINGLE
    accumulates_in_engine: ClassVar[bool] = False
    averages_in_step: ClassVar[bool] = False
    can_sync_batchnorm: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    lazy_tensors: ClassVar[bool] = False
    owns_masters: ClassVar[bool] = False
    reads_checkpoint_parts: ClassVar[bool] = False
    shards_optimizer_state: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = False
    supported_precisions: ClassVar[Collection[str]] = PRECISIONS.keys()  # those that are registered later too

    plugin: Any = None
    sync_batchnorm: bool = False

    world: World = World()
    pad_last_batch: bool = False
    joined: bool = False
    micro_batch: MicroBatch = WHOLE_WINDOW
    broken: bool = False

    def __init__(self, device: str | torch.device = "auto", precision: Precision | str | int | None = None) -> None:
        self.device = self.resolve_device(device)
        self.precision: Precision
        self._precision_was_given = precision is not None
        self.use_precision("32-true" if precision is None else precision, given=precision is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, precision={self.precision.name!r})"

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """The number of devices over which data is sharded: of processes, unless a process uses several devices."""
        return self.data_world.width

    @property
    def where(self) -> str:
        """The device of this process, for messages."""
        return str(self.device)

    @property
    def data_world(self) -> World:
        """The processes over which data is sharded and metrics are reduced. Not `world` if all processes read all data."""
        return self.world

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process, which prints, logs and writes."""
        return self.world.is_main

    def join(self, wanted: RequestedDevices) -> None:
        """Join the processes of the run, and set `world`, `device` and `joined`.

        The `Trainer` or `Accelerator` that gets the strategy calls it once.

        Raises:
            ConfigurationError: the requested devices are not available.
        """
        self.joined = True
        asked = {"devices": wanted.per_node or 1, "num_nodes": wanted.nodes or 1}
        if more := [f"{name}={number}" for name, number in asked.items() if number > 1]:
            raise ConfigurationError(
                f"{self!r} runs on one device, but {' and '.join(more)} requests more. Use strategy='ddp', or devices=1."
            )

    def resolve_device(self, device: str | torch.device) -> torch.device:
        """The device that the argument names.

        Raises:
            ConfigurationError: it does not exist, or the strategy does not support it.
        """
        return find_device(device)

    def accepts(self, accelerator: str) -> bool:
        """Whether this strategy object runs on the `Trainer`'s `accelerator`: a kind of device, or "auto"."""
        return accelerator in ("auto", self.device.type)

    def check_arguments(self, arguments: StepArguments) -> None:
        """Check arguments of the `Trainer`, before any process is started.

        Raises:
            ConfigurationError: the strategy does not support one of them.
        """

    def check_batches(self, micro_batch: int | None, window: int) -> None:
        """Check the samples per micro-batch of a process and the micro-batches per window against the strategy's options.

        Raises:
            ConfigurationError: the options have other numbers.
        """

    def configured_by(self, source: str) -> None:
        """Let the options override the training loop's; `source` is the name of their plugin or file, for messages."""

    @property
    def has_optimizer(self) -> bool:
        """Whether `configure_optimizers` creates an optimizer for a module that does not define one."""
        return False

    def configure_optimizers(self, module: Any) -> Any:
        """What `module.configure_optimizers` returns, checked and completed by the strategy's options."""
        return module.configure_optimizers()

    def check_precision(self, precision: Precision | str | int) -> Precision:
        """The precision with a name, or the object.

        Raises:
            ConfigurationError: the strategy does not support it.
        """
        chosen = precision if isinstance(precision, Precision) else Precision(precision)
        if chosen.name not in self.supported_precisions:
            raise ConfigurationError(
                f"precision={chosen.name!r} does not work with {type(self).__name__}, which supports "
                f"{', '.join(self.supported_precisions)}."
            )
        return chosen

    def use_precision(self, precision: Precision | str | int, *, given: bool = True) -> None:
        """Set the precision.

        Raises:
            ConfigurationError: the strategy was created with another precision, or does not support this one.
        """
        chosen = self.check_precision(precision)
        current = getattr(self, "precision", None)
        if current is not None and self._precision_was_given and given and current.name != chosen.name:
            raise ConfigurationError(
                f"two precisions: {type(self).__name__}(precision={current.name!r}) and precision={chosen.name!r}. Remove one."
            )
        if current is not None and self._precision_was_given and not isinstance(precision, Precision):
            chosen = current  # has the same name, and may have options
        chosen.setup(self.device)
        self.precision = chosen
        self._precision_was_given = self._precision_was_given or given

    def generators(self) -> tuple[torch.Generator, ...]:
        """The device's random generators, which are seeded together with the CPU's."""
        return generators_of(self.device)

    def building(self, pretrained: bool = False) -> AbstractContextManager[Any]:
        """A context that may shard layers while they are built; with `pretrained`, only models of `transformers`."""
        return _NULL

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """The module on the device, in the precision's dtype, and wrapped if the strategy wraps modules.

        Raises:
            ConfigurationError: its parameters are sharded already, for example by an earlier run with DeepSpeed.
        """
        refuse_sharded(module)
        self.precision.convert_module(module)
        self.precision.note_other_dtypes(module)
        move_module(module, self.device)
        return module

    def wrap(self, module: nn.Module) -> nn.Module:
        """What your own training loop calls instead of the module that `prepare_module` returned."""
        return module

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """The optimizer, with its state on the devices of its parameters."""
        move_state(optimizer)
        return optimizer

    def unwrap(self, module: nn.Module) -> nn.Module:
        """The user's module, without the wrappers of `wrap`, `prepare_module` and `torch.compile`."""
        return getattr(module, "_orig_mod", module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A function that calls the method `name` of the user's module with a batch, in this precision.

        Args:
            wrapped: what `prepare_module` returned.
            module: the user's module.
            name: `"training_step"`, `"validation_step"`, …
            compiler: compiles the step, if the user passed a module from `torch.compile`.
        """

        def step(*given: Any) -> Any:
            return getattr(module, name)(*given)  # looked up each time: another method may be assigned during the run

        if compiler is not None:
            step = compiler(step)
        return step if self.precision.plain else self.precision.applied_to(step)

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context in which your own training loop runs its forward."""
        return self.precision.forward_context()

    @property
    def ahead(self) -> Callable[..., Iterator[Any]] | None:
        """How batches are moved to the device ahead of use; `None`: `trainkit.data.PreparedLoader` decides."""
        return None

    def move(self, batch: Any) -> Any:
        """The batch on the device."""
        return move(batch, self.device, non_blocking=self.device.type == "cuda")

    def begin_micro_batch(self, micro: MicroBatch) -> None:
        """Make `micro` current, before its forward; called again if `accumulate` or `no_sync` change its place.

        Ranks average gradients in the backward of the `last` micro-batch of a window, unless the window is `uneven`.
        """
        self.micro_batch = micro

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch: of its mean loss × `micro.share`, or of `None` if it has no loss."""
        if loss is not None:
            self.precision.scale(loss).backward(**kwargs)

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        """Called instead of `backward` if there is no loss (`None`) or its weight is 0. Other ranks may be waiting."""

    def any_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the window, given whether this one had; called after its gradients are averaged."""
        return had_loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, before they are read."""
        self.precision.unscale(optimizer)

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        """Average the gradients that no backward pass has averaged over the ranks, at the end of a window: after `micro`.

        Args:
            parameters: the same on all processes, in the same order. A gradient that is missing on some processes counts as
                zeros there; one that is missing on all processes stays `None`.
        """

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes; `optimizer_step` does this after a step."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        return value

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Make an optimizer step; returns whether parameters were updated."""
        return self.precision.optimizer_step(optimizer, closure)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down to `max_norm` if their norm is larger; returns the norm before clipping."""
        listed = list(parameters)
        norm = total_norm([p.grad for p in listed if p.grad is not None], norm_type)
        torch.nn.utils.clip_grads_with_norm_(listed, max_norm, norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def gathered_parameters(self, module: nn.Module, modified: bool = False) -> AbstractContextManager[Any]:
        """A context in which sharded parameters of the module are whole on every process. Collective.

        Args:
            module: the user's module, or a part of it.
            modified: keep rank 0's changes to the parameters; otherwise changes are lost.
        """
        return _NULL

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """The 2-norm of an optimizer's gradients if they are not in `parameter.grad`; else `None`. Collective."""
        return None

    def stored_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        """What a checkpoint stores instead of parameters: `id(parameter)` → its float32 master, or a sharded tensor."""
        return {}

    def exported_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        """What `save_model` writes instead of parameters, in the form of `stored_weights`."""
        return self.stored_weights(module)

    def load_weights(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set parameters to values, which each process has whole."""

    def stored_optimizer(self, optimizer: Optimizer) -> StoredOptimizer | None:
        """What a checkpoint saves instead of an optimizer, if the backend keeps its state; else `None`."""
        return None

    def load_optimizer(self, optimizer: Optimizer, stored: StoredOptimizer) -> None:
        """Copy the state that was loaded into the result of `stored_optimizer` to the optimizer."""

    def restored(self, optimizers: Iterable[Optimizer]) -> None:
        """Called after the state of a checkpoint was restored into prepared modules and these optimizers."""

    @property
    def compilations(self) -> int | None:
        """The number of graphs compiled in this process; `None` if the strategy compiles nothing itself."""
        return None

    def compilation_hints(self) -> Mapping[str, int]:
        """Counters whose growth shows why a step compiled: "graphs" run, "reads" of values, operations that ran on the host."""
        return {}

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """The memory of one process, without activations, for `trainkit.Trainer.plan`.

        Args:
            contents: the sizes of parameters and of their optimizer state.
            processes: the number of processes to plan for.

        Raises:
            TrainkitError: the strategy cannot train this model.
        """
        return unsharded(self.name, contents)

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """Tensors of all processes, stacked along a new first dimension; unchanged with one process.

        Args:
            data: a tensor, or tensors in containers; with the same shapes on all processes.
            sync_grads: let gradients flow back: each process gets the sum of the gradients for its tensors.
            alike: the shapes have been compared already.
        """
        return data

    def barrier(self) -> None:
        """Wait for all processes."""

    def teardown(self) -> None:
        """Release what `__init__` and `prepare_*` allocated."""
