"""Files of other programs where a checkpoint is expected. Conversion: `tests/cli/checkpoint/test_import_checkpoint.py`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, same
from helpers.worlds.worlds import run_world
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import TrainModule
from trainkit.distributed.process_identity import ProcessIdentity
from trainkit.errors import (
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
)
from trainkit.state.foreign_state import converted

LIGHTNING = Path(__file__).parents[1] / "cli" / "checkpoint" / "data" / "lightning.ckpt"


class Line(TrainModule):
    """The module of lightning.ckpt, for trainkit."""

    def __init__(self, width: int = 5, lr: float = 1.0, activation: type | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["activation"])
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.began: tuple[Any, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        scheduler = self.trainer.lr_scheduler_configs[0].scheduler
        weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.began = self.trainer.global_step, self.trainer.current_epoch, scheduler.last_epoch, weights


def data() -> DataLoader:
    torch.manual_seed(0)
    inputs = torch.randn(6, 4)
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=2)


def test_a_run_of_lightning_continues_from_its_file(caplog: pytest.LogCaptureFixture) -> None:
    theirs = torch.load(LIGHTNING, weights_only=False)
    module = Line(width=3, lr=0.5)
    make_trainer(max_epochs=20).fit(module, data(), ckpt_path=LIGHTNING)
    step, epoch, scheduled, weights = module.began
    assert (step, epoch) == (theirs["global_step"], theirs["epoch"])
    assert scheduled == theirs["lr_schedulers"][0]["last_epoch"]
    assert same(weights, theirs["state_dict"])
    assert "not converted: lightning.ckpt: hyper_parameters.activation" in caplog.text
    assert f"resuming from {LIGHTNING}" in caplog.text
    assert not [name for name in os.listdir("trainkit_runs") if name.startswith(".")], "nothing is left behind"


def test_a_module_of_lightning_is_loaded_from_its_file() -> None:
    theirs = torch.load(LIGHTNING, weights_only=False)
    module = Line.load_from_checkpoint(LIGHTNING)
    assert same(module.state_dict(), theirs["state_dict"])
    assert module.hparams.lr == theirs["hyper_parameters"]["lr"]
    assert Line.load_from_checkpoint(LIGHTNING, lr=9.0).hparams.lr == 9.0
    with pytest.raises(StateMismatchError, match=r"lightning.ckpt does not fit Line"):
        Line.load_from_checkpoint(LIGHTNING, width=2)


class Told(TinyModule):
    """Stores something of its own, as modules of Lightning do."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told = checkpoint["vocabulary"]


def test_what_its_hooks_have_added_is_there() -> None:
    state = {"state_dict": Told().state_dict(), "vocabulary": {"size": torch.tensor(3), "words": ["a"]}}
    torch.save({**state, "pytorch-lightning_version": "2.0.0", "hyper_parameters": {}}, "x.ckpt")
    assert Told.load_from_checkpoint("x.ckpt").told == {"size": torch.tensor(3), "words": ["a"]}


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w.safetensors", "w.ckpt"])
def test_weights_alone(name: str) -> None:
    source = Line()
    (save_file if name == "w.safetensors" else torch.save)(source.state_dict(), name)  # type: ignore[operator]
    trainer, module = make_trainer(max_epochs=1), Line()
    trainer.validate(module, data(), ckpt_path=name, verbose=False)
    assert same(module.state_dict(), source.state_dict())
    with pytest.raises(CheckpointError, match=rf"{name} is a weights-only checkpoint.*restore=\{{'model'\}}"):
        trainer.fit(module, data(), ckpt_path=name)
    again = Line()
    trainer.fit(again, data(), ckpt_path=name, restore={"model"})
    assert same(again.began[-1], source.state_dict())


@pytest.mark.parametrize("content, said", [(b"", "read: .*it is empty"), (b"hello", "read: .*it was not written by")])
def test_a_file_that_is_none(content: bytes, said: str) -> None:
    Path("x.ckpt").write_bytes(content)
    for load in (Told.load_from_checkpoint, lambda path: make_trainer().fit(Told(), tiny_loader(), ckpt_path=path)):
        with pytest.raises(CorruptCheckpointError, match=said):
            load("x.ckpt")
    torch.save([1, 2], "y.ckpt")
    with pytest.raises(ConfigurationError, match="holds no tensors by name"):
        Told.load_from_checkpoint("y.ckpt")


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """A kill while a file is converted leaves a folder with its weights, which no other process uses."""
    here = ProcessIdentity.this()
    owners = {"live": here, "dead": replace(here, start="0"), "elsewhere": replace(here, host="other")}
    for name, owner in owners.items():
        folder = tmp_path / f".converted-{name}"
        folder.mkdir()
        (folder / ".owner").write_text(json.dumps(asdict(owner)))
    (tmp_path / ".converted-mine").mkdir()
    with converted(LIGHTNING, tmp_path) as checkpoint:
        assert checkpoint.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".converted-elsewhere", ".converted-live", ".converted-mine"]


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointWriteError, match="must be converted, and .* cannot be written: .*default_root_dir"),
        converted(LIGHTNING, tmp_path / "file" / "root"),
    ):
        pytest.fail("it has nowhere to be")


def resume_on_each_rank() -> tuple[Any, ...]:
    module = Line(width=3, lr=0.5)
    make_trainer(max_epochs=20, strategy="ddp").fit(module, data(), ckpt_path=LIGHTNING)
    return module.began[:3], [float(tensor.sum()) for tensor in module.began[3].values()]


def test_two_processes_continue_from_one_file() -> None:
    first, second = run_world(2, resume_on_each_rank)
    assert first == second
    assert first[0][0] == torch.load(LIGHTNING, weights_only=False)["global_step"]
