"""`get_filesystem` opens paths and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.utilities.cloud_io import get_filesystem


def test_of_a_path_and_of_a_url(tmp_path: Path) -> None:
    local = get_filesystem(tmp_path / "notes.txt", auto_mkdir=True)
    with local.open(str(tmp_path / "new" / "notes.txt"), "w") as file:
        file.write("text")
    assert (tmp_path / "new" / "notes.txt").read_text() == "text"
    assert get_filesystem("memory://runs").protocol == "memory"
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from trainkit.utilities.cloud_io import nonsense  # noqa: F401
