"""The agent of a machine: starts the workers, passes signals on, restarts them after a failure, and leaves with their code.

torch elastic is its engine: how the agents of several machines find each other, number the workers, and restart together.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from trainkit.console import notice
from trainkit.distributed.restart_memory import MEMORY
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import LAUNCHER
from trainkit.launch.interface import lead_gloo_out
from trainkit.launch.place import is_local
from trainkit.launch.rendezvous import Alone, Meeting
from trainkit.launch.verdict import INTERRUPTED, PREEMPTED, Verdict, judge
from trainkit.launch.workers import Workers

__all__ = ["Agent", "Job", "conduct", "run_job"]

_FAILED = 1
_PATIENCE = 4.0  # seconds in which the others end by themselves when one has failed: they have things to say
_SHUTDOWN = 5.0  # seconds between SIGTERM and SIGKILL
_ONE = 1.0  # seconds within which SIGTERM twice is once: a batch system tells the agent and all around it
_LOOK = 0.1  # seconds between two looks at the workers
_PORT = 29500


@dataclass(frozen=True)
class Job:
    """What to run, and where.

    Attributes:
        command: the command line of a worker.
        environment: its variables; what it must know of its place is added.
        per_node: workers of this machine.
        least: machines that are needed.
        most: machines that are taken.
        node_rank: the number of this machine; ``None``: any.
        master_addr: of the machine where the agents meet; needed for several machines.
        master_port: there, default 29500; for a single machine the port of its workers, default a free one.
        max_restarts: how often the workers are started anew after a failure.
        launcher: what the workers say has started them.
        grace: seconds that workers have to save and end after a signal.
        join_timeout: seconds that machines wait for each other.
        output: takes what the workers write: it is given the local rank, the rank and the process, as :class:`Workers` has it.
        follows: as of :class:`Workers`.
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
    output: Callable[[int, int, subprocess.Popen[bytes]], None] | None = None
    follows: bool = False


class _Stopped(BaseException):
    """A signal came while there were no workers to pass it on to."""


class _Signals:
    """While the agent runs: signals to it go on to its workers. Ctrl-C comes from the terminal to the agent alone.

    Attributes:
        received: those that came and ask for an end.
        times: when.
        workers: who gets them; ``None``: there are none, and the agent ends at once.
        starting: they are about to be there, and get what comes meanwhile.
        over: everything has ended; what comes now is too late.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.times: list[float] = []
        self.workers: Workers | None = None
        self.starting = self.over = False
        self._kept: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGTSTP", "SIGCONT"):
                number = getattr(signal, name, None)
                before = None if number is None else signal.getsignal(number)
                if number is not None and before is not None and before != signal.SIG_IGN:  # ignored: by nohup, or a shell's &
                    self._before[number] = before
                    signal.signal(number, self._stop_and_go if name in ("SIGTSTP", "SIGCONT") else self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number != signal.SIGINT and number in self.received and now - self.times[-1] < _ONE
        if self.over or again:
            return
        self.received.append(number)
        self.times.append(now)
        if number == getattr(signal, "SIGHUP", 0):  # a terminal that is closed means an end, which workers know as SIGTERM
            number = signal.SIGTERM
        if self.starting:
            self._kept.append(number)
        elif self.workers is None:
            raise _Stopped
        else:
            self.workers.signal(number)

    def started(self, workers: Workers) -> None:
        """The workers are there."""
        self.workers, self.starting = workers, False
        while self._kept:
            workers.signal(self._kept.pop(0))

    def _stop_and_go(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z and ``fg``: the workers have no terminal, so they learn it from here."""
        going = number == signal.SIGCONT
        if self.workers is not None:
            self.workers.freeze(number if going else signal.SIGSTOP)
        if not going:
            os.kill(os.getpid(), signal.SIGSTOP)


class Agent(SimpleElasticAgent):
    """Elastic's agent, with workers that end as trainkit's do.

    Args:
        job: what to run.
        rendezvous: where the agents meet.
        signals: those that come while it runs.

    Attributes:
        verdict: on the workers of the last start.
    """

    def __init__(self, job: Job, rendezvous: Alone | Meeting, signals: _Signals) -> None:
        super().__init__(
            WorkerSpec(
                role="trainkit",
                local_world_size=job.per_node,
                rdzv_handler=rendezvous,
                entrypoint=job.command[0],
                max_restarts=job.max_restarts,
                monitor_interval=_LOOK,
            )
        )
        self.verdict: Verdict | None = None
        self._job, self._meeting, self._signals = job, rendezvous, signals
        self._workers: Workers | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._signals.received:
            raise _Stopped
        environments = [self._environment(worker_group, worker) for worker in worker_group.workers]
        self._signals.starting = True  # from here on a signal does not leave workers behind that nobody knows of
        try:
            self._workers = Workers(
                self._job.command, environments, self._output(worker_group.workers), follows=self._job.follows
            )
            self._signals.started(self._workers)
        finally:
            self._signals.starting = False
        return dict(self._workers.pids)

    def _output(self, workers: list[Any]) -> Callable[[int, subprocess.Popen[bytes]], None] | None:
        take = self._job.output
        if take is None:
            return None
        return lambda local_rank, process: take(local_rank, workers[local_rank].global_rank, process)

    def _environment(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        job, meeting = self._job, self._meeting
        own = {
            "RANK": worker.global_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_RANK": worker.local_rank,
            "LOCAL_WORLD_SIZE": job.per_node,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_RANK": worker.role_rank,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "ROLE_NAME": "trainkit",
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": meeting.restarts,
            "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
            "TORCHELASTIC_RUN_ID": meeting.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": True,
            LAUNCHER: job.launcher,
            MEMORY: meeting.memory,
        }
        shared = dict(job.environment)
        if job.per_node > 1:  # else each takes all cores, and they get into each other's way
            shared.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // job.per_node)))
        if job.most > 1 and job.master_addr is not None and not is_local(job.master_addr):
            lead_gloo_out(shared, job.master_addr)
        return {**shared, **{name: str(value) for name, value in own.items()}}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        workers = self._workers
        assert workers is not None
        workers.look()
        if workers.running and not workers.failed and not self._signals.received:
            return RunResult(state=WorkerState.HEALTHY)
        self.verdict = self._ended(workers, worker_group.workers[0].global_rank)
        if self.verdict.code == 0:
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})
        if self.verdict.final:
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            count = self._job.max_restarts - self._remaining_restarts + 1
            first = self.verdict.first or "the processes were lost"
            notice(f"{first}; all processes are started anew (restart {count} of {self._job.max_restarts}).")
        return RunResult(WorkerState.FAILED)

    def _ended(self, workers: Workers, first_rank: int) -> Verdict:
        """Wait until all have ended, and see to it that they do."""
        started, grace, signals = time.monotonic(), self._job.grace, self._signals
        leaving: list[float] = []  # when it was seen that they leave

        def until() -> float:
            if len(signals.times) > 1:
                return signals.times[1] + _SHUTDOWN
            interrupted = signals.received == [signal.SIGINT]
            if any(one.code == PREEMPTED or interrupted for one in workers.ended):
                leaving.append(time.monotonic())
                return leaving[0] + grace
            if interrupted:  # the user is there, and presses it again if it takes too long
                return math.inf
            return signals.times[0] + grace if signals.times else started + _PATIENCE

        workers.wait(until)
        workers.end(_SHUTDOWN)
        verdict = judge(workers.ended, workers.killed, signals.received, first_rank, grace)
        workers.leave(sweep=bool(verdict.code or signals.received))
        self._workers = signals.workers = None
        return verdict

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **options: Any) -> None:
        """End what runs: nothing after a failure; all of them when another machine has come or gone."""
        if self._workers is not None:
            notice("another machine has joined, or has failed; all processes are started anew.")
        self._end(self._job.grace)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._end(_SHUTDOWN)

    def _end(self, grace: float) -> None:
        if self._workers is not None:
            self._workers.end(grace)
            self._workers.leave(sweep=True)
        self._workers = self._signals.workers = None

    def _exit_barrier(self) -> None:
        self._meeting.wait_for_all()


def run_job(job: Job) -> int:
    """Run a job to its end.

    Returns:
        The exit code: 0; 143 if the workers were told to end and have saved; 130 after Ctrl-C; else that of the worker that
        failed first.

    Raises:
        ConfigurationError: the machines do not find each other.
    """
    return conduct(job).code


def conduct(job: Job) -> Verdict:
    """As :func:`run_job`, with all that is known of the end."""
    with _quietly(), _Signals() as signals:
        try:
            meeting = _meeting(job)
        except _Stopped:
            return _stopped(signals)
        agent = Agent(job, meeting, signals)
        try:
            if agent.run() is None:
                notice("this machine is not needed: the job has as many as it takes.")
        except _Stopped:
            if agent.verdict is None or not agent.verdict.final:
                return _stopped(signals)
        except RendezvousError as error:
            why = _explain(error, job)
            notice(f"{why}.")
            return agent.verdict or Verdict(_FAILED, True, why, None)
        finally:
            signals.over = True
            meeting.shutdown()
    verdict = agent.verdict or Verdict(0, True, None, None)
    if verdict.last_words is not None:
        notice(f"{verdict.last_words}.")
    return verdict


def _stopped(signals: _Signals) -> Verdict:
    """What came of an agent that was told to end while it had no workers."""
    return Verdict(INTERRUPTED if signals.received[0] == signal.SIGINT else PREEMPTED, True, None, None)


def _meeting(job: Job) -> Alone | Meeting:
    if job.most == 1:
        return Alone(uuid.uuid4().hex, job.master_port)
    if job.master_addr is None:
        raise ConfigurationError(
            f"{job.most} machines need a place to meet. Name the first one, on all of them: --master-addr HOST"
        )
    port = job.master_port or _PORT
    return Meeting(
        f"trainkit-{port}",
        job.least,
        job.most,
        job.master_addr,
        port,
        number=job.node_rank,
        patience=job.join_timeout,
    )


def _explain(error: RendezvousError, job: Job) -> str:
    where = f"{job.master_addr}:{job.master_port or _PORT}"
    if isinstance(error, RendezvousClosedError):
        return f"another machine has ended the job that meets at {where}"
    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {job.least} machines have come to {where} within {job.join_timeout:.0f} s"
    return f"the connection to the first machine, {where}, is lost"


def _cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep elastic's log to itself: what the user should know is said here."""
    log, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before = log.propagate
    log.propagate = False
    log.addHandler(silent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.propagate = before
        log.removeHandler(silent)
