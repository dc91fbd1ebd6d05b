"""Under each strategy, a training loop with `Accelerator` gives the same results as `Trainer`, bit for bit."""

from __future__ import annotations

import pytest
from helpers.conformance.settings import Setting, settings
from helpers.conformance.training import EPOCHS, Way, assert_same, by_own_loop, by_trainer, combined


@pytest.mark.parametrize("setting", settings())
def test_a_training_loop_equals_the_trainer(setting: Setting) -> None:
    """With shuffling, augmentation, dropout, accumulation, clipping, and a short last accumulation window."""
    way = Way(accumulate=2, rest=1, clip=0.1, optimizer="adamw", random=True)
    own = combined(setting.launch(by_own_loop, way))
    assert own.steps == 5 * EPOCHS
    assert_same(own, combined(setting.launch(by_trainer, way)))
