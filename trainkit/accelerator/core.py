"""`Accelerator`: prepare, accumulate, backward, clip, step. The one implementation, for `Trainer` and your own loops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import AccumulationState
from trainkit.accelerator.checkpoint_verbs import CheckpointVerbs
from trainkit.accelerator.checkpointing import Prepared
from trainkit.accelerator.contexts import ContextVerbs
from trainkit.accelerator.current import remember
from trainkit.accelerator.facts import no_attribute
from trainkit.accelerator.options import Options, check_steps, resolve
from trainkit.accelerator.process_verbs import ProcessVerbs
from trainkit.accelerator.reading import Reading
from trainkit.accelerator.stepping import StepVerbs
from trainkit.accelerator.tracker_verbs import ByTracker, Trackers
from trainkit.accelerator.weighing import Weighing
from trainkit.data.assembling import BatchPadding
from trainkit.data.loader import PreparedLoader
from trainkit.optim.prepared_optimizer import PreparedOptimizer
from trainkit.optim.prepared_scheduler import PreparedScheduler
from trainkit.strategy import Strategy

__all__ = ["Accelerator"]

_NULL = nullcontext()


class Accelerator(ProcessVerbs, StepVerbs, ContextVerbs, CheckpointVerbs):
    """The verbs of a training loop, for those who write their own; `Trainer` uses the same ones.

    Its arguments are Accelerate's; those after `fsdp_plugin` are given by name. Arguments that are not given come from
    `trainkit launch --config_file`, if the process was started that way.

    Args:
        device_placement: put models, optimizers and batches on the device.
        split_batches: a loader's `batch_size` is that of all processes together.
        mixed_precision: `"no"`, `"fp16"` or `"bf16"`: float32 parameters, and a forward under autocast. Under DeepSpeed's
            ZeRO, as there, parameters in 16 bits with float32 masters.
        gradient_accumulation_steps: micro-batches in an optimizer step.
        cpu: run on the CPU though there is a GPU.
        dataloader_config: a `DataLoaderConfiguration`.
        deepspeed_plugin: a `DeepSpeedPlugin`: ZeRO.
        fsdp_plugin: unsupported; use ZeRO-3.
        megatron_lm_plugin: unsupported; use ZeRO-3.
        rng_types: no effect: all generators are seeded, for each micro-batch by a key, on all processes.
        log_with: trackers for `init_trackers`.
        project_dir: folder of the project.
        project_config: a `ProjectConfiguration`.
        gradient_accumulation_plugin: a `GradientAccumulationPlugin`.
        dispatch_batches: only `False`: each process reads its own batches.
        even_batches: a rank without data at the end of an epoch gets padding micro-batches. `False`:
            only where a whole window has none for it, and in an evaluation never.
        use_seedable_sampler: no effect: the order of an epoch always is a function of the seed and its number.
        step_scheduler_with_optimizer: a prepared scheduler advances with each optimizer step, once for each process (with
            `split_batches` once); `False`: by one with each call.
        kwargs_handlers: options of `trainkit.utils`, such as `GradScalerKwargs`.
        dynamo_backend: compile models by `torch.compile` with this backend.
        strategy: `"auto"` (DDP if a launcher has started several processes, else one device), `"ddp"`, `"zero1"`, … or a
            `Strategy`.
        precision: one of the names of `Precision` or an object, instead of `mixed_precision`.

    Raises:
        ConfigurationError: an argument that is wrong or contradicts another.
        UnsupportedArgumentError: an unsupported argument; the message says what to use.

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

    The loss is the mean over its micro-batch; it is scaled so that the gradient is the mean over the whole window, also where
    the last micro-batch or the last window is short. Within `accumulate`, `step` acts only when the window is full, and
    `zero_grad` then or at the beginning of a window.
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
        strategy: str | Strategy | None = None,
        precision: Any = None,
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
        """The one that a `Trainer` uses, with a strategy that has been joined."""
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
        self._models: list[nn.Module] = []
        self._bare: list[nn.Module] = []  # the user's own, without wrappers
        self._given: dict[int, nn.Module] = {}  # the models that prepare has returned, by id
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self.reading = Reading(self.accumulation, self._bare, self.strategy.data_world.devices)
        ProcessVerbs.__init__(self, options.strategy, self.reading, options.plugin)
        CheckpointVerbs.__init__(self, options, Prepared(self._bare, self._optimizers, self._schedulers, self._loaders))
        self._weighing: Weighing | None = None
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
        """Whether a loader's `batch_size` is that of all processes together."""
        return self.options.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get the same number of batches; setting it affects loaders that are prepared later."""
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even

    @property
    def steps_of_scheduler(self) -> int:
        """Number of steps that a prepared scheduler takes with an optimizer step; 0: it takes one with each call."""
        if not self.options.step_scheduler_with_optimizer:
            return 0
        return 1 if self.options.split_batches else self.num_processes

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an optimizer step."""
        return self.accumulation.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulation.size = check_steps(steps)
        for loader in self._loaders:
            if loader.window is not None:
                loader.window = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its window, so that an optimizer step is due."""
        return self.accumulation.current.last

    @property
    def clears_gradients(self) -> bool:
        """Whether `zero_grad` of a prepared optimizer acts now."""
        return self.accumulation.clears

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """A context manager for one micro-batch. With a loader that was not prepared, it counts the micro-batches itself.

        Args:
            *models: those that are called within it, as `prepare` returned them.

        Raises:
            ConfigurationError: one was not prepared.
        """
        for model in models:
            if id(model) not in self._given and self._own:
                self._check_prepared("accumulate", model)
        state = self.accumulation
        self.reading.working()
        if state.pending is not None:
            state.enter(self.reading.loader)
        elif not state.delivered and not self.reading.active:  # otherwise it is called again for the same batch
            state.count()
        state.start_body()
        return _NULL

    @property
    def trackers(self) -> list[Any]:
        """The trackers that log: on the main process, between `init_trackers` and `end_training`."""
        return self._trackers.running

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: ByTracker | None = None) -> None:
        """Start a run with all trackers of `log_with`. The main process logs; others may call it or not.

        Args:
            project_name: the project or experiment; trackers that write files do so in `<logging_dir>/<name>/version_N`.
            config: hyper-parameters, logged at once: a dict, an `argparse.Namespace` or a dataclass.
            init_kwargs: arguments of loggers, `{"wandb": {"tags": ["a"]}}`; those of trackers not in use have no effect.
        """
        self._trackers.start(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: ByTracker | None = None) -> None:
        """Log the values of a step with all trackers. The main process's values count; other processes do nothing.

        Args:
            values: number, tensor of one element, text, or a dict of such; wandb also takes images. `None` is skipped.
            step: such as the number of optimizer steps so far. None: one more than the last one logged.
            log_kwargs: by the tracker's name, arguments of its `log`.
        """
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: Any, unwrap: bool = False) -> Any:
        """A tracker by its name, or with `unwrap` its `SummaryWriter`, run, …; on other processes one that does nothing."""
        return self._trackers.get(name, unwrap)

    def end_training(self) -> None:
        """End the runs of all trackers; may be called again. What a tracker raises is raised after the others have ended."""
        self._trackers.end()

    def clear(self, *objects: Any) -> Any:
        """`free_memory`."""
        return self.free_memory(*objects)

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared and end the loaders' workers; returns `None` for each object given.

        `model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)`
        """
        self._checkpointing.close()
        for loader in self._loaders:
            loader.close()
        held: list[Any] = [self._models, self._bare, self._optimizers, self._schedulers, self._loaders, self._given]
        for each in held:
            each.clear()
        self._watched.close()
        self._weighing, self._begun = None, False
        self._begin_stepping()
        self.accumulation.reset()
        self._batch_padding = None
        if self._own:  # a Trainer does this when it begins
            self.strategy.precision.reset()
        self.strategy.teardown()
        if self._watchdog is not None and self._watches:
            self._watchdog.left()
            self._watches = False
        self._building.close()
        self._begin_building()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None if len(objects) == 1 else tuple(None for _ in objects)
