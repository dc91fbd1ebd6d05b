"""`CollectiveTracker`: another thread sees which collective a process is in, and which line of the script called it."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from trainkit.distributed.world import CollectiveTracker, find_call


def function_of(where: str, text: str, **names: Any) -> Callable[..., Any]:
    """Compile `text` as the module `where`, and return its function `verb`."""
    made: dict[str, Any] = {"__name__": where, "called": find_call, "sys": sys, **names}
    exec(compile(text, f"/somewhere/{where}.py", "exec"), made)
    return made["verb"]


def line() -> int:
    return sys._getframe(1).f_lineno


def test_the_line_of_a_script() -> None:
    """`find_call` returns the trainkit function that the script called, and the line of that call.

    It skips frames of torch between them, and trainkit functions that are called by trainkit.
    """
    inner = function_of("trainkit.inner", "def verb(): return called(sys._getframe())")
    module = function_of("torch.nn", "def verb(*given): return inner(*given)", inner=inner)
    outer = function_of("trainkit.accelerator", "def verb(): return module()", module=module)
    for call in (module, outer):
        assert call() == ("verb", f"test_world_collective_tracker.py:{line()}")

    first = function_of("trainkit.a", "def save_state(call): return call()\nverb = save_state")
    assert first(lambda: inner())[0] == "verb"  # the lambda belongs to a script
    in_library = function_of("torch.nn", "def verb(): return called(sys._getframe())")
    assert first(in_library)[0] == "save_state"
    within = function_of("torchmetrics.x", "def verb(): return outer()", outer=outer)
    assert within() == ("verb", "torchmetrics.x.py:1")


def test_a_frame_outside_of_the_package() -> None:
    assert find_call(None) == ("", "an unknown line")
    assert find_call(sys._getframe()) == ("", "an unknown line")


def test_what_is_counted() -> None:
    """Each collective is counted once, also inside another collective and if it raises an error."""
    tracker = CollectiveTracker()
    assert tracker.record() == {"begun": 0, "where": None, "checks": 0, "failed": []}
    with tracker, tracker:
        assert (tracker.begun, tracker.depth) == (2, 2)
    with contextlib.suppress(ValueError), tracker:
        raise ValueError
    assert (tracker.begun, tracker.depth) == (3, 0)


def test_another_thread_sees_where_it_waits() -> None:
    tracker, inside, seen = CollectiveTracker(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        seen.wait(60)

    library = function_of("torch.x", "def verb(wait): wait()")
    text = "def backward():\n    with tracker:\n        library(wait)\nverb = backward"
    backward = function_of("trainkit.x", text, tracker=tracker, wait=wait, library=library)
    thread = threading.Thread(target=lambda: backward())
    thread.start()
    assert inside.wait(60)
    found = tracker.record()
    seen.set()
    thread.join(60)
    assert (found["begun"], found["where"][0]) == (1, "backward")
    assert re.fullmatch(r"test_world_collective_tracker\.py:\d+", found["where"][1])
    assert tracker.record()["where"] is None


def test_a_known_location_is_used() -> None:
    tracker = CollectiveTracker()
    with tracker:
        tracker.location = ("forward", "train.py:3")
        assert tracker.record()["where"] == ["forward", "train.py:3"]


def test_a_collective_costs_two_calls() -> None:
    """The tracker is entered for every reduction of every step, so it must be cheap."""
    tracker, calls = CollectiveTracker(), []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        with tracker:
            pass
    finally:
        sys.setprofile(None)
    assert calls == ["__enter__", "__exit__"]
