"""All modules that a run has sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.precision import Precision
from trainkit.strategies._reduction import broadcast
from trainkit.strategies.fsdp.fsdp_options import FSDPOptions
from trainkit.strategies.fsdp.gradient_window import GradientWindow
from trainkit.strategies.fsdp.meshes import Meshes
from trainkit.strategies.fsdp.sharded_model import ShardedModel
from trainkit.strategies.fsdp.tensor_parallel import Replaced, ReplicatedGradients, parallelize
from trainkit.strategies.fsdp.units import choose_units, described_units, ignored_parameters, sharded_parts, slots
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["ShardedModels"]


class ShardedModels:
    """Shards modules, each by itself or, under manual optimization, its submodules. Iterates over the sharded models.

    Args:
        options: the options of the strategy.
        precision: the precision of the run.
        world: the processes.
        device: the device of this process.
        meshes: the meshes.
        average: averages the gradients of parameters that are not sharded.

    Attributes:
        window: the accumulation window.
        replaced: the parameters from before, of each module.
        described: what was sharded, in words.
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
        self._options, self._precision, self._world, self._device, self._meshes = options, precision, world, device, meshes
        self._models: list[ShardedModel] = []
        self._modules: list[nn.Module] = []
        self._undo = ExitStack()  # of tensor parallelism
        check = ReplicatedGradients(self._models, meshes.whole, device).check if options.tensor_parallel > 1 else None
        self.window = GradientWindow(self._models, world, options.accumulate == "reshard", average, check)
        self.replaced: list[Replaced] = []
        self._steps: ShardedModel | None = None  # of the module whose steps run while its root is whole
        self.described = ""

    def __iter__(self) -> Iterator[ShardedModel]:
        return iter(self._models)

    def add(self, module: nn.Module) -> None:
        """Shard a module, with rank 0's values.

        Raises:
            ModuleError: A part cannot be sharded.
        """
        manual = not getattr(module, "automatic_optimization", True)
        parts = sharded_parts(module) if manual else [module]
        inside = {parameter for part in parts for parameter in part.parameters()}
        whole = ignored_parameters(module, self._options.ignored_modules) | (set(module.parameters()) - inside)
        devices = {(owner, name): owner._parameters[name].device for owner, name in slots(module)}  # type: ignore[union-attr]
        self._modules.append(module)
        self._options.convert(module, self._precision, whole)
        self.replaced.append(Replaced(module))
        self._precision.convert_layers(module)
        if self._options.tensor_parallel > 1:
            self._undo.callback(parallelize(module, self._meshes.whole, self._device))
        units, ignored = choose_units(module, self._options.wrap), ignored_parameters(module, self._options.ignored_modules)
        described = described_units(module, units, parts)
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
        """The sharded model of a module.

        Raises:
            ConfigurationError: Its submodules are sharded instead, for manual optimization.
        """
        found = next((model for model in self._models if model.module is module), None)
        if found is None:
            raise ConfigurationError(
                f"{type(module).__name__}.automatic_optimization is False, which is for the Trainer. In your own training loop "
                "prepare its models: accelerator.prepare(module.generator, module.discriminator)"
            )
        return found

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

        def checked() -> Any:
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return checked

    def _check_gradients(self, optimizer: Optimizer) -> None:
        for model in self._models:
            model.check_gradients(optimizer)

    def note_weights_changed(self) -> None:
        """After an optimizer step, and wherever else weights change. Collective."""
        for model in self._models:
            self._precision.weights_changed(model.module)

    @contextmanager
    def gathered(self, module: nn.Module, modified: bool) -> Iterator[None]:
        """A context in which the parameters of a module are whole on all ranks. Collective.

        Args:
            module: A module in which there are sharded ones, or that is inside one.
            modified: Keep rank 0's changes.
        """
        inside = set(module.modules())
        with ExitStack() as contexts:
            for model in self._models:
                if model.module in inside or module in set(model.module.modules()):
                    contexts.enter_context(model.gathered(module, modified))
            yield
        if modified:
            self.note_weights_changed()

    def stored_weights(self, module: nn.Module) -> dict[int, ShardedTensor]:
        """See `trainkit.Strategy.stored_weights`."""
        self.reshard()
        own = {id(parameter) for parameter in module.parameters()}
        return {id(p): model.shards.sharded_tensor(p, p) for model in self._models for p in model.sharded if id(p) in own}

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
