"""The launcher's exit code and message, from the exit codes of all workers."""

from __future__ import annotations

import signal

import pytest

from trainkit.launch.workers import Outcome, outcome_of

TERM, KILL, INT, USR1, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
SLOW = "did not end within 30 s after"
FIRST, ABORTED = "rank 4 ended with exit code ", "rank 4 was ended by SIGABRT"
KILLED = "rank 5 was ended by SIGKILL (possibly out of memory)"


# Workers that exited as (rank, exit code), ranks that the agent killed, signals that the agent received, and the outcome.
@pytest.mark.parametrize("ended, killed, received, expected", [
    ([(4, 0), (5, 0)], [], [], Outcome(0, True, None, None)),
    ([(4, 0), (5, 0)], [], [TERM], Outcome(0, True, None, None)),
    # a failure
    ([(5, 3), (4, 1)], [], [], Outcome(3, False, "rank 5 ended with exit code 3", None)),
    ([(4, 0), (5, 2)], [], [], Outcome(2, False, "rank 5 ended with exit code 2", None)),
    ([(4, 1)], [5], [], Outcome(1, False, f"{FIRST}1", None)),
    ([(5, -9), (4, 1)], [], [], Outcome(137, False, KILLED, KILLED)),
    ([(4, 1), (5, -11)], [], [], Outcome(1, False, f"{FIRST}1", "rank 5 was ended by SIGSEGV")),
    ([(4, -6), (5, -15)], [], [], Outcome(134, False, ABORTED, f"{ABORTED}; rank 5 was ended by SIGTERM")),
    ([(4, -70)], [], [], Outcome(198, False, "rank 4 was ended by signal 70", "rank 4 was ended by signal 70")),
    # a stop request, after which the workers saved
    ([(4, 143), (5, 143)], [], [TERM], Outcome(143, True, f"{FIRST}143", None)),
    ([(4, 143), (5, 143)], [], [], Outcome(143, True, f"{FIRST}143", None)),
    ([(4, 1), (5, 143)], [], [], Outcome(143, True, f"{FIRST}1", None)),
    ([(4, 143), (5, 0)], [], [USR1], Outcome(143, True, f"{FIRST}143", None)),
    # a stop request, after which some workers did not save
    ([(4, -15), (5, -15)], [], [TERM], Outcome(143, True, "rank 4 was ended by SIGTERM", None)),
    ([(4, -15), (5, -15)], [], [HUP], Outcome(143, True, "rank 4 was ended by SIGTERM", None)),
    ([(4, -10), (5, -10)], [], [USR1], Outcome(138, True, "rank 4 was ended by SIGUSR1", None)),
    ([(4, -15), (5, 1)], [], [TERM], Outcome(1, True, "rank 4 was ended by SIGTERM", None)),
    ([(4, -15), (5, 1)], [], [], Outcome(143, True, "rank 4 was ended by SIGTERM", "rank 4 was ended by SIGTERM")),
    ([(4, -1), (5, 1)], [], [], Outcome(143, True, "rank 4 was ended by SIGHUP", "rank 4 was ended by SIGHUP")),
    ([(4, 143)], [5], [TERM], Outcome(143, True, f"{FIRST}143", f"rank 5 {SLOW} SIGTERM, and was killed")),
    ([], [4, 5], [TERM], Outcome(137, True, None, f"ranks 4, 5 {SLOW} SIGTERM, and were killed")),
    ([(4, 143)], [5], [], Outcome(143, True, f"{FIRST}143", f"rank 5 {SLOW} the other ranks, and was killed")),
    # Ctrl-C
    ([(4, -2), (5, -2)], [], [INT], Outcome(130, True, "rank 4 was ended by SIGINT", None)),
    ([(4, 130), (5, 1)], [], [], Outcome(130, True, f"{FIRST}130", None)),
    ([(4, 1), (5, 1)], [], [INT], Outcome(130, True, f"{FIRST}1", None)),
    ([], [4, 5], [INT, INT], Outcome(130, True, None, None)),
    ([(4, 143), (5, 143)], [], [TERM, INT], Outcome(143, True, f"{FIRST}143", None)),
])  # fmt: skip
def test_verdicts(ended: list[tuple[int, int]], killed: list[int], received: list[int], expected: Outcome) -> None:
    assert outcome_of(ended, killed, received, 30.0) == expected


def test_not_all_of_many_are_named() -> None:
    """The message names at most 8 of many killed workers."""
    text = outcome_of([(rank, -9) for rank in range(100)], [], [], 30.0).message
    assert text is not None
    assert text.count("SIGKILL") == 8
