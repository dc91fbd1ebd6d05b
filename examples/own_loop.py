"""Keep your own training loop: the Accelerator without the Trainer.

    python examples/own_loop.py --epochs 20

The model is plain PyTorch, and so is the loop, except for `prepare`, `accumulate`, `backward` and `clip_grad_norm_`.
An optimizer step uses two batches; the optimizer and the scheduler step only after the second. Takes seconds on a CPU; needs
scikit-learn for its 1,797 handwritten digits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainkit import Accelerator, set_seed


def loaders(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """1,497 digits to train on, 300 to evaluate on: pixels (B, 64) in [0, 1] and labels (B,)."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    train, val = random_split(data, [1497, 300], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=300)


def main(argv: Sequence[str] | None = None) -> float:
    """Train and evaluate; returns the fraction of held-out digits that were classified correctly."""
    parser = argparse.ArgumentParser(description="Your own training loop, with the Accelerator.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    set_seed(args.seed)
    accelerator = Accelerator(precision=args.precision, gradient_accumulation_steps=2)
    train_loader, val_loader = loaders(args.batch_size)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = args.epochs * -(-len(train_loader) // accelerator.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )

    accuracy = 0.0
    for epoch in range(args.epochs):
        model.train()
        for pixels, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(pixels), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            hits = [(model(pixels).argmax(1) == labels).float() for pixels, labels in val_loader]
        accuracy = float(torch.cat(hits).mean())
        accelerator.print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
