"""Invalid modules and data are rejected before the run begins: the error names the fix, and the next run works.

`test_hooks*.py` and `test_optimizer_config.py` test losses, hooks and `configure_optimizers` in detail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Callback, CombinedLoader, DataModule, Trainer, TrainModule
from trainkit.errors import (
    ConfigurationError,
    DataError,
    EmptyLoaderError,
    HookError,
    MissingMethodError,
    ModuleError,
    NotAvailableError,
    OptimizerError,
    TrainkitError,
)
from trainkit.loggers import CSVLogger
from trainkit.module.hook_checks import REMOVED, WARNED


class Witness(Callback):
    """Records which stages a run has reached."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen.append("setup")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen.append("train")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.seen.append("validation")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen.append("teardown")


def refused(kind: type[TrainkitError], run: Callable[[Trainer], Any], **arguments: Any) -> tuple[str, list[str]]:
    """Check that `run(trainer)` raises this error before training. Returns the message and the stages that the run reached."""
    witness = Witness()
    trainer = make_trainer(witness, logger=CSVLogger(), **arguments)
    files_before = set(Path.cwd().rglob("*"))
    random_before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with pytest.raises(kind) as caught:
        run(trainer)
    assert type(caught.value) is kind
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == random_before[1:]
    assert set(Path.cwd().rglob("*")) == files_before  # not even an empty folder
    assert trainer.stage is None
    assert witness.seen.count("teardown") == witness.seen.count("setup") or witness.seen == ["teardown"]
    seen = list(witness.seen)
    assert "train" not in seen
    good = TinyModule()  # the trainer can continue with valid input
    before = parameters_of(good)
    trainer.fit(good, tiny_loader(), tiny_loader())
    assert trainer.global_step == max(1, 4 // trainer.accumulate_grad_batches)
    assert not same(before, parameters_of(good))
    return str(caught.value), seen


def made(base: type = TinyModule, **members: Any) -> Any:
    return type("Mine", (base,), members)()


def nothing(*arguments: Any) -> None:
    """A method that does nothing."""


class NoInit(TinyModule):
    def __init__(self) -> None:
        self.rate = 0.1


class NoStep(TrainModule):
    def configure_optimizers(self) -> Any:
        return None


class NoOptimizer(TrainModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


# The module


MODULES: dict[str, tuple[Callable[[], Any], type[TrainkitError], list[str]]] = {
    "a class": (lambda: TinyModule, ModuleError, ["received type", "Did you forget to make an instance: TinyModule()?"]),
    "nothing": (lambda: None, ModuleError, ["expected a TrainModule, received NoneType"]),
    "a torch module": (lambda: nn.Linear(2, 1), ModuleError, ["received Linear", "own training loop with trainkit"]),
    "without super().__init__()": (NoInit, ModuleError, ["NoInit.__init__ must begin with super().__init__()"]),
    "no training_step": (
        NoStep,
        MissingMethodError,
        ["NoStep has no training_step", "def training_step(self, batch, batch_idx)"],
    ),
    "no configure_optimizers": (
        NoOptimizer,
        MissingMethodError,
        ["NoOptimizer has no configure_optimizers", "return torch.optim.AdamW(self.parameters(), lr=1e-3)", "return None"],
    ),
    "optimizer_idx": (
        lambda: made(training_step=lambda self, batch, batch_idx, optimizer_idx: None),
        HookError,
        ["Expected: def training_step(self, batch, batch_idx)", "optimizer_idx)", "self.automatic_optimization = False"],
    ),
    "dataloader_iter": (
        lambda: made(training_step=lambda self, dataloader_iter, batch_idx: None),
        HookError,
        ["Mine.training_step takes dataloader_iter and other arguments", "def training_step(self, dataloader_iter)"],
    ),
    "a step that takes nothing": (
        lambda: made(validation_step=lambda self: None),
        HookError,
        ["Expected: def validation_step(self, batch, batch_idx, dataloader_idx)", "received: def validation_step(self)"],
    ),
    "a hook that takes nothing": (
        lambda: made(on_train_batch_start=lambda self: None),
        HookError,
        ["Expected: def on_train_batch_start(self, batch, batch_idx); received: def on_train_batch_start(self)"],
    ),
    "setup without a stage": (lambda: made(setup=lambda self: None), HookError, ["Expected: def setup(self, stage)"]),
    "configure_optimizers with an argument": (
        lambda: made(configure_optimizers=lambda self, x: None),
        HookError,
        ["Expected: def configure_optimizers(self); received: def configure_optimizers(self, x)"],
    ),
    "lr_scheduler_step of Lightning 1": (
        lambda: made(lr_scheduler_step=lambda self, scheduler, optimizer_idx, metric: None),
        HookError,
        ["Expected: def lr_scheduler_step(self, scheduler, metric)"],
    ),
    "a misspelt hook": (
        lambda: made(on_train_epoch_ends=nothing),
        HookError,
        ["Mine.on_train_epoch_ends is never called", "Did you mean 'on_train_epoch_end'?", "rename it"],
    ),
    "a hook of callbacks": (
        lambda: made(on_exception=nothing),
        HookError,
        ["only callbacks have this hook", "class Mine(Callback)"],
    ),
    "a callback that is none": (
        lambda: made(configure_callbacks=lambda self: [Callback]),
        HookError,
        ["callbacks must contain Callback objects", "Did you forget to make an instance: Callback()?"],
    ),
}


@pytest.mark.parametrize("case", list(MODULES))
def test_a_module_that_cannot_be_trained(case: str) -> None:
    make, kind, words = MODULES[case]
    module = make()
    message, seen = refused(kind, lambda trainer: trainer.fit(module, tiny_loader()))
    for word in words:
        assert word in message
    assert "setup" not in seen


@pytest.mark.parametrize("name", sorted(set(REMOVED) - WARNED))
def test_an_override_of_lightning_that_is_never_called(name: str) -> None:
    module = made(**{name: nothing})
    message, seen = refused(HookError, lambda trainer: trainer.fit(module, tiny_loader()))
    assert message == f"Mine.{name} is never called by trainkit. Use {REMOVED[name]} instead."
    assert seen == []
    with pytest.raises(HookError, match=rf"Mine\.{name} is never called by trainkit\. Use "):
        Trainer(callbacks=made(Callback, **{name: nothing}))


@pytest.mark.parametrize("verb, step", [("validate", "validation_step"), ("test", "test_step")])
def test_an_evaluation_needs_its_step(verb: str, step: str) -> None:
    message, seen = refused(MissingMethodError, lambda trainer: getattr(trainer, verb)(NoStep(), tiny_loader()))
    assert message == f"NoStep has no {step}. Define: def {step}(self, batch, batch_idx): ..."
    assert seen == []


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_no_data(verb: str) -> None:
    module = TinyModule()
    message, _ = refused(MissingMethodError, lambda trainer: getattr(trainer, verb)(module))
    assert f"{verb} needs " in message
    assert f"trainer.{verb}(module, DataLoader(...)), or define" in message


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_the_data_of_an_earlier_run_is_not_that_of_this_one(verb: str) -> None:
    module, trainer = TinyModule(), make_trainer()
    getattr(trainer, verb)(module, tiny_loader())
    with pytest.raises(MissingMethodError, match=f"{verb} needs "):
        getattr(trainer, verb)(module)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_nothing_has_been_run_yet(verb: str) -> None:
    message, _ = refused(NotAvailableError, lambda trainer: getattr(trainer, verb)(dataloaders=tiny_loader()))
    assert "this Trainer has run no module yet. Call trainer.fit(module)" in message


# The data


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()


def empty(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(3 if options else 0, 4)), batch_size=4, **options)


LOADERS: dict[str, tuple[Any, type[TrainkitError], list[str]]] = {
    "an empty dataset": (empty, EmptyLoaderError, ["loader has no batch: its dataset is empty"]),
    "less than a batch": (
        lambda: empty(drop_last=True),
        EmptyLoaderError,
        ["its 3 samples do not fill one batch of 4, and drop_last=True drops the rest"],
    ),
    "a dataset": (
        lambda: TensorDataset(torch.zeros(4, 4)),
        DataError,
        ["not TensorDataset", "DataLoader(dataset, batch_size=32"],
    ),
    "a number": (lambda: 5, DataError, ["not int"]),
    "a class": (lambda: DataLoader, DataError, ["not type"]),
}


@pytest.mark.parametrize("verb", ["fit", "fit with validation", "validate", "test", "predict"])
@pytest.mark.parametrize("case", list(LOADERS))
def test_a_loader_that_gives_nothing(case: str, verb: str) -> None:
    make, kind, words = LOADERS[case]
    module = TinyModule()

    def run(trainer: Trainer) -> None:
        if verb == "fit with validation":
            trainer.fit(module, tiny_loader(), make())
        else:
            getattr(trainer, verb)(module, make())

    message, _ = refused(kind, run)
    for word in words:
        assert word in message


def test_one_loader_of_several_gives_nothing() -> None:
    module = TinyModule()
    message, _ = refused(EmptyLoaderError, lambda trainer: trainer.fit(module, {"a": tiny_loader(), "b": empty()}))
    assert message == "a loader inside a CombinedLoader has no batch. Remove it, or fill its dataset."
    refused(EmptyLoaderError, lambda trainer: trainer.fit(module, []))
    with pytest.raises(DataError, match="needs a loader, or a dict or list with at least one in it"):
        CombinedLoader({})


def test_a_step_must_tell_several_loaders_apart() -> None:
    module = TinyModule()
    message, _ = refused(HookError, lambda trainer: trainer.validate(module, [tiny_loader(), tiny_loader()]))
    assert "TinyModule.validation_step must take dataloader_idx, because there are several loaders" in message
    assert "def validation_step(self, batch, batch_idx, dataloader_idx)" in message


DATA_MODULES: dict[str, tuple[Callable[[], Any], type[TrainkitError], list[str]]] = {
    "a class": (
        lambda: Data,
        DataError,
        ["datamodule must be a DataModule, not type. Did you forget to make an instance: Data()?"],
    ),
    "a loader": (tiny_loader, DataError, ["datamodule must be a DataModule, not DataLoader"]),
    "setup without a stage": (
        lambda: made(Data, setup=lambda self: None),
        HookError,
        ["Mine.setup cannot be called. Expected: def setup(self, stage); received: def setup(self)"],
    ),
    "a loader method with an argument": (
        lambda: made(Data, val_dataloader=lambda self, x: None),
        HookError,
        ["Expected: def val_dataloader(self)"],
    ),
    "a misspelt method": (
        lambda: made(Data, val_dataloaders=nothing),
        HookError,
        ["Mine.val_dataloaders is never called", "Did you mean 'val_dataloader'?"],
    ),
    "a hook that Lightning removed": (
        lambda: made(Data, on_hpc_load=nothing),
        HookError,
        ["Mine.on_hpc_load is never called by trainkit. Use on_load_checkpoint instead."],
    ),
    "without a training loader": (lambda: made(DataModule), MissingMethodError, ["define train_dataloader"]),
}


@pytest.mark.parametrize("case", list(DATA_MODULES))
def test_a_data_module_that_cannot_be_used(case: str) -> None:
    make, kind, words = DATA_MODULES[case]
    module, data = TinyModule(), make()
    message, _ = refused(kind, lambda trainer: trainer.fit(module, datamodule=data))
    for word in words:
        assert word in message


def test_loaders_and_a_data_module() -> None:
    module = TinyModule()
    for given in ({"train_dataloaders": tiny_loader()}, {"val_dataloaders": tiny_loader()}, {"train_dataloaders": Data()}):
        arguments = {**given, "datamodule": Data()}
        message, _ = refused(ConfigurationError, lambda trainer, a=arguments: trainer.fit(module, **a))
        assert message == "loaders and a datamodule were both given. Give one of them."


def test_data_is_not_prepared_for_a_module_that_cannot_be_trained() -> None:
    """`prepare_data` may take an hour, so the module is checked first."""
    prepared: list[int] = []
    data = made(Data, prepare_data=lambda self: prepared.append(1))
    for module in (NoStep(), NoOptimizer(), made(training_epoch_end=nothing), made(training_step=lambda self: None)):
        with pytest.raises(ModuleError):
            make_trainer().fit(module, data)
    assert prepared == []


# Errors that only the setup of the run can find


CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, Any], type[TrainkitError], list[str]]] = {
    "no optimizer": ({"configure_optimizers": lambda self: "adam"}, {}, OptimizerError, ["must return an optimizer", "'adam'"]),
    "an optimizer's class": (
        {"configure_optimizers": lambda self: torch.optim.SGD},
        {},
        OptimizerError,
        ["must return an optimizer"],
    ),
    "two empty lists": ({"configure_optimizers": lambda self: ([], [])}, {}, OptimizerError, ["must return an optimizer"]),
    "a scheduler's class": (
        {
            "configure_optimizers": lambda self: {
                "optimizer": torch.optim.SGD(self.parameters(), lr=0.1),
                "lr_scheduler": torch.optim.lr_scheduler.StepLR,
            }
        },
        {},
        OptimizerError,
        ["expected an object with step(), got <class"],
    ),
    "parameters of another module": (
        {"configure_optimizers": lambda self: torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1)},
        {},
        OptimizerError,
        ["SGD has 2 parameters that are not the module's (the first of shape (3, 2))", "Pass self.parameters() to it"],
    ),
    "a batch size that does not divide": ({}, {"global_batch_size": 6}, ConfigurationError, ["is not a multiple", "Use 8"]),
    "a limit that leaves nothing": ({}, {"limit_train_batches": 0.1}, ConfigurationError, ["leaves no batch", "at least 0.25"]),
    "a validation that never comes": (
        {},
        {"val_check_interval": 5},
        ConfigurationError,
        ["is more than the 4 training batches"],
    ),
    "accumulation by hand": (
        {"automatic_optimization": False},
        {"accumulate_grad_batches": 2},
        ConfigurationError,
        ["accumulate_grad_batches=2", "needs automatic optimization", "opt.step()"],
    ),
}


@pytest.mark.parametrize("case", list(CONFIGURED))
def test_what_the_set_up_finds(case: str) -> None:
    """The error is raised after the `setup` hooks and before training, and `teardown` is called."""
    members, arguments, kind, words = CONFIGURED[case]
    witness = Witness()
    trainer = make_trainer(witness, logger=CSVLogger(), **arguments)
    module = made(**members)
    before = parameters_of(module)
    with pytest.raises(kind) as caught:
        trainer.fit(module, tiny_loader(), tiny_loader())
    for word in words:
        assert word in str(caught.value)
    assert witness.seen == ["setup", "teardown"]
    assert same(before, parameters_of(module))
    assert not list(Path.cwd().iterdir())
    assert trainer.stage is None
