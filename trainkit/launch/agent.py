"""The launcher of a node: `run_job` starts the workers, passes signals on to them and returns their exit code.

Torch elastic runs in a thread. It finds the other nodes, numbers the workers and watches a placeholder for each of them. The
main thread handles signals and starts, watches, ends and restarts the workers.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from trainkit.console import notice
from trainkit.distributed.stores import RESTART_STORE
from trainkit.errors import ConfigurationError
from trainkit.launch import placeholder
from trainkit.launch.environment import LAUNCHER, is_local, set_gloo_interface
from trainkit.launch.private_folder import private_folder
from trainkit.launch.rendezvous import BACKEND, NodesChanged, Rendezvous
from trainkit.launch.workers import FAILED, INTERRUPTED, PREEMPTED, Outcome, Workers, outcome_of

__all__ = ["Job", "run_job", "run_to_end"]

_REPEAT_S = 1.0  # seconds within which a repeated signal counts once: a batch system signals the launcher and its process group
_LEAVE_S = 2.0  # seconds for elastic's thread to end when the job is over
_STEP_S = 0.05  # seconds between two checks of the workers
_PORT = 29500
_LOST = "torch elastic has stopped the processes"
_HANGUP = getattr(signal, "SIGHUP", None)
_STOP_AND_CONTINUE = [getattr(signal, name) for name in ("SIGTSTP", "SIGCONT") if hasattr(signal, name)]


@dataclass(frozen=True)
class Job:
    """What to run, and where.

    Attributes:
        command: the command line of a worker.
        environment: its environment variables; the launcher adds its rank and the other variables of torch elastic.
        per_node: workers on this node.
        least: smallest number of nodes.
        most: largest number of nodes.
        node_rank: rank of this node; `None`: any.
        master_addr: address of the node that hosts the store; required for several nodes.
        master_port: its port; default: 29500, on a single node any free port.
        max_restarts: how many times to restart all workers after a failure.
        launcher: name of the launcher, for messages of the workers.
        grace: seconds that workers have to save and exit after a signal.
        join_timeout: seconds that nodes wait for each other.
        output: gets the local rank, the rank and the process of each worker, with the pipes `stdout` and `stderr`. Default:
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


class _Run:
    """A job on this node."""

    def __init__(self, job: Job) -> None:
        self._job = job
        first = job.master_addr or "", job.master_port or (0 if job.most == 1 else _PORT)
        self._rendezvous = Rendezvous((job.least, job.most), first, job.node_rank, job.join_timeout)
        self._elastic: threading.Thread | None = None
        self._error: Exception | None = None  # The error that elastic has raised.
        self._noted: list[int] = []  # signals that are not handled yet
        self._received: list[int] = []
        self._last = -_REPEAT_S

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals. Only the launcher gets Ctrl-C: the workers have no terminal."""
        self._noted.append(number)

    def run(self, folder: str) -> Outcome:
        """Start the workers until they succeed or must not be restarted. Placeholders share the folder."""
        failures, outcome = 0, None
        while True:
            outcome = self._start(Path(tempfile.mkdtemp(dir=folder))) or self._without_workers(outcome)
            if outcome is None:
                notice("another node has joined, or has failed; restarting all processes.")
                continue
            if self._received and not outcome.final:
                return self._stopped()
            if outcome.final or failures == self._job.max_restarts:
                break
            failures += 1
            notice(f"{outcome.first}; restarting all processes (restart {failures} of {self._job.max_restarts}).")
        if outcome.message is not None:
            notice(f"{outcome.message}.")
        return outcome

    def _without_workers(self, previous: Outcome | None) -> Outcome | None:
        """The outcome if there were no workers or elastic has ended them; `None` if they are to be started again."""
        if self._received:
            return self._stopped()
        if isinstance(self._error, NodesChanged):
            return None
        if isinstance(self._error, RendezvousError):
            notice(f"{self._error}.")
            code = FAILED if self._rendezvous.needed else 0
            return replace(previous or Outcome(code, True, str(self._error), None), final=True, message=None)
        if self._error is not None:
            raise self._error
        return Outcome(FAILED, False, _LOST, _LOST)

    def _stopped(self) -> Outcome:
        return Outcome(INTERRUPTED if self._received[0] == signal.SIGINT else PREEMPTED, True, None, None)

    def close(self) -> None:
        """Disconnect from the other nodes."""
        if self._rendezvous.leave() and self._elastic is not None:
            self._elastic.join(_LEAVE_S)

    def _start(self, folder: Path) -> Outcome | None:
        """Run the workers once; returns `None` if there were none or elastic has ended them."""
        pids = folder / placeholder.WORKERS
        pids.touch()
        self._error = None
        self._elastic = threading.Thread(target=contextvars.copy_context().run, args=(self._run_elastic, folder), daemon=True)
        self._elastic.start()
        workers, outcome = None, None
        try:
            while workers is None and self._elastic.is_alive() and not self._received:
                self._elastic.join(_STEP_S)
                workers = self._start_workers(folder)
                self._handle_signals(workers)
            while workers is not None and not workers.is_over():
                time.sleep(_STEP_S)
                self._handle_signals(workers)
                workers.stopped |= not self._elastic.is_alive()
                workers.check()
        finally:
            if workers is not None:  # whatever was raised, no worker stays behind
                workers.kill_leftovers()
        if workers is not None:
            outcome = self._outcome(workers)
        succeeded = outcome is not None and outcome.code == 0
        pids.rename(folder / placeholder.DONE) if succeeded else pids.unlink()
        while self._elastic.is_alive() and not self._received and not (succeeded and self._rendezvous.is_closed()):
            self._elastic.join(_STEP_S)
            self._handle_signals(None)
        return outcome

    def _run_elastic(self, folder: Path) -> None:
        """Let elastic find the other nodes and number the workers; in a thread, where it ignores signals."""
        job = self._job
        config = LaunchConfig(
            job.least,
            job.most,
            job.per_node,
            logs_specs=DefaultLogsSpecs(os.devnull),
            run_id=BACKEND,
            role=BACKEND,
            rdzv_backend=BACKEND,
            rdzv_configs={"handler": self._rendezvous},
            max_restarts=0,  # restarts begin with another call
        )
        try:
            launch_agent(config, sys.executable, ["-I", "-S", placeholder.__file__, str(folder), str(os.getpid())])
        except ChildFailedError:  # the outcome says more
            pass
        except Exception as error:
            self._error = error

    def _start_workers(self, folder: Path) -> Workers | None:
        """Start the workers, if all placeholders have reported and there was no signal."""
        job = self._job
        files = [folder / placeholder.variables_file(local_rank) for local_rank in range(job.per_node)]
        if not all(file.exists() for file in files):
            return None
        shared = dict(job.environment)
        if job.per_node > 1:  # otherwise each worker would use all cores
            shared.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // job.per_node)))
        if job.most > 1 and job.master_addr is not None and not is_local(job.master_addr):
            set_gloo_interface(shared, job.master_addr)
        variables = {LAUNCHER: job.launcher, RESTART_STORE: self._rendezvous.where}
        variables["TORCHELASTIC_RESTART_COUNT"] = str(self._rendezvous.restarts)
        variables["TORCHELASTIC_MAX_RESTARTS"] = str(job.max_restarts)
        environments = [{**shared, **json.loads(file.read_text()), **variables} for file in files]
        return None if self._noted else Workers(job.command, environments, folder / placeholder.WORKERS, job.grace, job.output)

    def _outcome(self, workers: Workers) -> Outcome | None:
        """The outcome of workers that have ended; `None` if elastic has ended them."""
        ended = [(end.rank, end.code) for end in workers.ended if end.rank not in workers.terminated]
        if workers.stopped and workers.terminated and not any(code for _, code in ended):
            return None
        return outcome_of(ended, [] if workers.stopped else sorted(workers.terminated), self._received, self._job.grace)

    def _handle_signals(self, workers: Workers | None) -> None:
        """Pass the signals of this process on to the workers."""
        while self._noted:
            number, now = self._noted.pop(0), time.monotonic()
            if number in _STOP_AND_CONTINUE:  # Ctrl-Z, and fg
                if workers is not None:
                    workers.signal_all(signal.SIGSTOP if number == signal.SIGTSTP else number)
                if number == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif self._counts(number, now):
                self._received.append(number)
                self._last = now
                if workers is not None:  # Workers take a closed terminal as a stop request.
                    workers.signal(signal.SIGTERM if number == _HANGUP else number)

    def _counts(self, number: int, now: float) -> bool:
        """Whether a signal is a stop request of its own; the second one ends the workers at once."""
        if number == _HANGUP:  # when a terminal closes, the shell and the kernel both send it
            return not self._received
        if self._received == [_HANGUP] and number != signal.SIGINT:  # The system may send SIGTERM too.
            self._received, self._last = [number], now
            return False
        return number == signal.SIGINT or number not in self._received or now - self._last > _REPEAT_S


def run_job(job: Job) -> int:
    """Run a job to its end.

    Returns:
        The exit code: 0; 143 if the workers have saved after a stop request; 130 after Ctrl-C; else that of the worker that
        failed first.

    Raises:
        ConfigurationError: the nodes do not find each other.
    """
    return run_to_end(job).code


def run_to_end(job: Job) -> Outcome:
    """Run a job to its end; returns its outcome."""
    if job.most > 1 and job.master_addr is None:
        raise ConfigurationError(
            f"{job.most} nodes need the address of the first node. Set it on all nodes: --master-addr HOST"
        )
    with _quiet(), private_folder(in_memory=True) as folder:  # In memory, a full disk does not matter.
        run = _Run(job)
        with _signals(run.note):
            try:
                return run.run(folder)
            finally:
                run.close()


@contextmanager
def _signals(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Note the signals to this process, except those that are ignored (nohup, or & in a shell)."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGTSTP", "SIGCONT")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence elastic's log and warnings, because our own messages are enough for users. Restore the environment."""
    log, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before, log.propagate = log.propagate, False
    log.addHandler(silent)
    variables = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE")  # torch sets the second one
    saved = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ[variables[0]] = "1"  # otherwise a node that joins waits for the address of a store
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.propagate = before
        log.removeHandler(silent)
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(saved)


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
