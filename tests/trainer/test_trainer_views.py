"""What a Trainer shows to callbacks and modules, under Lightning's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Recorder, make_trainer, parameters_of, same
from torch.utils.data import DataLoader

from trainkit import DataModule, Strategy, Trainer
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.errors import CheckpointNotFoundError, ConfigurationError, DataError, ModuleError
from trainkit.loggers import CSVLogger, Logger
from trainkit.names import advice_by_place
from trainkit.profilers import PassThroughProfiler, SimpleProfiler

ADVICE = advice_by_place()

# Public members of Lightning 2.6.6's Trainer that this one does not have.
NOT_THERE = """
    barebones enable_autolog_hparams predict_loop test_loop val_check_batch validate_loop"""
THERE = """
    accelerator accumulate_grad_batches callback_metrics callbacks check_val_every_n_epoch checkpoint_callback
    checkpoint_callbacks ckpt_path current_epoch datamodule default_root_dir device_ids distributed_sampler_kwargs
    early_stopping_callback early_stopping_callbacks enable_validation estimated_stepping_batches evaluating fast_dev_run fit
    fit_loop global_rank global_step gradient_clip_algorithm gradient_clip_val init_module interrupted is_global_zero
    is_last_batch lightning_module limit_predict_batches limit_test_batches limit_train_batches limit_val_batches local_rank
    log_dir log_every_n_steps logged_metrics logger loggers lr_scheduler_configs max_epochs max_steps min_epochs min_steps model
    node_rank num_devices num_nodes num_predict_batches num_sanity_val_batches num_sanity_val_steps num_test_batches
    num_training_batches num_val_batches optimizers overfit_batches precision precision_plugin predict predict_dataloaders
    predicting print profiler progress_bar_callback progress_bar_metrics received_sigterm reload_dataloaders_every_n_epochs
    sanity_checking save_checkpoint scaler should_stop state strategy test test_dataloaders testing train_dataloader training
    val_check_interval val_dataloaders validate validating world_size"""


def test_all_names_of_lightning() -> None:
    trainer = make_trainer()
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert [name for name in THERE.split() if not hasattr(trainer, name)] == []
    assert [name for name in NOT_THERE.split() if hasattr(trainer, name)] == []


def test_what_callbacks_of_other_packages_read_and_assign() -> None:
    trainer = make_trainer()
    assert trainer._accelerator_connector.is_distributed is False
    trainer.should_stop = numpy.bool_(True)
    assert trainer.should_stop is True


class AtLastBatch(Recorder):
    """Records `is_last_batch`; skips the rest of an epoch at a batch."""

    def __init__(self, skip_at: int) -> None:
        super().__init__()
        self.skip_at, self.last = skip_at, list[bool]()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> int | None:
        self.last.append(trainer.is_last_batch)
        return -1 if batch_idx == self.skip_at else None


@pytest.mark.parametrize(
    "limits, skip_at, during, after",
    [
        ({"max_epochs": 2}, -1, [False, False, False, True] * 2, True),
        ({"max_epochs": 2}, 1, [False, False] * 2, True),
        ({"max_steps": 6}, -1, [False, False, False, True, False, False], False),
    ],
)
def test_the_last_batch(limits: dict[str, int], skip_at: int, during: list[bool], after: bool) -> None:
    callback = AtLastBatch(skip_at)
    trainer = make_trainer(callback, **{"max_epochs": -1, **limits})
    assert not trainer.is_last_batch
    trainer.fit(TinyModule(), tiny_loader())
    assert (callback.last, trainer.is_last_batch) == (during, after)


def test_a_name_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVICE, "trainer", {"test_loop": "trainer.max_epochs"})
    with pytest.raises(AttributeError, match=r"a Trainer has no 'test_loop'. Use trainer.max_epochs."):
        _ = make_trainer().test_loop
    with pytest.raises(AttributeError, match=r"a Trainer has no 'globl_step'.*'global_step'"):
        _ = make_trainer().globl_step


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_the_precision(precision: str) -> None:
    trainer = make_trainer(precision=precision)
    assert trainer.precision == precision == trainer.precision_plugin.name
    assert (trainer.scaler is not None) == (precision == "16-mixed")


def test_devices() -> None:
    trainer = make_trainer()
    assert (trainer.num_devices, trainer.device_ids, trainer.num_nodes, trainer.node_rank) == (1, [0], 1, 0)
    assert trainer.distributed_sampler_kwargs is None
    trainer.strategy.device = torch.device("cuda:3")
    assert trainer.device_ids == [3]


def test_the_module_of_the_strategy() -> None:
    strategy, module = Strategy("cpu"), TinyModule()
    trainer = Trainer(strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
    assert strategy.lightning_module is strategy.model is None
    trainer.fit(module, tiny_loader())
    assert strategy.lightning_module is strategy.model is module


@pytest.mark.parametrize(
    "steps, limit, batches", [(1, 1.0, [1, 1]), (-1, 1.0, [4, 2]), (3, 1.0, [3, 2]), (0, 1.0, [0, 0]), (3, 1, [1, 1])]
)
def test_the_batches_of_the_sanity_check(steps: int, limit: Any, batches: list[int]) -> None:
    class Counting(Recorder):
        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            counted[dataloader_idx] += trainer.sanity_checking

    class Several(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

    counted = [0, 0]
    trainer = make_trainer(Counting(), num_sanity_val_steps=steps, limit_val_batches=limit)
    trainer.fit(Several(), tiny_loader(), [tiny_loader(16), tiny_loader(8)])
    assert trainer.num_sanity_val_batches == counted == batches
    assert trainer.enable_validation


def test_callbacks_by_kind() -> None:
    first, second = EarlyStopping("a"), EarlyStopping("b")
    trainer = make_trainer(first, second)
    assert trainer.early_stopping_callback is first
    assert trainer.early_stopping_callbacks == [first, second]


def test_the_logger_can_be_assigned(tmp_path: Path) -> None:
    memory, csv = Memory(), CSVLogger()
    trainer = make_trainer(default_root_dir=tmp_path, log_every_n_steps=1)
    trainer.logger = memory
    assert trainer.loggers == [memory]
    trainer.fit(TinyModule(), tiny_loader())
    assert len(memory.of("train_loss")) == 4
    trainer.logger = csv
    assert Path(trainer.log_dir or "").is_relative_to(tmp_path)
    trainer.logger = None
    assert (trainer.loggers, trainer.logger) == ([], None)
    trainer.loggers = None  # type: ignore[assignment]
    assert trainer.loggers == []
    with pytest.raises(ConfigurationError, match="logger must be"):
        trainer.logger = 3  # type: ignore[assignment]


def test_the_profiler() -> None:
    trainer = make_trainer(profiler=PassThroughProfiler())
    assert type(trainer.profiler) is PassThroughProfiler
    with trainer.profiler.profile("mine"):
        pass
    trainer.profiler = "simple"  # type: ignore[assignment]
    trainer.fit(TinyModule(), tiny_loader())
    assert isinstance(trainer.profiler, SimpleProfiler)
    assert len(trainer.profiler.recorded_durations["training_step"]) == 4


def test_the_checkpoint_path(tmp_path: Path) -> None:
    trainer = make_trainer(ModelCheckpoint(), enable_checkpointing=True, default_root_dir=tmp_path)
    module = TinyModule()
    trainer.fit(module, tiny_loader(8))
    assert trainer.ckpt_path is None
    trainer.save_checkpoint(tmp_path / "mine")
    trainer.validate(module, tiny_loader(), ckpt_path="last")
    found = str(trainer.ckpt_path)
    assert Path(found).is_dir()
    trainer.validate(module, tiny_loader())
    assert trainer.ckpt_path is None
    saved = parameters_of(module)
    trainer = make_trainer(max_epochs=2)
    trainer.ckpt_path = tmp_path / "mine"
    other = TinyModule()
    trainer.validate(other, tiny_loader())
    assert (trainer.ckpt_path, same(parameters_of(other), saved)) == (str(tmp_path / "mine"), True)
    trainer.fit(other, tiny_loader(8))
    assert trainer.global_step == 4, "it has resumed at step 2"
    trainer.ckpt_path = None
    trainer.fit(other, tiny_loader(8))
    assert (trainer.global_step, trainer.ckpt_path) == (4, None)
    trainer.ckpt_path = tmp_path / "nothing"
    with pytest.raises(CheckpointNotFoundError):
        trainer.test(other, tiny_loader())


def test_an_attribute_error_inside_a_property_is_shown() -> None:
    class Broken(Logger):
        @property
        def log_dir(self) -> str:
            return self.nothing_of_this_name

        def write_metrics(self, metrics: Any, step: int) -> None: ...

    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        make_trainer(logger=Broken()).log_dir


class Half(DataModule):
    """Half of the batches of `tiny_loader`; records what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = list[str]()

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> DataLoader:
        return tiny_loader(8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def test_the_data_module_can_be_assigned() -> None:
    """It is used where loaders come from nowhere else."""

    class Own(TinyModule):
        def train_dataloader(self) -> DataLoader:
            return tiny_loader(16)

    data, other, trainer = Half(), Half(), make_trainer()
    trainer.datamodule = data
    assert trainer.datamodule is data
    trainer.fit(TinyModule())
    trainer.test(verbose=False)
    trainer.validate(verbose=False)
    assert len(trainer.predict() or []) == 2
    assert (trainer.global_step, data.stages, data.trainer) == (2, ["fit", "test", "validate", "predict"], trainer)
    trainer.fit(TinyModule(), tiny_loader(12))
    assert (trainer.global_step, trainer.datamodule) == (3, data)
    trainer.fit(Own())
    assert (trainer.global_step, len(data.stages)) == (4, 4)
    trainer.fit(TinyModule(), datamodule=other)
    assert trainer.datamodule is other
    with pytest.raises(ModuleError, match="train_dataloader"):
        trainer.fit(TinyModule())
    trainer.datamodule = data
    trainer.datamodule = None
    with pytest.raises(ModuleError, match="train_dataloader"):
        trainer.fit(TinyModule())


def test_what_is_no_data_module_to_assign() -> None:
    class Assigns(TinyModule):
        def on_train_start(self) -> None:
            self.trainer.datamodule = Half()

    trainer = make_trainer()
    with pytest.raises(DataError, match=r"datamodule must be a DataModule, not type. .* make an instance: Half\(\)\?"):
        trainer.datamodule = Half  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"cannot change during a run.*trainer\.datamodule = Half\(\.\.\.\)"):
        trainer.fit(Assigns(), tiny_loader(4))
