"""The Python blocks of README and docs run, links lead somewhere, and the reference has every argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.support import ROOT

from trainkit import Trainer, precision, registry
from trainkit.hooks.hook_names import HOOKS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]


@pytest.fixture
def _registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a block registers is gone after the test."""
    monkeypatch.setattr(registry, "_registered", [])
    with ExitStack() as stack:
        for table in (precision.PRECISIONS, precision.MIXED, precision.OVER_MASTERS, precision._ALIASES):
            stack.enter_context(patch.dict(table))
        yield


@pytest.mark.usefixtures("_registrations")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_docs_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "documentation", "exec"), {"__name__": "__main__"})


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_reference_has_every_argument_of_the_trainer() -> None:
    text = (ROOT / "docs" / "trainer.md").read_text("utf-8")
    arguments = [name for name in inspect.signature(Trainer).parameters if name != "unknown"]
    assert [name for name in arguments if f"| `{name}` |" not in text] == []
    assert text.count("\n## ") == 7  # the five groups of arguments, counting, and explain


def test_the_page_on_hooks_names_every_hook() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text("utf-8")
    shared = [name for name in HOOKS if not name.startswith(("on_test", "on_predict", "on_save", "on_load"))]
    assert [name for name in shared if name not in text] == []
