"""`RangeTest`: the smoothed losses, the suggestion and the picture."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.tuner import RangeTest


def result(losses: list[float], mode: str = "exponential") -> RangeTest:
    """A result whose smoothed losses are these."""
    found = RangeTest(mode, 1e-6, 1.0, len(losses))
    found.results = {"lr": found.rates(), "loss": losses}
    return found


def curve(steps: int, at: int) -> list[float]:
    """Losses that fall most steeply at index `at`."""
    return [1 / (1 + math.exp((i - at) / 2)) for i in range(steps)]


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_the_suggestion_is_where_the_picture_is_steepest(mode: str) -> None:
    found = result(curve(40, 25), mode)
    assert found.suggestion() == found.results["lr"][25]


def test_noise_at_the_smallest_learning_rates_is_not_steep() -> None:
    """The slope over the learning rate itself, which Lightning uses, is largest at the left end."""
    losses = [loss + 1e-2 * (-1) ** i / (i + 1) for i, loss in enumerate(curve(40, 25))]
    found = result(losses)
    slopes = torch.gradient(torch.tensor(losses[10:-1]), spacing=(torch.tensor(found.results["lr"][10:-1]),))[0]
    assert slopes.argmin() == 0
    assert found.suggestion() == found.results["lr"][25]


def test_points_that_are_skipped_or_not_finite() -> None:
    losses = curve(40, 25)
    losses[2], losses[25], losses[-1] = -100.0, math.nan, -100.0
    found = result(losses)
    rates = found.results["lr"]
    assert found.suggestion() in (rates[24], rates[26])
    assert found.suggestion(skip_begin=0) in (rates[1], rates[2])
    assert found.suggestion(skip_end=0) == rates[-1]


def test_too_few_points_have_no_suggestion(caplog: Any) -> None:
    assert result(curve(12, 5)).suggestion() is None
    assert "num_training=200" in caplog.text
    assert result(curve(12, 5)).suggestion(skip_begin=0) is not None
    with pytest.raises(ConfigurationError, match="skip_end"):
        result(curve(12, 5)).suggestion(skip_end=-1)


def test_losses_are_smoothed_and_corrected_for_their_start() -> None:
    found = RangeTest("linear", 0.0, 1.0, 3)
    found._keep([2.0, 4.0, 4.0], None)
    second = (0.98 * 0.02 * 2.0 + 0.02 * 4.0) / (1 - 0.98**2)
    assert found.results["loss"][:2] == pytest.approx([2.0, second])


def test_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    shown: list[bool] = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(True))
    figure, axes = pyplot.subplots()
    found = result(curve(40, 25))
    assert found.plot(ax=axes) is figure
    assert (len(axes.lines), axes.get_xscale(), axes.get_xlabel(), shown) == (1, "log", "Learning rate", [])
    other: Any = found.plot(suggest=True, show=True)
    (own,) = other.axes
    assert own.lines[1].get_xdata()[0] == found.results["lr"][25]
    assert shown == [True]
    pyplot.close("all")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"trainkit-torch\[plot\]"):
        result(curve(40, 25)).plot()
