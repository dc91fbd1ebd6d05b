"""``Accelerator``: prepare, accumulate, backward, clip, step. The one implementation, for the ``Trainer`` and for own loops."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainkit.accelerator.gradients import GradientVerbs
from trainkit.accelerator.state import StateVerbs
from trainkit.arguments import refuse_unknown
from trainkit.checkpoint.saver import Saver
from trainkit.data.assembling import Filled
from trainkit.data.combined import CombinedLoader
from trainkit.data.loader import PreparedLoader
from trainkit.data.sources import batch_size_of
from trainkit.data.window import Window
from trainkit.distributed import World
from trainkit.errors import ConfigurationError
from trainkit.in_precision import InPrecision
from trainkit.launch.wanted import Wanted
from trainkit.optimizer import PreparedOptimizer, PreparedScheduler
from trainkit.precision import Precision
from trainkit.registry import make_strategy
from trainkit.rng import Stage, resolve_seed
from trainkit.strategy import Strategy
from trainkit.where import joined_strategy

__all__ = ["Accelerator"]


class Accelerator(GradientVerbs, StateVerbs):
    """The verbs of a training loop, for those who write their own; ``Trainer`` uses the same ones.

    Args:
        strategy: ``"auto"`` (DDP if a launcher has started several processes, else one device), ``"ddp"``, ``"zero1"``, … or a
            :class:`~trainkit.Strategy`.
        precision: one of the names of :class:`~trainkit.Precision` (default ``"32-true"``).
        gradient_accumulation_steps: micro-batches in an update.
        even_batches: only ``False``; it matters with several processes.

    Raises:
        ConfigurationError: an argument that is wrong or contradicts another.

    Example::

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

    The loss is the mean over its micro-batch; it is scaled so that the gradient is the mean over the whole window, also where
    the last micro-batch or the last window is short. ``step`` and ``zero_grad`` act only when the window is full.
    """

    def __init__(
        self,
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = None,
        gradient_accumulation_steps: int = 1,
        even_batches: bool = False,
        **unknown: Any,
    ) -> None:
        known = ("strategy", "precision", "gradient_accumulation_steps", "even_batches")
        refuse_unknown("Accelerator", unknown, known)
        if even_batches:
            raise ConfigurationError(
                "even_batches=True, which repeats samples so that all processes have as many, is not in this version. Leave it "
                "out: each sample counts once, on any number of processes."
            )
        steps = gradient_accumulation_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigurationError(f"gradient_accumulation_steps must be an integer ≥ 1, not {steps!r}.")
        as_started = Wanted(as_started=True)
        self.strategy = joined_strategy(strategy, as_started, False) if isinstance(strategy, str) else make_strategy(strategy)
        watched = isinstance(strategy, str) or not self.strategy.joined  # a Trainer's runs are watched by it
        if not self.strategy.joined:
            self.strategy.join(as_started)
        self._watchdog = self.world.watchdog if watched else None
        self._watches = False
        if precision is not None:
            self.strategy.use_precision(precision)
        self.window = self.strategy.window = Window(steps)
        self.seed: int = self.world.from_main(resolve_seed(None))
        self.averages_in_step = self.strategy.averages_in_step and self.world.size > 1
        self.optimizer_step_was_skipped = False
        self.updates = 0
        self.updating = False
        self.before_step: Callable[[Optimizer], None] | None = None
        self.skip_asked = False
        self._updated: dict[int, bool] = {}
        self._averaged: set[int] = set()  # ids of optimizers whose gradients are averaged already
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self.registered: list[Any] = []
        self.run_id = secrets.token_hex(8)
        self.saver = Saver(attention=lambda: None)

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """Where the model and the batches are."""
        return self.strategy.device

    @property
    def num_processes(self) -> int:
        """So many micro-batches are worked on side by side: of processes, or of the devices that one drives (XLA's SPMD)."""
        return self.strategy.world_size

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.strategy.is_main_process

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an update."""
        return self.window.size

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its window, so that its update is due."""
        return self.window.full

    @property
    def optimizers(self) -> list[Optimizer]:
        """The prepared optimizers, as torch's own objects."""
        return [prepared.optimizer for prepared in self._optimizers]

    @property
    def schedulers(self) -> list[Any]:
        """The prepared schedulers, as the user's own objects."""
        return [prepared.scheduler for prepared in self._schedulers]

    @property
    def loaders(self) -> list[PreparedLoader]:
        """The prepared loaders."""
        return list(self._loaders)

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedulers, ready for this accelerator, in the order they were given.

        A loader gives its batches on the device, in the order and under the random state that (seed, epoch) determine. A model
        is moved in place, so that an optimizer made before stays valid.

        Raises:
            ConfigurationError: an object that is none of these, or prepared already.
        """
        for place, item in enumerate(objects):
            if self._is_prepared(item) or any(item is other for other in objects[:place]):
                raise ConfigurationError(
                    f"prepare: argument {place} ({type(item).__name__}) has been prepared already. Prepare each object once "
                    "and use what prepare returned."
                )
        if self._watchdog is not None and not self._watches:
            self._watchdog.entered()  # from here on this process does not outlive a failure of another one
            self._watches = True
        prepared: dict[int, Any] = {}
        # models first: an optimizer is prepared for a model that is on its device
        prepared |= {place: self._prepare_model(o) for place, o in enumerate(objects) if isinstance(o, nn.Module)}
        prepared |= {place: self._prepare_optimizer(o) for place, o in enumerate(objects) if isinstance(o, Optimizer)}
        for place, item in enumerate(objects):
            if place not in prepared:
                prepared[place] = self._prepare_other(item, place)
        return prepared[0] if len(objects) == 1 else tuple(prepared[place] for place in range(len(objects)))

    def _is_prepared(self, item: Any) -> bool:
        ours = isinstance(item, PreparedLoader | PreparedOptimizer | PreparedScheduler | InPrecision)
        known = (*self._models, *map(self.unwrap_model, self._models), *self.optimizers)
        return ours or any(item is one for one in known)

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        wrapped = self.strategy.wrap(self.strategy.prepare_module(model))
        self._models.append(wrapped)
        return wrapped if self.strategy.precision.plain else InPrecision(wrapped, self.strategy.precision)

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        ours = self.strategy.prepare_optimizer(optimizer, self._models[-1] if self._models else None)
        prepared = PreparedOptimizer(ours, self)
        self._optimizers.append(prepared)
        self.strategy.precision.several_optimizers = len(self._optimizers) > 1
        return prepared

    def _prepare_other(self, item: Any, place: int) -> Any:
        if hasattr(item, "step") and hasattr(item, "state_dict"):
            prepared = PreparedScheduler(item, self)
            self._schedulers.append(prepared)
            return prepared
        several = isinstance(item, list | tuple) and any(isinstance(o, nn.Module | Optimizer | DataLoader) for o in item)
        if several or isinstance(item, str | bytes | Mapping):
            raise ConfigurationError(
                f"prepare: argument {place} is a {type(item).__name__}. Give the objects one by one, prepare(model, optimizer, "
                "loader); several loaders read together are a CombinedLoader."
            )
        if isinstance(item, CombinedLoader | Iterable):
            if not self._loaders:  # the first one is what is trained on
                self.strategy.check_batches(batch_size_of(item), self.window.size)
            # loaders that are read side by side must not have the same order and the same augmentation
            return self.prepare_loader(item, window=True, index=len(self._loaders), repeat_filler=True)
        raise ConfigurationError(
            f"prepare: argument {place} is a {type(item).__name__}; expected a model, an optimizer, a loader or a scheduler."
        )

    def prepare_loader(self, loader: Any, *, window: bool, **options: Any) -> PreparedLoader:
        """One loader, with options of :class:`trainkit.data.PreparedLoader`.

        Args:
            loader: a ``DataLoader``, a ``CombinedLoader`` or an iterable of batches.
            window: its batches make up accumulation windows (a training loader).
            **options: such as ``stage``, ``index``, ``limit``, ``weigh``.
        """
        filled, strategy = None, self.strategy
        if strategy.pad_last_batch and window and not options.get("index"):  # the first one is what is trained on
            filled = Filled.of(loader, batch_size_of(loader), strategy.data_world.devices, strategy.move)
        prepared = PreparedLoader(
            loader,
            device=self.device,
            generators=self.strategy.generators(),
            window=self.window if window else None,
            world=self.strategy.data_world,
            ahead=self.strategy.ahead,
            filled=filled,
            **{"seed": self.seed, "stage": Stage.TRAIN, **options},
        )
        self._loaders.append(prepared)
        return prepared

    def release_loader(self, loader: PreparedLoader) -> None:
        """Forget a loader that is not read any more, and end its workers."""
        loader.close()
        self._loaders = [other for other in self._loaders if other is not loader]

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Work on one micro-batch within it. With a loader that was not prepared, it counts the micro-batches itself."""
        window = self.window
        if not window.driven:
            window.count()
        window.driven = False
        return self.strategy.accumulating(models[0] if models else None, window.full)

    def autocast(self) -> AbstractContextManager[Any]:
        """Within it the forward is computed in the accelerator's precision."""
        return self.strategy.forward_context()

    def backward(self, loss: Tensor | None, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch's mean loss, scaled to its share of the window.

        A micro-batch of weight 0 adds nothing; its loss may be NaN, as a mean over nothing is.

        Args:
            loss: a scalar; ``None``: this micro-batch has nothing to learn from, its gradient counts as zero.
            **kwargs: for ``Tensor.backward``.
        """
        share = self.window.share
        if self._averaged:
            self._averaged.clear()  # of gradients that were not used
        if loss is None or share == 0.0:
            self.strategy.skip_backward(loss)
            return
        self.window.learnt = True
        if share != 1.0:
            loss = loss * share
        self.strategy.backward(loss, **kwargs)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters if the window is full.

        Args:
            optimizer: a prepared one, or torch's own of it.
            closure: computes the loss anew and its gradients (LBFGS).

        Returns:
            Whether the update happened: not inside a window, nor if it was skipped because a scaled gradient overflowed,
            :meth:`skip_update` was called, or the window's weight is 0.
        """
        if not self.window.full:
            return False
        own = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        if closure is None:
            self._average([own])
        elif self.world.size > 1:
            closure = partial(self._averaged_closure, own, closure)
        if self.before_step is not None:
            self.before_step(own)
        if self.skip_asked or self.window.empty:
            self.strategy.precision.discard(own)
            self.strategy.sync_buffers()
            updated = self.skip_asked = False
        else:
            self.updating = True  # stays so if an error leaves the parameters between two steps
            updated = self.strategy.optimizer_step(own, closure)
            self.updating = False
            if self.strategy.precision.autocast_dtype is not None:
                torch.clear_autocast_cache()  # else a forward in the same step would use copies of what was before
        self.optimizer_step_was_skipped = not updated
        self._averaged.discard(id(own))
        self._updated[id(own)] = updated
        self.updates += updated
        return updated

    def has_updated(self, optimizer: Any) -> bool:
        """Whether the last step of a prepared optimizer, or of torch's own of it, was an update and not skipped."""
        own = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        return self._updated.get(id(own), not self.optimizer_step_was_skipped)

    def skip_update(self) -> None:
        """Skip the update of the current window: it changes neither parameters nor optimizer state.

        To be called on all processes or on none: one that goes by its own loss asks the others first.
        """
        self.skip_asked = True

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The user's model, without what ``prepare`` and ``torch.compile`` wrapped around it."""
        inner = model.module if isinstance(model, InPrecision) else self.strategy.unwrap(model)
        return model if inner is model else self.unwrap_model(inner)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` in the main process only."""
        if self.is_main_process:
            print(*args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared and end the loaders' workers; returns ``None`` for each object given.

        ``model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)``
        """
        self.saver.close()
        for loader in self._loaders:
            loader.close()
        self._models, self._optimizers, self._schedulers, self._loaders, self._updated = [], [], [], [], {}
        self.strategy.teardown()
        if self._watchdog is not None and self._watches:
            self._watchdog.left()
            self._watches = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None if len(objects) == 1 else tuple(None for _ in objects)
