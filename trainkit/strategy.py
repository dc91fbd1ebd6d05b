"""`Strategy`: on which devices a run computes, and how. The base class is a strategy for one device (CPU, CUDA, MPS)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.console import with_article
from trainkit.data.micro_batches import WHOLE_WINDOW, MicroBatch
from trainkit.distributed.parameter_placement import check_placement, move_module, move_rest, move_state, refuse_sharded
from trainkit.distributed.requested_devices import RequestedDevices, find_device, generators_of
from trainkit.distributed.world import Ranks
from trainkit.errors import ConfigurationError
from trainkit.names import absent_attribute
from trainkit.nested import move
from trainkit.optim.optimizer_copy import StoredOptimizer
from trainkit.optim.optimizer_gradients import clamp_gradient, total_norm
from trainkit.precision import PRECISIONS, Precision
from trainkit.registry import SINGLE, StrategyInfo

__all__ = [
    "Contents",
    "Footprint",
    "Held",
    "StepArguments",
    "StepMemory",
    "Strategy",
    "Weight",
    "footprint_on_one_device",
    "in_backward",
]


class StepArguments(Protocol):
    """What a strategy checks before any process is started; for the meanings see `trainkit.Trainer`."""

    accumulate_grad_batches: int
    global_batch_size: int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    activation_checkpointing: Any
    auto_micro_batch: bool


class Strategy(Ranks):
    """Where and how the computation runs. This class is one device in one process; a subclass overrides what differs.

    Args:
        device: A torch device, or `"auto"`: the current CUDA device, else MPS, else the CPU.
        precision: A `Precision` or its name. Default: that of the `Trainer` or `Accelerator`; on its own, `"32-true"`.

    Attributes:
        info: The facts that are known before the strategy is imported. A strategy with its own short names has its own.
        accumulates_in_engine: The backend sums gradients over an accumulation window; `parameter.grad` does not show them.
        averages_in_step: No backward pass averages gradients over the processes; each optimizer step does.
        reduces_late: Gradients can be averaged over the processes after the last backward pass of a window, and not only in it.
        can_sync_batchnorm: The strategy has an option `sync_batchnorm`.
        compiles: It works with modules from `torch.compile`, and with compiled models, steps and blocks.
        compiles_blocks: It works with compiled blocks, even if not with compiled models and steps.
        keeps_placement: In one process, a module whose layers are on several devices stays as it is.
        lazy_tensors: Operations are recorded, and values exist only after a sync.
        main_saves_alone: All processes have the whole parameters and optimizer state, so in your own training loop the main
            process writes them without the others.
        owns_masters: With 16-bit parameters the backend keeps float32 copies of them, which the optimizer updates.
        reads_checkpoint_parts: Each process reads only its part of a checkpoint's tensors, whose files are mapped.
        shards_optimizer_state: No process has the whole optimizer state.
        shards_parameters: No process has whole parameters, and a forward is a collective.
        supported_precisions: Names of the precisions that work.
        plugin: The options as Accelerate's plugin for this backend, for `accelerator.state`; `None`: it has no plugin.
        sync_batchnorm: BatchNorm computes its statistics over all processes.
        owns_backward: The backend runs the backward pass, so a module cannot override `backward`.
        world: The processes of the run.
        lightning_module: The module of the run; `None` before the first one.
        model: The module as the strategy has wrapped it; outside a run the module itself.
        pad_last_batch: Short batches are padded in training.
        placed_on: The devices on which the user has placed the layers of prepared modules; `()` if they were moved.
        joined: `join` has been called.
        micro_batch: The current one, of `begin_micro_batch`.
        broken: A run has failed on several processes, so the others do not call a collective at its end.

    Raises:
        ConfigurationError: The device does not exist, or the precision does not work on it.
    """

    name: ClassVar[str] = "single"
    info: ClassVar[StrategyInfo] = SINGLE
    accumulates_in_engine: ClassVar[bool] = False
    averages_in_step: ClassVar[bool] = False
    reduces_late: ClassVar[bool] = True
    can_sync_batchnorm: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    compiles_blocks: bool = False
    keeps_placement: ClassVar[bool] = True
    lazy_tensors: ClassVar[bool] = False
    main_saves_alone: ClassVar[bool] = False
    owns_masters: ClassVar[bool] = False
    reads_checkpoint_parts: ClassVar[bool] = False
    shards_optimizer_state: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = False
    supported_precisions: ClassVar[Collection[str]] = PRECISIONS.keys()  # Precisions that are registered later count too.
    plugin: Any = None
    sync_batchnorm: bool = False
    owns_backward: bool = False
    pad_last_batch: bool = False
    placed_on: tuple[torch.device, ...] = ()
    joined: bool = False
    micro_batch: MicroBatch = WHOLE_WINDOW
    broken: bool = False
    lightning_module: Any = None
    model: Any = None

    def __init__(self, device: str | torch.device = "auto", precision: Precision | str | int | None = None) -> None:
        self.device = self.resolve_device(device)
        self.precision: Precision
        self._precision_was_given = precision is not None
        self.use_precision("32-true" if precision is None else precision, given=precision is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, precision={self.precision.name!r})"

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has raised an AttributeError: show that
                return object.__getattribute__(self, name)
            raise absent_attribute(self, "strategy", with_article(type(self).__name__), name)

    @property
    def precision_plugin(self) -> Precision:
        """The precision, as `precision`."""
        return self.precision

    @property
    def where(self) -> str:
        """The devices of this process, as text for messages."""
        return f"{', '.join(map(str, self.placed_on))} (placed by hand)" if self.placed_on else str(self.device)

    def join(self, wanted: RequestedDevices) -> None:
        """Join the processes of the run: from here on `world` and `device` are known.

        The `Trainer` or `Accelerator` that gets the strategy calls it once; `joined` says whether it has.

        Raises:
            ConfigurationError: The requested devices or processes do not exist.
        """
        self.joined = True
        counts = {"devices": wanted.per_node or 1, "num_nodes": wanted.nodes or 1}
        if more := [f"{name}={number}" for name, number in counts.items() if number > 1]:
            raise ConfigurationError(
                f"{self!r} runs on one device, but {' and '.join(more)} requests more. Use strategy='ddp', or devices=1."
            )

    def resolve_device(self, device: str | torch.device) -> torch.device:
        """Return the device that the argument names.

        Raises:
            ConfigurationError: It does not exist, or this strategy cannot use it.
        """
        return find_device(device)

    def accepts(self, accelerator: str) -> bool:
        """Whether this strategy object runs on the `Trainer`'s `accelerator`: a kind of device, or `"auto"`."""
        return accelerator in ("auto", self.device.type)

    def check_arguments(self, arguments: StepArguments) -> None:
        """Refuse arguments of the `Trainer` that this strategy does not support, before any process is started.

        Raises:
            ConfigurationError: An argument is not supported.
        """
        if arguments.auto_micro_batch and not self.info.splits_micro_batches:
            raise ConfigurationError(
                f"auto_micro_batch=True does not work with {type(self).__name__}: a rank that runs its micro-batch in parts "
                "would leave the order of collectives of the other ranks. Expected one device, or strategy='ddp'. Fix: remove "
                "auto_micro_batch; use a smaller batch_size with a larger accumulate_grad_batches, or "
                "activation_checkpointing=True"
            )

    def check_batches(self, micro_batch: int | None, window: int) -> None:
        """Refuse sizes that contradict the options: samples per micro-batch of a process, and micro-batches per window.

        Raises:
            ConfigurationError: A size contradicts them.
        """

    def configured_by(self, source: str) -> None:
        """Let the options, which come from the plugin or configuration file `source`, override the arguments of the loop."""

    @property
    def has_optimizer(self) -> bool:
        """Whether `configure_optimizers` makes an optimizer for a module that makes none."""
        return False

    def configure_optimizers(self, module: Any) -> Any:
        """Return the result of the module's method of this name, checked and completed with the options of the strategy."""
        return module.configure_optimizers()

    def create_optimizer(self, parameters: Sequence[Any], values: Mapping[str, Any]) -> Optimizer:
        """Create the optimizer that the configuration of the strategy defines, in your own training loop.

        Args:
            parameters: Parameters, or groups of them.
            values: Values for arguments that the configuration does not set.

        Raises:
            ConfigurationError: There is no such configuration.
        """
        raise ConfigurationError(
            "DummyOptim stands for the optimizer that a DeepSpeed configuration defines, but this run has no such "
            f"configuration: it uses {type(self).__name__}. Create the optimizer: torch.optim.AdamW(model.parameters(), "
            "lr=1e-3)"
        )

    def create_scheduler(self, optimizer: Optimizer, values: Mapping[str, Any], make: Callable[[Optimizer], Any] | None) -> Any:
        """Create the scheduler that the configuration of the strategy defines, in your own training loop.

        Args:
            optimizer: Its optimizer.
            values: Values for arguments that the configuration leaves open.
            make: Creates it, if no configuration does.

        Raises:
            ConfigurationError: There is neither such a configuration nor `make`.
        """
        if make is not None:
            return make(optimizer)
        raise ConfigurationError(
            "DummyScheduler stands for the scheduler that a DeepSpeed configuration defines, but this run has no such "
            f"configuration: it uses {type(self).__name__}. Create the scheduler, or pass a function that does: "
            "DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: LinearLR(optimizer))"
        )

    def check_loop(self) -> None:
        """Check, before the first step of your own training loop, that what the configuration defines was prepared."""

    def check_precision(self, precision: Precision | str | int) -> Precision:
        """Return the precision of a name, or the object.

        Raises:
            ConfigurationError: It does not work with this strategy.
        """
        chosen = precision if isinstance(precision, Precision) else Precision(precision)
        if chosen.name not in self.supported_precisions:
            raise ConfigurationError(
                f"precision={chosen.name!r} does not work with {type(self).__name__}, which supports "
                f"{', '.join(self.supported_precisions)}."
            )
        if chosen.needs_sharded_parameters and not self.shards_parameters:
            raise ConfigurationError(
                f"{chosen!r} works only with strategies that shard parameters, and {type(self).__name__} does not. Remove "
                "all_gather=True, or use another strategy."
            )
        return chosen

    def use_precision(self, precision: Precision | str | int, *, given: bool = True) -> None:
        """Set the precision.

        Raises:
            ConfigurationError: The strategy was made with another one, or it does not work with this strategy.
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

    @property
    def device_mesh(self) -> Any:
        """The device mesh of a strategy that shards over one; `None` without one."""
        return None

    def generators(self) -> tuple[torch.Generator, ...]:
        """The random generators of the devices, which are seeded together with the CPU's."""
        return tuple(one for device in self.placed_on or (self.device,) for one in generators_of(device))

    def building(self, pretrained: bool = False) -> AbstractContextManager[Any]:
        """A context in which layers may be sharded as they are built; with `pretrained` only models of `transformers`."""
        return nullcontext()

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Move the module to the device, convert it to the precision's dtype, and wrap it if the strategy does.

        Raises:
            ConfigurationError: Parameters are already sharded over processes, as DeepSpeed leaves them, or see `placement`.
        """
        refuse_sharded(module)
        placed = self.placement(module)
        self.precision.convert_module(module)
        self.precision.note_other_dtypes(module)
        if placed:
            self.placed_on = tuple(dict.fromkeys((*self.placed_on, *placed)))
            move_rest(module, self.device)
        else:
            move_module(module, self.device)
        self.precision.convert_layers(module)
        return module

    def placement(self, module: nn.Module) -> tuple[torch.device, ...]:
        """Return the devices on which the user has placed the layers of a module; `()`: the strategy moves it.

        Raises:
            ConfigurationError: The module must be on one device, or cannot be trained where its layers are.
        """
        return check_placement(module, self)

    def connect(self, module: nn.Module, model: nn.Module | None = None) -> None:
        """Called by the `Trainer`: this is its module, and what `prepare_module` returned for it; `None` after the run."""
        self.lightning_module = module
        self.model = module if model is None else model

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return what your own training loop calls instead of a module from `prepare_module`."""
        return module

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """Return the optimizer, with its state on the device of its parameters."""
        move_state(optimizer)
        return optimizer

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module, without the wrappers of `wrap`, `prepare_module` and `torch.compile`."""
        return getattr(module, "_orig_mod", module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return the method `name` of the user's module, to be called with a batch, in this precision.

        Args:
            wrapped: What `prepare_module` returned.
            module: The user's module.
            name: `"training_step"`, `"validation_step"`, …
            compiler: Compiles the step, if the user's module comes from `torch.compile`.
        """

        def step(*args: Any) -> Any:
            return getattr(module, name)(*args)  # looked up each time: another method may be assigned during the run

        if compiler is not None:
            step = compiler(step)
        return step if self.precision.plain else self.precision.wrap_step(step)

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context in which your own training loop runs its forward."""
        return self.precision.forward_context()

    @property
    def ahead(self) -> Callable[..., Iterator[Any]] | None:
        """How batches are moved to the device, see `PreparedLoader`; `None`: the loader decides."""
        return None

    def move(self, batch: Any) -> Any:
        """Move a batch to the device."""
        return move(batch, self.device, non_blocking=self.device.type == "cuda")

    def begin_micro_batch(self, micro: MicroBatch) -> None:
        """Make `micro` the current micro-batch, before its forward; again if `accumulate` or `no_sync` change its place.

        Ranks average gradients in the backward of the `last` micro-batch of a window, unless the window is `uneven`.
        """
        self.micro_batch = micro

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch's mean loss × `micro.share` (`None`: it has none), through `call` if given."""
        if loss is not None:
            kwargs.pop("call", Tensor.backward)(self.precision.scale(loss), **kwargs)

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        """Called instead of `backward` if there is no loss (`None`) or its weight is 0. Other ranks may be waiting."""

    def prepare_optimizers(self, optimizers: Sequence[Optimizer], module: nn.Module | None) -> list[Optimizer]:
        """Return optimizers that are prepared together; in a `Trainer` they are all that it has."""
        return [self.prepare_optimizer(optimizer, module) for optimizer in optimizers]

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether the backward passes before the step have reached a parameter of the optimizer. Collective."""
        return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Called when an optimizer's gradients are set to zero: drop those that no backward pass has reduced yet."""

    def any_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the window, given whether this one had. Called after its gradients are averaged."""
        return had_loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, before they are read."""
        self.precision.unscale(optimizer)

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        """Average the gradients that no backward pass has averaged over the ranks, at the end of a window: after `micro`.

        Args:
            parameters: The same ones on all processes, in the same order. If the gradient of one is missing on some
                processes, it counts as zeros there; if it is missing on all, it stays missing.
        """

    def end_window(self) -> None:
        """Called in your own training loop if a window ends after a backward pass that was not known to be its last.

        `micro_batch` is `last` and `uneven` from here on. Where `reduces_late` is false, that backward pass has reduced the
        gradients.
        """

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of a complete window before its optimizer step. Parameters without a gradient are skipped."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            with torch.no_grad():
                torch._foreach_mul_(gradients, factor)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes; `optimizer_step` does so after an optimizer step."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run the optimizer step; return whether it was made."""
        return self.precision.optimizer_step(optimizer, closure)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down to a norm of at most `max_norm`; return the norm before."""
        listed = list(parameters)
        norm = total_norm([p.grad for p in listed if p.grad is not None], norm_type)
        torch.nn.utils.clip_grads_with_norm_(listed, max_norm, norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value]."""
        listed = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in listed:
            if parameter.grad is not None and (parameter.grad.is_sparse or parameter.grad.is_complex()):  # torch refuses both
                parameter.grad = clamp_gradient(parameter.grad, clip_value)
        dense = [parameter for parameter in listed if parameter.grad is not None and not parameter.grad.is_sparse]
        torch.nn.utils.clip_grad_value_(dense, clip_value)

    def gathered_parameters(self, module: nn.Module, modified: bool = False) -> AbstractContextManager[Any]:
        """A context in which every process has the module's whole parameters, if they are sharded. Collective.

        Args:
            module: The user's module, or a part of it.
            modified: Keep rank 0's changes of the parameters; otherwise changes are lost.
        """
        return nullcontext()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """Return the 2-norm of an optimizer's gradients if its parameters have no `grad`; otherwise `None`. Collective."""
        return None

    def stored_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        """Return what a checkpoint stores instead of parameters: `id(parameter)` → its master weight, or a sharded tensor."""
        return {}

    def exported_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        """Return what `save_model` writes instead of parameters, in the form of `stored_weights`."""
        return self.stored_weights(module)

    def load_weights(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the values of these parameters; each process has the whole values."""

    def stored_optimizer(self, optimizer: Optimizer) -> StoredOptimizer | None:
        """Return an optimizer as a checkpoint sees it, if the backend keeps its state; otherwise `None`."""
        return None

    def load_optimizer(self, optimizer: Optimizer, stored: StoredOptimizer) -> None:
        """Use the state that was loaded into the result of `stored_optimizer`."""

    def restored(self, optimizers: Iterable[Optimizer]) -> None:
        """Called when the state of a checkpoint has been restored into prepared modules and these optimizers."""

    @property
    def compilations(self) -> int | None:
        """Number of graphs compiled in this process; `None` if the strategy compiles nothing itself."""
        return None

    def compilation_hints(self) -> Mapping[str, int]:
        """Counts that explain why a step compiled: `"graphs"` run, `"reads"` of values, and operations run on the host."""
        return {}

    def description(self) -> Mapping[str, str]:
        """Return what `Trainer.explain` prints about the modules of the last run: label → text."""
        return {}

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """Return the memory of one process in bytes, for `Trainer.plan`; activations by `trainkit.strategy.in_backward`.

        Args:
            contents: The parameters without their values, what the optimizer keeps for them, and activations if known.
            processes: A number of processes, not that of this run.

        Raises:
            TrainkitError: This strategy cannot train that.
        """
        return footprint_on_one_device(self.name, contents)

    def teardown(self) -> None:
        """Release what `__init__` and the preparations allocated."""
        self.placed_on = ()


# --------------------------------------------------------- the memory of a strategy: bytes on device, host and disk, by purpose


@dataclass(frozen=True)
class Weight:
    """A parameter, without its values.

    Attributes:
        numel: The number of elements.
        itemsize: Bytes of an element in the precision of the run.
        trained: Whether it gets gradients.
        state: Bytes of the optimizer state for it, if the optimizer steps the parameter itself.
    """

    numel: int
    itemsize: int
    trained: bool
    state: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Contents:
    """The parameters, buffers and optimizer state of a run under any strategy.

    Attributes:
        weights: The parameters, each once.
        flat_slots: Tensors of optimizer state per parameter, if the optimizer steps flat float32 parts of them.
        buffers: Bytes of the module's buffers.
        stored_buffers: Bytes of the buffers that a checkpoint contains.
        optimizers: Optimizers of parameters without values.
        window: Micro-batches per optimizer step.
        stored_frozen: Whether a checkpoint contains frozen parameters, as it does for a model without PEFT adapters.
        modules: Modules with these parameters without values, in the same order. Empty: unknown.
        profile: What the forward and backward of a micro-batch add: pairs (bytes of activations, bytes of gradients so far),
            for the moments that can be the peak. Empty: unknown.
    """

    weights: tuple[Weight, ...]
    flat_slots: int = 0
    buffers: int = 0
    stored_buffers: int = 0
    optimizers: tuple[Optimizer, ...] = ()
    window: int = 1
    stored_frozen: bool = True
    modules: tuple[nn.Module, ...] = ()
    profile: tuple[tuple[int, int], ...] = ()

    @property
    def stored_bare(self) -> int:
        """Bytes of frozen parameters and buffers in a checkpoint."""
        frozen = sum(weight.nbytes for weight in self.weights if not weight.trained)
        return self.stored_buffers + (frozen if self.stored_frozen else 0)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The parameters that get gradients."""
        return tuple(weight for weight in self.weights if weight.trained)


@dataclass(frozen=True)
class Held:
    """Bytes by purpose.

    Attributes:
        parameters: Parameters and the module's buffers.
        gradients: Gradients.
        optimizer: Optimizer state.
        masters: Float32 master weights.
        buffers: Communication buffers for gradients and parameters.
        activations: Tensors that a forward and backward create, and the batch.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class StepMemory:
    """The memory of a process at one moment of an optimizer step.

    Attributes:
        device: In device memory.
        host: In host memory. On the CPU the two are one memory.
        reserved: Some of it is not written yet: it counts on a GPU, but not on the host.
    """

    device: Held
    host: Held = field(default_factory=Held)
    reserved: bool = False


@dataclass(frozen=True)
class Footprint:
    """The memory of one process under a strategy.

    Attributes:
        name: The strategy, and what it offloads where.
        moments: The moments of an optimizer step that can be the peak, by name; `"update"` is the step itself, and
            `"backward"` the peak of a forward and backward (`in_backward`).
        checkpoint: Bytes of tensors in a checkpoint, which all processes write together.
        disk: Bytes on NVMe.
        shards_layers: Whether layers are sharded while `configure_model` builds them.
    """

    name: str
    moments: Mapping[str, StepMemory]
    checkpoint: int
    disk: int = 0
    shards_layers: bool = False

    @property
    def device(self) -> Held:
        """The peak on the device."""
        return max((moment.device for moment in self.moments.values()), key=lambda held: held.total)

    @property
    def host(self) -> Held:
        """The peak on the host."""
        return max((moment.host for moment in self.moments.values()), key=lambda held: held.total)

    @property
    def together(self) -> Held:
        """The peak of both together, for the CPU."""
        sums = (moment.device + moment.host for moment in self.moments.values() if not moment.reserved)
        return max(sums, key=lambda held: held.total)


def in_backward(
    contents: Contents, held: Held, host: Held | None = None, *, shards: int = 1, waiting: int = 0, kept: bool = False
) -> dict[str, StepMemory]:
    """The moment `"backward"` of a footprint: the peak of the forward and backward of a micro-batch.

    Args:
        contents: The contents of the run.
        held: What is in device memory during all of it: parameters, optimizer state, buffers, but no gradients.
        host: What is in host memory.
        shards: The number of processes that gradients are sharded over during the backward.
        waiting: With several shards: the most bytes of gradients that are not sharded yet.
        kept: The memory of all gradients is allocated before. It is in an accumulation window of several micro-batches too.

    Returns:
        Nothing if the activations are unknown.
    """
    if not contents.profile:
        return {}
    whole = sum(weight.nbytes for weight in contents.trained)
    before = kept or contents.window > 1
    moments = []
    for activations, so_far in contents.profile:
        sharded = -(-(whole if before else so_far) // shards)
        moments.append((activations, sharded + min(so_far - so_far // shards, waiting)))
    activations, gradients = max(moments, key=sum)
    device = held + Held(gradients=gradients, activations=activations)
    return {"backward": StepMemory(device, host or Held())}


def footprint_on_one_device(name: str, contents: Contents) -> Footprint:
    """The memory of a process that has everything on its device: `contents` under the strategy `name`."""
    state = sum(weight.state for weight in contents.weights)
    held = Held(parameters=sum(weight.nbytes for weight in contents.weights) + contents.buffers, optimizer=state)
    gradients = sum(weight.nbytes for weight in contents.trained)
    stored = gradients + state + contents.stored_bare  # gradients are as large as the trained parameters
    moments = {"update": StepMemory(replace(held, gradients=gradients)), **in_backward(contents, held)}
    return Footprint(name, moments, checkpoint=stored)
