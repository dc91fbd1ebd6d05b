"""The thread of a `Watchdog`, with all ranks in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.patience import PATIENCE
from helpers.worlds.stars import star

from trainkit.distributed.failure_handling import Watchdog
from trainkit.errors import ProcessFailedError


def test_a_run_without_all_ranks() -> None:
    """A run cannot begin after a rank has exited."""
    with star(2) as channels:
        watchdogs = [Watchdog(channel) for channel in channels]
        channels[1].announce_end()
        channels[0].wait(lambda: 1 in channels[0].exited, PATIENCE)
        with pytest.raises(ProcessFailedError, match="a run needs all 2 processes, but rank 1 has exited"):
            watchdogs[0].enter()
        for watchdog in watchdogs:
            watchdog.close()
            watchdog.close()


@pytest.mark.parametrize("first", ["channel", "watchdog"])
def test_its_thread_ends_with_the_channel(first: str) -> None:
    with star(2) as channels:
        watchdogs = [Watchdog(channel) for channel in channels]
        closings: list[Callable[[], None]] = [one.close for one in (channels if first == "channel" else watchdogs)]
        for close in closings:
            close()
        for watchdog in watchdogs:
            watchdog._thread.join(PATIENCE)
            assert not watchdog._thread.is_alive()


def test_the_grace_begins_with_the_failure_and_not_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the watchdog's thread wakes up before the channel's thread has called the listeners."""
    ends: list[Any] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, failure: ends.append(failure))
    with star(2) as channels:
        channels[0].on_failure(lambda failure: time.sleep(0.3))
        watchdog = Watchdog(channels[0], grace=60.0)
        watchdog.enter()
        channels[1].enter_run()
        watchdog._known -= 3600.0  # as if the run had begun an hour ago
        channels[1].post_failure("error", "boom")
        channels[1].close()  # its exit is the last message
        assert channels[0].wait(lambda: 1 in channels[0].exited, PATIENCE)
        time.sleep(0.2)
        watchdog.close()
    assert ends == []


def test_the_main_thread_waits_for_a_rank_that_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog ends this process only if it is in a collective after the other rank has exited."""
    monkeypatch.setattr("trainkit.distributed.failure_handling._LOOK_S", 0.01)
    ended = threading.Event()
    ends: list[Any] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, failure: (ends.append(failure), ended.set()))
    with star(2) as channels:
        watchdog = Watchdog(channels[0], grace=0.01)
        watchdog.enter()
        channels[1].enter_run()
        channels[1].announce_end()
        assert channels[0].wait(lambda: 1 in channels[0].exited, PATIENCE)
        time.sleep(0.2)
        assert ends == []
        with channels[0].collectives:
            assert ended.wait(PATIENCE)
        assert (ends[0].rank, ends[0].kind) == (1, "left")
        watchdog.close()
