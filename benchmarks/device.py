"""A step on one CUDA device, compared with the loop written by hand.

    python benchmarks/device.py [--only gpt compiled fp8 | wide prefetch ...] [--batch 16] [--repeats 3] [--json FILE]
    python benchmarks/device.py --device cpu --tiny      tries the program without a CUDA device

Layers: square layers with a mean squared error, three sizes; the large one in bf16-mixed. The batches are in pinned memory.

- trainer: `Trainer`, which copies the next batch while the device computes, compared with a loop that copies each batch at the
  start of its step.
- prefetch: `Trainer` compared with a loop whose batches are already on the device: what is left of the copies.

GPT: 124 million parameters (12 layers, 12 heads, width 768, sequences of 1,024 tokens of 50,304), AdamW(fused=True), compiled.

- compiled: bf16-mixed and `Trainer(compile="whole")`, compared with `torch.compile` and autocast by hand. It also gives tokens
  per second, whose ratio has to be at least 0.99, and the model FLOPs utilization (MFU).
- nccl: `strategy="ddp"` in a launched world of one, compared with `DistributedDataParallel` over NCCL.
- fsdp: `FSDPStrategy` with one device, compared with `fully_shard` of each block, over NCCL, with blocks compiled. Both have a
  `MixedPrecisionPolicy` with bfloat16 instead of autocast, with which one process shards too.
- half: 16-mixed, compared with `GradScaler`.
- fp8: fp8-mixed, compared with torchao's float8 layers, where the device computes in float8.

MFU is 6 N + 12 L H Q T floating-point operations per token (N: parameters without positions; layers, heads, size of a head,
tokens of a sequence), relative to the peak of the device in bf16 without sparsity, from the data sheets of its manufacturer.

`pairs.py` explains how it is measured: two processes take turns on the device, and wait for it at the end of a chunk.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from pairs import Clock, Contender, argument_parser, compare
from report import Column, Report, Spread
from torch import Tensor, nn
from torch.nn import functional as F

LEAST_TOKENS = 0.99  # tokens per second, relative to the loop by hand
DIFFERENT = 20  # number of different batches
# Dense bf16 operations per second by the beginning of the device's name; the first that matches.
PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


class Size(NamedTuple):
    """Layers of a width, the samples of a batch, and the steps of a chunk."""

    width: int
    depth: int
    batch: int
    steps: int
    mixed: bool


LAYERS = {
    "small": Size(64, 2, 32, 200, False),
    "wide": Size(2048, 6, 512, 50, False),
    "large": Size(8192, 8, 4096, 10, True),
}
STEPS = {**{name: size.steps for name, size in LAYERS.items()}, "gpt": 10}


# ------------------------------------------------------------------------------------------------ the models


class Layers(nn.Module):
    """Square layers with a mean squared error."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(x)
        return out


class GPT(nn.Module):
    """The architecture of GPT-2; its forward returns the loss. Embedding and head share their weight."""

    def __init__(self, *, depth: int, heads: int, width: int, context: int, tokens: int) -> None:
        super().__init__()
        self.shape = (depth, heads, width // heads, context)
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1]) + self.positions.weight[: batch.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    @property
    def flops(self) -> float:
        """Floating-point operations per token, of forward and backward."""
        depth, heads, size, context = self.shape
        counted = sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()
        return 6.0 * counted + 12.0 * depth * heads * size * context


def gpt(tiny: bool) -> GPT:
    if tiny:
        return GPT(depth=2, heads=2, width=32, context=16, tokens=64)
    return GPT(depth=12, heads=12, width=768, context=1024, tokens=50304)


class Task:
    """What one process trains: a model, its batches, and the options of the command line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.cuda, self.tiny = arguments.device == "cuda", arguments.tiny
        self.device = torch.device(arguments.device)
        steps, wait = STEPS[arguments.model], torch.cuda.synchronize if self.cuda else lambda: None
        self.clock = Clock(steps, arguments.chunks, arguments.turns, arguments.reports, wait=wait)
        self.mixed = True
        if arguments.model == "gpt":
            self.net: nn.Module = gpt(self.tiny)
            shape, tokens = (arguments.batch, self.net.shape[3] + 1), self.net.embedding.num_embeddings
            ready: list[list[Tensor]] = [[torch.randint(tokens, shape)] for _ in range(DIFFERENT)]
        else:
            width, depth, batch, _, self.mixed = LAYERS[arguments.model]
            width, batch = (16, 4) if self.tiny else (width, batch)
            self.net = Layers(width, depth)
            ready = [[torch.randn(batch, width), torch.randn(batch, width)] for _ in range(DIFFERENT)]
        self.ready = [[tensor.pin_memory() for tensor in batch] for batch in ready] if self.cuda else ready

    def batches(self, ready: list[list[Tensor]] | None = None) -> list[list[Tensor]]:
        """Batches for all steps."""
        return list(islice(cycle(ready or self.ready), self.clock.batches))

    def backend(self) -> str:
        return "nccl" if self.cuda else "gloo"


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def in_blocks(layer: nn.Module, name: str) -> bool:
    """Whether a layer computes in float8: the linear layers of the blocks."""
    return isinstance(layer, nn.Linear) and "blocks." in name


# ------------------------------------------------------------------------------------------------ the loops


def hand(
    task: Task,
    *,
    resident: bool = False,
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    wrap: Callable[[Task, nn.Module], nn.Module] | None = None,
) -> None:
    """The loop by hand.

    Args:
        task: what is trained.
        resident: the batches are on the device before.
        compiled: compile the model.
        dtype: of autocast.
        wrap: wraps the model that is on the device.
    """
    model: Any = task.net.to(task.device)
    model = wrap(task, model) if wrap is not None else model
    model = torch.compile(model) if compiled else model
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(task.device.type, enabled=dtype == torch.float16)
    ready = [[tensor.to(task.device) for tensor in batch] for batch in task.ready] if resident else task.ready
    for on_host in task.batches(ready):
        task.clock.step()
        batch = [tensor.to(task.device, non_blocking=True) for tensor in on_host]
        optimizer.zero_grad()
        with autocast(task, dtype):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def autocast(task: Task, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(task.device.type, dtype, enabled=task.mixed and dtype != torch.float32)


def in_ddp(task: Task, model: nn.Module) -> nn.Module:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(task.backend())
    return DistributedDataParallel(torch.compile(model))


def in_fsdp(task: Task, model: Any) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group(task.backend())
    mesh = dist.init_device_mesh(task.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def in_float8(task: Task, model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=not task.cuda, pad_inner_dim=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=in_blocks)


def trainer(task: Task, *, precision: str | None = None, **options: Any) -> None:
    """`Trainer`."""
    from trainkit import Callback, Trainer, TrainModule
    from trainkit.precision import Float8Precision

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    class Clocked(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            task.clock.step()

    chosen: Any = precision or ("bf16-mixed" if task.mixed else "32-true")
    if chosen == "fp8-mixed":
        chosen = Float8Precision(filter=lambda name, layer: in_blocks(layer, name), emulate=not task.cuda)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    Trainer(
        accelerator="gpu" if task.cuda else "cpu",
        devices=1,
        max_epochs=1,
        precision=chosen,
        callbacks=[Clocked()],
        **options,
        **quiet,
    ).fit(Module(), task.batches())


def trainer_with_fsdp(task: Task) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from trainkit.strategies import FSDPStrategy

    strategy = FSDPStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    trainer(task, precision="32-true", compile="regional", strategy=strategy)


def contender(title: str, train: Callable[..., None], reference: str, **options: Any) -> Contender:
    return Contender(title, partial(train, **options), reference, None)


OF_LAYERS = {
    "hand": contender("the loop by hand / itself", hand, "hand"),
    "resident": contender("by hand, batches on the device", hand, "resident", resident=True),
    "trainer": contender("Trainer", trainer, "hand"),
    "prefetch": contender("Trainer / batches on the device", trainer, "resident"),
}
OF_GPT = {
    "hand_compiled": contender("by hand", hand, "hand_compiled", compiled=True),
    "hand_nccl": contender("DDP by hand", hand, "hand_nccl", wrap=in_ddp),
    "hand_fsdp": contender("fully_shard by hand", hand, "hand_fsdp", dtype=torch.float32, wrap=in_fsdp),
    "hand_half": contender("GradScaler by hand", hand, "hand_half", compiled=True, dtype=torch.float16),
    "hand_fp8": contender("float8 by hand", hand, "hand_fp8", compiled=True, wrap=in_float8),
    "compiled": contender("bf16-mixed, compiled", trainer, "hand_compiled", compile="whole"),
    "nccl": contender("DDP, a world of one", trainer, "hand_nccl", compile="whole", strategy="ddp"),
    "fsdp": contender("FSDP, one device", trainer_with_fsdp, "hand_fsdp"),
    "half": contender("16-mixed, compiled", trainer, "hand_half", compile="whole", precision="16-mixed"),
    "fp8": contender("fp8-mixed, compiled", trainer, "hand_fp8", compile="whole", precision="fp8-mixed"),
}
REFERENCES = ["resident", *(name for name in OF_GPT if name.startswith("hand_"))]
LAUNCHED = ("nccl", "fsdp")  # the processes that are a world of one; the others are not launched


# ------------------------------------------------------------------------------------------------ the measurement


def work(arguments: argparse.Namespace) -> None:
    """Run one process."""
    if not arguments.work.endswith(LAUNCHED):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    torch.set_float32_matmul_precision("high")
    (OF_GPT if arguments.model == "gpt" else OF_LAYERS)[arguments.work].train(Task(arguments))


def computes_float8(device: str) -> bool:
    """Whether the device computes in float8; a CPU emulates it, to try the program."""
    return device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


def peak_of(device: str) -> float | None:
    """The peak in bf16 operations per second, if it is known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for known, peak in PEAKS.items() if re.match(rf"{known}\b", name)), None)


def add_tokens(report: Report, pairs: dict[tuple[str, str], list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    """Add tokens per second, and how much of the device they use."""
    net, peak = gpt(arguments.tiny), arguments.peak or peak_of(arguments.device)
    columns = (Column("by hand", 0), Column("it", 0), Column("ratio (range)", 3), Column("MFU by hand, %"), Column("MFU, %"))
    table = report.table("tokens a second", *columns)
    for (_, name), found in pairs.items():
        tokens = arguments.batch * net.shape[3] * 1e3
        by_hand, its = (tokens / statistics.median(pair[f"wall_{key}"] for pair in found) for key in ("by_hand_ms", "ms"))
        ratio = Spread.of([1 / pair["wall_ratio"] for pair in found])
        used = [rate * net.flops / peak * 100 if peak else None for rate in (by_hand, its)]
        least = LEAST_TOKENS if name == "compiled" else None
        table.add(f"gpt: {OF_GPT[name].title}", by_hand, its, ratio, *used, judged=ratio.median, least=least)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, [*OF_LAYERS, *OF_GPT], (*LAYERS, "gpt"))
    parser.set_defaults(repeats=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, which only try the program")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch of the GPT (default: 16)")
    parser.add_argument("--peak", type=float, help="operations per second of the device in bf16, for one that is not known")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and return 1 if the limit is missed, 2 without a CUDA device."""
    arguments = parse_arguments()
    if arguments.work:
        work(arguments)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch sees none; --device cpu --tiny tries the program without one")
        return 2
    arguments.more = ["--device", arguments.device, f"--batch={arguments.batch}", *["--tiny"] * arguments.tiny]
    report = Report(device=torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", batch=arguments.batch)
    only = arguments.only
    if only is None or set(only) & {*LAYERS, *OF_LAYERS}:
        compare(report, __file__, arguments, OF_LAYERS, REFERENCES, 1, tuple(LAYERS), STEPS)
    if only is None or set(only) & {"gpt", *OF_GPT}:
        left_out = [] if computes_float8(arguments.device) else ["fp8"]
        pairs = compare(report, __file__, arguments, OF_GPT, [*REFERENCES, *left_out], 1, ("gpt",), STEPS)
        add_tokens(report, pairs, arguments)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
