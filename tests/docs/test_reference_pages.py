"""The pages to look things up in run: reference, concepts, questions, measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs.running import name_of, pages_in, runs_in_order


@pytest.mark.docs
@pytest.mark.parametrize("page", [*pages_in("reference"), *pages_in("concepts"), *pages_in(".")], ids=name_of)
def test_the_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    runs_in_order(page, tmp_path)
