"""`trainer.callback_metrics`, `logged_metrics` and `progress_bar_metrics`, without values of validation steps.

If training and validation log the same name, its value is that of validation.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor

from trainkit import Callback
from trainkit.metrics.store import MetricResults, as_tensors


class Both(TinyModule):
    """Logs by step and by epoch, in training and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("t", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)


class Looking(Callback):
    """Records the names in `callback_metrics` during a validation, and the values after it."""

    def __init__(self) -> None:
        self.during: list[set[str]] = []
        self.after: list[dict[str, float]] = []

    def on_validation_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.during.append(set(trainer.callback_metrics))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.after.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize(
    ("which", "kind"), [("callback_metrics", Tensor), ("logged_metrics", Tensor), ("progress_bar_metrics", float)]
)
def test_they_hold_tensors_and_floats(which: str, kind: type) -> None:
    class Module(Both):
        def on_train_epoch_end(self) -> None:
            self.log("number", 0.1, prog_bar=True)

    trainer = make_trainer(log_every_n_steps=1, logger=Memory())
    trainer.fit(Module(), tiny_loader(), tiny_loader(8))
    metrics = getattr(trainer, which)
    assert metrics.keys() >= {"t_step", "t_epoch", "v_epoch", "number"}
    assert all(isinstance(value, kind) for value in metrics.values())
    assert not any(value.is_inference() for value in metrics.values() if isinstance(value, Tensor))
    assert float(metrics["number"]) == 0.1  # in float64: nothing is rounded


def test_a_validation_gives_monitors_no_values_of_steps() -> None:
    looking, logger = Looking(), Memory()
    make_trainer(looking, logger=logger).fit(Both(), tiny_loader(), tiny_loader(8))
    assert looking.during == [{"t", "t_step"}] * 2
    assert looking.after == [{"t": 3.0, "t_step": 3.0, "v": 0.5, "v_epoch": 0.5}]
    assert logger.of("v_step") == {1: 0.0, 2: 1.0}  # loggers get values of validation steps


@pytest.mark.parametrize("batches", [1, 2])
def test_a_trial_run_has_values_of_steps(batches: int) -> None:
    trainer = make_trainer(fast_dev_run=batches)
    trainer.fit(Both(), tiny_loader(), tiny_loader(8))
    for metrics in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
        assert float(metrics["t_step"]) == batches - 1
    assert make_trainer(fast_dev_run=batches, log_every_n_steps=0).log_every_n_steps == 0  # an explicit 0 is kept


class SameName(TinyModule):
    """Logs the loss of training and of validation under the same name."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", 100.0 + batch_idx, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.trainer.current_epoch))


def test_of_one_name_in_training_and_validation_the_validations_is_monitored() -> None:
    seen: list[float] = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            seen.append(trainer.callback_metrics["loss"].item())

    trainer = make_trainer(Reading(), max_epochs=2)
    trainer.fit(SameName(), tiny_loader(8), tiny_loader(8))
    assert seen == [100.0, 101.0, 0.0, 0.0]  # before the first validation, the value is that of training
    assert trainer.callback_metrics["loss"].item() == 1.0


def test_a_resume_knows_whose_value_it_is() -> None:
    """After a resume, a value of training does not replace a value of validation with the same name."""
    results = MetricResults()
    results.add({"loss": torch.tensor(1.0)}, evaluation=True)
    again = MetricResults()
    again.load_state_dict(json.loads(json.dumps({**results.state_dict(), "callback": {}})))
    again.add({"loss": torch.tensor(2.0), "other": torch.tensor(3.0)})
    assert set(again.callback) == {"other"}
    old = {name: value for name, value in results.state_dict().items() if name != "evaluated"}
    again.load_state_dict(old)  # a state of an earlier version
    again.add({"loss": torch.tensor(2.0)})
    assert again.callback["loss"].item() == 2.0


def test_numbers_become_tensors_and_tensors_stay() -> None:
    with torch.inference_mode():
        one = torch.ones(1)
    tensors = as_tensors({"number": 0.1, "one": one, "other": (other := torch.zeros(1))})
    assert (tensors["number"].dtype, tensors["number"].item()) == (torch.float64, 0.1)
    assert not tensors["one"].is_inference()
    assert tensors["other"] is other
