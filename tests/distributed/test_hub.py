"""`Hub`: which messages it sends to which rank. No sockets here."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.distributed.failure import Failure
from trainkit.distributed.hub import Hub


class Star:
    """A hub, and the messages that each rank has received since the last `take`."""

    def __init__(self, size: int = 3) -> None:
        self.received: list[list[Any]] = [[] for _ in range(size)]
        self.hub = Hub(size, lambda rank, message: self.received[rank].append(message))

    def give(self, rank: int, key: str, value: Any = None) -> None:
        self.hub.receive(rank, {"exchange": key, "value": value})

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            self.hub.receive(rank, {"begin": 0})

    def end(self, *ranks: int, fine: bool = True) -> None:
        for rank in ranks:
            self.hub.receive(rank, {"end": fine})

    def fail(self, rank: int, run: int | None = 1, number: int = 1) -> None:
        self.hub.receive(rank, {"fail": Failure(rank, "error", f"of {rank}", run=run).record(), "number": number})

    def take(self, *kinds: str) -> list[list[Any]]:
        """Return and remove all received messages, by rank. With a kind, return only the messages of that kind."""
        found = [[m for m in messages if not kinds or kinds[0] in m] for messages in self.received]
        for messages in self.received:
            messages.clear()
        return found

    def failed(self) -> list[list[int]]:
        """For each rank, the failed ranks in its messages."""
        return [[m["failed"]["rank"] for m in messages] for messages in self.take("failed")]


def test_an_exchange_is_complete_when_all_ranks_have_sent_a_value() -> None:
    star = Star()
    star.give(2, "a", "two")
    star.give(0, "a", "zero")
    assert star.take() == [[], [], []]
    star.give(1, "a", "one")
    assert star.take() == [[{"result": "a", "values": ["zero", "one", "two"]}]] * 3
    assert star.hub.waiting == 0


def test_exchanges_do_not_mix() -> None:
    star = Star(2)
    star.give(0, "a", 1)
    star.give(1, "b", 2)
    assert star.take() == [[], []]
    star.give(0, "b", 3)
    assert star.take() == [[{"result": "b", "values": [3, 2]}]] * 2
    assert star.hub.waiting == 1


def test_a_withdrawn_value_does_not_count() -> None:
    star = Star(2)
    star.give(0, "a", "old")
    star.hub.receive(0, {"withdraw": "a"})
    assert star.hub.waiting == 0
    star.hub.receive(0, {"withdraw": "a"})
    star.give(1, "a", 1)
    star.give(0, "a", "new")
    assert star.take() == [[{"result": "a", "values": ["new", 1]}]] * 2


def test_an_exit_cancels_exchanges_that_need_the_rank() -> None:
    star = Star()
    star.give(0, "given", 0)
    star.give(1, "given", 1)
    star.give(0, "not given", 0)
    star.hub.on_exit(1, "died")
    received = star.take("canceled")
    assert [[m["canceled"] for m in messages] for messages in received] == [["not given"], [], []]
    assert received[0][0]["why"]["kind"] == "died"
    star.give(2, "given", 2)
    assert [m["values"] for m in star.take("result")[2]] == [[0, 1, 2]]
    star.give(2, "later", 2)
    assert [m["canceled"] for m in star.take("canceled")[2]] == ["later"]
    assert star.hub.waiting == 0


def test_the_first_failure_counts_and_cancels_exchanges() -> None:
    star = Star()
    star.begin(0, 1, 2)
    star.give(0, "a", 0)
    star.fail(2)
    assert [m["why"]["rank"] for m in star.take("canceled")[0]] == [2]
    star.fail(1)
    assert star.failed() == [[], [], []]
    star.give(1, "b", 1)
    assert [m["why"]["rank"] for m in star.take("canceled")[1]] == [2]
    assert star.hub.waiting == 0


def test_a_rank_that_asks_gets_an_acknowledgment() -> None:
    star = Star(2)
    star.fail(1, number=7)
    star.hub.receive(0, {"withdraw": "a", "number": 3})
    assert star.take("acknowledged") == [[{"acknowledged": 3}], [{"acknowledged": 7}]]


def test_a_failure_is_over_when_all_ranks_have_left_the_run() -> None:
    star = Star()
    star.begin(0, 1, 2)
    star.fail(1)
    star.end(1, fine=False)
    star.begin(1)  # it has caught the error, and continues
    star.end(0, fine=False)
    assert star.take("cleared") == [[], [], []]
    star.end(2, fine=False)
    assert star.take("cleared") == [[{"cleared": 1}]] * 3
    for rank in range(3):
        star.give(rank, "a", rank)
    assert len(star.take("result")[0]) == 1


def test_a_run_inside_another_that_fails_leaves_the_outer_one_alone() -> None:
    star = Star(2)
    star.begin(0, 1)
    star.begin(0, 1)
    star.fail(0, run=2)
    star.end(0, 1, fine=False)
    assert star.take("cleared") == [[{"cleared": 2}]] * 2
    star.hub.on_exit(1, "died")
    assert star.failed()[0] == [1]


def test_a_failure_in_a_run_that_the_other_ranks_have_left() -> None:
    """It is sent to the other ranks only if it ends the process."""
    star = Star()
    star.begin(0, 1, 2)
    star.end(0, 2)
    star.fail(1)
    assert star.failed() == [[], [], []]
    star.fail(1, run=None)  # the script did not catch it
    assert star.failed() == [[1], [1], [1]]


def test_a_fatal_error_names_the_first_failed_rank_of_the_run() -> None:
    """All ranks must name the same failed rank, whichever ends first, because only that rank prints its traceback."""
    star = Star()
    star.begin(0, 1, 2)
    star.fail(1)
    star.fail(2)
    star.fail(0)
    star.end(0, 1, 2, fine=False)
    assert star.failed() == [[1]] * 3
    star.hub.receive(2, {"fail": Failure(2, "error", "of 2").record(), "of": 1})
    assert star.take("failed rank") == [[{"failed rank": 2}]] * 3
    star.hub.receive(1, {"fail": Failure(1, "error", "of 1").record(), "of": 1})
    assert star.take() == [[{"failed rank": 1}]] * 3
    assert star.hub._failures[None].rank == 1


@pytest.mark.parametrize("of", [None, 1])
def test_a_fatal_error_of_another_run(of: int | None) -> None:
    star = Star(2)
    for run in (1, 2):
        star.begin(0, 1)
        star.fail(1, run=run)
        star.end(0, 1, fine=False)
    star.take()
    star.hub.receive(0, {"fail": Failure(0, "error", "another").record(), "of": of})
    assert star.failed() == [[0], [0]]


def test_a_failure_counts_for_ranks_that_have_not_begun_the_run() -> None:
    star = Star(2)
    star.begin(1)
    star.fail(1)
    assert star.failed() == [[1], [1]]
    star.end(1, fine=False)
    assert star.take("cleared") == [[], []]
    star.begin(0)
    star.end(0, fine=False)
    assert len(star.take("cleared")[0]) == 1


@pytest.mark.parametrize("kind", ["died", "left"])
def test_an_exit_in_a_run_is_a_failure(kind: str) -> None:
    star = Star()
    star.begin(0, 1, 2)
    star.end(2)
    star.hub.on_exit(1, kind)
    assert star.failed() == [[1], [], [1]]


def test_an_exit_after_the_run_is_not_a_failure() -> None:
    star = Star()
    star.begin(0, 1, 2)
    star.end(1, 2)
    star.hub.on_exit(1, "died")
    star.hub.on_exit(2, "left")
    received = star.take()
    assert [m["exited"]["rank"] for m in received[0] if "exited" in m] == [1, 2]
    assert not [m for m in received[0] if "failed" in m]


def test_an_exit_before_a_run_is_a_failure_when_another_rank_begins_it() -> None:
    star = Star(2)
    star.hub.on_exit(1, "left")
    assert star.failed() == [[], []]
    star.begin(0)
    assert star.failed()[0] == [1]


def test_sys_exit_in_a_run_is_a_failure() -> None:
    star = Star(2)
    star.begin(0, 1)
    star.end(1, fine=False)
    star.hub.receive(1, {"exit": ["exit", "sys.exit(3)"]})
    [failed] = star.take("failed")[0]
    assert (failed["failed"]["kind"], failed["failed"]["summary"], failed["failed"]["run"]) == ("exit", "sys.exit(3)", None)


def test_an_exit_after_a_failure_is_not_a_new_failure() -> None:
    star = Star(2)
    star.begin(0, 1)
    star.fail(1)
    star.end(1, fine=False)
    star.take()
    star.hub.on_exit(1, "died")
    received = star.take()[0]
    assert [m["exited"]["summary"] for m in received if "exited" in m] == ["of 1"]


def test_messages_of_a_rank_that_has_exited_are_ignored() -> None:
    star = Star(2)
    star.hub.on_exit(1, "died")
    star.take()
    star.give(1, "a")
    star.hub.on_exit(1, "left")
    assert star.take() == [[], []]
    assert star.hub.waiting == 0


def test_all_ranks_know_the_runs_of_the_main_process() -> None:
    star = Star(2)
    star.begin(0)
    star.end(0, fine=False)
    assert star.take("main runs")[1] == [
        {"main runs": {"begun": 1, "open": [1], "broken": []}},
        {"main runs": {"begun": 1, "open": [], "broken": [1]}},
    ]


# ------------------------------------------------------------------------------------------------- what each rank is doing


def ask(star: Star, *ranks: int) -> None:
    for rank in ranks:
        star.hub.receive(rank, {"ask": f"of {rank}"})


def answer(star: Star, *ranks: int) -> None:
    for rank in ranks:
        star.hub.receive(rank, {"answer": rank * 10})


def test_ranks_are_asked_once_for_several_questions() -> None:
    star = Star()
    ask(star, 1, 2)
    assert star.take() == [[{"asked": True}]] * 3
    answer(star, 0, 1)
    assert star.take() == [[], [], []]
    answer(star, 2)
    assert star.take() == [[], [{"result": "of 1", "values": [0, 10, 20]}], [{"result": "of 2", "values": [0, 10, 20]}]]
    answer(star, 1)  # nothing was asked
    ask(star, 0)
    answer(star, 0, 2)
    assert star.take("result") == [[], [], []]
    answer(star, 1)
    assert star.take("result")[0] == [{"result": "of 0", "values": [0, 10, 20]}]


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_has_exited_has_no_answer(before: bool) -> None:
    star = Star()
    if before:
        star.hub.on_exit(2, "left")
    ask(star, 1)
    answer(star, 0, 1)
    if not before:
        star.hub.on_exit(2, "died")
    assert star.take("result") == [[], [{"result": "of 1", "values": [0, 10, None]}], []]


def test_a_rank_that_asked_may_exit() -> None:
    star = Star()
    ask(star, 2)
    answer(star, 0)
    star.hub.on_exit(2, "died")
    ask(star, 1)
    answer(star, 1)
    assert star.take("result") == [[], [], []]
    answer(star, 0)
    assert star.take("result")[1] == [{"result": "of 1", "values": [0, 10, None]}]


def test_an_announced_exit_has_the_number_of_collectives() -> None:
    star = Star()
    star.hub.receive(2, {"exit": ["left", ""], "begun": 7})
    star.hub.on_exit(1, "died")
    assert [m["begun"] for m in star.take("exited")[0]] == [7, None]
