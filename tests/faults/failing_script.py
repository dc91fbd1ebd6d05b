"""A training script in which one process fails: `python failing_script.py KIND RANK FOLDER [--spawn]`.

KIND: raise, kill, exit, leave (`os._exit(0)`), hang, validation (raise in a validation), setup (raise before training), none.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Callback, Trainer, TrainModule
from trainkit.strategies import DDPStrategy

UPDATE = 5  # the optimizer step in which the process fails


class Failing(Callback):
    """Makes the process of one rank fail in the way that `kind` names."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.kind == "setup" and trainer.global_rank == self.rank:
            raise ValueError("this process fails in setup")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != UPDATE or trainer.global_rank != self.rank:
            return
        print(f"failing on rank {self.rank}", flush=True)
        if self.kind == "raise":
            raise ValueError("this process fails on purpose")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            sys.exit(3)
        if self.kind == "leave":
            os._exit(0)
        if self.kind == "hang":
            this_line_hangs()

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.kind == "validation" and trainer.global_rank == self.rank and not trainer.sanity_checking:
            raise ValueError("this process fails in validation")


def this_line_hangs() -> None:
    time.sleep(1000)


class Line(TrainModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(kind: str, rank: int, folder: Path) -> None:
    """Train on two processes."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(device="cpu", timeout=timedelta(seconds=float(os.environ["TIMEOUT"]) if kind == "hang" else 1800)),
        callbacks=Failing(kind, rank),
        max_steps=20 if kind == "none" else 100_000,
        max_epochs=-1,
        val_check_interval=10,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (folder / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))
    data = TensorDataset(torch.randn(80, 4), torch.randn(80, 1))
    loader = DataLoader(data, 2, shuffle=True)
    trainer.fit(Line(), loader, loader)
    print(f"rank {trainer.global_rank} has finished", flush=True)


def spawned(local_rank: int, kind: str, rank: int, folder: Path) -> None:
    """Run by each process of `mp.spawn`: creates the process group itself, then trains."""
    torch.distributed.init_process_group("gloo", rank=local_rank, world_size=2)
    main(kind, rank, folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    chosen = (sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    torch.set_num_threads(1)
    if "--spawn" in sys.argv:
        torch.multiprocessing.spawn(spawned, chosen, nprocs=2)
    else:
        main(*chosen)
