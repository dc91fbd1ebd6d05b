"""`DataModule`: from datasets, from a checkpoint, and after an error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from trainkit import DataModule
from trainkit.errors import CheckpointError, HookError, UnknownNameError, UnsupportedArgumentError


class Named(DataModule):
    """Data with two hyper-parameters and a state."""

    def __init__(self, samples: int = 16, scale: float = 1.0) -> None:
        self.save_hyperparameters()
        self.read = 0
        self.errors: list[BaseException] = []

    def train_dataloader(self) -> DataLoader:
        self.read += 1
        return tiny_loader(self.hparams.samples)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["read"]

    def on_exception(self, exception: BaseException) -> None:
        self.errors.append(exception)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(tiny_loader().dataset)


def test_from_datasets() -> None:
    data = tiny_loader().dataset
    module = Named.from_datasets(data, [data, data], test_dataset=Stream(), batch_size=8, num_workers=1, scale=2.0)
    assert module.hparams == {"samples": 16, "scale": 2.0}
    train, test = module.train_dataloader(), module.test_dataloader()
    assert (type(train.sampler), train.batch_size, train.num_workers) == (RandomSampler, 8, 1)
    assert [type(loader.sampler) for loader in module.val_dataloader()] == [SequentialSampler] * 2
    assert isinstance(test.dataset, Stream)
    assert copy.deepcopy(module).train_dataloader().batch_size == 8
    of_streams = DataModule.from_datasets([Stream(), Stream()], predict_dataset=data)
    assert [loader.batch_size for loader in of_streams.train_dataloader()] == [1, 1]
    assert type(of_streams.predict_dataloader().sampler) is SequentialSampler


class Sized(DataModule):
    def __init__(self, batch_size: int, **others: Any) -> None:
        self.given = {"batch_size": batch_size, **others}


class Narrow(DataModule):
    def __init__(self, batch_size: int) -> None:
        self.given = {"batch_size": batch_size}


def test_from_datasets_passes_what_init_takes() -> None:
    data = tiny_loader().dataset
    assert Sized.from_datasets(data, batch_size=8, other=1).given == {"batch_size": 8, "num_workers": 0, "other": 1}
    assert Narrow.from_datasets(data, batch_size=8).given == {"batch_size": 8}


def test_it_shows_the_sizes_of_its_datasets() -> None:
    class Several(DataModule):
        def setup(self, stage: str) -> None:
            self.data = tiny_loader(6).dataset

        def train_dataloader(self) -> Any:
            return {"a": DataLoader(self.data), "b": DataLoader(Stream())}

        def val_dataloader(self) -> Any:
            return DataLoader(self.data)

    module = Several()
    lines = [f"{{{stage} dataloader: None}}" for stage in ("Train", "Validation", "Test", "Predict")]
    assert str(module).splitlines() == lines
    module.setup("fit")
    lines[:2] = ["{Train dataloader: 1. size=6 ; 2. size=NA}", "{Validation dataloader: size=6}"]
    assert str(module).splitlines() == lines


def test_a_run_on_datasets() -> None:
    data = tiny_loader().dataset
    module = DataModule.from_datasets(data, val_dataset=data, predict_dataset=data, batch_size=4)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(TinyModule(), datamodule=module)
    assert trainer.global_step == 4
    assert len(trainer.predict(datamodule=module)) == 4


@pytest.fixture
def checkpoint(run_dir: Path) -> str:
    trainer = make_trainer(enable_checkpointing=True, max_steps=2)
    trainer.fit(TinyModule(), datamodule=Named(scale=3.0))
    return trainer.checkpoint_callback.last_model_path


def test_load_from_checkpoint(checkpoint: str) -> None:
    module = Named.load_from_checkpoint(checkpoint)
    assert module.hparams == {"samples": 16, "scale": 3.0}
    assert module.read == 1
    again = Named.load_from_checkpoint(checkpoint, "cpu", samples=8, hparams_file=None, weights_only=None)
    assert again.hparams == {"samples": 8, "scale": 3.0}
    with pytest.raises(UnknownNameError, match="Named has no argument 'sampels'.*'samples'"):
        Named.load_from_checkpoint(checkpoint, sampels=8)
    with pytest.raises(CheckpointError, match=r"only a checkpoint of TrainkitCLI names.*MyData\.load_from_checkpoint"):
        DataModule.load_from_checkpoint(checkpoint)
    with pytest.raises(UnsupportedArgumentError, match=r"load_from_checkpoint\(hparams_file=...\): pass the arguments"):
        Named.load_from_checkpoint(checkpoint, None, "hparams.yaml")  # type: ignore[arg-type]


def test_hyper_parameters_in_one_argument() -> None:
    class Configured(DataModule):
        def __init__(self, config: dict[str, Any]) -> None:
            self.save_hyperparameters(config)

        def train_dataloader(self) -> DataLoader:
            return tiny_loader(self.hparams.samples)

    trainer = make_trainer(enable_checkpointing=True, max_steps=1)
    trainer.fit(TinyModule(), datamodule=Configured({"samples": 8, "scale": 3.0}))
    again = Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, scale=2.0)
    assert again.hparams == {"samples": 8, "scale": 2.0}


def test_a_checkpoint_without_a_data_module() -> None:
    trainer = make_trainer(enable_checkpointing=True, max_steps=1)
    trainer.fit(TinyModule(), tiny_loader())
    with pytest.raises(CheckpointError, match=r"contains no DataModule.* Create it yourself: Named\(...\)"):
        Named.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)


def test_an_error_is_shown_to_it() -> None:
    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("mine")

    data = Named()
    with pytest.raises(KeyError, match="mine") as error:
        make_trainer().fit(Fails(), datamodule=data)
    assert data.errors == [error.value]


def test_a_hook_that_cannot_be_called() -> None:
    class Wrong(Named):
        def on_exception(self) -> None: ...

    with pytest.raises(HookError, match=r"Wrong.on_exception cannot be called. Expected: def on_exception\(self, exception\)"):
        make_trainer().fit(TinyModule(), datamodule=Wrong())
