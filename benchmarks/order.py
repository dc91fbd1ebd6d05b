"""What the order of an epoch costs, compared with PyTorch's own: the first index at any position, and indices in sequence.

    python benchmarks/order.py [--lengths 1000000 1000000000 1000000000000] [--baseline 10000000] [--json FILE]

Every row is measured in its own process, with one thread. "cold" is the first call in that process, "warm" the median of the
following calls, each with a new key (a new epoch). "traced" is the peak that tracemalloc reports, which does not include
tensors. "process" is how far the resident memory rose above its value before the calls (Linux only).

Returns 1 if the first index of an epoch of 10^9 samples takes trainkit more than 5 ms ("cold").
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Column, Report, json_option, version

from trainkit.data.order import ORDER_VERSION, Permutation

REPEATS = 7
BLOCK = 32
IN_SEQUENCE = 1 << 19
LIMIT_MS, LIMITED = 5.0, 10**9  # for the first call, at this number of samples


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
    json_option(parser)
    return parser.parse_args()


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    arguments = parse_arguments()
    lengths = [*arguments.lengths, arguments.baseline]
    cases = [("trainkit", length, position) for length in lengths for position in (0, length // 2, length - 1)]
    cases.append(("RandomSampler", arguments.baseline, 0))

    report = Report(numpy=version("numpy"), order_version=ORDER_VERSION)
    costs = (Column("cold, ms", 2), Column("warm, ms", 2), Column("traced, MB", 2), Column("process, MB"))
    first = report.table("first index of an epoch", Column("samples", 0), Column("position", 0), *costs)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure_first, cases):
            cells = [row[name] for name in ("length", "position", "cold_ms", "warm_ms", "traced_mb", "process_mb")]
            limited = row["what"] == "trainkit" and row["length"] == LIMITED
            first.add(row["what"], *cells, judged=row["cold_ms"], most=LIMIT_MS if limited else None)
        sequence = report.table("in sequence", Column("samples", 0), Column("ns an index"), Column(f"µs a block of {BLOCK}", 2))
        for row in pool.imap(measure_sequence, lengths):
            sequence.add("trainkit", row["length"], row["ns_per_index"], row["us_per_block"])
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
