"""Callbacks of the Trainer and of the module, and invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of

from trainkit import Callback, Strategy, Trainer
from trainkit.callbacks import EarlyStopping, GradientClipping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from trainkit.errors import (
    ConfigurationError,
    HookError,
    UnknownNameError,
    UnsupportedArgumentError,
)


class First(Callback): ...


class Second(Callback): ...


class Bringing(TinyModule):
    def __init__(self, brought: Any) -> None:
        super().__init__()
        self.brought = brought

    def configure_callbacks(self) -> Any:
        return self.brought


def test_callbacks_of_the_module() -> None:
    seen = []

    class Logging(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(list(trainer.callbacks))
            self.log("by_callback", 1.0)

    own, brought = First(), Logging()
    trainer = make_trainer(own)
    trainer.fit(Bringing(brought), tiny_loader())
    assert seen == [[own, brought]]
    assert float(trainer.callback_metrics["by_callback"]) == 1.0


def test_a_callback_of_the_module_takes_the_place_of_one_of_its_class() -> None:
    own, other, brought = First(), Second(), First()
    trainer = make_trainer(own, other)
    trainer.fit(Bringing([brought]), tiny_loader())
    assert trainer.callbacks == [other, brought]
    trainer.fit(Bringing([brought]), tiny_loader())
    assert trainer.callbacks == [other, brought]
    trainer.fit(TinyModule(), tiny_loader())  # the callback of the other module is removed
    assert set(trainer.callbacks) == {own, other}


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_a_module_that_brings_none(nothing: Any) -> None:
    trainer = make_trainer(own := First())
    trainer.fit(Bringing(nothing), tiny_loader())
    assert trainer.callbacks == [own]


def test_what_a_module_brings_is_checked() -> None:
    class Wrong(Callback):
        def on_train_epoch_ends(self, trainer: Any, module: Any) -> None: ...

    for brought in (Wrong(), [First], "EarlyStopping"):
        with pytest.raises(HookError):
            make_trainer().fit(Bringing(brought), tiny_loader())


def test_clipping_at_0_is_no_clipping() -> None:
    """As in Lightning: projects pass 0 to turn it off."""
    trainer = make_trainer(gradient_clip_val=0.0)
    assert not trainer.gradient_clip_val
    assert not [callback for callback in trainer.callbacks if isinstance(callback, GradientClipping)]


def test_a_modules_own_clipping_is_called() -> None:
    calls = []

    class Clipping(TinyModule):
        def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None:
            calls.append((value, algorithm))
            self.clip_gradients(optimizer, gradient_clip_val=value or 1e-8, gradient_clip_algorithm="value")

    module = Clipping()
    before = parameters_of(module)
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(8))
    assert calls == [(None, None)] * 2
    torch.testing.assert_close(parameters_of(module)["layer.weight"], before["layer.weight"], atol=1e-8, rtol=0)
    calls.clear()
    make_trainer(gradient_clip_val=3.0, gradient_clip_algorithm="value").fit(module, tiny_loader(4))
    assert calls == [(3.0, "value")]
    trainer.fit(TinyModule(), tiny_loader(4))
    assert trainer.callbacks == []


def test_what_arguments_attach() -> None:
    trainer = Trainer(logger=False, accelerator="cpu", gradient_clip_val=1.0, max_time={"hours": 1}, max_epochs=1)
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names == ["TQDMProgressBar", "ModelSummary", "Timer", "GradientClipping", "ModelCheckpoint"]
    assert type(trainer.progress_bar_callback).__name__ == "TQDMProgressBar"
    assert trainer.early_stopping_callback is None
    saves, stopping, bar = ModelCheckpoint(), EarlyStopping("x"), TQDMProgressBar()
    trainer = Trainer(logger=False, accelerator="cpu", callbacks=[saves, stopping, bar], enable_model_summary=False)
    assert trainer.callbacks == [stopping, bar, saves], "it saves the state of the others"
    trainer = Trainer(
        logger=False, accelerator="cpu", callbacks=[stopping, bar], enable_model_summary=False, enable_checkpointing=False
    )
    assert trainer.callbacks == [stopping, bar]


def test_callbacks_that_save_are_the_last() -> None:
    best, newest = ModelCheckpoint(monitor="train_loss"), ModelCheckpoint(every_n_epochs=1)
    stopping, first = EarlyStopping("train_loss"), First()
    trainer = make_trainer(newest, first, enable_checkpointing=True)
    assert trainer.callbacks == [first, newest]
    trainer.fit(Bringing([stopping]), tiny_loader(4))
    assert trainer.callbacks == [first, stopping, newest]
    trainer.fit(Bringing([best, stopping]), tiny_loader(4))
    assert trainer.callbacks == [first, stopping, best]  # a callback of the module replaces those of its class
    assert trainer.early_stopping_callback is stopping
    assert Trainer(logger=False, callbacks=stopping, enable_progress_bar=False, max_epochs=1).callbacks[0] is stopping


def test_callbacks_that_say_the_same_twice() -> None:
    callback = First()
    with pytest.raises(ConfigurationError, match="the same object twice"):
        make_trainer(callback, callback)
    with pytest.raises(ConfigurationError, match="gradient_clip_val and a GradientClipping in callbacks set the same"):
        make_trainer(GradientClipping(1.0), gradient_clip_val=1.0)
    with pytest.raises(ConfigurationError, match="2 progress bars: TQDMProgressBar, RichProgressBar"):
        make_trainer(TQDMProgressBar(), RichProgressBar())
    with pytest.raises(ConfigurationError, match="enable_progress_bar=False and a TQDMProgressBar in callbacks contradict"):
        make_trainer(TQDMProgressBar(), enable_progress_bar=False)


# ------------------------------------------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"precision": "fp16"}, UnknownNameError, "unknown precision 'fp16'.*fp8-mixed. Did you mean '16-mixed'"),
        ({"precision": "16-mix"}, UnknownNameError, "unknown precision '16-mix'.*Did you mean '16-mixed'"),
        ({"strategy": "singel"}, UnknownNameError, "unknown strategy 'singel'"),
        ({"strategy": "dp"}, UnsupportedArgumentError, "Use strategy='ddp', with the same devices"),
        ({"strategy": Strategy("cpu"), "devices": 2}, ConfigurationError, "runs on one device.*strategy='ddp'"),
        ({"strategy": "single", "devices": 2}, ConfigurationError, "runs on one device.*strategy='ddp'"),
        ({"strategy": Strategy}, ConfigurationError, "a name or a Strategy object"),
        ({"accelerator": "cpus"}, UnknownNameError, "unknown accelerator 'cpus'.*Did you mean 'cpu'"),
        ({"accelerator": "hpu"}, UnsupportedArgumentError, "'hpu' is not supported"),
        ({"devices": 0}, ConfigurationError, "devices must be"),
        ({"num_nodes": 0}, ConfigurationError, "num_nodes must be an integer ≥ 1, not 0"),
        (
            {"strategy": Strategy("cpu"), "sync_batchnorm": True},
            ConfigurationError,
            "sync_batchnorm=True works with strategy='ddp' only",
        ),
        ({"gradient_clip_algorithm": "norms"}, UnknownNameError, "Did you mean 'norm'"),
        ({"gradient_clip_val": -1.0}, ConfigurationError, "gradient_clip_val"),
        ({"gradient_clip_val": float("nan")}, ConfigurationError, "gradient_clip_val"),
        ({"gradient_clip_val": True}, ConfigurationError, "gradient_clip_val"),
        ({"max_epochs": -2}, ConfigurationError, r"integer ≥ -1 \(-1: no limit\) or a float above 0, such as 2.5, not -2"),
        ({"max_epochs": -1.5}, ConfigurationError, "max_epochs must be an integer.*, not -1.5"),
        ({"max_steps": None}, ConfigurationError, "max_steps must be an integer"),
        ({"accumulate_grad_batches": 0}, ConfigurationError, "accumulate_grad_batches must be an integer ≥ 1, not 0"),
        ({"accumulate_grad_batches": {0: 0}}, ConfigurationError, "a schedule of gradient accumulation must be a dict"),
        ({"val_check_interval": 0}, ConfigurationError, "val_check_interval must be.*val_every_n_steps=N"),
        ({"val_check_interval": 1.5}, ConfigurationError, "val_check_interval must be"),
        ({"fast_dev_run": -1}, ConfigurationError, "fast_dev_run must be"),
        ({"deterministic": "maybe"}, ConfigurationError, "deterministic must be True, False or 'warn'"),
        ({"seed": -1}, ConfigurationError, "seed must be an integer from 0"),
        ({"seed": 1.0}, ConfigurationError, "seed must be an integer from 0"),
        ({"logger": 3}, ConfigurationError, "logger must be"),
        ({"max_time": "1 day"}, ConfigurationError, "DD:HH:MM:SS"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_trainer(**arguments)


def test_positional_arguments_are_none() -> None:
    with pytest.raises(TypeError, match="positional"):
        Trainer("cpu")


def test_an_unknown_argument_of_a_verb() -> None:
    with pytest.raises(UnknownNameError, match="Trainer.fit.*Did you mean 'train_dataloaders'"):
        make_trainer().fit(TinyModule(), train_dataloader=tiny_loader())
    with pytest.raises(UnknownNameError, match="Trainer.test.*Did you mean 'dataloaders'"):
        make_trainer().test(TinyModule(), dataloader=tiny_loader())


def test_a_strategy_object_and_a_device_that_contradict() -> None:
    assert make_trainer(strategy=Strategy("cpu"), accelerator="auto").device.type == "cpu"
    with pytest.raises(ConfigurationError, match="two precisions"):
        make_trainer(strategy=Strategy("cpu", precision="bf16-mixed"), precision="64-true")
