"""`Channel`: exchanges from any thread, and how soon every process knows about a failure of another process."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.launch.members import Member
from helpers.patience import ALONE, PATIENCE, VAIN, within
from helpers.worlds.stars import all_at_once, star
from helpers.worlds.worlds import start_world

from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import ProcessFailedError

pytestmark = pytest.mark.prompt

SOON = within(1.0)  # seconds, for what takes milliseconds


def eventually(channel: Channel, condition: Any) -> None:
    assert channel.wait(condition, PATIENCE)


# ------------------------------------------------------------------------------------------------------- exchanging


@pytest.mark.parametrize("size", [2, 5])
def test_exchange(size: int) -> None:
    values: list[Any] = [{"a": [1, None, "é\n"]}, 1e300, "x" * 500_000, [], True]
    with star(size) as channels:
        got = all_at_once(size, lambda rank: channels[rank].exchange("key", values[rank]))
    assert got == [values[:size]] * size


def test_a_key_can_be_used_again() -> None:
    with star(2) as channels:
        for turn in range(50):
            got = all_at_once(2, lambda rank, turn=turn: channels[rank].exchange("key", (rank, turn)))
            assert got == [[[0, turn], [1, turn]]] * 2
        assert channels[0]._link.hub.waiting == 0  # type: ignore[union-attr]


def test_many_threads_at_once() -> None:
    """Each rank has several threads, which exchange in different orders."""
    size, threads, turns = 3, 6, 30

    def work(number: int) -> None:
        rank, name = number % size, number // size
        team = ThreadExchange(f"team {name}", channels[rank], rank, size)
        for turn in range(turns):
            assert team.exchange([rank, name, turn]) == [[other, name, turn] for other in range(size)]

    with star(size) as channels:
        all_at_once(size * threads, work)
        assert channels[0]._link.hub.waiting == 0  # type: ignore[union-attr]
        assert not any(channel._waiters for channel in channels)


def test_an_exchange_has_no_time_limit() -> None:
    def give(rank: int) -> Any:
        time.sleep(0.3 * rank)
        return channels[rank].exchange("late", rank)

    with star(3) as channels:
        assert all_at_once(3, give) == [[0, 1, 2]] * 3


def test_values_that_cannot_be_exchanged() -> None:
    with star(2) as channels:
        with pytest.raises(TypeError):
            channels[0].exchange("key", object())
        with pytest.raises(ValueError, match=r"at most 16777216 bytes per process, but this value has 17000\d\d\d"):
            channels[1].exchange("key", "x" * 17_000_000)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(channels[0].exchange, "key", 1)
            eventually(channels[0], lambda: "key" in channels[0]._waiters)
            with pytest.raises(ValueError, match="'key' is already running in another thread"):
                channels[0].exchange("key", 2)
            assert channels[1].exchange("key", 3) == [1, 3] == other.result(PATIENCE)


def test_a_signal_withdraws_the_value() -> None:
    """If a signal handler raises during an exchange, the next exchange with the same key must not see the old value."""

    class InterruptError(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise InterruptError

    def send(hub: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not hub.waiting and time.monotonic() < deadline:  # until the hub has the value
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        for rank in (0, 1):
            with star(2) as channels:
                threading.Thread(target=send, args=(channels[0]._link.hub,)).start()  # type: ignore[union-attr]
                with pytest.raises(InterruptError):
                    channels[rank].exchange("key", "old")
                assert all_at_once(2, lambda rank, channels=channels: channels[rank].exchange("key", rank)) == [[0, 1]] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_closed_channel_exchanges_nothing(rank: int) -> None:
    with star(2) as channels, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channels[rank].exchange, "a", 1)
        eventually(channels[rank], lambda: "a" in channels[rank]._waiters)
        channels[rank].close()
        for attempt in (lambda: waiting.result(PATIENCE), lambda: channels[rank].exchange("b", 1)):
            with pytest.raises(ProcessFailedError, match="closed"):
                attempt()
        channels[rank].close()


def test_a_waiting_rank_calls_the_function_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the function ends the wait and withdraws the value."""
    monkeypatch.setattr("trainkit.distributed.channel._LOOK_S", 0.01)
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise ValueError("in vain")

    with star(2) as channels:
        with pytest.raises(ValueError, match="in vain"):
            channels[1].exchange("key", "old", look)
        assert all_at_once(2, lambda rank: channels[rank].exchange("key", rank, look)) == [[0, 1]] * 2
    assert len(looks) == 3


@pytest.mark.parametrize("complete", [False, True])
def test_an_interrupted_exchange_is_repeated(complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next exchange has the same number, unless all ranks had sent their values before the interruption."""
    monkeypatch.setattr("trainkit.distributed.channel._LOOK_S", 0.01)

    with star(2) as channels, ThreadPoolExecutor(1) as pool:
        teams = [ThreadExchange("team", channels[rank], rank, 2) for rank in range(2)]
        others: list[Any] = []

        def look() -> None:
            if complete:
                others.append(pool.submit(teams[0].exchange, "first").result(PATIENCE))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            teams[1].exchange("broken off", look)
        assert others == [["first", "broken off"]] * complete
        assert [team.completed for team in teams] == [int(complete)] * 2
        assert all_at_once(2, lambda rank: teams[rank].exchange(rank)) == [[0, 1]] * 2


def test_ask_returns_what_each_rank_is_doing() -> None:
    """A thread of the channel answers, so the main thread of a rank may be busy. A rank that has exited gives `None`."""
    nothing = {"begun": 0, "where": None, "checks": 0, "failed": []}
    with star(3) as channels:
        channels[1].collectives.checks = 4
        with channels[2].collectives:
            channels[2].collectives.location = ("step", "train.py:3")
            found = all_at_once(2, lambda rank: channels[rank].ask())
        assert found == [[nothing, {**nothing, "checks": 4}, {**nothing, "begun": 1, "where": ["step", "train.py:3"]}]] * 2
        channels[2].announce_end()
        eventually(channels[1], lambda: 2 in channels[1].exited)
        assert channels[1].ask() == [nothing, {**nothing, "checks": 4}, None]
        assert not any(channel._waiters for channel in channels)
    assert channels[1].ask() is None


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.distributed.channel._ANSWER_S", 0.05)
    hangs = threading.Event()
    with star(2) as channels:
        channels[1]._link._loop.call(lambda: bool(hangs.wait(PATIENCE)))
        assert channels[0].ask() is None
        hangs.set()
        monkeypatch.setattr("trainkit.distributed.channel._ANSWER_S", PATIENCE)
        assert channels[0].ask() is not None


# ------------------------------------------------------------------------------------------------- failures and exits


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_is_known_on_all_ranks(failing: int) -> None:
    received: list[list[Any]] = [[], [], []]
    with star(3) as channels:
        for channel, list_of_it in zip(channels, received, strict=True):
            channel.on_failure(list_of_it.append)
            channel.enter_run()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(channels[(failing + 1) % 3].exchange, "a", 1)
            channels[failing].traceback = "the traceback"
            channels[failing].post_failure("error", "ValueError: boom")
            with pytest.raises(ProcessFailedError, match=f"'a' cannot be completed: rank {failing} failed: ValueError: boom"):
                waiting.result(PATIENCE)
        channels[(failing + 2) % 3].post_failure("error", "another")
        for channel in channels:
            eventually(channel, lambda channel=channel: channel.failure is not None)
            failure = channel.failure
            assert failure is not None
            assert (failure.rank, failure.kind, failure.text, failure.run) == (failing, "error", "the traceback", 1)
            assert abs(time.time() - failure.time) < PATIENCE
        assert [[failure.rank for failure in list_of_it] for list_of_it in received] == [[failing]] * 3
        assert channels[failing].own_failure is not None


def test_a_failure_that_all_ranks_catch() -> None:
    received: list[Failure | None] = []
    with star(2) as channels:
        channels[0].on_failure(received.append)
        for turn in range(3):
            for channel in channels:
                channel.enter_run()
            channels[1].post_failure("error", "boom")
            eventually(channels[0], lambda: channels[0].failure is not None)
            channels[0].post_failure("error", "boom")
            channels[1].leave_run()
            with ThreadPoolExecutor(1) as pool:  # the next run waits for the ranks that are still in this one
                waiting = pool.submit(channels[1].enter_run)
                time.sleep(0.1)
                assert not waiting.done()
                channels[0].leave_run()
                waiting.result(PATIENCE)
            channels[0].enter_run()
            assert [channel.failure for channel in channels] == [None, None]
            assert [channel.own_failure for channel in channels] == [None, None]
            assert all_at_once(2, lambda rank, turn=turn: channels[rank].exchange("a", turn)) == [[turn, turn]] * 2
            for channel in channels:
                channel.leave_run()
    assert [failure if failure is None else failure.run for failure in received] == [1, None, 3, None, 5, None]


def test_a_fatal_failure_is_permanent() -> None:
    with star(2) as channels:
        channels[1].post_failure("error", "boom", fatal=True)
        for channel in channels:
            eventually(channel, lambda channel=channel: channel.failure is not None)
            with pytest.raises(ProcessFailedError, match="a run needs all 2 processes, but rank 1 failed: boom"):
                channel.enter_run()


@pytest.mark.parametrize("leaving", [0, 2])
def test_an_announced_exit_is_not_a_failure(leaving: int) -> None:
    with star(3) as channels:
        for channel in channels:
            channel.enter_run()
            channel.leave_run()
        channels[leaving].announce_end()
        channels[leaving].close()
        other = channels[1]
        eventually(other, lambda: leaving in other.exited)
        assert other.exited[leaving].kind == "left"
        assert other.failure is None
        with pytest.raises(ProcessFailedError, match=f"rank {leaving} has exited"):
            other.exchange("a", 1)
        with pytest.raises(ProcessFailedError, match=f"but rank {leaving} has exited"):
            other.enter_run()


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_script_that_ends_in_its_own_loop_has_not_failed(leaving: int) -> None:
    """With your own training loop, no rank leaves the run before its script ends, so an exit inside the run is no failure.

    It is a failure only if another rank is in a collective that the exited rank has not entered; that rank reports it.
    """
    with star(2) as channels:
        for channel in channels:
            channel.enter_run()
            with channel.collectives:
                pass
        channels[leaving].announce_end()
        channels[leaving].close()
        other = channels[1 - leaving]
        eventually(other, lambda: leaving in other.exited)
        other.report_missing_rank()  # it is not in a collective
        other.collectives.depth += 1  # as if it were still in the collective that both ranks have entered
        other.report_missing_rank()
        assert other.failure is None
        other.collectives.depth -= 1
        with other.collectives:
            other.report_missing_rank()
        eventually(other, lambda: other.failure is not None)
        assert other.failure is not None
        assert (other.failure.rank, other.failure.kind) == (leaving, "left")


@pytest.mark.parametrize("leaving", [0, 1])
def test_an_exit_in_the_middle_of_a_run_is_a_failure(leaving: int) -> None:
    with star(2) as channels:
        for channel in channels:
            channel.enter_run()
        channels[leaving].announce_exit("exit", "sys.exit(3)")
        channels[leaving].leave_run()
        channels[leaving].announce_end()
        channels[leaving].close()
        other = channels[1 - leaving]
        eventually(other, lambda: other.failure is not None)
        assert str(other.failure) == f"rank {leaving} has exited in the middle of a run, by sys.exit(3)"


def test_all_ranks_know_the_failed_ranks() -> None:
    """A rank that knows the cause of a failure reports it to the other ranks."""
    with star(3) as channels:
        channels[2].announce_end()
        eventually(channels[1], lambda: 2 in channels[1].exited)
        cause = channels[1].cause
        assert cause is not None
        channels[1].report_cause(cause)
        eventually(channels[0], lambda: channels[0].failure is not None)
        assert channels[0].failure is not None
        assert (channels[0].failure.rank, channels[0].failure.kind) == (2, "left")


def test_a_failure_is_known_on_this_process_if_the_hub_hangs() -> None:
    """All threads of the main process may hang. A rank that waits for it must still know its failure, to write its stacks."""
    hangs = threading.Event()
    with star(2) as channels:
        for channel in channels:
            channel.enter_run()
        channels[0]._link._loop.call(lambda: bool(hangs.wait(PATIENCE)))  # type: ignore[union-attr]
        channels[1].post_failure("timeout", "too long")
        assert channels[1].failure is not None
        assert (channels[1].failure.rank, channels[1].failure.kind) == (1, "timeout")
        hangs.set()
        eventually(channels[0], lambda: channels[0].failure is not None)


# ------------------------------------------------------------------------------------------------------ processes


def in_run(dying: int, how: str) -> Any:
    """Return what this rank knows about the rank that dies, and how many seconds after its death."""
    member = Member()
    member.watchdog.close()
    member.watchdog.enter()
    start = member.channel.exchange("start", time.time())
    assert len(start) == member.size
    if member.rank == dying:
        died = time.time()
        member.world.channel = None
        with open("died", "w") as file:
            file.write(repr(died))
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(0)
    with pytest.raises(ProcessFailedError) as caught:
        member.channel.exchange("never", 0)
    known = time.time()
    failure = member.channel.failure
    assert failure is not None
    with open("died") as file:
        late = known - float(file.read())
    member.close()
    return failure.rank, failure.kind, late, str(caught.value)


@pytest.mark.parametrize("dying, how", [(0, "kill"), (1, "kill"), (2, "exit")])
def test_a_killed_process_is_known_immediately(dying: int, how: str) -> None:
    ends = start_world(3, in_run, dying, how).ends()
    assert ends[dying] == (False, "ended with -9" if how == "kill" else "ended with 0")
    for rank in {0, 1, 2} - {dying}:
        fine, answer = ends[rank]
        assert fine, answer
        assert answer[:2] == (dying, "died")
        assert answer[2] < SOON
        assert f"rank {dying} has died (no traceback: killed, out of memory?)" in answer[3]


def with_children(dying: int) -> Any:
    """Like `in_run`, but the rank that dies has forked a child, which survives it. Return the seconds only."""
    member = Member()
    began = time.time()
    if member.rank == dying:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks in a process that has threads
            if os.fork() == 0:
                assert member.channel.closed
                while not os.path.exists("known") and time.time() - began < VAIN:
                    time.sleep(0.05)
                os._exit(0)
    member.channel.exchange("start", 0)
    if member.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.time()
    with pytest.raises(ProcessFailedError, match=f"rank {dying} has died"):
        member.channel.exchange("never", 0)
    late = time.time() - began
    open("known", "w").close()
    member.close()
    return late


@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_process_with_living_children(dying: int) -> None:
    fine, late = start_world(2, with_children, dying).ends()[1 - dying]
    assert fine, late
    assert late < SOON


@pytest.mark.world_size(2)
def test_an_exchange_costs_little() -> None:
    """An exchange takes about 0.2 ms on two idle cores, much less than polling. On a busy machine the fastest one counts."""
    member = Member()
    took = []
    for turn in range(100):
        began = time.perf_counter()
        member.channel.exchange(f"turn {turn}", turn)
        took.append(time.perf_counter() - began)
    assert (statistics.median(took) if ALONE else min(took)) < 0.02
    member.close()
