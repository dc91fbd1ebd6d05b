"""Write small checkpoints with other libraries, in an own process: `python -m helpers.resume.foreign_writers accelerate`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

__all__ = ["main"]


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def names_of(model: nn.Module, file: str) -> None:
    Path(file).write_text("\n".join(name for name, _ in model.named_parameters()))


def accelerate() -> None:
    """`save_state` to `accelerated` after three steps; `expected.pt` has the state of the optimizer."""
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))
    for _ in range(3):
        accelerator.backward(model(torch.randn(5, 4)).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state("accelerated")
    names_of(net, "accelerated.txt")


def transformers() -> None:
    """`checkpoint-3` of a Trainer, in the middle of the second epoch."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    tokens = torch.tensor([1, 2, 3, 4])
    arguments = TrainingArguments(
        ".", max_steps=3, per_device_train_batch_size=2, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 4).train()
    names_of(model, "trainer.txt")


def deepspeed() -> None:
    """A universal checkpoint `universal`, of three steps under ZeRO-2."""
    import deepspeed

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    net = small_net()
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    for _ in range(3):
        engine.backward(engine(torch.randn(5, 4)).square().mean())
        engine.step()
    engine.save_checkpoint("sharded", tag="last")
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    subprocess.run([*convert, "--input_folder", "sharded/last", "--output_folder", "universal"], check=True)
    torch.distributed.destroy_process_group()


def main(programs: list[str]) -> None:
    """Write the checkpoints of these programs to the working directory."""
    known = {"accelerate": accelerate, "transformers": transformers, "deepspeed": deepspeed}
    for program in programs:
        known[program]()


if __name__ == "__main__":
    main(sys.argv[1:])
