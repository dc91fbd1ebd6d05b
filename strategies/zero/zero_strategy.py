"""``ZeROStrategy``: optimizer state, gradients and parameters divided over the processes, by DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch
from trainkit.optim.step_arguments import StepArguments
from trainkit.optim.stored_optimizer import StoredOptimizer
from trainkit.precision import Precision
from trainkit.strategies._copies import Buffers, refuse_unlike
from trainkit.strategies._gather import barrier, gathered
from trainkit.strategies._membership import Membership
from trainkit.strategies._reduction import broadcast, mean
from trainkit.strategies.zero import stored_state, zero_memory
from trainkit.strategies.zero.bare import BareEngine
from trainkit.strategies.zero.claims import Claims
from trainkit.strategies.zero.deepspeed_api import require
from trainkit.strategies.zero.deepspeed_config import NO_VALUES, RUN_IS_OVER
from trainkit.strategies.zero.engine import Engine
from trainkit.strategies.zero.engine_setup import Setup, check_machine, configured, prepare_precision
from trainkit.strategies.zero.info import INFO
from trainkit.strategies.zero.loss_scale import LossScale
from trainkit.strategies.zero.optimizer_adapter import engine_over, warn_of_slow_updates
from trainkit.strategies.zero.transformers_models import told_transformers
from trainkit.strategies.zero.zero_model import Dispatch, ZeROModel, holder
from trainkit.strategies.zero.zero_window import EngineWindow
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trainkit.strategies.zero.zero_options import ZeROOptions

__all__ = ["ZeROStrategy"]


class ZeROStrategy(Strategy):
    """ZeRO (Rajbhandari et al., SC 2020) on DeepSpeed: each process keeps a part of what DDP keeps whole.

    Stage 1 divides the optimizer's state and the float32 masters, stage 2 also the gradients, stage 3 also the parameters. What
    is divided can be kept in host memory or on a disk (offload).

    Args:
        stage: 1, 2 or 3; default: 2.
        config: a DeepSpeed configuration, the path of a JSON file or a dict, instead of ``stage`` and the options.
            ``"auto"`` values are the ``Trainer``'s, and a value that contradicts it is an error.
        process_group_backend: as of :class:`~trainkit.strategies.DDPStrategy`.
        timeout, device: the same.
        precision: as of the base class.
        **options: see :class:`~trainkit.strategies.zero.zero_options.ZeROOptions`.

    A parameter that gets no gradient in a step counts as one whose gradient is zero: weight decay and momentum go on.

    Raises:
        ConfigurationError: an argument that is wrong, contradicts another, or cannot work here.
        MissingPackageError: DeepSpeed is not installed.
    """

    info = INFO
    accumulates_in_engine = owns_masters = reads_checkpoint_parts = shards_optimizer_state = True
    compiles = False
    supported_precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
    footprint = zero_memory.footprint

    def __init__(
        self,
        stage: int | None = None,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        device: str | torch.device = "auto",
        precision: Precision | str | int | None = None,
        **options: Unpack[ZeROOptions],
    ) -> None:
        require()
        self.config, told = configured(stage, config, options)
        check_machine(self.config)
        self.stage = self.config.stage
        self.name = f"zero{self.stage}"  # type: ignore[misc]
        self.plugin = DeepSpeedPlugin(zero_stage=self.stage)
        self.shards_parameters = self.stage == 3  # type: ignore[misc]  # of this object
        super().__init__(device, None if told is None else told.precision)
        if precision is not None:
            self.use_precision(precision)
        self.claims = Claims(told, self.config.offload_optimizer is not None)
        self._membership = Membership("ZeROStrategy", device, process_group_backend, timeout)
        self._setup: Setup | None = None
        self._begin()

    def __repr__(self) -> str:
        options = [f"stage={self.stage}"]
        options += [f"{n}={v!r}" for n in ("offload_optimizer", "offload_params") if (v := getattr(self.config, n)) is not None]
        return f"ZeROStrategy({', '.join(options)}, device={str(self.device)!r}, precision={self.precision.name!r})"

    def _begin(self) -> None:
        self._modules: list[nn.Module] = []
        self._models: list[ZeROModel] = []  # of loops that call them themselves
        self._dispatch: Dispatch | None = None  # training_step under automatic optimization
        self._engines: dict[int, Engine] = {}  # by the id of the user's optimizer
        self._learning: EngineWindow | None = None  # of the engine that the model is called through
        self._bare: BareEngine | None = None
        self._forward: Callable[..., Any] | None = None  # of an evaluation step in stage 3
        self._buffers = Buffers()

    def use_precision(self, precision: Precision | str | int, *, given: bool = True) -> None:
        """See :meth:`trainkit.Strategy.use_precision`."""
        super().use_precision(precision, given=given)
        prepare_precision(self.precision, self.device)

    def check_arguments(self, arguments: StepArguments) -> None:
        """See :meth:`trainkit.Strategy.check_arguments`."""
        if arguments.gradient_clip_algorithm == "value":
            raise ConfigurationError(NO_VALUES)
        self.claims.check_arguments(arguments)

    def check_batches(self, micro_batch: int | None, window: int) -> None:
        """See :meth:`trainkit.Strategy.check_batches`."""
        self.claims.check_batches(micro_batch, window, self.world)

    def configured_by(self, source: str) -> None:
        """See :meth:`trainkit.Strategy.configured_by`."""
        self.claims.lead(source)

    @property
    def has_optimizer(self) -> bool:
        """Whether the configuration says how to make one."""
        return self.claims.has_optimizer

    def configure_optimizers(self, module: nn.Module) -> Any:
        """See :meth:`trainkit.Strategy.configure_optimizers`."""
        return self.claims.configure_optimizers(module, self.device)

    def join(self, wanted: RequestedDevices) -> None:
        """See :meth:`trainkit.Strategy.join`."""
        (self.world, self.device), self.joined = self._membership.join(wanted, self.device), True

    def building(self, pretrained: bool = False) -> AbstractContextManager[Any]:
        """See :meth:`trainkit.Strategy.building`; in stage 3 no process ever has the whole model."""
        return self._start().sharding.building(pretrained) if self.stage == 3 else nullcontext()

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """The module on the device, with rank 0's parameters and buffers."""
        self._start()
        refuse_unlike(module, self.world, "ZeRO")
        if self.stage < 3:
            module = super().prepare_module(module)
        else:  # parameters come to the device when they are divided
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
        """See :meth:`trainkit.Strategy.wrap`."""
        model = ZeROModel(module)
        self._models.append(model)
        if self.stage == 3:
            self._start().expect_forwards(module)
        return model

    def unwrap(self, module: nn.Module) -> nn.Module:
        """See :meth:`trainkit.Strategy.unwrap`."""
        return module.module if isinstance(module, ZeROModel) else super().unwrap(module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """See :meth:`trainkit.Strategy.step_function`; with automatic optimization it runs in the engine's forward."""
        if compiler is not None:
            raise UnsupportedArgumentError(
                "a module out of torch.compile does not work under ZeRO in this version: its hooks are not for compiled code. "
                "Give the module as it is, or use strategy='ddp'."
            )
        run = super().step_function(wrapped, module, name)
        automatic = getattr(module, "automatic_optimization", True)
        if name == "training_step" and automatic:
            self._dispatch = self._dispatch or Dispatch(module)
            return partial(self._training_step, run)
        if self.stage == 3 and automatic:
            self._dispatch = self._dispatch or Dispatch(module)
            return partial(self._evaluation_step, run)
        return run

    def _training_step(self, run: Callable[..., Any], *args: Any) -> Any:
        if self._learning is not None:
            return self._learning.step(run, *args)
        return self._evaluation_step(run, *args) if self.stage == 3 else run(*args)  # nothing is learnt

    def _evaluation_step(self, run: Callable[..., Any], *args: Any) -> Any:
        """A step in which parameters are gathered and nothing is learnt."""
        if self._forward is None:
            learning = self._learning
            self._forward = self._without_optimizer() if learning is None else learning.engine.evaluate
        with told_transformers(), self.world.collectives:
            return self._forward(run, *args)

    def _without_optimizer(self) -> Callable[..., Any]:
        """The forward of stage 3 where there is no optimizer."""
        setup, dispatch = self._start(), self._dispatch
        assert dispatch is not None
        setup.sharding.divide(dispatch)
        self._bare = BareEngine(setup.session, dispatch, setup.configuration(dispatch.parameters()))
        return self._bare.forward

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """The optimizer, whose parameters are divided from here on; what it has as state is taken over.

        Raises:
            OptimizerError: one that ZeRO would change, or whose parameters cannot be divided by themselves.
        """
        self.claims.check_optimizer(optimizer)
        if self.config.offload_optimizer is not None:
            warn_of_slow_updates(optimizer, self.device)
        setup = self._start()
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        target, local = self._target(trained)
        if self.stage == 3:
            setup.sharding.divide(target)
        config = setup.configuration(trained, optimizer)
        # stage 1 without overlapping has nothing to do during a backward pass
        engine = Engine(
            setup.session,
            target,
            optimizer,
            config,
            local=local or (self.stage == 1 and not self.config.overlap_comm),
            scale=LossScale(self.precision, self.device),
        )
        self._engines[id(optimizer)] = engine
        if not local:
            self._learning = EngineWindow(engine, self, self.world)
            for model in self._models:
                model.call = self._learning.call
        return optimizer

    def _target(self, trained: list[Tensor]) -> tuple[nn.Module, bool]:
        """What an engine is made around, and whether its gradients stay local until its step."""
        if self._dispatch is not None:
            return self._dispatch, False
        if len(self._models) == 1 and {id(p) for p in trained} == {
            id(p) for p in self._models[0].module.parameters() if p.requires_grad
        }:
            return self._models[0].module, False
        return holder(self._modules, trained), True

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """See :meth:`trainkit.Strategy.backward`."""
        if loss is None:
            self.skip_backward(None, micro)
        elif self._learning is not None:
            self._learning.backward(self.precision.scale(loss), micro, **kwargs)
        else:
            for engine in self._engines.values():
                engine.touched()
            self.precision.scale(loss).backward(**kwargs)

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See :meth:`trainkit.Strategy.skip_backward`."""
        self.precision.scale(torch.zeros((), device=self.device))  # the loss scale is kept alike on all processes
        if self._learning is not None:
            self._learning.skip(loss, micro)

    def any_loss(self, had_loss: bool) -> bool:
        """See :meth:`trainkit.Strategy.any_loss`."""
        return had_loss if self._learning is None else self._learning.any_loss()

    def unscale(self, optimizer: Optimizer) -> None:
        """Nothing: what a process has are no gradients to look at, and norms are without the scale."""

    def mean(self, value: Tensor) -> Tensor:
        """See :meth:`trainkit.Strategy.mean`."""
        return value if self.world.size == 1 else mean(value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters, and give rank 0's buffers to all processes; not if no process has had a loss.

        Raises:
            ConfigurationError: a closure.
        """
        if closure is not None:
            raise ConfigurationError(
                "an optimizer step with a closure does not work under ZeRO. Compute the loss and call backward before "
                "optimizer.step(), or use strategy='ddp'."
            )
        engine = self._engines[id(optimizer)]
        if self._learning is not None and not self._learning.any_loss():
            engine.discard()
            updated = False
        else:
            engine.clip = engine.clip or self.claims.clip
            updated = engine.step()
        self.sync_buffers()
        return updated

    def sync_buffers(self) -> None:
        """See :meth:`trainkit.Strategy.sync_buffers`."""
        self._buffers.sync()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down in the update to come; returns the norm before.

        Raises:
            ConfigurationError: another norm than the 2-norm or than the configuration's, or the parameters of several
                optimizers or of a part of one.
        """
        if norm_type != 2.0:
            raise ConfigurationError(f"ZeRO clips by the 2-norm, and norm_type is {norm_type!r}. Leave it out, or use 'ddp'.")
        engine = engine_over(parameters, self._engines.values())
        engine.clip = self.claims.clipping(max_norm)
        return engine.norm()

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Not under ZeRO.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(NO_VALUES)

    def gathered_parameters(self, module: nn.Module, modified: bool = False) -> AbstractContextManager[Any]:
        """See :meth:`trainkit.Strategy.gathered_parameters`; masters do not follow what is modified."""
        return self._start().sharding.gathered(module.parameters(), modified) if self.stage == 3 else nullcontext()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """See :meth:`trainkit.Strategy.gradient_norm`."""
        return self._engines[id(optimizer)].norm()

    def stored_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        """See :meth:`trainkit.Strategy.stored_weights`."""
        return stored_state.stored_weights(module, list(self._engines.values()), self.device)

    def exported_weights(self, module: nn.Module) -> Mapping[int, Tensor]:
        """See :meth:`trainkit.Strategy.exported_weights`."""
        short = self.config.zero3_save_16bit_model
        return stored_state.working_weights(module, self.device) if short else self.stored_weights(module)

    def load_weights(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """See :meth:`trainkit.Strategy.load_weights`."""
        stored_state.load_weights(values, [*self._engines.values()], self.device)

    def stored_optimizer(self, optimizer: Optimizer) -> StoredOptimizer | None:
        """See :meth:`trainkit.Strategy.stored_optimizer`."""
        if id(optimizer) not in self._engines:
            raise ConfigurationError(RUN_IS_OVER)
        return stored_state.stored_optimizer(self._engines[id(optimizer)], self.device)

    def load_optimizer(self, optimizer: Optimizer, stored: StoredOptimizer) -> None:
        """See :meth:`trainkit.Strategy.load_optimizer`."""
        stored_state.load_optimizer(self._engines[id(optimizer)], stored)

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """See :meth:`trainkit.Strategy.all_gather`.

        Raises:
            ConfigurationError: the processes give different containers, shapes or dtypes.
        """
        return data if self.world.size == 1 else gathered(data, self.world, self.device, sync_grads, alike)

    def barrier(self) -> None:
        """See :meth:`trainkit.Strategy.barrier`."""
        barrier(self.world)

    def teardown(self) -> None:
        """Take DeepSpeed off the modules. Process groups stay: others may use them."""
        with ExitStack() as rest:  # which is done whatever fails
            rest.callback(self._begin)
            if self._setup is not None:
                rest.callback(self._setup.close, collective=not self.broken)
                self._setup = None
            for engine in (*self._engines.values(), self._bare):
                if engine is not None:
                    engine.close()
