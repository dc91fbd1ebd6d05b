"""A step on a CUDA device, compared with the loop written by hand, alternating in one process.

The batches are in pinned memory, and both loops copy them to the device: the loop by hand at the start of its step, trainkit
one batch ahead, while the device computes. Whole epochs are timed, and each ends with `torch.cuda.synchronize()`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit import Callback, Trainer, TrainModule

EPOCHS = 4  # the first is not counted


class Layers(TrainModule):
    """Square layers with a mean squared error."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class EpochTimes(Callback):
    """Seconds of each epoch, including the work that the device still has to finish at its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def by_hand(module: Layers, batches: list[list[Tensor]], mixed: bool) -> float:
    """Milliseconds per step of the loop by hand."""
    module.cuda()
    optimizer = module.configure_optimizers()
    seconds = []
    for _ in range(EPOCHS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number, cpu_batch in enumerate(batches):
            batch = [tensor.to("cuda", non_blocking=True) for tensor in cpu_batch]
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
                loss = module.training_step(batch, number)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]) / len(batches) * 1e3


def by_trainkit(module: Layers, batches: list[list[Tensor]], mixed: bool) -> float:
    """Milliseconds per step of `Trainer`."""
    times = EpochTimes()
    trainer = Trainer(
        accelerator="gpu",
        precision="bf16-mixed" if mixed else "32-true",
        max_epochs=EPOCHS,
        callbacks=[times],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        seed=0,
    )
    trainer.fit(module, batches)
    return min(times.seconds[1:]) / len(batches) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns 0, or 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch sees none")
        return 2
    figures = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'layers':<34}{'by hand ms':>12}{'trainkit ms':>13}{'ratio':>8}   range")
    for name, width, depth, size, steps, mixed in (
        ("2 × 64, batch 32, fp32", 64, 2, 32, 1000, False),
        ("6 × 2048, batch 512, fp32", 2048, 6, 512, 300, False),
        ("8 × 8192, batch 4096, bf16-mixed", 8192, 8, 4096, 60, True),
    ):
        ready = [[torch.randn(size, width).pin_memory(), torch.randn(size, width).pin_memory()] for _ in range(20)]
        batches = ready * (steps // len(ready))
        pairs = []
        for _ in range(arguments.repeats):
            torch.manual_seed(0)
            hand = by_hand(Layers(width, depth), batches, mixed)
            torch.manual_seed(0)
            pairs.append((hand, by_trainkit(Layers(width, depth), batches, mixed)))
        ratios = sorted(kit / hand for hand, kit in pairs)
        hand, kit = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(ratios)
        figures[name] = {"by_hand_ms": hand, "trainkit_ms": kit, "ratio": ratio, "range": [ratios[0], ratios[-1]]}
        print(f"{name:<34}{hand:>12.3f}{kit:>13.3f}{ratio:>8.3f}   {ratios[0]:.3f}–{ratios[-1]:.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
