from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import Any

import pytest
import rich
import rich.console
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit import Callback
from trainkit.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from trainkit.errors import MissingPackageError
from trainkit.utilities.summary import summarize


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
    assert cells == [["0", "layer", "Linear", "5", "train", "16", "[2, 4]", "[2, 1]"]]
    assert main.count("Trainable params") == 1  # no second table
    assert [line.rstrip() for line in main.splitlines()[5:]] == str(summarize(Shaped())).splitlines()[4:]


def test_depth_0_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(RichModelSummary(max_depth=0), enable_model_summary=True).fit(Shaped(), tiny_loader(4))
    assert capsys.readouterr().out == ""


def test_the_style_of_the_first_line(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(rich, "get_console", lambda: rich.console.Console())  # one that reads these variables
    make_trainer(RichModelSummary(header_style="bold")).fit(Shaped(), tiny_loader(4))
    assert "\x1b[1mName" in capsys.readouterr().out


def test_without_rich(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else found(name))
    with pytest.raises(MissingPackageError, match=r"pip install 'trainkit-torch\[rich\]'"):
        RichModelSummary()


def test_a_rich_progress_bar_brings_it() -> None:
    def summaries(*callbacks: Callback) -> list[type]:
        trainer = make_trainer(*callbacks, enable_model_summary=True)
        return [type(callback) for callback in trainer.callbacks if isinstance(callback, ModelSummary)]

    assert summaries() == [ModelSummary]
    assert summaries(RichProgressBar()) == [RichModelSummary]
    assert summaries(RichProgressBar(), ModelSummary()) == [ModelSummary]
