"""`Signals` without a run. Tests of runs that receive signals: `faults/test_sigterm.py` and `faults/test_ranks_sigterm.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainkit.console import set_printing
from trainkit.errors import Preempted
from trainkit.trainer import safe_points as module
from trainkit.trainer.safe_points import Signals


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
    monkeypatch.setattr(module, "_FORWARD_SECONDS", 0.0)
    send(signal.SIGTERM)
    assert ended == [signal.SIGUSR1, signal.SIGTERM]


def test_a_terminal_that_closes(signals: Signals, ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP may come from the shell and from the kernel, and SIGTERM from the system: none of them is a second signal."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        send(number)
    assert (signals.received, ended) == (signal.SIGHUP, [])
    send(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


def test_a_hangup_after_a_signal_is_no_second(signals: Signals, ended: list[int]) -> None:
    send(signal.SIGTERM)
    send(signal.SIGHUP)
    assert (signals.received, ended) == (signal.SIGTERM, [])


def test_a_hangup_is_ignored_under_nohup(ended: list[int]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(lambda: None) as signals:
            signals.working = True
            send(signal.SIGHUP)
            assert (signals.received, signal.getsignal(signal.SIGHUP)) == (None, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == []


def test_the_users_handler_of_a_hangup_is_called_once(ended: list[int]) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: seen.append(number))
    try:
        with Signals(lambda: None) as signals:
            signals.working = True
            send(signal.SIGHUP)
            send(signal.SIGHUP)
            assert signals.received == signal.SIGHUP
            assert isinstance(signals.ending("at step 3"), Preempted)
            assert str(signals.ending("at step 3")) == "SIGHUP at step 3"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (seen, ended) == ([signal.SIGHUP], [])


def test_a_hangup_before_the_first_step() -> None:
    with Signals(lambda: None), pytest.raises(Preempted, match="SIGHUP before the first step"):
        send(signal.SIGHUP)


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
