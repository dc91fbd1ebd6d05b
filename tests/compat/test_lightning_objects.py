"""Callbacks and loggers that derive from the real Lightning's classes run here; its modules and own callbacks are refused.

The classes are made here, under Lightning's names. `tests/moving_over/test_objects_of_lightning.py` has the real ones.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from helpers.lightning.stand_in import stand_in
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit import Callback, Trainer, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigurationError, DataError, HookError, ModuleError, TrainkitError
from trainkit.loggers import Logger
from trainkit.registry import adapt

VENDOR = stand_in.__module__  # A module that can be imported, as that of a vendor.
DOOR = "trainkit launch --as lightning script.py, or import trainkit.compat.lightning before all other imports"


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in(monkeypatch)


def vendors(base: type, **members: Any) -> Any:
    """An object of a class of another vendor."""
    return type("Vendors", (base,), {**members, "__module__": VENDOR})()


def fit(callbacks: Any = (), **options: Any) -> Trainer:
    trainer = make_trainer(*callbacks, **{"max_epochs": 2, **options})
    trainer.fit(TinyModule(), tiny_loader(4), tiny_loader(2))
    return trainer


# ------------------------------------------------------------------------------------------- callbacks


def counting(lightning: Any) -> Any:
    def state_dict(self: Any) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def on_train_batch_end(self: Any, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_save_checkpoint(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = f"after {self.batches}"

    def on_load_checkpoint(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]

    methods = [state_dict, load_state_dict, on_train_batch_end, on_save_checkpoint, on_load_checkpoint]
    return vendors(lightning.Callback, batches=0, state_key="of the vendor", **{one.__name__: one for one in methods})


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_hooks_of_a_callback_are_called(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def setup(self: Any, trainer: Any, pl_module: Any, **named: Any) -> None:  # Lightning passes stage by name
        seen.append((trainer, named))

    def on_validation_end(self: Any, trainer: Any, pl_module: Any) -> None:
        seen.append(sorted(trainer.callback_metrics))
        pl_module.log("of_vendor", 1.0)

    lightning = stand_in(monkeypatch, package)
    callback = vendors(lightning.Callback, setup=setup, on_validation_epoch_end=on_validation_end)
    trainer = fit([callback], max_epochs=1)
    assert seen == [(trainer, {"stage": "fit"}), ["train_loss", "val_loss"]]
    assert trainer.callback_metrics["of_vendor"] == 1
    assert trainer._hook_owners(TinyModule())["setup"] == ("Vendors",)
    assert trainer._hook_owners(TinyModule())["on_fit_end"].count("Vendors") == 0  # a hook that it does not define


def test_its_state_is_saved_and_restored(lightning: Any, tmp_path: Path) -> None:
    first, second = counting(lightning), counting(lightning)
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    fit([first], **options)
    trainer = make_trainer(second, max_epochs=3, **options)
    trainer.fit(TinyModule(), tiny_loader(4), tiny_loader(2), ckpt_path="auto")
    assert first.batches > 0
    assert second.note == f"after {first.batches}"
    assert second.batches == first.batches * 3 // 2


def test_an_adapter_looks_like_the_callback(lightning: Any) -> None:
    callback = counting(lightning)
    trainer = make_trainer(callback)
    (adapter,) = [one for one in trainer.callbacks if isinstance(one, type(callback))]
    assert isinstance(adapter, Callback)
    assert isinstance(adapter, lightning.Callback)
    assert adapter == callback
    assert callback in trainer.callbacks
    assert adapter != counting(lightning)
    adapter.batches = 7
    assert callback.batches == adapter.batches == 7
    assert adapter.state_key == "of the vendor"
    with pytest.raises(AttributeError, match=r"'Vendors' object has no attribute 'nothing'"):
        adapter.nothing
    twin = copy.deepcopy(adapter)
    assert isinstance(twin, Callback)
    assert twin.batches == 7
    assert twin != adapter
    trainer.callbacks.remove(callback)
    assert callback not in trainer.callbacks


def test_every_way_to_attach_one(lightning: Any) -> None:
    appended, assigned, configured = (counting(lightning) for _ in range(3))

    class Configuring(TinyModule):
        def configure_callbacks(self) -> Any:
            return vendors(lightning.Callback, on_fit_start=lambda self, trainer, module: setattr(configured, "batches", 3))

    trainer = make_trainer(max_epochs=1)
    trainer.callbacks = [assigned]
    trainer.callbacks.append(appended)
    trainer.fit(Configuring(), tiny_loader(4))
    assert assigned.batches == appended.batches > 0
    assert configured.batches == 3
    with pytest.raises(ConfigurationError, match="the same object twice"):
        make_trainer(appended, appended)


def test_one_that_saves_checkpoints_runs_last(lightning: Any) -> None:
    order: list[str] = []

    class Ordered(TinyModule):
        def on_train_end(self) -> None:
            order.append("module")

    def on_train_end(self: Any, trainer: Any, pl_module: Any) -> None:
        order.append("callback")

    for base in (lightning.Callback, lightning.Checkpoint):
        make_trainer(vendors(base, on_train_end=on_train_end), max_epochs=1).fit(Ordered(), tiny_loader(4))
    assert order == ["callback", "module", "module", "callback"]


def test_lightnings_own_callbacks_are_refused(lightning: Any) -> None:
    fix = (
        f"Fix: from trainkit.callbacks import EarlyStopping; or let lightning.pytorch be trainkit in the whole program: {DOOR}"
    )
    with pytest.raises(HookError, match=f"^EarlyStopping: this is lightning.pytorch's class, not trainkit's. .*{fix}"):
        make_trainer(lightning.EarlyStopping())
    with pytest.raises(HookError, match=f"^Vendors: its base class EarlyStopping is lightning.pytorch's, .*{fix}"):
        make_trainer(vendors(lightning.EarlyStopping))
    with pytest.raises(HookError, match="callbacks must contain Callback objects, not <class"):
        make_trainer(lightning.EarlyStopping)


def test_what_a_callback_reads_and_a_trainer_does_not_have(lightning: Any) -> None:
    def reads(self: Any, trainer: Any, pl_module: Any) -> None:
        trainer._checkpoint_connector.restore()

    def own(self: Any, trainer: Any, pl_module: Any) -> None:
        self.nothing

    with pytest.raises(
        HookError, match=r"Vendors.on_fit_start was written for Lightning's Trainer.*no '_checkpoint_connector'"
    ):
        fit([vendors(lightning.Callback, on_fit_start=reads)])
    with pytest.raises(AttributeError, match="'Vendors' object has no attribute 'nothing'"):
        fit([vendors(lightning.Callback, on_fit_start=own)])


def test_a_hook_that_cannot_be_called(lightning: Any) -> None:
    with pytest.raises(
        HookError, match=r"Vendors.on_fit_start cannot be called. Expected: def on_fit_start\(trainer, module\)"
    ):
        make_trainer(vendors(lightning.Callback, on_fit_start=lambda self: None))


# ------------------------------------------------------------------------------------------- loggers


class CallsOfLogger:
    """The methods of a vendor's logger, which write down their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.opened = False

    name = "experiments"

    @property
    def version(self) -> str | None:
        return "run-1" if self.opened else None

    @property
    def log_dir(self) -> str:
        return f"logs/{self.version}"

    @property
    def experiment(self) -> list[Any]:
        self.opened = True
        return self.calls

    def log_metrics(self, metrics: Any, step: Any) -> None:
        self.calls.append((step, metrics))

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(dict(params))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.calls.append(type(model).__name__)

    def save(self) -> None:
        self.calls.append("save")

    def finalize(self, status: str) -> None:
        self.calls.append(status)

    def log_image(self, key: str, images: list[Any]) -> None:
        self.calls.append((key, images))


class Saving(TinyModule):
    """It has hyper-parameters, and reads its logger."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.at_setup = self.trainer.logger.version, self.trainer.log_dir


def logger_of(lightning: Any, **members: Any) -> Any:
    return type("Tracker", (CallsOfLogger, lightning.Logger), {**members, "__module__": VENDOR})()


def test_a_logger_gets_everything(lightning: Any) -> None:
    logger, module = logger_of(lightning), Saving()
    trainer = make_trainer(logger=logger, max_epochs=1, log_every_n_steps=1)
    assert isinstance(trainer.logger, Logger)
    assert isinstance(trainer.logger, type(logger))
    assert trainer.logger == logger
    assert logger.opened is False
    trainer.fit(module, tiny_loader(1))
    loss = float(trainer.callback_metrics["train_loss"])
    metrics = (1, {"epoch": 0, "train_loss": pytest.approx(loss)})
    assert logger.calls == [{"width": 3}, "save", "Saving", "save", metrics, "save", "success"]
    assert module.at_setup == ("run-1", "logs/run-1")
    assert trainer.logger.experiment is logger.calls
    trainer.logger.log_image("x", images=[1])
    trainer.logger.log_metrics({"later": 1.0})
    assert logger.calls[-3:] == [("x", [1]), (None, {"later": 1.0}), "save"]


def test_a_failed_run(lightning: Any) -> None:
    class Failing(TinyModule):
        def on_fit_start(self) -> None:
            raise RuntimeError("mine")

    logger = logger_of(lightning)
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(logger=logger).fit(Failing(), tiny_loader(1))
    assert logger.calls[-1] == "failed"


def test_a_logger_is_told_of_checkpoints(lightning: Any, tmp_path: Path) -> None:
    def after_save_checkpoint(self: Any, callback: Any) -> None:
        self.calls.append(Path(callback.last_model_path).name)

    told, other = logger_of(lightning, after_save_checkpoint=after_save_checkpoint), logger_of(lightning)
    checkpoint = ModelCheckpoint()
    fit([checkpoint], logger=[told, other], enable_checkpointing=True, default_root_dir=tmp_path, max_epochs=1)
    assert Path(checkpoint.last_model_path).name in told.calls
    assert Path(checkpoint.last_model_path).parent == tmp_path / "version_0" / "checkpoints"


def test_a_full_disk_does_not_end_training(lightning: Any) -> None:
    def log_metrics(self: Any, metrics: Any, step: Any) -> None:
        raise OSError("disk full")

    with pytest.warns(UserWarning, match="Tracker could not write the metrics of step 1: disk full. Training continues"):
        trainer = fit(logger=logger_of(lightning, log_metrics=log_metrics), log_every_n_steps=1)
    assert trainer.global_step > 1


def on_a_rank() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        logger, module = logger_of(stand_in(patch)), Saving()
        trainer = make_trainer(logger=logger, max_epochs=1, log_every_n_steps=1, devices=2, strategy="ddp")
        trainer.fit(module, tiny_loader(2))
        return [type(one).__name__ for one in logger.calls], module.at_setup, type(trainer.logger.experiment).__name__


def test_several_processes() -> None:
    first, second = run_world(2, on_a_rank)
    assert first[0].count("tuple") == 1
    assert second[0] == []
    assert first[1] == second[1] == ("run-1", "logs/run-1")
    assert (first[2], second[2]) == ("list", "NullExperiment")


def test_lightnings_own_loggers(lightning: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(logger=type("CSVLogger", (lightning.CSVLogger,), {"__module__": VENDOR})())
    assert trainer.logger is not None
    assert trainer.logger.version == 0
    said = "a run that is resumed begins a new log. trainkit's continues the log: from trainkit.loggers import CSVLogger"
    assert f"CSVLogger is a logger of lightning.pytorch: {said}" in caplog.messages
    fix = "Fix: log_model=False, or from trainkit.loggers import WandbLogger"
    with pytest.raises(ConfigurationError, match=rf"^WandbLogger\(log_model=True\): this is lightning.pytorch's logger.*{fix}"):
        make_trainer(logger=lightning.WandbLogger())


# ------------------------------------------------------------------------------------------- modules and data


def test_modules_and_data_are_refused(lightning: Any) -> None:
    theirs = type("Digits", (lightning.LightningModule,), {"__module__": "script"})
    data = type("Numbers", (lightning.LightningDataModule,), {"__module__": "script"})
    trainer = make_trainer()
    fix = f"lightning.pytorch's, not trainkit's. .*Fix: from trainkit import Lightning{{}}Module; or let .*{DOOR}"
    for call in (trainer.fit, trainer.validate, trainer.plan):
        with pytest.raises(ModuleError, match=f"^Digits: its base class LightningModule is {fix.format('')}"):
            call(theirs(), tiny_loader(1))
    with pytest.raises(DataError, match=f"^Numbers: its base class LightningDataModule is {fix.format('Data')}"):
        trainer.fit(TinyModule(), datamodule=data())


def test_strategies_and_profilers_are_refused(lightning: Any) -> None:
    fix = "is lightning.pytorch's, not trainkit's. .*Fix: from trainkit.strategies import DDPStrategy; or let .*"
    with pytest.raises(ConfigurationError, match=f"^Vendors: its base class DDPStrategy {fix}{DOOR}"):
        make_trainer(strategy=vendors(lightning.DDPStrategy))
    with pytest.raises(ConfigurationError, match="^Profiler: this is lightning.pytorch's class.*from trainkit.profilers"):
        make_trainer(profiler=lightning.Profiler())


def test_other_objects_stay_as_they_are(lightning: Any) -> None:
    for value in (None, 3, object(), TinyModule(), lightning.Callback):
        assert adapt(value) is value
    with pytest.raises(TrainkitError, match="expected a TrainModule, received Linear"):
        make_trainer().fit(TinyModule().layer, tiny_loader(1))
    assert not issubclass(TrainModule, lightning.LightningModule)
