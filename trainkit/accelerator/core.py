"""`Accelerator`: prepare, accumulate, backward, clip, step. The one implementation, for `Trainer` and your own loops."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import AccumulationState
from trainkit.accelerator.checkpoint_verbs import CheckpointVerbs
from trainkit.accelerator.checkpointing import Prepared
from trainkit.accelerator.compiled import CompiledModules
from trainkit.accelerator.contexts import ContextVerbs
from trainkit.accelerator.current import remember
from trainkit.accelerator.facts import no_attribute
from trainkit.accelerator.options import Options, check_steps, resolve
from trainkit.accelerator.process_verbs import ProcessVerbs
from trainkit.accelerator.reading import Reading
from trainkit.accelerator.stepping import StepVerbs
from trainkit.accelerator.tracker_verbs import ByTracker, Trackers
from trainkit.accelerator.weighing import Weighing
from trainkit.checkpoint.remote import remote_sync
from trainkit.data.batches import BatchPadding
from trainkit.data.loader import PreparedLoader
from trainkit.errors import CollectiveError, ProcessFailedError
from trainkit.module.activation_checkpointing import CheckpointedModules
from trainkit.optim.prepared import PreparedOptimizer, PreparedScheduler
from trainkit.strategy import Strategy

__all__ = ["Accelerator"]

_NULL = nullcontext()


class Accelerator(ProcessVerbs, StepVerbs, ContextVerbs, CheckpointVerbs):
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
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        options = resolve(given, unknown)
        self._begin(options)
        self._own = self.accumulation.own_loop = True
        self._compares = options.debug
        self._watchdog = self.world.watchdog if options.watched else None
        self.collective_checks.debug = options.debug
        self._begin_building()
        remember(self)

    @classmethod
    def of_trainer(cls, strategy: Strategy) -> Accelerator:
        """Return the accelerator of a `Trainer`, for a strategy that has joined its processes."""
        self = cls.__new__(cls)
        self._begin(Options(strategy, even_batches=False))
        return self

    def _begin(self, options: Options) -> None:
        self.options, self.strategy = options, options.strategy
        self._own = self._compares = self._watches = self._begun = False
        self._begin_stepping()
        self._watchdog = None
        self._even = options.even_batches
        self._trackers = Trackers(list(options.log_with), options.project, self.strategy)
        self.accumulation = AccumulationState(options.steps, self.strategy.begin_micro_batch)
        self.strategy.begin_micro_batch(self.accumulation.current)
        self._batch_padding: BatchPadding | None = None  # of the first loader
        self._seed: int | None = None
        self.averages_in_step = self.strategy.averages_in_step and self.world.size > 1
        self.before_step: Callable[[Optimizer], None] | None = None
        self._averaged: set[int] = set()  # ids of optimizers whose gradients are averaged already
        self._compiled = CompiledModules()
        self._models: list[nn.Module] = []
        self._bare: list[nn.Module] = []  # the user's own, without wrappers
        self.owners: Sequence[nn.Module] = self._bare
        self._owned: dict[int, set[int]] = {}  # by the id of an optimizer, those of its parameters in prepared models
        self._recomputed: list[CheckpointedModules] = []
        self._given: dict[int, nn.Module] = {}  # the models that prepare has returned, by id
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self.reading = Reading(self.accumulation, self._bare, self.strategy.data_world.devices)
        ProcessVerbs.__init__(self, options.strategy, self.reading, options.plugin)
        CheckpointVerbs.__init__(self, options, Prepared(self._bare, self._optimizers, self._schedulers, self._loaders))
        self.reading.end_late, self.reading.begin_epoch = self._end_late, self.recheck_parameters
        self._weighing: dict[tuple[int, ...], Weighing] = {}  # by the ids of the models of `accumulate`
        self._traces: list[str] = []  # the files of `profile`, without their endings
        self._watched = ExitStack()  # the hooks of optimizers that were passed to prepare
        self._building = ExitStack()  # the context in which models of transformers are created

    def _begin_building(self) -> None:
        """Shard models of `transformers` while they are created, if the user has asked for that."""
        plugin = self.options.plugin
        if plugin is not None and plugin.divides_at_once:
            self._building.enter_context(self.strategy.building(pretrained=True))
            weakref.finalize(self, self._building.close)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(type(self), name)

    @property
    def split_batches(self) -> bool:
        """Whether the `batch_size` of a loader is the total of all processes."""
        return self.options.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get the same number of batches; it applies to loaders that are prepared later."""
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even

    @property
    def steps_of_scheduler(self) -> int:
        """Number of steps that a prepared scheduler takes with an optimizer step; 0: one with each call."""
        if not self.options.step_scheduler_with_optimizer:
            return 0
        return 1 if self.options.split_batches else self.num_processes

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self.accumulation.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulation.size = check_steps(steps)
        for loader in self._loaders:
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

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """A context for the work on one micro-batch: forward, backward, optimizer step.

        If it is called several times with the same models for one batch of a prepared loader, each call is a micro-batch that
        counts as much as the batch, and a window has `gradient_accumulation_steps` calls. All processes must make the same
        number of calls. With a loader that was not prepared, it counts the calls for the same models.

        Args:
            *models: The models that are called in it, as `prepare` returned them.

        Raises:
            ConfigurationError: A model was not prepared.
        """
        for model in models:
            if id(model) not in self._given and self._own:
                self._check_prepared("accumulate", model)
        self.reading.working()
        self.accumulation.call(models, self.reading.place(), self.reading.left)
        self.accumulation.start_body()
        return _NULL

    def _note_verb(self, verb: Callable[..., Any], *args: Any) -> None:
        """See `trainkit.optim.prepared.Stepper`."""
        self.accumulation.note_verb(verb, *args)

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
        parts: list[Callable[[], Any]] = [
            self._wait_to_free,
            self._checkpointing.close,
            self._compiled.undo,
            *(loader.close for loader in self._loaders),
            self._forget_prepared,
            self.strategy.teardown,
            self.strategy.precision.restore_layers,
            *(recomputed.restore for recomputed in reversed(self._recomputed)),
            self._recomputed.clear,
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
        if not (self._own and self._models and self.strategy.shards_parameters):
            return
        handled = sys.exc_info()[1]
        self.strategy.broken = self.world.size > 1  # until all ranks are here
        try:
            self.collective_checks.wait("free_memory")
            self.strategy.broken = False
        except (CollectiveError, ProcessFailedError):
            if handled is None:
                raise

    def _forget_prepared(self) -> None:
        held: list[Any] = [self._models, self._bare, self._optimizers, self._schedulers, self._loaders, self._given]
        held.append(self._owned)
        for each in held:
            each.clear()
        self._watched.close()
        self._weighing.clear()
        self._begun = False
        self._begin_stepping()
        self.accumulation.reset()
        self._batch_padding = None
        if self._own:  # a Trainer does this when it begins
            self.strategy.precision.reset()
