"""`Signals` without a run. Tests of runs that receive signals: `faults/test_sigterm.py` and `faults/test_ranks_sigterm.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainkit.console import set_printing
from trainkit.trainer import signals as module
from trainkit.trainer.signals import Signals


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the signals that would have ended the process at once."""
    numbers: list[int] = []
    monkeypatch.setattr(Signals, "_end_now", lambda self, number: numbers.append(number))
    return numbers


@pytest.fixture
def signals() -> Iterator[Signals]:
    """`Signals` as in the middle of a training step."""
    with Signals(lambda: None) as entered:
        entered.working = True
        yield entered


def send(number: int) -> None:
    """Send a signal to this process. Python handles it before this function returns."""
    os.kill(os.getpid(), number)


def test_the_second_ends_at_once(signals: Signals, ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second signal to a process ends it at once."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    send(signal.SIGTERM)
    assert (signals.received, ended) == (signal.SIGTERM, [])
    send(signal.SIGTERM)
    send(signal.SIGINT)
    assert (signals.received, ended) == (signal.SIGTERM, [signal.SIGTERM, signal.SIGINT])


def test_first_signal_after_one_on_another_rank(signals: Signals, ended: list[int]) -> None:
    """The first signal to this process does not end it, even if another rank has received one before."""
    signals.received = signal.SIGUSR1  # as if another rank had received it
    send(signal.SIGTERM)
    assert (signals.received, ended) == (signal.SIGUSR1, [])
    send(signal.SIGINT)
    assert ended == [signal.SIGINT]


def test_what_the_launcher_passes_on_is_no_second(signals: Signals, ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, the same signal again within a short time is not a second signal."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert ended == []
    send(signal.SIGUSR1)
    assert ended == [signal.SIGUSR1]
    monkeypatch.setattr(module, "_REPEATED", 0.0)
    send(signal.SIGTERM)
    assert ended == [signal.SIGUSR1, signal.SIGTERM]


def test_ctrl_c_twice_is_twice_under_a_launcher_too(
    signals: Signals, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    send(signal.SIGINT)
    send(signal.SIGINT)
    assert ended == [signal.SIGINT]


@pytest.mark.parametrize("main", [True, False])
def test_the_main_process_answers_ctrl_c(signals: Signals, main: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the main process prints a message."""
    set_printing(main)
    try:
        send(signal.SIGINT)
    finally:
        set_printing()
    assert capfd.readouterr().err.count("finishing the step") == main
