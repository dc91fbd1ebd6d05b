"""``judge``: what the ends of the workers come to: their exit code, whether to restart them, and what to tell the user."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FAILED", "INTERRUPTED", "PREEMPTED", "Verdict", "judge"]

FAILED = 1
INTERRUPTED = 130  # the exit code after Ctrl-C
PREEMPTED = 143  # the exit code of a run that was told to end and has saved
_KILLED = 137
_MANY = 8  # ranks that a message names


@dataclass(frozen=True)
class Verdict:
    """What came of the workers.

    Attributes:
        code: the exit code.
        final: they were told to end: they are not restarted.
        first: what happened first, if something went wrong.
        last_words: what the user should read at the end. A traceback speaks for itself; a process that is killed says nothing.
    """

    code: int
    final: bool
    first: str | None
    last_words: str | None


def judge(
    ended: Sequence[tuple[int, int]], killed: Sequence[int], received: Sequence[int], first_rank: int, grace: float
) -> Verdict:
    """What came of the workers.

    Args:
        ended: those that ended by themselves, in that order: local rank and exit code, negative for the signal.
        killed: the local ranks of those that had to be ended.
        received: the signals that the launcher got.
        first_rank: the rank of the first worker of the node.
        grace: the seconds that they were given after a signal.
    """
    failed = [(local_rank, code) for local_rank, code in ended if code != 0]
    codes = [code for _, code in failed]
    if not failed and not killed:
        return Verdict(0, True, None, None)
    first = _end(failed[0], first_rank) if failed else None
    if signal.SIGINT in received[:1] or not {-signal.SIGINT, INTERRUPTED}.isdisjoint(codes):
        return Verdict(INTERRUPTED, True, first, None)
    if received or PREEMPTED in codes:
        return Verdict(_preempted(codes, received), True, first, _too_slow(killed, received, first_rank, grace))
    if codes and codes[0] == -signal.SIGTERM:  # outside a run, where there is nothing to save
        return Verdict(PREEMPTED, True, first, first)
    words = "; ".join([_end(one, first_rank) for one in failed if one[1] < 0][:_MANY])
    return Verdict(_exit_code(codes), False, first, words or None)


def _preempted(codes: Sequence[int], received: Sequence[int]) -> int:
    passed_on = {-signal.SIGTERM} | {-number for number in received}
    return PREEMPTED if PREEMPTED in codes else _exit_code([code for code in codes if code not in passed_on] or codes)


def _exit_code(codes: Sequence[int]) -> int:
    """The first code as a shell gives it: 128 + the signal."""
    return _KILLED if not codes else codes[0] if codes[0] >= 0 else 128 - codes[0]


def _too_slow(killed: Sequence[int], received: Sequence[int], first_rank: int, grace: float) -> str | None:
    if not killed:
        return None
    ranks = ", ".join(str(first_rank + local_rank) for local_rank in killed[:_MANY])
    after = f"after {_signal_name(received[0])}" if received else "after the others"
    are, were = ("ranks", "were") if len(killed) > 1 else ("rank", "was")
    return f"{are} {ranks} had not ended {grace:.0f} s {after}, and {were} killed"


def _end(one: tuple[int, int], first_rank: int) -> str:
    rank, code = f"rank {first_rank + one[0]}", one[1]
    if code >= 0:
        return f"{rank} ended with exit code {code}"
    why = " (as the kernel does when memory runs out)" if -code == getattr(signal, "SIGKILL", 0) else ""
    return f"{rank} was ended by {_signal_name(-code)}{why}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
