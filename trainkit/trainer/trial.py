"""A trial: a short run on a copy of the module that leaves no trace, for `trainkit.tuner`.

The copy of the module, its optimizer and its counters are dropped afterwards, so there is nothing to restore. What a trial
shares with the run after it, such as the state of a stateful loader, is restored.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainkit.console import TrainkitWarning
from trainkit.data.combined import CombinedLoader
from trainkit.errors import DataError, ModuleError
from trainkit.loggers.base import DummyLogger
from trainkit.registry import load_callback
from trainkit.strategy import Strategy
from trainkit.trainer import train_loop as loop
from trainkit.trainer.eval_loop import evaluate
from trainkit.trainer.lifecycle import build_hooks, refuse_evaluation, running, set_up
from trainkit.trainer.loaders import train_loader
from trainkit.trainer.run import Run
from trainkit.trainer.setup import prepare_evaluation, prepare_training

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["run_trial"]

_EVALUATIONS = {"validate": "validation", "test": "test", "predict": "predict"}


def run_trial(
    trainer: Trainer,
    stage: str,
    module: TrainModule,
    callback: Callback,
    *,
    dataloaders: Any = None,
    datamodule: DataModule | None = None,
    alone: bool = False,
    begun: bool = False,
    **arguments: Any,
) -> Trainer:
    """Run one stage on a copy of the module, without validation, schedulers, loggers, checkpoints and callbacks.

    `GradientClipping` is kept. The trainer may be in a run, in its `setup` hooks or, with `alone` and `begun`, after them.

    Args:
        trainer: its strategy, seed and other arguments are used; it is not changed.
        stage: "fit", "validate", "test" or "predict".
        module: is copied.
        callback: observes and controls the trial.
        dataloaders: as the user passed them.
        datamodule: a shallow copy of it is used.
        alone: each process runs by itself on its device, without collectives.
        begun: the run around the trial has set up the module, with the layers of `configure_model`.
        **arguments: fields of `TrainerArguments` that are different in the trial.

    Returns:
        The trainer of the trial, whose loaders can be read.

    Raises:
        ModuleError: the module cannot be copied.
        DataError: a loader is an iterator, which the trial would use up.
    """
    if begun:
        arguments["activation_checkpointing"] = None  # the copy has it already
    trial = _trial_trainer(trainer, callback, alone, arguments)
    trial_module = _copy_module(module, trainer, datamodule, dataloaders)
    if begun:
        _drop_setup(trial_module, "configure_model")
    data = None if datamodule is None else _copy_datamodule(datamodule, is_set_up=trainer.stage is not None)
    with running(trial, stage, trial_module, data, dataloaders) as run:
        set_up(trial, run)
        run.loggers = [DummyLogger() for _ in trainer.loggers]
        (_fit if stage == "fit" else _evaluate)(trial, run, dataloaders)
    return trial


def _fit(trial: Trainer, run: Run, dataloaders: Any) -> None:
    loader = train_loader(run, dataloaders)
    with _restoring([run.train_source]):
        build_hooks(trial, run)
        assert run.save_policy is not None  # each fit has one
        run.save_policy.expect_nonfinite()
        training = replace(prepare_training(run, loader, run.save_policy.safe_points), schedulers=[])
        run.hooks.run("on_fit_start")
        loop.begin_training(run, training)
        while loop.training_continues(run):
            loop.train_epoch(run, training)
        loop.end_training(run)
        run.hooks.run("on_fit_end")


def _evaluate(trial: Trainer, run: Run, dataloaders: Any) -> None:
    stage = run.progress.stage
    assert stage is not None
    name = _EVALUATIONS[stage]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainkitWarning)  # The limit is that of the trial; the run gives these warnings.
        evaluation = prepare_evaluation(run, name, dataloaders, keeps=False)
    if evaluation is None:
        refuse_evaluation(run, stage, name)
        return
    with _restoring(run.evaluation_sources[name]):
        build_hooks(trial, run)
        run.progress.validating = stage == "validate"
        evaluate(run, evaluation)


def _trial_trainer(trainer: Trainer, callback: Callback, alone: bool, arguments: Mapping[str, Any]) -> Trainer:
    """A trainer with the same settings and a `Run` of its own."""
    trial = copy.copy(trainer)
    trial_arguments = copy.copy(trainer._run.arguments)
    for name, value in arguments.items():
        setattr(trial_arguments, name, value)
    if alone:
        trial.strategy = Strategy(trainer.strategy.device, copy.deepcopy(trainer.precision_plugin))
    kinds = load_callback("gradient_clipping"), load_callback("gradient_accumulation_scheduler")
    run = trial._run = Run.before_the_first(trial_arguments, trial.strategy, trainer.seed)
    run.inference_mode = trainer.inference_mode
    run.callbacks = [*(copy.copy(one) for one in trainer.callbacks if isinstance(one, kinds)), callback]
    trial._module_callbacks, trial._replaced_callbacks = [], []
    trial._assigned_datamodule = None
    return trial


def _copy_module(module: TrainModule, *shared: Any) -> TrainModule:
    """A deep copy without the callbacks of `configure_callbacks`; it shares these objects with the module.

    Raises:
        ModuleError: something in it cannot be copied.
    """
    memo = {id(one): one for one in (*shared, module._trainer) if one is not None}
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise ModuleError(
            f"the tuner runs on a copy of the module, and {type(module).__name__} cannot be copied: {type(error).__name__}: "
            f"{error}. Expected a module for which copy.deepcopy works. Fix: create in setup what cannot be copied, or define "
            "__deepcopy__"
        ) from error
    copied.configure_callbacks = list  # type: ignore[method-assign]  # an empty one
    return copied


def _copy_datamodule(datamodule: DataModule, is_set_up: bool) -> DataModule:
    """A shallow copy, so that a trial can assign attributes.

    Args:
        datamodule: the user's.
        is_set_up: the run around the trial has set it up, and will tear it down.
    """
    copied = copy.copy(datamodule)
    if is_set_up:
        _drop_setup(copied)
    return copied


def _drop_setup(owner: Any, *more: str) -> None:
    for name in ("prepare_data", "setup", "teardown", *more):
        setattr(owner, name, _nothing)


def _nothing(*_: Any) -> None:
    """Replaces a hook."""


@contextmanager
def _restoring(sources: Iterable[Any]) -> Iterator[None]:
    """Restore the states and the generators of loaders, and of their datasets and samplers, afterwards.

    Raises:
        DataError: one of them is an iterator, which cannot be restored.
    """
    objects = _stateful_objects(sources)
    states = [(part, copy.deepcopy(part.state_dict())) for part in objects if _has_state(part)]
    generators = [getattr(part, "generator", None) for part in objects]
    drawn = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        for part, state in states:
            part.load_state_dict(state)
        for generator, state in drawn:
            generator.set_state(state)


def _stateful_objects(sources: Iterable[Any]) -> list[Any]:
    """The loaders, their datasets and their samplers.

    Raises:
        DataError: a loader is an iterator.
    """
    loaders = [part for one in sources for part in (one.flattened if isinstance(one, CombinedLoader) else [one])]
    for loader in loaders:
        if isinstance(loader, Iterator):
            raise DataError(
                f"the tuner would use up the batches of {type(loader).__name__}, an iterator, so that the run after it had "
                "none. Expected data that can be read again. Fix: pass a DataLoader or a list"
            )
    names = ("dataset", "sampler", "batch_sampler")
    objects = [part for loader in loaders for part in (loader, *(getattr(loader, name, None) for name in names))]
    return list({id(part): part for part in objects}.values())


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
