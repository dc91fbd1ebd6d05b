"""Typical scripts written for Lightning, in which only the imports and the base class are renamed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from helpers.runs.tiny import TinyModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

import trainkit as pl
from trainkit import Accelerator
from trainkit.callbacks import EarlyStopping, LearningRateMonitor
from trainkit.console import TrainkitWarning
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingMetricError,
    TrainkitError,
)
from trainkit.loggers import CSVLogger, TensorBoardLogger

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def loader(samples: int = 32) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1)), batch_size=8, shuffle=True)


class Regression(pl.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y), "number": batch_idx}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


# A classifier with a data module, metrics, a learning-rate schedule per step, monitors and two loggers


class Images(pl.DataModule):
    def __init__(self, data_dir: str = "./", batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage=None):
        data = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
        if stage == "fit":
            self.train, self.val = random_split(data, [48, 16])
        if stage in ("test", "predict"):
            self.rest = data

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.rest, batch_size=self.hparams.batch_size)

    predict_dataloader = test_dataloader


class Classifier(pl.TrainModule):
    def __init__(self, lr: float = 1e-2, hidden: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_acc = self.train_acc.clone()
        self.outputs: list[Tensor] = []
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val/acc", self.val_acc)
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.outputs.append(logits)

    def on_validation_epoch_end(self):
        self.sizes.append(len(torch.cat(self.outputs)))
        self.outputs.clear()

    def test_step(self, batch, batch_idx):
        self.log_dict({"test/loss": F.cross_entropy(self(batch[0]), batch[1])})

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def test_a_classifier() -> None:
    torch.manual_seed(42)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        max_epochs=2,
        callbacks=[EarlyStopping(monitor="val/loss", mode="min", patience=3), LearningRateMonitor(logging_interval="step")],
        log_every_n_steps=2,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=[TensorBoardLogger("tb", name="mine"), CSVLogger("csv")],
        deterministic=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = Classifier(), Images()
    trainer.fit(model=model, datamodule=data, ckpt_path=None)
    assert trainer.global_step == 2 * 3
    assert {"train/loss", "train/loss_step", "train/loss_epoch", "train/acc", "val/loss", "val/acc"} <= set(
        trainer.callback_metrics
    )
    assert model.sizes == [16, 16, 16]  # the sanity check and two epochs
    assert list(trainer.test(model, datamodule=data, verbose=False)[0]) == ["test/loss"]
    assert sum(map(len, trainer.predict(model, data))) == 64
    assert trainer.log_dir == "tb/mine/version_0"
    assert trainer.checkpoint_callback.best_model_path.endswith("step-00000006")
    again = trainer.test(model, datamodule=data, verbose=False, ckpt_path="best")
    assert again == trainer.test(Classifier(), datamodule=data, verbose=False, ckpt_path="last")


def test_hyper_parameters_of_two_owners_that_differ() -> None:
    # Hyper-parameters of the same name in the module and the data module must have the same value.

    class Data(pl.DataModule):
        def __init__(self, lr: float) -> None:
            self.save_hyperparameters()

        def train_dataloader(self):
            return [[torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)]]

    pl.Trainer(**QUIET, max_epochs=1).fit(Classifier(lr=0.1), Data(lr=0.1))
    with pytest.raises(ConfigurationError, match="different hyper-parameters of the same name: lr"):
        pl.Trainer(**QUIET, max_epochs=1).fit(Classifier(lr=0.1), Data(lr=0.2))


# A GAN


class GAN(pl.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
        self.last: list[int] = []

    def training_step(self, batch):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.randn(len(real), 4).type_as(real)
        self.toggle_optimizer(optimizer_g)
        g_loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        d_loss = (
            F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(self.generator(noise).detach())).mean()
        )
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        if self.trainer.is_last_batch:
            self.last.append(self.trainer.batch_idx)
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1) for optimizer in optimizers]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_gan(precision: str) -> None:
    model = GAN()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = pl.Trainer(**QUIET, max_epochs=2, precision=precision)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8))
    assert trainer.global_step == 8
    assert model.last == [3, 3]
    assert [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups] == pytest.approx([1e-5] * 2)
    assert not any(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


# Single features


def test_groups_of_parameters_and_a_schedule_from_the_number_of_steps() -> None:
    class Transformer(Regression):
        def configure_optimizers(self):
            decayed = [p for n, p in self.named_parameters() if "bias" not in n]
            others = [p for n, p in self.named_parameters() if "bias" in n]
            groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1.0)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]

    trainer = pl.Trainer(**QUIET, max_epochs=2)
    trainer.fit(Transformer(), loader())
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.0, 0.0]


def test_a_callback_that_reads_results_in_the_sanity_check_too() -> None:
    class Reading(pl.Callback):
        def __init__(self) -> None:
            self.values: list[tuple[bool, float]] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert outputs["loss"].ndim == 0
            assert not outputs["loss"].requires_grad
            assert outputs["number"] == batch_idx
            assert trainer.training

        def on_validation_end(self, trainer, pl_module):
            assert not trainer.training
            self.values.append((trainer.sanity_checking, trainer.callback_metrics["val_loss"].item()))

        def setup(self, trainer, pl_module, stage=None):
            self.root = trainer.default_root_dir

    reading = Reading()
    trainer = pl.Trainer(**QUIET, max_epochs=2, callbacks=reading, default_root_dir="here")
    trainer.fit(Regression(), loader(), loader())
    assert [sanity for sanity, _ in reading.values] == [True, False, False]
    assert trainer.callback_metrics["val_loss"].item() == reading.values[-1][1]
    assert reading.root == "here"
    assert (trainer.global_rank, trainer.local_rank, trainer.testing, trainer.predicting) == (0, 0, False, False)


def test_several_validation_loaders() -> None:
    class Several(Regression):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    trainer = pl.Trainer(**QUIET, max_epochs=2, callbacks=[EarlyStopping("val/dataloader_idx_1")])
    trainer.fit(Several(), loader(), [loader(), loader(16)])
    assert set(trainer.callback_metrics) == {"val/dataloader_idx_0", "val/dataloader_idx_1"}
    trainer = pl.Trainer(**QUIET, max_epochs=2, callbacks=[EarlyStopping("val")])
    with (
        pytest.warns(TrainkitWarning, match="Did you mean 'val/dataloader_idx_0'"),
        pytest.raises(MissingMetricError, match="'val/dataloader_idx_0', 'val/dataloader_idx_1'"),
    ):
        trainer.fit(Several(), loader(), [loader(), loader(16)])


def test_loaders_side_by_side() -> None:
    class Pair(Regression):
        def training_step(self, batch, batch_idx):
            return sum(F.mse_loss(self(x), y) for x, y in (batch["a"], batch["b"]))

    for mode, steps in (("min_size", 2), ("max_size_cycle", 4)):
        trainer = pl.Trainer(**QUIET, max_epochs=1)
        trainer.fit(Pair(), pl.CombinedLoader({"a": loader(), "b": loader(16)}, mode))
        assert trainer.global_step == steps
    assert pl.CombinedLoader({"a": loader(), "b": loader(16)}).mode == "min_size"


def test_a_frozen_backbone() -> None:
    class FineTuning(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
            self.backbone.eval()

        def forward(self, x):
            return self.net(self.backbone(x))

        def configure_optimizers(self):
            return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-3)

    model = FineTuning()
    statistics = model.backbone[1].running_mean.clone()
    pl.Trainer(**QUIET, max_epochs=1).fit(model, loader(), loader())
    assert not model.backbone.training
    assert torch.equal(model.backbone[1].running_mean, statistics)


def test_batches_of_dicts_and_streams() -> None:
    class Records(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return {"x": torch.randn(8), "y": torch.randn(1), "id": str(index)}

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([Records()[index] for index in range(20)])

    class Dicts(Regression):
        def training_step(self, batch, batch_idx):
            assert isinstance(batch["id"][0], str)
            return F.mse_loss(self(batch["x"]), batch["y"])

    for data, steps in ((Records(), 4), (Stream(), 3)):
        trainer = pl.Trainer(**QUIET, max_epochs=1)
        trainer.fit(Dicts(), DataLoader(data, batch_size=8))
        assert trainer.global_step == steps


def test_the_base_classes_have_lightnings_names_too() -> None:
    assert pl.LightningModule is pl.TrainModule
    assert pl.LightningDataModule is pl.DataModule


@pytest.mark.parametrize("name", ["training_epoch_end", "configure_sharded_model"])
def test_what_is_not_there_says_what_to_use(name: str) -> None:
    def method(self: Any, *arguments: Any) -> None: ...

    model = type("Old", (Regression,), {name: method})()
    with pytest.raises(TrainkitError, match=rf"Old\.{name} is never called by trainkit\. Use "):
        pl.Trainer(**QUIET, max_epochs=1).fit(model, loader())


VERBS = {
    "fit": lambda trainer, module, path: trainer.fit(module, LOADER, ckpt_path=path),
    "validate": lambda trainer, module, path: trainer.validate(module, LOADER, ckpt_path=path),
    "test": lambda trainer, module, path: trainer.test(module, LOADER, ckpt_path=path),
    "predict": lambda trainer, module, path: trainer.predict(module, LOADER, ckpt_path=path),
    "load_from_checkpoint": lambda trainer, module, path: type(module).load_from_checkpoint(path),
    "load_state": lambda trainer, module, path: Accelerator().load_state(path),
}
LOADER = [[torch.zeros(2, 4), torch.zeros(2, 1)]]


@pytest.mark.parametrize("verb", VERBS)
def test_a_checkpoint_of_lightnings(verb: str) -> None:
    """It is read where its weights are enough; what a resume lacks is said."""
    theirs, ours = TinyModule(), TinyModule()
    torch.save({"state_dict": theirs.state_dict(), "pytorch-lightning_version": "2.6.0", "epoch": 3}, "old.ckpt")
    lacks = {
        "fit": "old.ckpt is a weights-only checkpoint, which cannot be resumed",
        "load_state": "is a Lightning checkpoint, which is a file; expected .*trainkit checkpoint import",
    }
    with pytest.raises(CheckpointError, match=lacks[verb]) if verb in lacks else nullcontext():
        result = VERBS[verb](pl.Trainer(**QUIET, max_epochs=1), ours, "old.ckpt")
        loaded = result if isinstance(result, TinyModule) else ours
        assert torch.equal(loaded.layer.weight, theirs.layer.weight)


def test_sharded_checkpoints_of_lightnings(run_dir: Path) -> None:
    (run_dir / "old.ckpt").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"sharded Lightning checkpoint.*moving-over/import-a-checkpoint\.md"):
        TinyModule.load_from_checkpoint("old.ckpt")
