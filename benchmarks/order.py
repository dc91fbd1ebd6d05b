"""What the order of an epoch costs, compared with PyTorch's own: the first index at any position, and indices in sequence.

    python benchmarks/order.py [--lengths 1000000 1000000000 1000000000000] [--baseline 10000000] [--json FILE]

Every row is measured in its own process, with one thread. "cold" is the first call in that process, "warm" the median of the
following calls, each with a new key (a new epoch). "traced" is the peak that tracemalloc reports, which does not include
tensors. "process" is how far the resident memory rose above its value before the calls (Linux only).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.data.order import ORDER_VERSION, Permutation

REPEATS = 7
BLOCK = 32
IN_SEQUENCE = 1 << 19


def first_index(length: int, position: int, key: int) -> int:
    return int(Permutation(length, key).block(position, position + 1)[0])


def first_index_of_random_sampler(length: int, key: int) -> int:
    """What `DataLoader(shuffle=True)` does at the start of an epoch. Another position needs all indices before it."""
    sampler = torch.utils.data.RandomSampler(range(length), generator=torch.Generator().manual_seed(key))
    return next(iter(sampler))


def resident_mb() -> tuple[float, float] | None:
    """Resident memory now and at its peak, in MB; None where `/proc` does not exist."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1e3, int(fields["VmHWM"].split()[0]) / 1e3


def cost(call: Callable[[int], object], repeats: int) -> dict[str, float | None]:
    """Seconds and memory of `call(key)`. tracemalloc slows down Python's lists, so it traces an additional call."""
    before = resident_mb()
    seconds = []
    for key in range(repeats):
        began = time.perf_counter()
        call(key)
        seconds.append(time.perf_counter() - began)
    after = resident_mb()
    tracemalloc.start()
    call(repeats)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "cold_ms": seconds[0] * 1e3,
        "warm_ms": statistics.median(seconds[1:]) * 1e3,
        "traced_mb": traced / 1e6,
        "process_mb": after[1] - before[0] if before and after else None,
    }


def measure_first(case: tuple[str, int, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    what, length, position = case
    if what == "RandomSampler":
        figures = cost(lambda key: first_index_of_random_sampler(length, key), repeats=3)
    else:
        figures = cost(lambda key: first_index(length, position, key), REPEATS)
    return {"what": what, "length": length, "position": position, **figures}


def measure_sequence(length: int) -> dict[str, Any]:
    """Nanoseconds per index in one long block, and microseconds per `block` of 32 in consecutive calls."""
    count = min(length, IN_SEQUENCE) // BLOCK * BLOCK
    long, short = Permutation(length, 1), Permutation(length, 2)
    long.block(0, 1), short.block(0, 1)  # the cost of the first call is in the other table
    began = time.perf_counter()
    long.block(0, count)
    middle = time.perf_counter()
    for start in range(0, count, BLOCK):
        short.block(start, start + BLOCK)
    ended = time.perf_counter()
    return {
        "length": length,
        "ns_per_index": (middle - began) / count * 1e9,
        "us_per_block": (ended - middle) / (count // BLOCK) * 1e6,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10**6, 10**9, 10**12], help="numbers of samples")
    parser.add_argument("--baseline", type=int, default=10**7, help="number of samples for RandomSampler (10000000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    lengths = [*arguments.lengths, arguments.baseline]
    cases = [("trainkit", length, position) for length in lengths for position in (0, length // 2, length - 1)]
    cases.append(("RandomSampler", arguments.baseline, 0))

    print(f"{'first index of an epoch':<24}{'samples':>16}{'position':>16}", end="")
    print(f"{'cold ms':>10}{'warm ms':>10}{'traced MB':>11}{'process MB':>12}")
    first = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure_first, cases):
            first.append(row)
            process = "-" if row["process_mb"] is None else f"{row['process_mb']:.1f}"
            print(f"{row['what']:<24}{row['length']:>16,}{row['position']:>16,}", end="")
            print(f"{row['cold_ms']:>10.2f}{row['warm_ms']:>10.2f}{row['traced_mb']:>11.2f}{process:>12}", flush=True)
        print(f"\n{'in sequence':<24}{'samples':>16}{'ns an index':>16}{f'µs a block({BLOCK})':>20}")
        sequence = []
        for row in pool.imap(measure_sequence, lengths):
            sequence.append(row)
            print(f"{'trainkit':<24}{row['length']:>16,}{row['ns_per_index']:>16.1f}{row['us_per_block']:>20.2f}")

    if arguments.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
        report = {"order_version": ORDER_VERSION, "versions": versions, "first_index": first, "in_sequence": sequence}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
