"""Under each strategy an own loop over `Accelerator` does what `Trainer` does, bit for bit."""

from __future__ import annotations

import pytest
from helpers.conformance.settings import Setting, settings
from helpers.conformance.training import EPOCHS, Way, assert_same, by_own_loop, by_trainer, combined


@pytest.mark.parametrize("setting", settings())
def test_an_own_loop_is_the_trainer(setting: Setting) -> None:
    """With shuffling, augmentation, dropout, accumulation, clipping, and a last window that is short."""
    way = Way(accumulate=2, rest=1, clip=0.1, optimizer="adamw", random=True)
    own = combined(setting.launch(by_own_loop, way))
    assert own.steps == 5 * EPOCHS
    assert_same(own, combined(setting.launch(by_trainer, way)))
