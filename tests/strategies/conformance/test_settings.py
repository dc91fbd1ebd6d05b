"""The suite runs all registered strategies, including those that other packages register."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.conformance import toy
from helpers.conformance.settings import VARIABLE, Setting, settings
from helpers.conformance.training import Way, assert_same, by_trainer, combined
from helpers.support import ROOT

from trainkit import registry
from trainkit.registry import strategies

OF_ANOTHER_PACKAGE = """
from helpers.conformance.toy import AllReduceStrategy
from trainkit.registry import StrategyInfo, register_strategy


class Other(AllReduceStrategy):
    name = "other"


Other.info = StrategyInfo(path=f"{__name__}:Other", names={"other": {}})
register_strategy(Other.info)
"""


def names() -> list[str]:
    return [parameter.id for parameter in settings()]


def test_every_registered_strategy_has_cases() -> None:
    assert len(names()) == len(set(names()))
    assert {*strategies(), *toy.INFO.names} <= set(names())


def test_the_toy_is_short_and_is_what_the_docs_explain() -> None:
    text = Path(toy.__file__).read_text("utf-8")
    assert len(text.splitlines()) < 100
    assert f"```python\n{text}```" in (ROOT / "docs" / "how-to" / "custom-strategy.md").read_text("utf-8")


def test_a_module_that_registers_a_strategy(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "of_another_package.py").write_text(OF_ANOTHER_PACKAGE)
    monkeypatch.syspath_prepend(run_dir)
    monkeypatch.setattr(registry, "_registered", [])
    monkeypatch.setenv(VARIABLE, "of_another_package")
    assert "other" in names()
    other, own = (combined(Setting(name).launch(by_trainer, Way())) for name in ("other", "all_reduce"))
    assert_same(other, own)
