"""Writes lightning.ckpt, with Lightning 2.6.6 and torch: `python write_lightning_checkpoint.py`, in this folder."""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    """Its hyper-parameters have a class, which is not read."""

    def __init__(self, width: int = 3, lr: float = 0.1, activation: type = nn.ReLU) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(6, 4)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=2)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Line(), loader)
    trainer.save_checkpoint("lightning.ckpt")
