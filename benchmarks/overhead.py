"""What a training step costs, compared with the loop written by hand: trainkit, and other frameworks where they are installed.

    python benchmarks/overhead.py [--only trainer full] [--python OTHER/bin/python] [--repeats 5] [--json FILE]

Linear(32, 64)-ReLU-Linear(64, 10) on ready batches of 32, AdamW, float32, one thread; and four to eight layers of width 256,
for steps of one to two milliseconds. A pair is two processes, the baseline and the contender, on the same core. They alternate
after each chunk of steps and never run at the same time, so that other load on the machine slows both. A pair's ratio is the
median over its chunks of contender / baseline. The table shows the median and the range of five pairs, each a pair of new
processes. Startup and the first 300 steps are not counted.

"wall" is wall-clock time, to which the limits apply by default. "CPU" is the processor time of the process: use it on a machine
that runs other programs too (`--clock cpu`), since it does not include the time spent waiting for them. Progress bars are drawn
on a pseudo-terminal, which this program reads. Linux and macOS only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = Path(__file__).with_name("overhead_contenders.py")

STEPS, CHUNKS = 500, 10  # of the small network: a chunk takes about 0.1 s, as long as a progress bar waits between refreshes
WIDE_STEPS = 100
# After use, glibc returns large blocks to the system and requests them again: in some processes at every step, in others never.
# That costs a third of a step of the wide network, and does not depend on the framework.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


@dataclass
class Case:
    """One line of the table: a contender, its baseline, and the maximum ratio."""

    name: str
    title: str
    contender: str
    limit: float | None = None
    baseline: str = "raw"
    layers: int = 0
    package: str = "trainkit"


CASES = [
    Case("control", "the loop by hand / itself", "raw"),
    Case("seeding", "seeding alone, by hand", "seeding"),
    Case("trainer", "trainkit Trainer, bare", "trainer", 1.02),
    Case("full", "… bar, CSV, log, 10 idle callbacks", "full", 1.06),
    Case("own_loop", "trainkit Accelerator, own loop", "own_loop", 1.02),
    Case("trainer_scheduled", "a schedule on both sides: bare", "trainer_scheduled", 1.02, baseline="raw_scheduled"),
    Case("full_scheduled", "… bar, CSV, log, 10 idle callbacks", "full_scheduled", 1.06, baseline="raw_scheduled"),
    Case("own_loop_scheduled", "… own loop", "own_loop_scheduled", 1.02, baseline="raw_scheduled"),
    Case("idle_10", "Trainer with 10 idle / with none", "idle_10", 1.02, baseline="trainer"),
    Case("idle_100", "Trainer with 100 idle / with none", "idle_100", 1.02, baseline="trainer"),
    Case("wide_control", "6 layers: the loop by hand / itself", "raw", layers=6),
    Case("wide_seeding", "6 layers: seeding alone, by hand", "seeding", layers=6),
    *(Case(f"wide_{n}", f"{n} layers of 256: Trainer, bare", "trainer", 1.02, layers=n) for n in (4, 5, 6, 8)),
    Case("wide_full", "6 layers: … bar, CSV, log, 10 idle", "full", layers=6),
    Case("ignite", "ignite", "ignite", package="ignite"),
    Case("accelerate", "Accelerate, own loop", "accelerate", package="accelerate"),
    Case("lightning", "Lightning Trainer, bare", "lightning", package="lightning"),
    Case("lightning_idle_10", "… 10 idle callbacks", "lightning_idle_10", package="lightning"),
    Case("lightning_full", "… bar, CSV, log, 10 idle callbacks", "lightning_full", package="lightning"),
    Case("transformers", "Hugging Face Trainer, bare", "transformers", package="transformers"),
    Case("wide_lightning", "6 layers: Lightning Trainer, bare", "lightning", layers=6, package="lightning"),
]


class Runner:
    """A contender's process, which waits for a signal before each chunk of steps."""

    def __init__(self, python: str, contender: str, *, layers: int, chunks: int, core: int | None, folder: Path) -> None:
        self.steps = WIDE_STEPS if layers else STEPS
        turns, self._turns = os.pipe()
        reports, reported = os.pipe()
        terminal, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        command = [python, str(CONTENDERS), contender, f"--steps={self.steps}", f"--chunks={chunks}"]
        command += [f"--turns={turns}", f"--reports={reported}"]
        command += [f"--layers={layers}"] + [f"--core={core}"] * (core is not None)
        folder.mkdir()
        self._errors = folder / "stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=errors,
                pass_fds=(turns, reported),
                cwd=folder,
                env={**os.environ, **KEEP_MEMORY, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"},
            )
        for descriptor in (turns, reported, screen):
            os.close(descriptor)
        self._reports = os.fdopen(reports)
        threading.Thread(target=_drain, args=(terminal,), daemon=True).start()

    def chunk(self) -> tuple[float, float]:
        """Run one chunk; returns wall-clock and processor time, both in microseconds per step."""
        try:
            os.write(self._turns, b"!")
            wall, process = map(float, self._reports.readline().split())
        except (OSError, ValueError):
            self._process.wait()
            raise RuntimeError(f"a contender ended early:\n{self._errors.read_text()[-2000:]}") from None
        return wall / self.steps * 1e6, process / self.steps * 1e6

    def close(self) -> None:
        self._process.wait(60)
        os.close(self._turns)
        self._reports.close()


def _drain(terminal: int) -> None:
    """Read the terminal: if its buffer were full, the process would block."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the other end is closed
        pass
    os.close(terminal)


def measure_pair(case: Case, python: str, core: int | None, chunks: int) -> dict[str, float]:
    """One pair of processes: microseconds per step of each, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        pair = [
            Runner(python, contender, layers=case.layers, chunks=chunks, core=core, folder=Path(folder) / name)
            for name, contender in (("baseline", case.baseline), ("contender", case.contender))
        ]
        timed = [(pair[0].chunk(), pair[1].chunk()) for _ in range(chunks)]
        for runner in pair:
            runner.close()
    figures: dict[str, float] = {}
    for place, clock in enumerate(("wall", "cpu")):
        figures[f"{clock}_baseline_us"] = statistics.median(baseline[place] for baseline, _ in timed)
        figures[f"{clock}_us"] = statistics.median(contender[place] for _, contender in timed)
        figures[f"{clock}_ratio"] = statistics.median(contender[place] / baseline[place] for baseline, contender in timed)
    return figures


def summary(case: Case, pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the pairs, and the range of the ratios."""
    row: dict[str, Any] = {**asdict(case), **{key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}}
    for clock in ("wall", "cpu"):
        ratios = [pair[f"{clock}_ratio"] for pair in pairs]
        row[f"{clock}_lowest"], row[f"{clock}_highest"] = min(ratios), max(ratios)
    row["pairs"] = pairs
    return row


def line(row: dict[str, Any], clock: str) -> str:
    """Format a row as text."""
    extra = row[f"{clock}_us"] - row[f"{clock}_baseline_us"]
    cells = [f"{row['title']:<36}{row[f'{clock}_baseline_us']:>10.1f}{row[f'{clock}_us']:>10.1f}{extra:>+9.1f}"]
    for each in ("wall", "cpu"):
        cells.append(f"{row[f'{each}_ratio']:>8.3f} ({row[f'{each}_lowest']:.3f}-{row[f'{each}_highest']:.3f})")
    if row["limit"] is not None:
        met = row[f"{clock}_ratio"] <= row["limit"]
        cells.append(f"  ≤ {row['limit']:.2f} {'met' if met else 'MISSED'}")
    return "".join(cells)


def find(python: str, package: str) -> str | None:
    """The version of torch in the environment of `python`; None if `package` is not installed there."""
    program = f"import importlib.util as u, torch; print(torch.__version__ if u.find_spec({package!r}) else '')"
    done = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def choose(arguments: argparse.Namespace) -> list[tuple[Case, str]]:
    """The cases to run, each with its interpreter. Prints the packages that are not installed."""
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    missing: set[str] = set()
    interpreters: dict[str, str] = {}
    for package in sorted({case.package for case in cases}):
        python = sys.executable if package == "trainkit" else arguments.python
        torch = find(python, package)
        if torch is None:
            missing.add(package)
        else:
            interpreters[package] = python
            print(f"{package:<14} torch {torch}")
    if missing:
        print(f"not installed, skipped: {', '.join(sorted(missing))} (--python names an environment that has them)")
    return [(case, interpreters[case.package]) for case in cases if case.package in interpreters]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the other frameworks (default: this one)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of processes for each case (default: 5)")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help=f"chunks of steps in a pair (default: {CHUNKS})")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="which one is held against the limits")
    parser.add_argument("--core", type=int, help="stay on this core (default: the last one that may be used)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    arguments = parse_arguments()
    core: int | None = arguments.core
    if core is None and hasattr(os, "sched_getaffinity"):
        core = max(os.sched_getaffinity(0))
    arguments.python = shutil.which(arguments.python) or arguments.python
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, core {core}")
    cases = choose(arguments)
    pairs: dict[str, list[dict[str, float]]] = {case.name: [] for case, _ in cases}
    for repeat in range(arguments.repeats):  # all cases in each repeat, so that a slow period affects all cases
        for case, python in cases:
            print(f"\r{repeat + 1}/{arguments.repeats} {case.name:<20}", end="", file=sys.stderr, flush=True)
            pairs[case.name].append(measure_pair(case, python, core, arguments.chunks))
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)

    rows = [summary(case, pairs[case.name]) for case, _ in cases]
    print(f"µs a step: {arguments.clock}\n{'':<36}{'baseline':>10}{'it':>10}{'extra':>9}", end="")
    print(f"{'wall: ratio (range)':>24}{'CPU: ratio (range)':>24}")
    for row in rows:
        print(line(row, arguments.clock))
    if arguments.json:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(), "load": load}
        arguments.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=2) + "\n")
    return int(any(row["limit"] is not None and row[f"{arguments.clock}_ratio"] > row["limit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
