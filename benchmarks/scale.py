"""What grows with the number of ranks: the control word, a log boundary, an exchange through the main process, a manifest.

    python benchmarks/scale.py [--ranks 2 8 64 1024 4096] [--json FILE]

No run needs thousands of machines: the code of one rank runs as it is, and what it would wait for is modeled.

- Messages and bytes are counted where the code sends them.
- CPU is measured. The cost of sending and receiving one message over gloo is measured on two processes of this machine.
- The main process of an exchange is real, with one connection for each rank; the other ends are in this process, too.
- Time on the network is ALPHA for each message plus BETA for each byte of messages that must follow one another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Column, Report, json_option
from torch import Tensor

from trainkit.checkpoint import checkpoint_plan
from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan
from trainkit.checkpoint.commit import commit
from trainkit.distributed import world as world_module
from trainkit.distributed.channel import Channel
from trainkit.distributed.hops import hops
from trainkit.distributed.hub import LocalHubConnection
from trainkit.distributed.wire import JsonConnection, encode
from trainkit.distributed.world import RING_RANKS, World
from trainkit.metrics.store import MetricResults, MetricStore, Scope
from trainkit.trainer.safe_points import step_interval

ALPHA = 30e-6  # seconds for one message between two nodes over TCP, wake-up of the receiver included
BETA = 1 / 1.25e9  # seconds for one byte: 10 Gbit/s
RANKS = [2**power for power in range(1, 13)]
LIMITS = {"boundary_10_cpu_ms": 1.0, "exchange_cpu_ms": 50.0, "manifest_s": 0.5}  # at LIMITED ranks
LIMITED = 1024
WORD = 7  # numbers in the control word
ABOUT: dict[str, Any] = {
    "run_id": "run", "save_counter": 1, "step": 1, "epoch": 0, "position": {}, "seed": 1, "order_version": 1, "key_version": 1,
    "strategy": "ddp", "precision": "32-true", "contents": {"model": "all", "optimizer": True, "resumable": True},
    "aliases": {}, "irregular": [], "metrics": {}, "saved_by": None,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the control word


def depth(size: int) -> int:
    """The largest number of messages that must follow one another in a reduction, by running the hops of all ranks."""
    plans = [deque(hops(rank, size)) for rank in range(size)]
    clocks = [0] * size
    sent: dict[tuple[int, int], deque[int]] = {}
    posted = [False] * size
    ready = deque(range(size))
    while ready:
        rank = ready.popleft()
        while plans[rank]:
            hop = plans[rank][0]
            if hop.sends and not posted[rank]:
                sent.setdefault((rank, hop.peer), deque()).append(clocks[rank] + 1)
                ready.append(hop.peer)
            posted[rank] = True
            if hop.receives:
                arrived = sent.get((hop.peer, rank))
                if not arrived:
                    break
                clocks[rank] = max(clocks[rank], arrived.popleft())
            plans[rank].popleft()
            posted[rank] = False
    assert not any(plans)
    return max(clocks)


def control_word(size: int) -> dict[str, float]:
    """The hops of the control word, and for how long every rank waits for them, spread over the steps until the next one."""
    hop, every, deep = ALPHA + BETA * 8 * WORD, step_interval(size), depth(size)
    ring = 2 * (size - 1)
    waited = 0.0 if size <= RING_RANKS else (deep - 1) * hop / every  # the ring, and the first hop, run during the step
    return {
        "ring_hops": ring,
        "ring_ms": ring * hop * 1e3,
        "hops": deep,
        "ms": deep * hop * 1e3,
        "every": every,
        "wait_us": waited * 1e6,
    }


def _drivers(rank: int, size: int, path: str, results: Any) -> None:
    world = _world(rank, size, path)
    matrix = torch.randn(96, 96)
    asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
    done: SimpleQueue[Any] = SimpleQueue()

    def drive() -> None:
        while (call := asked.get()) is not None:
            done.put(call())

    thread = threading.Thread(target=drive)
    thread.start()

    def step(driver: str) -> None:
        """A step of about 0.2 ms during which the word of the step before is on its way."""
        if driver == "ring":
            pending = world.begin_largest([1] * WORD)
        elif driver == "when it is read":
            with mock.patch.object(world_module, "RING_RANKS", 1):
                pending = world.begin_largest([1] * WORD)
        elif driver == "a thread":
            asked.put(lambda: world.largest([1] * WORD))
        for _ in range(8):
            matrix @ matrix
        if driver in ("ring", "when it is read"):
            pending.wait()
        elif driver == "a thread":
            done.get()

    for driver in ("no word", "ring", "when it is read", "a thread"):
        results[driver, rank] = least(partial(step, driver), 50, 6)
        world.barrier()
    asked.put(None)
    thread.join()
    dist.destroy_process_group()


def drivers(size: int) -> dict[str, float]:
    """Microseconds of CPU of a step of about 0.2 ms, by what does the hops of the control word of every step."""
    found = spawn(_drivers, size)
    return {driver: max(found[driver, rank] for rank in range(size)) * 1e6 for driver, rank in found if rank == 0}


def least(call: Callable[[], Any], repeats: int, blocks: int) -> float:
    """CPU seconds of a call: the least mean of several blocks, since other work on the machine only adds to it."""
    means = []
    for _ in range(blocks):
        began = time.process_time()
        for _ in range(repeats):
            call()
        means.append((time.process_time() - began) / repeats)
    return min(means)


def _world(rank: int, size: int, path: str) -> World:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    return World(rank, size, control=dist.new_group(backend="gloo"))


def spawn(function: Callable[..., None], size: int) -> dict[Any, float]:
    """Call `function(rank, size, path of a store, results)` in processes; returns the results."""
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(function, (size, str(Path(folder, "store")), results), nprocs=size)  # type: ignore[attr-defined, no-untyped-call]
        return dict(results)


# ------------------------------------------------------------------------------------------------------- a log boundary


class Alike(World):
    """Rank 0 of many ranks that have the same values: it does all hops, and what it receives is what it sends.

    Attributes:
        messages: The number of messages that this rank sends.
        bytes: Their bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.messages = self.bytes = 0

    def post(self, hop: Any, value: Tensor, tag: int) -> tuple[Tensor, list[Any]]:
        self.messages += hop.sends
        self.bytes += hop.sends * value.nbytes
        return value.clone(), []


def log_boundary(size: int, metrics: int, message_cpu: float, repeats: int = 30) -> dict[str, float]:
    """CPU of one rank, messages and bytes, at a boundary where every rank has logged `metrics` metrics.

    The CPU of gloo and the system for the messages is a column of its own: it depends on the machine and its network.
    """
    world = Alike(size)
    store = MetricStore(lambda *args: None, MetricResults(), world=world)
    options = (False, None, None, None, "mean", False, True, 4, False)
    seconds = []
    for repeat in range(repeats):
        store.scope, store.stamp = Scope.TRAIN_BATCH, repeat
        for number in range(metrics):
            store.log(f"metric_{number}", float(number), *options)
        world.messages = world.bytes = 0
        began = time.process_time()
        store.flush_step()
        seconds.append(time.process_time() - began)
        assert store.results.callback["metric_1"] == 1.0
    return {
        "cpu_ms": min(seconds) * 1e3,
        "message_cpu_ms": world.messages * message_cpu * 1e3,
        "messages": world.messages,
        "bytes": world.bytes,
        "network_ms": (world.messages * ALPHA + world.bytes * BETA) * 1e3,
    }


def _message_cpu(rank: int, size: int, path: str, results: Any) -> None:
    world = _world(rank, size, path)
    value = torch.zeros(64, dtype=torch.float64)
    results[rank] = least(lambda: world.combine(value, torch.maximum), 100, 10)
    world.barrier()
    dist.destroy_process_group()


def message_cpu() -> float:
    """CPU seconds of one message that is sent and one that is received."""
    return max(spawn(_message_cpu, 2).values())


# ------------------------------------------------------------------------------------ exchanges through the main process


class Star:
    """The channel of the main process, with a connection for each other rank; their ends are here, too."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.channel = Channel(0, size)
        assert isinstance(self.channel._link, LocalHubConnection)
        self._link, self._ends, self.received = self.channel._link, [], 0
        self._loop = self._link._loop
        self._loop.start()
        for rank in range(1, size):
            here, there = socket.socketpair()
            self._ends.append(there)
            wire = JsonConnection(here, lambda message: None, lambda why: None)
            self._loop.call(partial(self._loop.add, wire))
            self._loop.call(partial(self._link._on_connect, rank, wire))
        self._link._all_connected.wait()

    def cpu(self) -> float:
        """CPU seconds of the thread of the connections so far."""
        seen: list[float] = []
        done = threading.Event()

        def read() -> None:
            seen.append(time.thread_time())
            done.set()

        self._loop.call(read)
        done.wait()
        return seen[0]

    def exchange(self, line: bytes, call: Callable[[], Any]) -> tuple[float, float]:
        """CPU of the main process for an exchange in which every other rank sends `line`, and the bytes that it sends.

        Args:
            line: The message of a rank.
            call: What the main process calls.
        """
        own: list[float] = []

        def main() -> None:
            began = time.thread_time()
            call()
            own.append(time.thread_time() - began)

        thread = threading.Thread(target=main)
        before, self.received = self.cpu(), 0
        thread.start()
        for end in self._ends:
            end.sendall(line)
        for end in self._ends:
            last = b""
            while not last.endswith(b"\n"):
                last = end.recv(1 << 20)
                self.received += len(last)
        thread.join()
        return own[0] + self.cpu() - before, float(self.received)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self.channel.close()


def exchange(size: int) -> dict[str, float]:
    """One exchange of 2 KB a rank, equal on all ranks, as in a verb; and 2 KB that differ, which the main process collects."""
    star = Star(size)
    text, runs = json.dumps("x" * 2048), []
    try:
        for turn in range(5):
            line = encode({"exchange": f"verbs/{turn}", "value": text})
            equal = star.exchange(line, partial(star.channel.exchange, f"verbs/{turn}", "x" * 2048))
            line = encode({"exchange": f"save/{turn}", "value": text, "collect": True})
            collect = star.exchange(line, partial(star.channel.collect, f"save/{turn}", "y", len))
            runs.append((*equal, *collect))
    finally:
        star.close()
    cpu, sent, collect_cpu, collect_sent = (min(column) for column in zip(*runs, strict=True))
    return {
        "cpu_ms": cpu * 1e3,
        "sent_mb": sent / 1e6,
        "collect_cpu_ms": collect_cpu * 1e3,
        "collect_sent_mb": collect_sent / 1e6,
    }


def manifest(size: int) -> dict[str, float]:
    """The round of a save after all ranks have written: 2 files a rank, their checksums, the manifest, the reply."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(checkpoint_plan, "SPLIT_ABOVE_BYTES", 0):
        tensors = {stem: {f"layer.{n}.weight": torch.zeros(16) for n in range(size)} for stem in ("model", "optimizer")}
        content = CheckpointContent(tensors, {}, about={**ABOUT, "world_size": size}, max_shard_size=64)
        plan = CheckpointPlan(content, rank=0, ranks=size)
        names = [name for name in plan.sizes if name.endswith(".safetensors")]
        star = Star(size)
        saving = Saving(star, names)
        try:
            commit(plan, Path(folder, "step"), group=saving)
        finally:
            star.close()
    return {"s": saving.seconds, "sent_mb": saving.sent / 1e6, "files": len(names)}


class Saving:
    """The group of a commit on the main process, whose second round goes through a star.

    Args:
        star: The ranks.
        names: The files of all ranks.
    """

    def __init__(self, star: Star, names: list[str]) -> None:
        self.rank, self.size = 0, star.size
        self._star = star
        self._names = names
        self._rounds = 0
        self.seconds = self.sent = 0.0

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.size

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        self._rounds += 1
        if self._rounds == 1:  # all have the layout of the main process
            return answer(self.exchange(value))
        (own, _), _ = value
        others = [name for name in self._names if name not in own]
        replies: list[Any] = []

        def reply(values: list[Any]) -> Any:
            of_others = [[[dict.fromkeys(others[rank :: self.size - 1], "0" * 32), []], None] for rank in range(self.size - 1)]
            replies.append(answer([values[0], *of_others]))
            return replies[0]

        said = json.dumps([[dict.fromkeys(others[:2], "0" * 32), []], None])
        line = encode({"exchange": "save/1", "value": said, "collect": True})
        call = partial(self._star.channel.collect, "save/1", value, reply)
        self.seconds, self.sent = self._star.exchange(line, call)
        return replies[0]


# -------------------------------------------------------------------------------------------------------------- all of it


def measure(size: int, message: float) -> dict[str, Any]:
    return {
        "ranks": size,
        "word": control_word(size),
        "boundary_10": log_boundary(size, 10, message),
        "boundary_100": log_boundary(size, 100, message),
        "exchange": exchange(size),
        "manifest": manifest(size),
    }


def limited(row: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """What has a limit, with its figure and its limit."""
    yield "log boundary of 10 metrics, ms of CPU", row["boundary_10"]["cpu_ms"], LIMITS["boundary_10_cpu_ms"]
    exchange = max(row["exchange"]["cpu_ms"], row["exchange"]["collect_cpu_ms"])
    yield "exchange, ms of CPU at the main process", exchange, LIMITS["exchange_cpu_ms"]
    yield "manifest, s", row["manifest"]["s"], LIMITS["manifest_s"]
    yield "control word, messages one after the other", row["word"]["hops"], 2 * math.log2(row["ranks"])


COLUMNS: list[tuple[str, str, str, int]] = [
    ("ring hops", "word", "ring_hops", 0),
    ("ring ms", "word", "ring_ms", 2),
    ("hops", "word", "hops", 0),
    ("ms", "word", "ms", 2),
    ("every", "word", "every", 0),
    ("wait µs/step", "word", "wait_us", 0),
    ("log 10: CPU ms", "boundary_10", "cpu_ms", 2),
    ("messages", "boundary_10", "messages", 0),
    ("their CPU ms", "boundary_10", "message_cpu_ms", 2),
    ("bytes", "boundary_10", "bytes", 0),
    ("log 100: CPU ms", "boundary_100", "cpu_ms", 2),
    ("2 KB equal: CPU ms", "exchange", "cpu_ms", 1),
    ("MB", "exchange", "sent_mb", 2),
    ("2 KB collected: CPU ms", "exchange", "collect_cpu_ms", 1),
    ("MB", "exchange", "collect_sent_mb", 2),
    ("manifest s", "manifest", "s", 3),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (powers of two from 2 to 4,096)")
    json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.suppress(ValueError, OSError):  # two file descriptors for each rank
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report(network=f"{ALPHA * 1e6:.0f} µs a message and {1e-9 / BETA:.2f} GB/s, a model")
    message, driven = message_cpu(), drivers(4)
    single = report.table("µs", Column("figure", 2))
    single.add("one message, CPU", message * 1e6)
    for name, cpu in driven.items():
        single.add(f"a step on 4 ranks, what drives the word: {name}", cpu)
    table = report.table("ranks", *(Column(title, digits) for title, _, _, digits in COLUMNS))
    limits: list[tuple[str, float, float]] = []
    for size in options.ranks:
        row = measure(size, message)
        table.add(f"{size:,}", *(row[part][name] for _, part, name, _ in COLUMNS))
        limits += limited(row) if size == LIMITED else []
    held = report.table(f"at {LIMITED:,} ranks", Column("figure", 2))
    for name, figure, most in limits:
        held.add(name, figure, judged=figure, most=most)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
