"""What the main process sends in an exchange: values that are collected go to it only, and equal values are sent once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.worlds.stars import all_at_once, star

from trainkit.distributed import hub as module
from trainkit.distributed.hub import Hub
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import ProcessFailedError


@pytest.fixture
def received() -> list[list[Any]]:
    return [[], [], []]


@pytest.fixture
def hub(received: list[list[Any]]) -> Hub:
    return Hub(3, lambda rank, message: received[rank].append(message))


def collect(hub: Hub, *ranks: int) -> None:
    for rank in ranks:
        hub.receive(rank, {"exchange": "a", "value": rank * 10, "collect": True})


def test_collected_values_go_to_the_main_process_only(hub: Hub, received: list[list[Any]]) -> None:
    collect(hub, 1, 2, 0)
    assert received == [[{"collected": "a", "values": [0, 10, 20]}], [], []]
    assert hub.waiting == 1
    hub.receive(0, {"reply": "a", "value": "fine"})
    assert [messages[-1] for messages in received] == [{"result": "a", "values": ["fine"]}] * 3
    assert hub.waiting == 0


def test_a_failure_before_the_reply_cancels_it_on_all_ranks(hub: Hub, received: list[list[Any]]) -> None:
    for rank in range(3):
        hub.receive(rank, {"begin": 0})
    collect(hub, 0, 1, 2)
    hub.receive(2, {"fail": {"rank": 2, "kind": "error", "summary": "x", "text": "", "run": 1, "time": 0.0}})
    hub.receive(0, {"reply": "a", "value": "fine"})  # sent before the main process knew
    assert [[m["canceled"] for m in messages if "canceled" in m] for messages in received] == [["a"]] * 3
    assert not any("result" in m for messages in received for m in messages)


def test_an_exit_of_a_rank_that_has_sent_its_value_cancels_nothing(hub: Hub, received: list[list[Any]]) -> None:
    collect(hub, 0, 1, 2)
    hub.on_exit(2, "left")
    hub.receive(0, {"reply": "a", "value": "fine"})
    assert [[m["values"] for m in messages if "result" in m] for messages in received] == [[["fine"]], [["fine"]], []]


@pytest.mark.parametrize("size", [2, 4])
def test_collect(size: int) -> None:
    answered: list[Any] = []

    def work(rank: int) -> list[Any]:
        group = ThreadExchange("group", channels[rank], rank, size)

        def answer(values: list[Any]) -> Any:
            answered.append((rank, values))
            return {"of": len(values), "é": None}

        got = [group.collect([rank, "x"], answer), group.exchange(rank), group.collect(None, answer)]
        assert group.completed == 3
        return got

    with star(size) as channels:
        got = all_at_once(size, work)
    reply = {"of": size, "é": None}
    assert got == [[reply, list(range(size)), reply]] * size
    assert answered == [(0, [[rank, "x"] for rank in range(size)]), (0, [None] * size)]


def test_an_answer_that_raises_ends_the_wait_of_the_other_ranks() -> None:
    def work(rank: int) -> Any:
        def answer(values: list[Any]) -> Any:
            raise ZeroDivisionError("odd")

        try:
            return channels[rank].collect("key", 1, answer)
        except ZeroDivisionError as error:
            channels[0].post_failure("error", str(error), fatal=True)
            return error
        except ProcessFailedError as error:
            return error

    with star(2) as channels:
        first, second = all_at_once(2, work)
    assert isinstance(first, ZeroDivisionError)
    assert "odd" in str(second)


def test_equal_values_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are equal in Python, but not in JSON, stay apart."""
    lines: list[bytes] = []
    encode = module.encode
    monkeypatch.setattr(module, "encode", lambda message: lines.append(encode(message)) or lines[-1])
    value, size = "x" * 1000, 5
    values = [value, value, value, 1, True]
    with star(size) as channels:
        got = all_at_once(size, lambda rank: channels[rank].exchange("key", values[rank]))
    assert got == [values] * size
    assert [[type(one) for one in each] for each in got] == [[str, str, str, int, bool]] * size
    (line,) = [line for line in lines if b'"runs"' in line]  # encoded once, for all ranks
    assert line.count(value.encode()) == 1
    assert json.loads(line)["runs"][0][1] == 3
