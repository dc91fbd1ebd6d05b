"""The optimizer steps of each strategy equal those of a loop written by hand for one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.conformance.settings import LIMITS, ONE_DEVICE, Setting, settings
from helpers.conformance.training import EPOCHS, Result, Way, assert_same, by_hand, by_trainer, combined
from helpers.worlds.worlds import WorldError

each = pytest.mark.parametrize("setting", settings())

ACCUMULATION = Way(accumulate=2)
SHORT = Way(accumulate=2, windows=2)  # `short` adds a last window with fewer samples


def assert_as_by_hand(setting: Setting, way: Way) -> Result:
    found, expected = combined(setting.launch(by_trainer, way)), by_hand(setting, way)
    limit = 0.0 if setting.info.one_device else LIMITS[way.precision or setting.precision]
    assert_same(found, expected, limit)
    return found


@each
def test_one_micro_batch_a_step(setting: Setting) -> None:
    assert assert_as_by_hand(setting, Way(windows=8)).steps == 8 * EPOCHS


@each
def test_accumulation(setting: Setting) -> None:
    assert assert_as_by_hand(setting, replace(ACCUMULATION, accumulate=3)).steps == 4 * EPOCHS


@each
def test_clipping_by_norm(setting: Setting) -> None:
    assert_as_by_hand(setting, replace(ACCUMULATION, clip=0.1))


@each
def test_clipping_by_value(setting: Setting) -> None:
    """A strategy whose engine keeps the gradients raises an error, which says what to use instead."""
    way = replace(ACCUMULATION, clip=0.01, by_value=True)
    if setting.kind.accumulates_in_engine:
        with pytest.raises(WorldError, match="ConfigurationError: .*clip"):
            setting.launch(by_trainer, way)
    else:
        assert_as_by_hand(setting, way)


def short(setting: Setting) -> Way:
    """Add a last accumulation window: one micro-batch of every process, and one more sample."""
    return replace(SHORT, rest=SHORT.window(setting) // 2 + 1)


@each
def test_a_short_last_window(setting: Setting) -> None:
    """Only rank 0 has a last micro-batch, of one sample; the other ranks run padding, which is ignored, or nothing."""
    found = assert_as_by_hand(setting, short(setting))
    assert found.steps == 3 * EPOCHS
    micro_batches = [len(own) for own in found.losses.values()]
    assert micro_batches == EPOCHS * [2 * setting.processes, 2 * setting.processes, setting.processes + 1]


@each
@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_loss_on_one_rank(setting: Setting, accumulate: int) -> None:
    """Its gradient counts as zero; a strategy that needs a loss in each step raises an error on all ranks.

    The last rank has no loss at the end of the second accumulation window, and rank 0 none at the beginning of the third.
    """
    way = replace(ACCUMULATION, accumulate=accumulate)
    window = way.window(setting)
    way = replace(way, without_loss=(2 * window - 1, 2 * window))
    if setting.needs_loss:
        with pytest.raises(WorldError, match="LossError: training_step returned no loss"):
            setting.launch(by_trainer, way)
        return
    found = assert_as_by_hand(setting, way)
    assert found.steps == (4 if setting.processes * accumulate > 1 else 2) * EPOCHS


@each
def test_no_loss_on_any_rank(setting: Setting) -> None:
    """There is no optimizer step after an accumulation window without a loss."""
    window = ACCUMULATION.window(setting)
    way = replace(ACCUMULATION, without_loss=tuple(range(window, 2 * window)))
    if setting.needs_loss:
        with pytest.raises(WorldError, match="LossError: training_step returned no loss"):
            setting.launch(by_trainer, way)
    else:
        assert assert_as_by_hand(setting, way).steps == 3 * EPOCHS


@each
def test_an_overflow_on_one_rank(setting: Setting) -> None:
    """Under a loss scale the step is skipped on all ranks, and the scale falls."""
    if "16-mixed" not in setting.kind.supported_precisions:
        pytest.skip(f"{setting.name} does not support 16-mixed")
    window = ACCUMULATION.window(setting)
    way = replace(ACCUMULATION, precision="16-mixed", overflow=(window + 1,))
    assert assert_as_by_hand(setting, way).steps == 3 * EPOCHS


def test_the_comparison_can_fail() -> None:
    setting = ONE_DEVICE
    expected = by_hand(setting, ACCUMULATION)
    for way in (replace(ACCUMULATION, clip=0.1), replace(ACCUMULATION, without_loss=(5,)), replace(ACCUMULATION, rest=1)):
        with pytest.raises(AssertionError):
            assert_same(by_hand(setting, way), expected, LIMITS["16-mixed"])
    bias = torch.nextafter(expected.parameters["net.0.bias"], torch.tensor(9.0).double())
    other = replace(expected, parameters={**expected.parameters, "net.0.bias": bias})
    with pytest.raises(AssertionError, match="net.0.bias differs by"):
        assert_same(other, expected, 0.0)
