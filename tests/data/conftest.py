"""What the tests of the data rooms share."""

from __future__ import annotations

import pytest
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler


@pytest.fixture(autouse=True, scope="session")
def _torch_watches_workers() -> None:
    """The first workers of a process make torch set its SIGCHLD handler, for good."""
    _set_SIGCHLD_handler()
