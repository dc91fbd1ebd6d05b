"""`trainkit.utilities` and `trainkit.utils`."""

from __future__ import annotations

from trainkit import CombinedLoader, seed_everything, utilities


def test_names_that_others_have_too() -> None:
    assert utilities.CombinedLoader is CombinedLoader
    assert utilities.seed_everything is seed_everything
    values = utilities.AttributeDict(lr=0.1)
    values.width = 3
    assert (values.lr, values["width"]) == (0.1, 3)
    assert {*utilities.__all__} <= {*dir(utilities)}
