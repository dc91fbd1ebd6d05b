"""How a process distinguishes its own error from the consequence of another rank's failure. All ranks are in one process."""

from __future__ import annotations

import sys

import pytest
from helpers.worlds.stars import star

from trainkit.distributed.failure_handling import FailureReport, report_failure
from trainkit.errors import Preempted, ProcessFailedError

CLOSED = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18343."


def test_a_single_process_reports_nothing() -> None:
    error = ValueError("boom")
    assert report_failure(None, error) is error


def test_a_broken_connection_is_explained() -> None:
    with star(3) as channels:
        for channel in channels:
            channel.enter_run()
        report_failure(channels[2], ValueError("boom"))
        for rank in (0, 1):
            ending = report_failure(channels[rank], RuntimeError(CLOSED))
            assert isinstance(ending, ProcessFailedError)
            assert str(ending) == "rank 2 failed: ValueError: boom."
            assert channels[rank].own_failure is None
        assert channels[0].failure is not None
        assert channels[0].failure.rank == 2


def test_a_broken_connection_whose_cause_comes_later() -> None:
    with star(2) as channels:
        for channel in channels:
            channel.enter_run()
        channels[1].close()
        ending = report_failure(channels[0], RuntimeError(CLOSED))
        assert "rank 1 has died" in str(ending)


def test_a_broken_connection_without_a_cause() -> None:
    with star(2) as channels:
        channels[0].enter_run()
        channels[1].enter_run()
        error = RuntimeError(CLOSED)
        assert report_failure(channels[0], error) is error
        assert channels[0].failure is not None
        assert (channels[0].failure.rank, channels[0].failure.kind) == (0, "error")


def test_a_stop_request_to_another_rank_is_a_stop_request() -> None:
    """A connection error caused by the exit of a preempted rank becomes `Preempted`, not a failure."""
    with star(2) as channels:
        for channel in channels:
            channel.enter_run()
        ending = Preempted("SIGTERM before the first step")
        assert report_failure(channels[1], ending) is ending
        assert channels[0].failure is None
        channels[1].leave_run()
        channels[1].announce_end()
        channels[1].close()
        theirs = report_failure(channels[0], RuntimeError(CLOSED))
        assert isinstance(theirs, Preempted)
        assert theirs.code == 143
        assert str(theirs) == "rank 1 received a stop request: SIGTERM before the first step"


def test_the_previous_hook_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    with star(2) as channels:
        for channel in channels:
            endings = FailureReport(channel)
            assert sys.excepthook is not before
            endings.close()
            endings.close()
            assert sys.excepthook is before
        endings = FailureReport(channels[0])
        other = monkeypatch.setattr(sys, "excepthook", print)
        assert other is None
        endings.close()
        assert sys.excepthook is print  # a hook that trainkit did not install is kept
