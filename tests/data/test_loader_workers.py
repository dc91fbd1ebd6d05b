"""DataLoader workers: those that hang right after their fork, those that die, and how they end with the interpreter."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import re
import signal
import textwrap
import time
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.data.dealt import heard, prepared, read
from helpers.data.samples import Drawing
from helpers.patience import PATIENCE, VAIN, within
from helpers.runs.trainers import make_trainer
from helpers.support import run_python
from helpers.worlds.worlds import run_world
from torch.utils.data import DataLoader, get_worker_info

from trainkit import Accelerator, TrainModule
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
    with pytest.raises(DataError) as caught:
        samples(num_workers=1)
    return str(caught.value)


def test_a_worker_that_dies_is_not_forked_again() -> None:
    (text,) = run_world(1, with_a_worker_that_dies)
    assert "ended with exit code 7 and without an exception" in text


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
    assert list(loader_workers.start_iterator(loader)) == []
    assert (loader.multiprocessing_context is before) == kept


def test_signals_are_heard_again() -> None:
    """The signal mask is the same after the workers have ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    samples()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


# -------------------------------------------------------------------------------------------------- workers that have died


class Dying(Drawing):
    """A dataset that ends its worker, or raises, where sample 5 is fetched."""

    def __init__(self, how: Any) -> None:
        super().__init__(8)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 5 and isinstance(self.how, Exception):
            raise self.how
        if index == 5 and get_worker_info() is not None:
            os.kill(os.getpid(), self.how)
        return super().__getitem__(index)


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[:, :1].float()).mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own_loop(loader: DataLoader) -> None:
    accelerator = Accelerator(cpu=True)
    read_by_loop = accelerator.prepare(loader)
    try:
        for _ in read_by_loop:
            pass
    finally:
        read_by_loop.close()
        accelerator.end_training()


WAYS: dict[str, Any] = {
    "fit": lambda loader: make_trainer(accelerator="cpu", max_epochs=1).fit(Module(), loader),
    "validation": lambda loader: make_trainer(accelerator="cpu").validate(Module(), loader),
    "own loop": own_loop,
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "number, reason",
    [
        (signal.SIGKILL, r"killed with SIGKILL, as the kernel does where memory runs out.*DataLoader\(num_workers=1"),
        (signal.SIGBUS, r"ended by SIGBUS, because the shared memory of the workers is full \(/dev/shm: .*--shm-size"),
        (signal.SIGSEGV, r"ended by SIGSEGV: code of the dataset.*num_workers=0"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_was_killed(way: str, number: int, reason: str, persistent: bool) -> None:
    with pytest.raises(DataError, match=r"a DataLoader worker \(pid \d+\) was " + reason):
        WAYS[way](DataLoader(Dying(number), batch_size=1, num_workers=2, persistent_workers=persistent))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), ConnectionResetError("mine"), RuntimeError("mine"), EOFError("mine")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_users_stays_as_it_is(error: Exception, workers: int) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])):
        own_loop(DataLoader(Dying(error), batch_size=1, num_workers=workers))


FULL = "the shared memory of the DataLoader workers is full .*/dev/shm: .*Enlarge it"


def test_a_batch_for_which_the_shared_memory_has_no_room() -> None:
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")
    with pytest.raises(DataError, match=FULL):
        own_loop(DataLoader(Dying(error), batch_size=1, num_workers=2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch, whose iterator is not complete
def test_queues_for_which_the_shared_memory_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loader_workers._Context, "Queue", full)
    text = ""
    try:
        samples(multiprocessing_context="fork")
    except DataError as error:
        text = str(error)
    assert re.search(FULL, text)
    gc.collect()  # of the iterator, whose clean-up fails here


def test_a_batch_that_cannot_be_sent() -> None:
    """multiprocessing prints the error and drops the batch, for which the main process would wait forever."""
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="DataLoader worker process"):
        samples(collate_fn=lambda batch: lambda: batch, multiprocessing_context="fork")


# ------------------------------------------------------------------------------------------- the end of the interpreter

BEGIN = f"""
from torch.utils.data import DataLoader
from trainkit import Accelerator
from trainkit.data import loader_workers

loader_workers._GRACE_PERIOD = {int(VAIN)}  # a worker that is asked to end by SIGTERM would take that long

def prepared(**options):
    return Accelerator(cpu=True).prepare(DataLoader(range(32), 4, num_workers=2, **{{"persistent_workers": True, **options}}))

def read(loader):
    assert sum(len(batch) for batch in loader) == 32 // loader._world.size

def main(break_off=False):
    loader = prepared()
    for _ in loader:
        if break_off:
            break
"""
EXITS = {
    "module level": "loader = prepared()\nread(loader)",
    "main": "main()",
    "main, after a break": "main(break_off=True)",
    "evaluation only": "loader = prepared()\nfor _ in range(3):\n    read(loader)",
    "an iterator after a break": "iterator = iter(prepared())\nnext(iterator)",
    "an iterator of workers that are not kept": "iterator = iter(prepared(persistent_workers=False))\nnext(iterator)",
    "an exception": "for batch in prepared():\n    raise ValueError('mine')",
    "other start method": "loader = prepared(multiprocessing_context='forkserver')\nread(loader)",
}


@pytest.mark.parametrize("shape", EXITS)
def test_workers_end_with_the_interpreter(shape: str) -> None:
    """Only the exit of an interpreter shows what its workers do then."""
    Path("program.py").write_text(BEGIN + "if __name__ == '__main__':\n" + textwrap.indent(EXITS[shape], "    ") + "\n")
    done = run_python("-u", "program.py", timeout=within(60))
    if shape == "an exception":
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "ValueError: mine"
        assert done.stderr.count("Traceback") == 1
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_workers_end_with_the_interpreters_of_two_processes() -> None:
    """Only a launcher starts interpreters that end by themselves."""
    Path("program.py").write_text(BEGIN + "loader = prepared()\nread(loader)\n")
    done = run_python("-m", "trainkit", "launch", "--nproc-per-node", "2", "--cpu", "program.py", timeout=within(90))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
