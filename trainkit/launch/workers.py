"""`Workers`: the worker processes of one start on this node; `outcome_of`: how they ended, and what follows for the job."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.console import notice
from trainkit.errors import ConfigurationError

__all__ = ["FAILED", "INTERRUPTED", "PREEMPTED", "End", "Outcome", "Workers", "deadline", "end_with_parent", "outcome_of"]

_PREEMPTED = 143
_FAILURE_TIMEOUT_S = 4.0  # seconds for the other workers to end by themselves after a failure and print their own errors
_SHUTDOWN_S = 5.0  # seconds after a second signal, and between SIGTERM and SIGKILL
_SWEEP_S = 0.5  # seconds for killed processes to disappear
_POSIX = os.name == "posix"
_KILL = signal.SIGKILL if _POSIX else signal.SIGTERM
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PR_SET_PDEATHSIG = 1

FAILED = 1
INTERRUPTED = 130  # the exit code after Ctrl-C
PREEMPTED = 143  # the exit code of a run that received a stop request and has saved
_KILLED = 137
_STOPPED = {-signal.SIGTERM, -getattr(signal, "SIGHUP", signal.SIGTERM)}
_MANY = 8  # ranks that a message names


class End(NamedTuple):
    """A worker has exited: its rank, its exit code (negative for a signal), and when on the monotonic clock."""

    rank: int
    code: int
    when: float


def deadline(signals: Sequence[tuple[int, float]], ended: Sequence[End], grace: float) -> float:
    """The time on the monotonic clock until which workers may end by themselves.

    Args:
        signals: sent to the workers: the number and the time.
        ended: the workers that have exited.
        grace: seconds after a signal, or after the first worker has saved and exited.
    """
    if len(signals) > 1:
        return signals[1][1] + _SHUTDOWN_S
    interrupted = [number for number, _ in signals] == [signal.SIGINT]
    leaving = [end.when for end in ended if interrupted or end.code == _PREEMPTED]
    if leaving:
        return leaving[0] + grace
    if signals:  # After Ctrl-C there is no limit: the user can press it again.
        return math.inf if interrupted else signals[0][1] + grace
    return min((end.when + _FAILURE_TIMEOUT_S for end in ended if end.code), default=math.inf)


class Workers:
    """The worker processes of one start. Creating this object starts them, each in its own session.

    Args:
        command: the command line of each worker.
        environments: their environment variables, by local rank.
        pids: the file that gets their process IDs.
        grace: seconds to save and exit after a signal.
        output: gets the local rank, the rank and the process of each worker, with the pipes `stdout` and `stderr`.

    Attributes:
        ended: the workers that have exited, in that order.
        terminated: the ranks of workers that did not end in time.
        stopped: elastic has requested the end; `terminated` workers have not failed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        pids: Path,
        grace: float,
        output: Callable[[int, int, Any], None] | None = None,
    ) -> None:
        self.ended: list[End] = []
        self.terminated: set[int] = set()
        self.stopped = False
        self._grace = grace
        self._ranks = [int(environment["RANK"]) for environment in environments]
        self._signals: list[tuple[int, float]] = []
        self._kill_at: float | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        pipe = None if output is None else subprocess.PIPE
        options: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "start_new_session": True}
        if _POSIX:
            options["preexec_fn"] = _before_exec
        try:
            for local_rank, rank in enumerate(self._ranks):
                try:
                    process = subprocess.Popen(command, env=environments[local_rank], **options)
                except OSError as error:
                    notice(f"cannot start rank {rank}: {error}.")
                    self.ended.append(End(rank, 1, time.monotonic()))
                    continue
                self._processes[rank] = process
                threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()
                _append(pids, process.pid)
                if output is not None:
                    output(local_rank, rank, process)
        except BaseException:
            self.kill_leftovers()
            raise

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self.ended.append(End(rank, code, time.monotonic()))

    def is_over(self) -> bool:
        """Whether all workers have exited."""
        return len(self.ended) == len(self._ranks)

    def signal(self, number: int) -> None:
        """Send a signal to the workers, which must then end."""
        self._signals.append((number, time.monotonic()))
        self._send(number)

    def signal_all(self, number: int) -> bool:
        """Send a signal to the workers and all processes that they have started; returns whether there were any."""
        return sum(self._signal_group(process, number) for process in self._processes.values()) > 0

    def check(self) -> None:
        """End the workers whose time is up."""
        now = time.monotonic()
        if self._kill_at is None:
            if self.stopped or now > deadline(self._signals, self.ended, self._grace):
                self.terminated = set(self._ranks).difference(end.rank for end in self.ended)
                self._kill_at = now + (self._grace if self.stopped else _SHUTDOWN_S)
                self._send(signal.SIGTERM)
        elif now > self._kill_at:
            self.signal_all(_KILL)

    def kill_leftovers(self) -> None:
        """Kill the processes that run or that the workers have left behind, unless all have ended and all went well."""
        if self.is_over() and not self._signals and not self.terminated and not any(end.code for end in self.ended):
            return
        last = time.monotonic() + _SWEEP_S
        self.signal_all(_KILL)
        while self.signal_all(0) and time.monotonic() < last:
            time.sleep(0.01)

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    @staticmethod
    def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
        try:
            os.killpg(process.pid, number) if _POSIX else process.send_signal(number)
        except (ProcessLookupError, PermissionError):
            return False
        return _POSIX


def _append(pids: Path, pid: int) -> None:
    try:
        with pids.open("a") as file:
            file.write(f"{pid}\n")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {str(pids)!r}: {error.strerror}. Free some space there; in a container: docker run --shm-size=1g"
        ) from error


def end_with_parent() -> None:
    """Called in a new process before exec: on Linux the kernel kills it when the thread that started it ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _before_exec() -> None:
    """Let the kernel end a worker whose launcher is killed, and give it the default signals, also under nohup."""
    end_with_parent()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


# ------------------------------------------------------------------------------------------------------------ how they ended


@dataclass(frozen=True)
class Outcome:
    """How the workers ended, and what follows for the job.

    Attributes:
        code: the exit code.
        final: whether the workers must not be restarted.
        first: the first failure, if there was one.
        message: for the user at the end: about killed processes, which have not printed a traceback.
    """

    code: int
    final: bool
    first: str | None
    message: str | None


def outcome_of(ended: Sequence[tuple[int, int]], killed: Sequence[int], received: Sequence[int], grace: float) -> Outcome:
    """The outcome of workers that have ended.

    Args:
        ended: rank and exit code, negative for a signal, of the workers that ended by themselves, in that order.
        killed: the ranks of the workers that did not end by themselves.
        received: the signals that the launcher got.
        grace: seconds that workers had after a signal.
    """
    failed = [(rank, code) for rank, code in ended if code != 0]
    codes = [code for _, code in failed]
    if not failed and not killed:
        return Outcome(0, True, None, None)
    first = _exit(*failed[0]) if failed else None
    if signal.SIGINT in received[:1] or not {-signal.SIGINT, INTERRUPTED}.isdisjoint(codes):
        return Outcome(INTERRUPTED, True, first, None)
    if received or PREEMPTED in codes:
        return Outcome(_preempted_code(codes, received), True, first, _too_slow(killed, received, grace))
    if _STOPPED.intersection(codes[:1]):  # outside a run, where there is nothing to save
        return Outcome(PREEMPTED, True, first, first)
    message = "; ".join([_exit(rank, code) for rank, code in failed if code < 0][:_MANY])
    return Outcome(_shell_code(codes), False, first, message or None)


def _preempted_code(codes: Sequence[int], received: Sequence[int]) -> int:
    passed_on = {-signal.SIGTERM, *(-number for number in received)}
    return PREEMPTED if PREEMPTED in codes else _shell_code([code for code in codes if code not in passed_on] or codes)


def _shell_code(codes: Sequence[int]) -> int:
    """The first code as a shell reports it: 128 + the signal."""
    return _KILLED if not codes else codes[0] if codes[0] >= 0 else 128 - codes[0]


def _too_slow(killed: Sequence[int], received: Sequence[int], grace: float) -> str | None:
    if not killed:
        return None
    ranks = ", ".join(map(str, killed[:_MANY]))
    after = f"after {_signal_name(received[0])}" if received else "after the other ranks"
    noun, were = ("ranks", "were") if len(killed) > 1 else ("rank", "was")
    return f"{noun} {ranks} did not end within {grace:.0f} s {after}, and {were} killed"


def _exit(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    why = " (possibly out of memory)" if -code == getattr(signal, "SIGKILL", 0) else ""
    return f"rank {rank} was ended by {_signal_name(-code)}{why}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
