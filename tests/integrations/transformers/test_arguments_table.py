"""The table of all arguments of `TrainingArguments`: each of the installed transformers is in it, and the page shows it."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from trainkit.names import table

ANSWERS = ("here", "no effect", "script", "refused")
TABLE: dict[str, list[str]] = table("hugging_face")["training_arguments"]
PAGE = Path(__file__).parents[3] / "docs" / "moving-over" / "training-arguments.md"


def test_each_argument_of_the_installed_transformers_is_in_the_table() -> None:
    """A new version adds arguments: put each into trainkit/names/hugging_face.json, and read or refuse it."""
    installed = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert [name for name in installed if name not in TABLE] == []
    assert [name for name in TABLE if name not in installed] == []
    assert len(dataclasses.fields(TrainingArguments)) == 114


def test_each_argument_has_an_answer_and_a_text() -> None:
    for name, entry in TABLE.items():
        answer, text = entry
        assert answer in ANSWERS, name
        assert len(text) > 5, name
        assert not text.endswith("."), name


def test_most_arguments_are_read() -> None:
    counts = {answer: sum(entry[0] == answer for entry in TABLE.values()) for answer in ANSWERS}
    assert counts == {"here": 88, "no effect": 8, "script": 5, "refused": 18}


def test_the_page_has_a_row_for_each_argument() -> None:
    hooks: Any = import_module("docs.build_hooks")
    shown = hooks.table_of_training_arguments()
    assert "<!-- training_arguments -->" in PAGE.read_text("utf-8")
    assert [line.split("`")[1] for line in shown.splitlines()[2:]] == list(TABLE)


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry[0] == "refused"])
def test_a_refusal_says_what_to_do(name: str) -> None:
    assert any(word in TABLE[name][1] for word in ("Remove", "Use", "Set", "To ", "Trainer(", "Divide", "Call", "Convert"))
