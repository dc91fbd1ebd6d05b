"""What a run has sharded: its modules, over a device mesh and with the strategy's options, and its optimizers.

Optimizers get the parameters of the sharded models, and are saved and loaded as whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainkit.checks import Check, argument, arguments_of, check_arguments, is_whole
from trainkit.data.micro_batches import MicroBatch
from trainkit.distributed.world import Pending, World
from trainkit.errors import ConfigurationError, ModuleError, OptimizerError
from trainkit.module.blocks import Choice
from trainkit.optim.optimizer_copy import StoredOptimizer, placeholder_parameter, quantizes
from trainkit.precision import Precision, is_short
from trainkit.strategies._collectives import broadcast
from trainkit.strategies.fsdp.gathered_steps import GatheredSteps, find_gathered
from trainkit.strategies.fsdp.sharded_model import ShardedModel
from trainkit.strategies.fsdp.tensor_parallel import Replaced, ReplicatedGradients, parallelize
from trainkit.strategies.fsdp.units import (
    Wrap,
    choose_units,
    describe_units,
    find_ignored_parameters,
    find_sharded_parts,
    slots,
)
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = [
    "FSDPOptions",
    "Meshes",
    "ShardedModels",
    "check_optimizer",
    "load_optimizer",
    "make_stored_optimizer",
    "refuse_optimizer",
    "use_sharded_parameters",
]


class ShardedModels:
    """Shards modules, each by itself or, under manual optimization, its submodules. Iterates over the sharded models.

    Args:
        average: Averages the gradients of parameters that are not sharded.

    Attributes:
        replaced: The parameters from before, of each module.
        described: What was sharded, in words.
    """

    def __init__(
        self,
        options: FSDPOptions,
        precision: Precision,
        world: World,
        device: torch.device,
        meshes: Meshes,
        average: Callable[[list[Tensor]], None],
    ) -> None:
        self._options = options
        self._precision = precision
        self._world = world
        self._device = device
        self._meshes = meshes
        self._models: list[ShardedModel] = []
        self._modules: list[nn.Module] = []
        self._undo = ExitStack()  # Undoes tensor parallelism, and removes the hooks of optimizers.
        check = ReplicatedGradients(self._models, meshes.whole, device).check if options.tensor_parallel > 1 else None
        self.window = GradientWindow(self._models, world, options.accumulate == "reshard", average, check)
        self.replaced: list[Replaced] = []
        self._steps: ShardedModel | None = None  # The model whose steps run while its root is whole.
        self.described = ""

    def __iter__(self) -> Iterator[ShardedModel]:
        return iter(self._models)

    def add(self, module: nn.Module) -> None:
        """Shard a module, with rank 0's values.

        Raises:
            ModuleError: A part cannot be sharded.
        """
        manual = not getattr(module, "automatic_optimization", True)
        parts = find_sharded_parts(module) if manual else [module]
        inside = {parameter for part in parts for parameter in part.parameters()}
        whole = find_ignored_parameters(module, self._options.ignored_modules) | (set(module.parameters()) - inside)
        devices = {(owner, name): owner._parameters[name].device for owner, name in slots(module)}  # type: ignore[union-attr]
        self._modules.append(module)
        self._options.convert(module, self._precision, whole)
        self.replaced.append(Replaced(module))
        self._precision.convert_layers(module)
        if self._options.tensor_parallel > 1:
            self._undo.callback(parallelize(module, self._meshes.whole, self._device))
        units, ignored = (
            choose_units(module, self._options.wrap),
            find_ignored_parameters(module, self._options.ignored_modules),
        )
        described = describe_units(module, units, parts)
        options = {**self._options.arguments(self._precision, self._device), "mesh": self._meshes.shards}
        for part in parts:
            self._models.append(ShardedModel(part, units, ignored, self._device, self._world, options, devices, manual))
        self._steps = None if manual else self._models[-1]
        self.described = f"{self.described}; {described}" if self.described else described
        self._move_rest(module)

    def _move_rest(self, module: nn.Module) -> None:
        """Move buffers, and parameters of no submodule under manual optimization, with rank 0's values of these."""
        known = {id(p) for model in self._models for p in (*model.sharded, *model.whole)}
        rest = [p for p in module.parameters() if id(p) not in known]
        for tensor in (*rest, *module.buffers()):
            tensor.data = tensor.data.to(self._device)
        if self._world.size > 1:
            broadcast([p.data for p in rest])

    def model_of(self, module: nn.Module) -> ShardedModel:
        """The sharded model of a module."""
        sharded = next((model for model in self._models if model.module is module), None)
        if sharded is None:
            raise ConfigurationError(
                f"{type(module).__name__}.automatic_optimization is False, which is for the Trainer. In your own training loop "
                "prepare its models: accelerator.prepare(module.generator, module.discriminator)"
            )
        return sharded

    def call_step(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call a step of the module, which uses its parameters; under manual optimization it calls the sharded submodules."""
        if self._steps is not None:
            return self._steps.call(run, *args)
        results = run(*args)
        if not torch.is_grad_enabled():
            self.reshard()
        return results

    def reshard(self) -> None:
        """Free the whole parameters that no backward pass has freed."""
        for model in self._models:
            model.reshard()

    def begin_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before an optimizer step; returns the closure to step with.

        Raises:
            ModuleError: A backward pass, or that of the closure, has not reduced the gradient of a trained parameter.
        """
        self.reshard()
        if closure is None:
            self._check_gradients(optimizer)
            return None

        def check_after_closure() -> Any:
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return check_after_closure

    def _check_gradients(self, optimizer: Optimizer) -> None:
        for model in self._models:
            model.check_gradients(optimizer)

    def prepare_steps(self, optimizer: Optimizer) -> None:
        """Let an optimizer that needs whole parameters, such as Muon, step them whole, one on each rank at a time.

        Raises:
            OptimizerError: It cannot step them so.
        """
        gathered = find_gathered(optimizer)
        if gathered:
            owners = _owners(self)
            steps = GatheredSteps(optimizer, gathered, self._world, lambda parameter: owners[id(parameter)].shards)
            self._undo.callback(steps.remove)

    def note_weights_changed(self) -> None:
        """After an optimizer step, and wherever else weights change. Collective."""
        for model in self._models:
            self._precision.weights_changed(model.module)

    @contextmanager
    def gather_parameters(self, module: nn.Module, modified: bool) -> Iterator[None]:
        """A context in which the parameters of a module are whole on all ranks. Collective.

        Args:
            module: A module in which there are sharded ones, or that is inside one.
            modified: Keep rank 0's changes.
        """
        inside = set(module.modules())
        with ExitStack() as contexts:
            for model in self._models:
                if model.module in inside or module in set(model.module.modules()):
                    contexts.enter_context(model.gather_parameters(module, modified))
            yield
        if modified:
            self.note_weights_changed()

    def list_stored_weights(self, module: nn.Module) -> dict[int, ShardedTensor]:
        """See `trainkit.Strategy.list_stored_weights`."""
        self.reshard()
        inside = {id(parameter) for parameter in module.parameters()}
        return {
            id(p): model.shards.make_sharded_tensor(p, p) for model in self._models for p in model.sharded if id(p) in inside
        }

    def load_weights(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """See `trainkit.Strategy.load_weights`."""
        for model in self._models:
            for parameter in model.sharded:
                if parameter in values:
                    model.shards.load(parameter, parameter, values[parameter])
        self.note_weights_changed()

    def restore(self, collective: bool) -> None:
        """Make all parameters whole again, and remove all hooks.

        Args:
            collective: All ranks call it; if not, parameters stay sharded.
        """
        with ExitStack() as rest:  # runs all callbacks, even if one fails
            for module in self._modules:
                rest.callback(self._options.convert_back, module, self._precision)
            rest.callback(self._undo.close)
            for model in self._models:
                rest.callback(model.restore, collective)


class Meshes:
    """The mesh of a run. Its dimensions are `"data"`, and `"replicas"` and `"tensor"` if they are greater than 1.

    Args:
        replicas: Number of copies of the sharded model.
        tensor_parallel: Number of ranks that compute one forward together.
        timeout: Of collectives.

    Attributes:
        whole: The mesh with all dimensions.
        shards: The dimensions over which `fully_shard` replicates and shards.
        data_world: The ranks over which data is sharded, seen from this rank.
    """

    def __init__(self, world: World, device: torch.device, replicas: int, tensor_parallel: int, timeout: timedelta) -> None:
        shards, rest = divmod(world.size, replicas * tensor_parallel)
        if rest or not shards:
            raise ConfigurationError(
                f"FSDPStrategy(replicas={replicas}, tensor_parallel={tensor_parallel}) needs a multiple of "
                f"{replicas * tensor_parallel} processes, but this run has {world.size}. Use devices="
                f"{max(1, shards) * replicas * tensor_parallel}, or other sizes."
            )
        sizes = {"replicas": replicas, "data": shards, "tensor": tensor_parallel}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
        self.whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.shards: DeviceMesh = self.whole["replicas", "data"] if replicas > 1 else self.whole["data"]
        self.data_world = world if tensor_parallel == 1 else _data_world(world, tensor_parallel, timeout)


def _data_world(world: World, tensor_parallel: int, timeout: timedelta) -> World:
    """The ranks with the same place in their tensor-parallel groups: each of them reads other data."""
    group: Any = None
    for place in range(tensor_parallel):  # each process creates all groups
        ranks = list(range(place, world.size, tensor_parallel))
        made = dist.new_group(ranks, backend="gloo", timeout=timeout)
        if world.rank in ranks:
            group = made
    return World(
        world.rank // tensor_parallel,
        world.size // tensor_parallel,
        local_rank=world.local_rank // tensor_parallel,
        local_size=max(1, world.local_size // tensor_parallel),
        node=world.node,
        nodes=world.nodes,
        launcher=world.launcher,
        control=group,
        watchdog=world.watchdog,
    )


# ---------------------------------------------------------------------------------------------- the accumulation window


class GradientWindow:
    """Runs the backward passes of a window.

    Args:
        reduces_each: Reduce gradients in each micro-batch, and not once in a window.
        average: Averages the gradients of parameters that are not sharded.
        check: Called at the end of each window, before that.
    """

    def __init__(
        self,
        models: Sequence[ShardedModel],
        world: World,
        reduces_each: bool,
        average: Callable[[list[Tensor]], None],
        check: Callable[[], None] | None = None,
    ) -> None:
        self._models = models
        self._world = world
        self._reduces_each = reduces_each
        self._average = average
        self._check = check
        self._open = False  # the last backward pass was not that of the last micro-batch
        self._called: list[ShardedModel] = []  # the models with a forward in this window
        self._forwards: dict[int, int] = {}  # the number of forwards of each model at the last backward pass
        self._had_loss = False  # Whether there was a loss since the last `any_loss`.
        self._pending: Pending | None = None  # The all-reduce of whether any rank had a loss.
        self._any_loss: bool | None = None  # The result of that all-reduce, until the next backward pass.

    @contextmanager
    def backward(self, micro: MicroBatch, had_loss: bool) -> Iterator[None]:
        """A context for a backward pass of a micro-batch, which may have several."""
        self._note_forwards()
        self._open = not micro.last
        self._any_loss = None
        self._had_loss |= had_loss
        if micro.last and self._world.size > 1:
            if self._pending is not None:  # In your own training loop an earlier backward pass may have left it.
                self._pending.wait()
            self._pending = self._world.begin_largest([self._had_loss])  # overlaps the backward pass
        with ExitStack() as ends:
            for model in self._models:
                model.forget()  # The backward pass can then free the outputs.
                model.sync_gradients(micro.last or self._reduces_each)
                ends.enter_context(model.in_backward())
            with self._world.collectives:
                yield
        if micro.last:
            for model in self._models:
                model.note_unreduced()
            if self._check is not None:
                self._check()
            self._average([p for model in self._called for p in model.whole if p.requires_grad])

    def _note_forwards(self) -> None:
        called = [model for model in self._models if model.forwards != self._forwards.get(id(model), 0)]
        if called and not self._open:
            self._called = []  # otherwise it is another backward pass of the same forwards
        self._called += [model for model in called if model not in self._called]
        self._forwards = {id(model): model.forwards for model in self._models}

    def discard(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters that no backward pass has reduced."""
        if not self._open:
            return
        cleared = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in cleared for parameter in model.sharded):
                model.drop_gradients()
        self._open = self._had_loss = False

    def skip(self, loss: Tensor | None, micro: MicroBatch, backward: Callable[[Tensor], Any]) -> None:
        """Run a backward pass with zero gradients, for the collectives in it: there is no loss, or its weight is 0.

        Args:
            backward: Runs the backward pass of a loss; the other ranks run the same.

        Raises:
            ModuleError: No forward was run, for which the other ranks wait; or it is unknown which one they have used.
        """
        roots = [output for model in self._models for output in model.outputs]
        if loss is None and self._world.size > 1:
            self._check_called()
        with self.backward(micro, had_loss=loss is not None), ExitStack() as masks:
            for model in self._models:
                masks.enter_context(model.mask_gradients())
            if loss is not None:
                backward(loss * 0.0)
            elif roots:
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    def _check_called(self) -> None:
        """Check that it is known which forwards the other ranks have run."""
        if sum(bool(model.outputs) for model in self._models) > 1:
            raise ModuleError(
                "backward(None): several models were called since the last backward pass, and it is not known which of them "
                "the losses of the other ranks depend on. Expected a loss that depends on the same outputs as theirs: "
                "accelerator.backward((outputs * 0.0).sum())"
            )
        if not any(model.has_run for model in self._models):
            raise ModuleError(
                "there is no loss, and the model was not called, but the other ranks wait for its forward: with FSDP each "
                "forward is a collective. Call the model before you return None from training_step, or pass None to backward."
            )

    def any_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the window that has just ended, given whether this one had."""
        if self._pending is not None:
            (had_loss_anywhere,), self._pending = self._pending.wait(), None
            self._any_loss = bool(had_loss_anywhere)
            self._had_loss = False
        return had_loss if self._any_loss is None else self._any_loss


# -------------------------------------------------------------------------------------------------------------- options


def _one_of(*known: str | None) -> Check:
    def check(value: Any, name: str) -> Any:
        if value in known:
            return value
        raise ConfigurationError(
            f"{name}={value!r}: expected {' or '.join(map(repr, known))}. For example: FSDPStrategy({name}={known[-1]!r})"
        )

    return check


def _size(value: Any, name: str) -> Any:
    if is_whole(value) and value >= 1:
        return value
    raise ConfigurationError(f"{name}={value!r}: expected a whole number ≥ 1. For example: FSDPStrategy({name}=2)")


def _names(value: Any, name: str) -> Any:
    if isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise ConfigurationError(
            f"{name}={value!r}: expected a list of names of methods. For example: FSDPStrategy({name}=['encode'])"
        )
    return value


def _policy(value: Any, name: str) -> Any:
    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value
    raise ConfigurationError(
        f"{name}={value!r}: expected torch.distributed.fsdp.MixedPrecisionPolicy. To compute "
        f"in bfloat16: Trainer(precision='bf16-mixed' or 'bf16-true'), without {name}"
    )


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """The arguments of `FSDPStrategy`, each stated once: its type, its default, its check, and here its text.

    Args:
        wrap: The units: classes of modules, names or patterns of names, a function `(name, module) -> bool`, or a list of
            them; an int: the smallest modules with at least this number of parameters; `False`: the whole model is one unit.
            Default: the repeated blocks of the model. What is in no unit belongs to the root, which stays gathered from its
            forward to its backward.
        reshard_after_forward: Free the parameters of a unit after its forward, and gather them again for its backward. An
            int: keep them sharded over groups of this number of ranks. Default: `True`, except for the root.
        mixed_precision: Torch's `MixedPrecisionPolicy`. Default: from the precision. `bf16-true` and `16-true` keep float32
            shards as master weights, gather parameters in 16 bits and reduce gradients in float32.
        offload_params: `"cpu"`: keep the shards of parameters, gradients and optimizer state in host memory, where the
            optimizer steps.
        replicas: Number of copies of the sharded model (HSDP): parameters are sharded over world size ÷ `replicas` ranks.
        tensor_parallel: Number of ranks that share the computation of each layer, as `TrainModule.parallelize` says. They
            read the same data.
        ignored_modules: Modules that are not sharded, in the form of `wrap`. Their gradients are averaged as in DDP.
        accumulate: `"once"`: reduce gradients in the last micro-batch of an accumulation window; until then each rank holds
            whole gradients. `"reshard"`: reduce them in each micro-batch, which needs less memory and more communication.
        forward_methods: Names of methods of the model, for your own training loop, that compute with its parameters, besides
            `forward`, `generate` and the steps of a `TrainModule`. The parameters are whole while one runs; it is a collective.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        device: As in `DDPStrategy`.
        precision: As in `Strategy`.
    """

    wrap: Wrap = argument(None)
    reshard_after_forward: bool | int | None = argument(None)
    mixed_precision: MixedPrecisionPolicy | None = argument(None, _policy)
    offload_params: Literal["cpu"] | None = argument(None, _one_of(None, "cpu"))
    replicas: int = argument(1, _size)
    tensor_parallel: int = argument(1, _size)
    ignored_modules: Choice | Sequence[Choice] | None = argument(None)
    accumulate: Literal["once", "reshard"] = argument("once", _one_of("once", "reshard"))
    forward_methods: Sequence[str] = argument((), _names)
    process_group_backend: str | None = argument(None, kept=False)
    timeout: timedelta | float = argument(timedelta(minutes=30), kept=False)
    device: str | torch.device = argument("auto", kept=False)
    precision: Precision | str | int | None = argument(None, kept=False)

    def __post_init__(self) -> None:
        check_arguments(FSDPOptions, vars(self))

    def non_defaults(self) -> dict[str, Any]:
        """The options that do not have their default, without those of a `ProcessStrategy`."""
        kept = [name for name, stated in arguments_of(FSDPOptions).items() if stated.kept]
        return {name: value for name in kept if (value := getattr(self, name)) != getattr(FSDPOptions, name)}

    def needs_sharding_alone(self, precision: Precision) -> bool:
        """Whether a single process needs `fully_shard` too: for master weights, or to offload parameters."""
        return self.offload_params is not None or self.mixed_precision is not None or is_short(precision)

    def convert(self, module: nn.Module, precision: Precision, whole: Collection[nn.Parameter]) -> None:
        """Convert a module to the dtypes of the precision; shards of 16-bit parameters are float32 master weights.

        Args:
            whole: The parameters that are not sharded. They are not gathered in 16 bits, so they are 16 bits themselves.
        """
        if self.mixed_precision is not None or not is_short(precision):
            precision.convert_module(module)
            precision.note_other_dtypes(module)
            return
        for tensor in (*module.parameters(), *module.buffers()):
            sharded = isinstance(tensor, nn.Parameter) and (tensor not in whole or not tensor.ndim)
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if sharded else precision.parameter_dtype)

    def convert_back(self, module: nn.Module, precision: Precision) -> None:
        """After a run, convert float32 master weights to the dtype of the precision, as other strategies leave them."""
        if self.mixed_precision is None and is_short(precision):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(precision.parameter_dtype)

    def arguments(self, precision: Precision, device: torch.device) -> dict[str, Any]:
        """Arguments of `fully_shard` for each unit."""
        policy = self.mixed_precision
        if policy is None and is_short(precision):  # the precision converts the inputs
            policy = MixedPrecisionPolicy(precision.parameter_dtype, torch.float32, cast_forward_inputs=False)
        return {
            "mp_policy": policy or MixedPrecisionPolicy(),
            "offload_policy": OffloadPolicy()
            if self.offload_params is None
            else CPUOffloadPolicy(pin_memory=device.type == "cuda"),
            "reshard_after_forward": self.reshard_after_forward,
        }


# ----------------------------------------------------------------------------------------------------------- optimizers


# torch has no sharding rule for what these compute
_REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
_NOT_FUSED = (torch.optim.SGD, torch.optim.Adagrad)


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose steps cannot be computed on parts of a parameter."""
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _REFUSED), None)
    if name is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__} does not work on sharded parameters: torch cannot compute a step of {name} on parts "
            "of a parameter. Use torch.optim.AdamW, or strategy='ddp'."
        )
    if any(map(quantizes, type(optimizer).__mro__)):
        raise OptimizerError(
            f"{type(optimizer).__name__} does not work under FSDP: it quantizes blocks of its state, which would be other "
            "blocks than those of whole parameters. Use torch.optim.AdamW, or strategy='ddp'."
        )


def check_optimizer(optimizer: Optimizer, scaled: bool) -> None:
    """Refuse an optimizer that does not work on sharded parameters.

    Args:
        optimizer: Over sharded parameters, and possibly whole ones.
        scaled: The loss is scaled.
    """
    refuse_optimizer(optimizer)
    kinds = {isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]}
    if scaled and len(kinds) > 1:
        raise OptimizerError(
            "the loss scaler of torch cannot unscale the gradients of sharded parameters and of whole ones (scalars and "
            "ignored_modules) together. Use precision='bf16-mixed', or 32-true."
        )
    for number, group in enumerate(optimizer.param_groups):
        sharded = {isinstance(parameter, DTensor) for parameter in group["params"]}
        option = next((option for option in ("foreach", "fused") if group.get(option)), None)
        if True in sharded and option == "fused" and isinstance(optimizer, _NOT_FUSED):
            raise OptimizerError(
                f"{type(optimizer).__name__}(fused=True) does not work on sharded parameters: torch has no rule for its fused "
                "step. Remove fused=True, or use torch.optim.AdamW(fused=True)."
            )
        if len(sharded) > 1 and option is not None:
            raise OptimizerError(
                f"group {number} of {type(optimizer).__name__} has sharded parameters and whole ones, which torch cannot step "
                f"together with {option}=True. Put the whole ones (scalars and ignored_modules) into a group of their own."
            )


def use_sharded_parameters(optimizer: Optimizer, models: ShardedModels) -> None:
    """Let an optimizer, which was made before its model was sharded, step the sharded parameters. Its state is kept.

    Raises:
        OptimizerError: It was made during a forward.
    """
    owners = _owners(models)
    _refuse_lent(optimizer, {key for model in models for key in model.temporary_ids})
    state = {}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            current = parameter
            for one in models.replaced:
                current = one.current(current)
            group["params"][place] = current
            if parameter in optimizer.state:
                whole_state, model = optimizer.state.pop(parameter), owners.get(id(current))
                state[current] = (
                    whole_state if model is None or current is parameter else _shard_state(whole_state, current, model)
                )
    optimizer.state.update(state)


def _refuse_lent(optimizer: Optimizer, lent: set[int]) -> None:
    if any(id(parameter) in lent for group in optimizer.param_groups for parameter in group["params"]):
        raise OptimizerError(
            f"{type(optimizer).__name__} was made while the model had whole parameters, during a forward or a method of the "
            "prepared model. They are freed after it, so the optimizer would train nothing. Make it before: "
            "optimizer = torch.optim.AdamW(model.parameters()); model, optimizer = accelerator.prepare(model, optimizer)"
        )


def _owners(models: Iterable[ShardedModel]) -> dict[int, ShardedModel]:
    return {id(parameter): model for model in models for parameter in model.sharded}


def _shard_state(state: dict[str, Any], parameter: Any, model: ShardedModel) -> dict[str, Any]:
    """Whole tensors of the parameter's shape become sharded ones."""

    def shard(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or value.shape != parameter.shape:
            return value
        return _shard_of(value, parameter, model)

    return {slot: shard(value) for slot, value in state.items()}


def _shard_of(whole: Tensor, parameter: DTensor, model: ShardedModel) -> Any:
    """A tensor that is sharded like a parameter, with this rank's part of a whole one."""
    made: Any = torch.empty_like(parameter, dtype=whole.dtype, requires_grad=False)
    model.shards.load(made, parameter, whole)
    return made


def make_stored_optimizer(optimizer: Optimizer, models: Iterable[ShardedModel]) -> StoredOptimizer:
    """The optimizer with whole parameters and whole state, which is gathered when the checkpoint is written."""
    owners = _owners(models)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stored = StoredOptimizer(optimizer, {id(p): placeholder_parameter(p.shape, p.dtype) for p in parameters})
    for parameter in parameters:
        model = owners.get(id(parameter))
        slots = {
            slot: _store_value(slot, value, parameter, model, optimizer) if model is not None else value
            for slot, value in optimizer.state.get(parameter, {}).items()
        }
        if slots:
            stored.optimizer.state[stored.placeholders[id(parameter)]] = slots
    return stored


def _store_value(slot: str, value: Any, parameter: Tensor, model: ShardedModel, optimizer: Optimizer) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        raise OptimizerError(
            f"{type(optimizer).__name__} has sharded state of another shape than its parameter ({slot}: {tuple(value.shape)}, "
            f"the parameter: {tuple(parameter.shape)}), which FSDP cannot save. Use torch.optim.AdamW, or strategy='ddp'."
        )
    return model.shards.make_sharded_tensor(value, parameter)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, stored: StoredOptimizer, models: Iterable[ShardedModel]) -> None:
    """Copy this rank's parts of whole state into the optimizer."""
    stored.copy_options()
    owners = _owners(models)
    state = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            slots, model = stored.state(parameter), owners.get(id(parameter))
            if slots:
                state[parameter] = {slot: _load_value(slot, v, parameter, model, on_device) for slot, v in slots.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


def _load_value(slot: str, value: Any, parameter: Any, model: ShardedModel | None, on_device: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim and value.shape == parameter.shape and model is not None:
        return _shard_of(value, parameter, model)
    if value.ndim or (slot == "step" and on_device):
        return value.to(parameter.device, copy=True)
    return value.clone()
