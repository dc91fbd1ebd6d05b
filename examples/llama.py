"""Train a small Llama-like model with FSDP, tensor parallelism and `torch.compile`, and stop and resume it as you like.

    python examples/llama.py --devices 2 --strategy fsdp                        # parameters are sharded over 2 processes
    python examples/llama.py --devices 4 --strategy fsdp --tensor-parallel 2    # pairs of processes compute each layer
    python examples/llama.py --devices 1 --compile                              # resumes any of these on one process

The model learns Python from the standard library's source files, byte by byte. It has the parts of Llama 3: RMSNorm, rotary
positions, grouped-query attention and SwiGLU. All commands continue the run in `--root` if it has a checkpoint there. To
use the weights elsewhere:

    python -m trainkit checkpoint export trainkit_runs/llama/logs/default/version_0/checkpoints/step-00000300 weights

The default takes a few minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from trainkit import Callback, Trainer, TrainModule, seed_everything
from trainkit.callbacks import ModelCheckpoint
from trainkit.cli.demo import SourceCode
from trainkit.loggers import CSVLogger
from trainkit.strategies import FSDPStrategy

BYTES = 256


class Attention(nn.Module):
    """Causal attention in which several query heads share one head of keys and values (Ainslie et al., "GQA", 2023)."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads  # features of a head
        self.query = nn.Linear(width, heads * self.size, bias=False)
        self.key = nn.Linear(width, kv_heads * self.size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        # -1 for the number of heads: under tensor parallelism, each process has a part of them
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        y = F.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of features by angles that grow with the position (Su et al., "RoFormer", 2021)."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class MLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """Attention, then SwiGLU, each with a residual connection. What FSDP shards and `compile=True` compiles by itself."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        x = x + self.mlp(self.mlp_norm(x))
        return x


# How a tensor-parallel group shares the work. Between the matrices of a layer, each process has a part of the heads or of
# the hidden features. Between layers, it has a part of the positions (sequence parallelism).
BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
MODEL_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    # each process keeps the logits of its part of the vocabulary, for loss_parallel
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


class Llama(TrainModule):
    """Predicts the next byte of a text. A batch is an integer tensor of shape (B, T + 1).

    Under tensor parallelism, `heads`, `kv_heads`, `hidden` and T must be multiples of the size of a group.

    Args:
        width: Size of the residual stream.
        depth: Number of blocks.
        heads: Number of query heads; `width / heads` must be an even number.
        kv_heads: Number of heads of keys and values, of which `heads` must be a multiple.
        hidden: Number of hidden features of SwiGLU.
        context: Maximum number of bytes that it attends to.
        learning_rate: Learning rate at the start; it falls along a cosine to 0.
    """

    rotation: Tensor

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 352,
        context: int = 64,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList([Block(width, heads, kv_heads, hidden) for _ in range(depth)])
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, BYTES, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(context), 10_000.0 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # what is added to the residual stream shrinks with the number of additions (GPT-2)
                scale = (2 * depth) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte that follows each of `tokens` (B, T): shape (B, T, 256)."""
        # The number of positions comes from the tokens: under sequence parallelism, x has only a part of them.
        rotation = self.rotation[:, : tokens.shape[1]]
        x = self.embedding(tokens.long())
        for layer in self.layers:
            x = layer(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Share the work on each layer over the processes of a tensor-parallel group."""
        for layer in self.layers:
            parallelize_module(layer, mesh["tensor"], BLOCK_PLAN)
        parallelize_module(self, mesh["tensor"], MODEL_PLAN)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        logits = self(batch[:, :-1]).flatten(0, 1)
        targets = batch[:, 1:].flatten().long()
        if not isinstance(logits, DTensor):
            return F.cross_entropy(logits, targets)
        with loss_parallel():  # no process gathers the logits of the whole vocabulary
            loss: Any = F.cross_entropy(logits, targets)
        whole: Tensor = loss.full_tensor()
        return whole

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward of a loss that was computed in `loss_parallel` must run in it too."""
        with loss_parallel():
            super().backward(loss, *args, **kwargs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach() / math.log(2), prog_bar=True)  # in bits per byte
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        gains = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KillAt(Callback):
    """Kills the process with the highest rank without warning, to show that the run can be resumed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only SIGTERM, which does the same


def main(argv: Sequence[str] | None = None) -> float:
    """Train, from the newest checkpoint if there is one; returns the validation loss in bits per byte."""
    parser = argparse.ArgumentParser(description="A Llama-like model on Python's standard library.")
    parser.add_argument("--devices", default="auto", help="processes, each with one device; may change at a resume")
    parser.add_argument("--strategy", default="auto", help="such as ddp or fsdp; may change at a resume")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that compute each layer; needs fsdp")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a batch of one process")
    parser.add_argument("--global-batch-size", type=int, default=32, help="samples in an optimizer step")
    parser.add_argument("--context", type=int, default=64, help="bytes in a training sample")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="end a process with SIGKILL after this step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/llama", help="where logs and checkpoints go")
    args = parser.parse_args(argv)
    if args.tensor_parallel > 1 and args.strategy != "fsdp":
        parser.error("--tensor-parallel needs --strategy fsdp")

    seed_everything(args.seed)  # also determines the initial parameters
    data = SourceCode(context=args.context, batch_size=args.batch_size, val_windows=256)
    model = Llama(args.width, args.depth, hidden=args.width * 11 // 4, context=args.context, learning_rate=args.learning_rate)
    trainer = Trainer(
        devices=args.devices,
        strategy=FSDPStrategy(tensor_parallel=args.tensor_parallel) if args.tensor_parallel > 1 else args.strategy,
        compile=args.compile,
        precision=args.precision,
        max_steps=args.max_steps,
        val_every_n_steps=max(args.max_steps // 3, 1),
        log_every_n_steps=10,
        global_batch_size=args.global_batch_size,
        gradient_clip_val=1.0,
        logger=CSVLogger(),
        callbacks=[
            ModelCheckpoint(every_n_train_steps=args.save_every),
            *([KillAt(args.kill_at)] if args.kill_at else []),
        ],
        default_root_dir=args.root,
    )
    trainer.fit(model, datamodule=data, ckpt_path="auto")
    loss = float(trainer.callback_metrics["val_loss"])
    if trainer.is_global_zero:
        print(f"{loss:.3f} bits per byte after {trainer.global_step} optimizer steps; logs in {trainer.log_dir}")
    return loss


if __name__ == "__main__":
    main()
