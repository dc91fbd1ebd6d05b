"""Learning-rate schedules by name: equal to those of transformers, in `configure_optimizers`, resumed, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Watching, make_trainer, same
from torch import nn
from torch.optim import SGD, Adam

from trainkit import Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigurationError, OptimizerError, UnknownNameError
from trainkit.optim import make_schedule

TOTAL = 30
# name, options, number of warm-up steps
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("linear", {}, 0),
    ("linear", {}, 7),
    ("cosine", {}, 7),
    ("cosine", {"num_cycles": 1.5}, 0),
    ("cosine_with_restarts", {"num_cycles": 3}, 5),
    ("cosine_with_min_lr", {"min_lr": 0.02}, 5),
    ("cosine_with_min_lr", {"min_lr_rate": 0.3}, 0),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.02}, 5),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 0.75}, 0),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3, "warmup_lr_rate": 0.1}, 1),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3, "warmup_lr_rate": 0.1}, 5),
    ("polynomial", {}, 5),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}, 0),
    ("constant", {}, 0),
    ("constant_with_warmup", {}, 7),
    ("inverse_sqrt", {}, 7),
    ("inverse_sqrt", {}, 0),
    ("inverse_sqrt", {"timescale": 12}, 7),
    ("warmup_stable_decay", {"num_decay_steps": 10}, 5),
    ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "1-sqrt", "warmup_type": "cosine", "min_lr_ratio": 0.1}, 5),
    ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "linear", "warmup_type": "1-sqrt"}, 5),
]


def sgd(lr: float = 0.1) -> SGD:
    return SGD([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))], lr=lr)


def rates(schedule: Any, steps: int = TOTAL + 3) -> list[float]:
    """The learning rate of each step, also after the end of the schedule."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name, options, warmup", CASES)
def test_schedules_are_those_of_transformers(name: str, options: dict[str, Any], warmup: int) -> None:
    from transformers import SchedulerType, get_scheduler

    expected = rates(get_scheduler(name, sgd(), warmup, TOTAL, dict(options)))
    for given in (name, SchedulerType(name)):
        found = rates(make_schedule(given, sgd(), warmup_steps=warmup, total_steps=TOTAL, **options))
        assert found == pytest.approx(expected, rel=1e-14, abs=1e-17)
    assert len(set(expected)) > 1 or name == "constant"


def test_wsd_is_short_for_warmup_stable_decay() -> None:
    short, whole = (make_schedule(n, sgd(), total_steps=9, num_decay_steps=3) for n in ("wsd", "warmup_stable_decay"))
    assert rates(short) == rates(whole)


def test_the_warmup_may_be_a_fraction() -> None:
    """It is rounded up, as in transformers."""
    by_ratio = make_schedule("linear", sgd(), warmup_ratio=0.11, total_steps=TOTAL)
    assert rates(by_ratio) == rates(make_schedule("linear", sgd(), warmup_steps=4, total_steps=TOTAL))


@pytest.mark.parametrize(
    "name, arguments, error, words",
    [
        ("cosin", {"total_steps": 5}, UnknownNameError, "'cosine'"),
        ("reduce_lr_on_plateau", {}, UnknownNameError, "ReduceLROnPlateau(optimizer)"),
        ("linear", {}, OptimizerError, "Trainer(max_steps=10_000)"),
        ("linear", {"total_steps": float("inf")}, OptimizerError, "infinite"),
        ("linear", {"total_steps": 5, "warmup_steps": 6}, OptimizerError, "warmup_ratio=0.1"),
        ("linear", {"total_steps": 5, "warmup_steps": 0.1}, ConfigurationError, "warmup_ratio=0.1"),
        ("linear", {"total_steps": 5, "warmup_steps": 1, "warmup_ratio": 0.1}, OptimizerError, "Give one"),
        ("linear", {"total_steps": 5, "warmup_ratio": -0.1}, ConfigurationError, "warmup_ratio"),
        ("linear", {"total_steps": 5, "power": 2.0}, UnknownNameError, "no option 'power'"),
        ("polynomial", {"total_steps": 5, "pover": 2.0}, UnknownNameError, "'power'"),
        ("polynomial", {"total_steps": 5, "lr_end": 1.0}, OptimizerError, "lr_end=0.0"),
        ("constant", {"warmup_steps": 3}, OptimizerError, "constant_with_warmup"),
        ("wsd", {"total_steps": 20}, OptimizerError, "num_decay_steps=2"),
        ("wsd", {"total_steps": 20, "num_decay_steps": 15, "warmup_steps": 6}, OptimizerError, "from 0 to 14"),
        ("wsd", {"total_steps": 20, "num_decay_steps": 5, "decay_type": "log"}, ConfigurationError, "'1-sqrt'"),
        ("cosine_with_min_lr", {"total_steps": 5}, OptimizerError, "min_lr_rate=0.1"),
    ],
)
def test_errors_name_the_fix(name: str, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        make_schedule(name, sgd(), **arguments)
    assert words in str(raised.value)


# ----------------------------------------------------------------------------------------------- in configure_optimizers


class Scheduled(TinyModule):
    """`configure_optimizers` returns Adam, and `scheduler` in one of the forms."""

    def __init__(self, scheduler: Any, form: str = "dict") -> None:
        torch.manual_seed(0)
        super().__init__()
        self.scheduler, self.form = scheduler, form

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.1)
        forms = {
            "dict": {"optimizer": optimizer, "lr_scheduler": self.scheduler},
            "lists": ([optimizer], [self.scheduler]),
            "dicts": [{"optimizer": optimizer, "lr_scheduler": self.scheduler}],
        }
        return forms[self.form]


def fit(scheduler: Any, form: str = "dict", **arguments: Any) -> tuple[Trainer, list[float]]:
    """Train for two epochs of four steps; returns the learning rate after each step."""
    watching = Watching()
    trainer = make_trainer(watching, **{"max_epochs": 2, **arguments})
    trainer.fit(Scheduled(scheduler, form), tiny_loader())
    return trainer, [rate for _, rate, _ in watching.after]


@pytest.mark.parametrize(
    "scheduler, form",
    [
        ({"scheduler": "linear", "warmup_steps": 2}, "dict"),
        ({"scheduler": "linear", "warmup_ratio": 0.25, "name": "lr"}, "lists"),
        ({"scheduler": "linear", "warmup_steps": 2, "interval": "step"}, "dicts"),
    ],
)
def test_configure_optimizers_takes_a_name(scheduler: Any, form: str) -> None:
    """The schedule has the run's number of optimizer steps, and steps with each of them."""
    trainer, found = fit(scheduler, form)
    assert found == pytest.approx(rates(make_schedule("linear", sgd(), warmup_steps=2, total_steps=8), 9)[1:])
    assert trainer.lr_scheduler_configs[0].interval == "step"
    assert trainer.lr_scheduler_configs[0].name == scheduler.get("name")


def test_the_name_alone_is_a_schedule() -> None:
    _, found = fit("cosine", max_epochs=-1, max_steps=5)
    assert found == pytest.approx(rates(make_schedule("cosine", sgd(), total_steps=5), 6)[1:])


def test_total_steps_may_be_given() -> None:
    _, found = fit({"scheduler": "linear", "total_steps": 100})
    assert found[0] == pytest.approx(0.099)


@pytest.mark.parametrize(
    "scheduler, error, words",
    [
        ({"scheduler": "cosine", "warm_steps": 2}, UnknownNameError, "'warmup_steps'"),
        (
            {"scheduler": "cosine", "interval": "epoch"},
            OptimizerError,
            "make_schedule('cosine', optimizer, total_steps=epochs)",
        ),
        ({"scheduler": "cosine", "frequency": 2}, OptimizerError, "frequency 1"),
        ({"scheduler": "nothing"}, UnknownNameError, "There is no schedule 'nothing'"),
    ],
)
def test_errors_of_configure_optimizers(scheduler: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        fit(scheduler)
    assert words in str(raised.value)


def test_a_name_needs_one_optimizer() -> None:
    class Two(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [SGD([self.layer.weight], lr=0.1), SGD([self.layer.bias], lr=0.1)], ["cosine"]

    with pytest.raises(OptimizerError, match="which of 2 optimizers"):
        make_trainer().fit(Two(), tiny_loader())


def test_a_resumed_schedule_is_exact() -> None:
    """Interrupted in the warm-up and resumed, the rates and parameters are bit-identical."""
    scheduler = {"scheduler": "cosine", "warmup_steps": 5}
    whole, resumed = Watching(), Watching()
    options = {"max_epochs": 3, "enable_checkpointing": True}
    make_trainer(whole, **options).fit(Scheduled(scheduler), tiny_loader())

    class Interrupting(Watching):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint("third")

    make_trainer(Interrupting(), **options).fit(Scheduled(scheduler), tiny_loader())
    make_trainer(resumed, ModelCheckpoint(), **options).fit(Scheduled(scheduler), tiny_loader(), ckpt_path="third")
    assert [step for step, _, _ in resumed.after] == [*range(4, 13)]
    for ours, theirs in zip(resumed.after, whole.after[3:], strict=True):
        assert ours[1] == theirs[1]
        assert same(ours[2], theirs[2])
