"""`SafePoints`: how a fit saves, stops and obeys signals: request, agree over all ranks, carry out.

A safe point is the end of an optimizer step, when its logging, validation and schedulers are done.

1. *Request.* Hooks ask for a save with `request` and `every_n_steps`, timers with
   `every`, users for a stop with `trainer.should_stop`, the system for the end with a signal.
2. *Agree.* Over several ranks the *step flags* tell the ranks of each other's requests, and of what fits into memory: one
   small vector for each optimizer step, reduced by its largest values. It is sent at the end of step n and read at the end
   of step n + 1, so that no rank waits for it. At the end of a validation or an epoch it is sent and read immediately. More
   than 64 ranks send it in every k-th step of an epoch only, where k depends on nothing but their number: see
   `step_interval`.
3. *Carry out.* `carry_out` does what has been requested, on all ranks after the same step.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainkit.console import notice, prints_here, quantity, warn
from trainkit.data.loader_workers import HANDLED
from trainkit.distributed.failure_handling import write_stderr
from trainkit.distributed.world import RING_RANKS
from trainkit.errors import ConfigurationError, Preempted
from trainkit.trainer.progress import Stop

if TYPE_CHECKING:
    from trainkit.distributed.world import Pending
    from trainkit.trainer.run import Run

__all__ = ["SafePoints", "Signals", "agree_on_parts", "requeue", "step_interval"]


_HANGUP = getattr(signal, "SIGHUP", None)
_GRACE_SECONDS = 0.05  # seconds in which the signal that ended a worker reaches this process too
_FORWARD_SECONDS = 1.0  # seconds within which a launcher may forward a signal that this process has received already


class Signals:
    """Within it signals are only recorded; the loop checks `received` when a step is complete.

    Handlers can be set in the main thread only; in other threads nothing is changed. The handlers from before are called too,
    and are restored at the end. A second signal to this process ends it immediately. A signal that came to another process is
    not counted as the first: a batch system may not reach all processes at the same time. Nor is a signal counted twice if a
    launcher forwards it to a process that has already received it. SIGHUP never counts as the first or the second: when a
    terminal closes, the shell and the kernel both send it, and the system may send SIGTERM too.

    Args:
        notify: called when a signal comes, so that the loop checks.

    Attributes:
        received: the number of the signal that came to this process or, once the ranks have agreed, to another one.
        working: the loop runs. Before that there is no step to finish, and a signal ends the fit immediately.
        twice: Ctrl-C was pressed twice: nothing more is saved.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.received: int | None = None
        self.working = False
        self.twice = False
        self._notify = notify
        self._process = os.getpid()
        self._first: tuple[int, float] | None = None  # number and time of the first one that came to this process
        self._hung_up = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                before = signal.getsignal(number)
                if number == _HANGUP and before == signal.SIG_IGN:  # nohup ignores it: the run outlives its terminal.
                    continue
                if before is not None:  # None: set by a program that Python is embedded in
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def ignore_worker_exits(self) -> None:
        """Keep the exit of DataLoader workers, which the same signal may end, from raising in the middle of a step.

        A signal to the whole process group ends the workers as well, and torch then raises from its handler of SIGCHLD,
        wherever the main process is at that moment. Call this after workers may have been started, which is when torch sets
        that handler. Batches that are missing then raise where the loop waits for them.
        """
        number = getattr(signal, "SIGCHLD", None)
        before = None if number is None else signal.getsignal(number)
        if number is None or not self._before or number in self._before or not callable(before):
            return

        def on_worker_exit(received: int, frame: FrameType | None) -> None:
            try:
                before(received, frame)
            except RuntimeError:
                if not self.wait_for_signal():
                    raise

        self._before[number] = before
        signal.signal(number, on_worker_exit)

    def wait_for_signal(self) -> bool:
        """Whether a signal has come or comes within a moment: workers may receive one before this process does."""
        if self.received is None:
            threading.Event().wait(_GRACE_SECONDS)
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._process:
            _handle_in_child(number, frame, before)
            return
        if number == _HANGUP:
            if self._hung_up or self._first is not None:
                return
            self._hung_up = True
        elif self._first is not None:
            if not self._is_forwarded(number):
                self._end_now(number)
            return
        else:
            self._first = number, time.monotonic()
        if self.received is None:
            self.received = number
            self._notify()
        if number == signal.SIGINT and self.working and prints_here():
            # not through logging or print: the signal may have come in the middle of one
            write_stderr("\ntrainkit: Ctrl-C: finishing the step and saving. Press it again to exit immediately.\n")
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if not self.working:
            raise self.ending("before the first step")

    def _is_forwarded(self, number: int) -> bool:
        """Whether a repeated signal is the first one, forwarded by a launcher that has received it too."""
        assert self._first is not None
        first, when = self._first
        return (
            number == first != signal.SIGINT
            and time.monotonic() < when + _FORWARD_SECONDS
            and "TORCHELASTIC_RUN_ID" in os.environ
        )

    def _end_now(self, number: int) -> None:
        if number == signal.SIGINT:
            self.twice = True
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def ending(self, when: str) -> BaseException:
        """The exception that ends the fit for the signal that came."""
        if self.received == signal.SIGINT:
            return KeyboardInterrupt()
        name = signal.Signals(self.received or signal.SIGTERM).name
        return Preempted(f"{name} {when}")


def _handle_in_child(number: int, frame: FrameType | None, before: Any) -> None:
    """In a process that was forked during the fit and has inherited the handler, handle a signal as before the fit."""
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def requeue() -> None:
    """Ask SLURM to run this job again, and print its answer."""
    job = os.environ.get("SLURM_JOB_ID")
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job is None:
        notice("slurm_requeue=True, but this is not a SLURM job (SLURM_JOB_ID is not set): nothing is requeued.")
        return
    name = f"{array}_{task}" if array and task else job
    try:
        done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        warn(f"scontrol could not ask SLURM to requeue job {name}: {error}. Do it by hand: scontrol requeue {name}")
        return
    if done.returncode:
        warn(f"SLURM refused to requeue job {name}: {done.stderr.strip() or done.stdout.strip()}")
    else:
        notice(f"SLURM will run job {name} again.")


_NO_SCHEMA = _NO_LIMIT = -(1 << 63)
_SAVE_FAILED, _SAVED = 0, 62  # bits of the step flags; bit n between them: timer n is due


def _negative(limit: int | None) -> int:
    """A limit, so that the largest value over all ranks is that of the smallest limit."""
    return _NO_LIMIT if limit is None else -limit


def agree_on_parts(run: Run) -> None:
    """Let parts of micro-batches have the same limit on all ranks from now on. Collective, for a checkpoint."""
    (limit,) = run.strategy.world.largest([_negative(run.progress.largest_part)])
    if limit != _NO_LIMIT:
        run.progress.limit_parts(-limit)


def step_interval(ranks: int) -> int:
    """The number of steps from one exchange of the step flags to the next: 1 up to 64 ranks, 2 up to 128, 5 at 1,024.

    The hops of an exchange that are left when it is read take about log2(ranks) times 30 µs, in which every rank waits.
    """
    return max(1, (ranks - 1).bit_length() - RING_RANKS.bit_length() + 2)


class SafePoints:
    """The requests of one fit.

    With several processes, all call the same methods at the same points, also in hooks. Timers run in the main process.

    Args:
        run: the fit.
        report_failures: called at a safe point; raises or warns about saves that failed in the writer's thread. With `True` it
            waits for the save in flight first, because that has failed on another rank.
        report_saved: called at each safe point; tells the loggers of the checkpoints that are complete.
    """

    def __init__(self, run: Run, report_failures: Callable[[bool], None], report_saved: Callable[[], None]) -> None:
        self._run = run
        self._report_failures = report_failures
        self._report_saved = report_saved
        self._world = run.strategy.world
        self._distributed = run.distributed
        self._interval = step_interval(self._world.size)
        self.step_acts: list[Callable[[], None]] = []  # The loop calls them, see `after_each_step`.
        self._requests: deque[Callable[[], None]] = deque()
        self._by_steps: list[tuple[int, Callable[[], None]]] = []
        self._by_time: list[tuple[timedelta, Callable[[], None]]] = []
        self._timers: dict[int, threading.Timer] = {}
        self._alerts: deque[int] = deque()  # bits of the step flags; other threads append to it
        self._pending: Pending | None = None  # the step flags that were sent last
        self._bits = 0  # alerts that all ranks know of
        self._signal: int | None = None  # that all ranks know of

    # -------------------------------------------------------------------------------------------------------- request

    def request(self, act: Callable[[], None]) -> None:
        """Call `act` at the next safe point; from any hook. From another thread with one process only."""
        self._requests.append(act)
        self._run.progress.safe_point_due = True

    def every_n_steps(self, n: int, act: Callable[[], None]) -> None:
        """Call `act` at the safe point after every n-th optimizer step."""
        self._by_steps.append((n, act))
        self._run.progress.next_save_step = 0  # computed at the first safe point

    def after_each_step(self, act: Callable[[], None]) -> None:
        """Call `act` on all ranks after each optimizer step, before the step is logged and validated."""
        self.step_acts.append(act)

    def stop_now(self) -> None:
        """End training with the current step; called on all ranks in the same step, before it is validated."""
        progress = self._run.progress
        progress.should_stop = True
        if self._run.due.may_stop:
            progress.begin_stopping()

    def every(self, interval: timedelta, act: Callable[[], None]) -> None:
        """Call `act` at the first safe point after each interval; if that is 0, after every optimizer step."""
        if not interval:
            self.every_n_steps(1, act)
            return
        self._by_time.append((interval, act))
        self._start_timer(len(self._by_time))

    def save_failed(self) -> None:
        """A save has failed in the writer's thread, which calls this."""
        self._alert(_SAVE_FAILED)

    def note_save(self) -> None:
        """A checkpoint is complete that the loggers want to know of; called in the writer's thread of the main process."""
        self._alert(_SAVED)

    def _start_timer(self, number: int) -> None:
        if self._world.is_main:
            timer = threading.Timer(self._by_time[number - 1][0].total_seconds(), self._alert, [number])
            timer.daemon = True
            self._timers[number] = timer
            timer.start()

    def _alert(self, bit: int) -> None:
        self._alerts.append(bit)
        self._run.request_safe_point()

    def _take_alerts(self) -> int:
        """The alerts of other threads since the last call, as bits."""
        bits = 0
        while self._alerts:
            bits |= 1 << self._alerts.popleft()
        return bits

    # ---------------------------------------------------------------------------------------------------------- agree

    def agree(self) -> None:
        """At the end of a step: act on the flags of the step before, send this step's.

        Raises:
            ConfigurationError: a rank has skipped an optimizer step, and another has not.
            MetricError: the ranks have logged different names.
        """
        distributed, progress = self._distributed, self._run.progress
        if distributed:
            self._read_flags()
            if self._sends():
                self._send_flags()
        if progress.stop is Stop.REQUESTED and self._run.due.may_stop:  # requested in the step before
            progress.begin_stopping()
        if not distributed and (progress.should_stop or progress.stop is Stop.REQUESTED):
            progress.agree_on_stop(progress.should_stop)

    def agree_now(self) -> None:
        """At the end of a validation or an epoch: a stop that any rank requests counts on all ranks from now on.

        Raises:
            ConfigurationError, MetricError: as `agree`.
        """
        if self._distributed:
            self._read_flags()
            self._send_flags()
            self._read_flags()
            if self._run.progress.stop is not Stop.RUNNING:
                self._run.progress.should_stop = True

    def _sends(self) -> bool:
        """Whether flags are sent in this step. Only the position in the epoch counts, so that a resumed run does the same."""
        if self._interval == 1:
            return True
        windows = -(-(self._run.progress.batch_idx + 1) // self._run.accumulation)
        return windows % self._interval == 0

    def _send_flags(self) -> None:
        run = self._run
        schema = run.train_metrics.schema
        self._pending = self._world.begin_largest(
            [
                run.progress.should_stop,
                run.signals.received or 0,
                self._take_alerts() if self._world.is_main else 0,
                schema or _NO_SCHEMA,
                -schema or _NO_SCHEMA,
                run.accelerator.updates,
                -run.accelerator.updates,
                _negative(run.progress.largest_part),
            ]
        )

    def _read_flags(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        run = self._run
        stop, signal, bits, schema, negated, most, least, limit = pending.wait()
        run.progress.agree_on_stop(bool(stop))
        if signal:
            self._signal = run.signals.received = signal  # All ranks have the same signal, whichever came to this one.
        self._bits |= bits
        if signal or bits:
            run.progress.safe_point_due = True
        if most != -least:
            raise ConfigurationError(
                f"one process has made {quantity(most, 'optimizer step')}, and another one {-least}, so their parameters "
                "differ. Call skip_update() on all processes or on none: decide by the step, or by a value that is the same on "
                "all."
            )
        if limit != _NO_LIMIT:
            run.progress.limit_parts(-limit)
        if schema not in (_NO_SCHEMA, -negated):
            run.train_metrics.check_schema(run.strategy.world)

    # ------------------------------------------------------------------------------------------------------ carry out

    def carry_out(self) -> None:
        """Report failed saves, do what has been requested and is due, obey a signal.

        Raises:
            CheckpointWriteError: three saves in a row have failed.
            Preempted, KeyboardInterrupt: a signal.
        """
        run, step = self._run, self._run.progress.global_step
        run.progress.safe_point_due = False  # first, so that a request from now on is carried out next time
        run.signals.ignore_worker_exits()
        if self._distributed:
            bits, self._bits = self._bits, 0
            if bits >> _SAVE_FAILED & 1:
                self._report_failures(True)
        else:
            bits = self._take_alerts()
            self._report_failures(False)
        self._report_saved()
        due = [self._requests.popleft() for _ in range(len(self._requests))]
        if self._by_steps and step >= run.progress.next_save_step:
            if step > run.progress.first_step:
                due += [act for n, act in self._by_steps if step % n == 0]
            run.progress.next_save_step = min((step // n + 1) * n for n, _ in self._by_steps)
        fired = [number for number in range(1, len(self._by_time) + 1) if bits >> number & 1]
        for act in due + [self._by_time[number - 1][1] for number in fired]:
            act()
        for number in fired:
            self._start_timer(number)
        self.obey_signal()

    def obey_signal(self) -> None:
        """End the fit if a signal has come, to any rank.

        Raises:
            Preempted, KeyboardInterrupt: it has.
        """
        run = self._run
        if (self._signal if self._distributed else run.signals.received) is not None:
            raise run.signals.ending(f"at step {run.progress.global_step}")

    def close(self) -> None:
        """End the timers' threads and forget all requests."""
        for timer in self._timers.values():
            timer.cancel()
        for timer in self._timers.values():
            timer.join()  # its thread would otherwise be alive for a moment after the run
        self.step_acts = []
        self._by_steps = []
        self._by_time = []
        self._timers = {}
        self._requests.clear()
        self._alerts.clear()
        self._run.progress.next_save_step = math.inf
