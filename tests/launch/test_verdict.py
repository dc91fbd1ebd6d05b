"""What the ends of the workers come to."""

from __future__ import annotations

import signal

import pytest

from trainkit.launch.verdict import Verdict, judge

TERM, KILL, INT, USR1, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
FIRST, ABORTED = "rank 4 ended with exit code ", "rank 4 was ended by SIGABRT"
KILLED = "rank 5 was ended by SIGKILL (as the kernel does when memory runs out)"


# The exit codes in the order of the ends, (local rank, code); the killed; the signals; what comes of it.
@pytest.mark.parametrize("ended, killed, received, expected", [
    ([(0, 0), (1, 0)], [], [], Verdict(0, True, None, None)),
    ([(0, 0), (1, 0)], [], [TERM], Verdict(0, True, None, None)),
    # a failure
    ([(1, 3), (0, 1)], [], [], Verdict(3, False, "rank 5 ended with exit code 3", None)),
    ([(0, 0), (1, 2)], [], [], Verdict(2, False, "rank 5 ended with exit code 2", None)),
    ([(0, 1)], [1], [], Verdict(1, False, f"{FIRST}1", None)),
    ([(1, -9), (0, 1)], [], [], Verdict(137, False, KILLED, KILLED)),
    ([(0, 1), (1, -11)], [], [], Verdict(1, False, f"{FIRST}1", "rank 5 was ended by SIGSEGV")),
    ([(0, -6), (1, -15)], [], [], Verdict(134, False, ABORTED, f"{ABORTED}; rank 5 was ended by SIGTERM")),
    ([(0, -70)], [], [], Verdict(198, False, "rank 4 was ended by signal 70", "rank 4 was ended by signal 70")),
    # told to end, and saved
    ([(0, 143), (1, 143)], [], [TERM], Verdict(143, True, f"{FIRST}143", None)),
    ([(0, 143), (1, 143)], [], [], Verdict(143, True, f"{FIRST}143", None)),
    ([(0, 1), (1, 143)], [], [], Verdict(143, True, f"{FIRST}1", None)),
    ([(0, 143), (1, 0)], [], [USR1], Verdict(143, True, f"{FIRST}143", None)),
    # told to end, and not saved
    ([(0, -15), (1, -15)], [], [TERM], Verdict(143, True, "rank 4 was ended by SIGTERM", None)),
    ([(0, -15), (1, -15)], [], [HUP], Verdict(143, True, "rank 4 was ended by SIGTERM", None)),
    ([(0, -10), (1, -10)], [], [USR1], Verdict(138, True, "rank 4 was ended by SIGUSR1", None)),
    ([(0, -15), (1, 1)], [], [TERM], Verdict(1, True, "rank 4 was ended by SIGTERM", None)),
    ([(0, -15), (1, 1)], [], [], Verdict(143, True, "rank 4 was ended by SIGTERM", "rank 4 was ended by SIGTERM")),
    ([(0, 143)], [1], [TERM], Verdict(143, True, f"{FIRST}143", "rank 5 had not ended 30 s after SIGTERM, and was killed")),
    ([], [0, 1], [TERM], Verdict(137, True, None, "ranks 4, 5 had not ended 30 s after SIGTERM, and were killed")),
    ([(0, 143)], [1], [], Verdict(143, True, f"{FIRST}143", "rank 5 had not ended 30 s after the others, and was killed")),
    # Ctrl-C
    ([(0, -2), (1, -2)], [], [INT], Verdict(130, True, "rank 4 was ended by SIGINT", None)),
    ([(0, 130), (1, 1)], [], [], Verdict(130, True, f"{FIRST}130", None)),
    ([(0, 1), (1, 1)], [], [INT], Verdict(130, True, f"{FIRST}1", None)),
    ([], [0, 1], [INT, INT], Verdict(130, True, None, None)),
    ([(0, 143), (1, 143)], [], [TERM, INT], Verdict(143, True, f"{FIRST}143", None)),
])  # fmt: skip
def test_verdicts(ended: list[tuple[int, int]], killed: list[int], received: list[int], expected: Verdict) -> None:
    assert judge(ended, killed, received, 4, 30.0) == expected


def test_not_all_of_many_are_named() -> None:
    text = judge([(rank, -9) for rank in range(100)], [], [], 0, 30.0).last_words
    assert text is not None
    assert text.count("SIGKILL") == 8
