"""A world of threads: for code that talks to other processes through ``World.exchange`` only. It costs next to nothing.

``together(3, function, *args)`` calls ``function(world, *args)`` in three threads, each with the ``World`` of a rank.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

from helpers.patience import PATIENCE

from trainkit.distributed.world import World
from trainkit.tagged_json.message import from_bytes, to_bytes

__all__ = ["Peer", "together"]


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Any] = [None] * size


class Peer(World):
    """One of several threads that act as processes.

    Attributes:
        exchanges: how often it has met the others.
    """

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting
        self.exchanges = 0

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._met(json.dumps(value))]

    def exchange_state(self, value: Any) -> list[Any]:
        return [from_bytes(data) for data in self._met(to_bytes(value))]

    def exchange_user_objects(self, value: Any) -> list[Any]:
        return copy.deepcopy(self._met(value))

    def _met(self, value: Any) -> list[Any]:
        self.exchanges += 1
        meeting = self._meeting
        meeting.given[self.rank] = value
        meeting.barrier.wait(PATIENCE)
        given = copy.deepcopy(meeting.given)
        meeting.barrier.wait(PATIENCE)
        return given


def together(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(world, *args)`` came to on each of ``size`` threads.

    Raises:
        BaseException: what a thread has raised; the others then end as well.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(Peer(rank, size, meeting), *args)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not meeting.barrier.broken, "the threads did not all come to the same exchanges"
    return results
