"""A pretraining script in the shape of litgpt's, for Fabric. `python pretrain.py OUT STEPS [CHECKPOINT]`.

With Lightning its import is `from lightning.fabric import Fabric`; nothing else in it differs.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit.fabric import Fabric
from trainkit.loggers import CSVLogger

ACCUMULATION = 2


class Model(nn.Module):
    """A small language model."""

    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.max_seq_length = 8
        self.embed = nn.Embedding(vocabulary, width)
        self.block = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.block(x))


def initialize_weights(fabric: Fabric, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))


def get_dataloaders() -> tuple[DataLoader, DataLoader]:
    tokens = torch.randint(0, 32, (64, 9), generator=torch.Generator().manual_seed(3))
    train, val = TensorDataset(tokens[:48]), TensorDataset(tokens[48:])
    return DataLoader(train, batch_size=4, shuffle=False), DataLoader(val, batch_size=4)


def main(fabric: Fabric, out_dir: Path, max_steps: int, resume: Path | None) -> None:
    if fabric.global_rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
    fabric.seed_everything(42, verbose=False)
    with fabric.init_module(empty_init=False):
        model = Model()
    initialize_weights(fabric, model)
    fabric.print(f"Total parameters: {sum(p.numel() for p in model.parameters()):,}")
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = fabric.setup_optimizers(optimizer)
    train_dataloader, val_dataloader = fabric.setup_dataloaders(*get_dataloaders())
    state = {"model": model, "optimizer": optimizer, "hparams": {"lr": 1e-2}, "iter_num": 0, "step_count": 0}
    if resume:
        fabric.print(f"Resuming training from {resume}")
        fabric.load(resume, state)
    fit(fabric, state, train_dataloader, val_dataloader, out_dir, max_steps)
    fabric.save(out_dir / "final" / "lit_model.pth", {"model": state["model"]})


def fit(fabric, state, train_dataloader, val_dataloader, out_dir, max_steps) -> None:  # type: ignore[no-untyped-def]
    model, optimizer = state["model"], state["optimizer"]
    skip = state["iter_num"]
    iterator = (batch for _ in range(10) for batch in train_dataloader)
    for _ in range(skip):
        next(iterator)
    for (train_data,) in iterator:
        if state["step_count"] >= max_steps:
            break
        lr = get_lr(state["iter_num"])
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        state["iter_num"] += 1
        input_ids, targets = train_data[:, : model.max_seq_length], train_data[:, 1:]
        is_accumulating = state["iter_num"] % ACCUMULATION != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(input_ids)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / ACCUMULATION)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
        metrics = {"loss": loss.item(), "iter": state["iter_num"], "learning_rate": lr}
        fabric.log_dict(metrics, step=state["iter_num"] - 1)
        if not is_accumulating and state["step_count"] % 4 == 0:
            val_loss = validate(fabric, model, val_dataloader)
            fabric.log_dict({"val_loss": val_loss.item()}, step=state["iter_num"] - 1)
            fabric.barrier()
            fabric.save(out_dir / f"step-{state['step_count']:08d}" / "lit_model.pth", state)


@torch.no_grad()
def validate(fabric, model, val_dataloader) -> torch.Tensor:  # type: ignore[no-untyped-def]
    fabric.barrier()
    model.eval()
    losses = []
    for (data,) in val_dataloader:
        logits = model(data[:, : model.max_seq_length])
        losses.append(F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()))
    model.train()
    return fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")


def get_lr(iteration: int) -> float:
    return 1e-2 * min(1.0, (iteration + 1) / 4)


def setup(out_dir: str, max_steps: str, resume: str | None = None) -> None:
    logger = CSVLogger(out_dir, name="logs")
    fabric = Fabric(devices="auto", strategy="auto", accelerator="cpu", precision="32-true", loggers=[logger])
    fabric.launch()
    main(fabric, Path(out_dir), int(max_steps), Path(resume) if resume else None)
    fabric.logger.finalize("success")


if __name__ == "__main__":
    setup(*sys.argv[1:])
