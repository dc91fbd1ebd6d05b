"""The search for the largest batch size that fits into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainkit.callback import Callback
from trainkit.checks import choice, real_number, whole_number
from trainkit.console import notice
from trainkit.data.combined import batch_size_of
from trainkit.errors import ConfigurationError, ProcessFailedError
from trainkit.tuner.attributes import FoundAttribute, find_attribute
from trainkit.tuner.executable_batch_size import is_out_of_memory, release_memory

if TYPE_CHECKING:
    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["BatchSizeOptions", "find_batch_size"]

_MODES = ("power", "binsearch")
_SOURCES = {
    "fit": "train_dataloader",
    "validate": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


class BatchSizeOptions:
    """The arguments of a search, checked.

    Args:
        mode: `"power"`: double the size until it does not fit; `"binsearch"`: then search between the last two sizes.
        steps_per_trial: optimizer steps, or batches of an evaluation, in each trial.
        init_val: the first size.
        max_trials: the maximum number of trials.
        batch_arg_name: the attribute that contains the batch size.
        margin: in binsearch mode, reduce the result by this fraction.
        max_val: the largest size.
        owner: what has these arguments, for messages.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    def __init__(
        self,
        mode: str,
        steps_per_trial: int,
        init_val: int,
        max_trials: int,
        batch_arg_name: str,
        margin: float,
        max_val: int,
        *,
        owner: str,
    ) -> None:
        mode = mode.lower() if isinstance(mode, str) else mode
        self.mode = choice(mode, f"{owner}(mode=)", _MODES)
        real_number(margin, f"{owner}(margin=)", least=0, example=0.05)
        if margin >= 1:
            raise ConfigurationError(
                f"{owner}(margin={margin!r}) must be a fraction from 0 up to, but not including, 1. For example: "
                f"{owner}(margin=0.05)"
            )
        self.steps_per_trial = whole_number(steps_per_trial, f"{owner}(steps_per_trial=)", 1)
        self.init_val = whole_number(init_val, f"{owner}(init_val=)", 1)
        self.max_trials = whole_number(max_trials, f"{owner}(max_trials=)", 1)
        self.max_val = whole_number(max_val, f"{owner}(max_val=)", 1)
        self.batch_arg_name = batch_arg_name
        self.margin = margin


def find_batch_size(
    trainer: Trainer, module: TrainModule, stage: str, options: BatchSizeOptions, datamodule: DataModule | None
) -> int | None:
    """Search the batch size of a stage, and set the attribute to it. Collective; the result is the same on all processes.

    Args:
        trainer: is not changed.
        module: is not changed, except its attribute.
        stage: "fit", "validate", "test" or "predict".
        options: of the search.
        datamodule: the user's.

    Returns:
        The largest size found; `None`, with a notice, in a `fast_dev_run`.

    Raises:
        ConfigurationError: the attribute does not exist, the strategy is not supported, or no size fits.
        ProcessFailedError: a trial failed on another process, for another reason than memory.
    """
    if trainer.fast_dev_run:
        notice("no batch size is searched in a fast_dev_run.")
        return None
    _refuse_strategy(trainer)
    fix = f"Fix: self.{options.batch_arg_name} = 32 in __init__, and use it in the loader; or name yours: batch_arg_name='size'"
    attribute = find_attribute((options.batch_arg_name,), module, datamodule, fix)
    before = attribute.value
    trials = Trials(trainer, module, stage, options, datamodule, attribute)
    size = None
    try:
        size = trials.search()
    finally:
        attribute.set(before if size is None else size)
    loaded = trials.loaded.get(size)
    more = f" The batches of the loader then have {loaded}." if loaded not in (None, size) else ""
    notice(f"batch size: {attribute.name} is {size} from now on, after {trials.made} trials.{more}")
    return size


def _refuse_strategy(trainer: Trainer) -> None:
    """Refuse strategies for which a trial cannot tell what fits."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    if strategy.lazy_tensors:
        raise ConfigurationError(
            f"the batch size cannot be searched with {name}, which runs operations later: a trial does not see that memory is "
            "exhausted. Expected a strategy that runs each operation immediately. Fix: choose the batch size yourself; "
            "trainer.plan(module) shows the memory of parameters and optimizer"
        )
    if strategy.world.size > 1 and (strategy.shards_parameters or strategy.shards_optimizer_state):
        raise ConfigurationError(
            f"the batch size cannot be searched with {name} on {strategy.world.size} processes: when one of them runs out of "
            "memory, the others wait for it in a collective. Expected one process, or a strategy whose processes have the "
            "whole model. Fix: choose the batch size yourself; trainer.plan(module) shows the memory of parameters and "
            "optimizer"
        )


class Trials:
    """The trials of one search.

    Args:
        trainer: see `find_batch_size`.
        module: see `find_batch_size`.
        stage: see `find_batch_size`.
        options: see `find_batch_size`.
        datamodule: see `find_batch_size`.
        attribute: contains the batch size.

    Attributes:
        made: number of trials so far.
        loaded: size → the batch size of the loader in its trial, if that has one.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: TrainModule,
        stage: str,
        options: BatchSizeOptions,
        datamodule: DataModule | None,
        attribute: FoundAttribute,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._stage = stage
        self._datamodule = datamodule
        self._options = options
        self._attribute = attribute
        self._world = trainer.strategy.world
        self._largest = options.max_val  # that can make a difference
        self.loaded: dict[int, int] = {}
        self.made = 0

    def search(self) -> int:
        """The largest size that fits, less the margin."""
        options = self._options
        low, high = 0, None  # fits; does not fit
        size = min(options.init_val, options.max_val)
        while self.made < options.max_trials:
            if self._fits(size):
                low = size
            else:
                high = size
            following = self._next(low, high, size)
            if following is None:
                break
            size = following
        if low == 0:
            raise ConfigurationError(
                f"no batch size fits into memory: {high} does not, after {self.made} trials. Expected a model that fits with "
                "a batch size of 1. Fix: see trainer.plan(module) for what needs the memory, or start lower: init_val=1"
            )
        return max(1, int(low * (1 - options.margin))) if options.mode == "binsearch" else low

    def _next(self, low: int, high: int | None, size: int) -> int | None:
        """The size of the next trial; `None`: the search is over."""
        if high is None:
            doubled = min(2 * size, self._largest)
            return doubled if doubled > size else None
        if low == 0:
            return high // 2 or None
        if self._options.mode == "power" or high - low <= 1:
            return None
        return (low + high) // 2

    def _fits(self, size: int) -> bool:
        """Whether a trial with this size has enough memory on all processes."""
        self.made += 1
        self._attribute.set(size)
        outcome_here = self._try(size)  # afterwards nothing refers to the tensors of the trial
        release_memory()
        outcomes = self._world.exchange(outcome_here)
        failed = [(rank, text) for rank, text in enumerate(outcomes) if text not in ("fits", "memory")]
        if failed:
            rank, text = failed[0]
            raise ProcessFailedError(f"the trial with batch size {size} failed on rank {rank}: {text}")
        fits = all(outcome == "fits" for outcome in outcomes)
        notice(f"batch size {size}: {'fits' if fits else 'does not fit into memory'}.")
        return fits

    def _try(self, size: int) -> str:
        """Run a trial: "fits", "memory", or with several processes the text of an error."""
        probe = MemoryProbe(self._world.size > 1, 4 * self._options.steps_per_trial)
        try:
            trial = self._trainer._run_trial(
                self._stage,
                self._module,
                probe,
                datamodule=self._datamodule,
                alone=self._world.size > 1,
                **self._limits(),
            )
        except Exception as error:
            if is_out_of_memory(error):
                return "memory"
            if self._world.size == 1:
                raise
            return f"{type(error).__name__}: {error}"
        self._note_loader(size, getattr(trial, _SOURCES[self._stage]))
        return "fits"

    def _limits(self) -> dict[str, Any]:
        """The arguments of the trainer in a trial."""
        steps, arguments = self._options.steps_per_trial, self._trainer._arguments
        # with 2 micro-batches a step needs as much memory as with more
        accumulation = 2 if arguments.global_batch_size else min(2, arguments.accumulation)
        return {
            **{f"limit_{name}_batches": steps for name in ("val", "test", "predict")},
            "accumulate_grad_batches": accumulation,
            "auto_micro_batch": False,  # any size would fit
            "global_batch_size": None,
            "log_every_n_steps": 0,
            "max_epochs": -1,
            "max_steps": steps,
            "min_epochs": None,
            "min_steps": None,
        }

    def _note_loader(self, size: int, source: Any) -> None:
        """Note which sizes are too large for the data, and check that the loader has the batch size."""
        if isinstance(source, list):
            raise ConfigurationError(
                f"the batch size cannot be searched with {len(source)} loaders. Expected one. Fix: return one loader from the "
                "data module or the module while you search"
            )
        loaded = batch_size_of(source)
        if loaded is not None and loaded == next(reversed(self.loaded.values()), None):
            raise ConfigurationError(
                f"the batch size of the loader stays {loaded} when {self._attribute.name} changes. Expected a loader that uses "
                f"it. Fix: DataLoader(dataset, batch_size=self.{self._attribute.name})"
            )
        if loaded is not None:
            self.loaded[size] = loaded
        try:
            samples = len(source.dataset)
        except (AttributeError, NotImplementedError, TypeError):
            return
        self._largest = min(self._options.max_val, max(1, samples // self._world.size))


class MemoryProbe(Callback):
    """Reserves in a trial the memory that several processes need in addition: buckets with a copy of all gradients.

    Args:
        reserve: there are several processes.
        batches: the trial ends after this number of micro-batches, also if `training_step` skips all of them; then also after
            an epoch.
    """

    def __init__(self, reserve: bool, batches: int) -> None:
        self._reserve = reserve
        self._left = batches
        self._skipped = True
        self._reserved: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._reserve and trainer.device.type != "cpu":
            size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            self._reserved = torch.empty(size, dtype=torch.uint8, device=trainer.device)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._left -= 1
        if self._left < 0:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._skipped = self._skipped and outputs is None

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._skipped:  # a fit refuses another such epoch, but with another batch size it may have other epochs
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._reserved = None
