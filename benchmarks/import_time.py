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
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

LIMIT_S = 0.1
ROOT = Path(__file__).resolve().parent.parent

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


def measure(repeats: int) -> dict[str, float]:
    """Medians in seconds."""
    seconds(TORCH, APART, NAMES)  # warm up: write the byte code, fill the page cache
    alone, both, after, names = [], [], [], []
    for _ in range(repeats):
        alone += seconds(TORCH)
        both += seconds(BOTH)
        _, one, two = seconds(TORCH, APART, NAMES)
        after.append(one)
        names.append(two)
    return {
        "torch": statistics.median(alone),
        "torch_and_trainkit": statistics.median(both),
        "difference": statistics.median(b - a for a, b in zip(alone, both, strict=True)),
        "trainkit_after_torch": statistics.median(after),
        "names": statistics.median(names),
    }


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of processes (default: 15)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    figures = measure(arguments.repeats)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, median of {arguments.repeats}")
    print(f"import torch                    {figures['torch'] * 1e3:8.1f} ms")
    print(f"import torch, trainkit          {figures['torch_and_trainkit'] * 1e3:8.1f} ms")
    print(f"difference, pair by pair        {figures['difference'] * 1e3:8.1f} ms   (limit {LIMIT_S * 1e3:.0f} ms)")
    print(f"import trainkit after torch     {figures['trainkit_after_torch'] * 1e3:8.1f} ms")
    print(f"first use of the four names     {figures['names'] * 1e3:8.1f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(figures["difference"] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
