"""How long tests wait: `from helpers.patience import PATIENCE, within`.

What must come is waited for with `PATIENCE`. That ends a test that hangs; it says nothing of how long things take, and
is far longer than the slowest machine needs. That something comes within a number of seconds is shown by `within`, which gives
exactly these where the test has the machine to itself: in `make test-slow`, which runs all tests marked `prompt`, or by
`pytest` without `-n`. While other tests run it gives what such a machine may take when it stalls, and what would come in vain
must be made to take still longer there.
"""

from __future__ import annotations

import os

__all__ = ["ALONE", "PATIENCE", "VAIN", "within"]

PATIENCE = 300.0  # seconds after which what has not come is taken to hang
VAIN = 200.0  # seconds that a wait takes that a test shows not to happen

ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # whether the test has the machine to itself
_BUSY = 60.0  # seconds for which a machine on which several tests run may stall


def within(seconds: float) -> float:
    """Seconds in which something must have happened, on this machine as it is."""
    return seconds if ALONE else seconds + _BUSY
