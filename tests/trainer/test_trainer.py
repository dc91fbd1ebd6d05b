"""Whole runs: modules, loaders and data modules, and the attributes of the Trainer before, during and after a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Callback, CombinedLoader, DataModule, Strategy, Trainer, TrainModule
from trainkit.errors import (
    ConfigurationError,
    DataError,
    MissingMethodError,
    ModuleError,
)

# ------------------------------------------------------------------------------------------------------ modules and data


def test_a_module_learns() -> None:
    module = TinyModule()
    make_trainer(max_epochs=60).fit(module, tiny_loader(shuffle=True))
    weight = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    torch.testing.assert_close(module.layer.weight.detach(), weight, atol=1e-3, rtol=0)


def test_loaders_of_the_module() -> None:
    class Own(TinyModule):
        def train_dataloader(self) -> DataLoader:
            return tiny_loader()

        def val_dataloader(self) -> list[DataLoader]:
            return [tiny_loader(8)]

    trainer = make_trainer()
    trainer.fit(Own())
    assert (trainer.global_step, trainer.num_val_batches) == (4, [2])
    trainer.fit(Own(), tiny_loader(8), tiny_loader(4))  # loaders passed to fit override them
    assert (trainer.global_step, trainer.num_val_batches) == (2, [1])


class Data(DataModule):
    """Records the calls of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.samples = 8

    def train_dataloader(self) -> DataLoader:
        self.calls.append("train_dataloader")
        return tiny_loader(self.samples)

    def val_dataloader(self) -> DataLoader:
        self.calls.append("val_dataloader")
        return tiny_loader(self.samples)

    def test_dataloader(self) -> DataLoader:
        self.calls.append("test_dataloader")
        return tiny_loader(self.samples)

    predict_dataloader = test_dataloader

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_data_module(as_keyword: bool) -> None:
    data, trainer = Data(), make_trainer()
    assert data.trainer is None
    if as_keyword:
        trainer.fit(TinyModule(), datamodule=data)
    else:
        trainer.fit(TinyModule(), data)
    assert data.calls == ["prepare_data", "setup fit", "train_dataloader", "val_dataloader", "teardown fit"]
    assert (trainer.global_step, trainer.datamodule, data.trainer) == (2, data, trainer)
    for stage, loader in (("validate", "val_dataloader"), ("test", "test_dataloader"), ("predict", "test_dataloader")):
        data.calls.clear()
        getattr(trainer, stage)(TinyModule(), datamodule=data)
        assert data.calls == ["prepare_data", f"setup {stage}", loader, f"teardown {stage}"]


def test_a_data_modules_loaders_go_before_the_modules() -> None:
    class Own(TinyModule):
        def train_dataloader(self) -> DataLoader:
            return tiny_loader(16)

        def val_dataloader(self) -> DataLoader:
            return tiny_loader(16)

    class Half(DataModule):
        def train_dataloader(self) -> DataLoader:
            return tiny_loader(4)

    trainer = make_trainer()
    trainer.fit(Own(), datamodule=Half())
    assert (trainer.global_step, trainer.num_val_batches) == (1, [4])


@pytest.mark.parametrize(
    ("loaders", "batches"),
    [
        ({"a": tiny_loader(16), "b": tiny_loader(8)}, 4),
        ([tiny_loader(16), tiny_loader(8)], 4),
        (CombinedLoader({"a": tiny_loader(16), "b": tiny_loader(8)}, mode="min_size"), 2),
        (CombinedLoader({"a": tiny_loader(16), "b": tiny_loader(8)}, mode="sequential"), 6),
    ],
)
def test_several_training_loaders(loaders: Any, batches: int) -> None:
    class Several(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if isinstance(batch, dict):
                return self.loss(batch["a"]) + self.loss(batch["b"])
            return self.loss(batch) if isinstance(batch[0], Tensor) else self.loss(batch[0]) + self.loss(batch[1])

    trainer = make_trainer()
    trainer.fit(Several(), loaders)
    assert trainer.global_step == trainer.num_training_batches == batches
    assert trainer.train_dataloader is getattr(loaders, "iterables", loaders)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda t: t.fit(nn.Linear(2, 2), tiny_loader()), ModuleError, "expected a TrainModule, received Linear.*Accelerator"),
        (lambda t: t.fit(TinyModule, tiny_loader()), ModuleError, r"make an instance: TinyModule\(\)"),
        (lambda t: t.fit(TinyModule()), MissingMethodError, r"fit needs training data: trainer.fit\(module, DataLoader"),
        (lambda t: t.fit(TinyModule(), tiny_loader(), datamodule=Data()), ConfigurationError, "both given"),
        (lambda t: t.fit(TinyModule(), val_dataloaders=tiny_loader(), datamodule=Data()), ConfigurationError, "both given"),
        (lambda t: t.validate(TinyModule(), tiny_loader(), datamodule=Data()), ConfigurationError, "both given"),
        (lambda t: t.fit(TinyModule(), datamodule=object()), DataError, "datamodule must be a DataModule, not object"),
        (lambda t: t.fit(TinyModule(), datamodule=Data), DataError, r"make an instance: Data\(\)"),
        (lambda t: t.fit(TrainModule(), tiny_loader()), MissingMethodError, "has no training_step. Define: def training_step"),
    ],
)
def test_what_cannot_be_run(call: Any, error: type[Exception], words: str) -> None:
    trainer = make_trainer()
    with pytest.raises(error, match=words):
        call(trainer)
    assert trainer.stage is None
    trainer.fit(TinyModule(), tiny_loader())


def test_a_module_without_super_init() -> None:
    class Forgetful(TinyModule):
        def __init__(self) -> None:
            self.learning_rate = 0.1

    with pytest.raises(ModuleError, match=r"super\(\).__init__\(\)"):
        make_trainer().fit(Forgetful(), tiny_loader())


# -------------------------------------------------------------------------------------------- attributes and metrics


def test_before_a_run() -> None:
    trainer = make_trainer(max_steps=5, accumulate_grad_batches=4)
    assert (trainer.global_step, trainer.current_epoch, trainer.num_training_batches) == (0, 0, 0)
    assert (trainer.num_val_batches, trainer.num_sanity_val_batches, trainer.optimizers) == ([], [], [])
    assert (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics) == ({}, {}, {})
    assert (trainer.stage, trainer.should_stop, trainer.sanity_checking, trainer.is_global_zero) == (None, False, False, True)
    assert (trainer.world_size, trainer.logger, trainer.loggers, trainer.accumulate_grad_batches) == (1, None, [], 4)
    assert (trainer.max_steps, trainer.max_epochs, trainer.train_dataloader, trainer.val_dataloaders) == (5, 1, None, None)
    assert trainer.model is None
    with pytest.raises(ModuleError, match="has run no module yet"):
        trainer.lightning_module


def test_during_and_after_a_run() -> None:
    seen: dict[str, Any] = {}

    class Looking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen["module"] = module.trainer is trainer, module.global_step, module.current_epoch, trainer.stage
            seen["loggers"] = module.logger is trainer.logger is trainer.loggers[0], module.loggers == trainer.loggers

    loader, val = tiny_loader(), tiny_loader(8)
    trainer = make_trainer(Looking(), logger=Memory(), max_epochs=2)
    module = TinyModule()
    trainer.fit(module, loader, val)
    assert seen["module"] == (True, 8, 1, "fit")
    assert seen["loggers"] == (True, True)
    assert trainer.model is trainer.lightning_module is module
    assert trainer.train_dataloader is loader
    assert trainer.val_dataloaders is val
    assert trainer.device == torch.device("cpu")
    assert isinstance(trainer.strategy, Strategy)
    assert trainer.log_every_n_steps == 50


def test_metrics_of_a_fit() -> None:
    class Logging(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("both", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
            self.log("hidden", 1.0, logger=False)
            return self.loss(batch)

    logger = Memory()
    trainer = make_trainer(logger=logger, log_every_n_steps=2)
    trainer.fit(Logging(), tiny_loader())
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "both": 1.5,
        "both_step": 3.0,
        "both_epoch": 1.5,
        "hidden": 1.0,
    }
    assert trainer.progress_bar_metrics == {"both_step": 3.0, "both_epoch": 1.5}
    assert trainer.logged_metrics == {"both_step": 3.0, "both_epoch": 1.5}
    assert logger.rows == [
        (2, {"both_step": 1.0, "epoch": 0}),
        (4, {"both_step": 3.0, "epoch": 0}),
        (4, {"both_epoch": 1.5, "epoch": 0}),
    ]


def test_a_run_inside_a_run_needs_a_trainer_of_its_own() -> None:
    """With another Trainer, the inner run does not affect the outer one."""

    class Inner(Callback):
        def __init__(self, trainer: Trainer | None) -> None:
            self.trainer = trainer

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                (self.result,) = (self.trainer or trainer).validate(module, tiny_loader(8), verbose=False)

    with pytest.raises(ConfigurationError, match=r"is running 'fit'.*Trainer\(...\).validate\(module"):
        make_trainer(Inner(None)).fit(TinyModule(), tiny_loader())

    module, twin, inner = TinyModule(), TinyModule(), Inner(make_trainer(seed=9))
    twin.load_state_dict(module.state_dict())
    trainer = make_trainer(inner)
    trainer.fit(module, tiny_loader())
    make_trainer().fit(twin, tiny_loader())
    assert set(inner.result) == {"val_loss"}
    assert module.trainer is trainer
    assert set(trainer.callback_metrics) == {"train_loss"}
    assert same(parameters_of(module), parameters_of(twin))


def test_what_is_logged_last_in_an_epoch_belongs_to_it() -> None:
    class Late(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            assert "of_module" in trainer.callback_metrics
            self.log("late", float(trainer.current_epoch))

    class Logging(TinyModule):
        def on_train_epoch_end(self) -> None:
            self.log("of_module", 1.0)

    logger = Memory()
    make_trainer(Late(), logger=logger, max_epochs=3).fit(Logging(), tiny_loader())
    assert logger.of("late") == {4: 0.0, 8: 1.0, 12: 2.0}
    assert [row["epoch"] for _, row in logger.rows if "late" in row] == [0, 1, 2]


def test_hyperparameters_are_logged() -> None:
    class Keeping(TinyModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    class KeepingData(Data):
        def __init__(self, fold: int = 7) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = Memory()
    make_trainer(logger=logger).fit(Keeping(5), datamodule=KeepingData())
    assert logger.hyperparameters == {"width": 5, "fold": 7}
