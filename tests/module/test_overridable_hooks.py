"""Methods that are assigned to an object replace those of its class; and the hooks that set a module to eval mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Seen, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Callback, DataModule, TrainModule
from trainkit.callbacks import GradientClipping
from trainkit.errors import ConfigurationError, HookError, MissingMethodError
from trainkit.module.overridable_hooks import is_overridden


class Base:
    def method(self) -> None: ...


class Own(Base):
    def method(self) -> None: ...


def assigned(owner: Any, value: Any) -> Any:
    owner.method = value
    return owner


@pytest.mark.parametrize(
    "owner, expected",
    [
        (Base(), False),
        (Own(), True),
        (type("Further", (Own,), {})(), True),
        (type("Back", (Own,), {"method": Base.method})(), False),
        (type("Without", (Base,), {"method": None})(), False),
        (assigned(Base(), print), True),
        (assigned(Base(), Own().method), True),
        (assigned(Base(), functools.partial(print, 1)), True),
        (assigned(Base(), Base().method), False),
        (assigned(Own(), None), False),
    ],
)
def test_is_overridden(owner: Any, expected: bool) -> None:
    assert is_overridden(owner, "method", Base) is expected


# ------------------------------------------------------------------------------------------------------------- modules


class Phases(TinyModule):
    """Has two training steps; the constructor assigns one of them to `training_step`."""

    def __init__(self, phase: str = "a") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 1)
        self.calls = ""
        self.training_step = getattr(self, f"step_{phase}")

    def step_a(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += "a"
        return self.loss(batch)

    def step_b(self, batch: Any) -> Tensor:
        self.calls += "b"
        return 2 * self.loss(batch)


def test_the_step_that_was_assigned_is_trained_with() -> None:
    for phase in "ab":
        module = Phases(phase)
        make_trainer().fit(module, tiny_loader())
        assert module.calls == 4 * phase


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_that_is_assigned_during_the_run_counts_from_the_next_batch_on(compiled: bool, precision: str) -> None:
    class Switching(Phases):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.training_step = self.step_a if batch_idx < 2 else self.step_c

        def step_c(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += "c"
            return self.loss(batch)

    module = Switching()
    make_trainer(precision=precision).fit(torch.compile(module, backend="eager") if compiled else module, tiny_loader())
    torch.compiler.reset()
    assert module.calls == "aacc"


def phases_in_ddp() -> tuple[str, list[Tensor]]:
    module = Phases("b")
    make_trainer(strategy="ddp").fit(module, tiny_loader())
    return module.calls, list(parameters_of(module).values())


def test_the_step_that_was_assigned_runs_in_ddp() -> None:
    (first, parameters), (second, others) = run_world(2, phases_in_ddp)
    assert (first, second) == ("bb", "bb")
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))  # gradients were averaged
    alone = Phases("b")
    make_trainer(accumulate_grad_batches=2).fit(alone, tiny_loader())
    for one, other in zip(parameters, parameters_of(alone).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_validation_step_of_none_turns_validation_off() -> None:
    """`validation_step = None` disables validation, without a warning."""
    module = Seen()
    module.validation_step = None
    trainer = make_trainer(num_sanity_val_steps=2)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert len(module.training_inputs) == 4
    assert module.validation_inputs == []
    assert "val_loss" not in trainer.callback_metrics
    with pytest.raises(MissingMethodError, match="Seen has no validation_step"):
        trainer.validate(module, tiny_loader())


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers"])
def test_without_what_training_needs(name: str) -> None:
    # fit raises an error if a required method was replaced with None
    module = TinyModule()
    setattr(module, name, None)
    with pytest.raises(MissingMethodError, match=f"TinyModule has no {name}"):
        make_trainer().fit(module, tiny_loader())


def test_steps_and_optimizers_of_functions() -> None:
    module = TrainModule()
    module.layer = nn.Linear(4, 1)
    module.training_step = lambda batch: module.layer(batch[0]).square().mean()
    module.validation_step = lambda batch, batch_idx: module.log("val", 3.0)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    before, trainer = parameters_of(module), make_trainer()
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert float(trainer.callback_metrics["val"]) == 3.0
    assert not same(before, parameters_of(module))
    trainer.plan(module)  # it finds the optimizer too


def test_loaders_that_were_assigned() -> None:
    module = Seen()
    module.train_dataloader = lambda: tiny_loader(8)
    module.val_dataloader = lambda: tiny_loader(4)
    make_trainer().fit(module)
    assert (len(module.training_inputs), len(module.validation_inputs)) == (2, 1)


def test_a_loader_of_none_is_no_loader() -> None:
    class Module(Seen):
        def val_dataloader(self) -> DataLoader:
            return tiny_loader(4)

    module = Module()
    module.val_dataloader = None
    make_trainer().fit(module, tiny_loader())
    assert module.validation_inputs == []


@pytest.mark.parametrize(
    "name",
    ["setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "on_fit_start", "batch_weight",
     "optimizer_zero_grad", "transfer_batch_to_device", "on_after_batch_transfer", "on_validation_model_eval"],
)  # fmt: skip
def test_a_method_of_a_module_that_is_none_is_not_called(name: str) -> None:
    def never(self: Any, *arguments: Any) -> None:
        pytest.fail(f"{name} was called")

    module = type("Module", (TinyModule,), {name: never})()
    setattr(module, name, None)
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert trainer.global_step == 4


def test_hooks_and_override_points_that_were_assigned() -> None:
    calls: list[str] = []
    module = TinyModule()
    module.on_train_start = lambda: calls.append("on_train_start")
    module.setup = lambda stage: calls.append(f"setup {stage}")
    module.batch_weight = lambda batch: calls.append("weight") or 1.0
    module.configure_callbacks = lambda: calls.append("callbacks") or []
    module.on_after_batch_transfer = lambda batch, dataloader_idx: calls.append("batch") or batch
    module.configure_gradient_clipping = lambda optimizer, value, algorithm: calls.append("clip")
    make_trainer().fit(module, tiny_loader(4))
    assert calls == ["callbacks", "setup fit", "on_train_start", "weight", "batch", "clip"]


def test_the_norm_does_not_reach_clipping_that_was_assigned() -> None:
    # norm_type has no effect on the user's configure_gradient_clipping, so it is an error
    module = TinyModule()
    module.configure_gradient_clipping = lambda optimizer, value, algorithm: None
    with pytest.raises(ConfigurationError, match="has no effect on TinyModule.configure_gradient_clipping"):
        make_trainer(GradientClipping(1.0, norm_type=1.0)).fit(module, tiny_loader())


def test_a_method_that_was_assigned_and_cannot_be_called() -> None:
    module = TinyModule()
    module.on_train_batch_start = lambda batch: None
    with pytest.raises(HookError, match=r"Expected: def on_train_batch_start\(batch, batch_idx\); received: .*\(batch\)"):
        make_trainer().fit(module, tiny_loader(4))
    module = TinyModule()
    module.on_train_strat = lambda: None
    with pytest.raises(HookError, match="TinyModule.on_train_strat is never called.*Did you mean 'on_train_start'"):
        make_trainer().fit(module, tiny_loader(4))


# ------------------------------------------------------------------------------------------ data modules and callbacks


def test_methods_of_a_data_module_that_were_assigned() -> None:
    class Data(DataModule):
        def train_dataloader(self) -> DataLoader:
            return tiny_loader(16)

        def val_dataloader(self) -> DataLoader:
            return tiny_loader(8)

        def setup(self, stage: str) -> None:
            pytest.fail("setup was called")

    data, module, calls = Data(), Seen(), []
    data.train_dataloader = lambda: tiny_loader(4)
    data.val_dataloader = data.setup = data.prepare_data = None
    data.teardown = calls.append
    make_trainer().fit(module, datamodule=data)
    assert (len(module.training_inputs), len(module.validation_inputs)) == (1, 0)
    assert calls == ["fit"]


def test_hooks_of_a_callback_that_were_assigned() -> None:
    class Noisy(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            pytest.fail("on_train_end was called")

    callback, calls = Noisy(), []
    callback.on_train_end = None
    callback.on_train_batch_end = lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx)
    make_trainer(callback).fit(TinyModule(), tiny_loader())
    assert calls == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------------------- eval mode


STAGES = [("validate", "validation"), ("test", "test"), ("predict", "predict")]


class Modes(TinyModule):
    """Records whether it and its dropout are in training mode, in the hooks and steps of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.modes: list[tuple[bool, bool]] = []

    def note(self, *arguments: Any) -> None:
        self.modes.append((self.training, self.dropout.training))

    validation_step = test_step = predict_step = lambda self, batch, batch_idx: self.note()
    on_validation_start = on_test_start = on_predict_start = note
    on_validation_end = on_test_end = on_predict_end = note


@pytest.mark.parametrize("verb, name", STAGES)
def test_an_override_takes_the_place_of_eval_mode(verb: str, name: str) -> None:
    module = type("Active", (Modes,), {f"on_{name}_model_eval": lambda self: self.layer.eval()})()
    getattr(make_trainer(), verb)(module, tiny_loader(4))
    assert module.modes == [(True, True)] * 3  # for example, for Monte Carlo dropout
    assert module.layer.training  # its mode is restored
    plain = Modes()
    getattr(make_trainer(), verb)(plain, tiny_loader(4))
    assert plain.modes == [(False, False)] * 3
    assert plain.dropout.training


@pytest.mark.parametrize("verb, name", STAGES)
def test_an_override_takes_the_place_of_returning_to_the_modes_before(verb: str, name: str) -> None:
    module = type("Staying", (Modes,), {f"on_{name}_model_train": lambda self: self.layer.train()})()
    getattr(make_trainer(), verb)(module, tiny_loader(4))
    assert module.modes == [(False, False)] * 3
    assert (module.training, module.dropout.training, module.layer.training) == (False, False, True)


def test_the_base_class_can_be_called_from_the_override() -> None:
    class Both(Modes):
        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.dropout.train()

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()

    module = Both()
    make_trainer().fit(module, tiny_loader(4), tiny_loader(4))
    assert module.modes == [(False, True)] * 3
    assert module.training


def test_an_error_in_an_evaluation_restores_the_modes_all_the_same() -> None:
    class Failing(Modes):
        def on_validation_model_train(self) -> None:
            pytest.fail("on_validation_model_train was called")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("mine")

    module = Failing()
    with pytest.raises(KeyError, match="mine"):
        make_trainer().validate(module, tiny_loader(4))
    assert module.training
    assert module.dropout.training


def test_such_a_hook_takes_no_arguments() -> None:
    module = type("Wrong", (Modes,), {"on_validation_model_eval": lambda self, mode: None})()
    with pytest.raises(HookError, match=r"Expected: def on_validation_model_eval\(self\)"):
        make_trainer().validate(module, tiny_loader(4))
