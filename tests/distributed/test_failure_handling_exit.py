"""What a process writes before it exits: its stacks, and the error file of torchrun."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.patience import PATIENCE
from helpers.worlds.stars import star

from trainkit.distributed.failure_handling import Watchdog, report_failure, stacks

CLOSED = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18343."


def test_stacks_show_every_thread() -> None:
    ready, done = threading.Event(), threading.Event()

    def beside() -> None:
        ready.set()
        done.wait(PATIENCE)

    thread = threading.Thread(target=beside, name="the other")
    thread.start()
    ready.wait(PATIENCE)
    text = stacks()
    done.set()
    thread.join()
    assert text.startswith("\nMainThread:\n")
    assert "\nthe other:\n" in text
    assert sys._getframe().f_code.co_name in text


def test_the_error_file_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank that fails, or ends because another rank failed, writes the first error and its time to the file.

    If the process catches the error and begins another run, the file is removed.
    """
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with star(2) as channels:
        error = ValueError("boom")
        assert report_failure(channels[1], error) is error
        message = json.loads(path.read_text())["message"]
        channels[0].wait(lambda: channels[0].failure is not None, PATIENCE)
        report_failure(channels[0], RuntimeError(CLOSED))
        theirs = json.loads(path.read_text())["message"]
        watchdog = Watchdog(channels[0])
        channels[0]._failures = {}
        watchdog.enter()
        assert not path.exists()  # the process continues
        watchdog.close()
    assert theirs["message"] == "rank 0 ended because rank 1 failed: ValueError: boom\nValueError: boom"
    assert theirs["extraInfo"]["timestamp"] == message["extraInfo"]["timestamp"]
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"] == "ValueError: boom\n"
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < PATIENCE
