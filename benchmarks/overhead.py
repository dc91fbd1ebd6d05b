"""What a training step costs, compared with the loop written by hand: trainkit, and other frameworks where they are installed.

    python benchmarks/overhead.py [--only trainer full] [--python OTHER/bin/python] [--repeats 5] [--json FILE]

Linear(32, 64)-ReLU-Linear(64, 10) on ready batches of 32, AdamW, float32, one thread; and four to eight layers of width 256,
for steps of one to two milliseconds. `validate` and `predict` are compared with a loop by hand in inference mode that sums the
loss over all samples, or keeps all outputs. A pair is two processes, the baseline and the contender, on the same core. They
alternate after each chunk of steps and never run at the same time, so that other load on the machine slows both. A pair's ratio
is the median over its chunks of contender / baseline. The table shows the median and the range of five pairs, each of new
processes. Startup and the first 300 steps are not counted.

"cpu" is the processor time of the process, to which the limits apply: it does not include the time spent waiting for other
programs. "wall" is wall-clock time (`--clock wall`). Progress bars are drawn on a pseudo-terminal, which this program reads.
Linux and macOS only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from dataclasses import dataclass
from pathlib import Path

from pairs import CLOCKS, ROOT, Runner, add_table, ratios
from report import Report, json_option, progress

CONTENDERS = Path(__file__).with_name("overhead_contenders.py")

STEPS, CHUNKS = 500, 10  # of the small network: a chunk takes about 0.1 s, as long as a progress bar waits between refreshes
WIDE_STEPS = 100


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

    @property
    def steps(self) -> int:
        """The number of steps in a chunk."""
        return WIDE_STEPS if self.layers else STEPS


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
    Case("validate", "Trainer.validate, a batch", "validate", baseline="raw_validate"),
    Case("predict", "Trainer.predict, a batch", "predict", baseline="raw_predict"),
    Case("ignite", "ignite", "ignite", package="ignite"),
    Case("accelerate", "Accelerate, own loop", "accelerate", package="accelerate"),
    Case("lightning", "Lightning Trainer, bare", "lightning", package="lightning"),
    Case("lightning_idle_10", "… 10 idle callbacks", "lightning_idle_10", package="lightning"),
    Case("lightning_full", "… bar, CSV, log, 10 idle callbacks", "lightning_full", package="lightning"),
    Case("lightning_validate", "Lightning: validate, a batch", "lightning_validate", None, "raw_validate", package="lightning"),
    Case("lightning_predict", "Lightning: predict, a batch", "lightning_predict", None, "raw_predict", package="lightning"),
    Case("transformers", "Hugging Face Trainer, bare", "transformers", package="transformers"),
    Case("wide_lightning", "6 layers: Lightning Trainer, bare", "lightning", layers=6, package="lightning"),
]


def start(python: str, case: Case, contender: str, arguments: argparse.Namespace, folder: Path) -> Runner:
    """Start a contender's process on a terminal."""
    folder.mkdir()
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [python, str(CONTENDERS), contender, f"--steps={case.steps}", f"--chunks={arguments.chunks}"]
    command += [f"--layers={case.layers}"] + [f"--core={arguments.core}"] * (arguments.core is not None)
    runner = Runner(command, folder, {"TERM": "xterm"}, stdout=screen)
    os.close(screen)
    threading.Thread(target=_drain, args=(terminal,), daemon=True).start()
    return runner


def _drain(terminal: int) -> None:
    """Read the terminal: if its buffer were full, the process would block."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the other end is closed
        pass
    os.close(terminal)


def measure_pair(case: Case, python: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One pair of processes: milliseconds per step of each, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        both = (("baseline", case.baseline), ("contender", case.contender))
        runners = [start(python, case, contender, arguments, Path(folder) / name) for name, contender in both]
        return ratios(runners, arguments.chunks, case.steps)


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
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="which one is held against the limits (default: cpu)")
    parser.add_argument("--core", type=int, help="stay on this core (default: the last one that may be used)")
    json_option(parser)
    return parser.parse_args()


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    arguments = parse_arguments()
    if arguments.core is None and hasattr(os, "sched_getaffinity"):
        arguments.core = max(os.sched_getaffinity(0))
    arguments.python = os.path.abspath(shutil.which(arguments.python) or arguments.python)
    report = Report(core=arguments.core)
    cases = choose(arguments)
    pairs: dict[str, list[dict[str, float]]] = {case.name: [] for case, _ in cases}
    for repeat in range(arguments.repeats):  # all cases in each repeat, so that a slow period affects all cases
        for case, python in cases:
            progress(f"{repeat + 1}/{arguments.repeats} {case.name}")
            pairs[case.name].append(measure_pair(case, python, arguments))
    progress()
    rows = [(case.title, case.limit, pairs[case.name]) for case, _ in cases]
    add_table(report, "µs a step", rows, arguments.clock, scale=1e3)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
