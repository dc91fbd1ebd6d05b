"""What a training step under ZeRO costs, compared with DeepSpeed's engine by hand, and the memory of a save and a load.

    python benchmarks/zero.py [--only mlp gpt zero2 ... | memory] [--repeats 5] [--chunks 16] [--json FILE]

Steps: two processes over gloo on the CPU; a multilayer perceptron with 10 million parameters, and the byte-level GPT of
`trainkit demo`; AdamW, float32. The loop by hand calls `deepspeed.initialize` with the same configuration that
`ZeROStrategy(config=)` gets, and reads the same data. `pairs.py` explains how it is measured.

Memory: one of two processes of your own training loop, with 36 million parameters and AdamW, 430 MB of state. For `save_state`:
how far the peak of the process's resident memory rises above its memory before the call, compared with the largest tensor (for
a blocking save) or with its shard of the state (for a save in the background); one gathered tensor is added to either, since
on a CPU, device and host are the same memory. For `load_state`: how far its private memory rises above its memory after the
call, compared with the largest tensor. Mapped files do not count, since the system can drop them when it needs memory.

Returns 1 if a ratio of wall-clock times is above 1.05, or a ratio of memory above 1.10. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import BATCH, ROOT, Clocked, Contender, adamw, argument_parser, compare, fit, loss_of, make_module, work
from report import Column, Report
from resident import Peak, resident
from torch import nn
from torch.utils.data import DataLoader

LIMIT, MEMORY_LIMIT = 1.05, 1.10
KINDS: dict[str, tuple[int, str | None, str | None]] = {
    "zero1": (1, None, None),
    "zero2": (2, None, None),
    "zero2-cpu": (2, "cpu", None),
    "zero3": (3, None, None),
    "zero3-both-cpu": (3, "cpu", "cpu"),
}
MEMORY = ("save", "save_in_background", "load")


def configuration(kind: str, model: str) -> dict[str, Any]:
    """The configuration for DeepSpeed."""
    stage, optimizer, params = KINDS[kind]
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 10_000_000, "allgather_bucket_size": 10_000_000}
    if optimizer:
        zero["offload_optimizer"] = {"device": optimizer, "pin_memory": False}
    if params:
        zero["offload_param"] = {"device": params, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": BATCH[model],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 2**31,
    }


def by_hand(kind: str, model: str, data: Clocked) -> None:
    """The loop of DeepSpeed's tutorial."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from torch.utils.data.distributed import DistributedSampler

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it
    deepspeed.init_distributed("gloo")
    module = make_module(model)
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module), config=configuration(kind, model))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    sampler.set_epoch(0)
    for batch in DataLoader(data, BATCH[model], sampler=sampler):
        engine.backward(loss_of(model, engine, batch))
        engine.step()
    os._exit(0)  # DeepSpeed sometimes aborts at interpreter exit


def trainer(kind: str, model: str, data: Clocked) -> None:
    from trainkit.strategies import ZeROStrategy

    fit(ZeROStrategy(config=configuration(kind, model)), model, data)


HANDS = {f"hand-{kind}": Contender(f"{kind} by hand", partial(by_hand, kind), f"hand-{kind}", None) for kind in KINDS}
CONTENDERS = HANDS | {kind: Contender(kind, partial(trainer, kind), f"hand-{kind}", LIMIT) for kind in KINDS}


# --------------------------------------------------------------------------------------------------------------- memory


def prepared(kind: str, updates: int = 1) -> Any:
    """The accelerator of your own training loop after a number of optimizer steps."""
    from trainkit import Accelerator
    from trainkit.strategies import ZeROStrategy

    stage, optimizer, params = KINDS[kind]
    # offloaded tensors are not in pinned memory, as in configuration(); only offloading has this option
    strategy = ZeROStrategy(stage, offload_optimizer=optimizer, offload_params=params, device="cpu", pin_memory=not optimizer)
    accelerator = Accelerator(strategy=strategy)
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)), nn.Linear(2048, 1024))
    model, made = accelerator.prepare(net, adamw(net))
    for _ in range(updates):
        accelerator.backward(model(torch.ones(1, 2048)).square().mean())
        made.step()
        made.zero_grad()
    return accelerator


def measure_memory(kind: str, what: str, folder: Path) -> None:
    """Print the MB that a save or load needs, and the allowed MB. A load reads the checkpoint that an earlier call saved."""
    accelerator = prepared(kind, updates=0 if what == "load" else 1)
    largest, state = 4 * 2048 * 2048 / 1e6, 3 * 4 * (8 * (2048 + 1) * 2048 + (2048 + 1) * 1024) / 1e6
    if what == "load":
        with Peak() as peak:
            accelerator.load_state(folder)
        taken, allowed = peak.found - resident("RssAnon"), largest
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = resident("VmRSS")
        accelerator.save_state(folder, blocking=what == "save")
        while not folder.exists():
            time.sleep(0.01)
        taken = resident("VmHWM") - before
        allowed = largest + (largest if what == "save" else state / accelerator.world.size)
    if accelerator.is_main_process:
        print(f"{taken} {allowed}", flush=True)


def taken_and_allowed(kind: str, what: str, folder: str) -> tuple[float, float]:
    """Run `measure_memory` in two new processes; returns the two values that it prints."""
    command = [sys.executable, "-m", "trainkit", "launch", "--nproc-per-node", "2", __file__, "--memory", kind, what]
    # Large blocks are returned to the system, so that only memory in use is measured.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    place = f"{folder}/{'in_background' if what == 'save_in_background' else 'state'}"
    done = subprocess.run([*command, place], env=environment, cwd=folder, check=True, capture_output=True, text=True)
    taken, allowed = map(float, done.stdout.split()[-2:])
    return taken, allowed


def compare_memory(report: Report) -> None:
    """Measure, and add a table."""
    table = report.table("MB of a process, two of them", Column("it"), Column("allowed"), Column("ratio", 2))
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for what in MEMORY:
                taken, allowed = taken_and_allowed(kind, what, folder)
                ratio = taken / allowed
                table.add(f"{kind}: {what}", taken, allowed, ratio, judged=ratio, most=MEMORY_LIMIT)


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    parser = argument_parser(__doc__, [*CONTENDERS, "memory"])
    parser.add_argument("--memory", nargs=3, metavar=("KIND", "WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        kind, what, folder = arguments.memory
        measure_memory(kind, what, Path(folder))
        return 0
    if arguments.work:
        work(arguments, CONTENDERS)
        return 0
    report = Report()
    if arguments.only != ["memory"]:
        compare(report, __file__, arguments, CONTENDERS, list(HANDS))
    if arguments.only in (None, ["memory"]):
        compare_memory(report)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
