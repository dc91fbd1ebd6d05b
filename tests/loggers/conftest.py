"""wandb, for the files whose tests ask for it with ``pytestmark``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trainkit.loggers import WandbLogger


@pytest.fixture(scope="module")
def wandb_service() -> Iterator[None]:
    """wandb's own process and threads, offline: started once for these tests and gone after them."""
    import wandb

    with pytest.MonkeyPatch.context() as environment:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            environment.delenv(key)
        environment.setenv("WANDB_MODE", "offline")
        environment.setenv("WANDB_SILENT", "true")
        wandb.setup()
        yield
        wandb.teardown()


@pytest.fixture
def no_open_wandb_runs() -> Iterator[None]:
    """End what a test leaves open."""
    import wandb

    yield
    for started in WandbLogger._started:
        started.run.finish()
    WandbLogger._started.clear()
    wandb.finish()
