"""PyTorch's DDP tutorials with trainkit's Trainer: `python tutorial_script.py spawn|torchrun FOLDER`.

One tutorial starts its processes with `mp.spawn` and initializes the process group itself; the other is started by torchrun.
Both pass a `DistributedSampler` to the loader.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from trainkit import Trainer, TrainModule

SAMPLES, EPOCHS, BATCH = 53, 2, 4


class MyTrainDataset(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


class Model(TrainModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = torch.nn.Linear(20, 1)
        self.folder = folder
        self.seen: list[list[int]] = [[] for _ in range(EPOCHS)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        source, target, index = batch
        self.seen[self.current_epoch] += index.tolist()
        return F.mse_loss(self.net(source), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        (self.folder / f"seen-{self.global_rank}.json").write_text(json.dumps(self.seen))


def prepare_dataloader(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def train(folder: Path) -> None:
    train_data = prepare_dataloader(MyTrainDataset(SAMPLES), BATCH)
    train_data.sampler.set_epoch(0)  # type: ignore[attr-defined]
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        max_epochs=EPOCHS,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(folder), train_data)


def main_of_spawn(rank: int, world_size: int, folder: Path) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)
    train(folder)
    dist.destroy_process_group()


def main_of_torchrun(folder: Path) -> None:
    dist.init_process_group(backend="gloo")
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(main_of_spawn, args=(2, Path(sys.argv[2])), nprocs=2)  # type: ignore[no-untyped-call]
    else:
        main_of_torchrun(Path(sys.argv[2]))
