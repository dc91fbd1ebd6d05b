"""The launcher of a node: ``run_job`` starts the workers through torch elastic, passes signals on and returns their exit code.

``torch.distributed.launcher`` runs in a thread: it finds the other nodes, numbers the workers, starts a supervisor for each and
restarts all after a failure. The main thread has the signals. How long workers may take to end is up to their supervisors.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from trainkit.console import notice
from trainkit.distributed.restart_store import RESTART_STORE
from trainkit.errors import ConfigurationError
from trainkit.launch import workers
from trainkit.launch.environment import LAUNCHER
from trainkit.launch.interface import lead_gloo_out
from trainkit.launch.place import is_local
from trainkit.launch.rendezvous import BACKEND, Rendezvous
from trainkit.launch.verdict import FAILED, INTERRUPTED, PREEMPTED, Verdict, judge
from trainkit.launch.workers import PLAN, Events

__all__ = ["Job", "conduct", "run_job"]

_PATIENCE = 4.0  # seconds in which the other workers end by themselves when one has failed: they have things to print
_SHUTDOWN = 5.0  # seconds between SIGTERM and SIGKILL
_ONE = 1.0  # seconds within which SIGTERM twice is once: a batch system signals the launcher and all around it
_LEAVE = 2.0  # seconds in which torch's launcher ends when it is not waited for
_STEP = 0.05  # seconds between two looks at the signals
_PORT = 29500
_STOP_AND_GO = [getattr(signal, name) for name in ("SIGTSTP", "SIGCONT") if hasattr(signal, name)]
# Of elastic's variables, those that workers get.
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Job:
    """What to run, and where.

    Attributes:
        command: the command line of a worker.
        environment: its variables; what it must know of its place is added.
        per_node: workers of this node.
        least: nodes that are needed.
        most: nodes that are taken.
        node_rank: the number of this node; ``None``: any.
        master_addr: of the node that hosts the store; needed for several nodes.
        master_port: there, default 29500, for a single node any free port.
        max_restarts: how many times to restart the workers after a failure.
        launcher: what the workers say has started them.
        grace: seconds that workers have to save and end after a signal.
        join_timeout: seconds that nodes wait for each other.
        output: gets the local rank, the rank and an object with the pipes ``stdout`` and ``stderr`` of each worker. Default:
            they write where this process does.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    per_node: int
    least: int = 1
    most: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    launcher: str = "trainkit launch"
    grace: float = 30.0
    join_timeout: float = 600.0
    output: Callable[[int, int, Any], None] | None = None


class _Stopped(Exception):  # noqa: N818
    """A signal came while there were no workers."""


class _Starts(LogsSpecs):
    """Where elastic asks for the log files of workers, just before it starts them: the moment to prepare a start."""

    def __init__(self, start: Callable[[dict[int, dict[str, str]]], None]) -> None:
        super().__init__()
        self._start = start

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """No files."""
        self._start(envs)
        return LogsDest(dict.fromkeys(envs, ""), dict.fromkeys(envs, ""), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Run:
    """A job on this node, from its start to its end, with a folder for files of the launcher and its supervisors."""

    def __init__(self, job: Job, folder: str) -> None:
        self._job, self._folder = job, folder
        self._rendezvous: Rendezvous | None = None
        self._events: Events | None = None  # of the workers that there are
        self._first_rank = self._failures = 0
        self._noted: list[tuple[int, float]] = []  # signals, and when they came
        self._received: list[int] = []
        self._last = 0.0
        self._pipes: dict[int, list[int]] = {}
        self._verdict: Verdict | None = None
        self._error: Exception | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal has come; Ctrl-C comes from the terminal to the launcher alone."""
        self._noted.append((number, time.monotonic()))

    def verdict(self) -> Verdict:
        """Run the job."""
        thread = threading.Thread(target=contextvars.copy_context().run, args=(self._launch,), daemon=True)
        thread.start()
        while thread.is_alive() and not self._is_over():
            thread.join(_STEP)
            self._pass_signals()
            events = self._events
            if self._pipes and events is not None:
                self._close_pipes(event.number for event in events.read() if event.kind == "started")
        self._judge()
        stopped = thread.is_alive() or isinstance(self._error, _Stopped)
        if thread.is_alive() and self._rendezvous is not None:
            self._rendezvous.shutdown()
            thread.join(_LEAVE)
        return self._outcome(stopped)

    def _launch(self) -> None:
        """Run torch's launcher; in a thread, where it leaves signals alone."""
        job = self._job
        config = LaunchConfig(
            job.least,
            job.most,
            job.per_node,
            logs_specs=_Starts(self._start),
            run_id=BACKEND,
            role=BACKEND,
            rdzv_backend=BACKEND,
            rdzv_configs={"make": self._make_rendezvous},
            max_restarts=job.max_restarts,
        )
        try:
            launch_agent(config, sys.executable, ["-I", "-S", workers.__file__])
        except ChildFailedError:  # the events say more
            pass
        except Exception as error:
            self._error = error

    def _make_rendezvous(self) -> Rendezvous:
        job = self._job
        first = job.master_addr or "", job.master_port or (0 if job.most == 1 else _PORT)
        self._rendezvous = Rendezvous((job.least, job.most), first, job.node_rank, job.join_timeout, self._before_start)
        return self._rendezvous

    def _before_start(self) -> None:
        """Elastic is about to meet the other nodes and start workers: refuse if the last ones were told to end."""
        verdict = self._judge()
        if verdict is not None and verdict.final:
            raise _Stopped
        if verdict is not None:
            self._failures += 1
            first, most = verdict.first or "the processes were lost", self._job.max_restarts
            notice(f"{first}; restarting all processes (restart {self._failures} of {most}).")

    def _start(self, environments: dict[int, dict[str, str]]) -> None:
        """Elastic is about to start the supervisors of workers with these variables, which it hands to the supervisors."""
        job, rendezvous = self._job, self._rendezvous
        assert rendezvous is not None
        self._first_rank = int(environments[0]["RANK"])
        shared = dict(job.environment)
        if job.per_node > 1:  # else each takes all cores, and they get into each other's way
            shared.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // job.per_node)))
        if job.most > 1 and job.master_addr is not None and not is_local(job.master_addr):
            lead_gloo_out(shared, job.master_addr)
        own = {"TORCHELASTIC_RESTART_COUNT": str(rendezvous.restarts), LAUNCHER: job.launcher, RESTART_STORE: rendezvous.where}
        places = [{name: each[name] for name in each if name.startswith(_PLACE)} for _, each in sorted(environments.items())]
        events = Events(f"{self._folder}/{rendezvous.restarts}")
        events.add("start", job.per_node)
        plan = {
            "launcher": os.getpid(),
            "workers": job.per_node,
            "limits": {"grace": job.grace, "patience": _PATIENCE, "shutdown": _SHUTDOWN},
            "events": events.file,
            "command": job.command,
            "environments": [{**shared, **place, **own} for place in places],
            "outputs": [self._take_output(events.file, int(place["RANK"])) for place in places] if job.output else None,
        }
        with open(f"{events.file}.json", "w") as file:
            json.dump(plan, file)
        for each in environments.values():
            each[PLAN] = file.name
        self._events = events
        if any(number not in _STOP_AND_GO for number, _ in self._noted) or self._received:
            self._events = None
            raise _Stopped

    def _take_output(self, name: str, rank: int) -> list[str]:
        """Make the pipes of a worker, and hand their reading ends on; the writing ends are open until the worker has them."""
        assert self._job.output is not None
        paths, local_rank = [f"{name}.{rank}.{stream}" for stream in ("out", "err")], rank - self._first_rank
        for path in paths:
            os.mkfifo(path)
        reading = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in paths]
        self._pipes[local_rank] = [os.open(path, os.O_WRONLY) for path in paths]
        for end in reading:
            os.set_blocking(end, True)
        out, err = (os.fdopen(end, "rb") for end in reading)
        self._job.output(local_rank, rank, SimpleNamespace(stdout=out, stderr=err))
        return paths

    def _close_pipes(self, local_ranks: Iterable[int]) -> None:
        for end in [end for local_rank in local_ranks for end in self._pipes.pop(local_rank, ())]:
            os.close(end)

    def _pass_signals(self) -> None:
        """Pass on what has come: the workers have no terminal."""
        events = self._events or Events(os.devnull)
        while self._noted:
            number, when = self._noted[0]
            if number in _STOP_AND_GO:  # Ctrl-Z and fg
                events.add("signal", signal.SIGSTOP if number == signal.SIGTSTP else number, 1)
                if number == signal.SIGTSTP:
                    time.sleep(4 * _STEP)  # until the supervisors have seen it
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGINT or number not in self._received or when - self._last > _ONE:
                self._received.append(number)
                self._last = when
                # a terminal that is closed means an end, which workers know as SIGTERM
                events.add("signal", signal.SIGTERM if number == getattr(signal, "SIGHUP", 0) else number)
            self._noted.pop(0)  # not before: either the workers get it, or _start refuses to start them

    def _judge(self) -> Verdict | None:
        """What came of the last workers, unless it was elastic that ended them."""
        events, self._events = self._events, None
        if events is None:
            return None
        self._close_pipes(range(self._job.per_node))
        seen = events.read()
        ended = {event.number: event.code for event in seen if event.kind == "ended"}
        killed = sorted(event.number for event in seen if event.kind == "killed")
        stopped = [event.number for event in seen if event.kind == "stopped"]
        if stopped and not any(ended.values()):
            notice("another machine has joined, or has failed; restarting all processes.")
            return None
        for lost in set(range(self._job.per_node)).difference(ended, killed, stopped):  # killed with its supervisor
            ended[lost] = -signal.SIGKILL
        self._verdict = judge([*ended.items()], killed, self._received, self._first_rank, self._job.grace)
        return self._verdict

    def _is_over(self) -> bool:
        """Whether there is nothing to wait for, though torch's launcher still runs: it waits for other nodes."""
        events, rendezvous = self._events, self._rendezvous
        over = [] if events is None else [event for event in events.read() if event.kind in ("ended", "killed", "stopped")]
        if events is not None and len(over) < self._job.per_node:
            return False
        done = events is not None and not any(event.code for event in over)
        return bool(self._received) or (done and rendezvous is not None and rendezvous.is_closed())

    def _outcome(self, stopped: bool) -> Verdict:
        verdict, error, rendezvous = self._verdict, self._error, self._rendezvous
        if verdict is None or not verdict.final:
            if stopped:
                self._pass_signals()
                return Verdict(INTERRUPTED if self._received[0] == signal.SIGINT else PREEMPTED, True, None, None)
            if isinstance(error, RendezvousError):
                why, needed = self._explain(error), rendezvous is None or rendezvous.needed
                notice(f"{why}.")
                return verdict or Verdict(FAILED if needed else 0, True, why, None)
            if error is not None:
                raise error
        if verdict is not None and verdict.last_words is not None:
            notice(f"{verdict.last_words}.")
        return verdict or Verdict(0, True, None, None)

    def _explain(self, error: RendezvousError) -> str:
        job = self._job
        where = f"{job.master_addr}:{job.master_port or _PORT}"
        if self._rendezvous is not None and not self._rendezvous.needed:
            return "this machine is not needed: the job has as many as it takes"
        if isinstance(error, RendezvousClosedError):
            return f"another machine has ended the job that meets at {where}"
        if isinstance(error, RendezvousTimeoutError):
            return f"fewer than {job.least} machines have come to {where} within {job.join_timeout:.0f} s"
        return f"the connection to the first machine, {where}, is lost"


def run_job(job: Job) -> int:
    """Run a job to its end.

    Returns:
        The exit code: 0; 143 if the workers were told to end and have saved; 130 after Ctrl-C; else that of the worker that
        failed first.

    Raises:
        ConfigurationError: the nodes do not find each other.
    """
    return conduct(job).code


def conduct(job: Job) -> Verdict:
    """Run a job to its end; returns all that is known of the end."""
    if job.most > 1 and job.master_addr is None:
        raise ConfigurationError(
            f"{job.most} machines need a place to meet. Name the first one, on all of them: --master-addr HOST"
        )
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # which does not fill up as a disk does
    with _quiet(), tempfile.TemporaryDirectory(prefix="trainkit-", dir=place, ignore_cleanup_errors=True) as folder:
        run = _Run(job, folder)
        with _signals(run.note):
            return run.verdict()


@contextmanager
def _signals(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Note the signals to this process. Those that are ignored, by nohup or a shell's &, stay so."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGTSTP", "SIGCONT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main}
    before = {number: was for number, was in before.items() if was not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence elastic's log and warnings: what the user should know is said here. Undo what it sets in the environment."""
    log, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before, log.propagate = log.propagate, False
    log.addHandler(silent)
    variables = {
        name: os.environ.get(name) for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE")
    }
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the rendezvous hosts the workers' store itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.propagate = before
        log.removeHandler(silent)
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
