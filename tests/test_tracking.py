"""`GeneralTracker` and `on_main_process`, as scripts written for Accelerate use them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import MissingMethodError
from trainkit.launch.joining import join
from trainkit.tracking import GeneralTracker, on_main_process


class Counting(GeneralTracker):
    name, requires_logging_directory, tracker = "counting", False, None

    def __init__(self, main_process_only: bool = True) -> None:
        super().__init__()
        self.main_process_only = main_process_only
        self.calls: list[Any] = []

    @on_main_process
    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> int:
        """Note it."""
        self.calls.append((values, step, kwargs))
        return 7


def test_what_a_tracker_must_have() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(MissingMethodError, match="Half: .* found no requires_logging_directory, tracker. Fix:\n    class Half"):
        Half()
    Half(_blank=True)
    tracker = Counting()
    tracker.start()
    tracker.store_init_configuration({"lr": 1})
    tracker.finish()


def test_one_process_is_the_main_one() -> None:
    tracker = Counting()
    assert tracker.log({"a": 1}, step=2, more=3) == 7
    assert tracker.calls == [({"a": 1}, 2, {"more": 3})]
    assert Counting.log.__doc__ == "Note it."


@pytest.mark.world_size(2)
def test_of_several_processes_one_is() -> None:
    # With several processes, a method with `on_main_process` runs on rank 0 only, or on all if `main_process_only` is false.
    for joined in (False, True):  # first from the launcher's variables, then from the process group
        if joined:
            from datetime import timedelta

            join(RequestedDevices(), timeout=timedelta(seconds=30))
        here, everywhere = Counting(), Counting(main_process_only=False)
        main = os.environ["RANK"] == "0"
        assert here.log({}) == (7 if main else None)
        assert len(here.calls) == main
        assert everywhere.log({}) == 7
