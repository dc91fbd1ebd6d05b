"""`trainkit.trainer.setup`: the plans that the loops follow, made from a module and arguments, without a Trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.runs.bare import make_run
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import Tensor

from trainkit import TrainModule
from trainkit.errors import ConfigurationError, HookError, MissingMethodError
from trainkit.trainer.loaders import train_loader
from trainkit.trainer.module_steps import pad_alone
from trainkit.trainer.run import Run
from trainkit.trainer.safe_points import SafePoints
from trainkit.trainer.setup import (
    Training,
    count_batches,
    prepare_evaluation,
    prepare_training,
    refresh_train_loader,
    refresh_validation,
    refuse_incomplete,
    validate_every,
)


class Manual(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithoutOptimizer(TinyModule):
    def configure_optimizers(self) -> None:
        return None


def plan(run: Run, loader: Any = None) -> Training:
    return prepare_training(run, train_loader(run, loader or tiny_loader()), SafePoints(run, lambda wait: None, lambda: None))


# ----------------------------------------------------------------------------------------------------- methods of a module


@pytest.mark.parametrize(
    "stage, missing",
    [("fit", "training_step"), ("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")],
)
def test_a_module_without_the_methods_of_a_stage(stage: str, missing: str) -> None:
    class Bare(TrainModule):
        pass

    with pytest.raises(MissingMethodError, match=rf"Bare has no {missing}. Define: def {missing}\(self"):
        refuse_incomplete(Bare(), stage, has_optimizer=False)


def test_a_module_predicts_with_forward_or_predict_step() -> None:
    class Steps(TrainModule):
        def predict_step(self, batch: Any, batch_idx: int) -> None: ...

    for module in (Steps(), TinyModule()):
        refuse_incomplete(module, "predict", has_optimizer=False)
        module.predict_step = None  # type: ignore[method-assign, assignment]
        with pytest.raises(MissingMethodError, match="has no predict_step"):
            refuse_incomplete(module, "predict", has_optimizer=False)


def test_a_strategy_may_bring_the_optimizer() -> None:
    """A module needs no configure_optimizers if the strategy has the optimizer."""

    class Steps(TrainModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    refuse_incomplete(Steps(), "fit", has_optimizer=True)
    with pytest.raises(MissingMethodError, match="configure_optimizers"):
        refuse_incomplete(Steps(), "fit", has_optimizer=False)


# ------------------------------------------------------------------------------------------------------- the plan of a fit


def test_automatic_optimization() -> None:
    run = make_run()
    made = plan(run)
    assert (made.automatic, made.without_optimizer, made.distributed, made.pad) == (True, False, False, pad_alone)
    assert made.optimizer is run.torch_optimizers[0]
    parameter = run.module.layer.weight  # type: ignore[union-attr]
    parameter.grad = torch.ones_like(parameter)
    made.zero_grad()
    assert parameter.grad is None


def test_manual_optimization() -> None:
    run = make_run(Manual())
    made = plan(run)
    assert (made.automatic, made.without_optimizer, made.optimizer, made.pad) == (False, False, None, pad_alone)
    assert (len(run.optimizers), list(made.schedulers)) == (1, [])
    assert run.accelerator.before_step is not None
    run.accelerator.before_step(run.torch_optimizers[0])
    assert run.progress.tried_to_learn


@pytest.mark.parametrize(
    "arguments, name",
    [({"accumulate_grad_batches": 2}, "accumulate_grad_batches"), ({"global_batch_size": 8}, "global_batch_size"),
     ({"gradient_clip_val": 1.0}, "gradient_clip_val")],
)  # fmt: skip
def test_what_manual_optimization_would_ignore_is_refused(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*needs automatic optimization"):
        plan(make_run(Manual(), **arguments))


def test_without_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    made = plan(make_run(WithoutOptimizer()))
    assert (made.automatic, made.without_optimizer, made.optimizer) == (False, True, None)
    assert "WithoutOptimizer.configure_optimizers returned None: this fit runs without an optimizer" in caplog.text
    caplog.clear()
    plan(make_run())
    assert "without an optimizer" not in caplog.text


def test_a_zero_grad_of_the_users() -> None:
    class Own(TinyModule):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.zeroed = epoch, batch_idx, optimizer

    run = make_run(Own())
    made = plan(run)
    run.progress.current_epoch, run.progress.batch_idx = 3, 7
    made.zero_grad()
    assert run.module.zeroed == (3, 7, made.optimizer)


@pytest.mark.parametrize("takes, given", [("batch, batch_idx", 2), ("batch", 1), ("*args", 2)])
def test_a_training_step_takes_what_it_names(takes: str, given: int) -> None:
    # training_step is called with the arguments in its signature.
    space: dict[str, Any] = {"TinyModule": TinyModule}
    exec(  # each case is a signature
        f"class Own(TinyModule):\n    def training_step(self, {takes}):\n        self.got = ({takes},)\n", space
    )
    run = make_run(space["Own"]())
    plan(run).training_step("b", 4)
    assert len(run.module.got) == given


def test_a_training_step_that_cannot_be_called() -> None:
    class Own(TinyModule):
        def training_step(self, batch: Any, batch_idx: int, more: int) -> Tensor:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(HookError, match="training_step cannot be called"):
        plan(make_run(Own()))


# -------------------------------------------------------------------------------------------------------- when to validate


@pytest.mark.parametrize("interval, every", [(1.0, 4), (0.5, 2), (0.1, 1), (3, 3)])
def test_the_validation_interval(interval: float, every: int) -> None:
    run = make_run(val_check_interval=interval)
    loader = train_loader(run, tiny_loader())
    assert validate_every(run, loader) is None, "nothing is validated"
    run.validation = prepare_evaluation(run, "validation", tiny_loader())
    assert validate_every(run, loader) == every


def test_an_interval_that_an_epoch_never_reaches() -> None:
    run = make_run(val_check_interval=5)
    run.validation = prepare_evaluation(run, "validation", tiny_loader())
    with pytest.raises(ConfigurationError, match="val_check_interval=5 is more than the 4 training batches"):
        validate_every(run, train_loader(run, tiny_loader()))


def test_no_batch_interval_with_val_every_n_steps() -> None:
    """With val_every_n_steps, there is no validation interval in batches."""
    run = make_run(val_every_n_steps=2)
    run.validation = prepare_evaluation(run, "validation", tiny_loader())
    assert validate_every(run, train_loader(run, tiny_loader())) is None


# -------------------------------------------------------------------------------------------------------------- evaluation


def test_the_plan_of_an_evaluation_is_kept_by_its_name() -> None:
    run = make_run()
    made = prepare_evaluation(run, "test", tiny_loader(8))
    assert run.evaluations == {"test": made}
    assert count_batches(made) == [2]
    assert made is not None
    assert (made.logs, made.keeps) == (True, False)
    prediction = prepare_evaluation(run, "predict", tiny_loader())
    assert prediction is not None
    assert (prediction.logs, prediction.keeps) == (False, True)


def test_there_is_no_plan_where_there_is_nothing_to_run() -> None:
    run = make_run(limit_test_batches=0)
    assert prepare_evaluation(run, "test", tiny_loader()) is None
    assert prepare_evaluation(run, "validation", None) is None
    assert run.evaluations == {"test": None, "validation": None}
    assert count_batches(run.evaluations["test"]) == []


def test_a_step_must_tell_several_loaders_apart() -> None:
    with pytest.raises(HookError, match="test_step must take dataloader_idx"):
        prepare_evaluation(make_run(), "test", [tiny_loader(), tiny_loader()])


def test_the_metrics_of_a_sanity_check_go_nowhere() -> None:
    """The metrics of the sanity check are not added to the results of the run."""
    run = make_run(num_sanity_val_steps=2)
    made = prepare_evaluation(run, "validation", tiny_loader(), sanity=True)
    assert made is not None
    assert (count_batches(made), list(run.evaluations)) == ([2], ["sanity"])
    assert made.metrics.results is not run.results


@pytest.mark.parametrize("limit, expected", [(3, 3), (1.0, math.inf)])
def test_a_limit_bounds_the_number_of_batches_of_a_stream(limit: float, expected: float) -> None:
    batches = (batch for batch in tiny_loader())
    assert count_batches(prepare_evaluation(make_run(limit_val_batches=limit), "validation", batches)) == [expected]


# ---------------------------------------------------------------------------------------------------------------- reloading


def test_loaders_are_asked_for_again_every_n_epochs() -> None:
    asked: list[str] = []

    class Own(TinyModule):
        def train_dataloader(self) -> Any:
            asked.append("train")
            return tiny_loader(4 * len(asked))

        def val_dataloader(self) -> Any:
            asked.append("val")
            return tiny_loader()

    run = make_run(Own(), reload_dataloaders_every_n_epochs=2)
    made = prepare_training(run, train_loader(run, None), SafePoints(run, lambda wait: None, lambda: None))
    run.validation = prepare_evaluation(run, "validation", None)
    for epoch, expected in ((0, []), (1, []), (2, ["train", "val"])):
        asked.clear()
        run.progress.current_epoch = epoch
        fresh = refresh_train_loader(run, made)
        refresh_validation(run)
        assert asked == expected
        assert (fresh is made) == (not expected)
    assert fresh.loader is run.train_loader is not made.loader
