"""An autoencoder of handwritten digits: `training_step`, `validation_step`, a scheduler with a monitor, callbacks, a logger."""

import json

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class AutoEncoder(pl.LightningModule):
    def __init__(self, hidden: int = 32, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 64))
        self.losses = []

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def _loss(self, batch):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x, _ = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16)
        self.parts = random_split(data, [1400, 200, 197], generator=torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.parts[2], batch_size=self.batch_size)

    def predict_dataloader(self):
        return self.test_dataloader()


def main():
    pl.seed_everything(7, workers=True)
    model, data = AutoEncoder(), Digits()
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=1, filename="best")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=8,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=3), LearningRateMonitor(logging_interval="epoch")],
        logger=CSVLogger("logs", name="autoencoder"),
    )
    trainer.fit(model, datamodule=data)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    best = AutoEncoder.load_from_checkpoint(checkpoint.best_model_path)
    codes = torch.cat(trainer.predict(model, datamodule=data))
    found = {"losses": model.losses, "test": tested["test_loss"], "hidden": best.hparams.hidden}
    print(json.dumps({**found, "codes": list(codes.shape)}))


if __name__ == "__main__":
    main()
