"""The text of a failure, and which errors are consequences of another rank's failure."""

from __future__ import annotations

import pytest

from trainkit.distributed.failure import Failure, Runs, is_communication, is_timeout, summary

CLOSED = "[/__w/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18343. This is typically caused by …"
LATE = "[/__w/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"


@pytest.mark.parametrize(
    "error, communication, timeout",
    [
        (RuntimeError(CLOSED), True, False),
        (RuntimeError(LATE), True, True),
        (RuntimeError("Application timeout caused pair closure"), True, False),
        (RuntimeError("Rank 1 failed to pass monitoredBarrier in 1000 ms"), True, True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True, False),
        (RuntimeError("DataLoader timed out after 5 seconds"), False, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ConnectionResetError("Connection reset by peer"), False, False),  # for example, from a download in the user's code
        (ValueError(LATE), False, False),
        (None, False, False),
    ],
)
def test_errors_of_collectives(error: BaseException | None, communication: bool, timeout: bool) -> None:
    """An error that a collective raised, and whether it was a timeout, is recognized by its type and message."""
    assert is_communication(error) is communication
    assert is_timeout(error) is timeout


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError("boom\nand more"), "ValueError: boom"),
        (ValueError(), "ValueError"),
        (RuntimeError(LATE), "RuntimeError: Timed out waiting 2000ms for recv operation to complete"),
        (KeyError("[a] b"), "KeyError: '[a] b'"),
        (ValueError("x" * 1000), f"ValueError: {'x' * 300}"),
    ],
)
def test_an_error_in_one_line(error: BaseException, text: str) -> None:
    assert summary(error) == text


class BrokenError(RuntimeError):
    def __str__(self) -> str:
        return str(self.missing)  # type: ignore[attr-defined]


def test_an_error_whose_str_raises() -> None:
    """The failure must still be reported to the other ranks, as the same error."""
    assert summary(BrokenError()) == "BrokenError"
    assert not is_communication(BrokenError())
    assert not is_timeout(BrokenError())


@pytest.mark.parametrize(
    "kind, text",
    [
        ("error", "rank 3 failed: ValueError: boom"),
        ("died", "rank 3 has died (no traceback: killed, out of memory?)"),
        ("left", "rank 3 has exited: its script ended while other ranks were still in a run"),
        ("lost", "the connection to rank 3 is lost: it no longer answers"),
    ],
)
def test_the_text_of_a_failure(kind: str, text: str) -> None:
    assert str(Failure(3, kind, "ValueError: boom")) == text


def test_a_failure_as_json() -> None:
    failure = Failure(3, "error", "ValueError: boom", "x" * 100_000, run=2)
    back = Failure(**failure.record())
    assert (back.rank, back.kind, back.summary, back.time, back.run) == (3, "error", "ValueError: boom", failure.time, 2)
    assert len(back.text) == 65536


def test_runs() -> None:
    """`Runs` records which runs of a rank are open, and which have failed."""
    runs = Runs()
    assert not runs.over(1)
    assert runs.missing(1)
    assert (runs.begin(), runs.begin()) == (1, 2)
    assert runs.end(fine=True) == 2
    assert (runs.over(1), runs.over(2), runs.missing(1), runs.missing(2)) == (False, True, True, False)
    assert runs.end(fine=False) == 1
    assert (runs.over(1), runs.missing(1)) == (True, True)
    assert Runs(**runs.record()).record() == runs.record() == {"begun": 2, "open": [], "broken": [1]}
