"""What a training step under FSDP costs, compared with a loop over torch's `fully_shard` by hand, and its memory.

    python benchmarks/fsdp.py [--only gpt5 gpt_wide trainer ... | memory] [--repeats 5] [--chunks 16] [--json FILE]

Steps: two processes over gloo on the CPU; the GPT of `trainkit demo` with 5 blocks (1.6 million parameters), and one with wider
blocks (11 million); AdamW, float32, gradients clipped to a norm of 1. The loop by hand calls `fully_shard` for the same blocks
and for the model, and reads the same data. `pairs.py` explains how it is measured.

Memory: one of several processes of your own training loop, with 36 million parameters and AdamW.

- held: how far its private memory rises above that after the same training of a tiny model, at the end of an optimizer step,
  before gradients are cleared; compared with its shard of parameters, gradients and optimizer state, plus the largest block.
- save: how far the peak of its resident memory rises above its memory before `save_state`; compared with the largest tensor
  (for a blocking save) or with its shard of the state (for a save in the background); one gathered tensor is added to either,
  since on a CPU, device and host are the same memory.
- load: how far its private memory rises above that after the same training of a tiny model, while a model that was created on
  the meta device is prepared, and `load_state` loads it and its optimizer; compared with its shard of parameters and optimizer
  state, plus the largest tensor. Mapped files do not count, since the system can drop them when it needs memory.

Returns 1 if a ratio of wall-clock times is above 1.03, or a ratio of memory above 1.10. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pairs import BATCH, ROOT, Clocked, Contender, adamw, argument_parser, compare, fit, loss_of, make_module, own_loop, work
from report import Column, Report
from resident import Peak, resident
from torch import nn
from torch.utils.data import DataLoader

LIMIT, MEMORY_LIMIT, CLIP = 1.03, 1.10, 1.0
MODELS = ("gpt5", "gpt_wide")
WIDTH, BLOCKS = 1024, 8
MEMORY = ("held", "save", "save_in_background", "load")


def hand(model: str, data: Clocked) -> None:
    """The loop of PyTorch's tutorial."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    module: Any = make_module(model)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = adamw(module)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    sampler.set_epoch(0)
    for batch in DataLoader(data, BATCH[model], sampler=sampler):
        optimizer.zero_grad()
        loss_of(model, module, batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
    dist.destroy_process_group()


def trainer(model: str, data: Clocked) -> None:
    fit("fsdp", model, data, gradient_clip_val=CLIP)


def loop_with_accelerator(model: str, data: Clocked) -> None:
    from trainkit.strategies import FSDPStrategy

    own_loop(FSDPStrategy(device="cpu"), model, data, CLIP)


CONTENDERS = {
    "hand": Contender("the loop by hand / itself", hand, "hand", None),
    "trainer": Contender("Trainer", trainer, "hand", LIMIT),
    "own_loop": Contender("Accelerator, own loop", loop_with_accelerator, "hand", LIMIT),
}


# --------------------------------------------------------------------------------------------------------------- memory


class Block(nn.Module):
    """Four linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.layers(x)
        return out


def network(width: int) -> nn.Module:
    """Blocks and a linear layer."""
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)), nn.Linear(width, width))


def trained(width: int) -> tuple[Any, Any, float]:
    """The accelerator of your own training loop and its optimizer after two optimizer steps; and the private memory then."""
    from trainkit import Accelerator
    from trainkit.strategies import FSDPStrategy

    accelerator = Accelerator(strategy=FSDPStrategy(device="cpu"))
    net = network(width)
    optimizer: Any = torch.optim.AdamW(net.parameters(), fused=True)
    model, optimizer = accelerator.prepare(net, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, width)).square().mean())
        optimizer.step()
    gc.collect()
    held = resident("RssAnon")
    optimizer.zero_grad()
    return accelerator, optimizer, held


def load(folder: Path) -> float:
    """Load a model that was created without values, and its optimizer; returns the peak of the private memory."""
    from trainkit import Accelerator
    from trainkit.strategies import FSDPStrategy

    accelerator = Accelerator(strategy=FSDPStrategy(device="cpu"))
    with torch.device("meta"):
        net = network(WIDTH)
    with Peak() as peak:
        model = accelerator.prepare(net)
        accelerator.prepare(torch.optim.AdamW(model.parameters(), fused=True))
        accelerator.load_state(folder)
    return float(peak.found)


def measure_memory(what: str, folder: Path) -> None:
    """Print the MB that the run needs, and the allowed MB. A load reads the checkpoint that an earlier call saved."""
    accelerator, _optimizer, tiny = trained(16)
    linear, largest = 4 * (WIDTH + 1) * WIDTH / 1e6, 4 * WIDTH * WIDTH / 1e6
    shard = (4 * BLOCKS + 1) * linear / accelerator.world.size  # of parameters, of gradients, or of one of AdamW's two slots
    if what == "load":
        taken, allowed = load(folder) - tiny, 3 * shard + largest
    else:
        accelerator, _optimizer, held = trained(WIDTH)
        taken, allowed = held - tiny, 4 * shard + 4 * linear
    if what.startswith("save"):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = resident("VmRSS")
        accelerator.save_state(folder, blocking=what == "save")
        while not folder.exists():
            time.sleep(0.01)
        taken, allowed = resident("VmHWM") - before, largest + (largest if what == "save" else 3 * shard)
    if accelerator.is_main_process:
        print(f"{taken} {allowed}", flush=True)


def taken_and_allowed(what: str, size: int, folder: str) -> tuple[float, float]:
    """Run `measure_memory` in new processes; returns the two values that the main process prints."""
    command = [sys.executable, "-m", "trainkit", "launch", "--nproc-per-node", str(size), __file__, "--memory", what]
    # Large blocks are returned to the system, so that only memory in use is measured.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    place = f"{folder}/{'save' if what == 'load' else what}"
    done = subprocess.run([*command, place], env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what}, {size} processes failed:\n{done.stderr[-3000:]}")
    taken, allowed = map(float, done.stdout.split()[-2:])
    return taken, allowed


def compare_memory(report: Report) -> None:
    """Measure, and add a table."""
    table = report.table("MB of a process", Column("it"), Column("allowed"), Column("ratio", 2))
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            for what in MEMORY if size > 1 else MEMORY[:-1]:  # a single process loads without sharding
                taken, allowed = taken_and_allowed(what, size, folder)
                ratio = taken / allowed
                table.add(f"{size}: {what}", taken, allowed, ratio, judged=ratio, most=MEMORY_LIMIT)


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    parser = argument_parser(__doc__, [*CONTENDERS, "memory"], MODELS)
    parser.add_argument("--memory", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        what, folder = arguments.memory
        measure_memory(what, Path(folder))
        return 0
    if arguments.work:
        work(arguments, CONTENDERS)
        return 0
    report = Report()
    if arguments.only != ["memory"]:
        compare(report, __file__, arguments, CONTENDERS, models=MODELS)
    if arguments.only in (None, ["memory"]):
        compare_memory(report)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
