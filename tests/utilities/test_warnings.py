"""Filters for Lightning's classes of warnings can be installed, and hide no others."""

from __future__ import annotations

import warnings

import pytest

from trainkit.utilities.warnings import LightningDeprecationWarning, PossibleUserWarning


def test_a_filter_hides_no_other_warning() -> None:
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    with pytest.warns(UserWarning, match="another"):
        warnings.warn("another", UserWarning, stacklevel=1)
    assert issubclass(LightningDeprecationWarning, DeprecationWarning)
