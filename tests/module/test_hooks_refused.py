"""Errors for methods that trainkit would never call or could not call, and for losses that cannot be trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.support import run_python
from torch import nn

from trainkit import Callback, DataModule, TrainModule
from trainkit.console import TrainkitWarning
from trainkit.errors import HookError, LossError
from trainkit.module.hook_checks import REMOVED, WARNED, check_callback, check_datamodule, check_module
from trainkit.module.hook_table import HOOKS


def callback_with(**methods: Any) -> Callback:
    return type("Mine", (Callback,), methods)()


def module_with(**methods: Any) -> TrainModule:
    return type("Mine", (TinyModule,), methods)()


def nothing(self: Any, *arguments: Any) -> None: ...


@pytest.mark.parametrize("name", sorted(set(REMOVED) - WARNED))
def test_what_lightning_removed_or_never_calls_is_an_error_with_the_replacement(name: str) -> None:
    with pytest.raises(HookError, match=rf"Mine.{name} is never called.*{re.escape(REMOVED[name])}"):
        check_module(module_with(**{name: nothing}), TrainModule)
    with pytest.raises(HookError, match=rf"Mine.{name} is never called"):
        check_callback(callback_with(**{name: nothing}))


ERRORS = """
    configure_sharded_model get_progress_bar_dict on_configure_sharded_model on_hpc_load on_hpc_save
    on_post_move_to_device tbptt_split_batch test_epoch_end test_step_end training_epoch_end
    training_step_end validation_epoch_end validation_step_end
""".split()  # noqa: SIM905 - shorter than a list


def test_what_would_train_or_restore_something_else_is_no_mere_warning() -> None:
    # if these methods were ignored, the run would train or restore something else: they are errors, not warnings
    assert sorted(set(REMOVED) - WARNED) == ERRORS


@pytest.mark.parametrize("name", sorted(WARNED))
def test_a_method_with_the_name_of_a_hook_that_lightning_had_is_a_warning(name: str) -> None:
    said = rf"Mine.{name} has the name of a hook of Keras, .*, which trainkit does not .*use {re.escape(REMOVED[name])} instead"
    for check, owner in (
        (check_callback, callback_with(**{name: nothing})),
        (lambda module: check_module(module, TrainModule), module_with(**{name: nothing})),
        (lambda data: check_datamodule(data, DataModule), type("Mine", (DataModule,), {name: nothing})()),
    ):
        with pytest.warns(TrainkitWarning, match=said):
            check(owner)


def test_a_method_of_that_name_that_the_users_code_calls() -> None:
    class Mine(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.ends = 0

        def on_epoch_end(self) -> None:
            self.ends += 1

        def on_train_epoch_end(self) -> None:
            self.on_epoch_end()

    module = Mine()
    with pytest.warns(TrainkitWarning, match="Mine.on_epoch_end has the name of a hook of Keras"):
        make_trainer(max_epochs=2).fit(module, tiny_loader(4))
    assert module.ends == 2  # called only by the user's code


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
        ("on_train_stta_t", "on_train_start"),
        ("on_excepitson", "on_exception"),
        ("on_fit_ends", "on_fit_end"),
        ("load_state_dicts", "load_state_dict"),
    ],
)
def test_a_misspelt_hook_of_a_callback(name: str, meant: str | None) -> None:
    callback = callback_with(**{name: nothing})
    if meant is None:  # three or more edits away from every hook: a method of the user
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
def test_other_user_methods_are_allowed(name: str) -> None:
    # users may add other methods, also with names such as step, test and fit
    check_module(module_with(**{name: nothing}), TrainModule)
    check_callback(callback_with(**{name: nothing}))


def test_a_mixin_is_looked_at_and_a_layer_is_not() -> None:
    # the check for misspelled hooks includes base classes of the module, but not its submodules
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
    # only instances of Callback are allowed as callbacks
    with pytest.raises(HookError, match=r"must contain Callback objects|make an instance: Callback\(\)"):
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
def test_valid_training_step_outputs(returned: Any) -> None:
    # training_step may return a scalar tensor, a tensor with one element, or a dict with 'loss'
    module = module_with(training_step=lambda self, batch, batch_idx: returned(self.loss(batch)))
    trainer = make_trainer()
    trainer.fit(module, tiny_loader(8))
    assert trainer.global_step == 2


# ----------------------------------------------------------------------------- methods with the name of a hook, almost


class Quiet(TinyModule):
    """Its methods are almost named like hooks, and it calls them itself, in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.build = lambda: self.configure_models()

    def configure_models(self) -> None:
        self.called.append("configure_models")

    def on_fit_start(self) -> None:
        self.build()

    def train_dataloader(self) -> Any:
        return self.train_dataloaders()[0]

    def train_dataloaders(self) -> Any:
        self.called.append("train_dataloaders")
        return [tiny_loader(4), self.val_dataloaders]

    def val_dataloaders(self) -> Any:  # named only by a method that is called
        raise AssertionError

    @staticmethod
    def training_steps(loss: Any) -> Any:
        return loss

    def validation_steps(self, loss: Any) -> Any:
        self.called.append("validation_steps")
        return loss

    @torch.no_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        [self.validation_steps(loss) for loss in [self.loss(batch)]]

    @property
    def mine(self) -> Any:
        return getattr(self, "test_steps")()  # noqa: B009 - as a program may choose what to call

    def test_steps(self) -> None: ...

    def training_epoch_end(self, outputs: Any) -> None:  # as in Lightning 1
        self.called.append("training_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.training_epoch_end([])


def test_methods_that_the_class_calls_itself_are_the_users() -> None:
    module = Quiet()
    trainer = make_trainer(num_sanity_val_steps=0)
    trainer.fit(module, val_dataloaders=tiny_loader(4))
    assert module.called == ["train_dataloaders", "configure_models", "validation_steps", "training_epoch_end"]
    assert trainer.global_step == 1


WAYS = {  # each compiles to other byte code in some version of Python
    "after an assignment": "x = 1; self.{0}()",
    "after another variable": "print(x, self.{0})",
    "in a comprehension": "[self.{0}() for _ in x]",
    "in a generator": "list(self.{0}() for _ in x)",
    "in a loop": "for _ in x: self.{0}()",
    "in a branch": "x and self.{0}()",
    "with super": "super().{0}()",
    "with super of Python 2": "super(type(self), self).{0}()",
    "after many names": "; ".join(f"x.a{number}" for number in range(300)) + "; self.{0}()",
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call_a_method_of_the_class(way: str) -> None:
    scope: dict[str, Any] = {"TinyModule": TinyModule}
    method = WAYS[way].format("configure_models")
    exec(f"class Mine(TinyModule):\n def on_fit_start(self, x=()):\n  {method}\n def configure_models(self): ...", scope)
    check_module(scope["Mine"](), TrainModule)


def test_the_same_for_callbacks_and_data_modules() -> None:
    class Counting(Callback):
        def on_train_starts(self) -> None: ...

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.on_train_starts()

    class Data(DataModule):
        def prepare_datas(self) -> None: ...

        def prepare_data(self) -> None:
            self.prepare_datas()

    check_callback(Counting())
    check_datamodule(Data(), DataModule)


class OnlyItself(TinyModule):
    def configure_models(self, depth: int = 0) -> None:
        if depth < 3:
            self.configure_models(depth + 1)


class OfTheTrainer(TinyModule):
    def val_dataloaders(self) -> None: ...

    def on_train_start(self) -> None:
        print(self.trainer.val_dataloaders, self.layer.weight)


class OfALayer(TinyModule):
    def configure_gradient_clippings(self) -> None: ...

    def on_train_start(self) -> None:
        self.layer.configure_gradient_clippings()


class EachOther(TinyModule):
    def validation_epoch_end(self, outputs: Any) -> None: ...

    def test_epoch_end(self, outputs: Any) -> None:  # no code calls it, so the other one is not called either
        self.validation_epoch_end(outputs)


class InAText(TinyModule):
    """Calls self.configure_models() in its text only."""

    def configure_models(self) -> None: ...

    def on_train_start(self) -> None:
        print("configure_models", {"configure_models": 1}, dict(configure_models=2))


@pytest.mark.parametrize("kind", [OnlyItself, OfTheTrainer, EachOther, InAText])
def test_methods_that_nobody_calls_are_errors(kind: type[TinyModule]) -> None:
    with pytest.raises(HookError, match=f"{kind.__name__}.* is never called"):
        check_module(kind(), TrainModule)


def test_a_method_that_other_code_calls_is_a_warning() -> None:
    """The function that is running, and a method of the same name of another object in the same file, may mean it."""

    class Mine(TinyModule):
        def on_validation_starts(self) -> int:
            return 1

    module = Mine()
    said = "Mine.on_validation_starts is not called by trainkit: .*Ignore this if test_a_method_that_other_code.* in test_hooks"
    with pytest.warns(TrainkitWarning, match=said):
        make_trainer().fit(module, tiny_loader(4))
    assert module.on_validation_starts() == 1
    with pytest.warns(TrainkitWarning, match="'configure_gradient_clipping'.*Ignore this if on_train_start in test_hooks"):
        check_module(OfALayer(), TrainModule)


PROGRAM = {
    "model.py": """
from helpers.runs.tiny import TinyModule

class Net(TinyModule):
    def configure_models(self):
        self.built = True

    def on_hpc_load(self):
        pass
""",
    "build.py": """
def build(model):
    model.configure_models()
    model.on_hpc_load()
    return model
""",
    "train.py": """
import logging, sys, warnings
from build import build
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer
from model import Net

make_trainer().fit(build(Net()), tiny_loader(4))
""",
}


def test_code_in_another_file_of_the_project(run_dir: Path) -> None:
    # a program of its own, because it is about the modules in the folder of a script
    for name, text in PROGRAM.items():
        Path(name).write_text(text)
    done = run_python("-u", "train.py")
    assert done.returncode == 0, done.stderr
    assert "Net.configure_models is not called by trainkit" in done.stderr
    assert "Net.on_hpc_load is not called by trainkit. Use on_load_checkpoint instead. Ignore this" in done.stderr
    assert "Ignore this if build in build.py means your own method" in done.stderr
    Path("build.py").write_text("def build(model):\n    return model\n")
    done = run_python("-u", "train.py")
    assert done.returncode == 1
    assert "HookError: Net.configure_models is never called" in done.stderr
