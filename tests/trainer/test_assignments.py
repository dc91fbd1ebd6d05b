"""Attributes that users assign to a Trainer, before a run or in a hook, take effect from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Recorder, make_trainer

from trainkit import Callback, Trainer
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import ConfigurationError, HookError, ModuleError


def in_hook(name: str, act: Any) -> Callback:
    """A callback that calls `act` with the trainer in one hook."""
    return type("Mine", (Callback,), {name: lambda self, trainer, *_: act(trainer)})()


def trained(*callbacks: Callback, seed: int | None = None, assigned: int | None = None, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    module = TinyModule()
    trainer = make_trainer(*callbacks, seed=seed, max_epochs=2, **options)
    if assigned is not None:
        trainer.seed = assigned
    trainer.fit(module, tiny_loader(shuffle=True))
    return [value.tolist() for value in module.parameters()]


def test_a_seed_before_the_run() -> None:
    expected = trained(seed=11)
    assert trained(seed=3) != expected
    assert trained(seed=3, assigned=11) == expected


def test_a_wrong_seed() -> None:
    with pytest.raises(ConfigurationError, match="seed must be an integer from 0 to .*, not 'x'"):
        make_trainer().seed = "x"
    with pytest.raises(ConfigurationError, match="the seed cannot change during a run"):
        trained(in_hook("on_train_start", lambda trainer: setattr(trainer, "seed", 1)))


def test_callbacks_that_are_none() -> None:
    """Only Callback objects may be assigned."""
    with pytest.raises(HookError, match="callbacks must contain Callback objects, not 'x'"):
        make_trainer().callbacks = ["x"]


@pytest.mark.parametrize("hook", ["setup", "on_train_epoch_start"])
def test_loggers_in_a_hook(hook: str) -> None:
    memory = Memory()
    trained(in_hook(hook, lambda trainer: setattr(trainer, "loggers", [])), logger=memory, log_every_n_steps=1)
    assert not memory.rows


def test_callbacks_in_setup() -> None:
    recorder = Recorder()
    trained(in_hook("setup", lambda trainer: setattr(trainer, "callbacks", [*trainer.callbacks, recorder])))
    assert recorder.epochs == [0, 1]


def test_inference_mode_in_a_hook() -> None:
    seen: list[bool] = []

    class Seeing(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(torch.is_inference_mode_enabled())

    off = in_hook("on_train_epoch_end", lambda trainer: setattr(trainer, "inference_mode", False))
    trainer, module = make_trainer(off, max_epochs=1), Seeing()
    trainer.validate(module, tiny_loader(4))
    trainer.fit(module, tiny_loader(4), tiny_loader(4))  # where validation is never in inference mode
    trainer.validate(module, tiny_loader(4))
    assert seen == [True, False, False]


def test_scheduler_configs_that_are_taken_out() -> None:
    """A scheduler whose config is removed makes no step."""

    class Scheduled(TinyModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def rate(*callbacks: Callback) -> float:
        trainer = make_trainer(*callbacks, max_epochs=2)
        trainer.fit(Scheduled(), tiny_loader(4))
        return trainer.optimizers[0].param_groups[0]["lr"]

    assert rate() == 0.025
    assert rate(in_hook("on_train_start", lambda trainer: trainer.lr_scheduler_configs.clear())) == 0.1


@pytest.mark.parametrize("nothing", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_a_fit_with_nothing_to_train_leaves_weights_to_save(nothing: dict[str, Any], tmp_path: Any) -> None:
    trainer = make_trainer(**{"max_epochs": 1, **nothing})
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.num_training_batches == 0
    trainer.save_checkpoint(tmp_path / "saved")
    assert not open_checkpoint(tmp_path / "saved").manifest.contents["resumable"], "the weights alone"
    with pytest.raises(ModuleError, match="estimated_stepping_batches is not known yet"):
        _ = trainer.estimated_stepping_batches


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start", "on_train_end"])
def test_an_exhausted_iterator_in_a_hook_arrives_as_it_is(hook: str) -> None:
    with pytest.raises(StopIteration):
        make_trainer(in_hook(hook, lambda trainer: next(iter(())))).fit(TinyModule(), tiny_loader())


def test_a_wrong_interval_is_refused_before_the_optimizers_are_asked_for() -> None:
    asked: list[Trainer] = []

    class Asked(TinyModule):
        def configure_optimizers(self) -> Any:
            asked.append(self.trainer)
            return super().configure_optimizers()

    with pytest.raises(ConfigurationError, match="val_check_interval=99"):
        make_trainer(val_check_interval=99).fit(Asked(), tiny_loader(), tiny_loader())
    assert not asked
