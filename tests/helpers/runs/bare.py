"""A `Run` without a `Trainer`: `from helpers.runs.bare import arguments, make_run`."""

from __future__ import annotations

from typing import Any

from helpers.runs.tiny import TinyModule

from trainkit import TrainModule
from trainkit.strategy import Strategy
from trainkit.trainer.arguments import TrainerArguments
from trainkit.trainer.run import Run

__all__ = ["arguments", "make_run"]


def arguments(**given: Any) -> TrainerArguments:
    """The resolved arguments of a Trainer: the defaults, except for those given."""
    return TrainerArguments(**{"max_epochs": 10, "default_root_dir": "runs", **given})


def make_run(module: TrainModule | None = None, strategy: Strategy | None = None, **given: Any) -> Run:
    """A `Run` whose fit has begun, on the CPU, with seed 1; it trains a `TinyModule` unless another module is given."""
    run = Run.before_the_first(arguments(**given), strategy or Strategy("cpu"), 1)
    run.given_module = run.fitted = module or TinyModule()
    run.wrapped_module = run.strategy.prepare_module(run.module)
    run.progress.begin("fit")
    return run
