"""Settings of the whole test process, and fixtures that many tests use.

Every test runs in its own empty directory with freshly seeded random generators, and must leave the process as it found it:
see `process_state.py`.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in every process that a test starts
os.environ["COMET_ERROR_TRACKING_ENABLE"] = "false"  # comet_ml draws at import whether it reports its errors, in a thread
os.environ["TRAINKIT_CONFIG_FILE"] = os.devnull  # ignore the trainkit config file of the user who runs the tests

import hypothesis
import numpy
import pytest
import torch
from helpers.covering import mark_others_slow
from helpers.process_state import ProcessState
from helpers.support import ROOT, STARTUP, TESTS
from helpers.worlds.worlds import run_test
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from trainkit import rng

torch.set_num_threads(1)

# Processes that tests start must not inherit that a background job of a shell ignores SIGINT, or that nohup ignores SIGHUP.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes that tests start import trainkit and the helpers from this checkout, and import `startup/sitecustomize.py`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(TESTS), str(STARTUP), os.environ.get("PYTHONPATH")]))

hypothesis.settings.register_profile("house", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("house")


def _seed() -> None:
    torch.manual_seed(0)
    rng._process_seed = None  # the seed of an earlier test's seed_everything
    numpy.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _torch_watches_workers() -> None:
    """Set torch's SIGCHLD handler before any test: torch sets it with the first DataLoader workers, and never removes it."""
    _set_SIGCHLD_handler()


@pytest.fixture(autouse=True, scope="module")
def _seeded_module() -> None:
    """Seed the generators, so that random numbers in module-scoped fixtures do not depend on earlier tests."""
    _seed()


@pytest.fixture(autouse=True)
def _clean_process(_seeded_module: None) -> Iterator[None]:
    """Fail a test that leaves a setting, a signal handler, a thread or a child process behind."""
    _seed()
    state = ProcessState()
    yield
    left = state.restore()
    if left:
        pytest.fail("the test left something behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def run_dir(_clean_process: None, tmp_path: Path) -> Iterator[Path]:
    """Make the test run in its own empty directory outside of the checkout; returns its path."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.fixture
def tiny_module() -> Any:
    """A `TrainModule` for linear regression with four inputs; see `tiny.py`."""
    from helpers.runs.tiny import TinyModule

    return TinyModule()


@pytest.fixture
def tiny_loader() -> Any:
    """Sixteen samples for `tiny_module` in four batches, always in the same order."""
    from helpers.runs.tiny import tiny_loader

    return tiny_loader()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for checkpoints that several tests of a module resume from."""
    return tmp_path_factory.mktemp("sources")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of the large grids that only `make test-slow` runs; see `covering.py`."""
    mark_others_slow(items)


def pytest_collection_finish() -> None:
    """Take all modules and tests out of the garbage collector's sight: each collection would look at a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test marked `world_size(n)` in n processes; see `worlds.py`."""
    mark = pyfuncitem.get_closest_marker("world_size")
    if mark is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run_test(pyfuncitem.obj, mark.args[0], {name: pyfuncitem.funcargs[name] for name in names})
    return True
