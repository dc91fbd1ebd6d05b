"""`ZeROStrategy`: shards optimizer state, gradients and parameters across the processes with DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checks import accepts, arguments_of, describe_arguments
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.data.micro_batches import WHOLE_WINDOW, MicroBatch
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.optim.joint_optimizer import optimizers_in
from trainkit.optim.optimizer_copy import StoredOptimizer
from trainkit.precision import Precision
from trainkit.strategies._collectives import Buffers, broadcast, check_modules_match
from trainkit.strategies._processes import ProcessStrategy
from trainkit.strategies.zero import INFO, stored_state, zero_memory
from trainkit.strategies.zero.config_file import RunSettings
from trainkit.strategies.zero.deepspeed_api import require
from trainkit.strategies.zero.deepspeed_config import NO_VALUES, RUN_IS_OVER, ZeROConfig
from trainkit.strategies.zero.engine import (
    EngineWindow,
    EvaluationEngine,
    LossScale,
    StepModule,
    TrainingEngine,
    ZeROModel,
    module_with,
)
from trainkit.strategies.zero.engine_setup import Setup, check_machine, prepare_precision, resolve_config
from trainkit.strategies.zero.optimizer_adapter import engine_over, warn_slow_on_cpu
from trainkit.strategies.zero.partitions import announce_zero3
from trainkit.strategies.zero.whole_steps import WholeSteps
from trainkit.strategy import StepArguments

__all__ = ["ZeROStrategy"]


class ZeROStrategy(ProcessStrategy):
    """ZeRO on DeepSpeed: each process keeps a shard of what DDP replicates. What `strategy="zero1"` to `"zero3"` makes.

    Stage 1 shards the optimizer state and the float32 master weights, stage 2 also the gradients, stage 3 also the
    parameters (Rajbhandari et al., "ZeRO", SC 2020). The shards can be offloaded to host memory or to a disk. A parameter
    without a gradient in an optimizer step has the gradient zero: weight decay and momentum still apply.

    Raises:
        ConfigurationError: An argument is wrong, contradicts another one, or is not supported here.
        MissingPackageError: DeepSpeed is not installed.

    Example:
        ```python
        trainer = Trainer(strategy=ZeROStrategy(3, offload_optimizer="cpu"), precision="bf16-true", devices=8)
        ```
    """

    info = INFO
    accumulates_in_engine = owns_masters = reads_checkpoint_parts = shards_optimizer_state = True
    compiles = keeps_placement = False
    supported_precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
    footprint = zero_memory.footprint

    @accepts(ZeROConfig)
    def __init__(self, stage: int | None = None, **arguments: Any) -> None:
        require()
        stated = arguments_of(ZeROConfig).items()
        others = {name: arguments.pop(name, getattr(ZeROConfig, name)) for name, argument in stated if not argument.kept}
        config, precision = others.pop("config"), others.pop("precision")
        self.config, deepspeed_config = resolve_config(stage, config, arguments)
        check_machine(self.config)
        self.stage = self.config.stage
        self.name = f"zero{self.stage}"  # type: ignore[misc]
        self.plugin = DeepSpeedPlugin(zero_stage=self.stage)
        self.shards_parameters = self.stage == 3  # type: ignore[misc]  # set on this object, not on the class
        self.compiles_blocks = self.stage < 3  # the hooks of stage 3, in each layer, break every graph
        from_config = None if deepspeed_config is None else deepspeed_config.precision
        super().__init__(**others, precision=from_config)
        if precision is not None:
            self.use_precision(precision)
        self.run_settings = RunSettings(deepspeed_config, self.config.offload_optimizer is not None)
        self._setup: Setup | None = None
        self._reset()

    def __repr__(self) -> str:
        options = [f"stage={self.stage}"]
        options += [f"{n}={v!r}" for n in ("offload_optimizer", "offload_params") if (v := getattr(self.config, n)) is not None]
        return f"ZeROStrategy({', '.join(options)}, device={str(self.device)!r}, precision={self.precision.name!r})"

    def _reset(self) -> None:
        self._modules: list[nn.Module] = []
        self._models: list[ZeROModel] = []  # models that the user's own training loop calls
        self._step_module: StepModule | None = None  # calls training_step under automatic optimization
        self._engines: dict[int, TrainingEngine] = {}  # key: id of a user's optimizer
        self._window: EngineWindow | None = None  # accumulation window of the engine that runs the forward
        self._evaluation_engine: EvaluationEngine | None = None
        self._forward: Callable[..., Any] | None = None  # runs evaluation steps in stage 3
        self._buffers = Buffers()

    def use_precision(self, precision: Precision | str | int, *, given: bool = True) -> None:
        super().use_precision(precision, given=given)
        prepare_precision(self.precision, self.device)

    def check_arguments(self, arguments: StepArguments) -> None:
        super().check_arguments(arguments)
        if arguments.gradient_clip_algorithm == "value":
            raise ConfigurationError(NO_VALUES)
        self.run_settings.check_arguments(arguments)

    def check_batches(self, micro_batch: int | None, window: int) -> None:
        self.run_settings.check_batches(micro_batch, window, self.world)

    def configured_by(self, source: str) -> None:
        self.run_settings.take_precedence(source)

    @property
    def has_optimizer(self) -> bool:
        """Whether the configuration has an `optimizer` section."""
        return self.run_settings.has_optimizer

    def configure_optimizers(self, module: nn.Module) -> Any:
        return self.run_settings.configure_optimizers(module, self.device)

    def create_optimizer(self, parameters: Sequence[Any], values: Mapping[str, Any]) -> Optimizer:
        return self.run_settings.create_optimizer(parameters, values, self.device)

    def create_scheduler(self, optimizer: Optimizer, values: Mapping[str, Any], make: Callable[[Optimizer], Any] | None) -> Any:
        return self.run_settings.create_scheduler(optimizer, values, make)

    def check_loop(self) -> None:
        self.run_settings.check_loop()

    def building(self, pretrained: bool = False) -> AbstractContextManager[Any]:
        """See `trainkit.Strategy.building`; in stage 3 no process ever holds the full model."""
        return self._start().sharding.building(pretrained) if self.stage == 3 else nullcontext()

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Move the module to the device, and broadcast its parameters and buffers from rank 0."""
        self._start()
        check_modules_match(module, self.world, "ZeRO")
        if self.stage < 3:
            module = super().prepare_module(module)
        else:  # parameters are moved to the device when they are sharded
            self.placement(module)
            self.precision.convert_module(module)
            for part in module.modules():
                part._buffers.update({name: b if b is None else b.to(self.device) for name, b in part._buffers.items()})
        if self.world.size > 1:
            if self.stage < 3:
                broadcast([p.data for p in module.parameters()])
            self._buffers.add(module, self.world)
            self.sync_buffers()
        self._modules.append(module)
        return module

    def _start(self) -> Setup:
        if self._setup is None:
            self._setup = Setup(self.config, self.precision, self.world, self.device)
        return self._setup

    def wrap(self, module: nn.Module) -> nn.Module:
        model = ZeROModel(module)
        self._models.append(model)
        if self.stage == 3:
            self._start().expect_forwards(module)
        return model

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, ZeROModel) else super().unwrap(module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """See `trainkit.Strategy.step_function`; under automatic optimization the engine's forward runs the step."""
        if compiler is not None:
            raise UnsupportedArgumentError(
                "ZeRO does not support a module from torch.compile: DeepSpeed's hooks do not run in compiled code. "
                "Pass the module without torch.compile, or use strategy='ddp'."
            )
        run = super().step_function(wrapped, module, name)
        automatic = getattr(module, "automatic_optimization", True)
        if name == "training_step" and automatic:
            self._step_module = self._step_module or StepModule(module)
            return partial(self._training_step, run)
        if self.stage == 3 and automatic:
            self._step_module = self._step_module or StepModule(module)
            return partial(self._evaluation_step, run)
        return run

    def _training_step(self, run: Callable[..., Any], *args: Any) -> Any:
        if self._window is not None:
            return self._window.step(run, *args)
        return self._evaluation_step(run, *args) if self.stage == 3 else run(*args)  # no optimizer: nothing is trained

    def _evaluation_step(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run a stage 3 step without a backward pass; the forward gathers the parameters."""
        if self._forward is None:
            window = self._window
            self._forward = self._without_optimizer() if window is None else window.engine.evaluate
        with announce_zero3(), self.world.collectives:
            return self._forward(run, *args)

    def _without_optimizer(self) -> Callable[..., Any]:
        """Returns the forward of stage 3 for a run without an optimizer."""
        setup, module = self._start(), self._step_module
        assert module is not None
        setup.sharding.shard(module)
        self._evaluation_engine = EvaluationEngine(setup.session, module, setup.configuration(module.parameters()))
        return self._evaluation_engine.forward

    def prepare_optimizers(self, optimizers: Sequence[Optimizer], module: nn.Module | None) -> list[Optimizer]:
        """Shard the parameters and state of optimizers; under automatic optimization they get one engine, which steps them all.

        Raises:
            OptimizerError: ZeRO does not support an optimizer, or it shares layers with another one that steps by itself.
        """
        if self._step_module is None or not optimizers:
            return super().prepare_optimizers(optimizers, module)
        self._make_engine(optimizers)
        return list(optimizers)

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """Shard the optimizer's parameters and state. Existing optimizer state is kept.

        Raises:
            OptimizerError: ZeRO does not support this optimizer, or it shares layers with another optimizer.
        """
        self._make_engine([optimizer])
        return optimizer

    def _make_engine(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self.run_settings.check_optimizer(optimizer)
            if self.config.offload_optimizer is not None:
                warn_slow_on_cpu(optimizer, self.device)
        setup = self._start()
        trained = [p for one in optimizers for group in one.param_groups for p in group["params"] if p.requires_grad]
        target, local = self._target(trained)
        if self.stage == 3:
            setup.sharding.shard(target)
        config = setup.configuration(trained, optimizers)
        # without overlap_comm, stage 1 does not communicate during the backward pass
        in_step, scale = self.stage == 1 and not self.config.overlap_comm, LossScale(self.precision, self.device)
        engine = TrainingEngine(setup.session, target, optimizers, config, local=local or in_step, scale=scale)
        engine.shadow.step_whole = WholeSteps(engine, self.world, self.device).step
        self._engines.update(dict.fromkeys(map(id, optimizers), engine))
        if not local:
            self._window = EngineWindow(engine, self, self.world)
            self.owns_backward = not in_step
            for model in self._models:
                model.call = self._window.call

    def _engine_of(self, optimizer: Optimizer) -> TrainingEngine:
        return self._engines[id(optimizers_in(optimizer)[0])]

    @property
    def _all_engines(self) -> list[TrainingEngine]:
        return list(dict.fromkeys(self._engines.values()))

    def has_gradients(self, optimizer: Optimizer) -> bool:
        given = self._engine_of(optimizer).has_gradient(p for group in optimizer.param_groups for p in group["params"])
        return any(self.world.largest([given]))

    def _target(self, trained: list[Tensor]) -> tuple[nn.Module, bool]:
        """Returns the module of the new engine, and whether gradients stay local until the optimizer step."""
        if self._step_module is not None:
            return self._step_module, False
        if len(self._models) == 1 and {id(p) for p in trained} == {
            id(p) for p in self._models[0].module.parameters() if p.requires_grad
        }:
            return self._models[0].module, False
        return module_with(self._modules, trained), True

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        if loss is None:
            self.skip_backward(None, micro)
        elif self._window is not None:
            self._window.backward(self.precision.scale(loss), micro, **kwargs)
        else:
            for engine in self._all_engines:
                engine.before_backward()
            kwargs.pop("call", Tensor.backward)(self.precision.scale(loss), **kwargs)

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        self.precision.scale(torch.zeros((), device=self.device))  # keeps the loss scale equal on all processes
        if self._window is not None:
            self._window.skip(loss, micro)

    def any_loss(self, had_loss: bool) -> bool:
        return had_loss if self._window is None else self._window.any_loss()

    def unscale(self, optimizer: Optimizer) -> None:
        """Does nothing: `parameter.grad` has no gradients under ZeRO, and norms are already unscaled."""

    def end_window(self) -> None:
        """See `trainkit.Strategy.end_window`. The optimizer step completes what the backward passes have reduced."""
        if self._window is not None:
            self._window.end(self.micro_batch)

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float) -> None:
        """See `trainkit.Strategy.scale_gradients`. The optimizer step unscales the gradients accordingly."""
        keys = {id(parameter) for parameter in parameters}
        for engine in self._all_engines:
            if any(id(parameter) in keys for parameter in engine.parameters):
                engine.scale_gradients(factor)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run the optimizer step, then broadcast rank 0's buffers. Skips the step if no process had a loss.

        Raises:
            ConfigurationError: A closure is given.
        """
        if closure is not None:
            raise ConfigurationError(
                "ZeRO does not support an optimizer step with a closure. Compute the loss and call backward before "
                "optimizer.step(), or use strategy='ddp'."
            )
        engine = self._engine_of(optimizer)
        if self._window is not None and not self._window.any_loss():
            engine.discard()
            updated = False
        else:
            engine.clip = engine.clip or self.run_settings.clip
            updated = engine.step()
        self.sync_buffers()
        return updated

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients in the next optimizer step; returns their norm before clipping.

        Raises:
            ConfigurationError: `norm_type` is not 2, `max_norm` differs from the configuration's `gradient_clipping`,
                or `parameters` are not all parameters of one optimizer.
        """
        if norm_type != 2.0:
            raise ConfigurationError(f"ZeRO clips by the 2-norm, not norm_type={norm_type!r}. Use 2.0, or strategy='ddp'.")
        engine = engine_over(parameters, self._all_engines)
        engine.clip = self.run_settings.clipping(max_norm)
        return engine.norm()

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Not supported under ZeRO: raises a `ConfigurationError`."""
        raise ConfigurationError(NO_VALUES)

    def gathered_parameters(self, module: nn.Module, modified: bool = False) -> AbstractContextManager[Any]:
        """See `trainkit.Strategy.gathered_parameters`; changes do not reach the master weights."""
        return self._start().sharding.gather(module.parameters(), modified) if self.stage == 3 else nullcontext()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        return self._engine_of(optimizer).norm()

    def stored_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        return stored_state.make_stored_weights(module, self._all_engines, self.device)

    def exported_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        short = self.config.zero3_save_16bit_model
        return stored_state.working_weights(module, self.device) if short else self.stored_weights(module)

    def load_weights(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        stored_state.load_weights(values, self._all_engines, self.device)

    def stored_optimizer(self, optimizer: Optimizer) -> StoredOptimizer | None:
        if id(optimizer) not in self._engines:
            raise ConfigurationError(RUN_IS_OVER)
        return stored_state.make_stored_optimizer(self._engines[id(optimizer)], optimizer, self.device)

    def load_optimizer(self, optimizer: Optimizer, stored: StoredOptimizer) -> None:
        stored_state.load_optimizer(self._engines[id(optimizer)], stored)

    def teardown(self) -> None:
        """Remove DeepSpeed from the modules. Process groups stay open, because other objects may use them."""
        with ExitStack() as rest:  # runs all callbacks, even if one fails
            rest.callback(self._reset)
            if self._setup is not None:
                rest.callback(self._setup.close, collective=not self.broken)
                self._setup = None
            for engine in (*self._all_engines, self._evaluation_engine):
                if engine is not None:
                    engine.close()


ZeROStrategy.__doc__ = describe_arguments(ZeROStrategy.__doc__, ZeROConfig)
