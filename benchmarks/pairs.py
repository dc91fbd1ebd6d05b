"""Processes, or worlds of processes, that take turns on the same cores: the common code of the benchmarks of a step.

They alternate after each chunk of steps and never run at the same time, so that other load on the machine slows both. The time
of a step is that of the slowest process of a world. A pair's ratio is the median over its chunks of contender / reference. The
table shows the median and the range of the pairs, each of new processes. Startup and the first steps are not counted. "cpu" is
the same ratio for the processor time of all processes, without the time that they wait for each other or for other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
from typing import IO, Any

import torch
from report import Column, Report, Spread, json_option, progress
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "BATCH",
    "ROOT",
    "STEPS",
    "WARM_UP",
    "Clock",
    "Clocked",
    "Contender",
    "Runner",
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
WARM_UP, AFTER = 20, 3  # steps before the first chunk, and after the last
SAMPLES = 512  # number of different samples

WIDTHS = (1280, 2048, 2048, 1536)
CONTEXT = 64
BATCH = {"mlp": 32, "gpt": 16, "gpt5": 16, "gpt_wide": 8}
STEPS = {"mlp": 8, "gpt": 5, "gpt5": 5, "gpt_wide": 3}  # per chunk
MODELS = ("mlp", "gpt")  # of a benchmark that names no others
CLOCKS = ("wall", "cpu")
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


class Clock:
    """Waits for a signal before each chunk of steps, and reports wall-clock and processor time of the chunk in seconds.

    Args:
        steps: steps of a chunk.
        chunks: number of chunks.
        turns: file descriptor from which a byte is read before each chunk.
        reports: file descriptor to which a line is written after each chunk.
        wait: waits for the devices.
        cpu: processor time so far.
        after: steps after the last chunk: batches fetched in advance.

    Attributes:
        batches: number of steps in all.
    """

    def __init__(
        self,
        steps: int,
        chunks: int,
        turns: int,
        reports: int,
        wait: Callable[[], object] = lambda: None,
        cpu: Callable[[], float] = time.process_time,
        after: int = AFTER,
    ) -> None:
        self._steps, self._chunks, self._turns, self._reports = steps, chunks, turns, reports
        self._wait, self._cpu = wait, cpu
        self.batches = WARM_UP + chunks * steps + after
        self._done, self._began = 0, (0.0, 0.0)

    def step(self) -> None:
        """Call this at the start of each step."""
        chunk, place = divmod(self._done - WARM_UP, self._steps)
        self._done += 1
        if place or not 0 <= chunk <= self._chunks:
            return
        self._wait()
        if chunk > 0:
            wall, cpu = time.perf_counter() - self._began[0], self._cpu() - self._began[1]
            os.write(self._reports, f"{wall} {cpu}\n".encode())
        if chunk < self._chunks:
            os.read(self._turns, 1)
            self._began = time.perf_counter(), self._cpu()


class Clocked(Dataset[Any]):
    """Ready samples. The clock is in the data, so that the measurement adds nothing to a loop."""

    def __init__(self, samples: list[Any], model: str, chunks: int, turns: int, reports: int) -> None:
        self._samples, self._clock = samples, Clock(STEPS[model], chunks, turns, reports)
        self._length = self._clock.batches * BATCH[model] * RANKS

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self._clock.step()
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


class Runner:
    """A process that waits for a signal before each chunk of steps.

    Args:
        command: its command line, to which `--turns` and `--reports` are added.
        folder: it runs there, and its errors are written there.
        environment: variables in addition to those of this process.
        stdout: its output; by default the same file as its errors.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stdout: int | None = None) -> None:
        turns, self._turns = os.pipe()
        reports, reported = os.pipe()
        self._errors = folder / f"stderr-{environment.get('RANK', '0')}"
        with self._errors.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, f"--turns={turns}", f"--reports={reported}"],
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                pass_fds=(turns, reported),
                cwd=folder,
                env={**os.environ, **KEEP_MEMORY, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            )
        os.close(turns)
        os.close(reported)
        self._reports: IO[str] = os.fdopen(reports)

    def begin(self) -> None:
        """Let it run one chunk."""
        with contextlib.suppress(OSError):  # it has ended: `end` says why
            os.write(self._turns, b"!")

    def end(self) -> tuple[float, float]:
        """Wall-clock and processor time of the chunk, in seconds."""
        try:
            wall, cpu = map(float, self._reports.readline().split())
        except ValueError:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"a process ended early:\n{self._errors.read_text()[-3000:]}") from None
        return wall, cpu

    def chunk(self) -> tuple[float, float]:
        """Run one chunk, alone."""
        self.begin()
        return self.end()

    def close(self) -> None:
        os.close(self._turns)
        self._reports.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class World:
    """The processes of one contender, which wait for a signal before each chunk of steps."""

    def __init__(
        self, script: str, model: str, contender: str, arguments: argparse.Namespace, folder: Path, ranks: int
    ) -> None:
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, script, "--work", contender, "--model", model, f"--chunks={arguments.chunks}"]
        self._runners = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            environment = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            self._runners.append(Runner([*command, *arguments.more], folder, environment))

    def chunk(self) -> tuple[float, float]:
        """Run one chunk; returns seconds of the slower process, and of processor time of all processes."""
        for runner in self._runners:
            runner.begin()
        walls, cpus = zip(*(runner.end() for runner in self._runners), strict=True)
        return max(walls), sum(cpus)

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


def ratios(pair: Sequence[Any], chunks: int, steps: int) -> dict[str, float]:
    """Let two runners or worlds take turns: the milliseconds per step of each, and the ratios."""
    try:
        timed = [(pair[0].chunk(), pair[1].chunk()) for _ in range(chunks)]
    finally:
        for each in pair:
            each.close()
    figures: dict[str, float] = {}
    for place, clock in enumerate(CLOCKS):
        figures[f"{clock}_by_hand_ms"] = statistics.median(by_hand[place] for by_hand, _ in timed) / steps * 1e3
        figures[f"{clock}_ms"] = statistics.median(its[place] for _, its in timed) / steps * 1e3
        figures[f"{clock}_ratio"] = statistics.median(its[place] / by_hand[place] for by_hand, its in timed)
    return figures


def argument_parser(doc: str | None, contenders: Sequence[str], models: Sequence[str] = MODELS) -> argparse.ArgumentParser:
    """A parser with the arguments that all benchmarks of pairs have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*models, *contenders), help="some of the models and contenders")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of worlds for each case (default: 5)")
    parser.add_argument("--chunks", type=int, default=16, help="chunks of steps in a pair (default: 16)")
    json_option(parser)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=models, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reports", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(more=[])
    return parser


def _chosen(only: list[str] | None, contenders: Mapping[str, Contender], known: Sequence[str]) -> list[tuple[str, str]]:
    models = [model for model in known if only is None or model in only] or list(known)
    names = [name for name in contenders if only is None or name in only] or list(contenders)
    return [(model, name) for model in models for name in names]


def compare(
    report: Report,
    script: str,
    arguments: argparse.Namespace,
    contenders: Mapping[str, Contender],
    more: Sequence[str] = (),
    ranks: int = RANKS,
    models: Sequence[str] = MODELS,
    steps: Mapping[str, int] = STEPS,
    clock: str = "wall",
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Measure, and add a table; returns the figures of each pair by model and contender.

    Args:
        report: gets the table.
        script: the file to run in each process, with `--work` and with what is in `arguments.more`.
        arguments: those of `argument_parser`.
        contenders: by name; those that are only references must be in `more`.
        more: names of contenders that are not measured themselves.
        ranks: number of processes of a world.
        models: names of the models.
        steps: number of steps of a chunk for each model.
        clock: what the limits apply to, "wall" or "cpu".
    """
    cases = _chosen(arguments.only, {name: one for name, one in contenders.items() if name not in more}, models)
    pairs: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):  # all cases in each repeat, so that a slow period affects all cases
        for model, name in cases:
            progress(f"{repeat + 1}/{arguments.repeats} {model} {name}")
            with tempfile.TemporaryDirectory() as folder:
                both = enumerate((contenders[name].reference, name))
                worlds = [World(script, model, one, arguments, Path(folder) / f"{place}", ranks) for place, one in both]
                pairs[model, name].append(ratios(worlds, arguments.chunks, steps[model]))
    progress()
    add_table(
        report,
        "ms a step",
        [(f"{model}: {contenders[name].title}", contenders[name].limit, pairs[model, name]) for model, name in cases],
        clock,
    )
    return pairs


def add_table(
    report: Report, title: str, rows: Sequence[tuple[str, float | None, list[dict[str, float]]]], clock: str, scale: float = 1.0
) -> None:
    """Add a table of pairs.

    Args:
        report: gets the table.
        title: of the table.
        rows: name, limit and pairs of each.
        clock: what the limits and the times refer to.
        scale: factor for the times, which are in milliseconds.
    """
    columns = [Column("by hand", 2), Column("it", 2), Column("extra", 2)]
    table = report.table(f"{title}, {clock}", *columns, *(Column(f"{each}: ratio (range)", 3) for each in CLOCKS))
    for name, limit, pairs in rows:
        by_hand, its = (statistics.median(pair[f"{clock}_{key}"] for pair in pairs) * scale for key in ("by_hand_ms", "ms"))
        spreads = {each: Spread.of([pair[f"{each}_ratio"] for pair in pairs]) for each in CLOCKS}
        table.add(name, by_hand, its, its - by_hand, *spreads.values(), judged=spreads[clock].median, most=limit)
