"""Links work, pages are short, and the reference names everything public. tests/docs runs the code of the pages."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from helpers.docs.pages import blocks
from helpers.docs.running import name_of, with_code
from helpers.support import ROOT
from test_house import FOR_PLUG_INS, PUBLIC

from trainkit import Trainer
from trainkit.cli.main import SUBCOMMANDS
from trainkit.module.hook_table import HOOKS

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_blocks_are_found() -> None:
    page = (
        "```python\na = 1\n```\n\n* item\n\n  ```bash\n  exit\n  ```\n\n<!-- not run: two hosts -->\n```bash\nssh\n```\n"
        '```python title="train.py"\nb\n```\n```text\nout\n```\n'
    )
    found = [(block.language, block.title, block.text, block.line, block.reason) for block in blocks(page)]
    assert found == [
        ("python", "", "a = 1\n", 2, None),
        ("bash", "", "exit\n", 8, None),
        ("bash", "", "ssh\n", 13, "two hosts"),
        ("python", "train.py", "b\n", 16, None),
        ("text", "", "out\n", 19, None),
    ]


def test_every_folder_of_pages_is_run() -> None:
    assert {page.parent.relative_to(ROOT).as_posix() for page in with_code(*PAGES)} == {
        ".", "docs", "docs/concepts", "docs/get-started", "docs/how-to", "docs/moving-over", "docs/reference"
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if not target.startswith(("http", "mailto:")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_is_long(page: Path) -> None:
    lines = page.read_text("utf-8").count("\n")
    assert lines <= 300, f"{name_of(page)} has {lines} lines: divide it"


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("[!i]*.md")), ids=name_of)
def test_a_task_says_when_to_use_it(page: Path) -> None:
    title, _, text = page.read_text("utf-8").partition("\n")
    assert title.startswith("# "), name_of(page)
    assert text.lstrip().startswith("Use this when "), name_of(page)


def test_the_reference_has_every_argument_of_the_trainer() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(Trainer) or "", re.MULTILINE)
    arguments = [name for name in inspect.signature(Trainer).parameters if name != "unknown"]
    assert [name for name in arguments if name not in documented] == []


def test_the_page_on_hooks_names_every_hook() -> None:
    text = (DOCS / "reference" / "hooks.md").read_text("utf-8")
    shared = [name for name in HOOKS if not name.startswith(("on_test", "on_predict", "on_save", "on_load"))]
    assert [name for name in shared if name not in text] == []


def test_the_page_on_the_command_line_has_every_command() -> None:
    text = (DOCS / "reference" / "command-line.md").read_text("utf-8")
    assert [command for command in SUBCOMMANDS if f"<!-- help: {command} -->" not in text] == []


def test_the_reference_has_an_entry_for_every_public_name() -> None:
    """Each public name has a `:::` line of its own, or one of its module.

    The line of a module may list its members.
    """
    public, rendered = {**PUBLIC, **FOR_PLUG_INS}, set()
    pages = "\n".join(page.read_text("utf-8") for page in sorted((DOCS / "reference").glob("*.md")))
    for identifier, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", pages, re.MULTILINE):
        owner, _, name = identifier.rpartition(".")
        if identifier in public and identifier != "trainkit":
            members = re.search(r"members: \[(.*)\]", options)
            owner, names = identifier, members[1].split(", ") if members else public[identifier]
        else:
            names = [name]
        rendered |= {id(getattr(import_module(owner), name)) for name in names}
    annotations = ("ArgsType", "LRSchedulerCallable", "LRSchedulerTypeUnion", "OptimizerCallable")
    of_transformers = ("Seq2SeqTrainingArguments", "TrainingArguments")
    constants = ("__version__", "errors", "WHOLE_WINDOW", *annotations, *of_transformers)
    everything = [(module, name) for module, names in public.items() for name in names if name not in constants]
    assert [f"{m}.{name}" for m, name in everything if id(getattr(import_module(m), name)) not in rendered] == []
