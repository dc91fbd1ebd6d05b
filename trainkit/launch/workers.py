"""``supervise``, the parent process of each worker, and ``Events``, a file that launcher and supervisors of a node share.

torch elastic starts a supervisor for each worker, by the path of this file and without site-packages: that takes 10 ms and
10 MB, and allows imports of the standard library only. Supervisors exit together, when the last worker of the node has ended:
so it is never elastic that ends a worker because another one has failed or has saved and left.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["PLAN", "Event", "Events", "deadline", "supervise"]

PLAN = "TRAINKIT_PLAN"  # the variable with the file of what the supervisors of a start must know
_PREEMPTED = 143
_SWEEP = 0.5  # seconds in which killed processes disappear
_STEP = 0.05  # seconds between two looks at the events
_PR_SET_PDEATHSIG = 1
_POSIX = os.name == "posix"
_KILL = signal.SIGKILL if _POSIX else signal.SIGTERM


class Event(NamedTuple):
    """Something that happened to the workers of a start, and when on the monotonic clock.

    Kinds: ``signal``, for all workers and, if ``code``, for what they have started; and with the local rank of a worker and its
    exit code (negative for a signal): ``started``, ``ended`` by itself, ``killed`` by its supervisor, ``stopped`` by elastic.
    """

    kind: str
    number: int
    code: int
    when: float


class Events:
    """A file to which several processes append events."""

    def __init__(self, file: str) -> None:
        self.file = file

    def add(self, kind: str, number: int, code: int = 0) -> None:
        """Append an event."""
        with open(self.file, "a") as file:
            file.write(f"{kind} {number} {code} {time.monotonic()}\n")

    def read(self) -> list[Event]:
        """All events so far, in order."""
        with open(self.file) as file:
            parts = [line.split() for line in file]
        return [Event(kind, int(number), int(code), float(when)) for kind, number, code, when in parts]


def deadline(events: Sequence[Event], grace: float, patience: float, shutdown: float) -> float:
    """Until when a worker may end by itself, on the monotonic clock.

    Args:
        events: of its start.
        grace: seconds after a signal, or after the first worker has saved and left.
        patience: seconds after the first failure.
        shutdown: seconds after a second signal.
    """
    signals = [event for event in events if event.kind == "signal" and not event.code]
    ended = [event for event in events if event.kind == "ended"]
    interrupted = [event.number for event in signals] == [signal.SIGINT]
    if len(signals) > 1:
        return signals[1].when + shutdown
    for event in ended:
        if event.code == _PREEMPTED or interrupted:
            return event.when + grace
    if interrupted:  # the user is there, and presses it again
        return math.inf
    if signals:
        return signals[0].when + grace
    return min((event.when + patience for event in ended if event.code), default=math.inf)


def supervise() -> None:
    """Start the worker, pass signals on to it, end it when its time is up, and leave nothing behind."""
    with open(os.environ[PLAN]) as file:
        plan = json.load(file)
    asked: list[int] = []  # elastic asks for an end: another node has joined, or a supervisor is gone
    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, lambda number, _: asked.append(number))
    local_rank, events, kind, passed, last = int(os.environ["LOCAL_RANK"]), Events(plan["events"]), "ended", 0, math.inf
    try:
        worker = _start(plan, local_rank)
    except OSError:
        events.add("ended", local_rank, 1)
        raise
    events.add("started", local_rank)

    def wait() -> None:
        code = worker.wait()
        try:
            events.add(kind, local_rank, code)
        except OSError:  # the others would wait for it without limit
            os._exit(1)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    over: list[Event] = []
    signals: list[Event] = []
    while os.getppid() == plan["launcher"]:
        waiting.join(_STEP) if waiting.is_alive() else time.sleep(_STEP)
        seen, now = events.read(), time.monotonic()
        signals = [event for event in seen if event.kind == "signal"]
        for event in signals[passed:]:
            _signal(worker, event.number, group=bool(event.code))
        passed = len(signals)
        over = [event for event in seen if event.kind in ("ended", "killed", "stopped")]
        if len(over) == plan["workers"] or (asked and not waiting.is_alive()):
            break
        if kind == "ended" and (asked or now > deadline(seen, **plan["limits"])):
            kind, last = ("stopped", now + plan["limits"]["grace"]) if asked else ("killed", now + plan["limits"]["shutdown"])
            _signal(worker, signal.SIGTERM)
        elif now > last:
            _signal(worker, _KILL, group=True)
    failed = len(over) < plan["workers"] or any(event.code or event.kind != "ended" for event in over)
    if failed or signals:
        _sweep(worker)
    if os.getppid() != plan["launcher"]:  # it was killed
        time.sleep(1.0)  # in which the other supervisors see it too
        shutil.rmtree(os.path.dirname(events.file), ignore_errors=True)
    os._exit(int(failed))


def _sweep(worker: subprocess.Popen[bytes]) -> None:
    """Kill the worker and what it has started."""
    _signal(worker, _KILL, group=True)
    last = time.monotonic() + _SWEEP
    while _signal(worker, 0, group=True) and time.monotonic() < last:
        time.sleep(0.01)


def _start(plan: dict[str, Any], local_rank: int) -> subprocess.Popen[bytes]:
    paths = plan["outputs"][local_rank] if plan["outputs"] else ()
    pipes = [os.open(path, os.O_WRONLY) for path in paths]
    linux, parent = sys.platform.startswith("linux"), os.getpid()
    prctl = ctypes.CDLL(None).prctl if linux else None

    def follow() -> None:
        """Let the kernel kill the worker when its supervisor dies."""
        prctl(_PR_SET_PDEATHSIG, int(_KILL))  # type: ignore[misc]
        if os.getppid() != parent:
            os._exit(1)

    command, environment = plan["command"], plan["environments"][local_rank]
    out, err = pipes or (None, None)
    before = follow if linux else None
    worker = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True, preexec_fn=before)
    for pipe in pipes:
        os.close(pipe)
    return worker


def _signal(worker: subprocess.Popen[bytes], number: int, group: bool = False) -> bool:
    """Signal a worker, or it and all that it has started; returns whether there was anything to signal."""
    try:
        os.killpg(worker.pid, number) if group and _POSIX else worker.send_signal(number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    supervise()
