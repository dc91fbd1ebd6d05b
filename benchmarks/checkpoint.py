"""What saving and loading a checkpoint cost, compared with plain copies, writes and reads of the same bytes.

    python benchmarks/checkpoint.py [--only save load] [--folder DISK] [--repeats 7] [--threads N] [--json FILE]

A transformer with 48 million parameters and AdamW, float32: 577 MB of state. Each case runs in its own process; the
measurements are in `checkpoint_cases.py`. In each repeat the reference runs before and after the measured call, and the ratio
is relative to the mean of the two. The output shows the median and the range over the repeats. The lines "… / itself" compare
one run of the reference with the other: how far they are from 1 is the noise.

- bytes: the size of the files, and the bytes passed to write calls (Linux), relative to the bytes of the tensors.
- save: `Accelerator.save_state` to a new folder, compared with one loop that hashes the tensors with XXH3-128 and writes them
  to one file, 1 MiB at a time, and then calls fsync.
- finite: the check of a save whether values are finite, over all tensors, compared with `torch.isfinite(tensor).all()`.
- stall: the time inside `Trainer.save_checkpoint(blocking=False)` at the end of a training step, while no other save runs,
  compared with copying the same tensors into preallocated memory. A `ModelCheckpoint` has that memory allocated before; the
  first save has its own line. With `--device cuda`, the tensors are on the device, and the copy goes into pinned memory.
- load: reading and verifying, and all of `Accelerator.load_state` into a model whose optimizer has no state yet, compared with
  one loop that reads the same files into new memory and hashes them, 1 MiB at a time. For "cold", the files are dropped from
  the page cache first, where the system supports it (not macOS, not Windows); the host of a virtual disk may still cache them.
- memory: how far `ru_maxrss` rises above the memory in use before the call, compared with the bytes of the largest tensor or
  of the state (not on Windows).

It needs 2.5 GB of memory and 1.5 GB of disk space. Choose a disk to which you write checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import Column, Report, Spread, json_option

MEASURE = Path(__file__).with_name("checkpoint_cases.py")


@dataclass
class Row:
    """One line of the table: what is measured, and the maximum ratio."""

    name: str
    title: str
    limit: float | None = None


LOADS = [
    row
    for heat in ("warm", "cold")
    for row in (
        Row(f"{heat}_control", f"load, {heat}: plain read + hash / itself"),
        Row(f"{heat}_read", f"load, {heat}: read and verify", 1.5),
        Row(f"{heat}_load", f"load, {heat}: Accelerator.load_state", 1.5),
    )
]
CASES = {
    "save": [
        Row("bytes", "bytes: files / tensors, MB", 1.01),
        Row("handed", "bytes: handed to the system / tensors, MB", 1.01),
        Row("save_control", "save: plain write + fsync + hash / itself"),
        Row("save", "save: Accelerator.save_state", 1.25),
    ],
    "finite": [
        Row("finite_control", "check: isfinite().all() / itself"),
        Row("finite", "check that all values are finite", 0.15),
    ],
    "stall": [
        Row("stall_control", "stall: plain copy / itself"),
        Row("stall_first", "stall: first asynchronous save"),
        Row("stall", "stall: later ones", 2.0),
    ],
    "load": LOADS,
    "memory_save": [Row("memory_save", "memory: save / largest tensor, MB", 1.1)],
    "memory_stall": [Row("memory_stall", "memory: asynchronous saves / state, MB", 1.1)],
    "memory_read": [Row("memory_read", "memory: read and verify / state, MB")],
    "memory_load": [Row("memory_load", "memory: Accelerator.load_state / state, MB")],
}


def measure(case: str, arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Measure a case in its own process. Returns row → (trainkit, reference) of each repeat."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.folder) as folder:
        command = [sys.executable, str(MEASURE), case, os.path.abspath(folder)]
        command += [f"--layers={arguments.layers}", f"--repeats={arguments.repeats}"]
        command += [f"--threads={arguments.threads}"] * (arguments.threads is not None) + [f"--device={arguments.device}"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-4000:]}")
    pairs: dict[str, list[tuple[float, float]]] = json.loads(done.stdout.splitlines()[-1])
    return pairs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write (default: the current folder)")
    parser.add_argument("--repeats", type=int, default=7, help="of what is timed (default: 7); memory is measured 3 times")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: 12; fewer only to try the program)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the training (cuda: the case stall only)")
    json_option(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and arguments.only != ["stall"]:
        parser.error("--device cuda measures the time that training waits for a save: add --only stall")
    return arguments


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    arguments = parse_arguments()
    report = Report(threads=arguments.threads, layers=arguments.layers, device=arguments.device)
    table = report.table("s, or MB", Column("trainkit", 3), Column("reference", 3), Column("ratio (range)", 3))
    for case in arguments.only or CASES:
        pairs: dict[str, list[tuple[float, float]]] = {}
        for _ in range(min(arguments.repeats, 3) if case.startswith("memory") else 1):
            for name, found in measure(case, arguments).items():
                pairs.setdefault(name, []).extend(found)
        for row in CASES[case]:
            if pairs.get(row.name):
                own, reference = (statistics.median(pair[place] for pair in pairs[row.name]) for place in (0, 1))
                ratio = Spread.of([pair[0] / pair[1] for pair in pairs[row.name]])
                table.add(row.title, own, reference, ratio, judged=ratio.median, most=row.limit)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
