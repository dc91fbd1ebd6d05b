"""The docstrings of the plans list only attributes that exist."""

from __future__ import annotations

import re

import pytest

from trainkit.trainer.setup import Evaluation, Training


@pytest.mark.parametrize("plan", [Evaluation, Training])
def test_what_a_plan_documents_is_there(plan: type) -> None:
    names = re.findall(r"^        (\w+): ", plan.__doc__ or "", re.MULTILINE)
    assert len(names) > 5
    assert set(names) <= set(plan.__annotations__)
