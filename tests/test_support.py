"""The guard around every test, which finds changed settings, threads and child processes, can itself fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from helpers.process_state import ProcessState
from helpers.runs.tiny import TinyModule
from helpers.support import ROOT, run_python, without_gloo
from torch.utils.data import DataLoader

from trainkit import Trainer


def _set_environment() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def _set_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda: torch.set_default_dtype(torch.float64), "torch.get_default_dtype()"),
        (lambda: torch.set_default_device("meta"), "torch.get_default_device()"),
        (lambda: torch.set_default_device("cpu"), "torch function modes"),
        (lambda: torch.set_num_threads(2), "torch.get_num_threads()"),
        (lambda: torch.set_grad_enabled(False), "torch.is_grad_enabled()"),
        (lambda: torch.set_float32_matmul_precision("high"), "torch.get_float32_matmul_precision()"),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms"),
        (lambda: setattr(torch.backends.cudnn, "benchmark", True), "torch.backends.cudnn.benchmark"),
        (lambda: setattr(torch.backends.cudnn, "deterministic", True), "torch.backends.cudnn.deterministic"),
        (lambda: numpy.seterr(divide="raise"), "numpy.geterr()"),
        (_set_handler, "signal handlers: 15"),
        (_set_environment, "os.environ: LEFT_BEHIND: None → '1'"),
    ],
)
def test_a_setting_left_behind_is_named_and_restored(change: Callable[[], object], name: str) -> None:
    state = ProcessState()
    change()
    left = state.restore()
    assert len(left) == 1
    assert left[0].startswith(name)
    assert state.restore() == []


def test_a_thread_left_behind_is_named() -> None:
    state, end = ProcessState(patience=0.0), threading.Event()
    thread = threading.Thread(target=end.wait, name="left-behind")
    thread.start()
    left = state.restore()
    end.set()
    thread.join()
    assert [("left-behind" in complaint) for complaint in left] == [True]
    assert state.restore() == []


def test_a_thread_that_is_ending_is_waited_for() -> None:
    state = ProcessState()
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    assert state.restore() == []


def test_a_child_left_behind_is_named() -> None:
    state = ProcessState(patience=0.0)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    left = state.restore()
    child.terminate()
    child.join()
    assert [("child process" in complaint) for complaint in left] == [True]


def test_generators_start_alike() -> None:
    """Every test starts with generators that are seeded with 0."""
    expected = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    assert numpy.random.rand() == numpy.random.RandomState(0).rand()


def test_a_test_runs_in_a_directory_of_its_own(run_dir: Path) -> None:
    assert Path.cwd() == run_dir.resolve()
    assert list(run_dir.iterdir()) == []
    assert not run_dir.is_relative_to(ROOT)


def test_a_process_finds_the_checkout_from_anywhere(run_dir: Path) -> None:
    done = run_python("import trainkit.errors as e, torch; print(e.__file__, torch.get_num_threads())", cwd=run_dir)
    assert done.stdout.split() == [str(ROOT / "trainkit" / "errors.py"), "1"], done.stderr


def test_the_tiny_module_learns(tiny_module: TinyModule, tiny_loader: DataLoader) -> None:
    trainer = Trainer(max_epochs=20, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(tiny_module, tiny_loader)
    assert trainer.callback_metrics["train_loss"] < 0.1


def test_lines_of_gloo_are_skipped() -> None:
    """Lines of gloo are removed, also two that were written at the same time and are mixed."""
    twice = "[Gloo] Rank [Gloo] Rank 01 is connected to  is connected to 22 peer ranks.  peer ranks. "
    twice += "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 22\n\n"
    once = "[Gloo] Rank 2 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2\n"
    assert without_gloo(twice + "rank 2\n" + once + "2 of 3\n") == "rank 2\n2 of 3\n"
    assert without_gloo("1\n\n2\n") == "1\n\n2\n"
