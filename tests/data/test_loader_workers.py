"""DataLoader workers that hang right after their fork are killed and forked again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import pytest
from helpers.data.dealt import heard, prepared, read
from helpers.data.samples import Drawing
from helpers.patience import PATIENCE, VAIN
from helpers.worlds.worlds import run_world
from torch.utils.data import DataLoader

from trainkit.data import loader_workers
from trainkit.distributed.world import World
from trainkit.errors import DataError

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="workers are not forked here")


def samples(epochs: int = 1, world: World | None = None, **options: Any) -> list[Any]:
    loader = prepared(DataLoader(Drawing(8), **{"batch_size": 2, "num_workers": 2, **options}), world or World())
    try:
        return [given.ids for epoch in range(epochs) for given in read(loader, epoch)]
    finally:
        loader.close()


def hang_at_the_fork(times: int) -> None:
    """Let the next `times` processes that are forked from this one hang before they run any code."""
    for number in range(times):
        Path(f"hangs {number}").touch()

    def hangs() -> None:
        for path in sorted(Path().glob("hangs *")):
            path.rename(f"hung {os.getpid()}")
            time.sleep(VAIN)

    os.register_at_fork(after_in_child=hangs)
    loader_workers._START_TIMEOUT = 0.5


def with_hanging_workers(times: int) -> tuple[list[Any], list[Any], list[str], list[int], int]:
    expected = samples(2)
    files = open_files()
    hang_at_the_fork(times)
    with heard() as texts:
        found = samples(2)
    over = time.monotonic() + PATIENCE
    while open_files() > files and time.monotonic() < over:  # the loader's queue threads close their files a little later
        time.sleep(0.01)
    hung = [int(path.name.split()[1]) for path in Path().glob("hung *")]
    return expected, found, texts, hung, open_files() - files


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_worker_that_hangs_is_forked_again() -> None:
    ((expected, found, texts, hung, files),) = run_world(1, with_hanging_workers, 3)
    assert found == expected
    assert len(hung) == 3
    assert sum("a DataLoader worker did not start within 0.5 s of its fork; forking it again" in text for text in texts) > 0
    assert sum("forking it again" in text for text in texts) >= 3
    for pid in hung:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert files <= 0


def with_workers_that_always_hang() -> str:
    hang_at_the_fork(20)
    loader_workers._START_TIMEOUT = 0.02
    with pytest.raises(DataError) as caught:
        samples()
    return str(caught.value)


def test_workers_that_always_hang() -> None:
    (text,) = run_world(1, with_workers_that_always_hang)
    assert "it was forked 5 times and hung before its first line" in text
    assert 'multiprocessing_context="forkserver"' in text


def with_a_worker_that_dies() -> str:
    os.register_at_fork(after_in_child=lambda: os._exit(7))
    with pytest.raises(RuntimeError) as caught:
        samples(num_workers=1)
    return str(caught.value)


def test_a_worker_that_dies_is_not_forked_again() -> None:
    (text,) = run_world(1, with_a_worker_that_dies)
    assert "exited unexpectedly" in text


class Own(ForkContext):
    """A multiprocessing context that the user defines."""


@pytest.mark.parametrize(
    "given, kept",
    [(None, False), ("fork", False), (multiprocessing.get_context("fork"), False), (Own(), True), ("forkserver", True)],
    ids=["none", "fork", "fork context", "own", "forkserver"],
)
def test_a_context_of_the_users_is_kept(given: Any, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork context is replaced by trainkit's; a context of the user or another start method is kept."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda: ForkContext())  # also where the default is not fork
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda self: iter(()))
    loader = DataLoader(Drawing(8), num_workers=1, multiprocessing_context=given)
    before = loader.multiprocessing_context
    assert list(loader_workers.started(loader)) == []
    assert (loader.multiprocessing_context is before) == kept


def test_signals_are_heard_again() -> None:
    """The signal mask is the same after the workers have ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    samples()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
