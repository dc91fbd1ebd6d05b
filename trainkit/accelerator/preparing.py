"""`Accelerator.prepare`: models, optimizers, loaders and schedulers → the same, ready for the processes of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import AccumulationState
from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.accelerator.compiled import CompiledModules
from trainkit.accelerator.in_precision import InPrecision, without_wrappers
from trainkit.accelerator.options import Options
from trainkit.accelerator.reading import Reading, prepared_as_loader
from trainkit.accelerator.skipping import SkippedLoader, skip_first_batches
from trainkit.console import counted, with_article
from trainkit.data.batches import BatchPadding
from trainkit.data.combined import batch_size_of
from trainkit.data.keyed_sampler import split_batches
from trainkit.data.loader import PreparedLoader
from trainkit.distributed.failure_handling import Watchdog
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.module.activation_checkpointing import CheckpointedModules, checkpoint_activations
from trainkit.optim.prepared import PreparedOptimizer, PreparedScheduler
from trainkit.rng import Stage, resolve_seed
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.accelerator import Accelerator

__all__ = ["PrepareVerbs"]


class PrepareVerbs:
    """The methods of `trainkit.Accelerator` that prepare a user's objects."""

    strategy: Strategy
    accumulation: AccumulationState
    _batch_padding: BatchPadding | None
    options: Options
    collective_checks: CollectiveChecks
    reading: Reading
    _seed: int | None
    _compiled: CompiledModules
    _models: list[nn.Module]
    _bare: list[nn.Module]
    _recomputed: list[CheckpointedModules]
    _given: dict[int, nn.Module]
    _owned: dict[int, set[int]]
    _optimizers: list[PreparedOptimizer]
    _schedulers: list[PreparedScheduler]
    _loaders: list[PreparedLoader]
    _even: bool
    _watchdog: Watchdog | None
    _watches: bool

    @property
    def seed(self) -> int:
        """The seed of order and randomness: that of `set_seed`, called before the first loader is prepared.

        The first read is a collective: all processes use the main process's seed.
        """
        if self._seed is None:
            self._seed = int(self.strategy.world.from_main(resolve_seed(None)))
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def optimizers(self) -> list[Optimizer]:
        """The prepared optimizers, as torch's objects."""
        return [prepared.optimizer for prepared in self._optimizers]

    @property
    def schedulers(self) -> list[Any]:
        """The prepared schedulers, as the user's objects."""
        return [prepared.scheduler for prepared in self._schedulers]

    @property
    def loaders(self) -> list[PreparedLoader]:
        """The prepared loaders."""
        return list(self._loaders)

    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool] | None = None,
        batch_weight: Callable[[Any], float] | None = None,
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the device and the processes; use what it returns.

        A prepared loader yields its batches on the device, in an order and with random numbers that depend only on the seed
        and the epoch. A model is moved in place, so that an optimizer made before stays valid.

        Args:
            *objects: The objects, in any order, each once. `None` stays `None`.
            device_placement: For each object, whether to move it to the device. Default: as in `Accelerator`.
            batch_weight: A function of a batch (on the CPU) that returns its weight in its accumulation window: a float ≥
                0, such as the number of tokens in the loss. For the first loader here. Default: the number of samples.

        Returns:
            The prepared object, or a tuple of them in the order of `objects`.

        Raises:
            ConfigurationError: An object is none of these, or is already prepared.
        """
        return self._prepared(objects, device_placement, batch_weight)

    def _prepared(
        self,
        objects: Sequence[Any],
        device_placement: Sequence[bool] | None,
        batch_weight: Callable[[Any], float] | None = None,
        evaluation: bool = False,
    ) -> Any:
        placed = self._placements(objects, device_placement)
        self._check_objects(objects, placed)
        loaders = {place: self._loader_to_read(item) for place, item in enumerate(objects) if prepared_as_loader(item, place)}
        if batch_weight is not None and not loaders:
            raise ConfigurationError("prepare(batch_weight=) needs a loader: prepare(model, loader, batch_weight=...)")
        self.collective_checks.wait("prepare")  # errors in the arguments have been raised, and nothing has been changed
        self._begin_watching()
        prepared: dict[int, Any] = {}
        # models first: an optimizer is prepared for a model that is on its device
        prepared |= {place: self._prepare_model(o, evaluation) for place, o in enumerate(objects) if isinstance(o, nn.Module)}
        prepared |= {place: self._prepare_optimizer(o) for place, o in enumerate(objects) if isinstance(o, Optimizer)}
        self._note_owned()
        for place, found in loaders.items():
            prepared[place] = self._prepare_own_loader(objects[place], *found, placed[place], batch_weight)
            batch_weight = None
        for place, item in enumerate(objects):
            if place not in prepared:
                prepared[place] = None if item is None else self._prepare_scheduler(item)
        return prepared[0] if len(objects) == 1 else tuple(prepared[place] for place in range(len(objects)))

    def _note_owned(self) -> None:
        """Remember which parameters of the optimizers the models have: one that is missing later has been replaced."""
        known = {id(p) for model in self._bare for p in model.parameters()}
        for own in self.optimizers:
            self._owned[id(own)] = {id(p) for group in own.param_groups for p in group["params"] if id(p) in known}

    def _begin_watching(self) -> None:
        """From now on, this process ends if another one fails."""
        if self._watchdog is not None and not self._watches:
            self._watchdog.entered()
            self._watches = True

    def _stop_watching(self) -> None:
        if self._watchdog is not None and self._watches:
            self._watchdog.left()
            self._watches = False

    def _check_objects(self, objects: Sequence[Any], placed: Sequence[bool]) -> None:
        """Refuse objects that have been prepared, or a model on another device that is not moved.

        Raises:
            ConfigurationError: One of them.
        """
        for place, item in enumerate(objects):
            if self._is_prepared(item) or any(item is other for other in objects[:place]):
                raise ConfigurationError(
                    f"prepare: argument {place} ({type(item).__name__}) has been prepared already. Prepare each object once "
                    "and use what prepare returned."
                )
        for item, moved in zip(objects, placed, strict=True):
            if isinstance(item, nn.Module) and not moved:
                self._check_place(item)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepare a model, as `prepare` does.

        Args:
            model: The model, not prepared yet.
            device_placement: Whether to move it to the device. Default: as in `Accelerator`.
            evaluation_mode: The model is not trained: it is moved, computes in the precision of the run and is compiled,
                but no wrapper exchanges gradients. Call `model.eval()` yourself.

        Raises:
            ConfigurationError: It is not a model, or already prepared.
            UnsupportedArgumentError: `evaluation_mode` under a strategy that shards parameters or optimizer state.
        """
        strategy = self.strategy
        if evaluation_mode and (strategy.shards_optimizer_state or strategy.shards_parameters):
            raise UnsupportedArgumentError(
                f"prepare_model(evaluation_mode=True) is not supported under {type(strategy).__name__}, which shards the "
                "models that it prepares. A model that is not sharded needs no preparation: model.to(accelerator.device).eval()"
            )
        prepared: nn.Module = self._prepared_as(nn.Module, model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer, as `prepare` does.

        Args:
            optimizer: The optimizer, not prepared yet.
            device_placement: No effect: an optimizer keeps its state on the device of its parameters.

        Raises:
            ConfigurationError: It is not an optimizer, or already prepared.
        """
        return self._prepared_as(Optimizer, optimizer, device_placement)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> PreparedLoader:
        """Prepare a loader, as `prepare` does. `slice_fn_for_dispatch` can only be `None`."""
        if slice_fn_for_dispatch is not None:
            raise UnsupportedArgumentError(
                "prepare_data_loader(slice_fn_for_dispatch=) is not supported: each process reads its own batches. Remove it."
            )
        prepared: PreparedLoader = self._prepared_as(object, data_loader, device_placement)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a learning-rate scheduler, as `prepare` does."""
        return self._prepared_as(object, scheduler, None)

    def _prepared_as(self, kind: type, item: Any, placed: bool | None, evaluation: bool = False) -> Any:
        if not isinstance(item, kind):
            raise ConfigurationError(f"expected {with_article(kind.__name__)}, received {with_article(type(item).__name__)}.")
        return self._prepared([item], None if placed is None else [placed], evaluation=evaluation)

    def _placements(self, objects: Sequence[Any], given: Sequence[bool] | None) -> Sequence[bool]:
        if given is None:
            return [self.options.device_placement] * len(objects)
        if len(given) != len(objects):
            raise ConfigurationError(
                f"device_placement must have one value per object, but has {len(given)} for {counted(len(objects), 'object')}."
            )
        return [self.options.device_placement if value is None else bool(value) for value in given]

    def _is_prepared(self, item: Any) -> bool:
        ours = isinstance(item, PreparedLoader | PreparedOptimizer | PreparedScheduler | InPrecision)
        known = (*self._models, *self._bare, *self.optimizers)
        sources = [loader.given_source for loader in self._loaders] + self.schedulers
        return ours or any(item is one for one in (*known, *sources))

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> nn.Module:
        """Return the user's model, without the wrappers of `prepare` and `torch.compile`.

        Args:
            model: The model, prepared or not.
            keep_fp32_wrapper: No effect: the user's model itself is not changed.
            keep_torch_compile: Return what `torch.compile` made of it, if it was compiled. The names in its state dict
                begin with `_orig_mod.`, so the default differs from Accelerate's. A compilation of what `prepare` returned
                is removed.
        """
        return without_wrappers(model, self.strategy, keep_torch_compile)

    def _prepare_model(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        recomputed = self.options.activation_checkpointing
        if recomputed is not None and not evaluation:  # before the model is compiled, wrapped or sharded
            self._recomputed.append(checkpoint_activations(self.unwrap_model(model), recomputed))
        if self.options.compile is not None:
            self._compiled.add(model, self.options.compile, self.strategy)
        wrapped = self.strategy.prepare_module(model)
        for loader in self._loaders:
            loader.generators = self.strategy.generators()  # of all devices of the model
        wrapped = wrapped if evaluation else self.strategy.wrap(wrapped)
        self._models.append(wrapped)
        self._bare.append(self.unwrap_model(wrapped))
        precision, handler = self.strategy.precision, self.options.autocast
        given = wrapped if precision.plain else InPrecision(wrapped, precision, **({} if handler is None else vars(handler)))
        self._given[id(given)] = given
        return given

    def _check_place(self, model: nn.Module) -> None:
        elsewhere = {p.device for p in model.parameters()} - {self.strategy.device}
        if elsewhere and not self.strategy.placement(model):
            raise ConfigurationError(
                f"device_placement=False, but the model has parameters on {elsewhere.pop()}, and the device of this process is "
                f"{self.strategy.device}. Move the model: model.to(accelerator.device); or remove device_placement."
            )

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        ours = self.strategy.prepare_optimizer(optimizer, self._models[-1] if self._models else None)
        accelerator = cast("Accelerator", self)
        prepared = PreparedOptimizer(ours, accelerator)
        self._optimizers.append(prepared)
        accelerator._watch_steps(optimizer)
        self.strategy.precision.several_optimizers = len(self._optimizers) > 1
        return prepared

    def _prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        prepared = PreparedScheduler(scheduler, cast("Accelerator", self))
        self._schedulers.append(prepared)
        return prepared

    def _loader_to_read(self, loader: Any) -> tuple[Any, int | None, int]:
        """The loader to read, the number of its micro-batches to use, and the number of batches of its next epoch to skip."""
        skipped = 0
        if isinstance(loader, SkippedLoader):
            loader, skipped = loader.loader, loader.skipped
        end = None
        if self.options.split_batches:
            loader, end = split_batches(loader, self.strategy.world_size)
        if not self._loaders:  # the first one is what is trained on
            self.strategy.check_batches(batch_size_of(loader), self.accumulation.size)
        return loader, end, skipped

    def _prepare_own_loader(
        self, given: Any, loader: Any, end: int | None, skipped: int, placed: bool, weigh: Callable[[Any], float] | None
    ) -> PreparedLoader:
        more: dict[str, Any] = {} if placed else {"transfer": lambda batch, m: batch}
        # loaders that are read at the same time must not have the same order and the same augmentation
        prepared = self.prepare_loader(
            loader,
            window=True,
            index=len(self._loaders),
            weigh=weigh,
            pads=self._even or self.strategy.shards_parameters,
            reader=self.reading,
            **more,
        )
        prepared.micro_limit, prepared.given_source = end, given
        if skipped:
            prepared.start_at(skipped)
        return prepared

    def prepare_loader(self, loader: Any, *, window: bool, **options: Any) -> PreparedLoader:
        """Prepare a loader with options of `trainkit.data.PreparedLoader`, as `Trainer` does.

        Args:
            loader: A `DataLoader`, a `CombinedLoader` or an iterable of batches.
            window: Its batches form accumulation windows (a training loader).
            **options: Options such as `stage`, `index`, `limit` and `weigh`.
        """
        batch_padding, strategy = None, self.strategy
        if strategy.pad_last_batch and window and not options.get("index"):  # the first one is what is trained on
            batch_padding = BatchPadding.of(loader, batch_size_of(loader), strategy.data_world.devices, strategy.move)
            self._batch_padding = batch_padding
        prepared = PreparedLoader(
            loader,
            device=strategy.device,
            generators=strategy.generators(),
            window=self.accumulation.size if window else None,
            world=strategy.data_world,
            ahead=strategy.ahead,
            batch_padding=batch_padding,
            **{"seed": self.seed, "stage": Stage.TRAIN, **options},
        )
        self._loaders.append(prepared)
        return prepared

    def release_loader(self, loader: PreparedLoader) -> None:
        """Release a loader that is not read any more, and end its workers."""
        loader.close()
        self._loaders[:] = [other for other in self._loaders if other is not loader]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips its first `num_batches` batches, see `trainkit.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

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
            self._check_prepared("join_uneven_inputs", model)
        if even_batches is None:
            yield
            return
        loaders, repeats = self.loaders, even_batches or self.strategy.shards_parameters
        before = [loader.pads for loader in loaders]
        for loader in loaders:
            loader.pads = repeats
        try:
            yield
        finally:
            for loader, value in zip(loaders, before, strict=True):
                loader.pads = value

    def _check_prepared(self, verb: str, model: Any) -> None:
        if not isinstance(model, nn.Module) or all(self.unwrap_model(model) is not one for one in self._bare):
            raise ConfigurationError(
                f"{verb}: {type(model).__name__} has not been prepared. Pass what prepare returned: model = "
                "accelerator.prepare(model)"
            )
