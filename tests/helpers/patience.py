"""How long tests wait: `from helpers.patience import PATIENCE, within`.

Tests wait at most `PATIENCE` seconds for an event. This is far longer than the slowest machine needs; it only ends tests that
hang. A test that an event happens within some seconds uses `within`. It returns exactly these seconds if no other tests run
at the same time: in `make test-slow`, which runs all tests marked `prompt`, or in `pytest` without `-n`. Otherwise it adds the
time for which a busy machine may stall. A wait that a test expects to be cut short takes `VAIN` seconds, longer than that.
"""

from __future__ import annotations

import os

__all__ = ["ALONE", "PATIENCE", "VAIN", "within"]

PATIENCE = 300.0  # seconds after which a test counts as hanging
VAIN = 200.0  # seconds of a wait that a test expects to be cut short

ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # whether no other tests run at the same time
_BUSY = 60.0  # seconds for which a machine on which several tests run may stall


def within(seconds: float) -> float:
    """A time limit in seconds: `seconds`, or more if other tests run at the same time."""
    return seconds if ALONE else seconds + _BUSY
