"""`make_verdict`: from the exits of the workers: the exit code of the job, whether to restart, and the message to the user."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FAILED", "INTERRUPTED", "PREEMPTED", "Verdict", "make_verdict"]

FAILED = 1
INTERRUPTED = 130  # the exit code after Ctrl-C
PREEMPTED = 143  # the exit code of a run that received a stop request and has saved
_KILLED = 137
_STOPPED = {-signal.SIGTERM, -getattr(signal, "SIGHUP", signal.SIGTERM)}
_MANY = 8  # ranks that a message names


@dataclass(frozen=True)
class Verdict:
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


def make_verdict(ended: Sequence[tuple[int, int]], killed: Sequence[int], received: Sequence[int], grace: float) -> Verdict:
    """The verdict on workers that have ended.

    Args:
        ended: rank and exit code, negative for a signal, of the workers that ended by themselves, in that order.
        killed: the ranks of the workers that did not end by themselves.
        received: the signals that the launcher got.
        grace: seconds that workers had after a signal.
    """
    failed = [(rank, code) for rank, code in ended if code != 0]
    codes = [code for _, code in failed]
    if not failed and not killed:
        return Verdict(0, True, None, None)
    first = _exit(*failed[0]) if failed else None
    if signal.SIGINT in received[:1] or not {-signal.SIGINT, INTERRUPTED}.isdisjoint(codes):
        return Verdict(INTERRUPTED, True, first, None)
    if received or PREEMPTED in codes:
        return Verdict(_preempted_code(codes, received), True, first, _too_slow(killed, received, grace))
    if _STOPPED.intersection(codes[:1]):  # outside a run, where there is nothing to save
        return Verdict(PREEMPTED, True, first, first)
    message = "; ".join([_exit(rank, code) for rank, code in failed if code < 0][:_MANY])
    return Verdict(_shell_code(codes), False, first, message or None)


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
