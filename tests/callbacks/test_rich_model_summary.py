from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit.callbacks import ModelSummary, RichModelSummary
from trainkit.callbacks.model_summary import summarize
from trainkit.errors import HookError, MissingPackageError


class Shaped(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 4)


def shown(**options: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        make_trainer(RichModelSummary(1), enable_model_summary=True, **options).fit(Shaped(), tiny_loader(4))
    return printed.getvalue()


def on_two() -> str:
    return shown(strategy="ddp")


def test_a_fit_prints_the_table_on_the_main_process() -> None:
    main, other = run_world(2, on_two)
    assert other == ""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in main.splitlines() if line.startswith("│")]
    assert cells == [["0", "layer", "Linear", "5", "train", "[2, 4]", "[2, 1]"]]
    assert main.count("Trainable params") == 1  # no second table
    assert [line.rstrip() for line in main.splitlines()[5:]] == summarize(Shaped()).totals()


def test_depth_0_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(RichModelSummary(max_depth=0), enable_model_summary=True).fit(Shaped(), tiny_loader(4))
    assert capsys.readouterr().out == ""


def test_the_style_of_the_first_line(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    RichModelSummary(header_style="bold").show(summarize(Shaped()))
    assert "\x1b[1mName" in capsys.readouterr().out


def test_without_rich(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else found(name))
    with pytest.raises(MissingPackageError, match=r"pip install 'trainkit-torch\[rich\]'"):
        RichModelSummary()


@pytest.mark.parametrize("base", [ModelSummary, RichModelSummary])
def test_a_summary_of_a_user(base: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Short(base):
        def show(self, summary: Any) -> None:
            print("parameters:", summary.total)

    make_trainer(Short(), enable_model_summary=True).fit(Shaped(), tiny_loader(4))
    assert capsys.readouterr().out == "parameters: 5\n"

    class Lightnings(base):
        @staticmethod
        def summarize(*arguments: Any, **options: Any) -> None: ...

    with pytest.raises(HookError, match="def show"):
        Lightnings()
