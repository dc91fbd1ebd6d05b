"""A classifier of digits on a backbone that is frozen at first: `BackboneFinetuning`, torchmetrics, a warm-up by hand."""

import json

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, lr: float = 1e-2, warmup: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Linear(8 * 16, 10)
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.losses, self.rates = [], []

    def forward(self, images):
        return self.head(self.backbone(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.val_accuracy(self(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams.lr, momentum=0.9)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < self.hparams.warmup:
            factor = (self.trainer.global_step + 1) / self.hparams.warmup
            optimizer.param_groups[0]["lr"] = factor * self.hparams.lr
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def main():
    pl.seed_everything(21)
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(y))
    train, val = torch.utils.data.Subset(data, range(800)), torch.utils.data.Subset(data, range(800, 1000))
    model = Classifier()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.1, lambda_func=lambda epoch: 1.5)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        callbacks=[finetuning, ModelCheckpoint(monitor="val_accuracy", mode="max", filename="{epoch}-{val_accuracy:.2f}")],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(train, batch_size=80), DataLoader(val, batch_size=100))
    accuracy = trainer.callback_metrics["val_accuracy"].item()
    found = {"losses": model.losses, "rates": model.rates, "accuracy": accuracy}
    print(json.dumps({**found, "groups": len(trainer.optimizers[0].param_groups)}))


if __name__ == "__main__":
    main()
