"""What `Trainer(compile=)` costs at the start of a run and saves in each step: the GPT of `trainkit demo`, three ways.

    python benchmarks/compile.py [--depth 8] [--steps 40] [--repeats 2] [--threads 1] [--json FILE]

"eager" compiles nothing, "regional" compiles each block, "whole" compiles the step. Each run has its own process and, if it
compiles, an empty cache of inductor. The ways take turns, so that other load on the machine slows all of them. "first" is the
time until the end of the first optimizer step, the compilation included; "cached" is the same with the cache of the run before.
"step" is the median of the later steps. Ratios are to "eager" of the same turn; the table shows the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import Column, Report, Spread, json_option

from trainkit import Callback, Trainer
from trainkit.cli.demo import ByteGPT

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"eager": None, "regional": "regional", "whole": "whole"}
BATCH, CONTEXT = 16, 64


class Clock(Callback):
    """The times at which training starts and optimizer steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


def run(way: str, depth: int, steps: int, threads: int) -> dict[str, float]:
    """Train; returns the seconds of the first step and of a later one. Runs in a process of its own."""
    torch.set_num_threads(threads)
    logging.getLogger("trainkit").setLevel(logging.WARNING)
    data = torch.randint(0, 256, (BATCH * steps, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, seed=1, compile=WAYS[way], callbacks=[clock], **quiet)
    trainer.fit(ByteGPT(depth=depth, context=CONTEXT), list(data.split(BATCH)))
    spans = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {"first": spans[0], "step": statistics.median(spans[len(spans) // 4 :])}


def measured(way: str, arguments: argparse.Namespace, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", way]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("depth", "steps", "threads")]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8, help="blocks of the model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2, help="turns")
    parser.add_argument("--threads", type=int, default=1)
    json_option(parser)
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run(arguments.run, arguments.depth, arguments.steps, arguments.threads)))
        return 0
    turns: list[dict[str, dict[str, float]]] = []
    for _ in range(arguments.repeats):
        turn = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cache:
                turn[way] = measured(way, arguments, cache)
                turn[way]["cached"] = measured(way, arguments, cache)["first"]
        turns.append(turn)
    report = Report(threads=arguments.threads, blocks=arguments.depth, batch=f"{BATCH} × {CONTEXT}")
    table = report.table("compile", Column("first, s", 2), Column("cached, s", 2), Column("step, ms"), Column("step: ratio", 3))
    for way in WAYS:
        first, cached, step = (statistics.median(turn[way][name] for turn in turns) for name in ("first", "cached", "step"))
        ratio = Spread.of([turn[way]["step"] / turn["eager"]["step"] for turn in turns])
        table.add(way, first, cached, step * 1e3, ratio)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
