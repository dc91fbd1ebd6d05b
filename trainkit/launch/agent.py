"""The launcher of a node: ``run_job`` starts the workers, passes signals on to them and returns their exit code.

Torch elastic runs in a thread: it finds the other nodes, numbers the workers and decides on restarts, watching a guard for each
worker. The main thread handles signals and starts, watches and ends the workers.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from trainkit.console import notice
from trainkit.distributed.restart_store import RESTART_STORE
from trainkit.errors import ConfigurationError
from trainkit.launch import guard
from trainkit.launch.environment import LAUNCHER
from trainkit.launch.interface import lead_gloo_out
from trainkit.launch.place import is_local
from trainkit.launch.rendezvous import BACKEND, Rendezvous
from trainkit.launch.verdict import FAILED, INTERRUPTED, PREEMPTED, Verdict, judge
from trainkit.launch.workers import Limits, Workers

__all__ = ["Job", "conduct", "run_job"]

_PATIENCE = 4.0  # seconds in which the other workers may end by themselves after a failure: they print their own errors
_SHUTDOWN = 5.0  # seconds between SIGTERM and SIGKILL
_REPEAT = 1.0  # seconds within which a repeated signal counts once: a batch system signals the launcher and its process group
_LEAVE = 2.0  # seconds for elastic's thread to end when the job is over
_STEP = 0.05  # seconds between two looks at the workers
_PORT = 29500
_STOP_AND_CONTINUE = [getattr(signal, name) for name in ("SIGTSTP", "SIGCONT") if hasattr(signal, name)]


@dataclass(frozen=True)
class Job:
    """What to run, and where.

    Attributes:
        command: the command line of a worker.
        environment: its environment variables; the launcher adds its rank and so on.
        per_node: workers on this node.
        least: smallest number of nodes.
        most: largest number of nodes.
        node_rank: rank of this node; ``None``: any.
        master_addr: address of the node that hosts the store; required for several nodes.
        master_port: its port; default: 29500, on a single node any free port.
        max_restarts: how many times to restart all workers after a failure.
        launcher: name of the launcher, for messages of the workers.
        grace: seconds that workers have to save and exit after a signal.
        join_timeout: seconds that nodes wait for each other.
        output: gets the local rank, the rank and the process of each worker, with the pipes ``stdout`` and ``stderr``. Default:
            workers inherit the streams of this process.
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
    """Elastic must not start the workers again."""


class _Run:
    """A job on this node, with a folder that the launcher and its guards share."""

    def __init__(self, job: Job, folder: str) -> None:
        self._job, self._folder = job, Path(folder)
        self._rendezvous: Rendezvous | None = None
        self._lock = threading.Lock()  # to start workers, and for elastic to begin another start
        self._workers: Workers | None = None
        self._verdict: Verdict | None = None  # on the previous workers
        self._error: Exception | None = None  # of elastic
        self._failures = 0
        self._noted: list[int] = []  # signals that are not handled yet
        self._received: list[int] = []
        self._last = -_REPEAT

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals. Only the launcher gets Ctrl-C: the workers have no terminal."""
        self._noted.append(number)

    def verdict(self) -> Verdict:
        """Run the job."""
        elastic = threading.Thread(target=contextvars.copy_context().run, args=(self._run_elastic,), daemon=True)
        elastic.start()
        while self._workers is not None or (elastic.is_alive() and not self._is_over()):
            elastic.join(_STEP) if elastic.is_alive() else time.sleep(_STEP)
            self._handle_signals()
            if self._workers is not None:
                self._workers.stopped |= not elastic.is_alive()
                self._watch(self._workers)
            elif elastic.is_alive() and not self._received:
                self._start_workers()
        if elastic.is_alive() and self._rendezvous is not None:
            self._rendezvous.shutdown()
            elastic.join(_LEAVE)
        return self._outcome()

    # ------------------------------------------------------------------------------------------ in elastic's thread

    def _run_elastic(self) -> None:
        job = self._job
        config = LaunchConfig(
            job.least,
            job.most,
            job.per_node,
            logs_specs=DefaultLogsSpecs(os.devnull),
            run_id=BACKEND,
            role=BACKEND,
            rdzv_backend=BACKEND,
            rdzv_configs={"make": self._make_rendezvous},
            max_restarts=job.max_restarts,
        )
        try:
            launch_agent(config, sys.executable, ["-I", "-S", guard.__file__, str(self._folder), str(os.getpid())])
        except ChildFailedError:  # the verdict says more
            pass
        except Exception as error:
            self._error = error

    def _make_rendezvous(self) -> Rendezvous:
        job = self._job
        first = job.master_addr or "", job.master_port or (0 if job.most == 1 else _PORT)
        self._rendezvous = Rendezvous((job.least, job.most), first, job.node_rank, job.join_timeout, self._before_start)
        return self._rendezvous

    def _before_start(self) -> None:
        """Wait until the previous workers have ended, and refuse another start after a stop request."""
        while not self._make_way():
            time.sleep(_STEP)
        verdict = self._verdict
        if self._received or (verdict is not None and verdict.final):
            raise _Stopped
        if verdict is not None:
            self._failures += 1
            notice(f"{verdict.first}; restarting all processes (restart {self._failures} of {self._job.max_restarts}).")
        elif self._rendezvous is not None and self._rendezvous.restarts >= 0:
            notice("another node has joined, or has failed; restarting all processes.")

    def _make_way(self) -> bool:
        """Prepare the folder for new guards if there are no workers, else stop them."""
        with self._lock:
            if self._workers is not None:
                self._workers.stopped = True
                return False
            for file in self._folder.glob("*"):
                file.unlink()
            (self._folder / guard.WORKERS).touch()
            return True

    # ------------------------------------------------------------------------------------------ in the main thread

    def _start_workers(self) -> None:
        """Start the workers as soon as all guards have reported."""
        job, rendezvous = self._job, self._rendezvous
        files = [self._folder / guard.place_file(local_rank) for local_rank in range(job.per_node)]
        with self._lock, contextlib.suppress(FileNotFoundError):
            places = [json.loads(file.read_text()) for file in files]
            assert rendezvous is not None
            shared = dict(job.environment)
            if job.per_node > 1:  # else each worker would use all cores
                shared.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // job.per_node)))
            if job.most > 1 and job.master_addr is not None and not is_local(job.master_addr):
                lead_gloo_out(shared, job.master_addr)
            own = {"TORCHELASTIC_RESTART_COUNT": str(rendezvous.restarts), LAUNCHER: job.launcher}
            own[RESTART_STORE] = rendezvous.where
            if self._noted:
                return
            for file in files:
                file.unlink()
            environments = [{**shared, **place, **own} for place in places]
            limits = Limits(job.grace, _PATIENCE, _SHUTDOWN)
            self._workers = Workers(job.command, environments, str(self._folder / guard.WORKERS), limits, job.output)

    def _watch(self, workers: Workers) -> None:
        """End workers in time; when all have ended, let the guards exit."""
        workers.check()
        if not workers.is_over():
            return
        workers.sweep()
        self._verdict = self._judge(workers)
        file = self._folder / guard.WORKERS
        if workers.failed():
            file.unlink(missing_ok=True)
        else:
            file.rename(file.with_name(guard.DONE))
        self._workers = None

    def _judge(self, workers: Workers) -> Verdict | None:
        """The verdict on workers that have ended; ``None`` if elastic has ended them."""
        ended = [(end.rank, end.code) for end in workers.ended if end.rank not in workers.terminated]
        if workers.stopped and workers.terminated and not any(code for _, code in ended):
            return None
        return judge(ended, [] if workers.stopped else sorted(workers.terminated), self._received, self._job.grace)

    def _handle_signals(self) -> None:
        """Pass the signals of this process on to the workers."""
        workers = self._workers
        while self._noted:
            number, now = self._noted.pop(0), time.monotonic()
            if number in _STOP_AND_CONTINUE:  # Ctrl-Z, and fg
                if workers is not None:
                    workers.signal_all(signal.SIGSTOP if number == signal.SIGTSTP else number)
                if number == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGINT or number not in self._received or now - self._last > _REPEAT:
                self._received.append(number)
                self._last = now
                if workers is not None:  # to which a closed terminal is a request to end
                    workers.signal(signal.SIGTERM if number == getattr(signal, "SIGHUP", 0) else number)

    def _is_over(self) -> bool:
        """Whether to leave although elastic still waits for other nodes."""
        done = self._verdict is not None and self._verdict.code == 0
        return bool(self._received) or (done and self._rendezvous is not None and self._rendezvous.is_closed())

    def _outcome(self) -> Verdict:
        verdict, error = self._verdict, self._error
        if verdict is None or not verdict.final:
            if self._received:
                return Verdict(INTERRUPTED if self._received[0] == signal.SIGINT else PREEMPTED, True, None, None)
            if isinstance(error, RendezvousError):
                why, needed = self._explain(error), self._rendezvous is None or self._rendezvous.needed
                notice(f"{why}.")
                return verdict or Verdict(FAILED if needed else 0, True, why, None)
            if error is not None:
                raise error
        verdict = verdict or Verdict(FAILED, True, None, "torch elastic has stopped the processes")
        if verdict.message is not None:
            notice(f"{verdict.message}.")
        return verdict

    def _explain(self, error: RendezvousError) -> str:
        job = self._job
        where = f"{job.master_addr}:{job.master_port or _PORT}"
        if self._rendezvous is not None and not self._rendezvous.needed:
            return "this node is not needed: the job has as many as it takes"
        if isinstance(error, RendezvousClosedError):
            return f"another node has ended the job that meets at {where}"
        if isinstance(error, RendezvousTimeoutError):
            return f"fewer than {job.least} nodes have come to {where} within {job.join_timeout:.0f} s"
        return f"the connection to the first node, {where}, is lost"


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
