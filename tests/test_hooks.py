"""Which hooks there are, in which order they are called, and which methods are refused."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn
from trainers import make_trainer

from trainkit import Callback, TrainModule
from trainkit.errors import HookError, LossError
from trainkit.hooks import HOOKS, REMOVED, check_callback, check_module

# A new hook, or another argument, is a decision: it needs a line in the changelog, one in the docs and one here.
FROZEN = {
    "setup": "stage",
    "teardown": "stage",
    "on_fit_start": "",
    "on_fit_end": "",
    "on_sanity_check_start": "",
    "on_sanity_check_end": "",
    "on_train_start": "",
    "on_train_end": "",
    "on_train_epoch_start": "",
    "on_train_epoch_end": "",
    "on_train_batch_start": "batch batch_idx",
    "on_train_batch_end": "outputs batch batch_idx",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_before_optimizer_step": "optimizer",
    "on_before_zero_grad": "optimizer",
    "on_validation_start": "",
    "on_validation_end": "",
    "on_validation_epoch_start": "",
    "on_validation_epoch_end": "",
    "on_validation_batch_start": "batch batch_idx dataloader_idx",
    "on_validation_batch_end": "outputs batch batch_idx dataloader_idx",
    "on_test_start": "",
    "on_test_end": "",
    "on_test_epoch_start": "",
    "on_test_epoch_end": "",
    "on_test_batch_start": "batch batch_idx dataloader_idx",
    "on_test_batch_end": "outputs batch batch_idx dataloader_idx",
    "on_predict_start": "",
    "on_predict_end": "",
    "on_predict_epoch_start": "",
    "on_predict_epoch_end": "",
    "on_predict_batch_start": "batch batch_idx dataloader_idx",
    "on_predict_batch_end": "outputs batch batch_idx dataloader_idx",
    "on_exception": "exception",
    "on_save_checkpoint": "checkpoint",
    "on_load_checkpoint": "checkpoint",
}


def test_the_hooks_are_frozen() -> None:
    assert {name: " ".join(arguments) for name, arguments in HOOKS.items()} == FROZEN


def test_callback_and_module_have_every_hook_with_these_arguments() -> None:
    for name, arguments in HOOKS.items():
        of_callback = list(inspect.signature(getattr(Callback, name)).parameters)
        assert of_callback == ["self", "trainer", "module", *arguments], name
        if name != "on_exception":  # Lightning's modules have none
            assert list(inspect.signature(getattr(TrainModule, name)).parameters) == ["self", *arguments], name


# ------------------------------------------------------------------------------------------------------------- order


class Script:
    """The calls of a run, one a line: owner, hook, and what tells the call from others."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, owner: str, name: str, *details: Any) -> None:
        self.lines.append(" ".join([owner, name, *map(str, details)]))


def _details(name: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Stage and numbers among a hook's arguments; tensors, batches and optimizers are left out."""
    return [value for value in arguments if isinstance(value, str | int)]


def _noting(owner: str, name: str, skip: int) -> Any:
    def hook(self: Any, *arguments: Any) -> None:
        self.script.note(owner, name, *_details(name, arguments[skip:]))

    return hook


def callback_that_notes(owner: str, last: bool = False) -> type[Callback]:
    methods = {name: _noting(owner, name, 2) for name in HOOKS}
    return type(owner, (Callback,), {**methods, "runs_last": last})


class NotingModule(TinyModule):
    def __init__(self, script: Script, automatic: bool = True) -> None:
        super().__init__()
        self.script = script
        self.automatic_optimization = automatic

    def prepare_data(self) -> None:
        self.script.note("M", "prepare_data")

    def configure_model(self) -> None:
        self.script.note("M", "configure_model")

    def configure_callbacks(self) -> list[Callback]:
        self.script.note("M", "configure_callbacks")
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.script.note("M", "configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.script.note("M", "training_step", batch_idx)
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.script.note("M", "validation_step", batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.script.note("M", "test_step", batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.script.note("M", "predict_step", batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.script.note("M", "optimizer_zero_grad", epoch, batch_idx)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.script.note("M", "lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)


for _name in HOOKS:
    if _name != "on_exception":
        setattr(NotingModule, _name, _noting("M", _name, 0))


class Scheduled(NotingModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


def noted(run: Any, module: type[NotingModule] = NotingModule, *, automatic: bool = True, **arguments: Any) -> list[str]:
    """What ``run(trainer, module)`` calls, with a callback A, one that runs last, and the module M."""
    script = Script()
    early, late = callback_that_notes("A")(), callback_that_notes("Z", last=True)()
    early.script = late.script = script
    trainer = make_trainer(late, early, **arguments)
    run(trainer, module(script, automatic))
    return script.lines


def expected(text: str) -> list[str]:
    """A line ``AMZ hook details`` stands for one call of each owner, in that order."""
    lines = []
    for line in text.strip().splitlines():
        owners, _, rest = line.strip().partition(" ")
        lines += [f"{owner} {rest}" for owner in owners]
    return lines


VALIDATION = """
    AMZ on_validation_start
    AMZ on_validation_epoch_start
    AMZ on_validation_batch_start 0 0
    M validation_step 0
    AMZ on_validation_batch_end 0 0
    AMZ on_validation_batch_start 1 0
    M validation_step 1
    AMZ on_validation_batch_end 1 0
    AMZ on_validation_epoch_end
    AMZ on_validation_end
"""

FIT = f"""
    M configure_callbacks
    M prepare_data
    AMZ setup fit
    M configure_model
    M configure_optimizers
    AMZ on_fit_start
    AMZ on_sanity_check_start
    AMZ on_validation_start
    AMZ on_validation_epoch_start
    AMZ on_validation_batch_start 0 0
    M validation_step 0
    AMZ on_validation_batch_end 0 0
    AMZ on_validation_epoch_end
    AMZ on_validation_end
    AMZ on_sanity_check_end
    AMZ on_train_start

    AMZ on_train_epoch_start
    AMZ on_train_batch_start 0
    AMZ on_before_zero_grad
    M optimizer_zero_grad 0 0
    M training_step 0
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_train_batch_end 0
    AMZ on_train_batch_start 1
    M training_step 1
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    M lr_scheduler_step
    AMZ on_train_batch_end 1
    AMZ on_train_batch_start 2
    AMZ on_before_zero_grad
    M optimizer_zero_grad 0 2
    M training_step 2
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    M lr_scheduler_step
    AMZ on_train_batch_end 2
    {VALIDATION}
    AMZ on_train_epoch_end
    M lr_scheduler_step

    AMZ on_train_epoch_start
    AMZ on_train_batch_start 0
    AMZ on_before_zero_grad
    M optimizer_zero_grad 1 0
    M training_step 0
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_train_batch_end 0
    AMZ on_train_batch_start 1
    M training_step 1
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    M lr_scheduler_step
    AMZ on_train_batch_end 1
    AMZ on_train_batch_start 2
    AMZ on_before_zero_grad
    M optimizer_zero_grad 1 2
    M training_step 2
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    M lr_scheduler_step
    AMZ on_train_batch_end 2
    {VALIDATION}
    AMZ on_train_epoch_end
    M lr_scheduler_step

    AMZ on_train_end
    AMZ on_fit_end
    AMZ teardown fit
"""


def without_blank_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


def test_order_of_a_fit() -> None:
    """Two epochs of three micro-batches, two in an update; a sanity check of one batch, validation on two."""
    lines = noted(
        lambda trainer, module: trainer.fit(module, tiny_loader(12), tiny_loader(8)),
        Scheduled,
        max_epochs=2,
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
    )
    assert lines == expected(without_blank_lines(FIT))


MANUAL = """
    M configure_callbacks
    M prepare_data
    AMZ setup fit
    M configure_model
    M configure_optimizers
    AMZ on_fit_start
    AMZ on_train_start
    AMZ on_train_epoch_start
    AMZ on_train_batch_start 0
    M training_step 0
    AMZ on_before_backward
    AMZ on_after_backward
    AMZ on_before_optimizer_step
    AMZ on_train_batch_end 0
    AMZ on_train_epoch_end
    AMZ on_train_end
    AMZ on_fit_end
    AMZ teardown fit
"""


def test_order_of_manual_optimization() -> None:
    lines = noted(lambda trainer, module: trainer.fit(module, tiny_loader(4)), automatic=False)
    assert lines == expected(MANUAL)


def evaluation(stage: str, name: str) -> str:
    return f"""
    M configure_callbacks
    M prepare_data
    AMZ setup {stage}
    M configure_model
    AMZ on_{name}_start
    AMZ on_{name}_epoch_start
    AMZ on_{name}_batch_start 0 0
    M {name}_step 0
    AMZ on_{name}_batch_end 0 0
    AMZ on_{name}_batch_start 1 0
    M {name}_step 1
    AMZ on_{name}_batch_end 1 0
    AMZ on_{name}_epoch_end
    AMZ on_{name}_end
    AMZ teardown {stage}
    """


@pytest.mark.parametrize("stage, name", [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_order_of_an_evaluation(stage: str, name: str) -> None:
    lines = noted(lambda trainer, module: getattr(trainer, stage)(module, tiny_loader(8)))
    assert lines == expected(evaluation(stage, name))


@pytest.mark.parametrize("stage, name", [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_loaders_number_goes_to_the_hooks(stage: str, name: str) -> None:
    class Several(NotingModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

    loaders = [tiny_loader(8), tiny_loader(4)]
    lines = noted(lambda trainer, module: getattr(trainer, stage)(module, loaders), Several)
    starts = [line for line in lines if line.startswith(f"M on_{name}_batch_start")]
    assert starts == [f"M on_{name}_batch_start {place}" for place in ("0 0", "1 0", "0 1")]


def test_an_error_in_a_step_ends_with_on_exception_and_teardown() -> None:
    class Failing(NotingModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    def run(trainer: Any, module: Any) -> None:
        with pytest.raises(KeyError, match="mine"):
            trainer.fit(module, tiny_loader(4))

    lines = noted(run, Failing)
    assert lines[-5:] == expected("AZ on_exception\nAMZ teardown fit")


# ------------------------------------------------------------------------------------------------------- who is called


def test_an_idle_callback_is_in_no_tuple() -> None:
    trainer, bare = make_trainer(*(Callback() for _ in range(10))), make_trainer()
    trainer.fit(TinyModule(), tiny_loader(4))
    bare.fit(TinyModule(), tiny_loader(4))
    assert not any(trainer.hooks.owners.values())
    for name in HOOKS:
        assert len(getattr(trainer.hooks, name)) == len(getattr(bare.hooks, name)), name


def test_callbacks_come_in_their_order_those_that_run_last_after_the_module() -> None:
    calls: list[str] = []

    def callback(name: str, last: bool) -> Callback:
        def on_train_start(self: Any, trainer: Any, module: Any) -> None:
            calls.append(name)

        return type(name, (Callback,), {"on_train_start": on_train_start, "runs_last": last})()

    class Module(TinyModule):
        def on_train_start(self) -> None:
            calls.append("module")

    trainer = make_trainer(callback("c", True), callback("a", False), callback("d", True), callback("b", False))
    trainer.fit(Module(), tiny_loader(4))
    assert calls == ["a", "b", "module", "c", "d"]


def test_a_hook_set_on_the_object_counts() -> None:
    module, calls = TinyModule(), []
    module.on_train_start = lambda: calls.append("module")
    callback = Callback()
    callback.on_train_start = lambda trainer, module: calls.append("callback")
    make_trainer(callback).fit(module, tiny_loader(4))
    assert calls == ["callback", "module"]


def test_hooks_without_the_loaders_number_work_with_one_loader_only() -> None:
    class Short(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", 1.0)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = batch_idx

    module = Short()
    make_trainer().validate(module, tiny_loader(8))
    assert module.seen == 1
    with pytest.raises(HookError, match=r"Short.on_validation_batch_end must take dataloader_idx.*def on_validation_batch_end"):
        make_trainer().validate(module, [tiny_loader(8), tiny_loader(8)])


def test_what_hooks_get() -> None:
    seen: dict[str, Any] = {}

    class Looking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen["outputs"] = outputs
            seen["batch"] = batch

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen["optimizer"] = optimizer

        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            seen["loss"] = loss

    class Returning(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "extra": "kept"}

    for module in (TinyModule(), Returning()):
        trainer = make_trainer(Looking())
        trainer.fit(module, tiny_loader(4))
        assert seen["optimizer"] is trainer.optimizers[0]
        assert isinstance(seen["optimizer"], torch.optim.SGD)
        assert seen["loss"].grad_fn is not None
        assert not seen["outputs"]["loss"].requires_grad
        assert float(seen["outputs"]["loss"]) == float(seen["loss"].detach())
        assert [tuple(part.shape) for part in seen["batch"]] == [(4, 4), (4, 1)]
    assert seen["outputs"]["extra"] == "kept"


# ------------------------------------------------------------------------------------------------------------- refused


def callback_with(**methods: Any) -> Callback:
    return type("Mine", (Callback,), methods)()


def module_with(**methods: Any) -> TrainModule:
    return type("Mine", (TinyModule,), methods)()


def nothing(self: Any, *arguments: Any) -> None: ...


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_what_lightning_removed_or_never_calls_is_an_error_with_the_replacement(name: str) -> None:
    with pytest.raises(HookError, match=rf"Mine.{name} is never called.*{re.escape(REMOVED[name])}"):
        check_module(module_with(**{name: nothing}), TrainModule)
    with pytest.raises(HookError, match=rf"Mine.{name} is never called"):
        check_callback(callback_with(**{name: nothing}))


def test_no_hook_is_listed_as_removed() -> None:
    assert not set(REMOVED) & set(HOOKS)
    assert not any(hasattr(TrainModule, name) or hasattr(Callback, name) for name in REMOVED)
    for name, replacement in REMOVED.items():
        assert replacement.strip(), name


@pytest.mark.parametrize(
    "name, meant",
    [
        ("on_train_batch_strat", "on_train_batch_start"),
        ("on_training_epoch_end", None),
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_validation_epochend", "on_validation_epoch_end"),
        ("on_before_optimiser_step", "on_before_optimizer_step"),
        ("setups", "setup"),
        ("on_fit_ends", "on_fit_end"),
        ("load_state_dicts", "load_state_dict"),
    ],
)
def test_a_misspelt_hook_of_a_callback(name: str, meant: str | None) -> None:
    callback = callback_with(**{name: nothing})
    if meant is None:  # three edits and more: the user's own business
        check_callback(callback)
        return
    with pytest.raises(HookError, match=f"Did you mean '{meant}'"):
        check_callback(callback)
    with pytest.raises(HookError, match=f"Did you mean '{meant}'"):
        make_trainer(callback)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("trainig_step", "training_step"),
        ("validation_steps", "validation_step"),
        ("configure_optimisers", "configure_optimizers"),
        ("train_data_loader", "train_dataloader"),
        ("val_dataloaders", "val_dataloader"),
        ("on_train_end_", "on_train_end"),
        ("batch_weights", "batch_weight"),
    ],
)
def test_a_misspelt_method_of_a_module(name: str, meant: str) -> None:
    with pytest.raises(HookError, match=f"Mine.{name}.*Did you mean '{meant}'"):
        make_trainer().fit(module_with(**{name: nothing}), tiny_loader(4))


def test_a_hook_of_callbacks_only_in_a_module() -> None:
    with pytest.raises(HookError, match=r"Mine.on_exception is never called: only callbacks have this hook. Fix: class"):
        check_module(module_with(on_exception=nothing), TrainModule)


@pytest.mark.parametrize(
    "name", ["step", "loss_of", "encode", "on_click", "on_token", "test", "generate", "_training_steps", "shared_step", "fit"]
)
def test_methods_of_the_users_own_are_his_business(name: str) -> None:
    check_module(module_with(**{name: nothing}), TrainModule)
    check_callback(callback_with(**{name: nothing}))


def test_a_mixin_is_looked_at_and_a_layer_is_not() -> None:
    class Mixin:
        def on_train_epoch_strt(self) -> None: ...

    class Mixed(Mixin, TinyModule): ...

    with pytest.raises(HookError, match="Mixin.on_train_epoch_strt"):
        check_module(Mixed(), TrainModule)

    class Layer(nn.Linear):
        def training_steps(self) -> None: ...

    module = TinyModule()
    module.layer = Layer(4, 1)
    make_trainer().fit(module, tiny_loader(4))


@pytest.mark.parametrize(
    "method",
    [
        lambda self, trainer, module: None,
        lambda self, trainer, module, batch: None,
        lambda self, trainer, module, outputs, batch, batch_idx, more: None,
        lambda self, trainer, module, outputs, batch, batch_idx, *, more: None,
    ],
)
def test_a_hook_that_cannot_be_called(method: Any) -> None:
    callback = callback_with(on_train_batch_end=method)
    with pytest.raises(
        HookError, match=r"Expected: def on_train_batch_end\(self, trainer, module, outputs, batch, batch_idx\)"
    ):
        make_trainer(callback)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, trainer, pl_module, outputs, batch, batch_idx: None,
        lambda self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0: None,
        lambda self, *arguments: None,
        lambda self, trainer, module, *rest, **more: None,
    ],
)
def test_a_hook_that_can_be_called(method: Any) -> None:
    make_trainer(callback_with(on_train_batch_end=method)).fit(TinyModule(), tiny_loader(4))


def test_a_modules_hook_that_cannot_be_called() -> None:
    module = module_with(on_train_batch_start=lambda self, batch: None)
    with pytest.raises(HookError, match=r"Expected: def on_train_batch_start\(self, batch, batch_idx\)"):
        make_trainer().fit(module, tiny_loader(4))


@pytest.mark.parametrize("name", ["training_step", "validation_step", "test_step", "predict_step"])
def test_a_step_that_cannot_be_called(name: str) -> None:
    module = module_with(**{name: lambda self, a, b, c, d, e: None})
    stage = {"training_step": "fit", "validation_step": "validate", "test_step": "test", "predict_step": "predict"}[name]
    with pytest.raises(HookError, match=rf"Mine.{name} cannot be called. Expected: def {name}\(self, batch, batch_idx"):
        getattr(make_trainer(), stage)(module, tiny_loader(4))


def test_a_step_may_take_the_batch_only() -> None:
    module = module_with(
        training_step=lambda self, batch: self.loss(batch), validation_step=lambda self, batch: self.log("x", 2.0)
    )
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(4), tiny_loader(4))
    assert float(trainer.callback_metrics["x"]) == 2.0


@pytest.mark.parametrize("thing", [Callback, object(), "EarlyStopping", lambda: None])
def test_what_is_no_callback(thing: Any) -> None:
    with pytest.raises(HookError, match=r"must hold Callback objects|make an instance: Callback\(\)"):
        make_trainer(thing)


# ---------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    "returned, words",
    [
        (lambda loss: loss.expand(3), ["scalar loss", "shape (3,)", "return loss.mean()"]),
        (lambda loss: loss.detach(), ["no graph", ".detach()"]),
        (lambda loss: loss.item(), ["must return the mean loss", "float"]),
        (lambda loss: {"Loss": loss}, ["under 'loss'", "['Loss']"]),
        (lambda loss: {"loss": loss.item()}, ["outputs['loss']"]),
        (lambda loss: [loss], ["must return the mean loss", "list"]),
        (lambda loss: "loss", ["must return the mean loss", "'loss' (str)"]),
    ],
)
def test_a_loss_that_cannot_be_trained_on(returned: Any, words: list[str]) -> None:
    module = module_with(training_step=lambda self, batch, batch_idx: returned(self.loss(batch)))
    with pytest.raises(LossError) as caught:
        make_trainer().fit(module, tiny_loader(4))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: loss[None], lambda loss: {"loss": loss}])
def test_a_loss_that_can(returned: Any) -> None:
    module = module_with(training_step=lambda self, batch, batch_idx: returned(self.loss(batch)))
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(8))
    assert trainer.global_step == 2
