"""In debug mode, trainkit finds the line that initializes CUDA. The tests run torch's own code and mock only the driver."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from helpers.support import run_python

from trainkit.console import TrainkitWarning
from trainkit.launch import starting
from trainkit.launch.starting import become_agent, warn_if_cuda_initialized, watch_cuda

HERE = r"test_starting_cuda\.py:\d+"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not initialized yet, and debug mode."""
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "yes")
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "_cudart", object())
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", type(torch.cuda._lazy_seed_tracker)())
    monkeypatch.setattr(starting, "_watching", False)
    monkeypatch.setattr(starting, "_where", None)


def test_the_line_is_noted(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_cuda()
    watch_cuda()
    assert len(torch.cuda._queued_calls) == 1
    assert starting._where is None
    warn_if_cuda_initialized("devices=2")  # no warning
    torch.cuda.init()
    assert torch.cuda.is_initialized()
    found = starting._where
    assert re.fullmatch(rf"{HERE}: torch\.cuda\.init\(\)", found or "")
    with pytest.warns(
        TrainkitWarning, match=rf"notebook_launcher starts processes, but .* has already initialized CUDA, at {HERE}: torch"
    ):
        warn_if_cuda_initialized("notebook_launcher")


def test_a_script_that_starts_its_processes_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(launch: str) -> None:
        raise RuntimeError(launch)  # so that this process is not replaced by the agent

    monkeypatch.setattr("trainkit.launch.starting.start_command", lambda processes: ["python", "train.py"])
    monkeypatch.setattr("trainkit.launch.starting.warn_if_cuda_initialized", warned)
    with pytest.raises(RuntimeError, match="devices=2"):
        become_agent(2)


def test_a_thread(gpu: None) -> None:
    """In another thread than the main thread, only the name of the thread is known."""
    watch_cuda()
    thread = threading.Thread(target=torch.cuda.init, name="loads")
    thread.start()
    thread.join()
    assert starting._where == "an unknown line of the thread 'loads'"


def test_an_earlier_line(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If CUDA was initialized before `import trainkit`, the line is unknown."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    watch_cuda()
    assert starting._where == "a line before 'import trainkit' (to see which, import trainkit first)"


def test_nothing_is_watched_without_debug_mode(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_DEBUG_MODE")
    watch_cuda()
    torch.cuda.init()
    assert starting._where is None


@pytest.mark.parametrize("value, watching", [("1", True), ("0", False)])
def test_watching_begins_with_the_import(value: str, watching: bool) -> None:
    text = "import trainkit, sys; print(getattr(sys.modules.get('trainkit.launch.starting'), '_watching', None))"
    done = run_python(text, env={"TRAINKIT_DEBUG_MODE": value})
    assert done.stdout.strip() == str(watching), done.stderr
