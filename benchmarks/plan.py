"""The memory that real runs use, compared with the values of `trainer.plan`.

    python benchmarks/plan.py [--only zero1 …] [--processes 1 2] [--precisions 32-true …] [--nvme FOLDER] [--json FILE]
    python benchmarks/plan.py --batch 16 --tokens 256 [--checkpointing] …

Feed-forward layers of a transformer with about 13 million parameters, one sample per batch, AdamW(fused=True). With `--batch`
the layers have attention too and read sequences of tokens, so that activations count. Real processes train them for three
steps over gloo on the CPU, where device and host are the same memory. Each process is measured, and the largest value counts:

- tensors: the storages of all tensors that Python can see, at the end of the last `optimizer.step()`; compared with the plan's
  moment `"update"`. Python cannot see DDP's buckets, so both sides omit them.
- RSS: how far the resident memory (`VmHWM`, reset before the second step) rises above that of the process after the same
  training of a tiny model; compared with the largest moment of the plan. Large blocks are mapped one by one and returned to
  the system immediately (`MALLOC_MMAP_THRESHOLD_`), so that only memory in use counts.
- NVMe: the bytes of the files there, per process.
- checkpoint: the bytes of the folder that `Trainer.save_checkpoint` writes, compared with those of the plan.

A row fails if it differs by more than 10 % (15 % with `--batch`), or 1 % for a checkpoint; then the program returns 1.
Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Column, Report, Table, json_option
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from trainkit import Trainer, TrainModule
from trainkit.strategies import DDPStrategy, FSDPStrategy, ZeROStrategy

KINDS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {},
    **{f"zero{stage}": {"stage": stage} for stage in (1, 2, 3)},
    **{f"zero{stage}, optimizer on cpu": {"stage": stage, "offload_optimizer": "cpu"} for stage in (1, 2, 3)},
    "zero3, both on cpu": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3, optimizer on nvme": {"stage": 3, "offload_optimizer": "nvme"},
    "zero3, both on nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
    "fsdp": {},
    "fsdp, both on cpu": {"offload_params": "cpu"},
}
TITLES = {"tensors": "tensors", "rss": "RSS", "checkpoint": "checkpoint", "disk": "NVMe"}
LIMIT, ACTIVATIONS_LIMIT, CHECKPOINT_LIMIT = 0.1, 0.15, 0.01
seen_high: list[int] = []


class Watched(torch.optim.AdamW):
    """Calls a function at the end of each step."""

    look: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> Any:
        result = super().step()
        if Watched.look is not None:
            Watched.look()
        return result


class Attention(nn.Module):
    """Causal attention with heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention or none, and a feed-forward layer, with residual connections."""

    def __init__(self, width: int, attends: bool) -> None:
        super().__init__()
        self.attention = Attention(width) if attends else None
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(x)
        out: Tensor = x + self.layer(x)
        return out


class Layers(TrainModule):
    """An embedding, feed-forward layers with norms, and a head."""

    attends = False
    folder: Path | None = None  # for a checkpoint at the end

    def __init__(self, width: int, layers: int, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(4 * width, width)
        self.layers = nn.ModuleList(Block(width, self.attends) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def mark(self) -> None:
        """Measure the peak of the second step."""
        if self.trainer.global_step == 1:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        if self.trainer.global_step == 2:
            seen_high[:] = [resident("VmHWM")]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mark()
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.arange(64 * math.prod(self.shape[1:])).remainder(self.embedding.num_embeddings)
        return DataLoader(data.view(64, *self.shape[1:]), batch_size=self.shape[0] if self.shape else 1)  # type: ignore[arg-type]

    def on_train_end(self) -> None:
        if Layers.folder is not None:
            self.trainer.save_checkpoint(Layers.folder / "saved")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Watched(self.parameters(), lr=1e-4, fused=True)


class GPT(Layers):
    """The same with attention, over sequences of tokens.

    Args:
        shape: Samples in a batch, and tokens in a sample.
        checkpointing: Compute the activations of each layer again in the backward.
    """

    attends = True

    def __init__(self, width: int, layers: int, shape: tuple[int, ...], checkpointing: bool) -> None:
        super().__init__(width, layers, shape)
        self.checkpointing = checkpointing
        self.head = nn.Linear(width, self.embedding.num_embeddings)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mark()
        x = self.embedding(batch)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def local(tensor: Any) -> Any:
    """This process's shard of a sharded tensor; another tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor.detach()
    return sharded.to_local()


def live() -> int:
    """Bytes of all tensors that Python can see."""
    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if isinstance(thing, Tensor):
                for whole in (thing, thing.grad if thing.is_leaf else None):
                    tensor = local(whole)
                    if tensor is not None and tensor.device.type == "cpu":
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def resident(name: str) -> int:
    """`VmRSS` or `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def train(kind: str, precision: str, module: Layers, nvme: str | None) -> Trainer:
    """Three optimizer steps."""
    options = dict(KINDS[kind])
    if "nvme" in options.values():
        options["nvme_path"] = nvme
    strategy: Any = DDPStrategy() if kind == "ddp" else "auto"
    if "zero" in kind or "fsdp" in kind:
        strategy = (ZeROStrategy if "zero" in kind else FSDPStrategy)(**options)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(accelerator="cpu", strategy=strategy, precision=precision, max_steps=3, **quiet)
    trainer.fit(module)
    return trainer


def make(options: argparse.Namespace, width: int, layers: int, batch: int, tokens: int) -> Layers:
    """A module."""
    return GPT(width, layers, (batch, tokens), options.checkpointing) if options.batch else Layers(width, layers)


def work(kind: str, precision: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one process; returns its memory, and the values of the plan."""
    nvme, sizes = options.nvme, (options.width, options.layers, options.batch, options.tokens)
    train(kind, precision, make(options, 64, 1, 2, 4), nvme)
    gc.collect()
    tensors, rss = live(), resident("VmRSS")
    seen: list[int] = []
    disk = [0]

    def look() -> None:
        seen.append(live() - tensors)
        if nvme is not None and "nvme" in kind:
            disk[0] = sum(file.stat().st_size for file in Path(nvme).rglob("*") if file.is_file())

    Watched.look = look
    Layers.folder = Path(folder)
    module = make(options, *sizes)
    trainer = train(kind, precision, module, nvme)
    Watched.look = None
    stored = sum(file.stat().st_size for file in (Path(folder) / "saved").iterdir())
    high, world = seen_high[0] - rss, trainer.world_size
    plan = Trainer(accelerator="cpu", strategy=trainer.strategy, precision=precision, logger=False).plan(
        make(options, *sizes), processes=[world]
    )
    footprint = next(row.footprint for row in plan.rows if row.strategy == kind and row.processes == world)
    moment = footprint.moments["update"]
    update = moment.device + moment.host
    return {
        "tensors": seen[-1],
        "said_tensors": update.total - (update.buffers if kind == "ddp" else 0),
        "rss": high,
        "said_rss": footprint.together.total,
        "checkpoint": stored,
        "said_checkpoint": footprint.checkpoint,
        "disk": disk[0] / world,
        "said_disk": footprint.disk,
    }


def measure(kind: str, precision: str, size: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Start the processes of a run; returns the largest value of all processes."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="benchmark-")
    command = [sys.executable, __file__, "--work", kind, precision, folder, json.dumps(vars(arguments), default=str)]
    processes = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        environment = {
            **os.environ,
            **({name: str(value) for name, value in place.items()} if size > 1 else {}),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
        }
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate() for process in processes]
    shutil.rmtree(folder)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{kind}, {precision}, {size} processes failed:\n" + "\n".join(err[-3000:] for _, err in outputs))
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    return {name: max(one[name] for one in found) for name in found[0]}


def add(table: Table, name: str, row: dict[str, float], limit: float) -> None:
    """Add what was measured, next to what the plan says."""
    limits = {"tensors": LIMIT, "rss": limit, "checkpoint": CHECKPOINT_LIMIT}
    for what, most in (limits | ({"disk": LIMIT} if row["said_disk"] else {})).items():
        found, said = row[what], row[f"said_{what}"]
        ratio = found / said
        table.add(f"{name}: {TITLES[what]}", found / 1e6, said / 1e6, ratio, judged=ratio, least=1 - most, most=1 + most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help=f"beginnings of: {'; '.join(KINDS)}")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-true"])
    parser.add_argument("--nvme", help="a folder on a disk; without it nothing is offloaded to one")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=0, help="samples in a batch, of a model with attention")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward")
    json_option(parser)
    arguments = parser.parse_args()
    limit = ACTIVATIONS_LIMIT if arguments.batch else LIMIT
    report = Report()
    table = report.table("MB, largest process", Column("measured"), Column("plan"), Column("ratio", 3))
    for kind in KINDS:
        chosen = arguments.only is None or any(kind.startswith(only) for only in arguments.only)
        if not chosen or ("nvme" in kind and arguments.nvme is None):
            continue
        for size in arguments.processes:
            for precision in arguments.precisions:
                if (kind == "single" and size > 1) or (kind == "fsdp, both on cpu" and size == 1):
                    continue  # the second one plans a copy on the device, which a single process on a CPU does not make
                processes = "one process" if size == 1 else f"{size} processes"
                add(table, f"{kind}, {processes}, {precision}", measure(kind, precision, size, arguments), limit)
    return report.finish(arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        kind, precision, saved, options = sys.argv[2:]
        print(json.dumps(work(kind, precision, saved, argparse.Namespace(**json.loads(options)))))
    else:
        sys.exit(main())
