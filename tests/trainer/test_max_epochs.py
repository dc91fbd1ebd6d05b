"""A `max_epochs` that is not whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.errors import ConfigurationError


class Scheduled(TinyModule):
    """Keeps the number of steps that its schedule is made for."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("epochs", "arguments", "steps"),
    [
        (2.5, {}, 10),  # 2.5 epochs of 4 steps
        (0.3, {}, 2),
        (1.01, {}, 5),
        (3.0, {}, 12),
        (2.5, {"accumulate_grad_batches": 3}, 5),  # of 2 steps
        (2.5, {"limit_train_batches": 2}, 5),
        (2.5, {"global_batch_size": 8}, 5),
        (2.5, {"accumulate_grad_batches": {0: 1, 1: 2}}, 7),  # 4 + 2 + 1
        (2.5, {"max_steps": 3}, 3),
        (2.5, {"max_steps": 30}, 10),
        (2.5, {"fast_dev_run": 1}, 1),
    ],
)
def test_the_number_of_steps(epochs: float, arguments: dict[str, Any], steps: int) -> None:
    trainer, module = make_trainer(max_epochs=epochs, **arguments), Scheduled()
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    assert trainer.global_step == module.planned == steps


def test_a_sum_that_is_not_exact() -> None:
    trainer = make_trainer(max_epochs=1.1)
    trainer.fit(TinyModule(), tiny_loader(40))
    assert trainer.global_step == 11  # 1.1 * 10 is a little more


def test_what_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(max_epochs=2.5)
    assert "max_epochs                        2.5" in trainer.explain()
    trainer.fit(TinyModule(), tiny_loader())
    assert (trainer.max_epochs, trainer.max_steps, trainer.num_training_batches) == (3, 10, 4)
    assert "max_steps=10 reached (max_epochs=2.5)" in caplog.text


def test_each_fit_has_its_own_number() -> None:
    trainer = make_trainer(max_epochs=1.5)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 6
    trainer.fit(TinyModule(), tiny_loader(32))
    assert trainer.global_step == 12
    trainer.max_epochs = 1
    trainer.fit(TinyModule(), tiny_loader())
    assert (trainer.global_step, trainer.max_steps) == (4, -1)


def test_a_resumed_run_is_the_whole_one() -> None:
    def fit(epochs: float, **more: Any) -> tuple[Any, TinyModule]:
        torch.manual_seed(0)
        module = TinyModule()
        trainer = make_trainer(max_epochs=epochs, enable_checkpointing=True, default_root_dir="runs", seed=1)
        trainer.fit(module, tiny_loader(shuffle=True), **more)
        return trainer, module

    fit(1.5)
    resumed, after = fit(2.5, ckpt_path="auto")
    whole, module = fit(2.5)
    assert resumed.global_step == whole.global_step == 10
    assert torch.equal(after.layer.weight, module.layer.weight)


def test_a_stream_of_unknown_length() -> None:
    with pytest.raises(ConfigurationError, match=r"max_epochs=2.5 needs a training loader with a length, .* max_steps=1000"):
        make_trainer(max_epochs=2.5).fit(TinyModule(), (batch for batch in tiny_loader()))


@pytest.mark.world_size(2)
def test_on_two_processes() -> None:
    trainer = make_trainer(max_epochs=2.5, strategy="ddp", devices=2)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 5  # of 2 steps
