"""The pages to start with run: README, tutorial, comparisons with other frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs.running import name_of, pages_in, runs_in_order, with_code
from helpers.support import ROOT


@pytest.mark.docs
@pytest.mark.parametrize(
    "page", [*with_code(ROOT / "README.md"), *pages_in("get-started"), *pages_in("moving-over")], ids=name_of
)
def test_the_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    runs_in_order(page, tmp_path)
