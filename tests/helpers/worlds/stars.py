"""Channels of several ranks in one process, each opened in a thread: `from helpers.worlds.stars import star`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from helpers.patience import PATIENCE

from trainkit.distributed.channel import Channel

__all__ = ["Shared", "all_at_once", "star"]


class Shared:
    """Returns the value of rank 0 on all ranks, like `World.from_main`."""

    def __init__(self) -> None:
        self._value: Future[Any] = Future()

    def of(self, rank: int) -> Callable[[Any], Any]:
        """The function for one rank."""

        def share(value: Any) -> Any:
            if rank == 0:
                self._value.set_result(value)
            return self._value.result(PATIENCE)

        return share


def all_at_once(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work(rank)` for each rank in a thread of its own. Returns the results in rank order."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(work, rank) for rank in range(size)]]


@contextmanager
def star(size: int, **options: Any) -> Iterator[list[Channel]]:
    """Open the channels of `size` ranks, and close them at the end; none of their threads may remain."""
    shared = Shared()
    channels = all_at_once(size, lambda rank: Channel.open(rank, size, "127.0.0.1", shared.of(rank), **options))
    try:
        yield channels
    finally:
        for channel in reversed(channels):
            channel.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trainkit-channel"]
