"""``judge``: what the ends of the workers come to: their exit code, whether to try again, and what to tell the user."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.launch.workers import Ended, signal_name

__all__ = ["INTERRUPTED", "PREEMPTED", "Verdict", "judge"]

INTERRUPTED = 130  # the exit code after Ctrl-C
PREEMPTED = 143  # the exit code of a run that was told to end and has saved
_KILLED = 137
_MANY = 8  # ranks that a message names


@dataclass(frozen=True)
class Verdict:
    """What came of the workers.

    Attributes:
        code: the exit code.
        final: they were told to end: they are not started anew.
        first: what happened first, if something went wrong.
        last_words: what the user should read at the end. A traceback speaks for itself; a process that is killed says nothing.
    """

    code: int
    final: bool
    first: str | None
    last_words: str | None


def judge(ended: Sequence[Ended], killed: Sequence[int], received: Sequence[int], first_rank: int, grace: float) -> Verdict:
    """What came of the workers.

    Args:
        ended: those that ended by themselves, in that order.
        killed: the local ranks of those that the agent had to end.
        received: the signals that the agent got.
        first_rank: the rank of the first worker of the machine.
        grace: the seconds that they were given after a signal.
    """
    failed = [one for one in ended if one.code != 0]
    if not failed and not killed:
        return Verdict(0, True, None, None)
    interrupted = signal.SIGINT in received[:1] or any(one.code in (-signal.SIGINT, INTERRUPTED) for one in failed)
    preempted = bool(received) or any(one.code == PREEMPTED for one in failed)
    first = _end(failed[0], first_rank) if failed else None
    if interrupted:
        return Verdict(INTERRUPTED, True, first, None)
    if not preempted and first and failed[0].code == -signal.SIGTERM:  # outside a run, where there is nothing to save
        return Verdict(PREEMPTED, True, first, first)
    if preempted:
        return Verdict(_preempted(failed, received), True, first, _too_slow(killed, received, first_rank, grace))
    code = failed[0].exit_code if failed else _KILLED
    by_signal = [one for one in failed if one.code < 0]
    words = "; ".join(_end(one, first_rank) for one in by_signal[:_MANY])
    return Verdict(code, False, first, words or None)


def _preempted(failed: Sequence[Ended], received: Sequence[int]) -> int:
    if any(one.code == PREEMPTED for one in failed):
        return PREEMPTED
    passed_on = {-signal.SIGTERM} | {-number for number in received}
    otherwise = [one for one in failed if one.code not in passed_on]
    if otherwise:
        return otherwise[0].exit_code
    return failed[0].exit_code if failed else _KILLED


def _too_slow(killed: Sequence[int], received: Sequence[int], first_rank: int, grace: float) -> str | None:
    if not killed:
        return None
    ranks = ", ".join(str(first_rank + local_rank) for local_rank in killed[:_MANY])
    after = f"after {signal_name(received[0])}" if received else "after the others"
    are = f"rank{'s' if len(killed) > 1 else ''} {ranks} had"
    return f"{are} not ended {grace:.0f} s {after}, and {'were' if len(killed) > 1 else 'was'} killed"


def _end(one: Ended, first_rank: int) -> str:
    rank = f"rank {first_rank + one.local_rank}"
    if one.code >= 0:
        return f"{rank} ended with exit code {one.code}"
    why = " (as the kernel does when memory runs out)" if -one.code == getattr(signal, "SIGKILL", 0) else ""
    return f"{rank} was ended by {signal_name(-one.code)}{why}"
