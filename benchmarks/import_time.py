"""What `import trainkit` costs, compared with `import torch`.

    python benchmarks/import_time.py [--repeats 15] [--json FILE]

Each import runs in its own process. The two alternate, so that other load on the machine slows both. The result is the median
of the differences of the pairs. The time of `import torch` itself varies more than this difference, so the import of
trainkit after torch is also timed inside one process. "names" is the first use of Trainer, TrainModule, DataModule and
Accelerator, which `import trainkit` does not import yet. The time to start Python is not included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from report import Column, Report, Spread, json_option

LIMIT_MS = 100
ROOT = Path(__file__).resolve().parent.parent

DIFFERENCE = "difference, pair by pair"
TORCH = "import torch"
BOTH = "import torch, trainkit"
APART = "import trainkit"
NAMES = "trainkit.Trainer, trainkit.TrainModule, trainkit.DataModule, trainkit.Accelerator"


def seconds(*programs: str) -> list[float]:
    """The seconds that each program takes; they run one after the other in one new process."""
    timed = "".join(f"start = now(); {program}; times.append(now() - start)\n" for program in programs)
    text = f"import json\nfrom time import perf_counter as now\ntimes = []\n{timed}print(json.dumps(times))"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, capture_output=True, text=True)
    times: list[float] = json.loads(done.stdout)
    return times


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds."""
    if repeats > 1:  # a single one only tries the program
        seconds(TORCH, APART, NAMES)  # warm up: write the byte code, fill the page cache
    alone, both, after, names = [], [], [], []
    for _ in range(repeats):
        alone += seconds(TORCH)
        both += seconds(BOTH)
        _, one, two = seconds(TORCH, APART, NAMES)
        after.append(one)
        names.append(two)
    return {
        "import torch": alone,
        "import torch, trainkit": both,
        DIFFERENCE: [b - a for a, b in zip(alone, both, strict=True)],
        "import trainkit after torch": after,
        "first use of the four names": names,
    }


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of processes (default: 15)")
    json_option(parser)
    arguments = parser.parse_args()

    report = Report()
    table = report.table("import", Column("ms (range)"))
    for name, found in measure(arguments.repeats).items():
        times = Spread.of([each * 1e3 for each in found])
        table.add(name, times, judged=times.median, most=LIMIT_MS if name == DIFFERENCE else None)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
