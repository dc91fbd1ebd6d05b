"""`Accelerator`: prepare, accumulate, backward, clip, step. The one implementation, for `Trainer` and your own loops."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainkit.accelerator.checkpointing import PARTS, Checkpointing, NumberedCheckpoints, Saving, refuse_pickle
from trainkit.accelerator.gradients import AccumulationState, CallWindow, Gradients, StepChecks, parameters_of, plain_verbs
from trainkit.accelerator.options import Options, check_steps, resolve
from trainkit.accelerator.prepared_loaders import OpenLoaders, PreparedLoaders, SkippedLoader, is_loader, skip_first_batches
from trainkit.accelerator.prepared_models import PrecisionWrapper, PreparedModels, PreparedObjects, user_model
from trainkit.accelerator.processes import Gathering, only_where, remember, run_first, share_of
from trainkit.accelerator.state_hooks import LoadHook, SaveHook
from trainkit.accelerator.state_views import AcceleratorState, GradientState
from trainkit.checkpoint.checksum import DEFAULT_CHECKSUM
from trainkit.checkpoint.plain_files import shard_size
from trainkit.checkpoint.urls import remote_sync
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin, ParallelismConfig
from trainkit.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    ProfileKwargs,
    ProjectConfiguration,
    find_distributed_type,
)
from trainkit.console import echo, notice, quantity, warn, with_article
from trainkit.data.loader import PreparedLoader
from trainkit.distributed.collective_checks import CollectiveChecks, describe
from trainkit.distributed.world import World
from trainkit.errors import CollectiveError, ConfigurationError, ProcessFailedError, UnsupportedArgumentError
from trainkit.loggers.trackers import ByTracker, Trackers
from trainkit.names import absent_attribute, refuse_unknown
from trainkit.optim.joint_optimizer import JointOptimizer
from trainkit.optim.parameter_names import KnownParameters
from trainkit.optim.placeholders import replace_placeholders
from trainkit.optim.prepared import PreparedOptimizer, PreparedScheduler
from trainkit.optim.same_options import list_options
from trainkit.paths import local_path
from trainkit.precision import MIXED, OVER_MASTERS
from trainkit.state.training_objects import check_components
from trainkit.strategy import Strategy

__all__ = ["Accelerator"]

Function = TypeVar("Function", bound=Callable[..., Any])

_NULL = nullcontext()


class LoopPhase(Enum):
    """How far your own training loop has come; a `Trainer` makes the checks of these phases itself, and is always `RUNNING`."""

    CREATED = "nothing is prepared"
    PREPARED = "objects are prepared, and this process ends if another one fails"
    RUNNING = "the first verb of the loop has checked what was prepared"


class Accelerator:
    """Runs your own training loop on any device and any number of processes. `Trainer` uses it too.

    The arguments are Accelerate's; those after `fsdp_plugin` are keywords. An argument that is not given has the value of
    the file of `trainkit launch --config_file`, if the process was started so.

    Args:
        device_placement: Move models, optimizers and batches to the device.
        split_batches: The `batch_size` of a loader is the total of all processes. Default: it is that of each process.
        mixed_precision: `"no"`, `"fp16"` or `"bf16"`: float32 parameters, and a forward under autocast. Under ZeRO, as in
            Accelerate, 16-bit parameters with float32 master weights. `"fp8"`: see `Float8Precision`.
        gradient_accumulation_steps: Number of micro-batches per optimizer step. Default: 1.
        cpu: Run on the CPU even if there is a GPU.
        dataloader_config: A `DataLoaderConfiguration`.
        deepspeed_plugin: A `DeepSpeedPlugin`: ZeRO.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`: FSDP.
        megatron_lm_plugin: Unsupported; use `strategy="fsdp"` or `"zero3"`.
        rng_types: No effect: all generators are seeded for each micro-batch, on all processes.
        log_with: Trackers for `init_trackers`: a name such as `"wandb"`, `"all"`, a `Logger`, a `GeneralTracker`, or a
            list.
        project_dir: Folder of the project.
        project_config: A `ProjectConfiguration`.
        gradient_accumulation_plugin: A `GradientAccumulationPlugin`.
        dispatch_batches: Only `False`: each process reads its own batches.
        even_batches: A rank without data at the end of an epoch gets padding micro-batches. `False`: only where it has none
            in a whole accumulation window, and never in an evaluation. Default: `True`.
        use_seedable_sampler: No effect: the order of an epoch is always a function of the seed and the number of the epoch.
        step_scheduler_with_optimizer: A prepared scheduler advances with optimizer steps, once for each process (once in
            all with `split_batches`). `False`: it advances by one with each call.
        kwargs_handlers: Options such as `GradScalerKwargs`, in a list.
        dynamo_backend: Compile models with `torch.compile` and this backend: each repeated block, or the whole model if it
            has none. Names in checkpoints do not change, and `free_memory` ends it.
        dynamo_plugin: A `TorchDynamoPlugin`, instead of `dynamo_backend`.
        parallelism_config: A `ParallelismConfig`: replicas, shards and tensor parallelism of FSDP.
        strategy: `"auto"` (DDP if a launcher has started several processes, otherwise one device), `"ddp"`, `"fsdp"`,
            `"zero1"` to `"zero3"`, `"xla"`, or a `Strategy`.
        precision: A name of `Precision` or an object, instead of `mixed_precision`.
        activation_checkpointing: Recompute activations of the models passed to `prepare` in their backward pass, to save
            memory. The values are those of `Trainer`, such as `True` and `"selective"`; each model needs such modules.

    Attributes:
        strategy: The strategy of the run.
        options: The arguments, completed by the configuration.
        updates: Number of optimizer steps so far.
        overflows: Number of steps that were skipped because a scaled gradient overflowed.
        optimizer_step_was_skipped: Whether the last step of any optimizer was skipped, though the window was full.

    Raises:
        ConfigurationError: An argument is wrong or contradicts another.
        UnsupportedArgumentError: An argument is not supported; the message says what to use.

    Example:
        ```python
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for epoch in range(3):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        ```

    The loss is the mean over its micro-batch. It is scaled so that the gradient is the mean over the whole accumulation
    window, also if the last micro-batch or the last window is short. Inside `accumulate`, `step` acts only when the window
    is full, and `zero_grad` then or at the start of a window.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        *,
        megatron_lm_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Any = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        parallelism_config: Any = None,
        strategy: str | Strategy | None = None,
        precision: Any = None,
        activation_checkpointing: Any = None,
        **unknown: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        self._set_up(resolve(arguments, unknown), own_loop=True)
        self.collective_checks.debug = self.options.debug
        self._begin_building()
        remember(self)

    @classmethod
    def of_trainer(cls, strategy: Strategy) -> Accelerator:
        """Return the accelerator of a `Trainer`, for a strategy that has joined its processes."""
        self = cls.__new__(cls)
        self._set_up(Options(strategy, loaders=DataLoaderConfiguration(even_batches=False)), own_loop=False)
        return self

    def _set_up(self, options: Options, own_loop: bool) -> None:
        strategy = options.strategy
        self.options: Options = options
        self.strategy = strategy
        self.collective_checks: CollectiveChecks = CollectiveChecks.of(strategy.world)
        self.accumulation: AccumulationState = AccumulationState(options.steps, strategy.begin_micro_batch, own_loop)
        strategy.begin_micro_batch(self.accumulation.current)
        self._phase: LoopPhase = LoopPhase.CREATED if own_loop else LoopPhase.RUNNING
        self._watchdog = strategy.world.watchdog if own_loop and options.watched else None
        self._prepared = PreparedObjects(known=KnownParameters(sharded=strategy.shards_optimizer_state))
        self._models = PreparedModels(options, self._prepared.models)
        self._loaders = PreparedLoaders(options, self.accumulation, self._prepared.loaders)
        self._gradients = Gradients(strategy, self.accumulation, self.collective_checks, self._prepared)
        self._step_checks = StepChecks(strategy, self.accumulation, self._gradients, self._prepared)
        self.open_loaders = OpenLoaders(
            self.accumulation,
            self._prepared.models,
            strategy.data_world.devices,
            strategy.data_world.width,
            end_late=self._end_late,
            begin_epoch=self._step_checks.checked.clear,
        )
        self._gathering = Gathering(strategy, self.open_loaders)
        self._triggered = False
        self._numbered = NumberedCheckpoints(options.project, strategy.world)
        self._checkpointing = Checkpointing(strategy, self._numbered, self._prepared, options.loaders.use_stateful_dataloader)
        self._saving = Saving(strategy, self._prepared.models, alone=own_loop)
        self._trackers = Trackers(list(options.log_with), options.project, strategy)
        self._traces: list[str] = []  # the files of `profile`, without their endings
        self._building = ExitStack()  # the context in which models of transformers are created
        self.before_step: Callable[[Optimizer], None] | None = None
        self._forget_steps()

    def __getattr__(self, name: str) -> Any:
        raise absent_attribute(self, "accelerator", "an Accelerator", name)

    # ---------------------------------------------------------------------------------------------------------------- the run

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """The device of the models and the batches."""
        return self.strategy.device

    @property
    def num_processes(self) -> int:
        """Number of processes; where one process drives several devices (XLA's SPMD), number of devices."""
        return self.strategy.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.strategy.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self.strategy.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process, rank 0, which writes."""
        return self.strategy.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.strategy.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process; true where one process drives all devices (XLA's SPMD)."""
        return self.strategy.rank == self.strategy.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether `num_processes` is more than 1."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is distributed: `MULTI_CPU` and `MULTI_GPU` are DDP, `DEEPSPEED` is ZeRO, `NO` is one process."""
        return find_distributed_type(self.strategy)

    @property
    def state(self) -> AcceleratorState:
        """The device, the processes and the precision in one object, as in Accelerate."""
        state: AcceleratorState = AcceleratorState.of(self)
        return state

    @property
    def gradient_state(self) -> GradientState:
        """The accumulation window and the loader that is read, in one object, as in Accelerate."""
        return GradientState.of(self)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of replicas, shards and tensor parallelism under FSDP; `None` without FSDP."""
        return None if self.fsdp_plugin is None else self.fsdp_plugin.parallelism

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The options of ZeRO; `None` without ZeRO."""
        plugin = self.options.plugin or self.strategy.plugin
        return plugin if isinstance(plugin, DeepSpeedPlugin) else None

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The options of FSDP; `None` without FSDP."""
        plugin = self.options.plugin or self.strategy.plugin
        return plugin if isinstance(plugin, FullyShardedDataParallelPlugin) else None

    @property
    def is_fsdp2(self) -> bool:
        """Whether the strategy is FSDP, which is always FSDP2."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`; see `strategy.precision` for the precise name."""
        name = self.strategy.precision.name
        return next((key for table in (MIXED, OVER_MASTERS) for key in table if table[key] == name), "no")

    @property
    def native_amp(self) -> bool:
        """Whether the forward runs under autocast. Setting it has no effect: pass `mixed_precision` to the accelerator."""
        return self.strategy.precision.autocast_dtype is not None

    @native_amp.setter
    def native_amp(self, native: bool) -> None:
        precision = self.strategy.precision
        if bool(native) is not (precision.autocast_dtype is not None):
            notice(
                f"accelerator.native_amp = {native} has no effect: the precision is {precision.name}. To choose "
                f"another: Accelerator(mixed_precision={'bf16' if native else 'no'!r})"
            )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of the loss under `mixed_precision="fp16"`; `None` where the loss is not scaled."""
        return self.strategy.precision.scaler

    @property
    def seed(self) -> int:
        """The seed of order and randomness: that of `set_seed`, called before the first loader is prepared.

        The first read is a collective: all processes use the main process's seed.
        """
        return self._loaders.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._loaders.seed = seed

    @property
    def own_seed(self) -> int:
        """On the main process `seed`, and no collective; without a loader another one is still possible."""
        return self._loaders.own_seed

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are sharded. What is changed in it applies to loaders that are prepared later."""
        return self.options.loaders

    @property
    def split_batches(self) -> bool:
        """Whether the `batch_size` of a loader is the total of all processes."""
        return self.options.loaders.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get the same number of batches; it applies to loaders that are prepared later."""
        return self.options.loaders.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.options.loaders.even_batches = even

    @property
    def steps_of_scheduler(self) -> int:
        """Number of steps that a prepared scheduler takes with an optimizer step; 0: one with each call."""
        if not self.options.step_scheduler_with_optimizer:
            return 0
        return 1 if self.options.loaders.split_batches else self.num_processes

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self.accumulation.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulation.size = check_steps(steps)
        for loader in self._prepared.loaders:
            if loader.window is not None:
                loader.window = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its accumulation window, so that an optimizer step is due."""
        return self.accumulation.current.last

    @property
    def clears_gradients(self) -> bool:
        """Whether `zero_grad` of a prepared optimizer acts now."""
        return self.accumulation.clears

    @property
    def optimizers(self) -> list[Optimizer]:
        """The prepared optimizers, as torch's objects."""
        return self._prepared.torch_optimizers

    @property
    def known_parameters(self) -> KnownParameters:
        """The parameters that the prepared optimizers had when training began."""
        return self._prepared.known

    @property
    def schedulers(self) -> list[Any]:
        """The prepared schedulers, as the user's objects."""
        return [prepared.scheduler for prepared in self._prepared.schedulers]

    @property
    def loaders(self) -> list[PreparedLoader]:
        """The prepared loaders."""
        return list(self._prepared.loaders)

    # ---------------------------------------------------------------------------------------------------------------- prepare

    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool] | None = None,
        batch_weight: Callable[[Any], float] | None = None,
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the device and the processes; use what it returns.

        A prepared loader yields its batches on the device, in an order and with random numbers that depend only on the seed
        and the epoch. A model is moved in place, so that an optimizer made before stays valid.

        What is prepared already is returned as it was. A `DataLoader` that is passed twice gives two loaders, each of which
        has an order of its own.

        Args:
            *objects: The objects, in any order. `None` stays `None`.
            device_placement: For each object, whether to move it to the device. Default: as in `Accelerator`.
            batch_weight: A function of a batch (on the CPU) that returns its weight in its accumulation window: a float ≥
                0, such as the number of tokens in the loss. For the first loader here. Default: the number of samples.

        Returns:
            The prepared object, or a tuple of them in the order of `objects`.

        Raises:
            ConfigurationError: An object is none of these, or was prepared by another accelerator.
        """
        return self._prepare(objects, device_placement, batch_weight)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepare a model, as `prepare` does.

        Args:
            model: The model; one that is prepared is returned as it is.
            device_placement: Whether to move it to the device. Default: as in `Accelerator`.
            evaluation_mode: The model is not trained: it is moved, computes in the precision of the run and is compiled,
                but no wrapper exchanges gradients. Call `model.eval()` yourself.

        Raises:
            ConfigurationError: It is not a model, or was prepared with `evaluation_mode` and is to be trained now.
            UnsupportedArgumentError: `evaluation_mode` under a strategy that shards parameters or optimizer state.
        """
        strategy = self.strategy
        if evaluation_mode and (strategy.shards_optimizer_state or strategy.shards_parameters):
            raise UnsupportedArgumentError(
                f"prepare_model(evaluation_mode=True) is not supported under {type(strategy).__name__}, which shards the "
                "models that it prepares. A model that is not sharded needs no preparation: model.to(accelerator.device).eval()"
            )
        prepared: nn.Module = self._prepare_as(nn.Module, model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer, as `prepare` does.

        Args:
            optimizer: The optimizer; one that is prepared is returned as it is.
            device_placement: No effect: an optimizer keeps its state on the device of its parameters.

        Raises:
            ConfigurationError: It is not an optimizer, or was prepared by another accelerator.
        """
        return self._prepare_as(Optimizer, optimizer, device_placement)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> PreparedLoader:
        """Prepare a loader, as `prepare` does. `slice_fn_for_dispatch` can only be `None`."""
        if slice_fn_for_dispatch is not None:
            raise UnsupportedArgumentError(
                "prepare_data_loader(slice_fn_for_dispatch=) is not supported: each process reads its own batches. Remove it."
            )
        prepared: PreparedLoader = self._prepare_as(object, data_loader, device_placement)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a learning-rate scheduler, as `prepare` does."""
        return self._prepare_as(object, scheduler, None)

    def prepare_loader(self, loader: Any, *, window: bool, **options: Any) -> PreparedLoader:
        """Prepare a loader with options of `trainkit.data.PreparedLoader`, as `Trainer` does.

        Args:
            loader: A `DataLoader`, a `CombinedLoader` or an iterable of batches.
            window: Its batches form accumulation windows (a training loader).
            **options: Options such as `stage`, `index`, `limit` and `weigh`.
        """
        return self._loaders.prepare(loader, window=window, **options)

    def release_loader(self, loader: PreparedLoader) -> None:
        """Release a loader that is not read any more, and end its workers."""
        self._loaders.release(loader)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips its first `num_batches` batches, see `trainkit.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> nn.Module:
        """Return the user's model, without the wrappers of `prepare` and `torch.compile`.

        Args:
            model: The model, prepared or not.
            keep_fp32_wrapper: No effect: the user's model itself is not changed.
            keep_torch_compile: Return what `torch.compile` made of it, if it was compiled. The names in its state dict
                begin with `_orig_mod.`, so the default differs from Accelerate's. A compilation of what `prepare` returned
                is removed.
        """
        return user_model(model, self.strategy, keep_torch_compile)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A context in which processes may have different numbers of batches. Prepared loaders always allow that.

        Args:
            joinables: The models that are trained, as `prepare` returned them.
            even_batches: Replaces `Accelerator(even_batches=)` for loaders that are started in it.

        Raises:
            ConfigurationError: A model was not prepared.
        """
        for model in joinables:
            self._models.check("join_uneven_inputs", model)
        with nullcontext() if even_batches is None else self._loaders.set_padding(even_batches):
            yield

    def _prepare_as(self, kind: type, item: Any, placed: bool | None, evaluation: bool = False) -> Any:
        if not isinstance(item, kind):
            raise ConfigurationError(f"expected {with_article(kind.__name__)}, received {with_article(type(item).__name__)}.")
        return self._prepare([item], None if placed is None else [placed], evaluation=evaluation)

    def _prepare(
        self,
        objects: Sequence[Any],
        device_placement: Sequence[bool] | None,
        batch_weight: Callable[[Any], float] | None = None,
        evaluation: bool = False,
    ) -> Any:
        placed = self._placements(objects, device_placement)
        parts = 1 if self.options.loaders.split_batches else self.num_processes
        objects, configured = replace_placeholders(objects, self.strategy, parts)
        prepared = self._all_prepared(objects, evaluation)
        new = {place: item for place, item in enumerate(objects) if place not in prepared}
        self._check_new(new, placed)
        sources = {place: self._loaders.source(item) for place, item in new.items() if is_loader(item, place)}
        if batch_weight is not None and not sources:
            raise ConfigurationError(
                "prepare(batch_weight=) needs a loader that is not prepared yet: prepare(model, loader, batch_weight=...)"
            )
        # Errors in the arguments have been raised, and nothing has been changed.
        self._checkpointing.agree_on_run(list_options(item for item in new.values() if isinstance(item, Optimizer)))
        self._begin_watching()
        prepared |= self._prepare_models(new, evaluation)  # first: an optimizer is prepared for a model on its device
        prepared |= self._prepare_optimizers(new)
        for place, source in sources.items():
            prepared[place] = self._loaders.prepare_source(
                objects[place], source, placed[place], weigh=batch_weight, reader=self.open_loaders
            )
            batch_weight = None
        for place in sorted(new.keys() - prepared.keys()):
            prepared[place] = self._prepare_scheduler(new[place], place in configured)
        return prepared[0] if len(objects) == 1 else tuple(prepared[place] for place in range(len(objects)))

    def _prepare_models(self, objects: Mapping[int, Any], evaluation: bool) -> dict[int, Any]:
        """The prepared models by their place among the objects."""
        prepared: dict[int, Any] = {}
        for place, item in objects.items():
            if isinstance(item, nn.Module):
                known = self._models.find(item, evaluation)  # It may occur twice among the objects.
                prepared[place] = self._models.prepare(item, evaluation) if known is None else known
        if prepared:
            for loader in self._prepared.loaders:
                loader.generators = self.strategy.generators()  # The models may be on several devices.
        return prepared

    def _placements(self, objects: Sequence[Any], placed: Sequence[bool] | None) -> Sequence[bool]:
        if placed is None:
            return [self.options.device_placement] * len(objects)
        if len(placed) != len(objects):
            raise ConfigurationError(
                f"device_placement must have one value per object, but has {len(placed)} for "
                f"{quantity(len(objects), 'object')}."
            )
        return [self.options.device_placement if value is None else bool(value) for value in placed]

    def _check_new(self, objects: Mapping[int, Any], placed: Sequence[bool]) -> None:
        """Refuse what another accelerator has prepared, and a model on another device that is not moved."""
        for place, item in objects.items():
            if isinstance(item, PreparedLoader | PreparedOptimizer | PreparedScheduler | PrecisionWrapper):
                raise ConfigurationError(
                    f"prepare: argument {place} ({type(item).__name__}) has been prepared by another Accelerator, or before "
                    "free_memory. Pass the object that it was made from."
                )
            if isinstance(item, nn.Module) and not placed[place]:
                self._models.check_device(item)

    def _all_prepared(self, objects: Sequence[Any], evaluation: bool) -> dict[int, Any]:
        """What `prepare` has returned earlier for some of the objects, by their place."""
        known = {place: self._find_prepared(item, evaluation) for place, item in enumerate(objects)}
        return {place: ready for place, ready in known.items() if ready is not None}

    def _find_prepared(self, item: Any, evaluation: bool = False) -> Any:
        """What `prepare` has returned for an object, given that or the object; `None`: it is not prepared.

        A loader of the user's is prepared as often as it is passed: each one is read by itself, as in Accelerate.
        """
        if isinstance(item, nn.Module):
            return self._models.find(item, evaluation)
        if isinstance(item, SkippedLoader):
            return item if self._find_prepared(item.loader) is not None else None
        objects = self._prepared
        sources: Any = [(one, one.optimizer) for one in objects.optimizers]
        sources += [(one, one.scheduler) for one in objects.schedulers]
        sources += [(one, one) for one in objects.loaders]
        return next((one for one, source in sources if item is one or item is source), None)

    def _prepare_optimizers(self, objects: Mapping[int, Any]) -> dict[int, Any]:
        """The prepared optimizers by their place among the objects."""
        given = {place: item for place, item in objects.items() if isinstance(item, Optimizer)}
        found = {id(item): self._find_prepared(item) for item in given.values()}  # One may occur twice.
        new = list({id(item): item for item in given.values() if found[id(item)] is None}.values())
        models = self._models.wrapped
        for optimizer, prepared in zip(new, self.strategy.prepare_optimizers(new, models[-1] if models else None), strict=True):
            found[id(optimizer)] = PreparedOptimizer(prepared, self)
            self._prepared.optimizers.append(found[id(optimizer)])
            if self.accumulation.own_loop:
                self._step_checks.watch(optimizer, self)
        self.strategy.precision.several_optimizers = len(self._prepared.optimizers) > 1
        self._step_checks.note_prepared()
        return {place: found[id(item)] for place, item in given.items()}

    def _prepare_scheduler(self, scheduler: Any, once: bool) -> PreparedScheduler | None:
        known = None if scheduler is None else self._find_prepared(scheduler)  # It may occur twice.
        if known is not None or scheduler is None:
            return known
        prepared = PreparedScheduler(scheduler, self, once)
        self._prepared.schedulers.append(prepared)
        return prepared

    def _begin_building(self) -> None:
        """Shard models of `transformers` while they are created, if the user has asked for that."""
        plugin = self.options.plugin
        if plugin is not None and plugin.divides_at_once:
            self._building.enter_context(self.strategy.building(pretrained=True))
            weakref.finalize(self, self._building.close)

    def _begin_watching(self) -> None:
        """From now on, this process ends if another one fails."""
        if self._phase is LoopPhase.CREATED:
            if self._watchdog is not None:
                self._watchdog.enter()
            self._phase = LoopPhase.PREPARED

    def _stop_watching(self) -> None:
        if not self.accumulation.own_loop:
            return
        if self._phase is not LoopPhase.CREATED and self._watchdog is not None:
            self._watchdog.leave()
        self._phase = LoopPhase.CREATED

    # ---------------------------------------------------------------------------------------------------------- a micro-batch

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """A context for the work on one micro-batch: forward, backward, optimizer step.

        If it is called several times with the same models for one batch of a prepared loader, each call is a micro-batch that
        counts as much as the batch, and a window has `gradient_accumulation_steps` calls. All processes must make the same
        number of calls. With a loader that was not prepared, it counts the calls for the same models.

        If all batches of an optimizer step are read before the first call, to count what is in them, the calls are for these
        batches in their order. The loop divides its losses itself, so each counts the same, as in Accelerate.

        Args:
            *models: The models that are called in it, as `prepare` returned them.

        Raises:
            ConfigurationError: A model was not prepared.
        """
        for model in models:
            if id(model) not in self._models.returned and self.accumulation.own_loop:
                self._models.check("accumulate", model)
        self.open_loaders.accumulating()
        self.accumulation.call(models, self.open_loaders.place(), self.open_loaders.remaining)
        if self.accumulation.ahead and self.open_loaders.weighs_equally():
            self.accumulation.count_equally()
        self.accumulation.start_body()
        return _NULL

    def backward(self, loss: Tensor | None, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch: call it instead of `loss.backward()`.

        It scales the loss to the micro-batch's share of its accumulation window and passes the gradients to the strategy. A
        micro-batch of weight 0 adds nothing; its loss may be NaN, as a mean over nothing is.

        Args:
            loss: The mean loss of the micro-batch, a scalar. `None`: it has no loss, and its gradient counts as zero.
            weight: Its weight among the micro-batches of its window, on all processes: a number ≥ 0, such as the number of
                tokens in the loss. Default: its number of samples, or the result of `batch_weight`.
            **kwargs: Arguments of `Tensor.backward`.

        Raises:
            ConfigurationError: Nothing was prepared; or a weight is not a number, or is given in a part of a window only.
        """
        state, gradients = self.accumulation, self._gradients
        if gradients.averaged:
            gradients.averaged.clear()  # Averages of gradients that were not used are dropped.
        if state.own_loop:
            self._begin_backward(loss)
        micro = state.current
        share = micro.share
        if state.own_loop and (weight is not None or gradients.weights):
            share = gradients.share(weight)
        if not self.strategy.reduces_late and state.unsure:
            micro = micro._replace(last=True)  # the gradients are complete if the window turns out to have ended here
        if loss is None or share == 0.0:
            self.strategy.skip_backward(loss, micro)
        else:
            if self._loaders.padding is not None:
                self._loaders.padding.note_backward()
            if share != 1.0:
                loss = loss * share
            self.strategy.backward(loss, micro, **kwargs)
        self.step_pending = state.current.last
        if state.own_loop and self.step_pending:
            gradients.correct()

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which gradients accumulate and are not averaged over the processes; the next backward pass after it
        does.

        `accumulate` does this by itself, and scales the losses.

        Args:
            model: The model, as `prepare` returned it.
        """
        if model is not None:
            self._models.check("no_sync", model)
        with self.accumulation.suspend_steps():
            yield

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context that computes in the accelerator's precision. A prepared model does so by itself.

        Args:
            autocast_handler: Replaces the one in `kwargs_handlers`; with `enabled=False` the context computes in float32.
        """
        handler = autocast_handler or self.options.autocast
        return self.strategy.forward_context() if handler is None else self.strategy.precision.forward_context(**vars(handler))

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """A context in which torch's profiler records; its value is a `torch.profiler.profile`.

        Args:
            profile_handler: Replaces the one in `kwargs_handlers`.
        """
        handler = profile_handler or self.options.profile or ProfileKwargs()
        folder = handler.output_trace_dir
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        with handler.build() as recording:
            yield recording
        if folder is not None:
            stem = os.path.join(folder, f"profile_{self.strategy.rank}")
            earlier = self._traces.count(stem)
            self._traces.append(stem)
            recording.export_chrome_trace(f"{stem}-v{earlier}.json" if earlier else f"{stem}.json")

    def any_rank_had_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the current window, given whether this rank had one. All ranks call it.

        It first averages gradients that no backward pass has averaged; those of a rank without a loss are zero.
        """
        self._gradients.average(self.optimizers)
        any_loss = self.strategy.any_loss(had_loss)
        if not any_loss:
            self.strategy.sync_buffers()  # otherwise the optimizer step does it
        return any_loss

    def _note_verb(self, verb: Callable[..., Any], *args: Any) -> None:
        """See `trainkit.optim.prepared_optimizer.Stepper`."""
        self.accumulation.note_verb(verb, *args)

    def _begin_backward(self, loss: Tensor | None) -> None:
        """In your own training loop, the checks before a backward pass."""
        state = self.accumulation
        if state.size > 1 and (state.pending is not None or state.by_hand is not False):
            self._note_by_hand()
        state.note_backward()
        if state.current.first:
            self.skip_requested = False  # The request was for a window that is over.
        if self._phase is not LoopPhase.RUNNING:  # checked here, because a call at every step takes time
            self._check_begun("backward")
        if self.step_pending:
            self._check_step_pending()
        self.open_loaders.working()
        if not self.strategy.precision.entered:
            self._check_precision()
        if self.options.debug and state.current.last:
            self._compare("backward", None if loss is None else [loss])

    def _note_by_hand(self) -> None:
        """`backward` outside of `accumulate`: as in Accelerate its loss is still divided, and each step updates."""
        steps = self.accumulation.size
        if self.accumulation.note_by_hand():
            notice(
                f"gradient_accumulation_steps={steps}, but backward is called outside of accumulate(): as in Accelerate, "
                f"each loss is divided by {steps}, and each optimizer.step() updates the parameters. To accumulate gradients, "
                "put the body of the loop under: with accelerator.accumulate(model):"
            )

    def _check_begun(self, verb: str) -> None:
        """At the first verb of the loop, check that what it needs was prepared, and that checkpoints can be saved."""
        if self._phase is LoopPhase.RUNNING:
            return
        if not (self._models.wrapped or self._prepared.optimizers):
            raise ConfigurationError(
                f"{verb} was called before prepare. First: model, optimizer, loader = "
                "accelerator.prepare(model, optimizer, loader)"
            )
        if self.strategy.world.size > 1 and not self._models.wrapped:
            raise ConfigurationError(
                f"{verb}: an optimizer has been prepared but no model, so the gradients would not be averaged over the "
                "processes. Prepare the model too: model, optimizer = accelerator.prepare(model, optimizer)"
            )
        self.strategy.check_loop()
        self._numbered.check()
        self._phase = LoopPhase.RUNNING

    def _check_precision(self) -> None:
        """Warn once if no prepared model has been called: the user's own model computes in float32."""
        precision = self.strategy.precision
        precision.entered = True  # warn once
        if self._models.wrapped and precision.autocast_dtype is not None:
            warn(
                f"the loss was not computed in {precision.name}: no prepared model has been called. Call what prepare "
                "returned: model, optimizer = accelerator.prepare(model, optimizer); or compute within accelerator.autocast()."
            )

    def _check_step_pending(self) -> None:
        """ZeRO drops the gradients of a window that had no step when the next one begins: refuse that."""
        micro = self.accumulation.current
        if micro.first and self.strategy.accumulates_in_engine and len(self._prepared.optimizers) == 1:
            raise ConfigurationError(
                "under ZeRO the gradients of several backward passes are accumulated only within a window, and there has been "
                "no optimizer step since the last one. Use Accelerator(gradient_accumulation_steps=n), or "
                "accelerator.no_sync(model) around all backward passes but the last. Add up several losses: "
                "accelerator.backward(loss1 + loss2)."
            )

    def _compare(self, verb: str, tensors: Iterable[Tensor] | None) -> None:
        """In debug mode, check that all processes call `verb` in the same place with the same tensors."""
        self.collective_checks.compare(verb, None if tensors is None else describe(tensors))

    # ----------------------------------------------------------------------------------------------------- the optimizer step

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide the gradients by the loss scale of `16-mixed`, to read or change them. Clipping does this itself.

        Args:
            optimizer: One or several optimizers, prepared or torch's own. Default: all.
        """
        self._check_begun("unscale_gradients")
        if not self.accumulation.current.last:
            return
        chosen: list[Any] = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or self.optimizers)
        optimizers = self._prepared.stepping(chosen)
        if self.options.debug:
            self._compare("unscale_gradients", [p for one in optimizers for p in parameters_of(one)])
        self._gradients.unscale(optimizers)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale the gradients down to a norm of at most `max_norm`. Inside an accumulation window it does nothing.

        If a `DeepSpeedPlugin` or a configuration file sets `gradient_clipping`, that is the maximum norm.

        Args:
            parameters: The parameters of the model.
            max_norm: The maximum norm of all gradients together.
            norm_type: The norm; `inf` is the largest absolute value.

        Returns:
            The norm before clipping, a scalar on the device; `None` inside an accumulation window.
        """
        listed = self._complete_gradients("clip_grad_norm_", parameters, self.clip_grad_norm_, max_norm, norm_type)
        return None if listed is None else self.strategy.clip_grad_norm_(listed, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value]. Inside an accumulation window it does nothing."""
        listed = self._complete_gradients("clip_grad_value_", parameters, self.clip_grad_value_, clip_value)
        if listed is not None:
            self.strategy.clip_grad_value_(listed, clip_value)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run the optimizer step if the accumulation window is full. `optimizer.step()` of a prepared optimizer calls it.

        Args:
            optimizer: A prepared optimizer, or torch's own object in it.
            closure: Computes the loss and its gradients again (LBFGS).

        Returns:
            Whether the step was made: not inside a window, nor if it was skipped because a scaled gradient overflowed,
            `skip_update` was called, or the window's weight is 0.

        Raises:
            ConfigurationError: The gradients come from `loss.backward()`, which this configuration cannot use.
            OptimizerError: It has parameters that the model does not have any more.
        """
        state, gradients = self.accumulation, self._gradients
        micro = state.current
        inner = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        if not micro.last:
            state.note_verb(self.step, inner, closure)
            return False
        self.step_pending = False
        unchecked = id(inner) not in self._step_checks.checked
        if unchecked:
            self._step_checks.check_parameters(inner)
        if state.own_loop:
            state.note_verb(self.step, inner, closure)
            self._step_checks.check_backward(inner, closure)
            if self.options.debug:
                self._compare("step", parameters_of(inner))
        if closure is None:
            gradients.average([inner])
        elif self.strategy.world.size > 1:
            closure = gradients.averaging(inner, closure)
        if self.before_step is not None:
            self.before_step(inner)
        if self.skip_requested or micro.empty:
            self.strategy.precision.discard(inner)
            self.strategy.sync_buffers()
            updated = False
            self.skip_requested = self.skip_requested and state.own_loop  # a Trainer requests it for each step
        else:
            if unchecked and isinstance(inner, JointOptimizer):
                inner.begin(self.strategy.has_gradients)
            self.updating = True  # stays so if an error leaves the parameters between two steps
            updated = self.strategy.optimizer_step(inner, closure)
            self.updating = False
            self.overflows += not updated
            if self.strategy.precision.autocast_dtype is not None:
                torch.clear_autocast_cache()  # otherwise a forward in the same step would use copies of the old parameters
        gradients.averaged.discard(id(inner))
        self.note_update(inner, updated)
        return updated

    def note_update(self, optimizer: Optimizer, updated: bool) -> None:
        """An optimizer has made a step, or skipped it."""
        self._updated[id(optimizer)] = updated
        # in your own training loop with several optimizers: whether any was skipped
        self.optimizer_step_was_skipped = not (all(self._updated.values()) if self.accumulation.own_loop else updated)
        self.updates += updated

    def has_updated(self, optimizer: Any) -> bool:
        """Whether the last step of an optimizer, prepared or torch's own, was made and not skipped."""
        inner = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        return self._updated.get(id(inner), not self.optimizer_step_was_skipped)

    def skip_update(self) -> None:
        """Skip the optimizer step of the current window, for all optimizers: parameters and optimizer state do not change.

        Call it on all processes or on none.
        """
        self.skip_requested = True

    def begin_fit(self, module: nn.Module, before_step: Callable[[Optimizer], None] | None) -> Optimizer | None:
        """Begin to train the module of a `Trainer`.

        Args:
            module: The module whose parameters the optimizers train.
            before_step: Under manual optimization: called before each step, which averages the gradients itself.

        Returns:
            What the loop steps under automatic optimization: the only optimizer, or all of them as one.
        """
        self._step_checks.train(module)
        if before_step is not None:
            self.before_step = before_step
            self._gradients.average_in_step()
            return None
        optimizers = self.optimizers
        if len(optimizers) < 2:
            return optimizers[0] if optimizers else None
        self._prepared.joint = JointOptimizer(optimizers)
        self.strategy.precision.several_optimizers = False  # One decision on an overflow, for all of them.
        return self._prepared.joint

    def verbs_of_loop(self) -> tuple[Callable[..., None], Callable[..., bool]]:
        """`backward` and `step` for the loop of a `Trainer`, bound for the run."""
        if self._loaders.padding is not None:
            return self.backward, self.step
        return plain_verbs(self, self._step_checks.checked)

    def recheck_parameters(self) -> None:
        """Let the next step of each optimizer check again that the models have its parameters."""
        self._step_checks.checked.clear()

    def _complete_gradients(self, name: str, parameters: Any, verb: Callable[..., Any], *args: Any) -> list[Tensor] | None:
        """Average and unscale the gradients of these parameters, which `verb` clips; `None`: not at the end of a window."""
        if self._phase is not LoopPhase.RUNNING:
            self._check_begun(name)
        listed = _parameter_list(name, parameters)
        self.accumulation.note_verb(verb, listed, *args)
        if not self.accumulation.current.last:
            return None
        if self.options.debug:
            self._compare(name, listed)
        for optimizer in self._gradients.owners(listed):
            self.unscale_gradients(optimizer)
        return listed

    def _end_late(self, window: CallWindow) -> None:
        """The loader has ended inside a window of calls: do what the loop does with a window that is full.

        What the loop calls after a backward pass (clipping, `step` of optimizers and schedulers, `zero_grad`) has had no effect
        then, and is called again. Where it does not step, the window stays open.
        """
        # those of a full window if there are more: it has those under `if sync_gradients:` too
        verbs = list(window.verbs if len(window.verbs) >= len(window.full) else window.full)
        if not any(verb == self.step and args[1] is None for verb, args in verbs):  # a closure would compute a loss again
            return
        self.accumulation.end_late(window, uneven=self.strategy.reduces_late)
        self.strategy.end_window()
        self._gradients.end_late()
        for verb, args in verbs:
            verb(*args)

    def _forget_steps(self) -> None:
        """Return to the state before the first optimizer step."""
        self.updates = 0
        self.overflows = 0
        self.updating = False
        self.skip_requested = False
        self.step_pending = False
        self.optimizer_step_was_skipped = False
        self._updated: dict[int, bool] = {}  # Id of an optimizer → whether its last step was made and not skipped.

    # -------------------------------------------------------------------------------------------------------------- processes

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called it. There is no timeout: the main process may evaluate or write meanwhile.

        Raises:
            CollectiveError: Another process made a different call, waits for this one, or has ended; the message names the
                lines.
            CheckpointError: The main process could not write what it has saved without the others.
        """
        self._checkpointing.join()
        self.collective_checks.wait("wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A context whose body runs on the main process first, then on the others, which find its downloads in the cache.

        Raises:
            CollectiveError: As in `wait_for_everyone`.
        """
        with run_first(self.collective_checks, "main_process_first", self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """A context whose body runs on the first process of each node first, then on the others.

        Raises:
            CollectiveError: As in `wait_for_everyone`.
        """
        with run_first(self.collective_checks, "local_main_process_first", self.is_local_main_process):
            yield

    def on_main_process(self, function: Function) -> Function:
        """A decorator: the function runs on the main process only; on the others it returns `None`."""
        return only_where(lambda: self.is_main_process, function, "on_main_process")

    def on_local_main_process(self, function: Function) -> Function:
        """A decorator: the function runs on the first process of each node only."""
        return only_where(lambda: self.is_local_main_process, function, "on_local_main_process")

    def on_last_process(self, function: Function) -> Function:
        """A decorator: the function runs on the last process only."""
        return only_where(lambda: self.is_last_process, function, "on_last_process")

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator, `@accelerator.on_process(process_index=1)`: the function runs on that process only.

        A single process runs it for any number.

        Raises:
            ConfigurationError: `process_index` is missing.
        """
        if process_index is None:
            raise ConfigurationError("on_process needs the rank of the process: @accelerator.on_process(process_index=1)")
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return only_where(lambda: self.world.size == 1 or self.process_index == process_index, function, "on_process")

    def on_local_process(self, function: Callable[..., Any] | None = None, local_process_index: int | None = None) -> Any:
        """A decorator, `@accelerator.on_local_process(local_process_index=1)`: the function runs on that process of each node
        only.

        Raises:
            ConfigurationError: `local_process_index` is missing.
        """
        if local_process_index is None:
            raise ConfigurationError(
                "on_local_process needs the rank of the process on its node: "
                "@accelerator.on_local_process(local_process_index=1)"
            )
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)

        def here() -> bool:
            return self.world.size == 1 or self.local_process_index == local_process_index

        return only_where(here, function, "on_local_process")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node only; the arguments are those of `print`."""
        if self.is_local_main_process:
            echo(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A context with this process's contiguous part of `inputs`; the sizes of the parts differ by at most 1.

        Args:
            inputs: A list, tuple, tensor, array, `datasets.Dataset`, or a dict of these with values of one length; the same
                on all processes.
            apply_padding: Repeat the last element of `inputs` in parts that are shorter, so that results can be gathered;
                drop the repeated results then. Tensors are moved to the device.

        Raises:
            ConfigurationError: `inputs` cannot be split, or the values of a dict differ in length.

        Example:
            ```python
            with accelerator.split_between_processes(["A", "B", "C"]) as prompts:
                ...  # ["A", "B"] on the first of two processes, ["C"] on the second
            ```
        """
        yield share_of(inputs, self.world, self.device, apply_padding)

    def set_trigger(self) -> None:
        """Set a flag for `check_trigger`: for example, that this process wants to stop."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check; the same on all. All processes call it.

        Raises:
            CollectiveError: As in `wait_for_everyone`.
        """
        triggered = any(self.collective_checks.exchange("check_trigger", self._triggered))
        self._triggered = False
        return triggered

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes in the order of the ranks; scalars become a vector.

        Tensors may differ in the first dimension if it is the size of each process's micro-batch: the last one of an epoch
        may be short. With one process the tensors are returned unchanged.

        Args:
            tensor: A tensor, or tensors in lists, tuples and dicts; the same containers on all processes.

        Raises:
            CollectiveError: Containers, shapes or dtypes differ between processes; the message names them.
            ConfigurationError: An item is not a tensor.
        """
        return self._gathering.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without padding: each sample of an epoch occurs once, in the order of the data.

        Args:
            input_data: Tensors in containers; or lists of objects that can be pickled, which are concatenated.
            use_gather_object: Treat tensors as objects too: they may have any shape, and are returned on the CPU.

        Raises:
            CollectiveError: As in `gather`.
            ConfigurationError: As in `gather`.
        """
        return self._gathering.gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of tensors over the processes; the same bits on all, in new tensors.

        Args:
            tensor: A tensor, or tensors in lists, tuples and dicts; of the same shapes on all processes.
            reduction: `"sum"`, `"mean"`, `"max"`, or `"none"`, which only scales.
            scale: A factor for the result.

        Raises:
            CollectiveError: Shapes or dtypes differ between processes.
            ConfigurationError: The reduction is unknown.
        """
        return self._gathering.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors in one dimension to the largest size of all processes, so that they can be gathered.

        Args:
            tensor: A tensor, or tensors in lists, tuples and dicts. Tensors without dimension `dim` are unchanged.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Pad at the start instead of the end.

        Raises:
            CollectiveError: Containers or numbers of dimensions differ between processes.
        """
        return self._gathering.pad_across_processes(tensor, dim, pad_index, pad_first)

    # ------------------------------------------------------------------------------------------------------------------ files

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the loop writes, and how its checkpoints are named."""
        return self.options.project

    @property
    def project(self) -> ProjectConfiguration:
        """The same as `project_configuration`."""
        return self.options.project

    @property
    def project_dir(self) -> str | PathLike[str] | None:
        """The folder of the project."""
        return self.options.project.project_dir

    @property
    def logging_dir(self) -> str | PathLike[str] | None:
        """The folder of trackers that write files."""
        return self.options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with automatic checkpoint naming."""
        return self.options.project.iteration

    @property
    def run_id(self) -> str:
        """The id of the run in its checkpoints; kept when a checkpoint is restored completely."""
        return self._checkpointing.run_id

    @property
    def registered(self) -> list[Any]:
        """The objects that were registered for checkpointing."""
        return self._checkpointing.registered

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool | None = None) -> None:
        """Write an object to a file, on the main process; other processes do nothing, and need not call it.

        A name that ends with `.pt`, `.pth`, `.bin`, `.ckpt` or `.tar` gets torch's format, which `torch.load` reads with
        `weights_only=True`: of tensors, dict, list, tuple, str, bytes, int, float, bool, None and dtypes only. Tensors are
        stored on the CPU.

        With any other name, tensors by name, such as a state dict, become a plain safetensors file, which `safetensors` and
        `from_pretrained` open. Anything else becomes JSON, in which tuples, sets, numpy arrays and the like keep their types;
        if it contains tensors, a safetensors file that contains the JSON. A tensor with several names (tied weights) is stored
        once, under the first.

        `trainkit.utils.load(f)` reads all of these. The file is complete or does not exist. It can be the `save_function` of
        `save_pretrained`.

        Args:
            obj: Numbers, text, tensors, lists, dicts, …; of other objects their `state_dict()`.
            f: The file, with any name. Missing folders are created.
            safe_serialization: `True`: safetensors or JSON, whatever the name. `False`: torch's format. Default: by the name.

        Raises:
            UnsavableError: A value cannot be stored; the message names the path to it.
            CheckpointWriteError: The file cannot be written; an existing file is unchanged.
            ConfigurationError: `f` is not a path, or a `.safetensors` file with `safe_serialization=False`; or a state dict of
                a model that ZeRO-3 shards (use `get_state_dict`).
        """
        self._saving.save(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a model, with the user's names, as `save_model` writes it.

        With sharded parameters all processes call it; the main process gets it, on the host, and the others an empty dict.
        Otherwise each process gets it, and nothing is copied. Use it as
        `save_pretrained(state_dict=accelerator.get_state_dict(model))`.

        Args:
            model: The model, prepared or not.
            unwrap: No effect: names never begin with `module.`.
        """
        return self._saving.state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        checksum: str | None = None,
    ) -> None:
        """Write a model's weights as plain safetensors, which `from_pretrained` opens if it is a `transformers` model.

        Of a model with PEFT adapters, only these are written: a folder for `PeftModel.from_pretrained(base, folder)`. The main
        process writes, and when it returns, the files are complete. In your own training loop, under DDP, the others need not
        call it and do not wait: see `save_state`. Under FSDP and ZeRO, and with a `Trainer`, all processes call it.

        Args:
            model: The model, prepared or not. With a `Trainer`, any module within its module, in `fit` or after it:
                `trainer.accelerator.save_model(module.model, folder)`.
            save_directory: The folder to write to.
            max_shard_size: A larger model is written to several files, with an index. Adapters are always one file.
            safe_serialization: Only `True`: a pickle can run code when it is loaded.
            checksum: Also write the digests of the files: `"sha256"` to `model.sha256`, which `sha256sum -c` reads, or
                `"xxh3-128"` to `model.xxh3-128`, for `xxhsum -c`; of adapters `adapter_model.sha256`.

        Raises:
            CheckpointWriteError: The folder cannot be written.
            ConfigurationError: An adapter of a PEFT method whose parameters only PEFT can find; `safe_serialization=False`.
        """
        refuse_pickle("save_model", safe_serialization)
        self._saving.write_model(model, local_path(save_directory, "save_directory"), shard_size(max_shard_size), checksum)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore the state of these objects too; they need `state_dict` and `load_state_dict`."""
        self._checkpointing.register(*objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call a function in `save_state` before the checkpoint is written, to save models in your own way too.

        `hook(models, weights, output_dir)` gets the models without wrappers, their state dicts, and a temporary folder that
        becomes a part of the checkpoint: files in it (`config.json`) and in its folders (`unet/config.json`) are moved into the
        checkpoint, with size and digest in its manifest. They are checked with it, and never read by trainkit. A model whose
        state dict the hook removes from the list (`weights.pop()`) is not stored by trainkit; `load_state` then needs a hook
        that loads it. Under FSDP and DeepSpeed the list is empty, as in Accelerate, and trainkit stores all models.

        The hook runs on all processes that call `save_state`. What it writes should come from the main process; which weights
        are removed there is what counts. It must not change the state dicts.

        Args:
            hook: The function. An error in it is raised by `save_state`, on all processes, and no checkpoint is written.

        Returns:
            A handle; `handle.remove()` removes the hook.

        Raises:
            HookError: It cannot be called with three arguments.

        Example:
            ```python
            def save_model_hook(models, weights, output_dir):
                if accelerator.is_main_process:
                    for model in models:
                        model.save_pretrained(os.path.join(output_dir, "unet"))
                        weights.pop()

            accelerator.register_save_state_pre_hook(save_model_hook)
            ```
        """
        return self._checkpointing.hooks.register_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call a function in `load_state` before the models are loaded, to load what a hook of `save_state` has saved.

        `hook(models, input_dir)` gets the models without wrappers and the folder of the checkpoint, whose files have been
        checked. A model that it removes from the list (`models.pop()`) is not loaded by trainkit. Under FSDP and DeepSpeed the
        list is empty, as in Accelerate, and trainkit loads all models. The hook runs on all processes, and must remove the same
        models on all of them. It does not run if `restore` is without `"model"`.

        Args:
            hook: The function. An error in it is raised by `load_state`, on all processes.

        Returns:
            A handle; `handle.remove()` removes the hook.

        Raises:
            HookError: It cannot be called with two arguments.
        """
        return self._checkpointing.hooks.register_load(hook)

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        checksum: str = DEFAULT_CHECKSUM,
        **unknown: Any,
    ) -> Path:
        """Save a checkpoint: models, optimizers, schedulers, loss scale, positions of loaders, registered objects.

        An existing checkpoint is replaced when the new one is complete, unless its parameters are finite and the new ones are
        not: the new one is then `<output_dir>-nonfinite`, and a warning says so. Inside an accumulation window, the position at
        the start of the window is saved.

        On one device and under DDP the main process writes, and the others return at once: all processes may call it, or the
        main process alone, inside `if accelerator.is_main_process:`. Before another process reads the files, call
        `wait_for_everyone`. An error is raised on the main process, and on the others by the next method that waits for all.
        Where parameters or optimizer state are sharded, or processes have streams of their own, all processes call it, and
        each writes its part.

        With `ProjectConfiguration(automatic_checkpoint_naming=True)` the folder is `project_dir/checkpoints/checkpoint_N`,
        and `output_dir` has no effect, as in Accelerate. Existing checkpoints of an earlier start are then an error, unless
        this run has resumed from them (`load_state()`). When the new one is complete, the oldest of the run beyond
        `total_limit` are removed.

        Args:
            output_dir: The folder that becomes the checkpoint.
            safe_serialization: Only `True`.
            blocking: Return when it is complete on disk; `False`: when it is copied, and a thread writes it. The next
                `save_state`, and `free_memory`, wait for it and raise its error; the end of the program waits too. If the main
                process writes without the others, `wait_for_everyone` and `load_state` do so as well.
            checksum: How its files are checked: `"xxh3-128"` finds damage; `"sha256"`, slower, also what someone replaces.

        Returns:
            The folder. Where the main process writes without the others, these return the one that was asked for, or the one
            after their own last number.

        Raises:
            CheckpointError: It cannot be written, the folder contains something else, or the last save failed.
            UnsavableError: A value cannot be stored; the message names the path to it.
            ConfigurationError: No folder is given, or checkpoints of an earlier start exist.
        """
        refuse_unknown("Accelerator.save_state", unknown, ("output_dir", "safe_serialization", "blocking", "checksum"))
        refuse_pickle("save_state", safe_serialization)
        return self._checkpointing.save(self, output_dir, blocking=blocking, checksum=checksum)

    def release_save_buffers(self) -> None:
        """Free the host memory that `save_state(blocking=False)` keeps for its copies, until the next one allocates it again.

        It waits for a save in flight. All processes call it. `free_memory` frees it too.

        Raises:
            CheckpointError: The save in flight could not be written.
        """
        self._checkpointing.close()

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Any = None,
        *,
        restore: Collection[str] | None = None,
        strict: bool = True,
        resume_loaders: bool | None = None,
        **unknown: Any,
    ) -> None:
        """Restore what `save_state` wrote, into objects that were prepared the same way.

        As in Accelerate, a prepared loader then starts the epoch of the checkpoint at its first batch, in the same order.
        The script skips the batches that it has trained on, with `accelerator.skip_first_batches(loader, n)` or by
        counting; a notice says so if the checkpoint was saved inside an epoch. With `resume_loaders=True` the next
        iteration continues at the saved position, and does not fetch earlier samples of a map-style dataset. In both cases
        write the loop as `for epoch in range(loader.epoch, n)`. All processes call it; their number may differ from that of
        the save.

        Args:
            input_dir: The folder of the checkpoint; also one that a `Trainer` has written, for the parts that it has.
                Default, with `ProjectConfiguration(automatic_checkpoint_naming=True)`: the complete one with the highest
                number; a warning names damaged ones, which are skipped.
            load_kwargs: Only `None`.
            restore: Restore only these parts: `"model"`, `"optimizer"`, `"scheduler"`, `"scaler"`, `"loaders"`,
                `"registered"`.
                Default: all.
            strict: A missing or unexpected name in a model is an error.
            resume_loaders: Continue each prepared loader at its position, for loops that do not skip batches themselves.
                Default:
                only with `DataLoaderConfiguration(use_stateful_dataloader=True)`.

        Raises:
            CheckpointError: It is missing or damaged, or does not fit; the message lists every difference.
            ConfigurationError: No folder is given.
            UnsupportedArgumentError: An argument of Accelerate's is not supported; the message says what to use.
        """
        unsupported = unknown if load_kwargs is None else {"load_kwargs": load_kwargs, **unknown}
        refuse_unknown("Accelerator.load_state", unsupported, ("input_dir", "restore", "strict", "resume_loaders"))
        parts = check_components(restore, PARTS)
        self._checkpointing.load(self, input_dir, parts=parts, strict=strict, resume_loaders=resume_loaders)

    def resume_loaders(self) -> None:
        """Continue each prepared loader at its position, in the next iteration after `load_state`.

        Raises:
            ConfigurationError: No positions were loaded, or the loaders have been read since.
            CheckpointError: A position lies inside a micro-batch of the loader.
        """
        self._checkpointing.resume_loaders()

    # --------------------------------------------------------------------------------------------------------------- trackers

    @property
    def trackers(self) -> list[Any]:
        """The running trackers: on the main process, between `init_trackers` and `end_training`."""
        return self._trackers.running

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: ByTracker | None = None) -> None:
        """Start a run with each tracker of `log_with`. Only the main process logs; other processes may call it or not.

        Args:
            project_name: The project or experiment. Trackers that write files use `<logging_dir>/<name>/version_N`.
            config: Hyper-parameters to log: a dict, an `argparse.Namespace` or a dataclass.
            init_kwargs: Arguments of the loggers by name, such as `{"wandb": {"tags": ["a"]}}`. Those of trackers that are
                not in use have no effect.
        """
        self._trackers.start(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: ByTracker | None = None) -> None:
        """Log the values of a step with all trackers. The main process's values are logged; other processes do nothing.

        Args:
            values: Name → number, tensor of one element, text, or a dict of these; wandb also takes images and lists. `None` is
                skipped, and so is any other value that a tracker cannot store, with one notice for each name.
            step: Number of optimizer steps so far, for example. `None`: one more than the last one logged.
            log_kwargs: Arguments of the trackers' `log` by name.
        """
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: Any, unwrap: bool = False) -> Any:
        """Return a tracker by its name; on other processes an object that does nothing.

        Args:
            name: Its name, such as `"wandb"`.
            unwrap: Return its `SummaryWriter`, run or the like instead.
        """
        return self._trackers.get(name, unwrap)

    def end_training(self) -> None:
        """End the runs of all trackers, and wait for the uploads of what was saved to URLs. It may be called again.

        An error of one tracker is raised after the others have ended.
        """
        try:
            self._trackers.end()
        finally:
            if self.is_main_process:
                remote_sync.finish()

    # ---------------------------------------------------------------------------------------------------------------- release

    def clear(self, *objects: Any) -> Any:
        """Another name of `free_memory`."""
        return self.free_memory(*objects)

    def free_memory(self, *objects: Any) -> Any:
        """Release everything that was prepared and end the loaders' workers. An error in one part is raised after the others.

        `model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)`

        Sharded parameters become whole on all ranks, except those from the meta device, so all ranks must call it. If one
        does not, because it has failed or waits for another, the parameters stay sharded.

        Args:
            *objects: The variables to clear.

        Returns:
            `None` for each object.

        Raises:
            CollectiveError: Parameters are sharded, and another rank is in a different verb, or has exited. It does not
                replace an error that is being handled, as in a `finally`.
            ProcessFailedError: The same, and another rank has failed.
        """
        recomputed = self._models.recomputed
        parts: list[Callable[[], Any]] = [
            self._wait_to_free,
            self._checkpointing.close,
            self._models.compiled.undo,
            *(loader.close for loader in self._prepared.loaders),
            self._forget_prepared,
            self.strategy.teardown,
            self.strategy.precision.restore_layers,
            *(modules.restore for modules in reversed(recomputed)),
            recomputed.clear,
            self._stop_watching,
            self._building.close,
            self._begin_building,
        ]
        with ExitStack() as rest:  # calls all of them in this order, even if one fails
            for part in reversed(parts):
                rest.callback(part)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None if len(objects) == 1 else tuple(None for _ in objects)

    def _wait_to_free(self) -> None:
        """Wait until all ranks release their sharded models: their parameters are gathered, which a failed rank cannot do."""
        if not (self.accumulation.own_loop and self._models.wrapped and self.strategy.shards_parameters):
            return
        handled = sys.exc_info()[1]
        self.strategy.broken = self.world.size > 1  # The strategy counts as broken until all ranks are here.
        try:
            self.collective_checks.wait("free_memory")
            self.strategy.broken = False
        except (CollectiveError, ProcessFailedError):
            if handled is None:
                raise

    def _forget_prepared(self) -> None:
        self._models.clear()
        self._prepared.clear()
        self._loaders.clear()
        self._step_checks.close()
        self._gradients.weights.clear()
        self._forget_steps()
        self.accumulation.reset()
        if self.accumulation.own_loop:  # a Trainer does this when it begins
            self.strategy.precision.reset()
            self._prepared.known.clear()


def _parameter_list(verb: str, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable) else list(parameters)
    other = next((one for one in listed if not isinstance(one, Tensor)), None)
    if other is not None:
        raise ConfigurationError(
            f"{verb} takes parameters, but received {with_article(type(other).__name__)}. For example: "
            f"accelerator.{verb}(model.parameters(), 1.0)"
        )
    return listed
