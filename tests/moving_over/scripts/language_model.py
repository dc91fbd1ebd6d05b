"""A small transformer that reads Python's own source: a schedule by step, accumulation, clipping, weights without decay."""

import inspect
import json
import math
import string

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    def __init__(self, block: int = 32):
        text = inspect.getsource(string)
        self.letters = sorted(set(text))
        places = {letter: place for place, letter in enumerate(self.letters)}
        self.codes = torch.tensor([places[letter] for letter in text])
        self.block = block

    def __len__(self):
        return len(self.codes) // self.block - 1

    def __getitem__(self, index):
        begin = index * self.block
        return self.codes[begin : begin + self.block], self.codes[begin + 1 : begin + self.block + 1]


class LanguageModel(L.LightningModule):
    def __init__(self, letters: int, width: int = 32, lr: float = 3e-3, warmup: int = 5):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(letters, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)
        self.losses = []

    def forward(self, codes):
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        return self.head(self.blocks(self.embedding(codes) * math.sqrt(self.hparams.width), mask=mask, is_causal=True))

    def training_step(self, batch, batch_idx):
        codes, targets = batch
        loss = F.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        codes, targets = batch
        self.log("val_loss", F.cross_entropy(self(codes).flatten(0, 1), targets.flatten()))

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches

        def factor(step):
            if step < self.hparams.warmup:
                return (step + 1) / self.hparams.warmup
            return 0.5 * (1 + math.cos(math.pi * step / total))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def main():
    L.seed_everything(11)
    data, rates = Text(), Rates()
    model = LanguageModel(len(data.letters))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=20,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[rates],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=8)
    trainer.fit(model, loader, loader)
    found = {"losses": model.losses, "rates": rates.rates, "val": trainer.callback_metrics["val_loss"].item()}
    print(json.dumps({**found, "steps": trainer.global_step}))


if __name__ == "__main__":
    main()
