"""Workers fetch their work and say what came of it, by a connection that others cannot use."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.agents import wait_until

from trainkit.errors import ConfigurationError
from trainkit.launch.delivery import HANDED, Delivery, Failed, Worker


@pytest.fixture
def delivery() -> Iterator[Delivery]:
    made = Delivery(b"work" * 100_000, {"argv": ["é"]})
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trainkit-delivery"]


def handed(delivery: Delivery) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(delivery.variables()[HANDED])
    return found


def test_work_and_results(delivery: Delivery) -> None:
    workers = [Worker(handed(delivery), rank, 0) for rank in range(3)]
    assert [worker.work() for worker in workers] == [b"work" * 100_000] * 3
    assert workers[0].settings == {"argv": ["é"]}
    workers[1].failed("calling", "RuntimeError: Connection closed by peer", follows=True)
    wait_until(lambda: len(delivery.failures) == 1)
    workers[2].failed("calling", "ValueError: no")
    reader = threading.Thread(target=workers[0].done, args=(b"result" * 100_000,))
    reader.start()
    reader.join()
    delivery.close()
    assert delivery.result == b"result" * 100_000
    assert delivery.failures == [
        Failed(1, "calling", "RuntimeError: Connection closed by peer", True),
        Failed(2, "calling", "ValueError: no", False),
    ]


def test_a_new_start_forgets_the_one_before(delivery: Delivery) -> None:
    first, late = Worker(handed(delivery), 0, 0), Worker(handed(delivery), 1, 0)
    first.work()
    late.work()
    first.failed("calling", "ValueError: no")
    wait_until(lambda: bool(delivery.failures))
    again = Worker(handed(delivery), 0, 1)
    again.work()
    late.failed("calling", "of the start before")
    again.done(b"fine")
    delivery.close()
    assert (delivery.failures, delivery.result) == ([], b"fine")


def test_strangers_and_workers_that_die(delivery: Delivery) -> None:
    where = handed(delivery)
    with pytest.raises(AuthenticationError):
        Client(where["address"], authkey=b"guessed")
    Worker(where, 1, 0)._connection.close()
    worker = Worker(where, 0, 0)
    worker.work()
    worker.done()
    delivery.close()
    assert (delivery.failures, delivery.result) == ([], None)
    worker.failed("calling", "nobody hears it")  # and what it fails by goes on


def test_it_can_be_closed_at_any_moment() -> None:
    """Be the listener in the middle of a worker's connection, or done with it, or not begun."""
    for count in range(60):
        delivery = Delivery(b"work", {})
        for rank in range(count % 3):
            worker = Worker(handed(delivery), rank, 0)
            worker.work()
            worker.done()
        delivery.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trainkit-delivery"]


@pytest.mark.skipif(os.name != "posix", reason="sockets in folders")
def test_nobody_else_reaches_the_socket(delivery: Delivery) -> None:
    socket = Path(handed(delivery)["address"])
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    delivery.close()
    assert not socket.exists()


def test_large_work_is_kept_as_long_as_it_is_needed() -> None:
    delivery = Delivery(b"large", {}, copies=2)
    for rank in range(2):
        assert delivery._work == b"large"
        worker = Worker(handed(delivery), rank, 0)
        assert worker.work() == b"large"
        worker.done()
    delivery.close()
    assert delivery._work == b""


def test_a_folder_whose_path_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("trainkit.launch.delivery.Listener", refuse)
    with pytest.raises(ConfigurationError, match="no socket can be made in .*AF_UNIX path too long.*export TMPDIR=/tmp"):
        Delivery(b"", {})
