"""Two worlds of one or two processes that alternate on the same cores: the common code of benchmarks of steps on processes.

They alternate after each chunk of steps and never run at the same time, so that other load on the machine slows both. The time
of a step is that of the slower process. A pair's ratio is the median over its chunks of contender / reference. The table shows
the median and the range of the pairs, each of new processes. Startup and the first steps are not counted. "CPU" is the same
ratio for the processor time of all processes, without the time that they wait for each other or for other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "BATCH",
    "ROOT",
    "STEPS",
    "WARM_UP",
    "Clocked",
    "Contender",
    "adamw",
    "argument_parser",
    "compare",
    "fit",
    "loss_of",
    "make_module",
    "make_samples",
    "own_loop",
    "train_module",
    "work",
]

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
WARM_UP, AFTER = 20, 3  # steps before the first chunk, and after the last: batches fetched in advance
SAMPLES = 512  # number of different samples

WIDTHS = (1280, 2048, 2048, 1536)
CONTEXT = 64
BATCH = {"mlp": 32, "gpt": 16, "gpt5": 16, "gpt_wide": 8}
STEPS = {"mlp": 8, "gpt": 5, "gpt5": 5, "gpt_wide": 3}  # per chunk
MODELS = ("mlp", "gpt")  # of a benchmark that names no others
GPT = {"gpt": {}, "gpt5": {"depth": 5}, "gpt_wide": {"width": 384, "depth": 6, "heads": 6}}
# Otherwise glibc returns large blocks to the system and requests them again, in some processes at every step.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


@dataclass(frozen=True)
class Contender:
    """A loop to measure.

    Attributes:
        title: for the table.
        train: called with the model's name and the data.
        reference: the name of the contender to compare with.
        limit: the maximum ratio; None for no limit.
    """

    title: str
    train: Callable[[str, Clocked], None]
    reference: str
    limit: float | None


# ------------------------------------------------------------------------------------------------ a process of a world


class Clocked(Dataset[Any]):
    """Ready samples. The clock is in the data, so that the measurement adds nothing to a loop.

    Before each chunk, a byte is read from `turns`. After it, its wall-clock and processor time in seconds are written to
    `reports`.
    """

    def __init__(self, samples: list[Any], model: str, chunks: int, turns: int, reports: int) -> None:
        self._samples, self._steps, self._chunks = samples, STEPS[model], chunks
        self._turns, self._reports = turns, reports
        self.batches = WARM_UP + chunks * self._steps + AFTER
        self._length = self.batches * BATCH[model] * RANKS
        self._fetched, self._began = 0, (0.0, 0.0)

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[Any]:
        chunk, place = divmod(self._fetched - WARM_UP, self._steps)
        self._fetched += 1
        if place == 0 and 0 < chunk <= self._chunks:
            wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            os.write(self._reports, f"{wall} {cpu}\n".encode())
        if place == 0 and 0 <= chunk < self._chunks:
            os.read(self._turns, 1)
            self._began = time.perf_counter(), time.process_time()
        return [self._samples[index % SAMPLES] for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def make_samples(model: str) -> list[Any]:
    torch.manual_seed(3)
    if model in GPT:
        return list(torch.randint(256, (SAMPLES, CONTEXT + 1)))
    return [(torch.randn(WIDTHS[0]), torch.randint(WIDTHS[-1], ())) for _ in range(SAMPLES)]


def make_module(model: str) -> nn.Module:
    torch.manual_seed(1)
    if model in GPT:
        from trainkit.cli.demo import ByteGPT

        return ByteGPT(context=CONTEXT, **GPT[model])
    layers = [layer for a, b in pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def loss_of(model: str, net: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    if model in GPT:
        return F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    x, y = batch
    return F.cross_entropy(net(x), y)


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def train_module(model: str) -> Any:
    """A model as a `TrainModule`, for the `Trainer`."""
    from trainkit import TrainModule

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_module(model)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(model, self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    return Module()


def fit(strategy: Any, model: str, data: Clocked, **options: Any) -> None:
    """Train with a bare `Trainer`, to which further options are passed."""
    from trainkit import Trainer

    Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    ).fit(train_module(model), DataLoader(data, BATCH[model], shuffle=True))


def own_loop(strategy: Any, model: str, data: Clocked, clip: float | None = None) -> None:
    """Train in a loop over `Accelerator`."""
    from trainkit import Accelerator

    accelerator = Accelerator(strategy=strategy)
    module = make_module(model)
    net, optimizer, loader = accelerator.prepare(module, adamw(module), DataLoader(data, BATCH[model], shuffle=True))
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(model, net, batch))
            if clip is not None:
                accelerator.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def work(arguments: argparse.Namespace, contenders: Mapping[str, Contender]) -> None:
    """Run one process of a world."""
    rank = int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    data = Clocked(make_samples(arguments.model), arguments.model, arguments.chunks, arguments.turns, arguments.reports)
    contenders[arguments.work].train(arguments.model, data)


# ------------------------------------------------------------------------------------------------ the measurement


class World:
    """The processes of one contender, which wait for a signal before each chunk of steps."""

    def __init__(self, script: str, model: str, contender: str, chunks: int, folder: Path, ranks: int) -> None:
        folder.mkdir()
        self._steps = STEPS[model]
        self._processes, self._turns, self._reports, self._errors = [], [], [], []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks):
            turns, our_turns = os.pipe()
            our_reports, reports = os.pipe()
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            errors = folder / f"stderr-{rank}"
            command = [sys.executable, script, "--work", contender, "--model", model, f"--chunks={chunks}"]
            with errors.open("wb") as file:
                process = subprocess.Popen(
                    [*command, f"--turns={turns}", f"--reports={reports}"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=(turns, reports),
                    cwd=folder,
                    env={
                        **os.environ,
                        **KEEP_MEMORY,
                        **{name: str(value) for name, value in env.items()},
                        "MASTER_ADDR": "127.0.0.1",
                        "PYTHONPATH": str(ROOT),
                        "OMP_NUM_THREADS": "1",
                    },
                )
            os.close(turns)
            os.close(reports)
            self._processes.append(process)
            self._turns.append(our_turns)
            self._reports.append(os.fdopen(our_reports))
            self._errors.append(errors)

    def chunk(self) -> tuple[float, float]:
        """Run one chunk; returns milliseconds per step of the slower process, and of processor time of all processes."""
        try:
            for turns in self._turns:
                os.write(turns, b"!")
            walls, cpus = zip(*(map(float, report.readline().split()) for report in self._reports), strict=True)
        except (OSError, ValueError):
            said = "\n".join(errors.read_text()[-2000:] for errors in self._errors)
            self.close()
            raise RuntimeError(f"a process ended early:\n{said}") from None
        return max(walls) / self._steps * 1e3, sum(cpus) / self._steps * 1e3

    def close(self) -> None:
        for turns, reports in zip(self._turns, self._reports, strict=True):
            os.close(turns)
            reports.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure_pair(script: str, model: str, names: tuple[str, str], chunks: int, ranks: int) -> dict[str, float]:
    """Milliseconds per step by hand and of the contender, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        pair = [World(script, model, name, chunks, Path(folder) / f"{place}", ranks) for place, name in enumerate(names)]
        timed = [(pair[0].chunk(), pair[1].chunk()) for _ in range(chunks)]
        for world in pair:
            world.close()
    return {
        "by_hand_ms": statistics.median(by_hand[0] for by_hand, _ in timed),
        "ms": statistics.median(its[0] for _, its in timed),
        "ratio": statistics.median(its[0] / by_hand[0] for by_hand, its in timed),
        "cpu_ratio": statistics.median(its[1] / by_hand[1] for by_hand, its in timed),
    }


def argument_parser(doc: str | None, contenders: Sequence[str], models: Sequence[str] = MODELS) -> argparse.ArgumentParser:
    """A parser with the arguments that all benchmarks of pairs have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*models, *contenders), help="some of the models and contenders")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of worlds for each case (default: 5)")
    parser.add_argument("--chunks", type=int, default=16, help="chunks of steps in a pair (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=models, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reports", type=int, help=argparse.SUPPRESS)
    return parser


def _chosen(only: list[str] | None, contenders: Mapping[str, Contender], known: Sequence[str]) -> list[tuple[str, str]]:
    models = [model for model in known if only is None or model in only] or list(known)
    names = [name for name in contenders if only is None or name in only] or list(contenders)
    return [(model, name) for model in models for name in names]


def _summary(model: str, contender: Contender, pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the pairs, and the ranges of the ratios."""
    row: dict[str, Any] = {"model": model, "contender": contender.title, "limit": contender.limit}
    row |= {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
    for key in ("ratio", "cpu_ratio"):
        row |= {f"{key}_lowest": min(pair[key] for pair in pairs), f"{key}_highest": max(pair[key] for pair in pairs)}
    return row


def _line(row: dict[str, Any]) -> str:
    """Format a row as text."""
    cells = [f"{row['model'] + ': ' + row['contender']:<36}{row['by_hand_ms']:>10.2f}{row['ms']:>10.2f}"]
    for key in ("ratio", "cpu_ratio"):
        cells.append(f"{row[key]:>10.3f} ({row[f'{key}_lowest']:.3f}-{row[f'{key}_highest']:.3f})")
    if row["limit"] is not None:
        cells.append(f"  ≤ {row['limit']:.2f} {'met' if row['ratio'] <= row['limit'] else 'MISSED'}")
    return "".join(cells)


def compare(
    script: str,
    arguments: argparse.Namespace,
    contenders: Mapping[str, Contender],
    more: Sequence[str] = (),
    ranks: int = RANKS,
    models: Sequence[str] = MODELS,
) -> int:
    """Measure and print; returns 1 if a limit is exceeded.

    Args:
        script: the file to run in each process, with `--work`.
        arguments: those of `argument_parser`.
        contenders: by name; those that are only references must be in `more`.
        more: names of contenders that are not measured themselves.
        ranks: number of processes of a world.
        models: names of the models.
    """
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}")
    cases = _chosen(arguments.only, {name: one for name, one in contenders.items() if name not in more}, models)
    pairs: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):  # all cases in each repeat, so that a slow period affects all cases
        for model, name in cases:
            print(f"\r{repeat + 1}/{arguments.repeats} {model} {name:<20}", end="", file=sys.stderr, flush=True)
            both = (contenders[name].reference, name)
            pairs[model, name].append(measure_pair(script, model, both, arguments.chunks, ranks))
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)

    print(f"{'ms a step':<36}{'by hand':>10}{'it':>10}{'wall: ratio (range)':>24}{'CPU: ratio (range)':>24}")
    rows = [_summary(model, contenders[name], pairs[model, name]) for model, name in cases]
    for row in rows:
        print(_line(row))
    if arguments.json:
        facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count(), "load": load}
        arguments.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=2) + "\n")
    return int(any(row["limit"] is not None and row["ratio"] > row["limit"] for row in rows))
